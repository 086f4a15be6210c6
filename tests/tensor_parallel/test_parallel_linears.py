"""all_gather_linear and linear_reduce_scatter over gloo groups of 2, 3 and 4 ranks."""

import pytest
import torch

from parallel_ops import all_gather_linear, linear_reduce_scatter
from parallel_ops.tensor_parallel import DeferredWeightGradients
from support import parallel_linear as on_rank
from support import suite
from support.distributed import Raised, ranks
from support.parallel_linear import integers, normal

groups = pytest.mark.parametrize("size", [2, 3, 4])
kinds = pytest.mark.parametrize("kind", ["column", "row"])

OVERLAPS = ["off", "bulk", "auto", 1, 3]
SIZES = {2: [[4, 4], [5, 2]], 3: [[3, 3, 3], [1, 0, 4]], 4: [[2, 2, 2, 2], [4, 1, 0, 3]]}


def whole(kind, results, sizes):
    """(y, dx, dW, db) of the whole linear from those of the ranks."""
    y, dx, dweight, *dbias = zip(*results, strict=True)
    if kind == "column":
        return [torch.cat(y, dim=-1), torch.cat(dx), torch.cat(dweight), *(torch.cat(b) for b in dbias)]
    for b in dbias:
        assert all(torch.equal(b[0], other) for other in b[1:]), "the gradient of bias differs between ranks"
    return [torch.cat(y), torch.cat(dx, dim=-1), torch.cat(dweight, dim=1), *(b[0] for b in dbias)]


@groups
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_give_the_unsharded_linear_exactly(size, kind, dtype):
    for number, sizes in enumerate(SIZES[size]):
        for inner in ((), (2,)):
            s, k, n = sum(sizes), 2 * size, 3 * size
            bias = integers(n, seed=3, dtype=dtype) if number == 0 or inner else None
            x, weight = integers(s, *inner, k, seed=1, dtype=dtype), integers(n, k, seed=2, dtype=dtype)
            tensors = [x, weight, bias, integers(s, *inner, n, seed=4, dtype=dtype)]
            expected = on_rank.whole_linear(*tensors)
            for overlap in OVERLAPS:
                results = ranks(size).run(on_rank.sharded_linear, kind, tensors, sizes, {"overlap": overlap})
                for got, want in zip(whole(kind, results, sizes), expected, strict=True):
                    assert torch.equal(got, want), (sizes, inner, overlap)


@groups
@kinds
def test_fp64_gradients_are_those_of_the_single_process_linear(size, kind):
    sizes = SIZES[size][1]
    s, k, n = sum(sizes), 4 * size, 2 * size
    shapes = [(s, 3, k), (n, k), (n,), (s, 3, n)]
    tensors = [normal(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
    expected = on_rank.whole_linear(*tensors)
    for options in ({"overlap": 2}, {"overlap": "bulk"}):
        results = ranks(size).run(on_rank.sharded_linear, kind, tensors, sizes, options)
        torch.testing.assert_close(whole(kind, results, sizes), expected, rtol=1e-12, atol=1e-12)


@groups
@kinds
def test_the_reference_means_the_same(size, kind):
    sizes = SIZES[size][1]
    tensors = [integers(sum(sizes), 2 * size, seed=1), integers(size, 2 * size, seed=2), None]
    tensors.append(integers(sum(sizes), size, seed=3))
    results = ranks(size).run(on_rank.sharded_linear, kind, tensors, sizes, {}, True)
    for got, want in zip(whole(kind, results, sizes), on_rank.whole_linear(*tensors), strict=True):
        assert torch.equal(got, want)


@groups
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlapped_is_unfused_bit_for_bit_on_every_run(size, kind, dtype):
    for sizes in SIZES[size]:
        for pieces in (1, 2):
            for results in ranks(size).run(on_rank.against_unfused, kind, sizes, pieces, dtype):
                for repeated in results[1:]:
                    for got, want in zip(repeated, results[0], strict=True):
                        assert torch.equal(got, want), (sizes, pieces)


@groups
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_several_weights_share_a_gather(size, overlap):
    x, weights = integers(2 * size, 3, 5, seed=1), [integers(n, 5, seed=n) for n in (4, 1, 6)]
    for biases in (None, [integers(n, seed=9) for n in (4, 1, 6)]):
        grads = [integers(2 * size, 3, n, seed=2) for n in (4, 1, 6)]
        grads[1].mul_(biases is None)
        each = [on_rank.whole_linear(x, w, b, g) for w, b, g in zip(weights, biases or [None] * 3, grads, strict=True)]
        results = ranks(size).run(on_rank.several_weights, x, weights, biases, grads, overlap)
        dx = size * sum(e[1] for e in each)  # every rank has the same weights
        assert torch.equal(torch.cat([r[1] for r in results]), dx)
        for ys, _, dweights, dbiases in results:
            assert all(torch.equal(y, e[0]) for y, e in zip(ys, each, strict=True))
            assert all(torch.equal(d, e[2]) for d, e in zip(dweights, each, strict=True))
            assert all(torch.equal(d, e[3]) for d, e in zip(dbiases, each, strict=False))


@kinds
@pytest.mark.parametrize("overlap", ["off", 1])
@pytest.mark.parametrize("wanted", [[True, False], [False, True]])
def test_only_the_gradients_that_are_wanted(kind, overlap, wanted):
    both = ranks(2).run(on_rank.frozen, kind, [True, True], overlap)
    for some, every in zip(ranks(2).run(on_rank.frozen, kind, wanted, overlap), both, strict=True):
        for got, want, needed in zip(some, every, wanted, strict=True):
            assert torch.equal(got, want) if needed else got is None


@pytest.mark.parametrize(("size", "compiled"), [(2, False), (3, False), (4, False), (3, True)])
def test_a_partial_bias_gradient_is_that_of_this_ranks_rows(size, compiled):
    sizes = SIZES[size][1]
    for complete, partial, own in ranks(size).run(on_rank.partial_bias, sizes, compiled):
        assert torch.equal(partial, own)
        assert not torch.equal(partial, complete)


@kinds
@pytest.mark.parametrize(("defer", "main"), [(True, False), (False, True), (True, True)])
def test_weight_gradients_go_where_they_are_told(kind, defer, main):
    for outcome in ranks(2).run(on_rank.with_handles, kind, torch.float32, defer, main, False):
        plain, handled, pending = outcome
        torch.testing.assert_close(handled, plain, rtol=1e-6, atol=1e-6)
        assert [n for n, _ in pending] == ([1, 2, 1] if defer else [0, 0])
        assert all(none for _, none in pending[:2]) or not defer


@kinds
def test_main_grad_accumulates_16_bit_products_in_fp32(kind):
    for plain, handled, _ in ranks(2).run(on_rank.with_handles, kind, torch.bfloat16, False, True, False):
        assert handled[2].dtype is torch.float32
        torch.testing.assert_close(handled[2], plain[2].float(), rtol=2e-2, atol=5e-2)
        assert not torch.equal(handled[2], plain[2].float())  # two roundings fewer
    for plain, handled, _ in ranks(2).run(on_rank.with_handles, kind, torch.float32, True, True, True):
        torch.testing.assert_close(handled, plain, rtol=2e-2, atol=5e-2)
        assert [t.dtype for t in handled] == [torch.float32] * 4


@kinds
@pytest.mark.parametrize("handle", ["autograd", "main_grad", "deferred"])
@pytest.mark.parametrize("overlap", ["off", 2])
def test_a_backward_computes_and_sends_what_is_asked_for(kind, handle, overlap):
    """By halves, as a pipeline schedule runs it, and for the input alone."""
    of_input = overlap if kind == "row" and overlap != "off" else 1  # pieces of the one other shard
    both = of_input if kind == "row" else 2
    for whole, halves, posted, queued in ranks(2).run(on_rank.split_backward, kind, handle, overlap):
        now = of_input if handle == "deferred" else both
        assert posted == [now, of_input, 1 if handle == "autograd" else 0, of_input]
        assert torch.equal(halves[0], whole[0])
        if handle == "autograd":
            assert all(torch.equal(a, b) for a, b in zip(halves, whole, strict=True))
        else:
            assert halves[1] is None or not halves[1].any()
        assert queued == 0


@groups
@kinds
def test_a_deferred_gradient_holds_shards_and_gathers_when_it_is_computed(size, kind):
    """x and dy of this rank: for the column 8 rows of 6 and 8 P of 5, for the row the other way round."""
    shard, whole = (6, 5) if kind == "column" else (5, 6)
    for outcome in ranks(size).run(on_rank.deferred_shards, kind):
        assert outcome == (4 * 8 * (shard + size * whole) + 4, 1, 1)  # and a number in the shape of the weight


@kinds
def test_the_grad_of_a_dtensor_as_a_target(kind):
    assert ranks(2).run(on_rank.grad_of_a_dtensor, kind) == [[True, True]] * 2


@pytest.mark.parametrize("handle", ["main_grad", "deferred"])
def test_gradients_that_ddp_would_not_reduce_are_refused(handle):
    for outcome in ranks(2).outcomes(on_rank.inside_ddp, handle):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        assert "do not work inside DistributedDataParallel" in outcome.message and "leave them out" in outcome.message


def test_a_zero_bubble_schedule_runs_the_halves_or_the_queue():
    whole = on_rank.pipelined(0, "whole")
    for how in ("split", "queue"):
        got = {name: grad for of_rank in ranks(2).run(on_rank.pipelined, how) for name, grad in of_rank.items()}
        assert got.keys() == whole.keys()
        for name, grad in got.items():
            torch.testing.assert_close(grad, whole[name], msg=f"{how}: {name}")


def test_a_queue_of_weight_gradients_says_what_it_cannot_do():
    queue = DeferredWeightGradients()
    queue.push(lambda: None)
    with pytest.raises(ValueError, match="count must be from 0 to 1, which are pending, got 2"):
        queue.compute(2)


# Inductor's code calls a registered op as any other: one case for all ops over a group. For what is around the op it
# compiles C++, half a minute on fresh caches.
@pytest.mark.parametrize(
    ("kind", "backend", "around"),
    [
        ("column", "aot_eager", True),
        ("row", "aot_eager", True),
        ("column", "inductor", False),
        pytest.param("row", "inductor", True, marks=pytest.mark.runs),
    ],
)
def test_compiles_to_one_graph(kind, backend, around):
    for results in ranks(2).run(on_rank.compiled, kind, backend, 2, around):
        for eager, compiled in zip(results[::2], results[1::2], strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


@kinds
def test_autocast_runs_in_its_dtype(kind):
    for auto, cast in ranks(2).run(on_rank.with_autocast, kind):
        assert auto[0].dtype is torch.bfloat16
        assert torch.equal(auto[0], cast[0])
        for got, want in zip(auto[1:], cast[1:], strict=True):
            assert got.dtype is torch.float32
            assert torch.equal(got, want.float())


@groups
@kinds
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rows", "make different calls"),
        ("columns", "make different calls"),
        ("dtype", "make different calls"),
        ("overlap", "make different calls"),
        ("gradients", "make different calls"),
        ("sizes", "rejected its arguments"),
        ("one bad argument", "rank 0 of the group rejected its arguments"),
    ],
)
def test_disagreement_raises_on_every_rank(size, kind, what, message):
    outcomes = ranks(size).outcomes(on_rank.mismatched, kind, what)
    assert all(isinstance(o, Raised) and o.type == "ValueError" for o in outcomes), outcomes
    assert any(message in o.message for o in outcomes), [o.message for o in outcomes]


@kinds
def test_a_disagreement_shows_what_was_passed(kind):
    for outcome in ranks(2).outcomes(on_rank.mismatched, kind, "columns"):
        assert "sizes=[12] * 2" in outcome.message or "sizes=[6] * 2" in outcome.message
        assert "overlap='auto', requires_grad=[False, False] over c10d" in outcome.message
    for outcome in ranks(2).outcomes(on_rank.mismatched, kind, "overlap"):
        assert "overlap=1," in outcome.message and "overlap=2," in outcome.message


@groups
@kinds
def test_all_ranks_choose_for_the_same_task_whatever_their_shard(size, kind):
    """Else one could know the answer and another stop to measure, and wait for it."""
    for sizes in SIZES[size]:
        seen = ranks(size).run(on_rank.tasks, kind, sizes)
        assert all(seen[0] == other for other in seen[1:]) and len(seen[0]) == (1 if kind == "column" else 2)


def test_messages_go_over_the_transport_that_was_chosen():
    # Two pieces of the other shard, then x and dx whole.
    assert ranks(2).run(on_rank.over_another_transport, True) == [(4, 4)] * 2
    outcomes = ranks(2).outcomes(on_rank.over_another_transport, False)
    assert all(isinstance(o, Raised) and "make different calls" in o.message for o in outcomes)
    for outcome in ranks(2).outcomes(on_rank.transport_of_another_group):
        assert "use_transport: transport is rank 0 of 1, but group is rank" in outcome.message


class TestOneRank:
    @pytest.mark.parametrize("device", suite.DEVICES)
    @pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter])
    def test_is_a_linear(self, op, device):
        shapes = ((5, 2, 8), (3, 8), (3,))
        args = [suite.randn(*s, dtype=torch.float32, device=device, seed=i) for i, s in enumerate(shapes)]
        ours = lambda *a: op(*a, group=None)  # noqa: E731
        suite.check_numerics(ours, torch.nn.functional.linear, args)
        suite.check_gradient(ours, args)
        suite.check_checkpointing(ours, args)
        suite.check_second_derivative_raises(ours, args)

    @pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter])
    def test_any_strides(self, op):
        """On integers: how a product of other numbers rounds depends on where its factors lie in memory."""
        args = [integers(5, 2, 8, seed=1).requires_grad_(), integers(3, 8, seed=2).requires_grad_()]
        ours = lambda *a: op(*a, group=None)  # noqa: E731
        grad = integers(5, 2, 3, seed=3)
        expected = suite.forward_backward(ours, args, grad)
        for index in (0, 1):
            for tensor in suite.layouts(args[index]).values():
                for g in suite.layouts(grad).values():
                    varied = [*args[:index], tensor, *args[index + 1 :]]
                    for got, want in zip(suite.forward_backward(ours, varied, g), expected, strict=True):
                        assert torch.equal(got, want)

    @pytest.mark.parametrize("name", ["all_gather_linear", "linear_reduce_scatter"])
    def test_custom_op_contract(self, name):
        x, w = suite.randn(5, 2, 8, dtype=torch.float32), suite.randn(3, 8, dtype=torch.float32)
        b = suite.randn(3, dtype=torch.float32)
        op = getattr(torch.ops.parallel_ops, name).default
        more = [True, False] if name == "linear_reduce_scatter" else [True]
        suite.check_op(op, [x, [w], [b], None, [5], 0, [True, True, True], *more])
        suite.check_op(op, [x.detach(), [w], [], None, [5], 2, [False, True], *more])

    @pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter])
    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"x": torch.randn(8)}, ValueError, r"x must have at least two dimensions, got \[8\]"),
            ({"x": torch.ones(4, 8, dtype=torch.int64)}, TypeError, "x must be float32"),
            ({"weight": torch.randn(3, 7)}, ValueError, r"weight must have shape \[N, 8\]"),
            ({"weight": torch.randn(3, 8).double()}, TypeError, "weight is torch.float64, but x is torch.float32"),
            ({"bias": torch.randn(4)}, ValueError, r"bias must have shape \[3\]"),
            ({"overlap": 0}, ValueError, "overlap must be one of 'off', 'bulk', 'auto', 'gated', 'fused' or a number"),
            ({"overlap": "on"}, ValueError, "overlap must be .* got 'on'"),
            ({"overlap": 1.5}, TypeError, "overlap must be .* got 1.5"),
            ({"sizes": [3]}, ValueError, r"3, but x"),
            ({"sizes": [2, 2]}, ValueError, "sizes must have one entry for each of the 1 ranks, got 2"),
            ({"group": "tp"}, TypeError, "group must be None or a torch.distributed.ProcessGroup"),
            ({"main_grad": torch.zeros(3, 7)}, ValueError, r"main_grad must have the shape of weight, \[3, 8\]"),
            ({"main_grad": torch.zeros(3, 8).bfloat16()}, TypeError, "main_grad must be torch.float32 for a weight"),
            ({"main_grad": [torch.zeros(3, 8)] * 2}, (TypeError, ValueError), "main_grad must"),
            ({"main_grad": "weight"}, TypeError, "main_grad must be a tensor, got str"),
            ({"deferred": []}, TypeError, "deferred must be a DeferredWeightGradients, got list"),
        ],
    )
    def test_bad_arguments_are_named(self, op, change, error, message):
        arguments = {"x": torch.randn(4, 8), "weight": torch.randn(3, 8), "group": None, **change}
        if "sizes" in change:
            message = {"3, but x": r"(sizes\[0\] is 3|sizes adds up to 3), but x"}.get(message, message)
        with pytest.raises(error, match=message):
            op(**arguments)

    def test_an_unknown_kind_of_bias_gradient(self):
        with pytest.raises(ValueError, match="bias_gradient must be 'complete' or 'partial', got 'whole'"):
            linear_reduce_scatter(torch.ones(4, 8), torch.ones(3, 8), group=None, bias_gradient="whole")


@kinds
def test_a_deferred_gradient_must_have_somewhere_to_go(kind):
    op = all_gather_linear if kind == "column" else linear_reduce_scatter
    x, weight = normal(4, 3, seed=1), normal(5, 3, seed=2).requires_grad_()
    with pytest.raises(ValueError, match="deferred needs weights that are leaves"):
        op(x, weight * 1, group=None, deferred=DeferredWeightGradients())
