"""The kernels that `make test-arm` runs are this repository's, and NEON."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

import parallel_ops
from support.arm import Server

ROOT = Path(__file__).parents[2]
# Sources whose loops are compiled for several instruction sets on x86.
SOURCES = [
    path.relative_to(ROOT)
    for path in sorted((ROOT / "csrc" / "cpu").rglob("*.cpp"))
    if re.search("PARALLEL_OPS_(MULTIVERSION|FOR_EACH_ENGINE)", path.read_text())
]


@pytest.fixture
def server(pytestconfig: pytest.Config) -> Server:
    return pytestconfig.stash[Server.key]


def disassembly(source: Path) -> str:
    objects = ROOT / "build" / "arm" / source.with_suffix(".o")
    return subprocess.check_output(["aarch64-linux-gnu-objdump", "-dC", objects], text=True)


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_loops_are_vectors(source):
    """Four floats and two doubles at a time; bfloat16 widens by a shift, float16 by an instruction."""
    code = disassembly(source)
    assert len(re.findall(r"\bf(mla|mul|add|mls)\s+v\d+\.4s", code)) > 10
    assert len(re.findall(r"\bf(mla|mul|add|mls)\s+v\d+\.2d", code)) > 2
    assert re.search(r"\bfcvtl2?\s+v\d+\.4s, v\d+\.[48]h", code)


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize(("engine", "product"), [("kFp32", "fmla"), ("kBf16", "bfdot")])
def test_products_of_attention_stay_in_registers(name, engine, product):
    """An inner loop of 16 products of vectors, by two loads of B and eight of A, and no store."""
    code = disassembly(Path("csrc/cpu/attention") / f"{name}.cpp")
    function = code.split(f"::{engine}(", 1)[1].split("\n\n", 1)[0]
    loops = inner_loops(function.splitlines())
    full = [loop for loop in loops if sum(f"{product} " in line.replace("\t", " ") for line in loop) == 16]
    assert full
    for loop in full:
        assert not any(re.search(r"\bst[rp]\b", line) for line in loop), "\n".join(loop)


def inner_loops(lines):
    """Runs of instructions that a branch closes and none enters or leaves between."""
    at = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*([0-9a-f]+):", line))}
    for i, line in enumerate(lines):
        branch = re.search(r"\bb\.\w+\s+([0-9a-f]+)|\bcbn?z\s+\w+, ([0-9a-f]+)", line)
        start = branch and at.get(branch[1] or branch[2])
        if start is not None and start < i and not any(re.search(r"\s(b|b\.\w+|cbn?z)\s", x) for x in lines[start:i]):
            yield lines[start : i + 1]


def test_ops_run_there(server):
    before = server.calls
    x = torch.randn(3, 5, requires_grad=True)
    parallel_ops.rms_norm(x, torch.ones(5)).sum().backward()
    assert server.calls >= before + 2
    with pytest.raises(RuntimeError, match="bias_gelu: bias must have one element"):
        torch.ops.parallel_ops.bias_gelu(x.detach(), torch.ones(4), True)
