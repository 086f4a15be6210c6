"""What users install: the wheel and the sdist, each in an environment that has nothing of the source tree.

All other tests run on the editable install, where a file that is missing from the wheel is still found.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import parallel_ops

pytest.importorskip("pydantic")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
# The only packages that a module of parallel_ops may fail to find: each is an extra or an integration.
OPTIONAL = {"accelerate", "megatron", "safetensors", "transformers", "triton"}

SETTINGS = """
[model]
vocab_size = 256
seq_length = 16
num_layers = 1
hidden_size = 32
num_heads = 4

[data]
paths = ["text"]
dtype = "uint8"

[parallel]
micro_batch = 1
global_batch = 2

[checkpoint]
dir = "checkpoints"
"""

IMPORT_ALL = """
import importlib, pkgutil, sys
import parallel_ops.ops  # libraries of torch, which the extension needs, are loaded first
for module in pkgutil.walk_packages(parallel_ops.__path__, "parallel_ops."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print("missing", module.name, error.name)
    else:
        print("imported", module.name, sys.modules[module.name].__file__)
"""


# Sources must be there; compiling them takes two minutes, and every other test shows that they compile.
COPYING_COMPILER = """#!/bin/sh
output=
while [ $# -gt 0 ]; do
    case "$1" in
        -o) output=$2; shift ;;
        -MF | -I | -L) shift ;;
        *.cpp) test -f "$1" || exit 1 ;;
    esac
    shift
done
case "$output" in
    *.so) cp "{compiled}/$(basename "$output")" "$output" ;;
    *.o) touch "$output" "$output.d" ;;
    *) c++ -dumpfullversion ;;
esac
"""


def run(command, folder, **variables):
    """The output of a command that must succeed, started in ``folder`` without the paths of these tests."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    result = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment | variables, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def files_of(folder, *under):
    """Names of all files of some folders."""
    return {
        str(path.relative_to(folder))
        for name in under
        for path in (folder / name).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }


def wheel_of(source, folder, compiler):
    """Builds a wheel in ``folder``."""
    (folder / "build.cfg").write_text(f"[build]\nbuild_base = {folder / 'build'}\n")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    run([*pip, "--wheel-dir", folder, source], folder, DIST_EXTRA_CONFIG=str(folder / "build.cfg"), **compiler)
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel):
    """The bytes of every file of a wheel by name, less the list that pip reads."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.fixture(scope="module")
def compiler(request, tmp_path_factory):
    """Variables that name the compiler: unless the option asks for a real one, it copies what is compiled already."""
    if request.config.getoption("--compile-wheels"):
        return {}
    script = tmp_path_factory.mktemp("compiler") / "c++"
    script.write_text(COPYING_COMPILER.format(compiled=Path(parallel_ops.__file__).parent))
    script.chmod(0o755)
    return {"CXX": str(script), "CCACHE_DISABLE": "1"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the source tree as a commit of it would be."""
    folder = tmp_path_factory.mktemp("tree")
    for name in run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT).splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, tree, compiler):
    return wheel_of(tree, tmp_path_factory.mktemp("wheel"), compiler)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory, tree):
    """The folder that the sdist unpacks to."""
    folder = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"], tree)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel_of_sdist(tmp_path_factory, sdist, compiler):
    return wheel_of(sdist, tmp_path_factory.mktemp("wheel_of_sdist"), compiler)


def pytest_generate_tests(metafunc):
    if "environment" in metafunc.fixturenames:
        # Unless each is compiled, the two are the same: see test_the_sdist_builds_the_same_wheel.
        both = metafunc.config.getoption("--compile-wheels")
        metafunc.parametrize("environment", ["wheel_of_sdist", "wheel"][: 1 + both], indirect=True, scope="module")


@pytest.fixture(scope="module")
def environment(request, tmp_path_factory):
    """A virtual environment with one of the wheels, which finds torch and the rest where these tests find them."""
    folder = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", request.getfixturevalue(request.param)], folder)
    # Added after pip has run, which would otherwise find the editable install there. The finder of that install is not
    # active in the new environment: the .pth files of folders that are added in this way are not read.
    shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "shared.pth").write_text("\n".join(shared))
    return folder


def test_the_wheel_has_every_module_and_every_data_file(tree, wheel):
    expected = files_of(tree, "parallel_ops") | {f"parallel_ops/{name}" for name in files_of(tree, "triton_kernels")}
    found = {name for name in contents(wheel) if name.startswith("parallel_ops/") and not name.endswith(".so")}
    assert found == expected
    assert "parallel_ops/_C.abi3.so" in contents(wheel)
    assert wheel.name.startswith(f"parallel_ops-{parallel_ops.__version__}-")


def test_the_sdist_has_what_the_build_reads(tree, sdist):
    expected = {"setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"}
    expected |= files_of(tree, "csrc", "parallel_ops", "triton_kernels")
    found = files_of(sdist, ".")
    assert expected - found == set()
    # What the README links to is there, and no test without what it imports.
    links = re.findall(r"\]\((?!http)([^)#]+)", (tree / "README.md").read_text())
    assert set(links) - found == set() and not [name for name in found if name.startswith("tests/")]
    assert list(sdist.rglob("*.so")) == []


@pytest.mark.runs
def test_the_sdist_builds_the_same_wheel(wheel, wheel_of_sdist, compiler):
    first, second = contents(wheel), contents(wheel_of_sdist)
    assert first.keys() == second.keys()
    # Compiled in two folders, the extensions differ by the names of these folders.
    ignored = ".so" if not compiler else ()
    assert [name for name in first if first[name] != second[name] and not name.endswith(ignored)] == []


@pytest.mark.runs
def test_every_module_is_imported_from_the_wheel(environment):
    lines = [line.split() for line in run([environment / "bin/python", "-c", IMPORT_ALL], environment).splitlines()]
    missing = {name: package for state, name, package in lines if state == "missing"}
    imported = {name: file for state, name, file in lines if state == "imported"}
    assert {package.partition(".")[0] for package in missing.values()} <= OPTIONAL, missing
    assert [file for file in imported.values() if not Path(file).is_relative_to(environment)] == []
    assert {
        "parallel_ops.planner.export.megatron",
        "parallel_ops.ops.activations.bias_gelu",
        "parallel_ops.train",
    } <= imported.keys()


def test_the_command_line_works_from_the_wheel(environment, tmp_path):
    command = environment / "bin/parallel-ops"
    model = ["--model", "llama3-8b", "--cluster", "h100x8", "--batch", "1M"]
    assert "estimate" in run([command, "--help"], tmp_path)
    assert "GiB" in run([command, "estimate", *model, "--plan", "tp=2,dp=4,zero=3"], tmp_path)
    run([command, "plan", *model, "--for", "megatron", "--output", "run.sh"], tmp_path)
    assert "--tensor-model-parallel-size" in (tmp_path / "run.sh").read_text()


@pytest.mark.runs
def test_a_run_trains_from_the_wheel(environment, tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "run.toml").write_text(SETTINGS)
    command = [environment / "bin/parallel-ops", "train", "run.toml"]
    assert "rank" in run([*command, "--dry-run"], tmp_path)
    run([*command, "--steps", "2", "--json", "steps.jsonl"], tmp_path)
    assert (tmp_path / "steps.jsonl").read_text().count("\n") >= 2
