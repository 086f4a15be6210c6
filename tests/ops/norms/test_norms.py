"""What layer_norm and rms_norm have in common; what layer_norm has beyond rms_norm is in test_layer_norm.py."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import layer_norm, rms_norm
from parallel_ops.ops import layer_norm_reference, rms_norm_reference
from support.numerics import suite
from support.numerics.norms import grads, stream, with_residual
from support.numerics.suite import DEVICES, DTYPES, randn, refuses


@dataclasses.dataclass(frozen=True)
class Norm:
    op: Callable
    reference: Callable
    parameters: int

    @property
    def name(self):
        return self.op.__name__

    @property
    def raw(self):
        return getattr(torch.ops.parallel_ops, self.name).default


NORMS = [Norm(layer_norm, layer_norm_reference, 2), Norm(rms_norm, rms_norm_reference, 1)]

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("norm", NORMS, ids=[norm.name for norm in NORMS]),
]
residuals = pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])


def arguments(norm, *shape, dtype, device, residual, bias=True, seed=0, **kwargs):
    """x, residual, parameters, and the incoming gradients."""
    x = stream(*shape, dtype=dtype, device=device, seed=seed, **kwargs)
    r = stream(*shape, dtype=dtype, device=device, seed=seed + 1) if residual else None
    params = [randn(shape[-1], dtype=dtype, device=device, seed=seed + 2 + i) for i in range(norm.parameters)]
    if not bias:
        params[1:] = [None] * (norm.parameters - 1)
    g = grads(*shape, dtype=dtype, device=device, seed=seed + 4)
    return [x, r, *params], g if residual else g[:1]


def check(norm, args, g, slack_ulps=2, **kwargs):
    op, reference = (with_residual(f, **kwargs) for f in (norm.op, norm.reference))
    suite.check_numerics(op, reference, args, g, slack_ulps=slack_ulps)


@given(
    shape=suite.shapes().filter(lambda s: s[-1] >= 5),  # under 5, dx is what cancellation leaves
    dtype=st.sampled_from(DTYPES),
    residual=st.booleans(),
    bias=st.booleans(),
    zero_centered=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_shape(device, norm, shape, dtype, residual, bias, zero_centered, scale, seed):
    options = {"dtype": dtype, "device": device, "residual": residual, "bias": bias, "seed": seed, "scale": scale}
    check(norm, *arguments(norm, *shape, **options), zero_centered=zero_centered)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", ["parameters", "residual", "both"])
def test_16_bit_activations_beside_float32(device, norm, dtype, wide):
    """The dtypes that trainers keep: parameters, the residual stream, or both wider than the activations."""
    (x, r, *params), g = arguments(norm, 64, 1100, dtype=dtype, device=device, residual=True)
    if wide != "residual":
        params = [p.detach().float().requires_grad_() for p in params]
    if wide != "parameters":
        r, g = r.detach().float().requires_grad_(), [g[0], g[1].float()]
    check(norm, [x, r, *params], g)
    y, total = norm.op(x, *params, residual=r)
    assert y.dtype is dtype and total.dtype is r.dtype
    y, unused = with_residual(norm.op)(x, r, *params)
    torch.autograd.grad(unused.sum(), [x, r])


@residuals
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_parameters(device, norm, dtype, residual):
    (x, r, *_), g = arguments(norm, 6, 70, dtype=dtype, device=device, residual=residual)
    check(norm, [x, r], g)
    assert torch.equal(norm.op(x), norm.op(x, torch.ones(70, device=device)))


def test_gradient_of_one_output_alone(device, norm):
    (x, r, *params), _ = arguments(norm, 3, 8, dtype=torch.float64, device=device, residual=True)
    for index in (0, 1):
        first, second = (
            torch.autograd.grad(f(x, *params, residual=r)[index].square().sum(), [x, r, *params], allow_unused=True)
            for f in (norm.op, norm.reference)
        )
        for got, expected in zip(first, second, strict=True):
            torch.testing.assert_close(got, torch.zeros_like(got) if expected is None else expected)


@residuals
def test_custom_op_contract_in_16_bits(device, norm, residual):
    """Beside a float32 residual stream; of all parameters one, then none."""
    (x, r, *params), _ = arguments(norm, 3, 2, 5, dtype=torch.float32, device=device, residual=residual)
    narrow = x.detach().bfloat16().requires_grad_()
    for first in (params[0], None):
        suite.check_op(norm.raw, [narrow, first, *[None] * (len(params) - 1), r, 1e-5, False])


def test_autocast_keeps_the_dtype_of_the_stream(device, norm):
    (x, r, *params), _ = arguments(norm, 6, 8, dtype=torch.float32, device=device, residual=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = norm.op(x.bfloat16(), *params)
        z, total = norm.op(x.bfloat16(), *params, residual=r)
        widened, _ = norm.op(x, *(p.bfloat16() for p in params), residual=r.bfloat16())
    assert y.dtype is z.dtype is torch.bfloat16 and total.dtype is widened.dtype is torch.float32
    assert torch.equal(y, norm.op(x.bfloat16(), *params))
    y.float().sum().backward()
    assert params[0].grad is not None and params[0].grad.dtype is torch.float32


@pytest.mark.parametrize("constant", [0.0, 3.0])
def test_special_values_flow_as_in_pytorch(device, norm, constant):
    x = torch.randn(6, 40, device=device)
    for row, value in enumerate([torch.nan, torch.inf, -torch.inf, 1e30, 1e-30]):
        x[row, 3] = value
    x[5] = constant  # no variance at all
    params = torch.randn(norm.parameters, 40, device=device)
    # As on the CPU: PyTorch's layer_norm for CUDA makes NaN of a variance that overflows.
    expected = norm.reference(x.cpu(), *params.cpu()).to(device)
    torch.testing.assert_close(norm.op(x, *params), expected, equal_nan=True)


@residuals
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4), (1, 5), (5,), (1, 70000), (70000, 2)])
def test_extreme_shapes(device, norm, shape, residual):
    check(norm, *arguments(norm, *shape, dtype=torch.float32, device=device, residual=residual))


def test_bad_arguments_are_named(device, norm):
    x, w = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    for error, message, args, kwargs in [
        (TypeError, "x must be a tensor, got list", ([1.0], w), {}),
        (TypeError, "weight must be a tensor, got float", (x, 1.0), {}),
        (TypeError, r"x must be float32.*got torch.int64", (x.long(), w), {}),
        (TypeError, "weight is torch.float64, but x is torch.float32", (x, w.double()), {}),
        (TypeError, "residual is torch.bfloat16, but x is torch.float32", (x, w), {"residual": x.bfloat16()}),
        (ValueError, r"weight must have shape \[8\].*got \[7\]", (x, w[:7]), {}),
        (ValueError, r"residual must have the shape of x, \[4, 8\], got \[8\]", (x, w), {"residual": w}),
        (ValueError, "weight is on meta", (x, w.to("meta")), {}),
        (ValueError, "eps must not be negative, got -1", (x, w), {"eps": -1}),
        (TypeError, "eps must be a number, got Tensor", (x, w), {"eps": w}),
        (ValueError, "x must have at least one dimension", (x[0, 0], w), {}),
    ]:
        refuses(norm.op, error, message, *args, **kwargs)


def test_direct_calls_of_the_ops_cannot_read_out_of_bounds(device, norm):
    x, w = torch.randn(4, 8), torch.randn(8)
    others = norm.parameters - 1  # a bias, and a mean
    refuses(norm.raw, RuntimeError, "weight must have one element", x, w[:7], *[None] * others, None, 1e-5, False)
    refuses(norm.raw, RuntimeError, "residual must have the shape", x, w, *[None] * others, x[:2], 1e-5, False)
    op = getattr(torch.ops.parallel_ops, f"{norm.name}_backward")
    wrong = functools.partial(refuses, functools.partial(op, zero_centered=False), RuntimeError)
    given = [x, w, *[w] * others, *[w[:4]] * others]
    wrong("rstd must be what the forward returned", x, None, *given, w[:3])
    wrong("grad must have the shape", x[:2], None, *given, w[:4])
    if others:
        wrong("bias must have one element", x, None, x, w, w[:7], w[:4], w[:4])


def test_the_mean_of_a_row_is_kept_by_rms_norm_alone(device, norm):
    x = torch.randn(6, 40, device=device) + 5
    y = norm.op(x, torch.ones(40, device=device))
    torch.testing.assert_close(y.square().mean(-1), torch.ones(6, device=device), rtol=1e-4, atol=0)
    if norm.op is rms_norm:
        torch.testing.assert_close(y / y[:, :1], x / x[:, :1])
    else:
        torch.testing.assert_close(y.mean(-1), torch.zeros(6, device=device), rtol=0, atol=1e-5)
