import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import ExpertOrder, permute, sort_by_expert, unpermute
from parallel_ops.ops import permute_reference, unpermute_reference
from support.numerics import suite
from support.numerics.experts import random_experts
from support.numerics.suite import DEVICES, DTYPES, randn, refuses

pytestmark = pytest.mark.parametrize("device", DEVICES)
ops = torch.ops.parallel_ops


def order_of(t, k, n=8, *, seed=0, absent=True, device="cpu", **options):
    return sort_by_expert(random_experts(t, k, n, seed=seed, absent=absent, device=device), n, **options)


def of_order(f, order):
    """``f`` with the order last, for the checks of ops."""
    return lambda *args: f(args[0], order, *args[1:])


@given(
    t=st.integers(0, 40),
    k=st.integers(1, 9),
    h=st.one_of(st.integers(0, 40), st.sampled_from([127, 1023, 1025, 2100])),
    capacity=st.sampled_from([None, None, 0, 1, 5]),
    multiple=st.sampled_from([1, 4]),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    of_weights=st.sampled_from([None, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_order(device, t, k, h, capacity, multiple, dtype, of_weights, seed):
    order = order_of(
        t, k, seed=seed, device=device, capacity=capacity, multiple=1 if capacity is not None else multiple
    )
    rows = order.rows.shape[0]
    x, y = randn(t, h, dtype=dtype, device=device, seed=seed), randn(rows, h, dtype=dtype, device=device, seed=seed)
    of_rows = randn(rows, h, dtype=dtype, device=device, seed=seed + 1).detach()
    of_tokens = randn(t, h, dtype=dtype, device=device, seed=seed + 2).detach()
    permuted = suite.forward_backward(of_order(permute, order), [x], of_rows)
    assert torch.equal(permuted[0], permute_reference(x, order))
    slack = 8 if dtype is torch.float64 else 2  # PyTorch's own fp64 is the oracle
    suite.check_numerics(of_order(permute, order), of_order(permute_reference, order), [x], of_rows, slack_ulps=slack)
    weights = None
    if of_weights is not None:
        weights = randn(t, k, dtype=torch.float64 if dtype is torch.float64 else of_weights, device=device, seed=seed)
    # Sums over h columns, of which a short one may be exact in PyTorch.
    slack = 64 if dtype is torch.float64 or h > 100 else 8
    suite.check_numerics(
        of_order(unpermute, order), of_order(unpermute_reference, order), [y, weights], of_tokens, slack_ulps=slack
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(device, dtype):
    """Each token comes back as often as it has experts, and weights that sum to one give it back."""
    order = order_of(30, 4, absent=False, device=device)
    x = torch.randint(-8, 9, (30, 200), device=device).to(dtype)
    y = permute(x, order)
    assert torch.equal(y, x[order.rows.long() // 4])
    assert torch.equal(unpermute(y, order), 4 * x)
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125], device=device).expand(30, 4)
    assert torch.equal(unpermute(y, order, weights), x)


def test_dropped_slots_add_nothing(device):
    """Whatever their weights are, and their gradient is zero."""
    order = order_of(5, 2, n=3, absent=False, capacity=1, device=device)
    dropped = order.places < 0
    assert dropped.any()
    weights = torch.ones(5, 2, device=device).masked_fill(dropped, torch.nan).requires_grad_()
    y = torch.ones(3, 4, device=device)
    z = unpermute(y, order, weights)
    assert torch.equal(z, (~dropped).sum(1, keepdim=True).float().expand(5, 4))
    (dweights,) = torch.autograd.grad(z.sum(), weights)
    assert torch.equal(dweights, 4.0 * ~dropped)


def test_gradients_of_some_inputs_alone(device):
    order = order_of(6, 2, device=device)
    y, weights = randn(12, 8, dtype=torch.float32, device=device), randn(6, 2, dtype=torch.float32, device=device)
    grad = randn(6, 8, dtype=torch.float32, device=device).detach()
    both = torch.autograd.grad(unpermute(y, order, weights), [y, weights], grad)
    (dy,) = torch.autograd.grad(unpermute(y, order, weights.detach()), y, grad)
    (dweights,) = torch.autograd.grad(unpermute(y.detach(), order, weights), weights, grad)
    assert torch.equal(dy, both[0])
    assert torch.equal(dweights, both[1])


def test_layouts(device):
    order = order_of(9, 3, device=device)
    x, y = (randn(n, 1030, dtype=torch.bfloat16, device=device) for n in (9, order.rows.shape[0]))
    weights = randn(9, 3, dtype=torch.float32, device=device)
    suite.check_layouts(of_order(permute, order), [x])
    for index in (0, 1):
        suite.check_layouts(of_order(unpermute, order), [y, weights], index=index)


@pytest.mark.parametrize(("t", "h"), [(70000, 1), (1, 70000), (0, 8), (3, 0)])
def test_extreme_shapes(device, t, h):
    order = order_of(t, 1, absent=False, device=device)
    x, weights = randn(t, h, dtype=torch.float32, device=device), randn(t, 1, dtype=torch.float32, device=device)
    grad = torch.ones(t, h, device=device)
    suite.check_numerics(of_order(permute, order), of_order(permute_reference, order), [x], grad)
    suite.check_numerics(
        of_order(unpermute, order), of_order(unpermute_reference, order), [x, weights], grad, slack_ulps=20
    )


def test_bad_arguments_are_named(device):
    order = order_of(4, 2, absent=False, device=device)
    x, y = torch.randn(4, 8, device=device), torch.randn(8, 8, device=device)
    wrong = functools.partial(refuses, permute)
    wrong(TypeError, "x must be a tensor, got list", [1.0], order)
    wrong(TypeError, "order must be an ExpertOrder, got Tensor", x, x)
    wrong(TypeError, "order.rows must be a dense int32 tensor", x, order._replace(rows=order.rows.long()))
    wrong(ValueError, r"x must be \[4, h\], the tokens of order, got \[8, 8\]", y, order)
    refuses(unpermute, ValueError, r"y must be \[8, h\], the rows of order, got \[4, 8\]", x, order)
    refuses(unpermute, ValueError, r"weights must be \[4, 2\], one a slot, got \[4, 1\]", y, order, x[:, :1])
    if device == "cpu":
        wrong(ValueError, "order.rows must hold numbers from -1 to 7", x, order._replace(rows=order.rows + 1))


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    rows, places, _ = order_of(4, 2, absent=False)
    x, y = torch.randn(4, 8), torch.randn(8, 8)
    refuses(ops.permute, RuntimeError, "order holds 8, which is neither -1 nor below 8", x, rows + 1, places)
    refuses(ops.unpermute, RuntimeError, "order holds -2", y, rows, places - 2, None)
    refuses(ops.unpermute_backward, RuntimeError, r"y must be \[8, h\]", x, x, rows, places, torch.ones(4, 2), True)
    assert isinstance(ExpertOrder(rows, places, places), tuple)
