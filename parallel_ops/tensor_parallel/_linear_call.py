"""One call of a linear over a group: what is asked of it, on which all ranks must agree, and what it has to do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_ops.comm._agreement import Call, agree
from parallel_ops.comm._group import resolve_group
from parallel_ops.comm.transport import Transport
from parallel_ops.tensor_parallel import _overlap_plan as plan
from parallel_ops.tensor_parallel.transports import transport_of


@dataclass(frozen=True)
class LinearCall:
    """The arguments of the op that are not tensors."""

    op: str
    group: str | None
    sizes: list[int]  # of the sharded dimension, in rank order
    overlap: int
    needs: list[bool]  # of x, each weight and each bias: whether a gradient is wanted

    def needs_weights(self, count: int) -> list[bool]:
        return self.needs[1 : 1 + count]

    def needs_biases(self, count: int) -> list[bool]:
        return self.needs[1 + count :]

    def agree(self, x: Tensor, same: tuple[object, ...], shape: str, weights: Sequence[Tensor]) -> None:
        """The ranks make the same call: else all raise.

        Where a measurement chooses the pieces, they must have weights of one shape too: on what is kept of it by shape
        they would otherwise differ, and wait for each other.
        """
        if self.group is None:
            return
        group = resolve_group(self.group)
        over = transport_of(group).capabilities.name
        # Which parameters want gradients decides what a backward sends.
        options: tuple[object, ...] = (tuple(self.sizes), self.overlap, tuple(self.needs), over)
        even = len(set(self.sizes)) == 1
        sizes = f"[{self.sizes[0]}] * {len(self.sizes)}" if even else str(self.sizes)
        overlap = plan.decode(self.overlap)
        text = f"{shape} {x.dtype}, sizes={sizes}, overlap={overlap!r}, requires_grad={self.needs} over {over}"
        if self.overlap == plan.AUTO and x.is_cuda:
            shapes = [tuple(w.shape) for w in weights]
            options, text = (*options, *shapes), f"{text}, weights of {shapes}"
        agree(group, Call(self.op, (x.dtype, *same, *options), text), x.device)

    def transport(self) -> Transport | None:
        return None if self.group is None else transport_of(resolve_group(self.group))

    def rows(self, inner: Sequence[int]) -> list[int]:
        """The rows of every rank's matrix, for a tensor ``[s, *inner, N]``."""
        per_index = 1
        for n in inner:
            per_index *= n
        return [size * per_index for size in self.sizes]

    def task(
        self, phase: plan.Phase, transport: Transport, rows: Sequence[int], columns: int, inner: int, dtype: torch.dtype
    ) -> plan.Task:
        """A product ``[sum(rows), inner] @ [inner, columns]`` whose input is gathered, or whose output is scattered."""
        sent = {"gather": max(rows) * (transport.size - 1) * inner, "scatter": (sum(rows) - min(rows)) * columns}
        return plan.Task(
            phase=phase,
            rows=sum(rows),
            columns=columns,
            inner=inner,
            sent=sent[phase] * dtype.itemsize,
            size=transport.size,
            dtype=dtype,
            transport=transport.capabilities.name,
        )

    def pieces(self, task: plan.Task, device: torch.device, run: Callable[[int], object]) -> int:
        """How many messages for each shard; ``run`` does the task with that many, to be timed."""
        if self.overlap > 0:
            return self.overlap
        if self.overlap != plan.AUTO or self.group is None:
            return plan.OFF
        return plan.choose(task, device, resolve_group(self.group), run)

    def bulk(self, device: torch.device) -> bool:
        """Whether whole collectives go behind whole products. On a GPU it costs nothing; on a CPU it gains nothing."""
        return self.overlap != plan.OFF and not (self.overlap == plan.AUTO and device.type == "cpu")
