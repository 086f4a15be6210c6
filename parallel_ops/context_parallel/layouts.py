"""Sequences sharded over a context-parallel group: which rank has which tokens, and how to split and join them.

    layout = SequenceLayout(length=10, ranks=2)             zigzag: chunks of 3, 3, 2 and 2 tokens
    layout = SequenceLayout.balanced([document_ranges(cu_seqlens)], ranks=2)
    layout.positions(0)                                        zigzag: tensor([0, 1, 2, 8, 9])
    x0, x1 = layout.split(x)                                   tokens, labels, masks: any tensor over the sequence
    layout.join([x0, x1])                                      x again

Shift labels of next tokens before splitting them: the next token may be on another rank. Lengths need not divide and
nothing is padded; a rank may have no tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.groups import group_rank, group_size
from parallel_ops._internal.token_range import TokenRange
from parallel_ops.comm.collectives import gather_from_group
from parallel_ops.context_parallel.token_ranges import layout_name, lengths, shard_ranges
from parallel_ops.ops.attention.ranges import range_error

Layout = Literal["zigzag", "striped", "contiguous", "balanced"]
# With the one that ``selection.select_layout`` takes for each batch.
LayoutChoice = Literal["zigzag", "striped", "contiguous", "balanced", "auto"]


@dataclass(frozen=True)
class SequenceLayout:
    """Which tokens of a sequence each rank has.

    Args:
        length: tokens of the whole sequence.
        ranks: number of ranks that share it.
        cp_layout: ``"zigzag"`` (each rank a chunk of the first half and the mirrored one of the second: balanced under
            a causal mask), ``"striped"`` (every ``ranks``-th token) or ``"contiguous"``. ``balanced`` makes others.

    Raises:
        TypeError, ValueError: ``length`` or ``ranks`` is not a count, ``cp_layout`` is unknown.

    Examples:
        >>> from parallel_ops import SequenceLayout
        >>> layout = SequenceLayout(length=10, ranks=2)
        >>> layout.positions(0).tolist(), layout.lengths
        ([0, 1, 2, 8, 9], (5, 5))
    """

    length: int
    ranks: int
    cp_layout: str = "zigzag"

    def __post_init__(self) -> None:
        for name, least in (("length", 0), ("ranks", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"SequenceLayout: {name} must be an int, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"SequenceLayout: {name} must be at least {least}, got {value}")
        if self.cp_layout == "balanced":
            raise ValueError("SequenceLayout: a balanced layout depends on masks; SequenceLayout.balanced makes it")
        if (
            layout_name(self.cp_layout) == "balanced"
            and (last := max(map(int, self.cp_layout.split(",")))) >= self.ranks
        ):
            raise ValueError(f"SequenceLayout: cp_layout has chunks of rank {last}, but there are {self.ranks} ranks")

    @classmethod
    def balanced(cls, masks: Sequence[Tensor], ranks: int, *, weights: Sequence[int] | None = None) -> "SequenceLayout":
        """The layout whose largest area, the number of visible pairs of a rank's queries, is least for these masks
        together, then the tokens sent. Made on the host, in about 2 ms for a million tokens; the same for the same
        masks.

        Args:
            masks: for each kind of layer its ranges, int ``[2, length]`` on the CPU: see ``key_ranges`` of
                ``flash_attention``.
            weights: the number of layers of each kind; ``None`` for as many of each.

        Raises:
            ValueError: there is no mask, their shapes differ, or ranges decrease or leave the sequence.
        """
        shapes = [tuple(mask.shape) for mask in masks]
        if not shapes or len(shapes[0]) != 2 or shapes[0][0] != 2 or len(set(shapes)) > 1:
            raise ValueError(f"SequenceLayout.balanced: masks must be ranges [2, length] of one length, got {shapes}")
        length = shapes[0][1]
        cls(length, ranks)  # checks ranks
        for number, mask in enumerate(masks):
            if wrong := range_error(mask, length):
                raise ValueError(f"SequenceLayout.balanced: masks[{number}]: {wrong}")
        from parallel_ops.context_parallel.placement import balanced  # needs numpy

        return cls(length, ranks, balanced([mask.numpy() for mask in masks], ranks, weights=weights))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens on each rank; they differ by at most one."""
        return lengths(self.cp_layout, self.length, self.ranks)

    def area(self, mask: Tensor) -> list[int]:
        """The number of visible (query, key) pairs of each rank's queries: its work in attention.

        Args:
            mask: ranges of all queries, int ``[2, length]`` on the CPU.
        """
        from parallel_ops.context_parallel.placement import area  # needs numpy

        return [int(n) for n in area(mask.numpy(), self.cp_layout, self.ranks)]

    def rows_sent(self, mask: Tensor) -> list[list[int]]:
        """The tokens whose keys and values a rank sends to another in the forward of a ring, ``[source][target]``.

        Args:
            mask: ranges of all queries, int ``[2, length]`` on the CPU.

        Raises:
            ValueError: the layout is striped, which sends nearly all.
        """
        from parallel_ops.context_parallel.placement import rows_sent  # needs numpy

        found: list[list[int]] = rows_sent(mask.numpy(), self.cp_layout, self.ranks).tolist()
        return found

    def positions(
        self, rank: int, *, cu_seqlens: Tensor | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """The positions of the tokens of ``rank``, int64 ``[lengths[rank]]``: rows of a rotary table.

        Args:
            cu_seqlens: starts of documents, ``[documents + 1]`` from 0 to ``length``; positions are then those in each
                document.
        """
        device = cu_seqlens.device if cu_seqlens is not None else device
        parts = [torch.arange(part.length, device=device) * part.step + part.start for part in self._ranges(rank)]
        positions = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)
        if cu_seqlens is None:
            return positions
        bounds = cu_seqlens.to(torch.int64)
        return positions - bounds[torch.searchsorted(bounds, positions, right=True) - 1]

    def shard(self, x: Tensor, rank: int, *, dim: int = 0) -> Tensor:
        """A copy of the tokens of ``rank`` in ``x``, whose dimension ``dim`` is the whole sequence."""
        self._check(x, dim, self.length)
        dim %= x.dim()
        parts = [_narrow(x, part, dim) for part in self._ranges(rank)]
        return torch.cat(parts, dim=dim) if parts else x.narrow(dim, 0, 0).clone()

    def split(self, x: Tensor, *, dim: int = 0) -> list[Tensor]:
        """``shard`` for every rank."""
        return [self.shard(x, rank, dim=dim) for rank in range(self.ranks)]

    def join(self, shards: Sequence[Tensor], *, dim: int = 0) -> Tensor:
        """The whole sequence from the shards of all ranks, in rank order."""
        if len(shards) != self.ranks:
            raise ValueError(f"SequenceLayout.join: shards must be one for each of the {self.ranks} ranks")
        for shard, length in zip(shards, self.lengths, strict=True):
            self._check(shard, dim, length)
        dim %= shards[0].dim()
        order = torch.cat([self.positions(rank) for rank in range(self.ranks)]).argsort()
        return torch.cat(list(shards), dim=dim).index_select(dim, order.to(shards[0].device))

    def _ranges(self, rank: int) -> tuple[TokenRange, ...]:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"SequenceLayout: rank must be from 0 to {self.ranks - 1}, got {rank}")
        return shard_ranges(self.cp_layout, self.length, self.ranks, rank)

    def _check(self, x: Tensor, dim: int, length: int) -> None:
        if x.shape[dim] != length:
            raise ValueError(f"SequenceLayout: dimension {dim} must have {length} tokens, got {list(x.shape)}")


def named_layout(
    op: str, cp_layout: str | SequenceLayout, length: int | None, group: ProcessGroup | None
) -> tuple[str, int | None]:
    """The name of the layout, and the length that it has or that is given."""
    if not isinstance(cp_layout, SequenceLayout):
        return cp_layout, length
    size = group_size(group)
    if cp_layout.ranks != size or length not in (None, cp_layout.length):
        given = "" if length is None else f", length={length}"
        raise ValueError(
            f"{op}: cp_layout is of {cp_layout.length} tokens over {cp_layout.ranks} ranks, but the group has "
            f"{size}{given}"
        )
    return cp_layout.cp_layout, cp_layout.length


def split_sequence(
    x: Tensor, group: ProcessGroup | None, *, cp_layout: str | SequenceLayout = "zigzag", dim: int = 0
) -> Tensor:
    """This rank's tokens of ``x``, which is whole on every rank. Nothing is sent.

    Args:
        x: any shape and dtype; its dimension ``dim`` is the sequence.
        group: the ranks that share the sequence; ``None`` for one.
        cp_layout: as in ``ring_attention``; a balanced one as a ``SequenceLayout``.

    Sharding: x replicated, the result S(dim) over group, in the tokens of the layout.

    Examples:
        >>> import torch
        >>> from parallel_ops import split_sequence
        >>> split_sequence(torch.arange(10), None).shape  # group=mesh["cp"].get_group() under torchrun
        torch.Size([10])
    """
    name, _ = named_layout("split_sequence", cp_layout, x.shape[dim], group)
    return SequenceLayout(x.shape[dim], group_size(group), name).shard(x, group_rank(group), dim=dim)


def join_sequence(
    x: Tensor, group: ProcessGroup | None, *, length: int | None = None, cp_layout: str | SequenceLayout = "zigzag",
    dim: int = 0,
) -> Tensor:  # fmt: skip
    """The whole sequence from every rank's tokens: an all-gather. The backward takes the gradient of this rank's
    tokens, which is right if every rank computes the same with the whole (see ``gather_from_group``).

    Args:
        x: this rank's tokens along ``dim``.
        length: tokens of the whole sequence; ``None`` if all ranks have the same number, or ``cp_layout`` has it.
        cp_layout: as in ``split_sequence``.

    Raises:
        TypeError, ValueError: on every rank and before data moves.

    Sharding: x S(dim) over group, in the tokens of the layout, the result replicated.

    Examples:
        >>> import torch
        >>> from parallel_ops import join_sequence
        >>> join_sequence(torch.arange(10), None).shape  # group=mesh["cp"].get_group() under torchrun
        torch.Size([10])
    """
    size = group_size(group)
    name, length = named_layout("join_sequence", cp_layout, length, group)
    whole = SequenceLayout(x.shape[dim] * size if length is None else length, size, name)
    gathered = gather_from_group(x, group, dim=dim, sizes=whole.lengths)
    return whole.join(gathered.split(list(whole.lengths), dim=dim), dim=dim)


def _narrow(x: Tensor, part: TokenRange, dim: int) -> Tensor:
    return x.narrow(dim, part.start, part.last - part.start + 1)[(slice(None),) * dim + (slice(None, None, part.step),)]
