"""The non-tensor arguments of a linear over a group, their comparison between ranks, and the choice of pieces."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.groups import resolve_group
from parallel_ops._internal.overlap_schedule import FUSED, GATED, OFF, Phase, is_cut
from parallel_ops.comm.consistency import CallSignature, check_consistency
from parallel_ops.comm.transport.base import Transport
from parallel_ops.comm.transport.registry import transport_of
from parallel_ops.tensor_parallel.linear import overlap_plan as plan
from parallel_ops.tensor_parallel.linear.lanes import lanes_of
from parallel_ops.tensor_parallel.linear.pulled import check, may_pull


@dataclasses.dataclass(frozen=True)
class GroupCall:
    """The non-tensor arguments of the op."""

    op: str
    group: str | None
    sizes: list[int]  # of the sharded dimension, in rank order
    overlap: int
    needs: list[bool]  # whether x, each weight and each bias need a gradient
    exact: bool = True  # sums are in rank order in fp32, not the backend's
    partial_bias: bool = False  # the gradient of bias is of this rank's rows only

    def arguments(self) -> tuple[object, ...]:
        """The fields as ops take them after their tensors; most ops have no ``partial_bias``, the last one."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self)[1:])

    def needs_weights(self, count: int) -> list[bool]:
        return self.needs[1 : 1 + count]

    def needs_biases(self, count: int) -> list[bool]:
        return self.needs[1 + count :]

    def check_consistency(
        self, transport: Transport, x: Tensor, same: tuple[object, ...], shape: Callable[[], str],
        weights: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Raises on all ranks unless all make the same call.

        If a measurement chooses the pieces, the weights must have the same shapes too: choices are cached by shape, so
        otherwise some ranks would measure, and wait for the others.
        """
        group = resolve_group(self.group)
        over = transport.capabilities.name
        # What a backward sends depends on which parameters need gradients.
        flags = tuple(self.needs), self.exact, self.partial_bias
        options: tuple[object, ...] = (tuple(self.sizes), self.overlap, flags, over)
        measured = [tuple(w.shape) for w in weights] if self.overlap == plan.AUTO and x.is_cuda else []

        def text() -> str:
            even = len(set(self.sizes)) == 1
            sizes = f"[{self.sizes[0]}] * {len(self.sizes)}" if even else str(self.sizes)
            overlap = plan.decode(self.overlap)
            words = f"{shape()} {x.dtype}, sizes={sizes}, overlap={overlap!r}, requires_grad={self.needs} over {over}"
            words += "" if self.exact else ", reduction='backend'"
            return f"{words}, weights of {measured}" if measured else words

        check_consistency(group, CallSignature(self.op, (x.dtype, *same, *options, *measured), text), x.device)

    def check_backward(self, grads: Sequence[Tensor]) -> None:
        """Raises on all ranks unless all run the same backward."""
        (grad, *_), group = grads, resolve_group(self.group)
        shapes = tuple(g.shape[1:] for g in grads)
        same = (grad.dtype, shapes, tuple(self.sizes), self.overlap, tuple(self.needs))
        text = f"gradients of {[list(g.shape) for g in grads]} {grad.dtype}, requires_grad={self.needs}"
        check_consistency(group, CallSignature(f"backward of {self.op}", same, text), grad.device)

    def check_pulls(self, rows: Tensor, *, bias: bool) -> None:
        """Raises on all ranks if the call asks for pulled shards, and shards like ``rows`` cannot be.

        ``bias``: whether the product behind the gather has one.
        """
        if self.overlap in (GATED, FUSED) and self.group is not None:
            check(self.op, self.overlap, resolve_group(self.group), rows, self.sizes, bias=bias)

    def process_group(self) -> ProcessGroup | None:
        return None if self.group is None else resolve_group(self.group)

    def transport(self, device: torch.device) -> Transport | None:
        return None if self.group is None else transport_of(resolve_group(self.group), device)

    def pieces(
        self, phase: Phase, transport: Transport, like: Tensor, columns: int, inner: int,
        run: Callable[[int], object], *, bias: bool = False, leased: bool = True,
    ) -> int:  # fmt: skip
        """Number of pieces in which each shard of a product ``[rows, inner] @ [inner, columns]`` is sent.

        Args:
            phase: whether the input is gathered or the output scattered.
            like: ``[s, ..., any]`` in the dtype and on the device of the product, any number of rows.
            run: runs the op with a number of pieces, for timing.
            bias: whether a product behind a gather has one.
            leased: whether messages are in the transport's own memory, as those that copy engines put.
        """
        if self.overlap in (GATED, FUSED):
            return self.overlap if phase == "gather" else OFF
        if is_cut(self.overlap):
            return self.overlap
        if self.overlap != plan.AUTO or self.group is None or not (like.is_cuda or plan.may_measure(like.device)):
            return OFF
        rows = rows_of(self.sizes, like)
        sent = {"gather": max(rows) * (transport.size - 1) * inner, "scatter": (sum(rows) - min(rows)) * columns}
        task = plan.Task(
            phase=phase,
            rows=sum(rows),
            columns=columns,
            inner=inner,
            sent=sent[phase] * like.itemsize,
            size=transport.size,
            itemsize=like.itemsize,
            exact=self.exact,
            takes_processors=transport.capabilities.uses_compute_units or not leased,
            lanes=lanes_of(like.device, transport).count,
            pulled=may_pull(resolve_group(self.group), like, rows),
            dtype=like.dtype,
            transport=transport.capabilities.name,
            bias=bias,
        )
        return plan.choose(task, like.device, resolve_group(self.group), run)

    def bulk(self, device: torch.device) -> bool:
        """Whether whole collectives overlap with whole products. On a GPU that is free; on a CPU it gains nothing."""
        return self.overlap != OFF and not (self.overlap == plan.AUTO and device.type == "cpu")


def rows_of(sizes: Sequence[int], t: Tensor) -> list[int]:
    """The rows of every rank's matrix, for a tensor ``[s, ..., N]`` of which rank r has ``sizes[r]`` entries."""
    return [size * math.prod(t.shape[1:-1]) for size in sizes]
