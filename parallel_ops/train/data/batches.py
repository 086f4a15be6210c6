"""Sequences of tokens, put together to the micro-batches of a step."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallel_ops.context_parallel import SequenceLayout
from parallel_ops.models.context import IGNORE_INDEX
from parallel_ops.ops.attention.cache import know_on_host


@dataclass(frozen=True)
class Sequence:
    """One sequence and its last target.

    Attributes:
        tokens: int64 ``[seq_length + 1]``.
        begins: Offsets at which its documents begin, 0 included; padding is a document of its own.
        counts: Whether each token counts in the loss as a target, bool ``[seq_length + 1]``; ``None`` if all do.
    """

    tokens: NDArray[np.int64]
    begins: NDArray[np.int64]
    counts: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank.

    Attributes:
        tokens, targets: int64 ``[s, b]``; a target is -100 where the next token does not count in the loss: it is in
            another document, part of a prompt, or padding.
        positions, cu_seqlens: With a document mask, where the micro-batch is one packed row (``b = 1``): the position
            of each token in its document, int64 ``[s]``, and the document boundaries, int32 ``[documents + 1]``.
        layout: The places of its tokens on the ranks that share it, made where the batch is read.
        first_rank, cp_ranks: With groups by length, the ranks of dp x cp that share it; ``None`` for those of cp.
        targets_of_all: Targets that count in the rows of all groups, with groups by length.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    cu_seqlens: Tensor | None = None
    layout: SequenceLayout | None = None
    first_rank: int | None = None
    cp_ranks: int | None = None
    targets_of_all: int = 0

    def to(self, device: torch.device) -> "Batch":
        moved = self._each(lambda t: t.to(device, non_blocking=True))
        if moved.cu_seqlens is not None and self.cu_seqlens is not None:
            know_on_host(moved.cu_seqlens, self.cu_seqlens)
        return moved

    def pinned(self) -> "Batch":
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed = {name: change(t) if isinstance(t, Tensor) else t for name, t in vars(self).items()}
        return Batch(**changed)  # type: ignore[arg-type]


def batch_of(found: list[Sequence], *, document_mask: bool) -> Batch:
    """Sequences of one length as a micro-batch, with ``document_mask`` as one packed row."""
    rows = torch.from_numpy(np.stack([sequence.tokens for sequence in found], axis=1))
    tokens, targets = rows[:-1], rows[1:].clone()
    for column, sequence in enumerate(found):
        if sequence.counts is not None:
            targets[torch.from_numpy(~sequence.counts[1:]), column] = IGNORE_INDEX
    if not document_mask:
        return Batch(tokens, targets)
    s = len(tokens)
    for column, sequence in enumerate(found):
        targets[sequence.begins[sequence.begins > 0] - 1, column] = IGNORE_INDEX
    starts = np.concatenate([q.begins[q.begins < s] + s * row for row, q in enumerate(found)])
    bounds = torch.from_numpy(np.append(starts, s * len(found)))
    places = torch.arange(s * len(found))
    positions = places - bounds[torch.searchsorted(bounds, places, right=True) - 1]
    tokens, targets = (t.t().reshape(-1, 1) for t in (tokens, targets))
    return Batch(tokens, targets, positions, bounds.to(torch.int32))


def shares(samples_seen: int, *, global_batch: int, micro_batch: int, replicas: int, replica: int) -> list[range]:
    """The sample numbers of each micro-batch of one data-parallel rank, in the step after ``samples_seen`` samples."""
    own = global_batch // replicas
    first = samples_seen + replica * own
    return [range(first + i, first + i + micro_batch) for i in range(0, own, micro_batch)]
