"""Linears over a group, sharded and on one process."""

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel_ops import DeferredWeightGradients, all_gather_linear, linear_reduce_scatter
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.layers import ColumnParallelLinear
from parallel_ops.tensor_parallel import all_gather_linear_reference, linear_reduce_scatter_reference
from parallel_ops.tensor_parallel.linear.float8 import GatheredRows
from support.parallelism.layers import mesh_of
from support.transports import traffic

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

    def __init__(self, group):
        super().__init__(group)
        self.capabilities = dataclasses.replace(self.capabilities, name="counting")

    def post(self, op, chunks):
        Counting.posted += 1
        return super().post(op, chunks)

    def _collective(self, *args):
        handle = super()._collective(*args)
        Counting.posted += handle is not None
        return handle


def float8_gathers(rank: int, recipe: str, sizes: list[int], deferred: bool) -> dict[str, Any]:
    """Results of a column-parallel linear whose input is gathered in float8 and in 16 bits, and what gathers send."""
    mesh = mesh_of(tp=len(sizes))
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-3, 3, sum(sizes))[:, None, None]  # no rank has the largest of all
    whole = (torch.randn(sum(sizes), 2, 256, generator=generator) * scale).bfloat16()
    found: dict[str, Any] = {}
    for way in ("bf16", "16 bits", "float8"):
        torch.manual_seed(1)
        linear = ColumnParallelLinear(
            256, 256 * len(sizes), tp_mesh=mesh["tp"], sequence_parallel=True, overlap="off", dtype=torch.bfloat16
        )
        linear.precision, linear.emulated = "bf16" if way == "bf16" else recipe, True  # type: ignore[assignment]
        queue = linear.deferred = DeferredWeightGradients() if deferred else None
        x = whole.split(sizes)[rank].clone().requires_grad_()
        in_16_bits = mock.patch.object(GatheredRows, "of", return_value=None)
        with traffic.counted(mesh) as counts, in_16_bits if way == "16 bits" else contextlib.nullcontext():
            y = linear(x, sizes=sizes)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(rank)).to(y.dtype))
            if queue is not None:
                queue.compute()
        assert linear.bias is not None
        gradients = [t.grad.to_local() for t in (linear.weight, linear.bias)]  # type: ignore[union-attr]
        found[way] = [y.detach(), x.grad, *gradients], counts["tp", "all-gather"]
    return found
