import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import rms_norm
from parallel_ops.ops import rms_norm_reference
from support import suite
from support.norms import grads, stream, with_residual
from support.suite import DEVICES, DTYPES, randn

pytestmark = pytest.mark.parametrize("device", DEVICES)
raw_op = torch.ops.parallel_ops.rms_norm.default
residuals = pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])


def arguments(*shape, dtype, device, residual, seed=0, **kwargs):
    """x, residual, weight, and the incoming gradients."""
    x = stream(*shape, dtype=dtype, device=device, seed=seed, **kwargs)
    r = stream(*shape, dtype=dtype, device=device, seed=seed + 1) if residual else None
    w = randn(shape[-1], dtype=dtype, device=device, seed=seed + 2)
    g = grads(*shape, dtype=dtype, device=device, seed=seed + 4)
    return [x, r, w], g if residual else g[:1]


def check(args, g, slack_ulps=2, **kwargs):
    op, reference = (with_residual(f, **kwargs) for f in (rms_norm, rms_norm_reference))
    suite.check_numerics(op, reference, args, g, slack_ulps=slack_ulps)


@given(
    shape=suite.shapes().filter(lambda s: s[-1] >= 5),  # under 5, dx is what cancellation leaves
    dtype=st.sampled_from(DTYPES),
    residual=st.booleans(),
    zero_centered=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_shape(device, shape, dtype, residual, zero_centered, scale, seed):
    args, g = arguments(*shape, dtype=dtype, device=device, residual=residual, seed=seed, scale=scale)
    check(args, g, zero_centered=zero_centered)


@residuals
@pytest.mark.parametrize("dtype", DTYPES)
def test_numerics_of_a_large_tensor(device, dtype, residual):
    check(*arguments(2048, 384, dtype=dtype, device=device, residual=residual), slack_ulps=0.5)


@residuals
@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradient_matches_finite_differences(device, residual, zero_centered):
    args, _ = arguments(3, 2, 5, dtype=torch.float64, device=device, residual=residual)
    suite.check_gradient(with_residual(rms_norm, zero_centered=zero_centered), args)


def test_gradient_of_one_output_alone(device):
    (x, r, w), _ = arguments(3, 8, dtype=torch.float64, device=device, residual=True)
    for index in (0, 1):
        first, second = (
            torch.autograd.grad(f(x, w, residual=r)[index].square().sum(), [x, r, w], allow_unused=True)
            for f in (rms_norm, rms_norm_reference)
        )
        for got, expected in zip(first, second, strict=True):
            torch.testing.assert_close(got, torch.zeros_like(got) if expected is None else expected)


@residuals
def test_custom_op_contract(device, residual):
    (x, r, w), _ = arguments(3, 2, 5, dtype=torch.float32, device=device, residual=residual)
    suite.check_op(raw_op, [x, w, r, 1e-5, False])
    suite.check_op(raw_op, [x.transpose(0, 1).detach(), w, None if r is None else r.transpose(0, 1), 1e-5, True])
    suite.check_second_derivative_raises(with_residual(rms_norm), [x, r, w])


@residuals
def test_same_bits_on_every_run_and_thread_count(device, residual):
    suite.check_deterministic(
        with_residual(rms_norm), *arguments(700, 1100, dtype=torch.float32, device=device, residual=residual)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(device, dtype):
    args, _ = arguments(4, 3, 1030, dtype=dtype, device=device, residual=True)
    op = with_residual(rms_norm)
    suite.check_layouts(op, args, index=0)
    suite.check_layouts(op, args, index=1)
    suite.check_layouts(op, [args[0], None, args[2]], index=0)
    for layout in suite.layouts(args[2]).values():
        assert torch.equal(op(*args[:2], layout)[0], op(*args)[0])


@residuals
def test_compiles_to_one_graph_for_all_sizes(device, residual):
    cases = [arguments(n, 3, h, dtype=torch.float32, device=device, residual=residual)[0] for n, h in [(4, 8), (6, 10)]]
    suite.check_compiles(with_residual(rms_norm), cases)
    suite.check_compiles(with_residual(rms_norm), cases, backend="inductor")


@residuals
def test_activation_checkpointing(device, residual):
    suite.check_checkpointing(
        with_residual(rms_norm), arguments(6, 8, dtype=torch.float32, device=device, residual=residual)[0]
    )


def test_autocast_keeps_the_dtype_of_the_stream(device):
    (x, r, w), _ = arguments(6, 8, dtype=torch.float32, device=device, residual=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = rms_norm(x.bfloat16(), w)
        widened, total = rms_norm(x.bfloat16(), w, residual=r)
    assert y.dtype is torch.bfloat16 and widened.dtype is total.dtype is torch.float32
    assert torch.equal(y, rms_norm(x.bfloat16(), w.bfloat16()))
    y.float().sum().backward()
    assert w.grad is not None and w.grad.dtype is torch.float32
    suite.check_compiles_under_autocast(rms_norm, [x, w])


def test_special_values_flow_as_in_pytorch(device):
    x = torch.randn(6, 40, device=device)
    for row, value in enumerate([torch.nan, torch.inf, -torch.inf, 1e30, 1e-30]):
        x[row, 3] = value
    x[5] = 0.0
    w = torch.randn(40, device=device)
    torch.testing.assert_close(rms_norm(x, w), rms_norm_reference(x, w), equal_nan=True)


@residuals
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4), (1, 5), (5,), (1, 70000), (70000, 2)])
def test_extreme_shapes(device, shape, residual):
    check(*arguments(*shape, dtype=torch.float32, device=device, residual=residual))


def test_bad_arguments_are_named(device):
    x, w = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    with pytest.raises(TypeError, match=r"rms_norm: x must be a tensor, got list"):
        rms_norm([1.0], w)
    with pytest.raises(TypeError, match=r"rms_norm: weight must be a tensor, got NoneType"):
        rms_norm(x, None)
    with pytest.raises(TypeError, match=r"rms_norm: x must be float32.*got torch.int64"):
        rms_norm(x.long(), w)
    with pytest.raises(TypeError, match=r"rms_norm: weight is torch.bfloat16, but x is torch.float32"):
        rms_norm(x, w.bfloat16())
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \[8\].*got \[7\]"):
        rms_norm(x, w[:7])
    with pytest.raises(ValueError, match=r"rms_norm: residual must have the shape of x, \[4, 8\], got \[8\]"):
        rms_norm(x, w, residual=w)
    with pytest.raises(ValueError, match=r"rms_norm: weight is on meta"):
        rms_norm(x, w.to("meta"))
    with pytest.raises(ValueError, match=r"rms_norm: eps must not be negative, got -1"):
        rms_norm(x, w, eps=-1)
    with pytest.raises(TypeError, match=r"rms_norm: eps must be a number, got Tensor"):
        rms_norm(x, w, eps=w)
    with pytest.raises(ValueError, match=r"x must have at least one dimension"):
        rms_norm(x[0, 0], w)


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    x, w = torch.randn(4, 8), torch.randn(8)
    backward = functools.partial(torch.ops.parallel_ops.rms_norm_backward.default, zero_centered=False)
    with pytest.raises(RuntimeError, match="rms_norm: weight must have one element"):
        raw_op(x, w[:7], None, 1e-5, False)
    with pytest.raises(RuntimeError, match="rms_norm: residual must have the shape"):
        raw_op(x, w, x[:2], 1e-5, False)
    with pytest.raises(RuntimeError, match="rms_norm_backward: rstd must be what the forward returned"):
        backward(x, None, x, w, w[:3])
    with pytest.raises(RuntimeError, match="rms_norm_backward: grad must have the shape"):
        backward(x[:2], None, x, w, w[:4])
