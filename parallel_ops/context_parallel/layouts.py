"""Sequences that the ranks of a context-parallel group share: who has which tokens, and how to split and join them.

    layout = SequenceLayout(length=10, ranks=2)                zigzag: chunks of 3, 3, 2 and 2 tokens
    layout.positions(0)                                        tensor([0, 1, 2, 8, 9])
    x0, x1 = layout.split(x)                                   tokens, labels, masks: whatever has a value a token
    layout.join([x0, x1])                                      x again

Labels of next tokens are shifted before they are split: the next token may be on another rank. Nothing has to divide
and nothing is padded; a rank may have no tokens at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.groups import group_rank, group_size
from parallel_ops.comm.collectives import gather_from_group
from parallel_ops.context_parallel.token_ranges import LAYOUTS, Run, lengths, runs


@dataclass(frozen=True)
class SequenceLayout:
    """Which tokens of a sequence each rank has.

    Args:
        length: tokens of the whole sequence.
        ranks: how many share it.
        kind: ``"zigzag"`` (each rank a chunk of the first half and the mirrored one of the second: balanced under a
            causal mask), ``"striped"`` (every ``ranks``-th token) or ``"contiguous"``.

    Raises:
        TypeError, ValueError: a length or ranks that are no count, an unknown kind.
    """

    length: int
    ranks: int
    kind: str = "zigzag"

    def __post_init__(self) -> None:
        for name, least in (("length", 0), ("ranks", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"SequenceLayout: {name} must be an int, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"SequenceLayout: {name} must be at least {least}, got {value}")
        if self.kind not in LAYOUTS:
            raise ValueError(f"SequenceLayout: kind must be one of {', '.join(LAYOUTS)}, got {self.kind!r}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each rank has: they differ by at most one."""
        return lengths(self.kind, self.length, self.ranks)

    def positions(
        self, rank: int, *, cu_seqlens: Tensor | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Where the tokens of ``rank`` stand in the sequence, int64 ``[lengths[rank]]``: rows of a rotary table.

        Args:
            cu_seqlens: where documents begin, ``[documents + 1]`` from 0 to ``length``: then where each token stands in
                its document.
        """
        device = cu_seqlens.device if cu_seqlens is not None else device
        parts = [torch.arange(run.length, device=device) * run.step + run.start for run in self._runs(rank)]
        places = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)
        if cu_seqlens is None:
            return places
        bounds = cu_seqlens.to(torch.int64)
        return places - bounds[torch.searchsorted(bounds, places, right=True) - 1]

    def shard(self, x: Tensor, rank: int, *, dim: int = 0) -> Tensor:
        """What ``rank`` has of ``x``, whose dimension ``dim`` is the whole sequence: a copy."""
        self._check(x, dim, self.length)
        dim %= x.dim()
        parts = [_of_run(x, run, dim) for run in self._runs(rank)]
        return torch.cat(parts, dim=dim) if parts else x.narrow(dim, 0, 0).clone()

    def split(self, x: Tensor, *, dim: int = 0) -> list[Tensor]:
        """What each rank has of ``x``."""
        return [self.shard(x, rank, dim=dim) for rank in range(self.ranks)]

    def join(self, shards: Sequence[Tensor], *, dim: int = 0) -> Tensor:
        """The whole sequence from what each rank has, in rank order."""
        if len(shards) != self.ranks:
            raise ValueError(f"SequenceLayout.join: shards must be one for each of the {self.ranks} ranks")
        for shard, length in zip(shards, self.lengths, strict=True):
            self._check(shard, dim, length)
        dim %= shards[0].dim()
        order = torch.cat([self.positions(rank) for rank in range(self.ranks)]).argsort()
        return torch.cat(list(shards), dim=dim).index_select(dim, order.to(shards[0].device))

    def _runs(self, rank: int) -> tuple[Run, ...]:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"SequenceLayout: rank must be from 0 to {self.ranks - 1}, got {rank}")
        return runs(self.kind, self.length, self.ranks, rank)

    def _check(self, x: Tensor, dim: int, length: int) -> None:
        if x.shape[dim] != length:
            raise ValueError(f"SequenceLayout: dimension {dim} must have {length} tokens, got {list(x.shape)}")


def split_sequence(x: Tensor, group: ProcessGroup | None, *, layout: str = "zigzag", dim: int = 0) -> Tensor:
    """This rank's tokens of ``x``, of which every rank has the whole. Nothing is sent.

    Args:
        x: any shape and dtype; its dimension ``dim`` is the sequence.
        group: the ranks that share the sequence; ``None`` for one.
        layout: as of ``ring_attention``.
    """
    return SequenceLayout(x.shape[dim], group_size(group), layout).shard(x, group_rank(group), dim=dim)


def join_sequence(
    x: Tensor, group: ProcessGroup | None, *, length: int | None = None, layout: str = "zigzag", dim: int = 0
) -> Tensor:
    """The whole sequence from every rank's tokens: an all-gather. In the backward each rank takes its tokens' gradient,
    as is right where every rank goes on alike with the whole (see ``gather_from_group``).

    Args:
        x: this rank's tokens along ``dim``.
        length: tokens of the whole; ``None`` where all ranks have as many.

    Raises:
        TypeError, ValueError: on every rank and before data moves.
    """
    size = group_size(group)
    whole = SequenceLayout(x.shape[dim] * size if length is None else length, size, layout)
    gathered = gather_from_group(x, group, dim=dim, sizes=whole.lengths)
    return whole.join(gathered.split(list(whole.lengths), dim=dim), dim=dim)


def _of_run(x: Tensor, run: Run, dim: int) -> Tensor:
    return x.narrow(dim, run.start, run.last - run.start + 1)[(slice(None),) * dim + (slice(None, None, run.step),)]
