# Every target sets up what it needs: a virtual environment in .venv with the pinned versions of
# constraints.txt and the package itself, built in place. Set-up is skipped when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
ARGS ?=

SOURCES := setup.py pyproject.toml $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.cpp csrc/*/*.h csrc/*/*/*.cpp csrc/*/*/*.h)
FORMATTED := $(filter %.cpp %.h,$(SOURCES))

# Test processes with one thread each: the suite's time goes into many small steps, not into large tensors. `make test`
# has three, since ranks of process groups wait for each other while a core is free.
# Inductor's cache does not notice that an op's outputs changed, so each environment has its own.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(VENV)/inductor
WORKERS := 2
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile
# The oldest Triton that the kernels are for; constraints.txt pins the newest.
OLDEST_TRITON := 3.6.0

# Its source is read, not imported: the stand-in of the tests is compared with it.
FLASH_ATTN_4 := 4.0.0b36

# The Megatron-cores beside the one of constraints.txt. They ask for Python 3.12, and their Python runs on 3.11 too.
MEGATRONS := 0.17.1 0.18.2 0.19.2

# The oldest Transformers and the last 4, each with the tokenizers that it asks for and a
# datasets of their time, beside the one of constraints.txt.
TRANSFORMERS := 4.50.3+0.21.4 4.57.6+0.22.1

# The DeepSpeed whose parser reads the planner's exports, without its kernels, and what it imports beside the rest.
DEEPSPEED := deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 py-cpuinfo==9.0.0

.PHONY: venv commands demo test test-runs test-kernels test-oldest-triton test-megatrons test-transformers \
	test-deepspeed test-arm bench lint format docs clean

# All that targets need: pip installs while the extension compiles.
venv:
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/.installed $(VENV)/.requirements

# What the commands need alone, for `make demo`.
commands:
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/.installed $(VENV)/.commands

# torch goes first and alone, so that nothing else chooses its build; then what compiles.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --constraint constraints.txt setuptools wheel ninja pybind11 numpy
	touch $@

$(VENV)/.commands: $(VENV)/.torch
	$(PIP) --constraint constraints.txt matplotlib pydantic rich safetensors typer
	touch $@

$(VENV)/.requirements: $(VENV)/.commands
	$(PIP) --requirement constraints.txt
	$(PIP) --no-deps --upgrade --target $(VENV)/flash-attn-4 flash-attn-4==$(FLASH_ATTN_4)
	touch $@

$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	touch $@.begun  # a file that changes while it compiles is newer
	$(PIP) --no-build-isolation --no-deps --editable .
	mv $@.begun $@

# The main job. TEXT=path trains on your own file or folder; ARGS passes options through (see --help).
demo: commands
	@$(BIN)/python -m benchmarks.demo --tp 2 --sequence-parallel $(if $(filter undefined,$(origin TEXT)),,--text "$(TEXT)") $(ARGS)

# All but whole runs and further plans; of the tests that compile or execute Triton kernels without a GPU, one case each.
test: WORKERS := 3
test: venv
	$(TEST_ENV) $(PYTEST) -m "not runs"

# Commands and examples from their start to their end, and the plans of training that `make test` leaves out.
test-runs: venv
	$(TEST_ENV) $(PYTEST) -m runs

# The tests that compile or execute Triton kernels without a GPU, all cases.
test-kernels: venv
	$(TEST_ENV) $(PYTEST) --kernels all -m "executed or aot"

# What depends on Triton itself: launches, and every kernel compiled and executed once.
OLDEST := test_launch or read_the_clock or (test_norms and rms_norm and 34000) or \
	(test_scaled_masked_softmax and too_long) or \
	(test_options and striped) or (test_compiled_code and (bfloat16-4096-sm_90 or bfloat16-32000-90 or \
	bfloat16-128-128-90 or bfloat16-64-sm_90-causal))

test-oldest-triton: venv
	test -d $(VENV)/triton-$(OLDEST_TRITON) || $(PIP) --no-deps \
		--target $(VENV)/triton-$(OLDEST_TRITON) triton==$(OLDEST_TRITON)
	$(TEST_ENV) PYTHONPATH=$(CURDIR)/$(VENV)/triton-$(OLDEST_TRITON) $(PYTEST) --kernels all tests/kernels \
		tests/benchmarks/test_simulated_link.py -k "$(OLDEST)"

test-megatrons: venv
	for version in $(MEGATRONS); do \
		folder=$(CURDIR)/$(VENV)/megatron-$$version; \
		test -d $$folder || $(PIP) --no-deps --only-binary=:all: \
			--python-version 3.12 --ignore-requires-python --target $$folder megatron-core==$$version || exit 1; \
		$(TEST_ENV) PYTHONPATH=$$folder $(PYTEST) tests/integrations/test_megatron*.py || exit 1; \
	done

test-transformers: venv
	for versions in $(TRANSFORMERS); do \
		folder=$(CURDIR)/$(VENV)/transformers-$${versions%+*}; \
		test -d $$folder || $(PIP) --no-deps --target $$folder \
			transformers==$${versions%+*} tokenizers==$${versions#*+} "huggingface_hub<1" datasets==3.6.0 requests \
			urllib3 idna certifi charset-normalizer || exit 1; \
		$(TEST_ENV) PYTHONPATH=$$folder $(PYTEST) tests/integrations/test_huggingface*.py || exit 1; \
	done

test-deepspeed: venv
	folder=$(CURDIR)/$(VENV)/deepspeed; \
	test -d $$folder || $(PIP) --no-deps --no-build-isolation --target $$folder $(DEEPSPEED) || exit 1; \
	$(TEST_ENV) DS_ACCELERATOR=cpu PYTHONPATH=$$folder $(PYTEST) tests/planner/export/test_export_parsers.py -k deepspeed

# The CPU kernels for Arm: built by a cross-compiler into a program without torch, tests/support/arm/server.cpp, in which the
# ops of the tests then run. Debian has what it needs: g++-aarch64-linux-gnu qemu-user.
ARM := build/arm
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_TESTS := tests/arm tests/ops --deselect tests/ops/test_freed_memory.py::test_every_tensor_of_every_compiled_kernel_is_freed
ARM_OBJECTS := $(patsubst %.cpp,$(ARM)/%.o,$(filter csrc/cpu/%.cpp,$(SOURCES)) tests/support/arm/server.cpp)

-include $(ARM_OBJECTS:.o=.d)

$(ARM)/%.o: %.cpp | $(VENV)/.torch
	@mkdir -p $(@D)
	$(ARM_CXX) -MMD -O3 -std=c++17 -fno-math-errno -fno-trapping-math -fvisibility=hidden -Wno-psabi \
		-Wno-attributes -DTORCH_TARGET_VERSION=0x020b000000000000 \
		-isystem $(wildcard $(VENV)/lib/python3*/site-packages/torch/include) -c $< -o $@

$(ARM)/server: $(ARM_OBJECTS)
	$(ARM_CXX) -static $^ -o $@

# With the instructions for bfloat16, and without them what they change: csrc/cpu/attention/product.h.
test-arm: venv $(ARM)/server
	$(TEST_ENV) $(PYTEST) --arm "qemu-aarch64 -cpu max $(ARM)/server" $(ARM_TESTS)
	$(TEST_ENV) $(PYTEST) --arm "qemu-aarch64 -cpu cortex-a72 $(ARM)/server" tests/arm tests/ops/attention

# OPS="bias_gelu ..." chooses ops, ARGS="--quick" and the like are passed through.
bench: venv
	$(BIN)/python -m benchmarks $(OPS) $(ARGS)

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(FORMATTED)

# The documentation as a site in build/site. Any warning fails: a broken link, a docstring that cannot be parsed.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: docs/requirements.txt $(VENV)/.requirements
	$(PIP) -r docs/requirements.txt -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info parallel_ops/_C*.so parallel_ops/_nccl*.so
