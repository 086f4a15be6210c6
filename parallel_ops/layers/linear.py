"""Linears whose weight is shared by a group of ranks.

    column parallel     Y_r = X W_r^T + b_r         W split by rows: each rank has some output features
    row parallel        Y = sum over r of X_r W_r^T + b      W split by columns: each rank has some input features

Between the two, activations are sharded by features. Before the first and after the second they are whole on every
rank, or, with ``sequence_parallel``, sharded by tokens: the gather and the reduce-scatter are then one op with the
product, which hides them. Sources: Shoeybi et al., arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198.
"""

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_ops.comm import copy_to_group, reduce_from_group
from parallel_ops.comm._group import group_rank, group_size
from parallel_ops.layers._checks import before, check_input, first_collective, last_collective
from parallel_ops.layers._sharding import Init, ShardedModule, Sharding, bias_init, check_divides, linear_init
from parallel_ops.tensor_parallel import DeferredWeightGradients, all_gather_linear, linear_reduce_scatter
from parallel_ops.tensor_parallel._overlap_plan import Overlap, encode


class LinearOptions(TypedDict):
    """The arguments that all linears of a block have in common."""

    group: ProcessGroup | None
    bias: bool
    sequence_parallel: bool
    overlap: Overlap
    device: torch.device | str | None
    dtype: torch.dtype | None


class _Linear(ShardedModule):
    """What both have.

    Attributes:
        main_grad: an fp32 tensor of the weight's shape to add its gradients to, instead of ``weight.grad``.
        deferred: a queue that computes the weight's gradients later, as a pipeline schedule wants it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ProcessGroup | None,
        sequence_parallel: bool,
        overlap: Overlap,
        init_method: Init | None,
    ) -> None:
        super().__init__(group)
        encode(type(self).__name__, overlap)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.overlap, self.init_method = sequence_parallel, overlap, init_method
        self.main_grad: Tensor | None = None
        self.deferred: DeferredWeightGradients | None = None

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product on this rank alone."""
        if self.main_grad is None and self.deferred is None:
            return F.linear(x, self.weight, bias)
        return all_gather_linear(x, self.weight, bias, group=None, main_grad=self.main_grad, deferred=self.deferred)

    def _overlapped(
        self, op: Callable[..., Tensor], x: Tensor, bias: Tensor | None, sizes: Sequence[int] | None
    ) -> Tensor:
        """The product and its communication in one op."""
        handles = {"main_grad": self.main_grad, "deferred": self.deferred}
        return op(x, self.weight, bias, group=self.group, overlap=self.overlap, sizes=sizes, **handles)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={group_rank(self.group)} of {group_size(self.group)}, sequence_parallel={self.sequence_parallel}"
        )


class ColumnParallelLinear(_Linear):
    """``nn.Linear`` with its output features split over a group.

    Args:
        in_features, out_features: of the whole layer; ``out_features / parts`` divides evenly by the group's size.
        group: the ranks that share the weight; ``None`` for one.
        bias: whether there is one.
        sequence_parallel: the input is sharded by tokens over the group; see ``all_gather_linear`` for ``overlap``.
        parts: blocks of output features that are split each by itself, such as 2 for the halves of a gated MLP, so
            that a rank has the same features of all blocks.
        init_method: fills the whole weight ``[out_features, in_features]`` in place; by default as ``nn.Linear`` does.

    Attributes:
        weight: ``[out_features / P, in_features]``. bias: ``[out_features / P]`` or ``None``.

    Raises:
        ValueError: sizes that do not fit the group, an unknown ``overlap``.

    From one seed, ``torch.manual_seed`` on every rank, any group size draws the same whole layer as ``nn.Linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: ProcessGroup | None,
        bias: bool = True,
        sequence_parallel: bool = False,
        overlap: Overlap = "auto",
        parts: int = 1,
        init_method: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, group, sequence_parallel, overlap, init_method)
        if parts < 1 or out_features % parts:
            raise ValueError(f"ColumnParallelLinear: parts ({parts}) must divide out_features ({out_features})")
        local = parts * check_divides("ColumnParallelLinear", "out_features / parts", out_features // parts, group)
        self.parts = parts
        rows = (out_features,) if parts == 1 else (parts, out_features // parts)
        dim = len(rows) - 1
        self.add_part("weight", Sharding((*rows, in_features), dim), (local, in_features), device, dtype)
        if bias:
            self.add_part("bias", Sharding(rows, dim), (local,), device, dtype)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight, then bias, as ``nn.Linear`` does."""
        self.draw("weight", self.init_method or linear_init, (self.out_features, self.in_features))
        if "bias" in self.shardings:
            self.draw("bias", bias_init(self.in_features), (self.out_features,))

    def forward(self, x: Tensor, *, add_bias: bool = True, sizes: Sequence[int] | None = None) -> Tensor:
        """``[s, ..., in_features]`` to ``[s, ..., out_features / P]``.

        Args:
            x: whole, or with ``sequence_parallel`` this rank's rows ``[s_r, ..., in_features]``.
            add_bias: ``False`` leaves the bias to what comes next, which may fuse it.
            sizes: ``s_r`` of every rank, where they differ.

        Raises:
            TypeError, ValueError: x of another shape, dtype or device than the weight needs.

        Sharding: x replicated, or S(0) with ``sequence_parallel``; the result S(-1).
        """
        bias = self.bias if add_bias else None
        if self.sequence_parallel:
            with before(first_collective(True), self.group, x):
                check_input("ColumnParallelLinear", x, self.weight)
            return self._overlapped(all_gather_linear, x, bias, sizes)
        check_input("ColumnParallelLinear", x, self.weight)
        return self._multiply(copy_to_group(x, self.group), bias)


class RowParallelLinear(_Linear):
    """``nn.Linear`` with its input features split over a group.

    Args:
        in_features, out_features: of the whole layer; ``in_features`` divides evenly by the group's size.
        group: the ranks that share the weight; ``None`` for one.
        bias: whether there is one. It is whole on every rank and added once.
        sequence_parallel: the output is sharded by tokens over the group; see ``linear_reduce_scatter`` for
            ``overlap``.
        init_method: fills the whole weight ``[out_features, in_features]`` in place; by default as ``nn.Linear`` does.

    Attributes:
        weight: ``[out_features, in_features / P]``. bias: ``[out_features]`` or ``None``.

    Raises:
        ValueError: sizes that do not fit the group, an unknown ``overlap``.

    From one seed, ``torch.manual_seed`` on every rank, any group size draws the same whole layer as ``nn.Linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: ProcessGroup | None,
        bias: bool = True,
        sequence_parallel: bool = False,
        overlap: Overlap = "auto",
        init_method: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, group, sequence_parallel, overlap, init_method)
        local = check_divides("RowParallelLinear", "in_features", in_features, group)
        self.add_part("weight", Sharding((out_features, in_features), 1), (out_features, local), device, dtype)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight, then bias, as ``nn.Linear`` does."""
        self.draw("weight", self.init_method or linear_init)
        if self.bias is not None:
            with torch.no_grad():
                bias_init(self.in_features)(self.bias)

    def forward(self, x: Tensor, *, add_bias: bool = True, sizes: Sequence[int] | None = None) -> Tensor:
        """``[s, ..., in_features / P]`` to ``[s, ..., out_features]``.

        Args:
            x: all rows of this rank's features.
            add_bias: ``False`` leaves the bias to what comes next. With ``sequence_parallel`` its gradient there is
                that of this rank's rows alone: give it ``copy_to_group(layer.bias, group)``.
            sizes: the rows of the result on every rank, where ``s`` does not divide evenly.

        Raises:
            TypeError, ValueError: x of another shape, dtype or device than the weight needs.

        Sharding: x S(-1); the result replicated, or S(0) with ``sequence_parallel``.
        """
        bias = self.bias if add_bias else None
        with before(last_collective(self.sequence_parallel), self.group, x):
            check_input("RowParallelLinear", x, self.weight)
        if self.sequence_parallel:
            return self._overlapped(linear_reduce_scatter, x, bias, sizes)
        if group_size(self.group) == 1:
            return self._multiply(x, bias)
        y = reduce_from_group(self._multiply(x, None), self.group)
        return y if bias is None else y + bias.to(y.dtype)  # under autocast y is narrower, as that of nn.Linear
