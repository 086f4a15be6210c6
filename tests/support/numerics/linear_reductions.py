"""What each rank does in the tests of how the linears over a group add partial sums."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel_ops import all_gather_linear, column_parallel_linear, linear_reduce_scatter
from parallel_ops.comm import consistency
from parallel_ops.tensor_parallel import DeferredWeightGradients
from support.numerics.recorded_calls import recorded_calls
from support.parallelism.parallel_linear import integers

OPS = {"gather": all_gather_linear, "scatter": linear_reduce_scatter, "copy": column_parallel_linear}


def _whole(size: int, dtype: torch.dtype) -> list[Tensor]:
    """(x, weight, bias) of the linear that one process would have."""
    return [integers(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(2 * size, 3, 8), (8, 8), (8,)])]


def _arguments(kind: str, rank: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """What this rank has of x, weight and bias."""
    x, weight, bias = _whole(size, dtype)
    if kind == "scatter":
        return [x.chunk(size, -1)[rank], weight.chunk(size, 1)[rank], bias]
    return [x.chunk(size)[rank] if kind == "gather" else x, weight.chunk(size)[rank], bias.chunk(size)[rank]]


def calls_of(rank: int, kind: str, overlap: Any, grad_reduce: str) -> tuple[list[str], list[str]]:
    """The collectives and messages of a forward, and of its backward."""
    size = dist.get_world_size()
    leaves = [t.clone().requires_grad_() for t in _arguments(kind, rank, size, torch.bfloat16)]
    consistency.set_consistency_checks(dist.group.WORLD, "first")
    try:
        for _ in range(2):  # the first is compared between the ranks
            with recorded_calls() as forward:
                y = OPS[kind](*leaves[:2], group=dist.group.WORLD, overlap=overlap, grad_reduce=grad_reduce)
            with recorded_calls() as backward:
                y.float().sum().backward()
    finally:
        consistency.set_consistency_checks(dist.group.WORLD, "always")
    return forward, backward


def by_the_backend(rank: int, kind: str, overlap: Any, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """(got, expected) of the output and of all gradients, on integers, whose sums are exact in any order."""
    size, group = dist.get_world_size(), dist.group.WORLD
    leaves = [t.clone().requires_grad_() for t in _arguments(kind, rank, size, dtype)]
    y = OPS[kind](*leaves, group=group, overlap=overlap, grad_reduce="backend")
    whole = integers(2 * size, 3, 8, seed=3, dtype=dtype)
    y.backward(whole.chunk(size)[rank] if kind == "scatter" else whole.chunk(size, -1)[rank])

    ones = [t.requires_grad_() for t in _whole(size, dtype)]
    expected = F.linear(*ones)
    expected.backward(whole)
    dx, dw, db = (t.grad for t in ones)
    if kind == "scatter":
        wanted = [expected.chunk(size)[rank], dx.chunk(size, -1)[rank], dw.chunk(size, 1)[rank], db]
    else:
        wanted = [expected.chunk(size, -1)[rank], dx.chunk(size)[rank] if kind == "gather" else dx]
        wanted += [dw.chunk(size)[rank], db.chunk(size)[rank]]
    return list(zip([y.detach(), *(t.grad for t in leaves)], [t.detach() for t in wanted], strict=True))


def apart(rank: int) -> None:
    way = "backend" if rank else "fp32"
    linear_reduce_scatter(integers(4, 8, seed=0), integers(3, 8, seed=1), group=dist.group.WORLD, grad_reduce=way)


def of_three_weights(rank: int, grad_reduce: str) -> list[list[Tensor]]:
    """Gradients of x, three weights and their biases: at once, and by a queue that computes them after the messages."""
    return [_gradients_of_three(rank, grad_reduce, defer) for defer in (False, True)]


def _gradients_of_three(rank: int, grad_reduce: str, defer: bool) -> list[Tensor]:
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(rank + 1)
    x = torch.randn(9, 3, 32, generator=shared).bfloat16().requires_grad_()
    weights = [torch.randn(n, 32, generator=own).bfloat16().requires_grad_() for n in (24, 8, 8)]
    biases = [torch.randn(n, generator=own).bfloat16().requires_grad_() for n in (24, 8, 8)]
    buffers = [torch.ones(w.shape) for w in weights]
    queue = DeferredWeightGradients() if defer else None
    for _ in range(2):  # the second adds to the first
        ys = column_parallel_linear(
            x, weights, biases, group=dist.group.WORLD, overlap="off", grad_reduce=grad_reduce, main_grad=buffers,
            deferred=queue,
        )  # fmt: skip
        sum((y.float() ** 2).sum() for y in ys).backward()
        if queue is not None:
            queue.compute()
    return [x.grad, *buffers, *(b.grad for b in biases)]
