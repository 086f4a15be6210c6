import pytest
import torch

from parallel_ops import bias_swiglu
from parallel_ops.ops import bias_swiglu_reference
from ptx import aot
from ptx.kernels import aot_cases, check_compiled, interpreted_cases, meta
from support.numerics import suite
from support.numerics.suite import randn

F32 = torch.float32


def launches(dtype, cols):
    from parallel_ops.triton_kernels.activations import activations as kernels

    x, b, y = meta(8192, 2 * cols, dtype=dtype), meta(2 * cols, dtype=dtype), meta(8192, cols, dtype=dtype)
    w, halves = meta(8192, dtype=torch.float32), (x[:, :cols], x[:, cols:])
    with aot.recorded() as recorded:
        for bias, dbias in ((b, b), (None, b[:0])):
            kernels.forward(*halves, bias, None, y, activation="silu")
            kernels.backward(y, *halves, bias, None, *halves, dbias, b[:0], activation="silu")
        kernels.forward(y, y, None, w, y, activation="silu")
        kernels.backward(y, y, y, None, w, y, y, b[:0], w, activation="silu")
        gpt_oss = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
        kernels.forward(*halves, b, None, y, activation="silu", **gpt_oss)
        kernels.backward(y, *halves, b, None, *halves, b, b[:0], activation="silu", **gpt_oss)
    return recorded


@pytest.mark.aot(smoke=False)  # bias_gelu's are of the same kernels
@pytest.mark.parametrize(("dtype", "cols", "capability"), aot_cases())
def test_compiled_code(dtype, cols, capability):
    check_compiled(launches(dtype, cols), cols, capability)


@pytest.mark.aot
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_code_of_gate_and_up_in_turn(capability):
    from parallel_ops.triton_kernels.activations import activations as kernels

    x, y, w = meta(8192, 4096, dtype=torch.bfloat16), meta(8192, 2048, dtype=torch.bfloat16), meta(8192, dtype=F32)
    options = {"activation": "silu", "interleaved": True, "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    with aot.recorded() as recorded:
        kernels.forward(x, x, None, w, y, **options)
        kernels.backward(y, x, x, None, w, x, x, y[0, :0], w, **options)
    check_compiled(recorded, 2048, capability)


@pytest.mark.aot
def test_grids_of_very_wide_rows_fit_the_device():
    """recorded() checks every grid: only its first axis may be longer than 65,535 programs."""
    from parallel_ops.triton_kernels.activations import activations as kernels

    y = meta(1, 2**27, dtype=torch.float32)
    with aot.recorded():
        kernels.forward(y, y, None, None, y, activation="silu")
        kernels.backward(y, y, y, None, None, y, y, y[0, :0], y[0, :0], activation="silu")


@pytest.mark.executed
@pytest.mark.parametrize(("shape", "dtype"), interpreted_cases((3, 5, 70), (260, 18), (2, 2060), (0, 4), (5, 2)))
def test_interpreted(shape, dtype):
    x, bias = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([shape, shape[-1:]]))
    grad = randn(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=2).detach()
    suite.check_numerics(bias_swiglu, bias_swiglu_reference, [x, bias], grad, slack_ulps=2)
    suite.check_numerics(bias_swiglu, bias_swiglu_reference, [x, None], grad, slack_ulps=2)
    transposed = x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    suite.check_numerics(bias_swiglu, bias_swiglu_reference, [transposed, bias], None, slack_ulps=2)


@pytest.mark.executed
@pytest.mark.parametrize(("shape", "dtype"), interpreted_cases((3, 5, 70), (2, 2060), (0, 4)))
def test_gate_and_up_in_turn(shape, dtype):
    options = {"interleaved": True, "alpha": 1.702, "limit": 1.5, "up_offset": 1.0}
    x, weights = randn(*shape, dtype=dtype), randn(*shape[:-1], dtype=torch.float32, seed=1)
    grad = randn(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=2).detach()
    op, reference = (lambda x, w, f=f: f(x, weights=w, **options) for f in (bias_swiglu, bias_swiglu_reference))
    suite.check_numerics(op, reference, [x, weights], grad, slack_ulps=2)


@pytest.mark.executed
def test_special_values():
    """exp(-88) is no normal number, but its product with -88 is one, and that with infinity is not 0 times infinity."""
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 88.0, -88.0, 1e-40])
    x = torch.cartesian_prod(values, values).requires_grad_()
    ours, theirs = (suite.forward_backward(f, [x, None]) for f in (bias_swiglu, bias_swiglu_reference))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
