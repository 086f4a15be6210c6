"""layer_norm and rms_norm, whose kernels are the same."""

import math

import pytest
import torch

from parallel_ops import layer_norm, rms_norm
from parallel_ops.ops import layer_norm_reference, rms_norm_reference
from ptx import aot
from ptx.kernels import check_compiled, check_machine_code, check_shared_memory, meta, poisoned
from support.numerics import suite
from support.numerics.norms import grads, stream, with_residual
from support.numerics.suite import DTYPES, randn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REFERENCES = {layer_norm: layer_norm_reference, rms_norm: rms_norm_reference}


def launches(op, dtype, cols, of_weight=None):
    from parallel_ops.triton_kernels.norms.backward import backward
    from parallel_ops.triton_kernels.norms.forward import forward

    x, w = meta(8192, cols, dtype=dtype), meta(cols, dtype=of_weight or dtype)
    rstd = meta(8192, dtype=torch.promote_types(dtype, FP32))
    bias, mean = (w, rstd) if op is layer_norm else (None, None)
    with aot.recorded() as recorded:
        for residual, zero_centered in ((None, True), (x, False)):
            forward(x, w, bias, residual, x, x, mean, rstd, eps=1e-5, zero_centered=zero_centered)
            backward(x, residual, x, w, mean, rstd, x, None, w, bias, zero_centered=zero_centered)
    return recorded


def compiled_cases():
    """A width for each way that the launchers go; of layer_norm also rows of odd alignment, other dtypes and chips."""
    widths = [(BF16, cols, 90) for cols in (1024, 8192, 16384, 32768)]
    more = [(BF16, 4096, 90), (BF16, 4104, 90), (BF16, 12288, 90), (FP16, 8192, 100), (BF16, 1001, 90)]
    more += [(FP32, cols, 80) for cols in (8192, 65536)]
    for op, cases in ((layer_norm, [*widths, *more]), (rms_norm, widths)):
        for dtype, cols, sm in cases:
            yield pytest.param(op, dtype, cols, sm, id=f"{op.__name__}-{dtype}-{cols}-sm_{sm}".replace("torch.", ""))


@pytest.mark.aot
@pytest.mark.parametrize(("op", "dtype", "cols", "capability"), compiled_cases())
def test_compiled_code(op, dtype, cols, capability):
    passes = 1 if cols * dtype.itemsize <= 128 * 1024 else 2  # rows that do not fit on chip
    check_compiled(launches(op, dtype, cols), cols, capability, passes=passes)


@pytest.mark.aot(smoke=False)
@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("op", REFERENCES)
def test_compiled_code_of_long_rows_elsewhere(op, capability):
    for launch in launches(op, BF16, 16384):
        check_machine_code(launch, capability)


@pytest.mark.aot(smoke=False)
@pytest.mark.parametrize("capability", [89, 120])
@pytest.mark.parametrize(
    ("op", "dtype", "of_weight", "cols"),
    [
        (layer_norm, FP32, BF16, 1024),
        (rms_norm, FP32, BF16, 8192),
        (rms_norm, BF16, BF16, 16384),
        (rms_norm, FP32, FP32, 1001),
        (rms_norm, torch.float64, torch.float64, 2048),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_staged_rows_fit_99_kib(op, dtype, of_weight, cols, capability):
    """What is staged of the longest rows, and of several short ones, beside what exchanges weights between threads."""
    with aot.chosen_for(capability):
        recorded = launches(op, dtype, cols, of_weight)
    for launch in recorded:
        check_shared_memory(launch, capability)


def check(op, args, gradients, *, zero_centered=False):
    ours, theirs = (with_residual(f, zero_centered=zero_centered) for f in (op, REFERENCES[op]))
    suite.check_numerics(ours, theirs, args, gradients, slack_ulps=2)


@pytest.mark.executed
@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    [
        *((op, (3, 5, 70), dtype) for op in REFERENCES for dtype in DTYPES),
        *((layer_norm, shape, FP32) for shape in [(600, 9), (2, 1030), (0, 8)]),
        (layer_norm, (3, 12288), BF16),  # a row in chunks
        (rms_norm, (3, 16384), BF16),
        (layer_norm, (3, 9000), FP32),  # wide in the backward, the parameters' gradients of two programs a column
        *((op, (1, 34000), FP32) for op in REFERENCES),  # wide in both
        (layer_norm, (3, 70), torch.float64),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_interpreted(op, shape, dtype):
    """With and without a residual, of dtypes that differ, and of a transposed ``x``."""
    x, r = (stream(*shape, dtype=dtype, seed=i) for i in (0, 1))
    weight, *bias = [randn(shape[-1], dtype=dtype, seed=2 + i) for i in range(2 if op is layer_norm else 1)]
    g = grads(*shape, dtype=dtype, seed=4)
    no_bias = [None for _ in bias]
    check(op, [x, r, weight, *bias], g, zero_centered=True)
    check(op, [x, None, weight, *no_bias], g[:1])
    if dtype.itemsize == 2:  # float32 parameters and residual stream beside 16-bit activations
        wide = [t.detach().float().requires_grad_() for t in (r, weight, *bias)]
        check(op, [x, *wide], [g[0], g[1].float()])
        check(op, [x, None, None, *no_bias], g[:1])
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    check(op, [transposed, r, weight, *bias], None)


@pytest.mark.executed
def test_rows_that_stay_in_shared_memory(monkeypatch):
    """Several of them a program."""
    from parallel_ops.triton_kernels.norms import backward

    monkeypatch.setattr(backward, "multiprocessors", lambda device: 2)
    x, r = (stream(5, 12296, dtype=BF16, seed=i) for i in (0, 1))
    w, g = randn(12296, dtype=BF16, seed=2), grads(5, 12296, dtype=BF16, seed=4)
    check(rms_norm, [x, r, w], g, zero_centered=True)
    check(rms_norm, [x, None, None], g[:1])


@pytest.mark.executed
@pytest.mark.parametrize(("shape", "dtype"), [((37, 70), BF16), ((3, 9000), FP32)], ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_parameters_gradients_alone(shape, dtype, centred):
    """The weight half of a split backward: what the whole backward sums, and the weight's values are not read."""
    from parallel_ops.triton_kernels.norms import backward

    x, g = (randn(*shape, dtype=dtype, seed=i).detach() for i in (0, 1))
    mean, rstd = (randn(shape[0], dtype=FP32, seed=i).detach() for i in (2, 3))
    weight = torch.full(shape[1:], math.nan)

    def sums(dx):
        made = [poisoned(shape[1:], weight) for _ in range(2 if centred else 1)]
        totals = made if centred else [*made, None]
        backward.backward(g, None, x, weight, mean if centred else None, rstd, dx, None, *totals, zero_centered=False)
        return made

    torch.testing.assert_close(sums(None), sums(torch.empty_like(x)), rtol=1e-5, atol=1e-4)
