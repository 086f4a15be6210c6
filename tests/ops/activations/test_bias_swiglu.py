import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import bias_swiglu
from parallel_ops.ops import bias_swiglu_reference
from support.numerics import suite
from support.numerics.suite import DEVICES, DTYPES, randn

pytestmark = pytest.mark.parametrize("device", DEVICES)
NO_OPTIONS = (1.0, None, 0.0)
raw_op = torch.ops.parallel_ops.bias_swiglu.default


def inputs(*shape, dtype=torch.float32, device="cpu", seed=0, scale=1.0):
    """x of ``[..., 2F]`` and its bias, from the shape of the output."""
    width = 2 * shape[-1]
    x = randn(*shape[:-1], width, dtype=dtype, device=device, seed=seed, scale=scale)
    return [x, randn(width, dtype=dtype, device=device, seed=seed + 1)]


@given(
    shape=suite.shapes(),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_shape(device, shape, dtype, with_bias, scale, seed):
    x, bias = inputs(*shape, dtype=dtype, device=device, seed=seed, scale=scale)
    grad = randn(*shape, dtype=dtype, device=device, seed=seed + 2).detach()
    args = [x, bias if with_bias else None]
    suite.check_numerics(bias_swiglu, bias_swiglu_reference, args, grad, slack_ulps=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numerics_of_a_large_tensor(device, dtype):
    args = inputs(2048, 384, dtype=dtype, device=device, scale=2)
    grad = randn(2048, 384, dtype=dtype, device=device, seed=2).detach()
    suite.check_numerics(bias_swiglu, bias_swiglu_reference, args, grad)


@given(
    shape=suite.shapes(),
    dtype=st.sampled_from(DTYPES),
    weighted=st.booleans(),
    options=st.sampled_from([{}, {"alpha": 1.702, "limit": 1.5, "up_offset": 1.0}]),
    seed=st.integers(0, 1000),
)
def test_gate_and_up_in_turn(device, shape, dtype, weighted, options, seed):
    x, _ = inputs(*shape, dtype=dtype, device=device, seed=seed)
    grad = randn(*shape, dtype=dtype, device=device, seed=seed + 2).detach()
    weighted = weighted and len(shape) > 1  # a weight a row needs rows
    of_rows = randn(*shape[:-1], dtype=torch.float32, device=device, seed=seed + 3) if weighted else None
    ours, theirs = (
        lambda x, w, f=f: f(x, weights=w, interleaved=True, **options) for f in (bias_swiglu, bias_swiglu_reference)
    )
    args = [x, of_rows]
    suite.check_numerics(ours, theirs, args, grad, slack_ulps=2)
    halves = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
    assert torch.equal(ours(*args), bias_swiglu(halves, weights=args[1], **options))


def test_gate_is_the_first_half(device):
    x = torch.tensor([[-100.0, 3.0]], device=device)
    assert bias_swiglu(x).item() == pytest.approx(0.0, abs=1e-30)
    assert bias_swiglu(x.flip(-1)).item() == pytest.approx(-100 * 3 / (1 + 2.718281828**-3), rel=1e-6)


def test_custom_op_contract(device):
    x, bias = inputs(3, 2, 5, device=device)
    for args in ([x, bias], [x, None], [x.detach(), bias], [x.transpose(0, 1).detach(), None]):
        suite.check_op(raw_op, [*args, None, *NO_OPTIONS])
    suite.check_op(raw_op, [x, bias, randn(3, 2, 1, dtype=torch.float32, device=device), 1.702, 7.0, 1.0])
    suite.check_op(raw_op, [x, None, randn(3, 2, 1, dtype=torch.float32, device=device), 1.702, 7.0, 1.0, True])
    suite.check_op(raw_op, [x.transpose(0, 1).detach(), None, None, *NO_OPTIONS, True])


def test_autocast_runs_in_the_autocast_dtype(device):
    x, bias = inputs(6, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = bias_swiglu(x.bfloat16(), bias)
        wide = bias_swiglu(x.double(), bias)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, bias_swiglu(x.bfloat16(), bias.bfloat16()))
    assert wide.dtype is torch.float64
    y.float().sum().backward()
    assert bias.grad is not None and bias.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_rows(device, dtype):
    """The router's probabilities, in fp32 for activations in bf16, as a column or not, with a bias and without."""
    x, bias = inputs(30, 1100, dtype=dtype, device=device)
    weights = torch.rand(30, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    grad = randn(30, 1100, dtype=dtype, device=device, seed=3).detach()

    def op(x, bias, weights):
        return bias_swiglu(x, bias, weights=weights)

    def reference(x, bias, weights):
        return bias_swiglu_reference(x, bias, weights=weights)

    for b in (bias, None):
        suite.check_numerics(op, reference, [x, b, weights], grad, slack_ulps=2)
        ours, column = (suite.forward_backward(op, [x, b, w], grad) for w in (weights, weights.detach()[:, None]))
        assert torch.equal(ours[0], column[0])
    suite.check_deterministic(op, [x, bias, weights], grad)


def test_special_values_flow_as_in_pytorch(device):
    values = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 88.0, -88.0, 1e-40]
    x = torch.cartesian_prod(*[torch.tensor(values, device=device)] * 2).requires_grad_()
    ours, theirs = (suite.forward_backward(f, [x]) for f in (bias_swiglu, bias_swiglu_reference))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4), (1, 1), (1, 70000), (70000, 1)])
def test_extreme_shapes(device, shape):
    grad = torch.ones(shape, device=device)
    suite.check_numerics(bias_swiglu, bias_swiglu_reference, inputs(*shape, device=device), grad, slack_ulps=2)


def test_bad_arguments_are_named(device):
    x, bias = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    with pytest.raises(TypeError, match=r"bias_swiglu: x must be a tensor, got list"):
        bias_swiglu([1.0])
    with pytest.raises(TypeError, match=r"bias_swiglu: x must be float32.*got torch.int64"):
        bias_swiglu(x.long(), bias)
    with pytest.raises(ValueError, match=r"bias_swiglu: the last dimension of x must be even.*got shape \[4, 7\]"):
        bias_swiglu(x[:, :7])
    with pytest.raises(ValueError, match=r"bias_swiglu: bias must have shape \[8\].*got \[4\]"):
        bias_swiglu(x, bias[:4])
    with pytest.raises(ValueError, match=r"bias_swiglu: bias is on meta"):
        bias_swiglu(x, bias.to("meta"))
    with pytest.raises(ValueError, match=r"bias_swiglu: weights must have shape \[4\] or \[4, 1\].*got \[8\]"):
        bias_swiglu(x, bias, weights=bias)
    with pytest.raises(ValueError, match=r"bias_swiglu: x must have at least one dimension"):
        bias_swiglu(x[0, 0])


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    x = torch.randn(4, 8, device="cpu")
    with pytest.raises(RuntimeError, match="bias_swiglu: bias must have one element"):
        raw_op(x, torch.randn(7), None, *NO_OPTIONS)
    with pytest.raises(RuntimeError, match="bias_swiglu: the last dimension of x must be even"):
        raw_op(x[:, :7], None, None, *NO_OPTIONS)
    with pytest.raises(RuntimeError, match="bias_swiglu_backward: grad must have the shape"):
        torch.ops.parallel_ops.bias_swiglu_backward.default(x, x, None, None, *NO_OPTIONS)
