"""What the linears over a group keep for their backward, and where their weight gradients go, on one rank."""

import contextlib
import gc
import weakref
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parallel_ops import all_gather_linear, linear_reduce_scatter
from parallel_ops._internal.gradients import weight_gradients
from parallel_ops._internal.gradients.weight_gradients import add_product, after_backward
from parallel_ops.tensor_parallel import DeferredWeightGradients
from support.parallelism.parallel_linear import integers, normal

ops = pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter])
handles = pytest.mark.parametrize(("main", "defer"), [(True, False), (False, True), (True, True)])


def leaf(*shape, seed=0, dtype=torch.float32):
    return normal(*shape, seed=seed, dtype=dtype).requires_grad_()


def handles_of(weight, main, defer):
    main_grad = torch.zeros(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32)) if main else None
    return {"main_grad": main_grad, "deferred": DeferredWeightGradients() if defer else None}


def finish(weight, options):
    """The gradient of the weight, wherever it went."""
    if options["deferred"] is not None:
        options["deferred"].compute()
    return weight.grad if options["main_grad"] is None else options["main_grad"]


@contextlib.contextmanager
def packed():
    """Shapes of the tensors that are saved, which a hook replaces by copies."""
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t.clone(), lambda t: t):
        yield shapes


@ops
@pytest.mark.parametrize(("main", "defer"), [(False, False), (True, False), (False, True), (True, True)])
def test_inputs_are_freed_by_the_backward_though_the_loss_lives(op, main, defer):
    weight, source = leaf(5, 8, seed=1), leaf(4, 8, seed=2)
    options = handles_of(weight, main, defer)
    x = source * 2
    alive = weakref.ref(x)
    loss = op(x, weight, group=None, **options).sum()
    del x
    gc.collect()
    assert alive() is not None
    loss.backward()
    if defer:
        assert alive() is not None
        options["deferred"].compute()
    gc.collect()
    assert alive() is None
    assert loss.grad_fn is not None


@ops
@handles
def test_saved_tensor_hooks_see_what_is_kept(op, main, defer):
    weight, x = leaf(5, 8, seed=1), leaf(4, 8, seed=2)
    op(x, weight, group=None).sum().backward()
    want, dx = weight.grad, x.grad
    for hooks in (packed(), torch.autograd.graph.save_on_cpu()):
        weight.grad = x.grad = None
        options = handles_of(weight, main, defer)
        with hooks as shapes:
            y = op(x, weight, group=None, **options)
        y.sum().backward()
        assert shapes in ([(4, 8), (5, 8)], None)  # None of save_on_cpu
        assert torch.equal(finish(weight, options), want)
        assert torch.equal(x.grad, dx)


@ops
def test_outputs_and_input_gradients_are_no_views(op):
    """A pipeline stage detaches its outputs in place, which torch refuses for views."""
    for shape in ((4, 8), (4, 2, 8)):
        weight, x = leaf(5, 8, seed=1), leaf(*shape, seed=2)
        y = op(x, weight, leaf(5), group=None)
        y.sum().backward()
        assert not x.grad._is_view()
        y.detach_()


@ops
@pytest.mark.parametrize("main", [False, True])
def test_only_what_the_backward_reads_is_kept(op, main):
    for of_x, of_weight, kept in ((True, False, [(5, 8)]), (False, True, [(4, 2, 8)])):
        weight, x = leaf(5, 8, seed=1).requires_grad_(of_weight), leaf(4, 2, 8, seed=2).requires_grad_(of_x)
        options = handles_of(weight, main, False)
        with packed() as shapes:
            y = op(x, weight, leaf(5), group=None, **options)
        assert shapes == kept
        y.sum().backward()
        full = [t.detach().requires_grad_() for t in (x, weight)]
        torch.nn.functional.linear(*full).sum().backward()
        got, want = (x.grad, full[0].grad) if of_x else (finish(weight, options), full[1].grad)
        torch.testing.assert_close(got, want)


@ops
@handles
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(op, main, defer, reentrant):
    results = []
    for checkpointed in (False, True):
        weights, x = [leaf(8, 8, seed=i) for i in (1, 2)], leaf(4, 8, seed=3)
        options = [handles_of(w, main, defer) for w in weights]

        def block(t, weights=weights, options=options):
            h = torch.nn.functional.gelu(op(t, weights[0], group=None, **options[0]))
            return op(h, weights[1], group=None, **options[1])

        y = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
        y.square().sum().backward()
        results.append([x.grad, *(finish(w, o) for w, o in zip(weights, options, strict=True))])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@ops
@handles
def test_a_second_backward_is_the_usual_error(op, main, defer):
    weight, x = (integers(*shape, seed=1).requires_grad_() for shape in ((5, 8), (4, 8)))
    options = handles_of(weight, main, defer)
    loss = op(x, weight, group=None, **options).sum()
    loss.backward(retain_graph=True)
    once = finish(weight, options).clone()
    loss.backward()
    assert torch.equal(finish(weight, options), 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@ops
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("defer", [False, True])
def test_main_grad_adds_products_that_were_never_rounded(op, dtype, defer):
    """The error is fp32's, thousands of times below that of one rounding to 16 bits."""
    weight, x, dy = leaf(6, 40, seed=1, dtype=dtype), normal(64, 40, seed=2, dtype=dtype), normal(64, 6, seed=3)
    options = handles_of(weight, True, defer)
    for _ in range(2):
        op(x, weight, group=None, **options).backward(dy.to(dtype))
    got = finish(weight, options).double()
    factors = dy.to(dtype).double().t(), x.double()
    oracle, rounded = 2 * (factors[0] @ factors[1]), 2 * (dy.to(dtype).t() @ x).double()
    bound = 64 * 2.0**-24 * 2 * (factors[0].abs() @ factors[1].abs())
    assert ((got - oracle).abs() <= bound).all() and not ((rounded - oracle).abs() <= bound).all()


@ops
@pytest.mark.parametrize("defer", [False, True])
def test_main_grad_may_have_the_dtype_of_the_weight(op, defer):
    weight, x, queue = leaf(6, 40, seed=1, dtype=torch.bfloat16), normal(64, 40, seed=2), DeferredWeightGradients()
    main_grad, plain = torch.zeros(6, 40, dtype=torch.bfloat16), leaf(6, 40, seed=1, dtype=torch.bfloat16)
    x = x.bfloat16()
    op(x, weight, group=None, main_grad=main_grad, deferred=queue if defer else None).sum().backward()
    op(x, plain, group=None).sum().backward()
    queue.compute()
    assert weight.grad is None and torch.equal(main_grad, plain.grad)


def test_a_builder_takes_what_the_queue_holds_now():
    queue, computed = DeferredWeightGradients(), []
    for i in range(3):
        queue.push(lambda i=i: computed.append(i))
    first = queue.dw_builder()
    assert len(queue) == 0
    queue.push(lambda: computed.append(3))
    second = queue.dw_builder()
    assert not computed
    second()
    first()
    assert computed == [3, 0, 1, 2]


@pytest.mark.parametrize(("rows", "n", "k"), [(0, 3, 4), (7, 0, 4), (7, 3, 0), (23, 11, 5), (5, 9, 30)])
def test_products_are_widened_in_parts(rows, n, k, monkeypatch):
    monkeypatch.setattr(weight_gradients, "_WIDE_BYTES", 200)
    monkeypatch.setattr(weight_gradients, "_COLS", 4)
    dz, h = (normal(rows, m, seed=m, dtype=torch.bfloat16) for m in (n, k))
    total = normal(n, k, seed=1)
    want = total.double() + dz.double().t() @ h.double()
    add_product(total, dz, h)
    torch.testing.assert_close(total.double(), want, rtol=1e-6, atol=1e-6)


def test_some_of_several_weights_have_a_main_grad():
    """The others' gradients are autograd's: also that of a weight that was computed."""
    x, base, other = leaf(4, 8, seed=1), leaf(5, 8, seed=2), leaf(3, 8, seed=3)
    main_grad = torch.zeros(3, 8)
    ys = all_gather_linear(x, [base * 2, other], group=None, main_grad=[None, main_grad])
    sum(y.sum() for y in ys).backward()
    rows = x.detach().sum(0)
    torch.testing.assert_close(base.grad, 2 * rows.expand(5, 8))
    torch.testing.assert_close(main_grad, rows.expand(3, 8).contiguous())
    assert other.grad is None


@ops
@handles
def test_one_weight_used_twice(op, main, defer):
    weight, x = leaf(8, 8, seed=1), leaf(4, 8, seed=2)
    options = handles_of(weight, main, defer)
    op(op(x, weight, group=None, **options), weight, group=None, **options).sum().backward()
    got = finish(weight, options)
    plain = leaf(8, 8, seed=1)
    op(op(x, plain, group=None), plain, group=None).sum().backward()
    torch.testing.assert_close(got, plain.grad, rtol=1e-6, atol=1e-6)


@ops
def test_deferred_gradients_accumulate_in_place_as_autograd_does(op):
    """Else a bucket that holds ``weight.grad`` would miss them."""
    for dtype, autocast in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        weight, queue = leaf(5, 8, seed=1, dtype=dtype), DeferredWeightGradients()
        weight.grad = torch.ones_like(weight)
        bucket = weight.grad
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = op(normal(4, 8, seed=2, dtype=dtype), weight, group=None, deferred=queue)
        y.sum().backward()
        queue.compute()
        assert weight.grad is bucket
        want = 1 + normal(4, 8, seed=2).sum(0)
        torch.testing.assert_close(bucket[0].float(), want, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("same", [False, True])
def test_a_queue_that_is_computed_on_another_stream_waits_for_that_of_the_backward(same, monkeypatch):
    """And keeps the factors' memory from being given away there meanwhile. Without a GPU: what is called, in order."""
    calls = mock.Mock()
    x, dy = mock.Mock(is_cuda=True, device="cuda:0"), calls.dy
    here, there = calls.here, calls.here if same else calls.there
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    compute = after_backward(calls.compute, x, dy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: there)
    compute()
    waits = [] if same else [mock.call.there.wait_stream(here), mock.call.dy.record_stream(there)]
    assert calls.mock_calls == [*waits, mock.call.compute()]
    assert x.record_stream.called is not same


@ops
def test_a_backward_inside_an_autocast_region_keeps_its_dtypes(op):
    for main in (False, True):
        weight, x = leaf(5, 8, seed=1), leaf(4, 8, seed=2)
        options = handles_of(weight, main, False)
        y = op(x, weight, group=None, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y.sum().backward()
        rows, columns = x.detach().sum(0), weight.detach().sum(0)
        torch.testing.assert_close(finish(weight, options), rows.expand(5, 8).contiguous())
        torch.testing.assert_close(x.grad, columns.expand(4, 8).contiguous())


@ops
@pytest.mark.parametrize("wanted", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_the_op_that_tools_see_computes_what_eager_calls_do(op, wanted):
    """Profilers of memory and flops, selective checkpointing and fake tensors work by dispatch modes."""
    results, seen = [], []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    for dtype, autocast in ((torch.float64, False), (torch.bfloat16, False), (torch.float32, True)):
        for watching in (contextlib.nullcontext(), Watching()):
            tensors = [leaf(*shape, seed=1, dtype=dtype) for shape in ((4, 2, 8), (5, 8), (5,))]
            for t, needed in zip(tensors, wanted, strict=True):
                t.requires_grad_(bool(needed))
            with watching, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                y = op(*tensors, group=None)
            y.backward(normal(4, 2, 5, seed=3).to(y.dtype))
            results.append([y.detach(), *(t.grad for t in tensors)])
    for eager, watched in zip(results[::2], results[1::2], strict=True):
        for a, b, needed in zip(eager, watched, (True, *wanted), strict=True):
            assert (a.dtype is b.dtype and torch.equal(a, b)) if needed else (a is None and b is None)
    assert any(f"parallel_ops.{op.__name__}" in name for name in seen)


@ops
def test_fake_tensors_go_through(op):
    with FakeTensorMode():
        x, weight = torch.empty(4, 2, 8, requires_grad=True), torch.empty(5, 8, requires_grad=True)
        y = op(x, weight, group=None)
        y.sum().backward()
    assert y.shape == (4, 2, 5) and x.grad.shape == x.shape and weight.grad.shape == weight.shape
