import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import scaled_causal_softmax
from parallel_ops.ops import scaled_causal_softmax_reference
from support.numerics import suite
from support.numerics.softmax import check_numerics
from support.numerics.suite import DEVICES, DTYPES, randn, refuses

pytestmark = pytest.mark.parametrize("device", DEVICES)
windows = pytest.mark.parametrize("window", [None, 1, 3, 1000])
raw_op = torch.ops.parallel_ops.scaled_causal_softmax.default
raw_backward = torch.ops.parallel_ops.scaled_causal_softmax_backward.default


def both(**options):
    return [functools.partial(f, **options) for f in (scaled_causal_softmax, scaled_causal_softmax_reference)]


@st.composite
def squares(draw):
    """[..., sq, sk] with sq <= sk."""
    queries = draw(st.integers(1, 20))
    keys = queries + draw(st.one_of(st.integers(0, 40), st.sampled_from([100, 1024, 1025])))
    return (*draw(st.lists(st.integers(1, 4), max_size=2)), queries, keys)


@given(
    shape=squares(),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.125, -0.7, 0.0]),
    spread=st.sampled_from([0.1, 1.0, 30.0, 3000.0]),
    window=st.one_of(st.none(), st.integers(1, 50), st.sampled_from([1023, 1024, 5000])),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_shape(device, shape, dtype, scale, spread, window, seed):
    x = randn(*shape, dtype=dtype, device=device, seed=seed, scale=spread)
    grad = randn(*shape, dtype=dtype, device=device, seed=seed + 2).detach()
    check_numerics(*both(scale=scale, window=window), [x], grad, scale)


def test_fp64_is_computed_in_fp64(device):
    x = randn(30, 50, dtype=torch.float64, device=device, scale=10)
    op, reference = both(scale=1 / 3)
    torch.testing.assert_close(op(x), reference(x), rtol=1e-14, atol=1e-15)


@windows
def test_what_a_query_does_not_see_is_not_read(device, window):
    """NaN and inf beyond the diagonal and before the window, in scores and in the incoming gradient."""
    x, grad = (randn(2, 33, 47, dtype=torch.float32, device=device, seed=i).detach() for i in (0, 1))
    seen = scaled_causal_softmax_reference(torch.zeros_like(x), window=window) > 0
    expected = suite.forward_backward(scaled_causal_softmax_reference, [x.requires_grad_()], grad)
    if window is not None:
        expected = suite.forward_backward(both(window=window)[1], [x.requires_grad_()], grad)
    for poison in (torch.nan, torch.inf, -torch.inf):
        args = [x.detach().masked_fill(~seen, poison).requires_grad_()]
        got = suite.forward_backward(both(window=window)[0], args, grad.masked_fill(~seen, poison))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
            assert not a[~seen].any()


def test_special_values_stay_in_the_visible_part_of_their_row(device):
    x = torch.zeros(4, 4, device=device)
    x[1, :2] = -torch.inf  # every visible score: zeros
    x[2, 0] = torch.nan
    x[3, 1] = torch.inf
    y, dx = suite.forward_backward(scaled_causal_softmax, [x.requires_grad_()], torch.ones_like(x))
    assert y[0].tolist() == [1, 0, 0, 0]
    assert not y[1].any() and not dx[1].any()
    assert y[2].isnan().tolist() == [True, True, True, False] and y[2, 3] == 0
    assert y[3].isnan().all()


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 4), (0, 0), (1, 1), (1, 70000), (2, 3, 70000), (70000, 1, 1)])
def test_extreme_shapes(device, shape):
    x = randn(*shape, dtype=torch.float32, device=device)
    grad = randn(*shape, dtype=torch.float32, device=device, seed=1).detach()
    for window in (None, 5):
        check_numerics(*both(window=window), [x], grad, 1.0)


def test_bad_arguments_are_named(device):
    x = torch.randn(2, 3, 4, 8, device=device)
    wrong = functools.partial(refuses, scaled_causal_softmax)
    wrong(TypeError, "scores must be a tensor, got list", [1.0])
    wrong(TypeError, "scores must be float32.*got torch.int64", x.long())
    wrong(ValueError, r"scores must have at least two dimensions.*got \[8\]", x[0, 0, 0])
    wrong(ValueError, "scores has 8 queries for 4 keys", x.transpose(-1, -2))
    wrong(ValueError, "window must be at least 1.*got 0", x, window=0)
    for window in (True, 2.0, "3"):
        wrong(TypeError, "window must be an int or None", x, window=window)
    wrong(ValueError, "scale must be finite, got nan", x, float("nan"))
    for scale in (True, "1", None):
        wrong(TypeError, "scale must be a Python float", x, scale)


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    x = torch.randn(4, 8)
    refuses(raw_op, RuntimeError, "there must be at least as many keys", x.T, None, 1.0, None)
    refuses(raw_op, RuntimeError, "window must be at least 1", x, None, 1.0, 0)
    refuses(raw_backward, RuntimeError, "grad must have the shape", x[:2], x, None, 1.0, None)


@windows
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_takes_its_share(device, dtype, window):
    x, sink = randn(2, 3, 5, 70, dtype=dtype, device=device, scale=2), randn(3, dtype=dtype, device=device, seed=1)
    grad = randn(2, 3, 5, 70, dtype=dtype, device=device, seed=2).detach()
    op, reference = (lambda x, s, f=f: f(x, window=window, sink=s) for f in both())
    check_numerics(op, reference, [x, sink], grad, 1.0)
    y = both(window=window)[0](x.detach().float(), sink=0.0)  # "off by one"
    assert (y.double().sum(-1) < 1).all()
