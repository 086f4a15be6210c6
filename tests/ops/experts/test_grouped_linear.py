"""grouped_linear: rows sorted by expert, each expert's times its own weight."""

import functools
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_ops import grouped_linear
from parallel_ops._internal.gradients import grouped_matmul
from parallel_ops._internal.gradients.weight_gradients import ParameterGrad
from parallel_ops.ops import grouped_linear_reference
from parallel_ops.tensor_parallel import DeferredWeightGradients
from support.numerics import suite
from support.numerics.suite import DEVICES, randn, refused

pytestmark = pytest.mark.parametrize("device", DEVICES)
WIDTHS = st.sampled_from([0, 1, 3, 8, 17, 64, 130])
COUNTS = st.lists(st.one_of(st.just(0), st.integers(1, 5), st.sampled_from([40, 130])), min_size=1, max_size=9)
PLACES = ["autograd", "main_grad", "deferred", "deferred main_grad"]
places = pytest.mark.parametrize("place", PLACES)
op = torch.ops.parallel_ops.grouped_linear.default


def positional(f):
    """``f`` with the bias as its fourth argument, so that the checks differentiate it."""
    return lambda x, weight, offs, bias=None: f(x, weight, offs, bias=bias)


def inputs(counts, padding=0, width=8, out=16, *, dtype=torch.float32, device="cpu", bias=True, seed=0):
    """Rows past the last expert's are NaN: nothing may read them."""
    n, rows = len(counts), sum(counts)
    x = randn(rows + padding, width, dtype=dtype, device=device, seed=seed).detach()
    x[rows:] = torch.nan
    weight = randn(n, out, width, dtype=dtype, device=device, seed=seed + 1, scale=0.5)
    of_rows = randn(n, out, dtype=dtype, device=device, seed=seed + 2) if bias else None
    return [x.requires_grad_(), weight, torch.tensor(counts, device=device).cumsum(0).int(), of_rows]


def grad_for(args, seed=9):
    grad = randn(args[0].shape[0], args[1].shape[1], dtype=args[0].dtype, device=args[0].device, seed=seed).detach()
    grad[args[2][-1] :] = torch.nan
    return grad


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


@places
def test_a_backward_inside_an_autocast_region_keeps_its_dtypes(device, place):
    args = inputs([2, 0, 3], device=device)
    queue = DeferredWeightGradients() if "deferred" in place else None
    main_grad = torch.zeros_like(args[1]) if "main_grad" in place else None
    expected = suite.forward_backward(positional(grouped_linear), args)
    y = grouped_linear(*args[:3], bias=args[3], main_grad=main_grad, deferred=queue)
    with torch.autocast(device, dtype=torch.bfloat16):
        y.sum().backward()
        if queue is not None:
            queue.compute()
    got = [y.detach(), args[0].grad, args[1].grad if main_grad is None else main_grad, args[3].grad]
    torch.testing.assert_close(got, expected)


@places
def test_a_second_backward_is_the_usual_error(device, place):
    args = inputs([2, 0, 3], device=device)
    queue = DeferredWeightGradients() if "deferred" in place else None
    main_grad = torch.zeros_like(args[1]) if "main_grad" in place else None
    loss = grouped_linear(*args[:3], main_grad=main_grad, deferred=queue).sum()
    loss.backward()
    refused(RuntimeError, "backward through the graph a second time", loss.backward)


def test_checkpointing(device):
    suite.check_checkpointing(positional(grouped_linear), inputs([2, 0, 3], device=device))


@given(counts=COUNTS, dtype=st.sampled_from([*suite.DTYPES, torch.float64]), wide=st.booleans(), autocast=st.booleans())
@places
def test_where_the_weight_gradient_goes(device, place, counts, dtype, wide, autocast):
    """Two backwards, one of them of other rows: the second is added to what is there."""
    main_dtype = torch.promote_types(dtype, torch.float32) if wide else dtype
    queue = DeferredWeightGradients() if "deferred" in place else None
    arms = []
    for handled in (False, True):
        args = inputs(counts, 2, dtype=dtype, device=device)
        main_grad = torch.zeros(args[1].shape, dtype=main_dtype, device=device)
        options = {"deferred": queue, "main_grad": main_grad if "main_grad" in place else None} if handled else {}
        for seed in (0, 5):
            x = inputs(counts, 2, dtype=dtype, device=device, seed=seed)[0] if seed else args[0]
            with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
                y = grouped_linear(x, args[1], args[2], bias=args[3], **options)
            y.backward(grad_for(args, seed + 9).to(y.dtype))
        if queue is not None and handled:
            assert len(queue) == 2 and args[1].grad is None and not main_grad.any()
            queue.compute()
        if handled and options["main_grad"] is not None:
            assert args[1].grad is None
        of_weight = args[1].grad if not handled or options["main_grad"] is None else main_grad
        arms.append([args[0].grad, of_weight, args[3].grad])
    digits = {torch.float32: 1e-5, torch.float64: 1e-12}.get(torch.bfloat16 if autocast else dtype, 2e-2)
    for plain, got in zip(*arms, strict=True):
        torch.testing.assert_close(got.to(plain.dtype), plain, rtol=digits, atol=50 * digits)


def test_main_grad_adds_products_that_were_never_rounded(device):
    if device == "cuda":
        pytest.skip("torch's grouped product rounds them")
    x, weight, offs, _ = inputs([64, 0, 30], 2, 40, 6, dtype=torch.bfloat16, device=device)
    grad, main_grad = grad_for([x, weight, offs]), torch.zeros(weight.shape)
    for _ in range(2):
        grouped_linear(x, weight, offs, main_grad=main_grad).backward(grad)
    for e, rows in ((0, slice(0, 64)), (2, slice(64, 94))):
        dy, h = grad[rows].double(), x.detach()[rows].double()
        bound = 64 * 2.0**-24 * 2 * (dy.abs().t() @ h.abs())
        assert ((main_grad[e].double() - 2 * dy.t() @ h).abs() <= bound).all()
        assert not ((2 * (dy.t() @ h).bfloat16().double() - 2 * dy.t() @ h).abs() <= bound).all()


@given(counts=COUNTS, padding=st.sampled_from([0, 5]), bias=st.booleans(), in_out=st.booleans(), wide=st.booleans())
def test_with_torchs_grouped_product(device, counts, padding, bias, in_out, wide):
    """What a GPU with a kernel for it computes, here with the matmul that torch has for CPUs."""
    x, weight, offs, of_rows = inputs(counts, padding, 24, 16, dtype=torch.bfloat16, device=device, bias=bias)
    weight = weight.detach().mT.contiguous().mT.requires_grad_() if in_out else weight
    offs = offs.long() if wide else offs
    grad, main_grad = grad_for([x, weight, offs]), torch.zeros(weight.shape, device=device)
    expected = suite.forward_backward(positional(grouped_linear), [x, weight, offs, of_rows], grad)
    has_kernel = mock.patch.object(grouped_matmul, "_has_kernel", lambda rows, *_: rows.shape[0] > 0)
    with has_kernel, mock.patch.object(grouped_matmul, "_capability", return_value=9):
        got = suite.forward_backward(positional(grouped_linear), [x, weight, offs, of_rows], grad)
        grouped_linear(x, weight, offs, main_grad=main_grad).backward(grad)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(main_grad, expected[2].float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("capability", [9, 10])
@pytest.mark.parametrize("counts", [[0, 3, 0, 5], [4, 0, 0, 4], [2, 3, 1, 0], [0, 0, 0, 0]], ids=str)
def test_groups_without_rows_on_gpus_that_leave_their_products_undefined(device, monkeypatch, counts, capability):
    """Weight and bias gradients, with a matmul that leaves NaN there on compute capability 10."""
    grouped_mm = grouped_matmul.F.grouped_mm

    def poisoning(a, b, *, offs):
        out = grouped_mm(a, b, offs=offs)
        if capability == 10 and out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    monkeypatch.setattr(grouped_matmul.F, "grouped_mm", poisoning)
    monkeypatch.setattr(grouped_matmul, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(grouped_matmul, "_capability", lambda _: capability)
    x, weight, offs, bias = inputs(counts, 2, 24, 16, dtype=torch.bfloat16, device=device)
    main_grad = torch.zeros(weight.shape, device=device)
    grouped_linear(x, weight, offs, bias=bias).sum().backward()
    grouped_linear(x, weight, offs, main_grad=main_grad).sum().backward()
    for grad in (weight.grad, main_grad, bias.grad):
        assert grad.isfinite().all()
        assert not grad[[count == 0 for count in counts]].count_nonzero()


@places
def test_a_weight_stored_in_by_out(device, place):
    """gpt-oss stores [n, in, out]: the view is no leaf, so its gradient needs a place."""
    x, weight, offs, _ = inputs([3, 0, 5], device=device)
    stored = weight.detach().mT.contiguous().requires_grad_()
    queue = DeferredWeightGradients() if "deferred" in place else None
    main_grad = torch.zeros_like(stored) if "main_grad" in place else None
    if place == "deferred":
        with pytest.raises(ValueError, match="grouped_linear: deferred needs weights that are leaves, or a main_grad"):
            grouped_linear(x, stored.mT, offs, deferred=queue)
        return
    target = None if main_grad is None else main_grad.mT
    grouped_linear(x, stored.mT, offs, main_grad=target, deferred=queue).sum().backward()
    if queue is not None:
        queue.compute()
    grouped_linear(x, weight, offs).sum().backward()
    torch.testing.assert_close(stored.grad if main_grad is None else main_grad, weight.grad.mT)


def test_the_grad_of_a_parameter_as_a_target(device):
    x, weight, offs, _ = inputs([3, 0, 5], device=device)
    parameter, plain = torch.nn.Parameter(weight.detach().flatten(0, 1)), weight
    for step in range(2):
        for w, options in ((parameter.view(3, 16, 8), {"main_grad": ParameterGrad(parameter)}), (plain, {})):
            (grouped_linear(x, w, offs, **options) * (1 + step)).sum().backward()
    torch.testing.assert_close(parameter.grad, plain.grad.flatten(0, 1))


@places
@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_only_what_the_backward_reads_is_kept(device, place, wanted):
    args = inputs([3, 0, 5], device=device)
    for t, name in zip(args, ("x", "weight"), strict=False):
        t.requires_grad_(name == wanted)
    queue = DeferredWeightGradients() if "deferred" in place else None
    main_grad = torch.zeros_like(args[1]) if "main_grad" in place else None
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        y = grouped_linear(*args[:3], bias=args[3], main_grad=main_grad, deferred=queue)
    assert shapes == [tuple(args[0 if wanted == "weight" else 1].shape), (3,)]
    y.sum().backward()
    assert (args[0].grad is None) == (wanted == "weight")


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
            with pytest.raises(ValueError, match=r"grouped_linear: offs must ascend and lie between 0 and the 5 rows"):
                call(torch.tensor(wrong))
    with pytest.raises(TypeError, match=r"grouped_linear: offs must be a tensor of int32 or int64, got torch.float32"):
        call(offs.float())
    refused(ValueError, r"grouped_linear: offs must have shape \[2\], one for each expert, got \[1\]", call, offs[:1])
    refused(ValueError, r"grouped_linear: bias must have shape \[2, 16\], got \[16\]", call, offs, bias=bias[0])
    with pytest.raises(TypeError, match=r"grouped_linear: bias is torch.bfloat16, but x is torch.float32"):
        call(offs, bias=bias.bfloat16())
    with pytest.raises(ValueError, match=r"grouped_linear: weight must have shape \[experts, out, 8\]"):
        grouped_linear(x, weight.mT, offs)
    refused(ValueError, r"grouped_linear: weight must have shape", grouped_linear, x, weight[:0], offs[:0])
    with pytest.raises(ValueError, match=r"grouped_linear: x must have shape \[rows, in\], got \[1, 5, 8\]"):
        grouped_linear(x[None], weight, offs)
    with pytest.raises(TypeError, match=r"grouped_linear: weight is torch.float16, but x is torch.float32"):
        grouped_linear(x, weight.half(), offs)
    with pytest.raises(ValueError, match=r"grouped_linear: main_grad must have the shape of weight, \[2, 16, 8\]"):
        call(offs, main_grad=weight[:1])
    refused(TypeError, r"grouped_linear: deferred must be a DeferredWeightGradients, got list", call, offs, deferred=[])
    refused(ValueError, r"weight is on meta, but x is on", grouped_linear, x, weight.to("meta"), offs)
