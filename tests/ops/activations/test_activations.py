"""GeLU, SwiGLU and their gated relatives: numerics at any shape and at their limits, dtypes, what is refused."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import bias_gelu, bias_swiglu, gelu_mul, ops, silu_mul
from support.numerics import suite
from support.numerics.forms import GPT_OSS
from support.numerics.suite import DEVICES, DTYPES, randn, refuses

pytestmark = pytest.mark.parametrize("device", DEVICES)
raw = torch.ops.parallel_ops
NO_OPTIONS = (1.0, None, 0.0)
ONE_TENSOR = (bias_gelu, bias_swiglu)
OPTIONS = {
    bias_gelu: [{"approximate": "tanh"}, {"approximate": "none"}],
    bias_swiglu: [{}, {"interleaved": True}, {"interleaved": True, **GPT_OSS}],
    silu_mul: [{}, GPT_OSS],
    gelu_mul: [{"approximate": "tanh"}, {"approximate": "none"}],
}
activations = pytest.mark.parametrize("f", OPTIONS, ids=lambda f: f.__name__)


def both(f, **options):
    """The op and its reference, with the weights as their third argument, so that the checks differentiate them."""

    def positional(function):
        def run(x, other, weights=None):
            return function(x, other, **({} if weights is None else {"weights": weights}), **options)

        return run

    return positional(f), positional(getattr(ops, f"{f.__name__}_reference"))


def inputs(f, *shape, dtype=torch.float32, device="cpu", seed=0, scale=1.0, weighted=False):
    """x and its bias, or gate and up, from the shape of the output; and perhaps fp32 weights of the rows."""
    make = functools.partial(randn, dtype=dtype, device=device)
    width = shape[-1] * (2 if f is bias_swiglu else 1)
    other = (width,) if f in ONE_TENSOR else shape
    args = [make(*shape[:-1], width, seed=seed, scale=scale), make(*other, seed=seed + 1, scale=scale)]
    return [*args, randn(*shape[:-1], dtype=torch.float32, device=device, seed=seed + 2)] if weighted else args


@activations
@given(
    data=st.data(),
    shape=suite.shapes(),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_shape(device, f, data, shape, dtype, scale, seed):
    options = data.draw(st.sampled_from(OPTIONS[f]))
    weighted = f is not bias_gelu and len(shape) > 1 and data.draw(st.booleans())  # a weight a row needs rows
    args = inputs(f, *shape, dtype=dtype, device=device, seed=seed, scale=scale, weighted=weighted)
    if options.get("interleaved") or (f in ONE_TENSOR and data.draw(st.booleans())):
        args[1] = None
    grad = randn(*shape, dtype=dtype, device=device, seed=seed + 3).detach()
    op, reference = both(f, **options)
    suite.check_numerics(op, reference, args, grad, slack_ulps=2)
    if options.get("interleaved"):
        halves = torch.cat([args[0][..., ::2], args[0][..., 1::2]], dim=-1)
        plain = {name: value for name, value in options.items() if name != "interleaved"}
        assert torch.equal(op(*args), both(f, **plain)[0](halves, *args[1:]))


@activations
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4), (1, 1), (1, 70000), (70000, 1)])
def test_extreme_shapes(device, f, shape):
    args = inputs(f, *shape, device=device, weighted=f not in ONE_TENSOR)
    # Of 70,000 columns the weight's gradient is 19, its terms' magnitudes sum to 22,000: the order of summation shows.
    slack = 20 if device == "cuda" and f not in ONE_TENSOR else 2
    suite.check_numerics(*both(f), args, torch.ones(shape, device=device), slack_ulps=slack)


@activations
def test_autocast_runs_in_the_autocast_dtype(device, f):
    """But for the weights, and fp64."""
    x, other, *weights = inputs(f, 6, 8, device=device, weighted=f is not bias_gelu)
    op, _ = both(f)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = op(x.bfloat16(), other, *weights)
        wide = op(x.double(), other, *weights)
    assert y.dtype is torch.bfloat16 and wide.dtype is torch.float64
    assert torch.equal(y, op(x.bfloat16(), other.bfloat16(), *weights))
    y.float().sum().backward()
    assert other.grad is not None and other.grad.dtype is torch.float32


@pytest.mark.parametrize("f", ONE_TENSOR, ids=lambda f: f.__name__)
def test_a_bias_in_a_dtype_of_its_own(device, f):
    """Parameters in fp32, activations in bf16: the bias is not rounded, its gradient is in fp32."""
    x, bias = inputs(f, 40, 1030, device=device)
    grad = randn(40, 1030, dtype=torch.bfloat16, device=device, seed=2).detach()
    suite.check_numerics(*both(f), [x.detach().bfloat16().requires_grad_(), bias], grad, slack_ulps=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_rows(device, dtype):
    """The router's probabilities, in fp32 for activations in bf16, as a column or not, with a bias and without."""
    x, bias = inputs(bias_swiglu, 30, 1100, dtype=dtype, device=device)
    weights = torch.rand(30, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    grad = randn(30, 1100, dtype=dtype, device=device, seed=3).detach()
    op, reference = both(bias_swiglu)
    for b in (bias, None):
        suite.check_numerics(op, reference, [x, b, weights], grad, slack_ulps=2)
        assert torch.equal(op(x, b, weights), op(x, b, weights.detach()[:, None]))
    suite.check_deterministic(op, [x, bias, weights], grad)


SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 88.0, -88.0, 1e-40]


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_special_values_flow_through_gelu_as_in_pytorch(device, approximate):
    op, reference = both(bias_gelu, approximate=approximate)
    x = torch.tensor(SPECIAL, device=device)
    # In fp64: PyTorch's vectorised fp32 erf gives NaN at infinity (2.13, x86).
    torch.testing.assert_close(op(x, None), reference(x.double(), None).float(), equal_nan=True)


def test_special_values_flow_through_swiglu_as_in_pytorch(device):
    x = torch.cartesian_prod(*[torch.tensor(SPECIAL, device=device)] * 2).requires_grad_()
    for a, b in zip(*(suite.forward_backward(f, [x, None]) for f in both(bias_swiglu)), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_gate_is_the_first_half(device):
    x = torch.tensor([[-100.0, 3.0]], device=device)
    assert bias_swiglu(x).item() == pytest.approx(0.0, abs=1e-30)
    assert bias_swiglu(x.flip(-1)).item() == pytest.approx(-100 * 3 / (1 + 2.718281828**-3), rel=1e-6)


def test_silu_mul_is_bias_swiglu_of_halves(device):
    gate, up = inputs(silu_mul, 20, 300, dtype=torch.bfloat16, device=device)
    whole = torch.cat([gate, up], dim=-1).detach()
    assert torch.equal(silu_mul(gate, up), bias_swiglu(whole))
    assert torch.equal(silu_mul(*whole.chunk(2, dim=-1)), silu_mul(gate, up))


def test_limits_clamp_as_in_gpt_oss(device):
    """At the limit itself the gradient passes, as in torch.clamp before 2.14; bias_swiglu clamps what it has added."""
    gpt_oss = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    gate = torch.tensor([7.0, 8.0, -8.0, 1.0, 1.0, 1.0], device=device).requires_grad_()
    up = torch.tensor([7.0, 2.0, 2.0, 7.5, -7.0, -7.5], device=device).requires_grad_()
    ours, theirs = (suite.forward_backward(f, [gate, up]) for f in both(silu_mul, **gpt_oss))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert [t.count_nonzero() for t in ours] == [6, 5, 4]
    bias = torch.ones(12, device=device)
    assert torch.equal(bias_swiglu(torch.cat([gate, up]) - bias, bias, **gpt_oss), ours[0])
    assert silu_mul(gate, up * torch.nan, **gpt_oss).isnan().all()


@pytest.mark.parametrize("f", ONE_TENSOR, ids=lambda f: f.__name__)
def test_bad_tensors_are_named(device, f):
    x, bias = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    wrong = functools.partial(refuses, f)
    wrong(TypeError, "x must be a tensor, got list", [1.0])
    wrong(TypeError, "x must be float32.*got torch.int64", x.long(), bias)
    wrong(ValueError, r"bias must have shape \[8\].*got \[4\]", x, bias[:4])
    wrong(ValueError, "bias is on meta", x, bias.to("meta"))
    wrong(ValueError, "x must have at least one dimension", x[0, 0])


def test_bad_arguments_are_named(device):
    x = torch.randn(4, 8, device=device)
    for f, tensors in ((bias_gelu, (x,)), (gelu_mul, (x, x))):
        refuses(f, ValueError, "approximate must be 'tanh' or 'none', got 'erf'", *tensors, approximate="erf")
    refuses(bias_swiglu, ValueError, r"the last dimension of x must be even.*got shape \[4, 7\]", x[:, :7])
    for f, tensors in ((bias_swiglu, (x,)), (silu_mul, (x, x))):
        refuses(f, ValueError, r"weights must have shape \[4\] or \[4, 1\].*got \[3\]", *tensors, weights=x[:3, 0])
    refuses(silu_mul, TypeError, "gate must be a tensor, got list", [1.0], x)
    refuses(gelu_mul, TypeError, "up is torch.bfloat16, but gate is torch.float32", x, x.bfloat16())
    refuses(silu_mul, ValueError, r"up must have the shape of gate, \[4, 8\], got \[4, 7\]", x, x[:, :7])
    refuses(silu_mul, ValueError, "limit must be None or a finite number above 0, got 0", x, x, limit=0)
    refuses(silu_mul, TypeError, "alpha must be a number, got Tensor", x, x, alpha=x)


def test_direct_calls_of_the_ops_cannot_read_out_of_bounds(device):
    x, wrong = torch.randn(4, 8), torch.randn(7)
    refuses(raw.bias_gelu, RuntimeError, "bias must have one element", x, wrong, True)
    refuses(raw.bias_gelu_backward, RuntimeError, "grad must have the shape", x[:2], x, None, True)
    refuses(raw.bias_swiglu, RuntimeError, "bias must have one element", x, wrong, None, *NO_OPTIONS)
    refuses(raw.bias_swiglu, RuntimeError, "the last dimension of x must be even", x[:, :7], None, None, *NO_OPTIONS)
    refuses(raw.bias_swiglu_backward, RuntimeError, "grad must have the shape", x, x, None, None, *NO_OPTIONS)
    refuses(raw.silu_mul, RuntimeError, "up must have the shape", x, x[:2], None, *NO_OPTIONS)
    refuses(raw.gelu_mul, RuntimeError, "weights must be", x, x, x[:3, 0], True)
    refuses(raw.silu_mul_backward, RuntimeError, "grad must have the shape", x[:2], x, x, None, *NO_OPTIONS)
