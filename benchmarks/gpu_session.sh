#!/usr/bin/env bash
# Builds, tests and benchmarks this tree on a machine with an NVIDIA GPU, without a package registry.
#
#   [CALL=1 | STEPS="tests overlap"] benchmarks/gpu_session.sh OUTPUT_FOLDER [--shapes 1 | other arguments of python -m benchmarks]
#
# Needs python3 (3.10 or later) with torch, triton, setuptools, pytest, pytest-xdist, hypothesis, rich, typer, matplotlib
# and transformers, and a C++ compiler.
# The package is installed into a temporary folder; the tree and the Python installation stay as they are.
# OUTPUT_FOLDER gets summary.txt, whose end says how each step ended, and results.tar.gz with one log a step, the CSV file
# and the charts. A step that fails or exceeds its time limit does not keep the next from running; the exit status is then
# 1. Where the tree is not a git checkout, set PARALLEL_OPS_COMMIT to the commit that the results should carry. PYTHON can
# be set too, STEPS to some of "choice tests models attention benchmarks overlap" (all by default), and in seconds
# BUILD_LIMIT, CHOICE_LIMIT, TEST_LIMIT, MODEL_LIMIT, ATTENTION_LIMIT, BENCHMARK_LIMIT and OVERLAP_LIMIT.
# CALL=1, 2 or 3 are the steps in three calls whose limits add up to nine minutes each: 1 which attention is taken, whether
# it is right, TFLOP/s and the ops at one shape; 2 the tests; 3 models and the overlapped linears.
set -uo pipefail

if [[ $# -lt 1 ]]; then
  echo "usage: $0 OUTPUT_FOLDER [arguments of python -m benchmarks]" >&2
  exit 2
fi
mkdir -p "$1" || exit 2
output=$(cd "$1" && pwd)
shift
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
cd "$tree" || exit 2
case ${CALL-} in
  "") ;;
  1) STEPS="choice attention benchmarks" BUILD_LIMIT=${BUILD_LIMIT:-120} CHOICE_LIMIT=${CHOICE_LIMIT:-60}
    ATTENTION_LIMIT=${ATTENTION_LIMIT:-130} BENCHMARK_LIMIT=${BENCHMARK_LIMIT:-160}
    [[ $# -gt 0 ]] || set -- --dtype bfloat16 --shapes 1 ;;
  2) STEPS=tests BUILD_LIMIT=${BUILD_LIMIT:-120} TEST_LIMIT=${TEST_LIMIT:-360} ;;
  3) STEPS="models overlap" BUILD_LIMIT=${BUILD_LIMIT:-120} MODEL_LIMIT=${MODEL_LIMIT:-240} OVERLAP_LIMIT=${OVERLAP_LIMIT:-120} ;;
  *)
    echo "CALL must be 1, 2 or 3, got $CALL" >&2
    exit 2
    ;;
esac
failed=0
: >"$output/summary.txt"

# wanted NAME: is the step among those asked for?
wanted() { [[ " ${STEPS-choice tests models attention benchmarks overlap} " == *" $1 "* ]]; }
verdicts=()

# step NAME LIMIT_SECONDS COMMAND...
step() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  echo "== $name" | tee -a "$output/summary.txt"
  timeout --kill-after=10 "$limit" "$@" >"$output/$name.log" 2>&1 || status=$?
  [[ $status -eq 0 ]] || failed=1
  tail -n "${TAIL_LINES:-25}" "$output/$name.log" | tee -a "$output/summary.txt"
  local verdict="passed"
  [[ $status -eq 0 ]] || verdict="FAILED, exit $status"
  [[ $status -ne 124 && $status -ne 137 ]] || verdict="TIME LIMIT of $limit s"
  verdicts+=("$(printf '%-12s %4d s  %s' "$name" $((SECONDS - start)) "$verdict")")
  echo "== ${verdicts[-1]}" | tee -a "$output/summary.txt"
}

install_package() {
  # A copy, so that no build files are left in the tree; without the bytecode and binaries of another machine.
  mkdir "$scratch/source" &&
    tar -c --exclude=.git --exclude=.venv --exclude=build --exclude='*.so' --exclude=__pycache__ --exclude='*.egg-info' . |
    tar -x -C "$scratch/source" &&
    cd "$scratch/source" &&
    "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --no-compile \
      --target "$scratch/site" .
}
export -f install_package
export python scratch

TAIL_LINES=20 step machine 20 bash -c 'nvidia-smi; "$python" -c "
import sys, torch, triton
print(\"python\", sys.version.split()[0], \"torch\", torch.__version__, \"triton\", triton.__version__)
print(torch.cuda.get_device_name(), \"driver sees\", torch.cuda.device_count(), \"GPU\")"'
MAX_JOBS=${MAX_JOBS:-$(nproc)} step build "${BUILD_LIMIT:-150}" bash -c install_package

# The installed package comes first: the source tree has no compiled extension, and must not hide the one that has.
export PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
export PYTHONPATH="$scratch/site:$tree${PYTHONPATH:+:$PYTHONPATH}"
# Of the tests over process groups those that a single GPU can run.
device_tests=(tests/ops tests/tensor_parallel/test_linear_cross_entropy.py tests/tensor_parallel/test_parallel_linears.py
  tests/comm/test_capture.py tests/benchmarks/test_simulated_link.py tests/comm/transport/test_stream_signal.py tests/kernels/test_launch.py)
if wanted choice; then
  TAIL_LINES=60 step choice "${CHOICE_LIMIT:-90}" "$python" -m benchmarks.attention_choice
fi
if wanted tests; then
  # Some processes beside each other: most of the time goes into compiling kernels.
  step tests "${TEST_LIMIT:-300}" "$python" -m pytest -q -p no:cacheprovider -n "${TEST_PROCESSES:-14}" --tb=short \
    -k "cuda or gpu or bounds or named" "${device_tests[@]}"
fi
if wanted models; then
  TAIL_LINES=30 step models "${MODEL_LIMIT:-150}" "$python" -m benchmarks huggingface --large --dtype bfloat16 \
    --batch 2 --compiled --liger
fi
if wanted attention; then
  TAIL_LINES=80 step attention "${ATTENTION_LIMIT:-150}" "$python" -m benchmarks flash_attention --device cuda \
    --dtype bfloat16 --output "$output"
fi
if wanted benchmarks; then
  mapfile -t ops < <("$python" -m benchmarks --list | grep -v flash_attention)
  TAIL_LINES=250 step benchmarks "${BENCHMARK_LIMIT:-460}" "$python" -m benchmarks "${ops[@]}" --device cuda \
    --output "$output" "$@"
fi
if wanted overlap; then
  TAIL_LINES=60 step overlap "${OVERLAP_LIMIT:-120}" "$python" -m benchmarks overlap --device cuda --output "$output"
fi

(cd "$output" && find . -maxdepth 1 -type f ! -name summary.txt ! -name results.tar.gz -printf '%P\0' |
  tar --null --files-from=- --remove-files -czf results.tar.gz)
printf '%s\n' "" "${verdicts[@]}" | tee -a "$output/summary.txt"
exit "$failed"
