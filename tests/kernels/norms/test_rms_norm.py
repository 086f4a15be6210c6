import itertools

import pytest
import torch

from parallel_ops.ops import rms_norm_reference
from ptx import aot
from ptx.kernels import check_compiled, check_machine_code, differentiable, meta, poisoned
from support.numerics import suite
from support.numerics.norms import aot_cases, grads, statistics_dtype, stream, with_residual
from support.numerics.suite import DTYPES, randn


def launches(dtype, cols):
    from parallel_ops.triton_kernels.norms import rms_norm as kernels

    x, w, stat = meta(8192, cols, dtype=dtype), meta(cols, dtype=dtype), meta(8192, dtype=torch.float32)
    with aot.recorded() as recorded:
        for residual, zero_centered in ((None, True), (x, False)):
            kernels.forward(x, w, residual, x, x, stat, eps=1e-6, zero_centered=zero_centered)
            kernels.backward(x, residual, x, w, stat, x, None, w, zero_centered=zero_centered)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "cols", "capability"), aot_cases(all_widths=False))
def test_compiled_code(dtype, cols, capability):
    passes = 1 if cols * dtype.itemsize <= 128 * 1024 else 2  # rows that do not fit on chip
    check_compiled(launches(dtype, cols), cols, capability, passes=passes)


@pytest.mark.aot(smoke=False)
@pytest.mark.parametrize("capability", [80, 100])
def test_compiled_code_of_long_rows_elsewhere(capability):
    for launch in launches(torch.bfloat16, 16384):
        check_machine_code(launch, capability)


def interpreted(zero_centered):
    from parallel_ops.triton_kernels.norms import rms_norm as kernels

    def forward(x, residual, weight):
        y, total = poisoned(x.shape, x), poisoned((0,), x) if residual is None else poisoned(x.shape, residual)
        forward.rstd = poisoned((x.shape[:-1].numel(),), statistics_dtype(x))
        kernels.forward(x, weight, residual, y, total, forward.rstd, eps=1e-6, zero_centered=zero_centered)
        forward.normalised = x if residual is None else total
        return y if residual is None else (y, total)

    def backward(*args):
        *incoming, x, residual, weight = args
        grad, grad_sum = incoming if residual is not None else (*incoming, None)
        wide = forward.normalised
        dx, narrow_dx = poisoned(x.shape, wide), None if wide.dtype == x.dtype else poisoned(x.shape, x)
        dw = None if weight is None else poisoned(weight.shape, weight)
        kernels.backward(grad, grad_sum, wide, weight, forward.rstd, dx, narrow_dx, dw, zero_centered=zero_centered)
        return dx if narrow_dx is None else narrow_dx, None if residual is None else dx, dw

    return differentiable(forward, backward)


def check(args, g, zero_centered):
    reference = with_residual(rms_norm_reference, zero_centered=zero_centered)
    suite.check_numerics(interpreted(zero_centered), reference, args, g, slack_ulps=2)


@pytest.mark.executed
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        # The kernels are those of layer_norm, whose test has the other sizes.
        *itertools.product([(3, 5, 70)], DTYPES),
        ((3, 16384), torch.bfloat16),  # a row in chunks
        ((1, 34000), torch.float32),  # wide in forward and backward
    ],
    ids=str,
)
def test_interpreted(shape, dtype):
    x, r = (stream(*shape, dtype=dtype, seed=i) for i in (0, 1))
    w = randn(shape[-1], dtype=dtype, seed=2)
    g = grads(*shape, dtype=dtype, seed=4)
    check([x, r, w], g, zero_centered=True)
    check([x, None, w], g[:1], zero_centered=False)
    if dtype.itemsize == 2:  # float32 weight and residual stream beside 16-bit activations
        wide = [t.detach().float().requires_grad_() for t in (r, w)]
        check([x, *wide], [g[0], g[1].float()], zero_centered=False)
        check([x, None, None], g[:1], zero_centered=False)
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    check([transposed, r, w], None, zero_centered=False)


@pytest.mark.executed
def test_rows_that_stay_in_shared_memory(monkeypatch):
    """Several of them a program; see the same test of layer_norm."""
    from parallel_ops.triton_kernels.norms import backward as _norm_backward

    monkeypatch.setattr(_norm_backward, "multiprocessors", lambda device: 2)
    shape, dtype = (5, 12296), torch.bfloat16
    x, r = (stream(*shape, dtype=dtype, seed=i) for i in (0, 1))
    w, g = randn(shape[-1], dtype=dtype, seed=2), grads(*shape, dtype=dtype, seed=4)
    check([x, r, w], g, zero_centered=True)
    check([x, None, None], g[:1], zero_centered=False)
