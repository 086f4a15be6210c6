"""Backwards of the linears by halves, and weight gradients that a queue computes later."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from parallel_ops import all_gather_linear, linear_reduce_scatter
from parallel_ops.tensor_parallel import DeferredWeightGradients, use_transport
from support.parallelism.parallel_linear import OPS, Counting, leaf, normal
from support.parallelism.pipeline import weight_halves
from support.ranks.distributed import ranks

groups = pytest.mark.parametrize("size", [2, 3, 4])
kinds = pytest.mark.parametrize("kind", ["column", "row"])


def _as_stage_output(y: Tensor) -> Tensor:
    """What a pipeline does with the output of a stage; it raises for a view."""
    assert not y._is_view()
    return y


def split_backward(rank: int, kind: str, handle: str, overlap: Any) -> tuple[list[Any], list[Any], list[int], int]:
    """((dx, dW, db) of one backward, the same of its halves, exchanges posted by each of them, entries in the queue).

    The exchanges are those of the whole backward, of the half for the input, of the half for the parameters, and of
    ``autograd.grad`` of the input alone, which must leave everything else as it is.
    """
    leaves = [leaf(normal(*shape, seed=i)) for i, shape in enumerate([(4, 3, 8), (6, 8), (6,)])]
    x, weight, bias = leaves
    main_grad = torch.zeros(6, 8) if handle == "main_grad" else None
    queue = DeferredWeightGradients() if handle == "deferred" else None
    use_transport(dist.group.WORLD, Counting(dist.group.WORLD))
    posted: list[int] = []

    def forward() -> Tensor:
        y = OPS[kind](x * 1, weight, bias, group=dist.group.WORLD, overlap=overlap, main_grad=main_grad, deferred=queue)
        return _as_stage_output(y * 1)

    def count(run: Any) -> Any:
        Counting.posted = 0
        result = run()
        posted.append(Counting.posted)
        return result

    def taken() -> list[Any]:
        if queue is not None:
            queue.compute()
        gradients = [x.grad, weight.grad if main_grad is None else main_grad.clone(), bias.grad]
        x.grad = weight.grad = bias.grad = None
        if main_grad is not None:
            main_grad.zero_()
        return gradients

    try:
        y = forward()
        dy = normal(*y.shape, seed=7)
        count(lambda: y.backward(dy))
        whole = taken()
        y = forward()
        _, groups = count(lambda: stage_backward_input([y], [dy], [x], iter([weight, bias])))
        if handle == "autograd":
            count(lambda: stage_backward_weight(iter([weight, bias]), groups))
        else:
            posted.append(0)
        halves = taken()
        y = forward()
        (dx,) = count(lambda: torch.autograd.grad(y, [x], dy))
        assert torch.equal(dx, whole[0]) and weight.grad is None and bias.grad is None
        assert main_grad is None or not main_grad.any()
    finally:
        use_transport(dist.group.WORLD, None)
    return whole, halves, posted, 0 if queue is None else len(queue)


@kinds
@pytest.mark.parametrize("handle", [pytest.param("autograd", marks=weight_halves), "main_grad", "deferred"])
@pytest.mark.parametrize("overlap", ["off", 2])
def test_a_backward_computes_and_sends_what_is_asked_for(kind, handle, overlap):
    """By halves, as a pipeline schedule runs it, and for the input alone."""
    of_input = overlap if kind == "row" and overlap != "off" else 1  # pieces of the one other shard
    both = of_input if kind == "row" else 2
    for whole, halves, posted, queued in ranks(2).run(split_backward, kind, handle, overlap):
        now = of_input if handle == "deferred" else both
        assert posted == [now, of_input, 1 if handle == "autograd" else 0, of_input]
        assert torch.equal(halves[0], whole[0])
        if handle == "autograd":
            assert all(torch.equal(a, b) for a, b in zip(halves, whole, strict=True))
        else:
            assert halves[1] is None or not halves[1].any()
        assert queued == 0


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, functools.partial):
        value = [*value.args, *value.keywords.values()]
    if isinstance(value, list | tuple):
        return [t for part in value for t in _tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def deferred_shards(rank: int, kind: str) -> tuple[int, int, int]:
    """(bytes that an entry of the queue holds, exchanges of the backward, exchanges of the queue)."""
    queue, world = DeferredWeightGradients(), dist.get_world_size()
    s, k, n = 8 * world, 6, 5
    x = leaf(normal(s // world if kind == "column" else s, k, seed=1))
    weight = leaf(normal(n, k, seed=2))
    use_transport(dist.group.WORLD, Counting(dist.group.WORLD))
    try:
        y = OPS[kind](x, weight, group=dist.group.WORLD, overlap="off", deferred=queue)
        Counting.posted = 0
        y.backward(normal(*y.shape, seed=3))
        backward = Counting.posted
        (entry,) = queue._pending
        tensors = {id(t): t for cell in entry.__closure__ for t in _tensors_in(cell.cell_contents)}
        held_bytes = sum(t.untyped_storage().nbytes() for t in tensors.values())
        queue.compute()
        return held_bytes, backward, Counting.posted - backward
    finally:
        use_transport(dist.group.WORLD, None)


@groups
@kinds
def test_a_deferred_gradient_holds_shards_and_gathers_when_it_is_computed(size, kind):
    """x and dy of this rank: for the column 8 rows of 6 and 8 P of 5, for the row the other way round."""
    shard, whole = (6, 5) if kind == "column" else (5, 6)
    for outcome in ranks(size).run(deferred_shards, kind):
        assert outcome == (4 * 8 * (shard + size * whole) + 4, 1, 1)  # and a number in the shape of the weight


class Stage(torch.nn.Module):
    """Two linears, a weight of which may be left to a queue."""

    def __init__(self, dim: int, number: int, queue: DeferredWeightGradients | None) -> None:
        super().__init__()
        self.up, self.down = (
            torch.nn.Parameter(normal(dim, dim, seed=10 * number + i, dtype=torch.float64)) for i in range(2)
        )
        self.queue = queue

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(all_gather_linear(x, self.up, group=None, deferred=self.queue))
        return linear_reduce_scatter(h, self.down, group=None, deferred=self.queue)


def pipelined(rank: int, how: str) -> dict[str, Tensor]:
    """The gradients of this rank's stages under a schedule that splits their backwards; "whole" is without one."""
    chunks, dim = 4, 8
    stages = {i: Stage(dim, i, DeferredWeightGradients() if how == "queue" else None) for i in range(4)}
    x, target = (normal(chunks * 2, 3, dim, seed=seed, dtype=torch.float64) for seed in (1, 2))
    if how == "whole":
        for a, b in zip(x.chunk(chunks), target.chunk(chunks), strict=True):
            F.mse_loss(torch.nn.Sequential(*stages.values())(a), b).backward()
        own = stages
    else:
        own = {i: s for i, s in stages.items() if i % 2 == rank}
        wrapped = [
            PipelineStage(s, i, 4, torch.device("cpu"), dw_builder=None if s.queue is None else s.queue.dw_builder)
            for i, s in own.items()
        ]
        schedule = ScheduleInterleavedZeroBubble(wrapped, chunks, loss_fn=F.mse_loss, scale_grads=False)
        schedule.step(*([x] if rank == 0 else []), target=target, losses=[])
    return {f"{i}.{name}": p.grad for i, s in own.items() for name, p in s.named_parameters()}


@pytest.mark.parametrize("how", [pytest.param("split", marks=weight_halves), "queue"])
def test_a_zero_bubble_schedule_runs_the_halves_or_the_queue(how):
    whole = pipelined(0, "whole")
    got = {name: grad for of_rank in ranks(2).run(pipelined, how) for name, grad in of_rank.items()}
    assert got.keys() == whole.keys()
    for name, grad in got.items():
        torch.testing.assert_close(grad, whole[name], msg=name)


def test_a_queue_of_weight_gradients_says_what_it_cannot_do():
    queue = DeferredWeightGradients()
    queue.push(lambda: None)
    with pytest.raises(ValueError, match="count must be from 0 to 1, which are pending, got 2"):
        queue.compute(2)


@kinds
def test_a_deferred_gradient_must_have_somewhere_to_go(kind):
    op = all_gather_linear if kind == "column" else linear_reduce_scatter
    x, weight = normal(4, 3, seed=1), normal(5, 3, seed=2).requires_grad_()
    with pytest.raises(ValueError, match="deferred needs weights that are leaves"):
        op(x, weight * 1, group=None, deferred=DeferredWeightGradients())
