"""Collectives with gradients.

    forward                backward
    copy_to_group          all-reduce of the gradients            x is whole on every rank, each uses it differently
    reduce_from_group      the gradient as it is                  x is a partial sum
    scatter_to_group       all-gather                             x is whole, each rank continues with its part
    gather_from_group      this rank's part of the gradient       each rank holds a part, all go on alike
    all_gather             reduce-scatter                         each rank holds a part and uses the whole differently
    reduce_scatter         all-gather                             x is a partial sum, each rank continues with its part
    all_to_all             all-to-all, the other way

The first four are the f and g of Shoeybi et al., arXiv:1909.08053, and the next two those of sequence parallelism
(Korthikanti et al., arXiv:2205.05198). A backward is one of the functions above, so second derivatives work.

Common to all: ``group=None`` is a group of one. ``dim`` may be any dimension, negative too. ``sizes`` are the sizes of
the ranks' shards along ``dim``, in rank order, the same tuple on every rank; without it all shards have one size.
``grad_reduce="fp32"`` sums in rank order in fp32 with one rounding at the end: the same bits run after run, whatever
the backend. ``"backend"`` leaves the sum to the backend, in the tensor's dtype and in the backend's order.

Ranks that make different calls all raise the same ValueError before data moves (see ``consistency``).
Under ``torch.compile`` each is one opaque op of the graph: nothing is fused into it and it blocks its stream in program
order. Arguments are then checked when the graph is made, and what ranks must have in common at every run. A compiler
may swap ops that do not depend on each other; it is sure to do so alike on all ranks only where they compile the same
graph, which with uneven shards they do not: compile those with ``backend="aot_eager"``, which keeps the order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.groups import (
    GradReduce,
    check_dim,
    check_receive_sizes,
    check_sizes,
    check_summable,
    check_tensor,
    group_name,
    is_fp32,
    shard_sizes,
)
from parallel_ops.comm import primitives
from parallel_ops.comm.consistency import propagate_errors

__all__ = [
    "all_gather",
    "all_to_all",
    "copy_to_group",
    "gather_from_group",
    "reduce_from_group",
    "reduce_scatter",
    "scatter_to_group",
    "shard_sizes",
]


# Each takes x, its own arguments, the name of the group, and the name of the call for errors.
_FORWARD: dict[str, Callable[..., Tensor]] = {
    "copy": lambda x, fp32, group, op: x.view_as(x),
    "reduce": primitives.all_reduce,
    "scatter": lambda x, dim, sizes, group, op: primitives.scatter(x, dim, sizes, group),
    "gather": primitives.all_gather,
    "all_gather": lambda x, dim, sizes, fp32, group, op: primitives.all_gather(x, dim, sizes, group, op),
    "reduce_scatter": primitives.reduce_scatter,
    "all_to_all": primitives.all_to_all,
}
# The collective of the backward, which takes the same arguments.
_BACKWARD = {
    "copy": "reduce", "reduce": "copy", "scatter": "gather", "gather": "scatter", "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather", "all_to_all": "all_to_all",
}  # fmt: skip


class Collective(torch.autograd.Function):
    """``Collective.apply(x, name, *arguments, group, op)``: a collective of ``_FORWARD``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, *arguments: Any) -> Tensor:
        ctx.collective, ctx.arguments = name, arguments
        return _FORWARD[name](x, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *own, group, op = ctx.arguments
        if ctx.collective == "all_to_all":  # what was concatenated is split
            own = own[2:] + own[:2]
        back = Collective.apply(grad, _BACKWARD[ctx.collective], *own, group, f"backward of {op}")
        return back, None, *(None for _ in ctx.arguments)


def copy_to_group(x: Tensor, group: ProcessGroup | None, *, grad_reduce: GradReduce = "fp32") -> Tensor:
    """``x`` as it is; in the backward the gradients of all ranks are summed.

    Args:
        x: any shape, floating: the same on every rank.

    Raises: TypeError, ValueError: see the module.

    Sharding: x and the result replicated; the gradient of the result partial over group, that of x replicated.
    """
    op = "copy_to_group"
    name = group_name(op, group)
    check_summable(op, x, group)
    fp32 = is_fp32(op, grad_reduce)
    return x if name is None else Collective.apply(x, "copy", fp32, name, op)


def reduce_from_group(x: Tensor, group: ProcessGroup | None, *, grad_reduce: GradReduce = "fp32") -> Tensor:
    """The sum of ``x`` over the ranks; the gradient passes as it is.

    Args:
        x: any shape, floating or integer: this rank's partial sum.

    Returns: shape and dtype of ``x``; with ``"fp32"`` every rank has the same bits.
    Raises: TypeError, ValueError: see the module.

    Sharding: x partial over group; the result, its gradient and that of x replicated.
    """
    op = "reduce_from_group"
    name = group_name(op, group)
    with propagate_errors(op, group, x, checked=True):
        check_summable(op, x, group)
        fp32 = is_fp32(op, grad_reduce)
    return x if name is None else Collective.apply(x, "reduce", fp32, name, op)


def scatter_to_group(
    x: Tensor, group: ProcessGroup | None, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's part of ``x``; in the backward the parts of the gradient are gathered. The forward sends nothing.

    Args:
        x: any shape: the same on every rank.

    Raises: TypeError, ValueError: see the module.

    Sharding: x replicated, the result S(dim) over group; their gradients likewise.
    """
    op = "scatter_to_group"
    name = group_name(op, group)
    check_tensor(op, x, group)
    dim = check_dim(op, "dim", dim, x)
    split = check_sizes(op, "sizes", sizes, group, dim, whole=x)
    return x if name is None else Collective.apply(x, "scatter", dim, split, name, op)


def gather_from_group(
    x: Tensor, group: ProcessGroup | None, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """``x`` of all ranks, concatenated along ``dim``; in the backward each rank takes its part of the gradient.

    Right if every rank computes the same with the whole, so that all have the same gradient of it. Otherwise use
    ``all_gather``.

    Args:
        x: any shape: this rank's shard.

    Raises: TypeError, ValueError: see the module.

    Sharding: x S(dim) over group, the result replicated; their gradients likewise.
    """
    op = "gather_from_group"
    name = group_name(op, group)
    with propagate_errors(op, group, x, checked=True):
        check_tensor(op, x, group)
        dim = check_dim(op, "dim", dim, x)
        split = check_sizes(op, "sizes", sizes, group, dim, shard=x)
    return x if name is None else Collective.apply(x, "gather", dim, split, name, op)


def all_gather(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    grad_reduce: GradReduce = "fp32",
) -> Tensor:
    """``x`` of all ranks, concatenated along ``dim``; in the backward the gradients are reduce-scattered.

    Args:
        x: any shape: this rank's shard.

    Raises: TypeError, ValueError: see the module.

    Sharding: x S(dim) over group, the result replicated; the gradient of the result partial over group.
    """
    op = "all_gather"
    name = group_name(op, group)
    with propagate_errors(op, group, x, checked=True):
        check_tensor(op, x, group)
        dim = check_dim(op, "dim", dim, x)
        split = check_sizes(op, "sizes", sizes, group, dim, shard=x)
        fp32 = is_fp32(op, grad_reduce)
    return x if name is None else Collective.apply(x, "all_gather", dim, split, fp32, name, op)


def reduce_scatter(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    grad_reduce: GradReduce = "fp32",
) -> Tensor:
    """This rank's part along ``dim`` of the sum of ``x`` over the ranks; in the backward the gradients are gathered.

    Args:
        x: any shape, floating or integer: this rank's partial sum of the whole.

    Raises: TypeError, ValueError: see the module.

    Sharding: x partial over group, the result S(dim) over group; the gradient of x replicated.
    """
    op = "reduce_scatter"
    name = group_name(op, group)
    with propagate_errors(op, group, x, checked=True):
        check_summable(op, x, group)
        dim = check_dim(op, "dim", dim, x)
        split = check_sizes(op, "sizes", sizes, group, dim, whole=x)
        fp32 = is_fp32(op, grad_reduce)
    return x if name is None else Collective.apply(x, "reduce_scatter", dim, split, fp32, name, op)


def all_to_all(
    x: Tensor,
    group: ProcessGroup | None,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Part j of ``x`` along ``split_dim`` goes to rank j; what arrives is concatenated along ``concat_dim``.

    Args:
        x: any shape.
        split_sizes: how much of ``split_dim`` goes to each rank; without it, equal parts.
        concat_sizes: how much of ``concat_dim`` comes from each rank; without it, as much as ``x`` has from each
            (``split_dim`` and ``concat_dim`` differ) or equal parts (they are the same).

    If the dimensions differ, both tuples must be the same on every rank (for a change of sharding, such as from heads
    to sequence). If they are the same, each rank has its own tuples, and rank j must expect from rank i what rank i
    sends to it (for example tokens to experts).

    Raises: TypeError, ValueError: see the module.

    Sharding: x S(concat_dim) over group, the result S(split_dim) over group; their gradients likewise.
    """
    op = "all_to_all"
    name = group_name(op, group)
    with propagate_errors(op, group, x, checked=True):
        check_tensor(op, x, group)
        split_dim = check_dim(op, "split_dim", split_dim, x)
        concat_dim = check_dim(op, "concat_dim", concat_dim, x)
        split = check_sizes(op, "split_sizes", split_sizes, group, split_dim, whole=x)
        if split_dim != concat_dim:
            concat = check_sizes(op, "concat_sizes", concat_sizes, group, concat_dim, shard=x)
        else:
            concat = check_receive_sizes(op, "concat_sizes", concat_sizes, group, split)
    return x if name is None else Collective.apply(x, "all_to_all", split_dim, split, concat_dim, concat, name, op)
