"""Masks as ranges: each query sees one run of adjacent keys.

    ranges[0, i] <= j <= ranges[1, i]     the keys j that query i sees; none if the first is after the last

Causal masks, windows, documents, prefixes and blocks that see all before them are of this form, and so is any
intersection of them. Neither bound decreases from query to query, so the queries that see a key are adjacent as well:
a backward walks along them.

A causal mask or a window alone stays two numbers, ``left <= j - i <= right``, which kernels take without a tensor.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.ops.attention.cache import once


class MaskBounds(NamedTuple):
    """The keys of a block that each of its queries sees, in indices of the block.

    ``left <= j - i <= right`` if ``spans`` is ``None``. Otherwise ``spans[0, i] <= j < spans[1, i]`` is the whole mask,
    and ``query_spans[0, j] <= i < query_spans[1, j]`` the same mask by keys, which a backward on a GPU needs. Both are
    int32, ``[2, sq]`` and ``[2, sk]``, within the block. Queries may be in any order. A query whose first key is not
    before its end sees no key.
    """

    left: int | None = None
    right: int | None = None
    spans: Tensor | None = None
    query_spans: Tensor | None = None


def causal_ranges(
    length: int, *, window_size: tuple[int, int] = (-1, -1), device: torch.device | str | None = None
) -> Tensor:
    """Ranges of a causal mask.

    Args:
        window_size: at most ``window_size[0]`` keys before the query's own; -1 for all. The second number is unused.

    Returns:
        int32 ``[2, length]``: the first and the last key of each query.
    """
    i = torch.arange(length, device=device, dtype=torch.int32)
    return torch.stack([(i - window_size[0]).clamp_(min=0) if window_size[0] >= 0 else torch.zeros_like(i), i])


def document_ranges(cu_seqlens: Tensor, *, causal: bool | Tensor = True, length: int | None = None) -> Tensor:
    """Ranges of packed documents: a query sees keys of its own document.

    Args:
        cu_seqlens: int32 or int64 ``[documents + 1]``, rising from 0 to the length of the sequence.
        causal: no key after the query's own; a bool ``[documents]`` mixes causal and full documents.
        length: tokens of the sequence; ``None`` reads it from ``cu_seqlens``, which waits for a GPU.

    Returns:
        int32 ``[2, length]``: the first and the last key of each query.
    """
    edges = cu_seqlens.to(torch.int64)
    places = torch.arange(int(edges[-1]) if length is None else length, device=edges.device)
    document = torch.searchsorted(edges, places, right=True).clamp(1, edges.numel() - 1) - 1
    first, last = edges[document], edges[document + 1] - 1
    if isinstance(causal, Tensor):
        if causal.shape != (edges.numel() - 1,) or causal.dtype is not torch.bool:
            raise ValueError(
                f"document_ranges: causal must be a bool or a bool tensor [{edges.numel() - 1}], one for each "
                f"document, got {causal.dtype} {list(causal.shape)}"
            )
        last = torch.where(causal.to(edges.device)[document], places, last)
    elif causal:
        last = places
    return torch.stack([first, last]).to(torch.int32)


def prefix_ranges(prefix: int | Tensor, *, length: int | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """Ranges of a prefix mask: the tokens of a prefix see all of it, the others are causal.

    Args:
        prefix: tokens of the prefix; with ``cu_seqlens`` one number, or ``[documents]`` of them, counted from the start
            of each document.
        length: tokens of the sequence; may be left out with ``cu_seqlens``.
        cu_seqlens: as in ``document_ranges``.

    Returns:
        int32 ``[2, length]``: the first and the last key of each query.
    """
    if cu_seqlens is None:
        if length is None:
            raise ValueError("prefix_ranges: length must be given where cu_seqlens is not")
        cu_seqlens = torch.tensor([0, length])
    edges = cu_seqlens.to(torch.int64)
    ranges = document_ranges(edges, length=length).to(torch.int64)
    if not isinstance(prefix, Tensor):
        prefix = torch.full((edges.numel() - 1,), prefix, device=edges.device)
    if prefix.shape != (edges.numel() - 1,):
        raise ValueError(
            f"prefix_ranges: prefix must be one number or [{edges.numel() - 1}], one for each document, got "
            f"{list(prefix.shape)}"
        )
    document = torch.searchsorted(edges, ranges[1], right=True).clamp(1, edges.numel() - 1) - 1
    end = torch.minimum(edges[:-1] + prefix.to(edges.device), edges[1:])
    return torch.stack([ranges[0], ranges[1].maximum(end[document] - 1)]).to(torch.int32)


def block_causal_ranges(blocks: int | Tensor, *, length: int | None = None) -> Tensor:
    """Ranges of blocks that see themselves and all blocks before them, such as the frames of a video.

    Args:
        blocks: tokens of a block, or the edges of all blocks, int ``[blocks + 1]``, rising from 0 to the length.
        length: tokens of the sequence, for blocks of one size; the last block may be shorter.

    Returns:
        int32 ``[2, length]``: the first and the last key of each query.
    """
    if not isinstance(blocks, Tensor):
        if length is None or blocks < 1:
            raise ValueError(f"block_causal_ranges: blocks of one size need length, and at least 1 token, got {blocks}")
        blocks = torch.tensor([*range(0, length, blocks), length])
    ranges = document_ranges(blocks, causal=False, length=length)
    ranges[0] = 0
    return ranges


def intersect_ranges(*ranges: Tensor) -> Tensor:
    """The keys that a query sees in each of ``ranges``, int32 ``[2, length]`` each: again one run for each query."""
    first, last = ranges[0]
    for other in ranges[1:]:
        if other.shape != ranges[0].shape:
            raise ValueError(
                f"intersect_ranges: ranges must have one shape, got {list(ranges[0].shape)} and {list(other.shape)}"
            )
        first, last = first.maximum(other[0]), last.minimum(other[1])
    return torch.stack([first, last])


def range_error(ranges: Tensor, keys: int) -> str | None:
    """The first thing wrong with the values of ``ranges``, or ``None``.

    Args:
        ranges: ``[2, queries]`` on the CPU. keys: number of keys that there are.
    """
    for name, row, least, most in (("first", ranges[0], 0, keys), ("last", ranges[1], -1, keys - 1)):
        wrong = (row < least) | (row > most)
        if bool(wrong.any()):
            i = int(wrong.int().argmax())
            return f"the {name} key of row {i} is {int(row[i])}, outside of {least} to {most}"
        falls = row[1:] < row[:-1]
        if bool(falls.any()):
            i = int(falls.int().argmax()) + 1
            return f"the {name} key must not decrease, but falls from {int(row[i - 1])} to {int(row[i])} in row {i}"
    return None


def attention_bounds(
    queries: TokenRange, keys: TokenRange, *, left: int | None = None, right: int | None = None,
    ranges: Tensor | None = None, first_query: int = 0, from_keys: bool = True,
) -> MaskBounds | None:  # fmt: skip
    """The bounds of the mask between queries and keys of the same ``step``; ``None`` if no query sees a key.

    Args:
        left, right: keys before and after the query's own place that it sees; ``None`` for all.
        ranges, first_query, from_keys: see ``range_bounds``.
    """
    if not queries.length or not keys.length:
        return None
    step = queries.step
    apart = queries.start - keys.start
    low = None if left is None else -((left - apart) // step)
    high = None if right is None else (apart + right) // step
    if (high is not None and high < 1 - queries.length) or (low is not None and low >= keys.length):
        return None
    if ranges is not None:
        return range_bounds((queries,), (keys,), left, right, ranges, first_query=first_query, from_keys=from_keys)
    # Bounds that cut nothing off become None, so that kernels skip the test.
    high = None if high is not None and high >= keys.length - 1 else high
    low = None if low is not None and low <= 1 - queries.length else low
    return MaskBounds(low, high)


def range_bounds(
    queries: Sequence[TokenRange], keys: Sequence[TokenRange], left: int | None, right: int | None, ranges: Tensor, *,
    first_query: int = 0, from_keys: bool = True,
) -> MaskBounds:  # fmt: skip
    """The mask of ``ranges``, cut to ``left`` and ``right``, between queries and keys in the order of the sequence.

    Args:
        ranges: ``[2, n]``, of the queries at the places from ``first_query`` on.
        from_keys: return ``query_spans`` too.
    """
    key = (tuple(queries), tuple(keys), left, right, first_query)

    def bounds() -> Tensor:
        """Place of the first key of each query, and of that after its last."""
        places = _places(queries, ranges.device)
        whole = len(queries) == 1 and queries[0].step == 1 and queries[0].length == ranges.shape[1]
        first, last = (ranges if whole else ranges[:, places - first_query]).to(torch.int64)
        first = first if left is None else first.maximum(places - left)
        last = last if right is None else last.minimum(places + right)
        return torch.stack([first, last + 1])

    def spans() -> Tensor:
        if len(keys) > 1:
            return torch.searchsorted(_places(keys, ranges.device), bounds(), out_int32=True)
        start, length, step = keys[0]
        index = (bounds() - (start - step + 1)) // step if step > 1 else bounds() - start
        return index.clamp_(0, length).to(torch.int32)

    def query_spans() -> Tensor:
        first, end = bounds()
        places = _places(keys, ranges.device)
        return torch.stack([torch.searchsorted(t, places, right=True, out_int32=True) for t in (end, first)])

    return MaskBounds(
        spans=once(ranges, ("spans", *key), spans),
        query_spans=once(ranges, ("query_spans", *key), query_spans) if from_keys else None,
    )


def _places(side: Sequence[TokenRange], device: torch.device) -> Tensor:
    parts = [torch.arange(t.start, t.start + t.step * t.length, t.step, device=device) for t in side]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_order(side: Sequence[TokenRange]) -> bool:
    """True if the ranges follow each other in the sequence."""
    return all(a.last < b.start for a, b in pairwise(side))


def dense_mask(mask: MaskBounds, sq: int, sk: int, device: torch.device) -> Tensor:
    """The mask as booleans ``[sq, sk]``: for references and tests."""
    j = torch.arange(sk, device=device)
    if mask.spans is not None:
        return (j >= mask.spans[0, :, None]) & (j < mask.spans[1, :, None])
    apart = j - torch.arange(sq, device=device)[:, None]
    here = torch.ones(sq, sk, dtype=torch.bool, device=device)
    here = here if mask.left is None else here & (apart >= mask.left)
    return here if mask.right is None else here & (apart <= mask.right)
