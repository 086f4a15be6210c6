"""Linears over a group, sharded and on one process."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel_ops import all_gather_linear, linear_reduce_scatter
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.tensor_parallel import all_gather_linear_reference, linear_reduce_scatter_reference

OPS = {"column": all_gather_linear, "row": linear_reduce_scatter}
REFERENCES = {"column": all_gather_linear_reference, "row": linear_reduce_scatter_reference}


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers: their products and sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


def whole_linear(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Output and gradients of the linear on one process."""
    leaves = [leaf(t) for t in (x, weight, bias) if t is not None]
    y = F.linear(*leaves)
    y.backward(grad)
    return [y.detach(), *(t.grad for t in leaves)]


def sharded_linear(
    rank: int, kind: str, whole: list[Tensor | None], sizes: list[int], options: dict[str, Any], reference: bool = False
) -> list[Tensor]:
    """(y, dx, dW, db) of this rank's shards of the tensors (x, weight, bias, dy); features are split evenly."""
    x, weight, bias, grad = whole
    world = dist.get_world_size()
    rows = lambda t: t.split(sizes)[rank]  # noqa: E731
    if kind == "column":
        shards = [rows(x), weight.chunk(world)[rank], None if bias is None else bias.chunk(world)[rank]]
        grad = grad.chunk(world, dim=-1)[rank]
    else:
        shards = [x.chunk(world, dim=-1)[rank], weight.chunk(world, dim=1)[rank], bias]
        grad = rows(grad)
    leaves = [None if t is None else leaf(t) for t in shards]
    op = (REFERENCES if reference else OPS)[kind]
    y = op(*leaves, group=dist.group.WORLD, sizes=sizes, **options)
    y.backward(grad)
    return [y.detach(), *(t.grad for t in leaves if t is not None)]


class Counting(C10dTransport):
    """The group's own backend, under another name."""

    posted = 0

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, name="counting")

    def post(self, op, chunks):
        Counting.posted += 1
        return super().post(op, chunks)

    def _collective(self, *args):
        handle = super()._collective(*args)
        Counting.posted += handle is not None
        return handle
