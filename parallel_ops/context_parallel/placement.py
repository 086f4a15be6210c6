"""Placements of packed documents: chunks of equal tokens go to ranks so that the largest area is least, then the bytes.

The area of a chunk is its number of visible (query, key) pairs, the work of its queries. Each rank has equally many
chunks, so that all other layers stay balanced. A placement is found in levels of 1, 2, 4, ... chunks a rank, until the
largest area is within 1% of the mean: coarse levels send less. A level begins with adjacent chunks on each rank, and
ranks with much work swap chunks with ranks that have little. Under one causal mask that is the zigzag layout.

Ranges are int ``[2, length]``, NumPy arrays or tensors on the CPU: first and last key of each query, never
decreasing (see ``ops/attention/ranges.py``). Layouts have the names that ``token_ranges`` knows.

Peers with the same aim: MagiAttention, arXiv:2505.13211; torch's PTRR load balancer. No torch here.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel_ops.context_parallel.token_ranges import balanced_chunks, chunks_of, layout_of

Ints = NDArray[np.int64]

# Largest area over the mean at which no finer level is tried, and rounds of swaps in a level.
_GOOD, _ROUNDS = 1.01, 100
# Chunks times ranks up to which several placements are compared by bytes.
_COMPARED = 4096


def balanced(masks: Sequence[Any], ranks: int, *, weights: Sequence[int] | None = None) -> str:
    """The layout of one sequence that balances the area of these masks over ``ranks``.

    Args:
        masks: ranges of each kind of layer, of one length.
        weights: number of layers of each kind; ``None`` for one.

    Returns:
        A layout, of which ``shard_ranges(layout, length, ranks, rank)`` are the tokens of a rank.
    """
    length = masks[0].shape[1]
    chunks = balanced_chunks(length, ranks)
    areas = np.zeros(chunks, np.int64)
    size = length // chunks
    weights = weights or [1] * len(masks)
    for weight, mask in zip(weights, masks, strict=True):
        if size:
            further = _further(mask[:, : size * chunks]).reshape(chunks, size)
            # A sum in the elements' own 32 bits, where it fits, takes a third of the time.
            areas += weight * (size + further.sum(1, dtype=further.dtype if size * length < 1 << 31 else np.int64))
    limit, best, owners, level = int(_GOOD * areas.sum() / ranks), None, np.zeros(0, np.int64), ranks
    while level <= chunks:
        units = areas.reshape(level, -1).sum(1)
        least = np.partition(units, level // ranks - 1)[: level // ranks - 1].sum()
        if units.max() + least <= limit or level == chunks:
            # Bytes are compared where that takes less time than the rest.
            compared = level > ranks and level * ranks <= _COMPARED
            for members in _starts(units, ranks)[: 3 if compared else 1]:
                largest = _swap(members, units, limit)
                found = np.empty(level, np.int64)
                found[members] = np.arange(ranks)[:, None]
                rows = 0
                if compared:
                    rows = sum(
                        weight * int(rows_sent(mask, layout_of(found.tolist()), ranks).sum())
                        for weight, mask in zip(weights, masks, strict=True)
                    )
                if best is None or (max(largest, limit), rows) < best:
                    best, owners = (max(largest, limit), rows), found
            if best is not None and best[0] <= limit:
                break
        level *= 2
    names = [layout_of([rank] * (chunks // len(owners))) for rank in range(ranks)]
    return ",".join([names[owner] for owner in owners.tolist()])


@functools.lru_cache(maxsize=8)
def ranges_of(documents: tuple[int, ...], left: int | None, right: int | None) -> NDArray[np.int32]:
    """First and last key of each query in documents of these lengths, ``[2, length]``, ``cut`` to a window."""
    sizes = np.array(documents)
    ends = np.cumsum(sizes, dtype=np.int32)
    return cut(np.repeat(np.stack([ends - sizes, ends - 1]).astype(np.int32), sizes, axis=1), left, right)


def cut(ranges: NDArray[Any], left: int | None, right: int | None) -> NDArray[Any]:
    """The ranges without keys further than ``left`` before a query's own place or ``right`` after it."""
    (first, last), places = ranges, np.arange(ranges.shape[1], dtype=ranges.dtype)
    first = first if left is None else np.maximum(first, places - left)
    return np.stack([first, last if right is None else np.minimum(last, places + right)])


def area(ranges: Any, layout: str, ranks: int) -> Ints:
    """Visible (query, key) pairs of each rank's queries, ``[ranks]``."""
    counts = _further(ranges) + 1
    if layout == "striped":
        return np.array([counts[rank::ranks].sum(dtype=np.int64) for rank in range(ranks)])
    edges, owners = _chunks(layout, ranges.shape[1], ranks)
    out = np.zeros(ranks, np.int64)
    if len(owners):
        np.add.at(out, owners, np.add.reduceat(counts, edges[:-1], dtype=np.int64))
    return out


def rows_sent(ranges: Any, layout: str, ranks: int) -> Ints:
    """Keys that each rank sends to each other in a ring or all-gather, ``[source, target]``: exactly those that the
    target's queries see if ranges have no gaps, and never more than all.

    Raises:
        ValueError: the layout is striped, which has no chunks.
    """
    if layout == "striped":
        raise ValueError("rows_sent: layout must have chunks of adjacent tokens, got 'striped'")
    first, last = (np.asarray(row) for row in ranges)
    length = first.shape[0]
    edges, owners = _chunks(layout, length, ranks)
    chunks, at = len(owners), np.arange(len(owners))
    if not chunks:
        return np.zeros((ranks, ranks), np.int64)
    begin, end = edges[:-1, None], edges[1:, None]
    # Of each rank's chunks of queries, the next one after each chunk of keys and the last one before it see most of it.
    following = np.full((chunks, ranks), chunks)
    following[at, owners] = at
    preceding = np.where(following == chunks, -1, following)
    following = np.minimum.accumulate(following[::-1])[::-1]
    preceding = np.maximum.accumulate(preceding)
    least = np.append(first[edges[:-1]], length)[following]
    most = np.append(last[edges[1:] - 1], -1)[preceding]
    # A rank's chunk of queries before may itself end beyond these keys, so both sides are cut to the keys.
    seen = np.clip(end - np.maximum(least, begin), 0, None) + np.clip(np.minimum(most, end - 1) + 1 - begin, 0, None)
    seen = np.minimum(seen, end - begin)
    out = np.zeros((ranks, ranks), np.int64)
    np.add.at(out, owners, seen)
    np.fill_diagonal(out, 0)
    return out


def _chunks(layout: str, length: int, ranks: int) -> tuple[Ints, Ints]:
    """Edges of the chunks that have tokens, and their ranks."""
    edges, owners = (np.array(each, np.int64) for each in chunks_of(layout, length, ranks))
    filled = edges[1:] > edges[:-1]
    return np.append(edges[:-1][filled], length), owners[filled]


def _further(ranges: Any) -> NDArray[np.int32]:
    """Number of keys that each query sees beside its first, -1 if it sees none."""
    first, last = (np.asarray(row) for row in ranges)
    further = last - first
    return further if further.min(initial=0) >= -1 else np.maximum(further, -1, out=further)


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
    ranks = len(members)
    own = areas[members]
    count = members.shape[1]
    for _ in range(_ROUNDS):
        load = own.sum(1)
        order = np.argsort(load, kind="stable")
        if load[order[-1]] <= limit:
            break
        pairs = min(ranks // 2, int((load > limit).sum()))
        for heavy, light in ((order[: -pairs - 1 : -1], order[:pairs]), (order[-1:], order[:-1])):
            excess = load[heavy] - load[light]
            left = (2 * own[heavy] - excess[:, None])[:, :, None] - 2 * own[light][:, None]
            left = np.abs(left, out=left).reshape(len(excess), -1)
            found = left.argmin(1)
            better = left[np.arange(len(excess)), found] < excess
            if len(heavy) < len(light):  # the one swap after which the larger of the two is least
                after = (load[heavy] + load[light] + left[np.arange(len(excess)), found]) // 2
                better &= np.arange(len(excess)) == np.where(better, after, after.max() + 1).argmin()
            if better[0] or (better.any() and len(heavy) < len(light)):
                break
        else:
            break
        x, y = np.divmod(found[better], count)
        heavy, light = np.broadcast_to(heavy, better.shape)[better], light[better]
        members[heavy, x], members[light, y] = members[light, y], members[heavy, x]
        own[heavy, x], own[light, y] = own[light, y], own[heavy, x]
    return int(own.sum(1).max())
