"""The collectives as autograd Functions: the backward of each is another one of them, so second derivatives work."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallel_ops.comm import primitives

# Each Function's last argument is the name of the call for errors: of the forward, or of whose backward it is.


def _backward_of(op: str) -> str:
    return f"backward of {op}"


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fp32: bool, group: str, op: str) -> Tensor:
        ctx.args = fp32, group, _backward_of(op)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Reduce.apply(grad, *ctx.args), None, None, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fp32: bool, group: str, op: str) -> Tensor:
        ctx.args = fp32, group, _backward_of(op)
        return primitives.all_reduce(x, fp32, group, op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Copy.apply(grad, *ctx.args), None, None, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], group: str, op: str) -> Tensor:
        ctx.args = dim, sizes, group, _backward_of(op)
        return primitives.scatter(x, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Gather.apply(grad, *ctx.args), None, None, None, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], group: str, op: str) -> Tensor:
        ctx.args = dim, sizes, group, _backward_of(op)
        return primitives.all_gather(x, dim, sizes, group, op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Scatter.apply(grad, *ctx.args), None, None, None, None


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], fp32: bool, group: str, op: str) -> Tensor:
        ctx.args = dim, sizes, fp32, group, _backward_of(op)
        return primitives.all_gather(x, dim, sizes, group, op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ReduceScatter.apply(grad, *ctx.args), None, None, None, None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], fp32: bool, group: str, op: str) -> Tensor:
        ctx.args = dim, sizes, fp32, group, _backward_of(op)
        return primitives.reduce_scatter(x, dim, sizes, fp32, group, op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return AllGather.apply(grad, *ctx.args), None, None, None, None, None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
        group: str,
        op: str,
    ) -> Tensor:
        ctx.args = concat_dim, concat_sizes, split_dim, split_sizes, group, _backward_of(op)
        return primitives.all_to_all(x, split_dim, split_sizes, concat_dim, concat_sizes, group, op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return AllToAll.apply(grad, *ctx.args), None, None, None, None, None, None
