"""column_parallel_linear over gloo groups of 2 and 3 ranks, and on one."""

import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_ops import column_parallel_linear
from parallel_ops.comm import consistency
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.tensor_parallel import DeferredWeightGradients, column_parallel_linear_reference
from support.numerics import suite
from support.parallelism.parallel_linear import integers, leaf, normal, whole_linear
from support.ranks.distributed import Raised, ranks

groups = pytest.mark.parametrize("size", [2, 3])
OVERLAPS = ["off", "auto", 1, 3]


def copied_linear(rank: int, whole: list[Tensor], overlap: Any) -> list[Tensor]:
    """(y, dx, dW, db) of ``column_parallel_linear``, of its reference where ``overlap`` is None."""
    x, weight, bias, grad = whole
    world = dist.get_world_size()
    leaves = [leaf(t) for t in (x, weight.chunk(world)[rank], bias.chunk(world)[rank])]
    if overlap is None:
        y = column_parallel_linear_reference(*leaves, group=dist.group.WORLD)
    else:
        y = column_parallel_linear(*leaves, group=dist.group.WORLD, overlap=overlap)
    y.backward(grad.chunk(world, dim=-1)[rank])
    return [y.detach(), *(t.grad for t in leaves)]


@groups
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 2), (1,)], ids=str)
def test_integers_give_the_unsharded_linear_exactly(size, dtype, shape):
    """Rows that do not divide by the ranks, and fewer of them."""
    x, weight = integers(*shape, 5, seed=1, dtype=dtype), integers(3 * size, 5, seed=2, dtype=dtype)
    bias, grad = integers(3 * size, seed=3, dtype=dtype), integers(*shape, 3 * size, seed=4, dtype=dtype)
    expected = whole_linear(x, weight, bias, grad)
    for overlap in [*OVERLAPS, None]:
        results = ranks(size).run(copied_linear, [x, weight, bias, grad], overlap)
        y, dx, dweight, dbias = zip(*results, strict=True)
        of_ranks = [torch.cat(y, -1), dx[0], torch.cat(dweight), torch.cat(dbias)]
        for got, want in zip(of_ranks, expected, strict=True):
            assert torch.equal(got, want), overlap
        assert all(torch.equal(d, dx[0]) for d in dx), overlap


def copied_to_several(rank: int, overlap: Any) -> list[list[Tensor]]:
    """(dx, dWs) of two weights: given to autograd, and added to a main_grad and a queue."""
    x, weights = integers(5, 2, 4, seed=0), [integers(n, 4, seed=n + rank) for n in (3, 6)]
    outcomes = []
    for handled in (False, True):
        entering, ws, queue = leaf(x), [leaf(w) for w in weights], DeferredWeightGradients()
        mains = [torch.zeros(3, 4), None]
        options = {"main_grad": mains, "deferred": queue} if handled else {}
        ys = column_parallel_linear(entering, ws, group=dist.group.WORLD, overlap=overlap, **options)
        torch.autograd.backward(ys, [integers(*y.shape, seed=9) for y in ys])
        if handled:
            assert not mains[0].any() and ws[1].grad is None
            queue.compute()
        outcomes.append([entering.grad, mains[0] if handled else ws[0].grad, ws[1].grad])
    return outcomes


@pytest.mark.parametrize("overlap", ["off", 2])
def test_several_weights_main_grads_and_deferred_gradients(overlap):
    for plain, handled in ranks(2).run(copied_to_several, overlap):
        for got, want in zip(handled, plain, strict=True):
            assert torch.equal(got, want)


def copies_sent(rank: int) -> dict[str, int]:
    """Exchanges and comparisons of a forward and a backward, with one of the two gradients wanted."""
    counts = {}
    for wanted in ("x", "weight"):
        x, weight = (normal(6, 4, seed=i).requires_grad_(wanted == name) for i, name in enumerate(("x", "weight")))
        with (
            unittest.mock.patch.object(C10dTransport, "post", autospec=True, side_effect=C10dTransport.post) as post,
            unittest.mock.patch.object(
                C10dTransport, "_collective", autospec=True, side_effect=C10dTransport._collective
            ) as collective,
            unittest.mock.patch.object(consistency, "_compare", side_effect=consistency._compare) as ask,
        ):
            column_parallel_linear(x, weight, group=dist.group.WORLD, overlap="off").sum().backward()
        counts[wanted] = post.call_count + collective.call_count + ask.call_count
    return counts


def test_sends_once_and_only_where_the_gradient_of_x_is_wanted():
    """The parts that others own, their sums back, and the comparisons of forward and backward."""
    assert ranks(2).run(copies_sent) == [{"x": 4, "weight": 0}] * 2


def copied_apart(rank: int) -> None:
    column_parallel_linear(normal(4 + rank, 3, seed=0).requires_grad_(), normal(2, 3, seed=1), group=dist.group.WORLD)


def test_ranks_that_disagree_all_raise():
    outcomes = ranks(2).outcomes(copied_apart)
    assert all(
        isinstance(o, Raised) and "column_parallel_linear: the ranks of the group make diff" in o.message
        for o in outcomes
    )


def copied_and_compiled(rank: int) -> list[list[Tensor]]:
    def step(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return column_parallel_linear(x, weight, bias, group=dist.group.WORLD).square().sum()

    outcomes = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = [leaf(normal(*s, seed=i + (0 if i == 0 else rank))) for i, s in enumerate([(5, 2, 4), (3, 4), (3,)])]
        function(*leaves).backward()
        outcomes.append([t.grad for t in leaves])
    return outcomes


def test_compiles_to_the_same_gradients():
    for eager, compiled in ranks(2).run(copied_and_compiled):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("device", suite.DEVICES)
def test_one_rank_is_a_linear(device):
    args = [
        suite.randn(*s, dtype=torch.float32, device=device, seed=i) for i, s in enumerate([(5, 2, 8), (3, 8), (3,)])
    ]
    ours, reference = (
        lambda *a, f=f: f(*a, group=None) for f in (column_parallel_linear, column_parallel_linear_reference)
    )
    suite.check_numerics(ours, reference, args)
    suite.check_checkpointing(ours, args)
    suite.check_second_derivative_raises(ours, args)
    op = torch.ops.parallel_ops.column_parallel_linear.default
    suite.check_op(op, [args[0], [args[1]], [args[2]], None, [5], 0, [True, True, True], True])
