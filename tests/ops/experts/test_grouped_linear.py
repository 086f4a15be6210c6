"""grouped_linear: rows sorted by expert, each expert's times its own weight."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_ops import grouped_linear
from parallel_ops.ops import grouped_linear_reference
from support.numerics import suite
from support.numerics.experts import COUNTS, grad_for, inputs, positional
from support.numerics.suite import DEVICES, refuses

pytestmark = pytest.mark.parametrize("device", DEVICES)
WIDTHS = st.sampled_from([0, 1, 3, 8, 17, 64, 130])
op = torch.ops.parallel_ops.grouped_linear.default


@given(
    counts=COUNTS,
    padding=st.sampled_from([0, 0, 1, 7]),
    width=WIDTHS,
    out=WIDTHS,
    dtype=st.sampled_from([*suite.DTYPES, torch.float64]),
    index=st.sampled_from([torch.int32, torch.int64]),
    bias=st.booleans(),
    in_out=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_numerics_of_any_shape(device, counts, padding, width, out, dtype, index, bias, in_out, seed):
    x, weight, offs, of_rows = inputs(counts, padding, width, out, dtype=dtype, device=device, bias=bias, seed=seed)
    args = [x, weight.mT.detach().requires_grad_() if in_out else weight, offs.to(index), of_rows]
    call, reference = (
        positional(lambda x, w, *rest, f=f, **kwargs: f(x, w.mT if in_out else w, *rest, **kwargs))
        for f in (grouped_linear, grouped_linear_reference)
    )
    # The order of summation is the product's own; its error is of the size of the terms.
    suite.check_numerics(call, reference, args, grad_for([x, weight, offs]), slack_ulps=4)


def test_padding_is_zero_and_gets_no_gradient(device):
    args = inputs([2, 0, 3], 4, device=device)
    y, dx, dweight, dbias = suite.forward_backward(positional(grouped_linear), args, grad_for(args))
    assert not y[5:].any() and not dx[5:].any()
    assert y.isfinite().all() and dx.isfinite().all()
    assert not dweight[1].any() and not dbias[1].any()
    assert dweight[[0, 2]].any() and dbias[[0, 2]].any()


@pytest.mark.parametrize("counts", [[0], [0, 0, 0], [7], [0, 0, 9, 0], [1] * 33])
@pytest.mark.parametrize("padding", [0, 3])
def test_extreme_counts(device, counts, padding):
    args = inputs(counts, padding, device=device)
    suite.check_numerics(*map(positional, (grouped_linear, grouped_linear_reference)), args, grad_for(args))


def test_gradient_matches_finite_differences(device):
    x, weight, offs, bias = inputs([2, 0, 3], 1, 3, 4, dtype=torch.float64, device=device)
    x = x.detach().nan_to_num().requires_grad_()
    suite.check_gradient(positional(grouped_linear), [x, weight, offs, bias])
    suite.check_gradient(positional(grouped_linear), [x, weight, offs])


def test_custom_op_contract(device):
    for bias in (True, False):
        suite.check_op(op, inputs([2, 0, 3], device=device, bias=bias))
    x, weight, offs, _ = inputs([2, 0, 3], device=device)
    suite.check_op(op, [x.detach(), weight, offs, None])
    suite.check_op(op, [x, weight.detach().mT.contiguous().mT, offs, None])
    suite.check_second_derivative_raises(positional(grouped_linear), [x, weight, offs])


def test_same_bits_on_every_run(device):
    """At other numbers of threads torch's matmuls may sum in another order."""
    args = inputs([40, 0, 130, 7], 3, 64, 48, device=device)
    first, *others = (suite.forward_backward(positional(grouped_linear), args, grad_for(args)) for _ in range(3))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_layouts_of_the_rows(device):
    """torch's matmul of transposed matrices may sum in another order."""
    args = inputs([4, 0, 5], 2, device=device)
    expected = suite.forward_backward(positional(grouped_linear), args, grad_for(args))
    for x in suite.layouts(args[0]).values():
        for grad in suite.layouts(grad_for(args)).values():
            got = suite.forward_backward(positional(grouped_linear), [x, *args[1:]], grad)
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    ones = suite.forward_backward(positional(grouped_linear), args)  # stride 0
    whole = torch.ones(len(args[0]), 16, device=device)
    for a, b in zip(ones, suite.forward_backward(positional(grouped_linear), args, whole), strict=True):
        assert torch.equal(a, b)


def test_compiles_to_one_graph_for_all_sizes(device):
    cases = [inputs(counts, padding, device=device)[:3] for counts, padding in (([2, 0, 3], 1), ([4, 1, 6], 2))]
    for x, *_ in cases:
        x.data.nan_to_num_()
    suite.check_compiles(grouped_linear, cases)
    suite.check_compiles(positional(grouped_linear), [inputs([2, 3], device=device)], backend="inductor")


def test_autocast_runs_in_the_autocast_dtype(device):
    x, weight, offs, bias = inputs([2, 0, 3], device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = grouped_linear(x, weight.bfloat16(), offs, bias=bias)
    assert torch.equal(y, grouped_linear(x.bfloat16(), weight.bfloat16(), offs, bias=bias.bfloat16()))
    y.sum().backward()
    assert x.grad.dtype is weight.grad.dtype is bias.grad.dtype is torch.float32
    suite.check_compiles_under_autocast(grouped_linear, [x, weight, offs])


def test_checkpointing(device):
    suite.check_checkpointing(positional(grouped_linear), inputs([2, 0, 3], device=device))


def test_a_dispatch_mode_sees_one_op(device):
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    args = inputs([2, 3], device=device)
    for options in ({}, {"main_grad": torch.zeros_like(args[1])}):
        seen.clear()
        with Watching():
            grouped_linear(*args[:3], **options)
        assert [f for f in seen if f is op] == [op] and not any("mm" in str(f) for f in seen)


def test_bad_arguments_are_named(device):
    x, weight, offs, bias = (t.detach() for t in inputs([2, 3], device=device))
    call = functools.partial(grouped_linear, x, weight)
    for wrong in ([3, 2], [-1, 5], [2, 6]):
        if device == "cpu":
            refuses(call, ValueError, "offs must ascend and lie between 0 and the 5 rows", torch.tensor(wrong))
    refuses(call, TypeError, "offs must be a tensor of int32 or int64, got torch.float32", offs.float())
    refuses(call, ValueError, r"offs must have shape \[2\], one for each expert, got \[1\]", offs[:1])
    refuses(call, ValueError, r"bias must have shape \[2, 16\], got \[16\]", offs, bias=bias[0])
    refuses(call, TypeError, "bias is torch.bfloat16, but x is torch.float32", offs, bias=bias.bfloat16())
    refuses(grouped_linear, ValueError, r"weight must have shape \[experts, out, 8\]", x, weight.mT, offs)
    refuses(grouped_linear, ValueError, "weight must have shape", x, weight[:0], offs[:0])
    refuses(grouped_linear, ValueError, r"x must have shape \[rows, in\], got \[1, 5, 8\]", x[None], weight, offs)
    refuses(grouped_linear, TypeError, "weight is torch.float16, but x is torch.float32", x, weight.half(), offs)
    refuses(call, ValueError, r"main_grad must have the shape of weight, \[2, 16, 8\]", offs, main_grad=weight[:1])
    refuses(call, TypeError, "deferred must be a DeferredWeightGradients, got list", offs, deferred=[])
    refuses(grouped_linear, ValueError, "weight is on meta, but x is on", x, weight.to("meta"), offs)
