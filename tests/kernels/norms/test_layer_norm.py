import math

import pytest
import torch

from parallel_ops import layer_norm
from parallel_ops.ops import layer_norm_reference
from ptx import aot
from ptx.kernels import check_compiled, check_machine_code, meta, poisoned
from support.numerics import suite
from support.numerics.norms import aot_cases, check_kernels, with_residual
from support.numerics.suite import DTYPES, randn


def launches(dtype, cols):
    from parallel_ops.triton_kernels.norms.backward import backward
    from parallel_ops.triton_kernels.norms.forward import forward

    x, w, stat = meta(8192, cols, dtype=dtype), meta(cols, dtype=dtype), meta(8192, dtype=torch.float32)
    with aot.recorded() as recorded:
        for residual, zero_centered in ((None, True), (x, False)):
            forward(x, w, w, residual, x, x, stat, stat, eps=1e-5, zero_centered=zero_centered)
            backward(x, residual, x, w, stat, stat, x, None, w, w, zero_centered=zero_centered)
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


def check(args, g, zero_centered):
    op, reference = (with_residual(f, zero_centered=zero_centered) for f in (layer_norm, layer_norm_reference))
    suite.check_numerics(op, reference, args, g, slack_ulps=2)


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
    check_kernels(layer_norm, layer_norm_reference, shape, dtype)


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
