"""Groups of ranks for the documents of a batch: long ones over many ranks, short ones over few or one. Integers alone.

The ranks of a mesh dp x cp are cut into aligned groups of powers of two, and each document goes to one group, whole. A
document gets the fewest ranks on which its share is not above the mean of all ranks, in work and in tokens. Then
longest first, each goes where the load is least. A group larger than one rank takes short documents too, up to the
mean; they lie beside the long one in a packed row.

Work is counted in tokens: a token's linears are 1, a pair of query and key ``pair``, a key that is sent ``key``, as far
as the document's pairs do not hide it. Groups are tried with every least size, and those are taken whose most loaded
rank has the least. The same on every rank, since it follows from the lengths. Sources: Megatron-LM's dynamic context
parallelism; ByteScale, arXiv:2502.21231; FlexSP, arXiv:2412.01523.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

# Tokens of a rank, of the mean, up to which it takes further documents; gain in load that larger groups must bring.
_ROOM, _BETTER = 1.1, 1.01
# Work of a key that is sent, in tokens: a Llama 3 8B on H100s with 400 Gb/s between nodes (assumed).
KEY = 0.1


class Group(NamedTuple):
    """Ranks that share documents.

    Attributes:
        first, size: the ranks ``first`` to ``first + size - 1`` of the flattened mesh.
        documents: their numbers, in the order of the batch.
    """

    first: int
    size: int
    documents: tuple[int, ...]


class Grouping(NamedTuple):
    """The groups of a batch, which cover all ranks.

    Attributes:
        groups: in the order of the ranks.
        load, tokens: of the rank with most, in units of the mean.
    """

    groups: tuple[Group, ...]
    load: float
    tokens: float


def sizes_of(ranks: int) -> tuple[int, ...]:
    """Sizes of groups: the powers of two that divide ``ranks``."""
    return tuple(1 << n for n in range(ranks.bit_length()) if ranks % (1 << n) == 0)


def group_documents(lengths: Sequence[int], ranks: int, *, pair: float, key: float = KEY) -> Grouping:
    """Assigns documents to groups of ranks.

    Args:
        lengths: tokens of each document, at least one positive.
        ranks: number of ranks of the mesh dp x cp.
        pair, key: work of a visible pair and of a key that is sent, in that of a token outside of attention.

    Raises:
        ValueError: no tokens, a negative length, or no rank.
    """
    if ranks < 1:
        raise ValueError(f"group_documents: ranks must be at least 1, got {ranks}")
    if min(lengths, default=0) < 0 or not sum(lengths):
        raise ValueError("group_documents: lengths must not be negative, and some positive")
    best = None
    for least in sizes_of(ranks):
        found = _grouped(lengths, ranks, least, pair, key)
        if found is not None and (best is None or _BETTER * found.load < best.load):
            best = found
    if best is None:  # an odd number of groups, and fewer documents
        members = tuple(range(len(lengths)))
        return Grouping((Group(0, ranks, members),), 1.0, 1.0)
    return best


@dataclass
class _Open:
    """A group that takes documents: its work and tokens, each of one rank, and the documents' numbers."""

    size: int
    load: float = 0.0
    tokens: float = 0.0
    documents: list[int] = field(default_factory=list)


def _grouped(lengths: Sequence[int], ranks: int, least: int, pair: float, key: float) -> Grouping | None:
    """Groups of at least ``least`` ranks; ``None`` if one would have no tokens, unless it is all there are."""
    sizes = [size for size in sizes_of(ranks) if size >= least]
    work = [n + pair * n * (n + 1) / 2 for n in lengths]
    mean, mean_tokens = sum(work) / ranks, sum(lengths) / ranks
    opened: list[_Open] = []

    def after(i: int, group: _Open) -> float:
        # A document lies on about as many ranks as it has shares of tokens, which get its keys while they compute.
        span, n = min(group.size, 1 + lengths[i] / mean_tokens), lengths[i]
        waited = max(0.0, 0.75 * key * n * (span - 1) - pair * n * (n + 1) / 2)
        return group.load + (work[i] + waited) / group.size

    def filled(i: int, group: _Open) -> float:
        return group.tokens + lengths[i] / group.size

    # Longest first, so sizes fall and groups are aligned.
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (n for n in sizes if work[i] <= n * mean and lengths[i] <= n * mean_tokens)
        size, left = next(fits, sizes[-1]), ranks - sum(group.size for group in opened)
        if size == least:
            opened += [_Open(least) for _ in range(left // least)]
            left %= least
        here = [group for group in opened if group.size >= size] or opened
        roomy = [group for group in here if filled(i, group) <= _ROOM * mean_tokens]
        best = min(roomy, key=lambda group: after(i, group), default=None)
        if left >= size and (best is None or after(i, best) > mean):
            opened.append(best := _Open(size))
        elif best is None:
            best = min(here, key=lambda group: filled(i, group))
        best.load, best.tokens = after(i, best), filled(i, best)
        best.documents.append(i)
    if sum(group.size for group in opened) < ranks or not all(group.tokens for group in opened):
        return None
    firsts = accumulate((group.size for group in opened), initial=0)
    groups = tuple(
        Group(first, group.size, tuple(sorted(group.documents))) for first, group in zip(firsts, opened, strict=False)
    )
    return Grouping(
        groups, max(group.load for group in opened) / mean, max(group.tokens for group in opened) / mean_tokens
    )
