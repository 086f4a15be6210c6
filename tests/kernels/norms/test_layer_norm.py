import math

import pytest
import torch

from parallel_ops.ops import layer_norm_reference
from ptx import aot
from ptx.kernels import check_compiled, check_machine_code, differentiable, meta, poisoned
from support.numerics import suite
from support.numerics.norms import aot_cases, grads, statistics_dtype, stream, with_residual
from support.numerics.suite import DTYPES, randn


def launches(dtype, cols):
    from parallel_ops.triton_kernels.norms import layer_norm as kernels

    x, w, stat = meta(8192, cols, dtype=dtype), meta(cols, dtype=dtype), meta(8192, dtype=torch.float32)
    with aot.recorded() as recorded:
        for residual, zero_centered in ((None, True), (x, False)):
            kernels.forward(x, w, w, residual, x, x, stat, stat, eps=1e-5, zero_centered=zero_centered)
            kernels.backward(x, residual, x, w, stat, stat, x, None, w, w, zero_centered=zero_centered)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "cols", "capability"), aot_cases(all_widths=True))
def test_compiled_code(dtype, cols, capability):
    passes = 1 if cols * dtype.itemsize <= 128 * 1024 else 2  # rows that do not fit on chip
    check_compiled(launches(dtype, cols), cols, capability, passes=passes)


@pytest.mark.aot(smoke=False)
@pytest.mark.parametrize("capability", [80, 100])
def test_compiled_code_of_long_rows_elsewhere(capability):
    for launch in launches(torch.bfloat16, 16384):
        check_machine_code(launch, capability)


def interpreted(zero_centered):
    from parallel_ops.triton_kernels.norms import layer_norm as kernels

    def forward(x, residual, weight, bias):
        y, total = poisoned(x.shape, x), poisoned((0,), x) if residual is None else poisoned(x.shape, residual)
        forward.statistics = poisoned((2, x.shape[:-1].numel()), statistics_dtype(x))
        kernels.forward(x, weight, bias, residual, y, total, *forward.statistics, eps=1e-5, zero_centered=zero_centered)
        forward.normalised = x if residual is None else total
        return y if residual is None else (y, total)

    def backward(*args):
        *incoming, x, residual, weight, bias = args
        grad, grad_sum = incoming if residual is not None else (*incoming, None)
        wide = forward.normalised
        dx, narrow_dx = poisoned(x.shape, wide), None if wide.dtype == x.dtype else poisoned(x.shape, x)
        sums = [None if p is None else poisoned(p.shape, p) for p in (weight, bias)]
        kernels.backward(
            grad, grad_sum, wide, weight, *forward.statistics, dx, narrow_dx, *sums, zero_centered=zero_centered
        )
        return dx if narrow_dx is None else narrow_dx, None if residual is None else dx, *sums

    return differentiable(forward, backward)


def check(args, g, zero_centered):
    reference = with_residual(layer_norm_reference, zero_centered=zero_centered)
    suite.check_numerics(interpreted(zero_centered), reference, args, g, slack_ulps=2)


@pytest.mark.executed
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((3, 5, 70), dtype) for dtype in DTYPES),
        *((shape, torch.float32) for shape in [(600, 9), (2, 1030), (0, 8)]),
        ((3, 12288), torch.bfloat16),  # a row in chunks
        ((3, 9000), torch.float32),  # wide in the backward, the parameters' gradients of two programs a column
        ((1, 34000), torch.float32),  # wide in both
        ((3, 70), torch.float64),
    ],
    ids=str,
)
def test_interpreted(shape, dtype):
    x, r = (stream(*shape, dtype=dtype, seed=i) for i in (0, 1))
    w, b = (randn(shape[-1], dtype=dtype, seed=i) for i in (2, 3))
    g = grads(*shape, dtype=dtype, seed=4)
    check([x, r, w, b], g, zero_centered=True)
    check([x, None, w, None], g[:1], zero_centered=False)
    if dtype.itemsize == 2:  # float32 parameters and residual stream beside 16-bit activations
        wide = [t.detach().float().requires_grad_() for t in (r, w, b)]
        check([x, *wide], [g[0], g[1].float()], zero_centered=False)
        check([x, None, None, None], g[:1], zero_centered=False)
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    check([transposed, r, w, b], None, zero_centered=False)


@pytest.mark.executed(smoke=False)
@pytest.mark.parametrize(
    ("shape", "dtype", "wide_weight"), [((5, 12296), torch.bfloat16, True), ((4, 16384), torch.float16, False)], ids=str
)
def test_rows_that_stay_in_shared_memory(shape, dtype, wide_weight, monkeypatch):
    """Several of them a program, so that each of the two places is filled again while the other is read."""
    from parallel_ops.triton_kernels.norms import backward as _norm_backward

    monkeypatch.setattr(_norm_backward, "multiprocessors", lambda device: 2)
    launched = []
    staged = _norm_backward.staged_backward
    monkeypatch.setattr(_norm_backward, "staged_backward", lambda *a, **k: launched.append(a) or staged(*a, **k))
    x, r = (stream(*shape, dtype=dtype, seed=i, mean=2.0) for i in (0, 1))
    w, b = (randn(shape[-1], dtype=torch.float32 if wide_weight else dtype, seed=i) for i in (2, 3))
    g = grads(*shape, dtype=dtype, seed=4)
    check([x, r, w, b], g, zero_centered=wide_weight)
    check([x, None, w if wide_weight else None, b], g[:1], zero_centered=False)
    assert len(launched) == 2
    apart = torch.empty(shape[0], shape[1] + 8, dtype=dtype)
    assert _norm_backward.fits(shape[1], 8, x, apart[:, 8:], None)
    assert not _norm_backward.fits(shape[1], 8, x, apart[:, 1:])  # copies of 16 bytes would be misaligned


@pytest.mark.executed
@pytest.mark.parametrize(("shape", "dtype"), [((37, 70), torch.bfloat16), ((3, 9000), torch.float32)], ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_parameters_gradients_alone(shape, dtype, centred):
    """The weight half of a split backward: what the whole backward sums, and the weight's values are not read."""
    from parallel_ops.triton_kernels.norms import backward

    x, g = (randn(*shape, dtype=dtype, seed=i).detach() for i in (0, 1))
    mean, rstd = (randn(shape[0], dtype=torch.float32, seed=i).detach() for i in (2, 3))
    weight = torch.full(shape[1:], math.nan)

    def sums(dx):
        made = [poisoned(shape[1:], weight) for _ in range(2 if centred else 1)]
        totals = made if centred else [*made, None]
        backward.backward(g, None, x, weight, mean if centred else None, rstd, dx, None, *totals, zero_centered=False)
        return made

    torch.testing.assert_close(sums(None), sums(torch.empty_like(x)), rtol=1e-5, atol=1e-4)
