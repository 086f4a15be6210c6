import pytest
import torch

from parallel_ops.ops import bias_swiglu_reference
from support import aot, suite
from support.kernels import aot_cases, check_compiled, differentiable, interpreted_cases, meta, poisoned
from support.suite import randn


def launches(dtype, cols):
    from parallel_ops.triton_kernels import bias_swiglu as kernels

    x, b, y = meta(8192, 2 * cols, dtype=dtype), meta(2 * cols, dtype=dtype), meta(8192, cols, dtype=dtype)
    with aot.recorded() as recorded:
        for bias, dbias in ((b, b), (None, b[:0])):
            kernels.forward(x, bias, y)
            kernels.backward(y, x, bias, x, dbias)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(("dtype", "cols", "capability"), aot_cases())
def test_compiled_code(dtype, cols, capability):
    check_compiled(launches(dtype, cols), cols, capability)


@pytest.mark.aot
def test_grids_of_very_wide_rows_fit_the_device():
    """recorded() checks every grid: only its first axis may be longer than 65,535 programs."""
    from parallel_ops.triton_kernels import bias_swiglu as kernels

    x, y = (meta(1, n, dtype=torch.float32) for n in (2**28, 2**27))
    with aot.recorded():
        kernels.forward(x, None, y)
        kernels.backward(y, x, None, x, x[0, :0])


def interpreted():
    from parallel_ops.triton_kernels import bias_swiglu as kernels

    def forward(x, bias):
        y = poisoned((*x.shape[:-1], x.shape[-1] // 2), x)
        kernels.forward(x, bias, y)
        return y

    def backward(grad, x, bias):
        dx, dbias = poisoned(x.shape, x), poisoned((0,) if bias is None else bias.shape, x)
        kernels.backward(grad, x, bias, dx, dbias)
        return dx, None if bias is None else dbias

    return differentiable(forward, backward)


@pytest.mark.interpret
@pytest.mark.parametrize(("shape", "dtype"), interpreted_cases((3, 5, 70), (260, 18), (2, 2060), (0, 4), (5, 2)))
def test_interpreted(shape, dtype):
    x, bias = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([shape, shape[-1:]]))
    grad = randn(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=2).detach()
    suite.check_numerics(interpreted(), bias_swiglu_reference, [x, bias], grad, slack_ulps=2)
    suite.check_numerics(interpreted(), bias_swiglu_reference, [x, None], grad, slack_ulps=2)
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    suite.check_numerics(interpreted(), bias_swiglu_reference, [transposed, bias], None, slack_ulps=2)
