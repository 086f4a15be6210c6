import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import scaled_masked_softmax
from parallel_ops.ops import scaled_masked_softmax_reference
from support.numerics import suite
from support.numerics.softmax import check_numerics
from support.numerics.suite import DEVICES, DTYPES, randn, refuses

pytestmark = pytest.mark.parametrize("device", DEVICES)
raw_op = torch.ops.parallel_ops.scaled_masked_softmax.default
raw_backward = torch.ops.parallel_ops.scaled_masked_softmax_backward.default

KINDS = [
    "none",
    "bool",
    "uint8",
    *(f"additive {d}" for d in ("float32", "bfloat16", "float16", "float64")),
    "additive -inf",
]


def masked(kind, shape, device, seed=0):
    """A mask of the given kind and shape; "additive -inf" masks as a boolean one would."""
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < 0.4
    if kind in ("bool", "uint8"):
        return mask.to(device) if kind == "bool" else 3 * mask.to(device, torch.uint8)
    if kind == "additive -inf":
        return torch.where(mask, -torch.inf, 0.0).to(device)
    # A grid of eighths is exact in every dtype: what is tested is the sum, not the rounding of the mask.
    eighths = torch.randint(-40, 40, tuple(shape), generator=generator) / 8
    return eighths.to(device, getattr(torch, kind.split()[1]))


@st.composite
def broadcast(draw, shape):
    """A shape that broadcasts to ``shape``: any dimension may be 1, any leading ones may be missing."""
    kept = tuple(size if draw(st.booleans()) else 1 for size in shape)
    return kept[draw(st.integers(0, len(shape))) :]


@given(data=st.data(), shape=suite.shapes(), dtype=st.sampled_from(DTYPES), kind=st.sampled_from(KINDS))
def test_numerics_of_any_shape_and_mask(device, data, shape, dtype, kind):
    scale = data.draw(st.sampled_from([1.0, 0.125, -0.7, 0.0]))
    spread = data.draw(st.sampled_from([0.1, 1.0, 30.0, 3000.0]))
    seed = data.draw(st.integers(0, 1000))
    x = randn(*shape, dtype=dtype, device=device, seed=seed, scale=spread)
    mask = masked(kind, data.draw(broadcast(shape)), device, seed)
    grad = randn(*shape, dtype=dtype, device=device, seed=seed + 2).detach()
    op, reference = (
        functools.partial(f, scale=scale) for f in (scaled_masked_softmax, scaled_masked_softmax_reference)
    )
    check_numerics(op, reference, [x, mask], grad, scale)


def test_fp64_is_computed_in_fp64(device):
    x = randn(3, 50, dtype=torch.float64, device=device, scale=10)
    for kind in KINDS:
        mask = masked(kind, (50,), device)
        expected = scaled_masked_softmax_reference(x, mask, 1 / 3)
        torch.testing.assert_close(scaled_masked_softmax(x, mask, 1 / 3), expected, rtol=1e-14, atol=1e-15)


def same_values(a, b):
    """Bits on a CPU. On a GPU, how many elements a thread loads of the mask decides in which order a row is summed."""
    if a.is_cpu:
        assert torch.equal(a, b)
    else:
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(a.dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_of_the_mask(device, dtype):
    x = randn(2, 3, 4, 1030, dtype=dtype, device=device)
    for kind in ("bool", "additive float32"):
        mask = masked(kind, (2, 1, 4, 1030), device)
        expected, whole = scaled_masked_softmax(x, mask), mask.expand(2, 3, 4, 1030)
        for layout in (*suite.layouts(mask).values(), whole, whole.clone()):
            same_values(scaled_masked_softmax(x, layout), expected)


def test_masks_broadcast_in_every_dimension(device):
    x = randn(2, 3, 2, 3, 2, 5, dtype=torch.float32, device=device)
    shapes = [(2, 1, 2, 1, 2, 5), (3, 1, 3, 1, 5), (1, 1, 1, 1, 1, 5), (2, 1), (5,), (1,), ()]
    for shape in shapes:
        for kind in ("bool", "additive float32"):
            mask = masked(kind, shape, device)
            expected = scaled_masked_softmax(x, mask.expand(x.shape).clone())
            same_values(scaled_masked_softmax(x, mask), expected)


@pytest.mark.parametrize("kind", ["none", "bool", "uint8", "additive float32"])
@pytest.mark.parametrize("window", [(1, 2), (0, 0), (9, 1)])
def test_a_window(device, kind, window):
    """Against a mask made element by element, also with more keys than queries."""
    x = randn(2, 3, 4, 6, dtype=torch.float32, device=device)
    mask = masked(kind, (2, 1, 4, 6), device)
    outside = [[not i + 2 - window[0] <= j <= i + 2 + window[1] for j in range(6)] for i in range(4)]
    outside = torch.tensor(outside, device=device)
    if mask is None:
        both_masks = outside
    else:
        both_masks = mask.masked_fill(outside, -torch.inf) if mask.is_floating_point() else mask.bool() | outside
    ours = functools.partial(scaled_masked_softmax, scale=0.5, window=window)
    expected = functools.partial(scaled_masked_softmax, scale=0.5)
    for got, want in zip(
        suite.forward_backward(ours, [x, mask]), suite.forward_backward(expected, [x, both_masks]), strict=True
    ):
        assert torch.equal(got, want)
    torch.testing.assert_close(scaled_masked_softmax_reference(x, mask, 0.5, window=window), expected(x, both_masks))


def test_a_masked_key_is_zero_whatever_its_score(device):
    x = torch.tensor([[torch.nan, 1.0, torch.inf, -1e30, 2.0]], device=device, requires_grad=True)
    hidden = torch.tensor([True, False, True, False, False], device=device)
    for mask in (hidden, torch.where(hidden, -torch.inf, 0.0)):
        y = scaled_masked_softmax(x, mask)
        assert torch.equal(y[0, hidden], torch.zeros(2, device=device))
        torch.testing.assert_close(y[0, ~hidden], x.detach()[0, ~hidden].softmax(-1))
        grad = torch.tensor([[torch.inf, 1.0, torch.nan, 2.0, 3.0]], device=device)
        (dx,) = torch.autograd.grad(y, x, grad)
        assert torch.equal(dx[0, hidden], torch.zeros(2, device=device))  # though sum(dy y) is NaN


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_rows_that_see_no_key_are_zeros(device, dtype):
    x = randn(4, 40, dtype=dtype, device=device)
    hidden = torch.zeros(4, 40, dtype=torch.bool, device=device)
    hidden[1] = True
    hidden[2, 1:] = True  # one key only
    by_scores = x.detach().masked_fill(hidden, -torch.inf).requires_grad_()
    for scores, mask in ((x, hidden), (x, torch.where(hidden, -torch.inf, 0.0)), (by_scores, None)):
        y, dx = suite.forward_backward(scaled_masked_softmax, [scores, mask], torch.randn_like(x))
        assert not y[1].any() and not dx[1].any()
        assert y[2, 0] == 1 and not y[2, 1:].any()
        torch.testing.assert_close(y[0], x[0].softmax(-1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_flow_to_the_unmasked_part_of_their_row(device, bad):
    x = randn(3, 70, dtype=torch.float32, device=device).detach()
    x[1, 5] = bad
    hidden = torch.zeros(3, 70, dtype=torch.bool, device=device)
    hidden[:, 60:] = True
    for mask in (hidden, torch.where(hidden, -torch.inf, 0.0)):
        y = scaled_masked_softmax(x, mask)
        assert y[1, :60].isnan().all() and not y[1, 60:].any()
        assert y[[0, 2]].isfinite().all()
    x[1] = torch.nan
    assert scaled_masked_softmax(x, None)[1].isnan().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4), (1, 1), (5,), (2, 70000), (70000, 1)])
def test_extreme_shapes(device, shape):
    x = randn(*shape, dtype=torch.float32, device=device)
    for kind in ("none", "bool", "additive float32"):
        mask = masked(kind, shape[-1:], device)
        grad = randn(*shape, dtype=torch.float32, device=device, seed=1).detach()
        check_numerics(scaled_masked_softmax, scaled_masked_softmax_reference, [x, mask], grad, 1.0)


def test_bad_arguments_are_named(device):
    x, mask = torch.randn(2, 3, 4, 8, device=device), torch.zeros(4, 8, dtype=torch.bool, device=device)
    wrong = functools.partial(refuses, scaled_masked_softmax)
    wrong(TypeError, "scores must be a tensor, got list", [1.0], None)
    wrong(TypeError, "scores must be float32.*got torch.int64", x.long(), mask)
    wrong(ValueError, "scores must have at least one dimension", x[0, 0, 0, 0], None)
    wrong(TypeError, r"mask must be bool .*got torch.int32.*mask.bool\(\)", x, mask.int())
    wrong(TypeError, "mask must be a tensor or None, got float", x, 0.5)
    wrong(ValueError, r"mask \[4, 7\] is not broadcastable to scores \[2, 3, 4, 8\]", x, mask[:, :7])
    wrong(ValueError, r"mask \[1, 4, 8\] is not broadcastable to scores \[4, 8\]", x[0, 0], mask[None])
    wrong(ValueError, "mask is on meta", x, mask.to("meta"))
    wrong(ValueError, r"sink must have shape \[1\] or \[3\].*got \[4\]", x, mask, sink=torch.zeros(4, device=device))
    wrong(TypeError, "sink must be a tensor, a number or None, got str", x, mask, sink="0")
    for scale in (float("inf"), float("nan")):
        wrong(ValueError, "scale must be finite", x, mask, scale)
    for scale in (True, "1", None, torch.ones(())):
        wrong(TypeError, "scale must be a Python float", x, mask, scale)
    for window in (3, (1,), (1, 2.0), (True, 1)):
        wrong(TypeError, "window must be two ints", torch.zeros(2, 8, device=device), None, window=window)
    for shape, window in (((2, 8), (-1, 0)), ((8,), (1, 0))):
        wrong(ValueError, "window must not be negative", torch.zeros(shape, device=device), None, window=window)


def test_direct_calls_of_the_op_cannot_read_out_of_bounds(device):
    x = torch.randn(4, 8)
    wrong = functools.partial(refuses, raw_op)
    wrong(RuntimeError, "mask must be broadcastable", x, torch.zeros(7, dtype=torch.bool), None, 1.0)
    wrong(RuntimeError, "mask must not have more dimensions", x, torch.zeros(1, 4, 8, dtype=torch.bool), None, 1.0)
    wrong(RuntimeError, "expected float32", x, torch.zeros(8, dtype=torch.int32), None, 1.0)
    refuses(raw_backward, RuntimeError, "grad must have the shape", x[:2], x, None, 1.0)
    wrong(RuntimeError, "sink must have one element", x, None, torch.zeros(4), 1.0)
    refuses(raw_backward, RuntimeError, "sink_share must be what", x, x, torch.zeros(3), 1.0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_sink_takes_its_share(device, dtype, heads):
    x, sink = randn(2, 3, 5, 70, dtype=dtype, device=device, scale=2), randn(heads, dtype=dtype, device=device, seed=1)
    grad = randn(2, 3, 5, 70, dtype=dtype, device=device, seed=2).detach()
    hidden = masked("bool", (2, 1, 5, 70), device)
    hidden[0, 0, 0] = True
    op, reference = (
        lambda x, s, f=f: f(x, hidden, 0.5, sink=s) for f in (scaled_masked_softmax, scaled_masked_softmax_reference)
    )
    check_numerics(op, reference, [x, sink], grad, 0.5)
    number = scaled_masked_softmax(x, hidden, 0.5, sink=0.25)
    assert torch.equal(number, scaled_masked_softmax(x, hidden, 0.5, sink=torch.full((1,), 0.25, device=device)))
    assert not number[0, :, 0].any()
    if dtype is torch.float64:
        assert (number.sum(-1) < 1).all()


def test_gradient_of_a_mask_without_scores_matches_finite_differences(device):
    args = [randn(*s, dtype=torch.float64, device=device, seed=i) for i, s in enumerate([(2, 3, 2, 5), (3, 1, 5)])]
    suite.check_gradient(lambda x, m: scaled_masked_softmax(x, m, 0.0), args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 20, 300), (1, 20, 300), (2, 4, 20, 300), (4, 1, 300)])
def test_gradient_of_an_additive_mask(device, dtype, shape):
    """T5: [np, sq, sk]; learned ALiBi slopes: [np, 1, sk]; summed over what they were broadcast over."""
    x, mask = (
        randn(2, 4, 20, 300, dtype=dtype, device=device, scale=2),
        randn(*shape, dtype=dtype, device=device, seed=1),
    )
    grad = randn(2, 4, 20, 300, dtype=dtype, device=device, seed=2).detach()
    op, reference = (functools.partial(f, scale=0.3) for f in (scaled_masked_softmax, scaled_masked_softmax_reference))
    suite.check_numerics(op, reference, [x, mask], grad, slack_ulps=2)
    suite.check_deterministic(op, [x, mask], grad)


def test_a_gradient_with_a_large_mean_leaves_no_trace(device):
    """The saved bf16 output sums to one to three digits only; that must not be multiplied by the gradient's mean."""
    x = randn(8, 1000, dtype=torch.bfloat16, device=device)
    grad = (100 + randn(8, 1000, dtype=torch.float32, device=device, seed=1).detach()).bfloat16()
    check_numerics(scaled_masked_softmax, scaled_masked_softmax_reference, [x, None], grad, 1.0, gradient_unit=1.0)
