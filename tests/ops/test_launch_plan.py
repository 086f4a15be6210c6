"""CUDA kernels replayed from plans: launched with what Triton's own launcher gives them, without a GPU.

A program of its own (support/launch_plans.py) calls the ops on CPU tensors, with the C++ of the plans registered for
them and with a driver that notes launches.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import parallel_ops.ops  # noqa: F401  (registers the ops)
from support.launch_plan_cases import cases, checks

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
OPS = dict(re.findall(r'^ *X\((\w+), "(\w+)"\)', (ROOT / "csrc/cuda/launch_plan.cpp").read_text(), re.MULTILINE))


def letter(argument: torch.Argument) -> str:
    kind = str(argument.type)
    letters = {"Tensor": "t", "Optional[Tensor]": "o", "Optional[int]": "i", "int": "v", "float": "v", "bool": "v"}
    return letters[kind]


@pytest.mark.parametrize("op", OPS)
def test_letters_agree_with_the_schema(op):
    schema = getattr(torch.ops.parallel_ops, op).default._schema
    assert OPS[op] == "".join(letter(argument) for argument in schema.arguments)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if sys.platform != "linux" or shutil.which("c++") is None:
        pytest.skip("needs Linux and a C++ compiler")
    if torch.cuda.is_available():
        pytest.skip("replaces the driver, which is a real one here; the ops' own tests compare calls with their replay")
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("launch_plan")
    driver, planned = folder / "libcuda.so.1", folder / "planned.so"
    (folder / "libcuda.so").symlink_to(driver)
    run = functools.partial(subprocess.run, check=True)
    shared = ["-O1", "-shared", "-fPIC"]
    run(["cc", *shared, "-Wl,-soname,libcuda.so.1", "-o", driver, SUPPORT / "launch_driver.c"])
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch", "-ltorch_cpu", "-lc10"]
    sources = [ROOT / "csrc/registration.cpp", *sorted((ROOT / "csrc/cuda").glob("*.cpp"))]
    macros = ["-DPARALLEL_OPS_PLANNED_KEY=CPU", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    run(["c++", *shared, "-std=c++17", *macros, *includes, *sources, *libraries, "-o", planned])
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "TRITON_LIBCUDA_PATH": str(folder),
        "PYTHONPATH": f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, SUPPORT / "launch_plans.py", planned, driver]
    result = run(command, capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", cases())
def test_replayed_as_triton_launches(found, name):
    case = found[name]
    assert case["launches"] > 0
    assert case["same"], case["details"]
    assert case["outputs"]
    assert case["in_python"] == 0


def test_every_planned_op_has_a_case():
    assert {op for op, _ in cases().values()} == set(OPS)


@pytest.mark.parametrize("name", checks())
def test_what_makes_a_plan(found, name):
    assert found[name]["passed"] is True, found[name]


def on_a_side_stream(call):
    with torch.cuda.stream(torch.cuda.Stream()):
        result = call()
    torch.cuda.synchronize()
    return result


def in_a_graph(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    graph.replay()
    torch.cuda.synchronize()
    return result


def in_a_new_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", [on_a_side_stream, in_a_graph, in_a_new_thread])
@pytest.mark.parametrize("device", range(max(1, torch.cuda.device_count())))
def test_replayed_on_a_gpu(monkeypatch, way, device):
    """Without Python, and with what Python gives; on another device than the current one too."""
    from parallel_ops.triton_kernels import bias_gelu as kernels

    x = torch.randn(64, 512, device=f"cuda:{device}", dtype=torch.bfloat16)
    bias, grad = torch.randn_like(x[0]), torch.randn_like(x)

    def call():
        ops = torch.ops.parallel_ops
        return [ops.bias_gelu(x, bias, True), *ops.bias_gelu_backward(grad, x, bias, True)]

    expected = [call() for _ in range(2)][-1]
    torch.cuda.synchronize()
    for name in ("forward", "backward"):
        monkeypatch.setattr(kernels, name, lambda *_, **__: pytest.fail("launched from Python"))
    for got, want in zip(way(call), expected, strict=True):
        assert torch.equal(got, want)
