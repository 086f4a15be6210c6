"""Placements of packed documents: chunks of equal tokens go to ranks so that the largest area is least, then the bytes.

The area of a chunk is its number of visible (query, key) pairs, the work of its queries. Each rank has equally many
chunks, so that all other layers stay balanced. A placement is found in levels of 1, 2, 4, ... chunks a rank, until the
largest area is within 1% of the mean: coarse levels send less. A level begins with adjacent chunks on each rank, and
ranks with much work swap chunks with ranks that have little. Under one causal mask that is the zigzag layout.

Masks are int ``[2, length]``, NumPy arrays or tensors on the CPU: first and last key of each query, never decreasing
(see ``ops/attention/ranges.py``); or ``Documents``. Layouts have the names that ``token_ranges`` knows.

Peers with the same aim: MagiAttention, arXiv:2505.13211; torch's PTRR load balancer. No torch here.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel_ops.context_parallel.token_ranges import balanced_chunks, chunks_of, layout_of

Ints = NDArray[np.int64]

# Rounds of swaps in a level.
_ROUNDS = 100
# Chunks times ranks up to which several placements are compared by bytes.
_COMPARED = 4096


class Ranges:
    """A mask by the first and the last key of each query."""

    def __init__(self, ranges: Any) -> None:
        self._first, self._last = (np.asarray(row) for row in ranges)
        self.length = len(self._first)

    def bounds(self, places: Ints) -> tuple[NDArray[Any], NDArray[Any]]:
        """First and last key of the queries at these places."""
        return self._first[places], self._last[places]

    def areas(self, edges: Ints) -> Ints:
        """Visible pairs of the queries between each two edges, which rise."""
        further = self._last - self._first  # keys beside the first
        if further.min(initial=0) < -1:
            further = np.maximum(further, -1, out=further)
        sizes = np.diff(edges)
        if not len(sizes):
            return sizes
        if sizes.min() < sizes.max():
            return np.add.reduceat(further, edges[:-1], dtype=np.int64) + sizes
        # A sum in the elements' own 32 bits, where it fits, takes a third of the time.
        dtype = further.dtype if int(sizes[0]) * self.length < 1 << 31 else np.int64
        return further[: edges[-1]].reshape(len(sizes), -1).sum(1, dtype=dtype) + sizes


class Documents:
    """The mask of packed documents of these lengths, whose queries see ``left`` keys before their own place and
    ``right`` after it, ``None`` for all: ``Ranges`` in closed form, which no number of tokens makes slower."""

    def __init__(self, lengths: Sequence[int], left: int | None, right: int | None) -> None:
        self._edges = np.append(0, np.cumsum(lengths, dtype=np.int64))
        self.length = int(self._edges[-1])
        self._left, self._right = (self.length if n is None else n for n in (left, right))
        sizes = np.diff(self._edges)
        self._before = np.append(0, np.cumsum(self._area(sizes, sizes)))

    def bounds(self, places: Ints) -> tuple[Ints, Ints]:
        """First and last key of the queries at these places."""
        document = np.searchsorted(self._edges, places, side="right")
        first = np.maximum(self._edges[document - 1], places - self._left)
        return first, np.minimum(self._edges[document] - 1, places + self._right)

    def areas(self, edges: Ints) -> Ints:
        """Visible pairs of the queries between each two edges."""
        document = np.searchsorted(self._edges[:-1], edges, side="right") - 1
        start, end = self._edges[document], self._edges[document + 1]
        return np.diff(self._before[document] + self._area(edges - start, end - start))

    def _area(self, queries: Ints, size: Ints) -> Ints:
        """Visible pairs of the first queries of documents of this size."""

        def seen(n: Ints, most: int) -> Ints:  # min(i, most) of i = 0, ..., n - 1
            few = np.minimum(n, most)
            return few * (few - 1) // 2 + (n - few) * most

        return queries + seen(queries, self._left) + seen(size, self._right) - seen(size - queries, self._right)


def balanced(masks: Sequence[Any], ranks: int, *, weights: Sequence[int] | None = None, even: float = 1.01) -> str:
    """The layout of one sequence that balances the area of these masks over ``ranks``.

    Args:
        masks: of each kind of layer, of one length.
        weights: number of layers of each kind; ``None`` for one.
        even: largest area over the mean at which no finer chunks are tried; coarser ones send less.

    Returns:
        A layout, of which ``shard_ranges(layout, length, ranks, rank)`` are the tokens of a rank.
    """
    kinds = [(weight, _mask(mask)) for weight, mask in zip(weights or [1] * len(masks), masks, strict=True)]
    length = kinds[0][1].length
    chunks = balanced_chunks(length, ranks)
    size = length // chunks
    areas = np.zeros(chunks, np.int64)
    if size:
        areas = sum((weight * mask.areas(size * np.arange(chunks + 1)) for weight, mask in kinds), areas)
    limit, best, owners, level = int(even * areas.sum() / ranks), None, np.zeros(0, np.int64), ranks
    while level <= chunks:
        units = areas.reshape(level, -1).sum(1)
        least = np.partition(units, level // ranks - 1)[: level // ranks - 1].sum()
        if units.max() + least <= limit or level == chunks:
            # Bytes are compared where that takes less time than the rest.
            compared = level > ranks and level * ranks <= _COMPARED and size > 0
            edges = size * (chunks // level) * np.arange(level + 1)
            bounds = [_bounds(mask, edges) for _, mask in kinds if compared]
            for members in _starts(units, ranks)[: 3 if compared else 1]:
                largest = _swap(members, units, limit)
                found = np.empty(level, np.int64)
                found[members] = np.arange(ranks)[:, None]
                rows = sum(
                    weight * int(_sent(*ends, edges, found, ranks).sum())
                    for (weight, _), ends in zip(kinds, bounds, strict=False)
                )
                if best is None or (max(largest, limit), rows) < best:
                    best, owners = (max(largest, limit), rows), found
            if best is not None and best[0] <= limit:
                break
        level *= 2
    names = [layout_of([rank] * (chunks // len(owners))) for rank in range(ranks)]
    return ",".join([names[owner] for owner in owners.tolist()])


@functools.lru_cache(maxsize=64)
def ranges_of(documents: tuple[int, ...], left: int | None, right: int | None) -> Documents:
    """``Documents``, kept for the layers and layouts that ask for the same."""
    return Documents(documents, left, right)


def cut(ranges: NDArray[Any], left: int | None, right: int | None) -> NDArray[Any]:
    """The ranges without keys further than ``left`` before a query's own place or ``right`` after it."""
    (first, last), places = ranges, np.arange(ranges.shape[1], dtype=ranges.dtype)
    first = first if left is None else np.maximum(first, places - left)
    return np.stack([first, last if right is None else np.minimum(last, places + right)])


def area(mask: Any, layout: str, ranks: int) -> Ints:
    """Visible (query, key) pairs of each rank's queries, ``[ranks]``."""
    mask = _mask(mask)
    if layout == "striped":
        first, last = mask.bounds(np.arange(mask.length))
        counts = np.maximum(last - first + 1, 0)
        return np.array([counts[rank::ranks].sum(dtype=np.int64) for rank in range(ranks)])
    edges, owners = _chunks(layout, mask.length, ranks)
    out = np.zeros(ranks, np.int64)
    np.add.at(out, owners, mask.areas(edges))
    return out


def rows_sent(mask: Any, layout: str, ranks: int, per_node: int = 1) -> Ints:
    """Keys that each rank sends to each other in a ring or all-gather, ``[source, target]``: exactly those that the
    target's queries see if ranges have no gaps, and never more than all. A target is a node of ``per_node`` ranks.

    Raises:
        ValueError: the layout is striped, which has no chunks.
    """
    if layout == "striped":
        raise ValueError("rows_sent: layout must have chunks of adjacent tokens, got 'striped'")
    mask = _mask(mask)
    edges, owners = _chunks(layout, mask.length, ranks)
    return _sent(*_bounds(mask, edges), edges, owners, ranks, per_node)


def _sent(first: Ints, last: Ints, edges: Ints, owners: Ints, ranks: int, per_node: int = 1) -> Ints:
    """``rows_sent`` of chunks. ``first``, ``last``: keys of the first query of each and of the last."""
    chunks, at, nodes = len(owners), np.arange(len(owners)), ranks // per_node
    out = np.zeros((ranks, nodes), np.int64)
    if not chunks:
        return out
    begin, end = edges[:-1, None], edges[1:, None]
    # Of each node's chunks of queries, the next one after each chunk of keys and the last one before it see most of it.
    following = np.full((chunks, nodes), chunks)
    following[at, owners // per_node] = at
    preceding = np.where(following == chunks, -1, following)
    following = np.minimum.accumulate(following[::-1])[::-1]
    preceding = np.maximum.accumulate(preceding)
    least, most = np.append(first, edges[-1])[following], np.append(last, -1)[preceding]
    # A node's chunk of queries before may itself end beyond these keys, so both sides are cut to the keys.
    seen = np.maximum(end - np.maximum(least, begin), 0) + np.maximum(np.minimum(most, end - 1) + 1 - begin, 0)
    np.add.at(out, owners, np.minimum(seen, end - begin))
    out[np.arange(ranks), np.arange(ranks) // per_node] = 0
    return out


def _bounds(mask: Ranges | Documents, edges: Ints) -> tuple[Ints, Ints]:
    """First key of the first query of each chunk, and last key of its last."""
    return mask.bounds(edges[:-1])[0], mask.bounds(edges[1:] - 1)[1]


def _chunks(layout: str, length: int, ranks: int) -> tuple[Ints, Ints]:
    """Edges of the chunks that have tokens, and their ranks."""
    edges, owners = (np.array(each, np.int64) for each in chunks_of(layout, length, ranks))
    filled = edges[1:] > edges[:-1]
    return np.append(edges[:-1][filled], length), owners[filled]


def _mask(mask: Any) -> Ranges | Documents:
    return mask if isinstance(mask, Documents) else Ranges(mask)


def _starts(units: Ints, ranks: int) -> list[Ints]:
    """Units of each rank, ``[ranks, units]``, to begin with: adjacent ones, in a zigzag, and in one by their area."""
    number = np.arange(len(units))
    snake = number.reshape(-1, ranks).copy()
    snake[1::2] = snake[1::2, ::-1]
    order = np.argsort(-units, kind="stable")
    return [number.reshape(ranks, -1), np.sort(snake.T, axis=1), np.sort(order[snake].T, axis=1)]


def _swap(members: Ints, areas: Ints, limit: float) -> int:
    """Swaps units between ranks, ``members`` in place; returns the largest area of a rank.

    Ranks above the limit swap units with those that have least, in pairs, each the two units that even the pair out
    best. If the rank with most finds none, it looks at all others. Other units stay, which keeps neighbours together.
    """
    ranks, count = members.shape
    own = areas[members]
    load = own.sum(1)
    for _ in range(_ROUNDS):
        order = np.argsort(load, kind="stable")
        if load[order[-1]] <= limit:
            break
        pairs = min(ranks // 2, int((load > limit).sum()))
        for heavy, light in ((order[: -pairs - 1 : -1], order[:pairs]), (order[-1:], order[:-1])):
            excess = load[heavy] - load[light]
            left = np.abs((2 * own[heavy] - excess[:, None])[:, :, None] - 2 * own[light][:, None])
            found = left.reshape(len(excess), -1).argmin(1)
            left = left.reshape(len(excess), -1)[np.arange(len(excess)), found]
            better = left < excess
            if better.any() and len(heavy) < len(light):  # the one swap after which the larger of the two is least
                after = np.where(better, load[light] + (excess + left) // 2, load[heavy])
                better = np.arange(len(excess)) == after.argmin()
                break
            if better[0]:
                break
        else:
            break
        x, y = np.divmod(found[better], count)
        heavy, light = np.broadcast_to(heavy, better.shape)[better], light[better]
        members[heavy, x], members[light, y] = members[light, y], members[heavy, x]
        moved = own[heavy, x] - own[light, y]
        for rank, unit, change in ((heavy, x, -moved), (light, y, moved)):
            own[rank, unit] += change
            load[rank] += change
    return int(load.max())
