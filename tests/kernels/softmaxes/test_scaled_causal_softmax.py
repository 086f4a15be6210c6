import functools
import itertools

import pytest
import torch

from parallel_ops import scaled_causal_softmax
from parallel_ops.ops import scaled_causal_softmax_reference
from ptx import aot
from ptx.kernels import check_compiled, meta
from support.numerics import suite
from support.numerics.softmax import check_numerics, compiled_cases, walks
from support.numerics.suite import randn

ACC = torch.float32


def launches(dtype, cols):
    from parallel_ops.triton_kernels.softmaxes import launchers as kernels

    x, sink, by_row = (meta(*s, dtype=d) for s, d in (((8, 64, cols), dtype), ((8,), ACC), ((512,), ACC)))
    with aot.recorded() as recorded:
        kernels.forward(x, None, None, x, by_row, scale=0.125, causal=True)
        kernels.forward(x, None, sink, x, by_row, scale=0.125, causal=True)
        kernels.backward(x, x, None, x, by_row, scale=0.125, causal=True)
        kernels.backward(x, x, by_row, x, by_row, scale=0.125, causal=True)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "cols", "capability"), compiled_cases())
def test_compiled_code(dtype, cols, capability):
    check_compiled(launches(dtype, cols), cols, capability, passes=walks(dtype, cols))


@pytest.mark.aot(smoke=False)
def test_a_window_of_any_size_compiles_well():
    from parallel_ops.triton_kernels.softmaxes import launchers as kernels

    x = meta(8, 64, 4096, dtype=torch.bfloat16)
    for window in (1, 127):
        with aot.recorded() as recorded:
            kernels.forward(x, None, None, x, x, scale=0.125, causal=True, window=window)
            kernels.backward(x, x, None, x, x, scale=0.125, causal=True, window=window)
        check_compiled(recorded, 4096, 90)


def both(scale=1.0, window=None):
    functions = scaled_causal_softmax, scaled_causal_softmax_reference
    return [functools.partial(f, scale=scale, window=window) for f in functions]


def small_blocks(monkeypatch):
    """Rows over 64 fp32 elements walk in steps of 32."""
    from parallel_ops.triton_kernels.softmaxes import launchers as _softmax

    monkeypatch.setattr(_softmax, "MAX_ROW", 64 * 4 * 2)
    monkeypatch.setattr(_softmax, "LOOP_BLOCK", 32)


SHAPES = [(2, 3, 5, 70), (3, 1030), (1, 9), (2, 1, 1), (2, 0, 4)]


@pytest.mark.executed
@pytest.mark.parametrize(
    ("shape", "dtype", "window"),
    [
        *itertools.product(SHAPES[:1], [torch.float32], [None, 1, 20, 5000]),
        *itertools.product(SHAPES[1:2], [torch.float32], [None, 20]),
        *itertools.product(SHAPES[2:], [torch.float32], [None]),
        *itertools.product(SHAPES[:1], [torch.bfloat16, torch.float16, torch.float64], [20]),
    ],
    ids=str,
)
def test_interpreted(shape, dtype, window):
    x, grad = randn(*shape, dtype=dtype, scale=3), randn(*shape, dtype=dtype, seed=2).detach()
    check_numerics(*both(-0.5, window), [x], grad, -0.5)
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    check_numerics(*both(-0.5, window), [transposed], grad, -0.5)


@pytest.mark.executed
@pytest.mark.parametrize("window", [None, 1, 20, 64, 5000])
def test_interpreted_rows_too_long_for_one_block(monkeypatch, window):
    small_blocks(monkeypatch)
    x, grad = randn(2, 5, 150, dtype=torch.float32, scale=3), randn(2, 5, 150, dtype=torch.float32, seed=2).detach()
    x_square, grad_square = (randn(70, 70, dtype=torch.float32, scale=3, seed=i) for i in (0, 2))
    check_numerics(*both(0.5, window), [x], grad, 0.5)
    check_numerics(*both(0.5, window), [x_square], grad_square.detach(), 0.5)


@pytest.mark.executed
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("cols", [40, 100])
def test_interpreted_ignores_what_a_query_does_not_see(monkeypatch, cols, window):
    small_blocks(monkeypatch)
    x, grad = (randn(7, cols, dtype=torch.float32, seed=i).detach() for i in (0, 1))
    op, reference = both(window=window)
    seen = reference(torch.zeros_like(x)) > 0
    expected = suite.forward_backward(reference, [x.requires_grad_()], grad)
    args = [x.detach().masked_fill(~seen, torch.nan).requires_grad_()]
    got = suite.forward_backward(op, args, grad.masked_fill(~seen, torch.inf))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.executed(smoke=False)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 3, 5, 70), torch.float32), ((1, 2, 9, 2060), torch.bfloat16)], ids=str
)
def test_interpreted_sink(monkeypatch, shape, dtype):
    """In one chunk, in chunks that some rows do not see, and by two walks."""
    op, reference = (lambda x, sink, f=f: f(x, sink=sink) for f in both(0.5, 40))
    x, grad = randn(*shape, dtype=dtype, scale=3), randn(*shape, dtype=dtype, seed=2).detach()
    sink = randn(shape[1], dtype=torch.float32, seed=3)
    check_numerics(op, reference, [x, sink], grad, 0.5)
    small_blocks(monkeypatch)
    check_numerics(op, reference, [x, sink], grad, 0.5)
