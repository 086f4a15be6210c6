import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import bias_gelu
from parallel_ops.ops import bias_gelu_reference
from support.numerics import suite
from support.numerics.suite import DEVICES, DTYPES, randn

pytestmark = pytest.mark.parametrize("device", DEVICES)
approximations = pytest.mark.parametrize("approximate", ["tanh", "none"])
raw_op = torch.ops.parallel_ops.bias_gelu.default


@given(
    shape=suite.shapes(),
    dtype=st.sampled_from(DTYPES),
    approximate=st.sampled_from(["tanh", "none"]),
    with_bias=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_shape(device, shape, dtype, approximate, with_bias, scale, seed):
    x = randn(*shape, dtype=dtype, device=device, seed=seed, scale=scale)
    bias = randn(shape[-1], dtype=dtype, device=device, seed=seed + 1) if with_bias else None
    grad = randn(*shape, dtype=dtype, device=device, seed=seed + 2).detach()
    op, reference = (functools.partial(f, approximate=approximate) for f in (bias_gelu, bias_gelu_reference))
    suite.check_numerics(op, reference, [x, bias], grad, slack_ulps=2)


@approximations
@pytest.mark.parametrize("dtype", DTYPES)
def test_numerics_of_a_large_tensor(device, dtype, approximate):
    x, bias = (randn(*s, dtype=dtype, device=device, seed=i, scale=2) for i, s in enumerate([(2048, 384), (384,)]))
    grad = randn(2048, 384, dtype=dtype, device=device, seed=2).detach()
    op, reference = (functools.partial(f, approximate=approximate) for f in (bias_gelu, bias_gelu_reference))
    suite.check_numerics(op, reference, [x, bias], grad)


@approximations
def test_custom_op_contract(device, approximate):
    x, bias = randn(3, 2, 5, dtype=torch.float32, device=device), randn(5, dtype=torch.float32, device=device)
    for args in ([x, bias], [x, None], [x.detach(), bias], [x.transpose(0, 1).detach(), None]):
        suite.check_op(raw_op, [*args, approximate == "tanh"])


def test_autocast_runs_in_the_autocast_dtype(device):
    x, bias = (randn(*s, dtype=torch.float32, device=device) for s in [(6, 8), (8,)])
    with torch.autocast(device, dtype=torch.bfloat16):
        y = bias_gelu(x.bfloat16(), bias)
        wide = bias_gelu(x.double(), bias)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, bias_gelu(x.bfloat16(), bias.bfloat16()))
    assert wide.dtype is torch.float64
    y.float().sum().backward()
    assert bias.grad is not None and bias.grad.dtype is torch.float32
    suite.check_compiles_under_autocast(bias_gelu, [x, bias])


def test_a_bias_in_a_dtype_of_its_own(device):
    """Parameters in fp32, activations in bf16: the bias is not rounded, its gradient is in fp32."""
    x, bias = randn(40, 1030, dtype=torch.bfloat16, device=device), randn(1030, dtype=torch.float32, device=device)
    grad = randn(40, 1030, dtype=torch.bfloat16, device=device, seed=2).detach()
    suite.check_numerics(bias_gelu, bias_gelu_reference, [x, bias], grad, slack_ulps=2)


@approximations
def test_special_values_flow_as_in_pytorch(device, approximate):
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 88.0, -88.0, 1e-40], device=device)
    # In fp64: PyTorch's vectorised fp32 erf gives NaN at infinity (2.13, x86).
    expected = bias_gelu_reference(x.double(), approximate=approximate).float()
    got = bias_gelu(x, approximate=approximate)
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4), (1, 1), (1, 70000), (70000, 1)])
def test_extreme_shapes(device, shape):
    x, bias = (randn(*s, dtype=torch.float32, device=device) for s in [shape, shape[-1:]])
    grad = torch.ones(shape, device=device)
    suite.check_numerics(bias_gelu, bias_gelu_reference, [x, bias], grad, slack_ulps=2)


def test_bad_arguments_are_named(device):
    x, bias = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    with pytest.raises(TypeError, match=r"bias_gelu: x must be a tensor, got list"):
        bias_gelu([1.0])
    with pytest.raises(TypeError, match=r"bias_gelu: x must be float32.*got torch.int64"):
        bias_gelu(x.long(), bias)
    with pytest.raises(ValueError, match=r"bias_gelu: bias must have shape \[8\].*got \[7\]"):
        bias_gelu(x, bias[:7])
    with pytest.raises(ValueError, match=r"bias_gelu: bias is on meta"):
        bias_gelu(x, bias.to("meta"))
    with pytest.raises(ValueError, match=r"approximate must be 'tanh' or 'none', got 'erf'"):
        bias_gelu(x, bias, approximate="erf")
    with pytest.raises(ValueError, match=r"x must have at least one dimension"):
        bias_gelu(x[0, 0])


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    x = torch.randn(4, 8, device="cpu")
    with pytest.raises(RuntimeError, match="bias_gelu: bias must have one element"):
        raw_op(x, torch.randn(7), True)
    with pytest.raises(RuntimeError, match="bias_gelu_backward: grad must have the shape"):
        torch.ops.parallel_ops.bias_gelu_backward.default(x[:2], x, None, True)
