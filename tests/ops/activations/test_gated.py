"""silu_mul and gelu_mul: gate and up in two tensors."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import bias_swiglu, gelu_mul, silu_mul
from parallel_ops.ops import gelu_mul_reference, silu_mul_reference
from support.numerics import suite
from support.numerics.suite import DEVICES, DTYPES, randn

pytestmark = pytest.mark.parametrize("device", DEVICES)
GPT_OSS = {"alpha": 1.702, "limit": 1.5, "up_offset": 1.0}  # but for a limit that is reached often
NO_OPTIONS = (1.0, None, 0.0)
PAIRS = {
    "silu": (silu_mul, silu_mul_reference),
    "gpt-oss": tuple(functools.partial(f, **GPT_OSS) for f in (silu_mul, silu_mul_reference)),
    "gelu tanh": (gelu_mul, gelu_mul_reference),
    "gelu": tuple(functools.partial(f, approximate="none") for f in (gelu_mul, gelu_mul_reference)),
}
ops = torch.ops.parallel_ops


def positional(f):
    """``f`` with the weights as its third argument, so that the checks differentiate them."""
    return lambda gate, up, weights=None: f(gate, up, weights=weights)


def inputs(*shape, dtype=torch.float32, device="cpu", seed=0, scale=1.0, weighted=True):
    gate, up = (randn(*shape, dtype=dtype, device=device, seed=seed + i, scale=scale) for i in (0, 1))
    return [gate, up, randn(*shape[:-1], dtype=torch.float32, device=device, seed=seed + 2) if weighted else None]


@given(
    shape=suite.shapes(),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(sorted(PAIRS)),
    weighted=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_shape(device, shape, dtype, name, weighted, scale, seed):
    weighted = weighted and len(shape) > 1  # a weight a row needs rows
    args = inputs(*shape, dtype=dtype, device=device, seed=seed, scale=scale, weighted=weighted)
    grad = randn(*shape, dtype=dtype, device=device, seed=seed + 3).detach()
    suite.check_numerics(*map(positional, PAIRS[name]), args, grad, slack_ulps=2)


def test_silu_mul_is_bias_swiglu_of_halves(device):
    gate, up, _ = inputs(20, 300, dtype=torch.bfloat16, device=device)
    assert torch.equal(silu_mul(gate, up), bias_swiglu(torch.cat([gate, up], dim=-1)))
    whole = torch.cat([gate, up], dim=-1).detach()
    assert torch.equal(silu_mul(*whole.chunk(2, dim=-1)), silu_mul(gate, up))


def test_limits_clamp_as_in_gpt_oss(device):
    """At the limit itself the gradient passes, as in torch.clamp before 2.14; bias_swiglu clamps what it has added."""
    gpt_oss = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    gate = torch.tensor([7.0, 8.0, -8.0, 1.0, 1.0, 1.0], device=device).requires_grad_()
    up = torch.tensor([7.0, 2.0, 2.0, 7.5, -7.0, -7.5], device=device).requires_grad_()
    ours, theirs = (suite.forward_backward(functools.partial(f, **gpt_oss), [gate, up]) for f in PAIRS["silu"])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert [t.count_nonzero() for t in ours] == [6, 5, 4]
    bias = torch.ones(12, device=device)
    assert torch.equal(bias_swiglu(torch.cat([gate, up]) - bias, bias, **gpt_oss), ours[0])
    assert silu_mul(gate, up * torch.nan, **gpt_oss).isnan().all()


def test_custom_op_contract(device):
    gate, up, weights = inputs(3, 2, 5, device=device)
    for w in (None, weights):
        suite.check_op(ops.silu_mul.default, [gate, up, w, *NO_OPTIONS])
        suite.check_op(ops.silu_mul.default, [gate, up, w, *GPT_OSS.values()])
        suite.check_op(ops.gelu_mul.default, [gate.transpose(0, 1).detach(), up.transpose(0, 1).detach(), None, True])


def test_autocast_runs_in_the_autocast_dtype_and_leaves_the_weights(device):
    gate, up, weights = inputs(6, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = silu_mul(gate, up.bfloat16(), weights=weights)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, silu_mul(gate.bfloat16(), up.bfloat16(), weights=weights))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1, 1), (1, 70000), (70000, 1)])
def test_extreme_shapes(device, shape):
    args, grad = inputs(*shape, device=device), torch.ones(shape, device=device)
    # Of 70,000 columns the weight's gradient is 19, its terms' magnitudes sum to 22,000: the order of summation shows.
    slack = 2 if device == "cpu" else 20
    suite.check_numerics(*map(positional, PAIRS["silu"]), args, grad, slack_ulps=slack)


def test_bad_arguments_are_named(device):
    gate, up = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    with pytest.raises(TypeError, match=r"silu_mul: gate must be a tensor, got list"):
        silu_mul([1.0], up)
    with pytest.raises(TypeError, match=r"gelu_mul: up is torch.bfloat16, but gate is torch.float32"):
        gelu_mul(gate, up.bfloat16())
    with pytest.raises(ValueError, match=r"silu_mul: up must have the shape of gate, \[4, 8\], got \[4, 7\]"):
        silu_mul(gate, up[:, :7])
    with pytest.raises(ValueError, match=r"silu_mul: weights must have shape \[4\] or \[4, 1\].*got \[3\]"):
        silu_mul(gate, up, weights=up[:3, 0])
    with pytest.raises(ValueError, match=r"silu_mul: limit must be None or a finite number above 0, got 0"):
        silu_mul(gate, up, limit=0)
    with pytest.raises(TypeError, match=r"silu_mul: alpha must be a number, got Tensor"):
        silu_mul(gate, up, alpha=up)
    with pytest.raises(ValueError, match=r"gelu_mul: approximate must be 'tanh' or 'none', got 'erf'"):
        gelu_mul(gate, up, approximate="erf")


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="silu_mul: up must have the shape"):
        ops.silu_mul(x, x[:2], None, *NO_OPTIONS)
    with pytest.raises(RuntimeError, match="gelu_mul: weights must be"):
        ops.gelu_mul(x, x, x[:3, 0], True)
    with pytest.raises(RuntimeError, match="silu_mul_backward: grad must have the shape"):
        ops.silu_mul_backward(x[:2], x, x, None, *NO_OPTIONS)
