"""The base of the parallel linears: parameters, weight gradients, several linears with one input, the residual sum."""

import weakref
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from parallel_ops._internal.distributed.groups import GradReduce, is_fp32
from parallel_ops._internal.gradients.weight_gradients import ParameterGrad, Target
from parallel_ops.comm import all_gather, copy_to_group, primitives
from parallel_ops.layers.initialization import InitFn, init_sharded_, uniform
from parallel_ops.layers.lora import LoraAdapter, column_adapters
from parallel_ops.layers.parameters import ShardedModule, empty_parameter, to_local
from parallel_ops.ops import bias_dropout_add
from parallel_ops.ops.float8_linear import float8_linear
from parallel_ops.ops.float8_recipes import Precision
from parallel_ops.tensor_parallel import DeferredWeightGradients, all_gather_linear, column_parallel_linear
from parallel_ops.tensor_parallel.linear.call import Overlap, encode
from parallel_ops.tensor_parallel.linear.float8 import GatheredRows


class SummedRows(ParameterGrad):
    """The gradient of a weight that is whole on every rank, of which each rank uses some rows: their sum in rank order
    in fp32."""

    def __init__(self, parameter: Tensor, rows: slice, group: ProcessGroup) -> None:
        super().__init__(parameter)
        self._shape, self._rows, self._group = parameter.shape, rows, group

    @torch.no_grad()
    def add(self, dz: Tensor, h: Tensor, ends: Tensor | None = None) -> None:
        self.add_whole(dz.t() @ h)

    @torch.no_grad()
    def add_whole(self, product: Tensor) -> None:
        whole = product.new_zeros(self._shape)
        whole[self._rows] = product
        name = self._group.group_name
        super().add_whole(primitives.all_reduce(whole, True, name, "weight gradient of ColumnParallelLinear"))


class LinearArguments(TypedDict, total=False):
    """Keywords that all linears of a block share; ``ColumnParallelLinear`` and ``RowParallelLinear`` explain them."""

    sequence_parallel: bool
    overlap: Overlap
    grad_reduce: GradReduce
    device: torch.device | str | None
    dtype: torch.dtype | None


class ParallelLinear(ShardedModule):
    """Base class of ``ColumnParallelLinear`` and ``RowParallelLinear``.

    Attributes:
        main_grad: an fp32 tensor of the shape of this rank's shard of the weight. The weight's gradients are added to
            it and not to ``weight.grad``; only for weights that neither FSDP nor DDP reduces.
        lora: a low-rank adapter of the linear, or ``None``; see ``add_lora``.
        deferred: a queue that computes the weight's gradients later, for pipeline schedules; for the same weights, or
            with ``DeferredWeightGradients(fsdp=True)`` for all.
        precision: of the matmuls, ``"bf16"`` for that of the weight, or float8 by a recipe of ``ops.float8_recipes``;
            without ``main_grad``. On several ranks the communication is apart from float8 matmuls: rows that are
            gathered travel in float8, sums in 16 bits; where ranks share the rows that a matmul sums over, each
            scales its own part of a row.
        emulated: quantize for float8 in the same way, but multiply in fp32, on any device.
    """

    precision: Precision = "bf16"
    emulated: bool = False

    weight: nn.Parameter
    bias: nn.Parameter | None
    rows: slice | None = None  # of a weight that is whole on every rank, those that this rank uses

    def __init__(
        self,
        in_features: int,
        out_features: int,
        placements: tuple[Placement, Placement],
        bias: bool,
        init_method: InitFn | None,
        *,
        tp_mesh: DeviceMesh | None,
        sequence_parallel: bool = False,
        overlap: Overlap = "auto",
        grad_reduce: GradReduce = "fp32",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp_mesh)
        encode(type(self).__name__, overlap)
        is_fp32(type(self).__name__, grad_reduce)
        self.in_features, self.out_features, self.init_method = in_features, out_features, init_method
        self.sequence_parallel = sequence_parallel and self.ranks > 1
        self.overlap, self.grad_reduce = overlap, grad_reduce
        self.weight = empty_parameter((out_features, in_features), placements[0], self.mesh, device, dtype)
        self.bias = empty_parameter((out_features,), placements[1], self.mesh, device, dtype) if bias else None
        self._main_grad: Tensor | None = None
        self._deferred: DeferredWeightGradients | None = None
        self._placement = placements[0]
        self.lora: LoraAdapter | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises weight, then bias: by default as ``nn.Linear`` does, independently of the mesh."""
        init_sharded_(self.weight, self.init_method or uniform(self.in_features))
        if self.bias is not None:
            init_sharded_(self.bias, uniform(self.in_features))

    def add_lora(self, *, rank: int, alpha: float, dropout: float = 0.0) -> None:
        """Adds a low-rank adapter, on the device and in the dtype of the weight, whose result is zero at first.

        Args: see ``LoraAdapter``.
        """
        whole, own = Replicate(), self._placement
        self.lora = LoraAdapter(
            self.in_features, self.out_features, (own, whole) if own == Shard(1) else (whole, own), rank=rank,
            alpha=alpha, dropout=dropout, tp_mesh=self.mesh, device=self.weight.device, dtype=self.weight.dtype,
        )  # fmt: skip

    @property
    def main_grad(self) -> Tensor | None:
        return self._main_grad

    @main_grad.setter
    def main_grad(self, value: Tensor | None) -> None:
        self._main_grad, self._of = value, weakref.ref(self.weight)

    @property
    def deferred(self) -> DeferredWeightGradients | None:
        return self._deferred

    @deferred.setter
    def deferred(self, value: DeferredWeightGradients | None) -> None:
        self._deferred, self._of = value, weakref.ref(self.weight)

    def weight_gradient(self) -> Target:
        """The ``main_grad`` argument of the linear ops: where the weight's gradient goes; ``None`` for autograd.

        Raises:
            ValueError: FSDP has replaced the parameter for which ``main_grad`` or ``deferred`` was set; or a
                ``main_grad`` of a weight that is whole on every rank.
        """
        if self._main_grad is None and (self._deferred is None or not self.weight.requires_grad):
            return None
        # The parameter that FSDP2 shows now is bound to this call, and is there whenever the queue is computed.
        bound = self._main_grad is None and self._deferred is not None and self._deferred.fsdp
        if not bound and self._of() is not self.weight:
            raise ValueError(
                f"{type(self).__name__}: main_grad and deferred do not work under fully_shard or replicate, which "
                "would not reduce these gradients; leave them out (FSDP2 accumulates in the reduce_dtype of its "
                "MixedPrecisionPolicy)"
            )
        if self.rows is not None and self.group is not None:
            if self._main_grad is not None:
                raise ValueError(
                    "ColumnParallelLinear: main_grad cannot be used for a weight that is whole on every rank, since "
                    "its gradients are summed over the ranks; leave it out there"
                )
            return SummedRows(self.weight, self.rows, self.group)
        return ParameterGrad(self.weight) if self._main_grad is None else self._main_grad

    @property
    def local_sizes(self) -> tuple[int, int]:
        """Output and input features of this rank's matmul."""
        rows, columns = self.out_features, self.in_features
        if self._placement == Shard(1):
            return rows, columns // self.ranks
        return (rows // self.ranks if self.rows is None else len(range(rows)[self.rows])), columns

    def check_float8(self) -> None:
        """Raises ValueError where the matmuls of this linear cannot be in float8."""
        name = type(self).__name__
        if self._main_grad is not None:
            raise ValueError(
                f"{name}: main_grad cannot be used with {self.precision}, whose weight gradients are rounded products; "
                "leave it out"
            )


def column_linears(
    x: Tensor, linears: Sequence[ParallelLinear], *, add_bias: bool = True, sizes: Sequence[int] | None = None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs and biases of several column-parallel linears with the same input, which is gathered once.

    Args:
        x: fits the weights, by ``check_input``.
        linears: on one mesh, with the same options.
        add_bias: ``False`` if the next op adds the returned biases.
    """
    first = linears[0]
    targets = [linear.weight_gradient() for linear in linears]
    # A replicated weight used in part has a partial gradient, summed over ranks.
    partial = [linear.rows is not None for linear in linears]
    of_weights = [part and target is None for part, target in zip(partial, targets, strict=True)]
    both = [linear.weight for linear in linears], [linear.bias for linear in linears]
    if add_bias:
        handed = to_local(first, *both[0], *both[1], partial=of_weights + partial)
    else:  # apart, since different ops use them (see to_local)
        handed = *to_local(first, *both[0], partial=of_weights), *to_local(first, *both[1], partial=partial)
    rows = [linear.rows for linear in linears] * 2
    used = [t if t is None or r is None else t[r] for t, r in zip(handed, rows, strict=True)]
    weights, biases = [w for w in used[: len(linears)] if w is not None], used[len(linears) :]
    added = biases if add_bias else [None] * len(linears)
    if first.precision != "bf16":
        for linear in linears:
            linear.check_float8()
        group, shared = first.group, None
        if not first.sequence_parallel:
            x = copy_to_group(x, group, grad_reduce=first.grad_reduce)
        elif group is not None:
            reduction: dict[str, Any] = {"sizes": sizes, "grad_reduce": first.grad_reduce}
            shared = GatheredRows.of(x, first.precision, group=group, **reduction)
            x = all_gather(x, group, dim=0, **reduction) if shared is None else x
        quantized = float8_linear(
            x, weights, added, recipe=first.precision, emulated=first.emulated, deferred=first.deferred,
            targets=targets, shared=shared,
        )  # fmt: skip
        return quantized, biases
    adapted: list[Tensor | None] = [None] * len(linears)
    if any(linear.lora is not None for linear in linears):
        adapted = column_adapters(
            x, [linear.lora for linear in linears], rows[: len(linears)],
            sequence_parallel=first.sequence_parallel, sizes=sizes,
        )  # fmt: skip
    outputs: Sequence[Tensor]
    if first.group is None and not any(target is not None for target in targets):
        outputs = [F.linear(x, w, b) for w, b in zip(weights, added, strict=True)]
    else:
        given = None
        if any(b is not None for b in added):  # all of them, or zeros in the place of one
            given = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, added, strict=True)]
        options: dict[str, Any] = {
            "group": first.group,
            "overlap": first.overlap,
            "grad_reduce": first.grad_reduce,
            "main_grad": targets,
            "deferred": first.deferred,
        }
        if first.sequence_parallel:
            outputs = all_gather_linear(x, weights, given, sizes=sizes, **options)
        else:
            outputs = column_parallel_linear(x, weights, given, **options)
    return [y if more is None else y + more.to(y.dtype) for y, more in zip(outputs, adapted, strict=True)], biases


def add_residual(
    y: Tensor, bias: Tensor | None, residual: Tensor, dropout: float, *, training: bool, first: int = 0,
    row_positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``dropout(y + bias) + residual``, whose masks are drawn by global element index.

    Args:
        y, residual: ``[s_r, ...]``, this rank's rows, of which ``first`` is the first among those of its group.
        row_positions: int64, the positions of the rows of the group; ``None`` for 0, 1, ...
    """
    positions = (
        row_positions[first : first + y.shape[0]] if dropout and training and row_positions is not None else None
    )
    offset = first * y.shape[1:].numel() if positions is None else 0
    return bias_dropout_add(y, bias, residual, dropout, training=training, index_offset=offset, row_positions=positions)
