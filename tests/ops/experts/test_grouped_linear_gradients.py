"""Where grouped_linear's weight gradient goes: autograd, a main_grad, a queue; and torch's grouped product."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import grouped_linear
from parallel_ops._internal.gradients import grouped_matmul
from parallel_ops._internal.gradients.weight_gradients import ParameterGrad
from parallel_ops.tensor_parallel import DeferredWeightGradients
from support.numerics import suite
from support.numerics.experts import COUNTS, grad_for, inputs, positional
from support.numerics.suite import DEVICES, refused

pytestmark = pytest.mark.parametrize("device", DEVICES)
PLACES = ["autograd", "main_grad", "deferred", "deferred main_grad"]
places = pytest.mark.parametrize("place", PLACES)


def targets(place, weight):
    """The main_grad and the queue of a place, or ``None``."""
    main_grad = torch.zeros_like(weight) if "main_grad" in place else None
    return main_grad, DeferredWeightGradients() if "deferred" in place else None


@places
def test_a_backward_inside_an_autocast_region_keeps_its_dtypes(device, place):
    args = inputs([2, 0, 3], device=device)
    main_grad, queue = targets(place, args[1])
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
    main_grad, queue = targets(place, args[1])
    loss = grouped_linear(*args[:3], main_grad=main_grad, deferred=queue).sum()
    loss.backward()
    refused(RuntimeError, "backward through the graph a second time", loss.backward)


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
    with has_kernel, mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
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
    main_grad, queue = targets(place, stored)
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
    main_grad, queue = targets(place, args[1])
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        y = grouped_linear(*args[:3], bias=args[3], main_grad=main_grad, deferred=queue)
    assert shapes == [tuple(args[0 if wanted == "weight" else 1].shape), (3,)]
    y.sum().backward()
    assert (args[0].grad is None) == (wanted == "weight")
