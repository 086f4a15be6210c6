"""What installing and importing the package promise."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import parallel_ops

ROOT = Path(__file__).parents[2]


def python(code: str, **env: str) -> str:
    """The output of ``code`` in a fresh interpreter, started outside the source tree."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env={**os.environ, **env}, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_brings_in_no_triton_and_touches_no_gpu():
    code = """
import sys, torch
torch.cuda._lazy_init = None  # calling it would raise
before = set(sys.modules)
from parallel_ops import bias_gelu
new = {name.partition('.')[0] for name in set(sys.modules) - before}
print(sorted(new & {'triton', 'numpy', 'matplotlib', 'rich', 'typer'}), torch.cuda.is_initialized())
"""
    assert python(code) == "[] False"


def test_the_citation_names_this_version():
    assert f"\nversion: {parallel_ops.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_names_load_torch_at_first_use_alone():
    code = """
import sys, parallel_ops, parallel_ops.planner
assert 'torch' not in sys.modules
assert {'bias_gelu', 'ops', 'planner', 'vocab_parallel_cross_entropy'} <= set(dir(parallel_ops))
assert not hasattr(parallel_ops, 'no_such_op') and 'torch' not in sys.modules
from parallel_ops import *
assert bias_gelu is parallel_ops.ops.bias_gelu and 'torch' in sys.modules
import torch
print(torch.ops.parallel_ops.bias_gelu(torch.zeros(1, 2), None, True).tolist())
"""
    assert python(code) == "[[0.0, 0.0]]"


def test_every_room_is_an_attribute_of_the_package():
    folder = Path(parallel_ops.__file__).parent
    rooms = sorted(path.parent.name for path in folder.glob("[!_]*/__init__.py"))
    code = f"""
import parallel_ops
rooms = [room for room in {rooms} if room != "triton_kernels"]  # launched by ops alone
assert set(rooms) <= set(dir(parallel_ops)), rooms
print([getattr(parallel_ops, room).__name__.removeprefix("parallel_ops.") for room in rooms] == rooms)
"""
    assert "train" in rooms and python(code) == "True"


def test_cpu_ops_work_without_triton():
    code = """
import sys
sys.modules['triton'] = None  # importing it would raise
import torch, parallel_ops
x = torch.randn(3, 8, requires_grad=True)
parallel_ops.bias_gelu(x, torch.zeros(8)).sum().backward()
print(tuple(x.grad.shape))
"""
    assert python(code) == "(3, 8)"


@pytest.mark.skipif(shutil.which("nm") is None or sys.platform != "linux", reason="needs nm (binutils) on Linux")
def test_extension_uses_the_stable_abi_alone():
    """Every symbol taken from torch is one of its C shims, and from Python one of the limited API."""
    extension = Path(parallel_ops.__file__).parent / "_C.abi3.so"
    output = subprocess.run(["nm", "-D", "--undefined-only", extension], capture_output=True, text=True, check=True)
    symbols = [line.split()[-1] for line in output.stdout.splitlines()]
    torch_symbols = [s for s in symbols if "torch" in s or "c10" in s or "_ZN2at" in s]
    assert any(s.startswith("torch_library_impl") for s in torch_symbols)
    assert [s for s in torch_symbols if not s.startswith(("aoti_torch_", "torch_"))] == []
    assert [s for s in symbols if s.startswith("Py")] == ["PyModule_Create2"]


def test_a_missing_compiler_is_one_clear_sentence(tmp_path):
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path],
        cwd=ROOT, env={**os.environ, "CXX": "no-such-compiler"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("parallel_ops: no C++ compiler found (looked for 'no-such-compiler')")
    assert "Traceback" not in result.stderr


def hook(folder, call, environment=None):
    """The value of a call of the build backend, from a Python that finds setuptools alone, as under build isolation.

    Args:
        environment: folder of packages that stands for the environment that pip installs into; by default the real one.
    """
    (folder / "isolated").mkdir()
    setuptools = Path(importlib.util.find_spec("setuptools").origin).parents[1]
    for path in [setuptools / "_distutils_hack", *setuptools.glob("setuptools*")]:
        (folder / "isolated" / path.name).symlink_to(path)
    (folder / "build.cfg").write_text(f"[egg_info]\negg_base = {folder}\n")
    paths = [str(folder / "isolated"), str(ROOT / "build_backend")]
    code = f"""
import importlib.util, sys, sysconfig
sys.path = [*{paths!r}, *(path for path in sys.path if not path.endswith("site-packages"))]
environment = {environment and str(environment)!r}
if environment is not None:
    sysconfig.get_path = lambda name: environment
assert importlib.util.find_spec("torch") is None
import parallel_ops_build as backend
print({call})
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "DIST_EXTRA_CONFIG": str(folder / "build.cfg")},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_an_isolated_build_takes_the_torch_that_is_installed(tmp_path):
    call = "(backend.get_requires_for_build_wheel(), backend.get_requires_for_build_editable(), __import__('torch'))"
    assert hook(tmp_path, call).startswith("([], [], <module 'torch' from")


@pytest.mark.parametrize("version", [None, "2.10.1+cpu"])
def test_an_isolated_build_requires_torch_where_none_that_fits_is_installed(tmp_path, version):
    environment = tmp_path / "site-packages"
    environment.mkdir()
    if version is not None:
        (environment / f"torch-{version}.dist-info").mkdir()
        (environment / f"torch-{version}.dist-info/METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    calls = "backend.get_requires_for_build_wheel() + backend.get_requires_for_build_sdist()"
    assert hook(tmp_path, calls, environment) == "['torch>=2.11']"


@pytest.mark.skipif(sys.platform != "linux", reason="the NCCL binding is for Linux")
def test_the_nccl_binding_is_built_when_possible_or_wanted():
    """With it the wheel is for one version of Python, since pybind11 has no stable ABI; without it, for all."""
    code = """
import os, runpy, sys, setuptools, pybind11
def setup(ext_modules, options, **others):
    print([e.name for e in ext_modules], bool(ext_modules[-1].optional), options)
setuptools.setup = setup
for flag in ("", "1", "0", "yes"):
    os.environ["PARALLEL_OPS_NCCL_BUILD"] = flag
    for module in (pybind11, None):
        sys.modules["pybind11"] = module
        try:
            runpy.run_path(sys.argv[1])
        except SystemExit as error:
            print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, ROOT / "setup.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    abi3 = "['parallel_ops._C'] False {'bdist_wheel': {'py_limited_api': 'cp310'}}"
    assert result.stdout.splitlines() == [
        "['parallel_ops._C', 'parallel_ops._nccl'] True {}",
        abi3,
        "['parallel_ops._C', 'parallel_ops._nccl'] False {}",
        "parallel_ops: PARALLEL_OPS_NCCL_BUILD=1 needs pybind11; run: pip install pybind11",
        abi3,
        abi3,
        *["parallel_ops: PARALLEL_OPS_NCCL_BUILD must be unset, 0 or 1, got 'yes'"] * 2,
    ], result.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="NEON is in every aarch64")
def test_compilers_that_know_one_instruction_set_compile_for_avx2(tmp_path):
    """Those that cannot choose when the library is loaded; unless CFLAGS names another, or the machine has none."""
    code = """
import os, runpy, sys, setuptools, torch
setuptools.setup = lambda ext_modules, **others: print(ext_modules[0].extra_compile_args[-1])
for capability in ("AVX512", "AVX2", "DEFAULT"):
    torch.backends.cpu.get_cpu_capability = lambda: capability
    runpy.run_path(sys.argv[1])
"""
    found = {}
    for name, macro in (("gcc-12", "__GNUC__ 12"), ("gcc-11", "__GNUC__ 11"), ("clang", "__clang__ 1")):
        compiler = tmp_path / name
        compiler.write_text(f"#!/bin/sh\necho '#define {macro}'\n")
        compiler.chmod(0o755)
        for flags in ("", "-march=native"):
            result = subprocess.run(
                [sys.executable, "-c", code, ROOT / "setup.py"], cwd=ROOT, capture_output=True, text=True, check=True,
                env={**os.environ, "CXX": str(compiler), "CFLAGS": flags},
            )  # fmt: skip
            found[name, flags] = [line == "-march=x86-64-v3" for line in result.stdout.splitlines()]
    assert found.pop(("gcc-11", "")) == found.pop(("clang", "")) == [True, True, False]
    assert set(map(tuple, found.values())) == {(False, False, False)}


def test_source_tree_without_the_extension_says_what_to_do(tmp_path):
    """The most common mistake: starting Python in a fresh clone after installing the package elsewhere."""
    shutil.copytree(ROOT / "parallel_ops", tmp_path / "parallel_ops", ignore=shutil.ignore_patterns("*.so"))
    (tmp_path / "setup.py").touch()
    # Without the finder of an editable install, which would lead to the built extension.
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in repr(f)]; import parallel_ops.ops"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "imported from its source tree, where the extension is not built" in result.stderr
