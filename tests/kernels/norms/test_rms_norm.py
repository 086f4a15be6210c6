import itertools

import pytest
import torch

from parallel_ops import rms_norm
from parallel_ops.ops import rms_norm_reference
from ptx import aot
from ptx.kernels import check_compiled, check_machine_code, meta
from support.numerics import suite
from support.numerics.norms import aot_cases, check_kernels, grads, stream, with_residual
from support.numerics.suite import DTYPES, randn


def launches(dtype, cols):
    from parallel_ops.triton_kernels.norms.backward import backward
    from parallel_ops.triton_kernels.norms.forward import forward

    x, w, stat = meta(8192, cols, dtype=dtype), meta(cols, dtype=dtype), meta(8192, dtype=torch.float32)
    with aot.recorded() as recorded:
        for residual, zero_centered in ((None, True), (x, False)):
            forward(x, w, None, residual, x, x, None, stat, eps=1e-6, zero_centered=zero_centered)
            backward(x, residual, x, w, None, stat, x, None, w, None, zero_centered=zero_centered)
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
    check_kernels(rms_norm, rms_norm_reference, shape, dtype)


@pytest.mark.executed
def test_rows_that_stay_in_shared_memory(monkeypatch):
    """Several of them a program; see the same test of layer_norm."""
    from parallel_ops.triton_kernels.norms import backward as _norm_backward

    monkeypatch.setattr(_norm_backward, "multiprocessors", lambda device: 2)
    x, r = (stream(5, 12296, dtype=torch.bfloat16, seed=i) for i in (0, 1))
    w, g = randn(12296, dtype=torch.bfloat16, seed=2), grads(5, 12296, dtype=torch.bfloat16, seed=4)
    for args, gradients, zero_centered in (([x, r, w], g, True), ([x, None, None], g[:1], False)):
        op, reference = (with_residual(f, zero_centered=zero_centered) for f in (rms_norm, rms_norm_reference))
        suite.check_numerics(op, reference, args, gradients, slack_ulps=2)
