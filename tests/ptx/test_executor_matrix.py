"""mma.sync, ldmatrix, cp.async and wgmma in the executor, as Triton uses them for matmuls and for attention."""

import pytest
import torch
import triton
import triton.language as tl

from ptx import aot, execution
from ptx.execution import executed
from ptx.program import parse
from ptx.values import Fault


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, c_ptr, depth, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr
):
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    sum = tl.zeros((ROWS, COLS), tl.float32)
    for first in tl.range(0, depth, STEP, num_stages=3):
        k = first + tl.arange(0, STEP)
        a = tl.load(a_ptr + row * depth + k[None, :])
        if TRANSPOSED:
            b = tl.trans(tl.load(b_ptr + tl.arange(0, COLS)[:, None] * depth + k[None, :]))
        else:
            b = tl.load(b_ptr + k[:, None] * COLS + col)
        sum = tl.dot(a, b, sum)
    tl.store(c_ptr + row * COLS + col, sum)


@triton.jit
def _attention_kernel(q_ptr, k_ptr, v_ptr, o_ptr, keys, scale, ROWS: tl.constexpr, DIMS: tl.constexpr):
    row, dim = tl.arange(0, ROWS)[:, None], tl.arange(0, DIMS)[None, :]
    q = tl.load(q_ptr + row * DIMS + dim)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sum = tl.zeros((ROWS, DIMS), tl.float32)
    for first in tl.range(0, keys, 64, num_stages=2):
        key = first + tl.arange(0, 64)[:, None]
        k = tl.load(k_ptr + key * DIMS + dim)
        v = tl.load(v_ptr + key * DIMS + dim)
        s = tl.dot(q, tl.trans(k)) * scale
        new = tl.maximum(largest, tl.max(s, axis=1))
        p = tl.exp(s - new[:, None])
        keep = tl.exp(largest - new)
        total = total * keep + tl.sum(p, axis=1)
        sum = tl.dot(p.to(v.dtype), v, sum * keep[:, None])
        largest = new
    tl.store(o_ptr + row * DIMS + dim, (sum / total[:, None]).to(o_ptr.dtype.element_ty))


INSTRUCTIONS = {80: ("mma.sync.aligned.m16n8", "ldmatrix.sync", "cp.async.cg"), 90: ("wgmma.mma_async", "cp.async.c")}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)  # float32 goes by tf32
@pytest.mark.parametrize("capability", INSTRUCTIONS)
def test_products(capability, dtype, transposed):
    generator = torch.Generator().manual_seed(0)
    for rows, cols, step in [(64, 64, 32), (128, 32, 64)]:
        a, b = (torch.randn(s, generator=generator).to(dtype) for s in [(rows, 3 * step), (3 * step, cols)])
        c = torch.empty(rows, cols)
        second = b.t().contiguous() if transposed else b
        with executed(capability) as reports:
            _product_kernel[(1,)](a, second, c, 3 * step, transposed, rows, cols, step)
        code = aot.assembly(reports[0].specialised, capability)
        assert all(i in code for i in INSTRUCTIONS[capability])
        if dtype is torch.float32:  # tensor cores read 10 bits of the mantissa
            a, b = ((x.view(torch.int32) & -(1 << 13)).view(torch.float32) for x in (a, b))
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("capability", INSTRUCTIONS)
def test_attention(capability):
    """The second matmul has an operand in registers; the barriers of a pipeline lie between its loads and its use."""
    q, k, v = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (64, 256, 256))
    k[0] = 0.5
    o = torch.empty(64, 64)
    with executed(capability) as reports:
        _attention_kernel[(1,)](q, k, v, o, 256, 0.125, 64, 64)
    assert all(i in aot.assembly(reports[0].specialised, capability) for i in INSTRUCTIONS[capability])
    expected = torch.softmax(q.double() @ k.double().t() * 0.125, -1) @ v.double()
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2**-8 * v.abs().max().item())


PLANTED = {
    "overwrites shared memory that a matrix product under way reads": ("wgmma.wait_group.sync.aligned 1", "// none"),
    "which a matrix product under way will write": ("wgmma.wait_group.sync.aligned 0", "// none"),
    "since the last barrier|that a copy under way will write": ("bar.sync", "// none"),
    "that a copy under way will write": ("cp.async.wait_group", "// none"),
}


@pytest.mark.parametrize("message", PLANTED)
def test_a_wait_that_is_missing_is_found(message, monkeypatch):
    old, new = PLANTED[message]
    monkeypatch.setattr(execution, "parse", lambda ptx: parse(ptx.replace(old, new)))
    execution.compiled.cache_clear()
    a, b, c = torch.randn(64, 192).bfloat16(), torch.randn(192, 64).bfloat16(), torch.empty(64, 64)
    try:
        with pytest.raises(Fault, match=message), executed(90):
            _product_kernel[(1,)](a, b, c, 192, False, 64, 64, 32)
    finally:
        execution.compiled.cache_clear()
