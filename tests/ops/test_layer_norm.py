import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import layer_norm
from parallel_ops.ops import layer_norm_reference
from support import suite
from support.norms import grads, stream, with_residual
from support.suite import DEVICES, DTYPES, randn

pytestmark = pytest.mark.parametrize("device", DEVICES)
raw_op = torch.ops.parallel_ops.layer_norm.default
residuals = pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])


def arguments(*shape, dtype, device, residual, bias=True, seed=0, **kwargs):
    """x, residual, weight, bias, and the incoming gradients."""
    x = stream(*shape, dtype=dtype, device=device, seed=seed, **kwargs)
    r = stream(*shape, dtype=dtype, device=device, seed=seed + 1) if residual else None
    w, b = (randn(shape[-1], dtype=dtype, device=device, seed=seed + i) for i in (2, 3))
    g = grads(*shape, dtype=dtype, device=device, seed=seed + 4)
    return [x, r, w, b if bias else None], g if residual else g[:1]


def check(args, g, slack_ulps=2, **kwargs):
    op, reference = (with_residual(f, **kwargs) for f in (layer_norm, layer_norm_reference))
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
def test_numerics_of_any_shape(device, shape, dtype, residual, bias, zero_centered, scale, seed):
    args, g = arguments(*shape, dtype=dtype, device=device, residual=residual, bias=bias, seed=seed, scale=scale)
    check(args, g, zero_centered=zero_centered)


@residuals
@pytest.mark.parametrize("dtype", DTYPES)
def test_numerics_of_a_large_tensor(device, dtype, residual):
    check(*arguments(2048, 384, dtype=dtype, device=device, residual=residual), slack_ulps=0.5)


def test_a_mean_far_from_zero_does_not_cancel(device):
    """E[x^2] - E[x]^2 in fp32 would have no digit of the variance left."""
    args, g = arguments(64, 1000, dtype=torch.float32, device=device, residual=False, mean=1e4)
    check(args, g, slack_ulps=0.5)


@residuals
@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradient_matches_finite_differences(device, residual, zero_centered):
    args, _ = arguments(3, 2, 5, dtype=torch.float64, device=device, residual=residual)
    suite.check_gradient(with_residual(layer_norm, zero_centered=zero_centered), args)


def test_gradient_of_one_output_alone(device):
    (x, r, w, b), _ = arguments(3, 8, dtype=torch.float64, device=device, residual=True)
    for index in (0, 1):
        first, second = (
            torch.autograd.grad(f(x, w, b, residual=r)[index].square().sum(), [x, r, w, b], allow_unused=True)
            for f in (layer_norm, layer_norm_reference)
        )
        for got, expected in zip(first, second, strict=True):
            torch.testing.assert_close(got, torch.zeros_like(got) if expected is None else expected)


@residuals
def test_custom_op_contract(device, residual):
    (x, r, w, b), _ = arguments(3, 2, 5, dtype=torch.float32, device=device, residual=residual)
    suite.check_op(raw_op, [x, w, b, r, 1e-5, False])
    suite.check_op(raw_op, [x.transpose(0, 1).detach(), w, None, None if r is None else r.transpose(0, 1), 1e-5, True])
    suite.check_second_derivative_raises(with_residual(layer_norm), [x, r, w, b])


@residuals
def test_same_bits_on_every_run_and_thread_count(device, residual):
    suite.check_deterministic(
        with_residual(layer_norm), *arguments(700, 1100, dtype=torch.float32, device=device, residual=residual)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(device, dtype):
    args, _ = arguments(4, 3, 1030, dtype=dtype, device=device, residual=True)
    op = with_residual(layer_norm)
    suite.check_layouts(op, args, index=0)
    suite.check_layouts(op, args, index=1)
    suite.check_layouts(op, [args[0], None, *args[2:]], index=0)
    for index in (2, 3):
        for layout in suite.layouts(args[index]).values():
            varied = [*args[:index], layout, *args[index + 1 :]]
            assert torch.equal(op(*varied)[0], op(*args)[0])


@residuals
def test_compiles_to_one_graph_for_all_sizes(device, residual):
    cases = [arguments(n, 3, h, dtype=torch.float32, device=device, residual=residual)[0] for n, h in [(4, 8), (6, 10)]]
    suite.check_compiles(with_residual(layer_norm), cases)
    suite.check_compiles(with_residual(layer_norm), cases, backend="inductor")


@residuals
def test_activation_checkpointing(device, residual):
    suite.check_checkpointing(
        with_residual(layer_norm), arguments(6, 8, dtype=torch.float32, device=device, residual=residual)[0]
    )


def test_autocast_keeps_the_dtype_of_the_stream(device):
    (x, r, w, b), _ = arguments(6, 8, dtype=torch.float32, device=device, residual=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer_norm(x.bfloat16(), w, b)
        widened, total = layer_norm(x.bfloat16(), w, b, residual=r)
    assert y.dtype is torch.bfloat16 and widened.dtype is total.dtype is torch.float32
    assert torch.equal(y, layer_norm(x.bfloat16(), w.bfloat16(), b.bfloat16()))
    y.float().sum().backward()
    assert w.grad is not None and w.grad.dtype is torch.float32
    suite.check_compiles_under_autocast(layer_norm, [x, w, b])


def test_special_values_flow_as_in_pytorch(device):
    x = torch.randn(6, 40, device=device)
    for row, value in enumerate([torch.nan, torch.inf, -torch.inf, 1e30, 1e-30]):
        x[row, 3] = value
    x[5] = 3.0  # no variance at all
    w, b = torch.randn(2, 40, device=device)
    torch.testing.assert_close(layer_norm(x, w, b), layer_norm_reference(x, w, b), equal_nan=True)


@residuals
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4), (1, 5), (5,), (1, 70000), (70000, 2)])
def test_extreme_shapes(device, shape, residual):
    check(*arguments(*shape, dtype=torch.float32, device=device, residual=residual))


def test_one_column_is_normalised_to_the_bias(device):
    args, _ = arguments(7, 1, dtype=torch.float32, device=device, residual=False)
    y, dx, dw, db = suite.forward_backward(with_residual(layer_norm), args)
    assert torch.equal(y, args[3].detach().expand(7, 1))
    assert not dx.any() and not dw.any() and db.item() == 7


def test_bad_arguments_are_named(device):
    x, w = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    with pytest.raises(TypeError, match=r"layer_norm: x must be a tensor, got list"):
        layer_norm([1.0], w)
    with pytest.raises(TypeError, match=r"layer_norm: weight must be a tensor, got NoneType"):
        layer_norm(x, None)
    with pytest.raises(TypeError, match=r"layer_norm: x must be float32.*got torch.int64"):
        layer_norm(x.long(), w)
    with pytest.raises(TypeError, match=r"layer_norm: bias is torch.bfloat16, but x is torch.float32"):
        layer_norm(x, w, w.bfloat16())
    with pytest.raises(ValueError, match=r"layer_norm: weight must have shape \[8\].*got \[7\]"):
        layer_norm(x, w[:7])
    with pytest.raises(ValueError, match=r"layer_norm: residual must have the shape of x, \[4, 8\], got \[8\]"):
        layer_norm(x, w, residual=w)
    with pytest.raises(ValueError, match=r"layer_norm: weight is on meta"):
        layer_norm(x, w.to("meta"))
    with pytest.raises(ValueError, match=r"layer_norm: eps must not be negative, got -1"):
        layer_norm(x, w, eps=-1)
    with pytest.raises(TypeError, match=r"layer_norm: eps must be a number, got Tensor"):
        layer_norm(x, w, eps=w)
    with pytest.raises(ValueError, match=r"x must have at least one dimension"):
        layer_norm(x[0, 0], w)


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    x, w = torch.randn(4, 8), torch.randn(8)
    backward = functools.partial(torch.ops.parallel_ops.layer_norm_backward.default, has_bias=True, zero_centered=False)
    with pytest.raises(RuntimeError, match="layer_norm: weight must have one element"):
        raw_op(x, w[:7], None, None, 1e-5, False)
    with pytest.raises(RuntimeError, match="layer_norm: residual must have the shape"):
        raw_op(x, w, None, x[:2], 1e-5, False)
    with pytest.raises(RuntimeError, match="layer_norm_backward: rstd must be what the forward returned"):
        backward(x, None, x, w, w[:4], w[:3])
    with pytest.raises(RuntimeError, match="layer_norm_backward: grad must have the shape"):
        backward(x[:2], None, x, w, w[:4], w[:4])
