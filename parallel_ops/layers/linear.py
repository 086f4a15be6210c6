"""Linears whose weight is sharded over a group of ranks.

    column parallel     Y_r = X W_r^T + b_r         W split by rows: each rank has some output features
    row parallel        Y = sum over r of X_r W_r^T + b      W split by columns: each rank has some input features

Between the two, activations are sharded by features. Before the first and after the second they are whole on every
rank or, with ``sequence_parallel``, sharded by tokens. The communication that this needs is part of the same op as the
matmuls and overlaps with them. Sources: Shoeybi et al., arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198.
"""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from typing_extensions import Unpack

from parallel_ops._internal.distributed.groups import check_sizes, group_rank
from parallel_ops.comm import reduce_from_group, reduce_scatter
from parallel_ops.layers.initialization import InitFn
from parallel_ops.layers.linear_base import LinearArguments, ParallelLinear, add_residual, column_linears
from parallel_ops.layers.lora import row_adapter
from parallel_ops.layers.parameters import check_input, ensure_divisible, is_plain, propagates_errors, to_local
from parallel_ops.ops.float8_linear import float8_linear
from parallel_ops.tensor_parallel import (
    column_parallel_linear,
    linear_reduce_scatter,
)


class ColumnParallelLinear(ParallelLinear):
    """``nn.Linear`` with its output features split over a mesh.

    Args:
        in_features, out_features: of the whole layer; ``out_features`` is a multiple of the mesh's size.
        tp_mesh: the ranks that share the weight; ``None`` for one.
        bias: whether there is one.
        sequence_parallel: the input is sharded by tokens over the mesh.
        overlap: how communication overlaps with the matmuls: ``"auto"`` (on a GPU measured at the first
            calls), ``"off"``, ``"symmetric"`` or a number of chunks; see ``all_gather_linear``.
        grad_reduce: how the gradient of the input is summed over the ranks: ``"fp32"`` (in rank order in fp32) or
            ``"backend"`` (by the group's backend, as Megatron-LM does); see ``all_gather_linear``.
        rows: keeps the weight whole on every rank; this rank uses these rows of it (output features), and gradients
            are summed over the ranks. ``None`` shards the weight.
        init_method: fills tiles of the weight in place, each element independently; ``None`` for what ``nn.Linear``
            does.
        device, dtype: of the parameters; ``None`` for torch's defaults.

    Attributes:
        weight: ``[out_features, in_features]``, a DTensor S(0). bias: ``[out_features]``, S(0), or ``None``.

    Raises:
        TypeError, ValueError: sizes that do not fit the mesh, a mesh of several dimensions, an unknown ``overlap`` or
            ``grad_reduce``.

    Initialisation is independent of the mesh, given the same ``torch.manual_seed`` on every rank.

    Examples:
        >>> import torch
        >>> from parallel_ops.layers import ColumnParallelLinear
        >>> linear = ColumnParallelLinear(64, 256, tp_mesh=None)  # tp_mesh=ParallelMesh(tp=4)["tp"] under torchrun
        >>> linear(torch.randn(16, 2, 64)).shape  # 256 / 4 features on each of 4 ranks
        torch.Size([16, 2, 256])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_mesh: DeviceMesh | None,
        bias: bool = True,
        rows: slice | None = None,
        init_method: InitFn | None = None,
        **linear: Unpack[LinearArguments],
    ) -> None:
        placement = Shard(0) if rows is None else Replicate()
        super().__init__(
            in_features, out_features, (placement, placement), bias, init_method, tp_mesh=tp_mesh, **linear
        )
        self.rows = rows
        if rows is None:
            ensure_divisible("ColumnParallelLinear", "out_features", out_features, self.ranks)

    @propagates_errors
    def forward(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """``[s, ..., in_features]`` to ``[s, ..., out_features / P]``.

        Args:
            x: whole, or with ``sequence_parallel`` this rank's rows ``[s_r, ..., in_features]``.
            sizes: ``s_r`` of every rank; ``None`` if all are equal.

        Raises:
            TypeError, ValueError: x of another shape, dtype or device than the weight needs.

        Sharding: x replicated, or S(0) with ``sequence_parallel``; the result S(-1).
        """
        check_input(type(self).__name__, x, self.weight)
        return column_linears(x, [self], sizes=sizes)[0][0]


def joined_linears(
    layer: str, x: Tensor, linears: Sequence[ParallelLinear], *, form: str = "[s, ..., {}]", add_bias: bool = True,
    sizes: Sequence[int] | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """``column_linears`` for the block ``layer``, which has checked nothing; ``form`` is that of ``check_input``.

    If a linear has hooks or was replaced, each is called, and adds its own bias.
    """
    plain = all(is_plain(linear, ColumnParallelLinear) for linear in linears)
    check_input(layer, x, linears[0].weight if plain else x, form)  # replacements check widths and dtypes themselves
    if plain:
        return column_linears(x, linears, add_bias=add_bias, sizes=sizes)
    rows: dict[str, Any] = {} if sizes is None else {"sizes": sizes}
    return [linear(x, **rows) for linear in linears], [None] * len(linears)


class RowParallelLinear(ParallelLinear):
    """``nn.Linear`` with its input features split over a mesh.

    Args:
        in_features, out_features: of the whole layer; ``in_features`` is a multiple of the mesh's size.
        tp_mesh: the ranks that share the weight; ``None`` for one.
        bias: whether there is one. It is whole on every rank and added once.
        sequence_parallel: shard the output by tokens over the mesh.
        overlap: how communication overlaps with the matmuls, with ``sequence_parallel``: ``"auto"`` (on a GPU measured
            at the first calls), ``"off"``, ``"symmetric"`` or a number of chunks; see ``linear_reduce_scatter``.
        grad_reduce: how the output is summed over the ranks, with and without ``sequence_parallel``: ``"fp32"`` (in
            rank order in fp32) or ``"backend"`` (by the group's reduce-scatter or all-reduce, as Megatron-LM does);
            see ``linear_reduce_scatter``.
        init_method: fills tiles of the weight in place, each element independently; ``None`` for what ``nn.Linear``
            does.
        device, dtype: of the parameters; ``None`` for torch's defaults.

    Attributes:
        weight: ``[out_features, in_features]``, a DTensor S(1). bias: ``[out_features]``, replicated, or ``None``.

    Raises:
        TypeError, ValueError: sizes that do not fit the mesh, a mesh of several dimensions, an unknown ``overlap`` or
            ``grad_reduce``.

    Initialisation is independent of the mesh, given the same ``torch.manual_seed`` on every rank.

    Examples:
        >>> import torch
        >>> from parallel_ops.layers import RowParallelLinear
        >>> linear = RowParallelLinear(256, 64, tp_mesh=None)  # tp_mesh=ParallelMesh(tp=4)["tp"] under torchrun
        >>> linear(torch.randn(16, 2, 256)).shape  # 256 / 4 features of the input on each of 4 ranks
        torch.Size([16, 2, 64])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_mesh: DeviceMesh | None,
        bias: bool = True,
        init_method: InitFn | None = None,
        **linear: Unpack[LinearArguments],
    ) -> None:
        super().__init__(
            in_features, out_features, (Shard(1), Replicate()), bias, init_method, tp_mesh=tp_mesh, **linear
        )
        ensure_divisible("RowParallelLinear", "in_features", in_features, self.ranks)

    def _local_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``F.linear``, in float8 by its ``precision``, with the weight's gradient sent to ``weight_gradient()``."""
        target = self.weight_gradient()
        if self.precision != "bf16":
            self.check_float8()
            return float8_linear(
                x, [weight], [bias], recipe=self.precision, emulated=self.emulated, deferred=self.deferred,
                targets=[target],
            )[0]  # fmt: skip
        if target is None:
            return F.linear(x, weight, bias)
        return column_parallel_linear(x, weight, bias, group=None, main_grad=target, deferred=self.deferred)

    @propagates_errors
    def forward(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        dropout: float = 0.0,
        row_positions: Tensor | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """``[s, ..., in_features / P]`` to ``[s, ..., out_features]``.

        Args:
            x: all rows of this rank's features.
            residual: in the result's shape; the result is then ``dropout(linear(x)) + residual``, in one pass.
            dropout: probability, with ``residual``. Masks are drawn by global element index: ranks whose default
                generators are in the same state drop the same elements as a single process.
            row_positions: int64 ``[s]``, the positions of these ranks' rows in a sequence that further ranks share, for
                ``dropout``; ``None`` if these ranks hold the whole sequence.
            sizes: with ``sequence_parallel``, the rows of the result on every rank; ``None`` for equal parts.

        Raises:
            TypeError, ValueError: x of another shape, dtype or device than the weight needs.

        Sharding: x S(-1); the result (and residual) replicated, or S(0) with ``sequence_parallel``.
        """
        check_input("RowParallelLinear", x, self.weight, parts=self.ranks)
        apart = not self.sequence_parallel or self.precision != "bf16"
        if not apart:
            weight, bias = to_local(self, self.weight, self.bias)
        else:  # since the bias is added behind the reduction (see to_local)
            (weight,) = to_local(self, self.weight)
            (bias,) = to_local(self, self.bias, partial=(self.sequence_parallel,))
        assert weight is not None
        drops = residual is not None and dropout > 0.0 and self.training
        first = 0
        if self.sequence_parallel:
            if apart:
                y = reduce_scatter(self._local_linear(x, weight, None), self.group, dim=0, sizes=sizes)
            else:
                y = linear_reduce_scatter(
                    x, weight, bias, group=self.group, overlap=self.overlap, grad_reduce=self.grad_reduce, sizes=sizes,
                    main_grad=self.weight_gradient(), deferred=self.deferred,
                )  # fmt: skip
                bias = None
            if drops:
                rows = check_sizes("RowParallelLinear", "sizes", sizes, self.group, 0, whole=x)
                first = sum(rows[: group_rank(self.group)])
        else:
            alone = None if self.ranks > 1 or residual is not None else bias
            y = self._local_linear(x, weight, alone)
            bias = None if alone is not None else bias
            y = reduce_from_group(y, self.group, grad_reduce=self.grad_reduce)
        if self.lora is not None:
            y = y + row_adapter(x, self.lora, sequence_parallel=self.sequence_parallel, sizes=sizes).to(y.dtype)
        if residual is not None:
            return add_residual(
                y, bias, residual, dropout, training=self.training, first=first, row_positions=row_positions
            )
        return y if bias is None else y + bias.to(y.dtype)  # under autocast y is in its dtype, as in nn.Linear
