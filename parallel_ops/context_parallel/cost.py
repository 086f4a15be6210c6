"""Bytes and seconds of context parallelism, and its fastest algorithm. No torch: the planner uses it too.

P ranks with n tokens each, batch b, H query and G kv heads of width d, w bytes an element, a = max(w, 4) bytes of one
that is summed. Bytes that a rank sends for one attention:

    ring, all-gather forward   (P - 1) 2 n b G d w
                     backward  (P - 1) 2 n b G d (w + a)            k and v again, and their gradients
    all-to-all       forward   (P - 1) / P n b (2 (H + G) d w + 2 H a)      q, k, v there, O and its M and Z back
                     backward  (P - 1) / P n b (2 (H + G) d w + 3 H a)      dO, C, W and D there, dq, dk, dv back
    hybrid of U      all-to-all over U, and a ring over P / U whose steps have n U tokens of G / U heads

That is without a mask; M, Z, C, W and D are the numbers of a row in ``ops/attention/block.py``. Keys that are not
visible to the receiver's queries are not sent. Under a causal mask in zigzag layout, each step sends all keys of a rank
or their first half, three quarters over all steps; in contiguous layout half on average.

A ring hides its transfers if a step computes longer than it sends. Under a causal mask in zigzag or striped
layout, with F FLOP/s and B bytes/s, a step is half a square of n tokens, 2 H b d n^2 FLOPs forward and 5/2 of it
backward:

    n  >=  w G F / (H B)   forward        n  >=  2 (w + a) G F / (5 H B)   backward        half of that if not causal

``seconds`` are those of the slowest rank: its arithmetic, all of an all-to-all and of an all-gather, and the part of a
ring that is not hidden. With lengths of documents, visible pairs and keys are counted (``placement.py``); where the
device alone knows them, nothing counts as hidden. ``selection.py`` compares.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.context_parallel.token_ranges import (
    LAYOUTS,
    count_tokens,
    layout_of,
    lengths,
    shard_ranges,
    ulysses_ranks,
    visible_keys,
)

# Seconds that a step of a ring takes beside its arithmetic: launches, and the merge of its result.
_STEP_SECONDS = 20e-6

# The share of ``keys_sent`` that a causal ring in zigzag layout sends. A step takes as long as all of it.
ZIGZAG_SHARE = 0.75


class Sent(NamedTuple):
    """Bytes, forward and backward."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """An attention over a sequence that ``ranks`` ranks share.

    Args:
        length: tokens of the whole sequence. itemsize: bytes of an element of q, k and v.
        window_size: as in ``flash_attention``.
        documents: lengths of packed documents, inside of which attention stays; ``True`` if they are not known here.

    Raises:
        ValueError: the documents do not make up the sequence.
    """

    length: int
    ranks: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    cp_layout: str = "zigzag"
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    documents: tuple[int, ...] | bool = False

    def __post_init__(self) -> None:
        found = self.documents
        if isinstance(found, tuple) and (sum(found) != self.length or min(found, default=0) < 0):
            raise ValueError(
                f"AttentionShape: documents must be lengths of {self.length} tokens in all, got {sum(found)}"
            )

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """Keys before and after a query's own place that it sees; ``None`` for all."""
        left, right = (None if n < 0 else n for n in self.window_size)
        return left, 0 if self.causal else right


class Algorithm(NamedTuple):
    """How ranks share an attention.

    ulysses_degree: ranks that exchange heads for tokens by all-to-all.
    all_gather: the keys of the other ranks are all gathered first. Otherwise they come one rank after another, in a
        ring.
    """

    ulysses_degree: int
    all_gather: bool

    def name(self, ranks: int) -> str:
        if self.all_gather:
            return "all_gather"
        if self.ulysses_degree == 1:
            return "ring"
        return "all_to_all" if self.ulysses_degree == ranks else f"hybrid of {self.ulysses_degree}"


class Link(NamedTuple):
    """Rates of a rank: FLOP/s of attention, bytes per second that it sends, seconds of latency of an exchange."""

    flops: float
    bandwidth: float
    latency: float = 0.0


def summed(itemsize: int) -> int:
    """Bytes of an element that is summed over ranks: fp32, or fp64 for fp64."""
    return max(itemsize, 4)


def keys_sent(leaving: float, returning: float, key_value_width: float, itemsize: int) -> Sent:
    """Bytes sent to another rank: k and v of ``leaving`` tokens forward and again backward, and the gradients of
    ``returning`` tokens of that rank. ``key_value_width``: elements of a token's k and v together."""
    forward = leaving * key_value_width * itemsize
    return Sent(forward, forward + returning * key_value_width * summed(itemsize))


def heads_sent(
    own: float,
    theirs: float,
    query_width: float,
    key_value_width: float,
    value_width: float,
    heads: float,
    itemsize: int,
) -> Sent:
    """Bytes sent to another rank in an all-to-all: ``own`` tokens in the heads of that rank, and the results of
    ``theirs`` in the heads of this one. Widths are elements of one rank's heads; ``value_width`` is the output's."""
    inputs, output = (query_width + key_value_width) * itemsize, value_width * itemsize
    statistic = heads * summed(itemsize)
    return Sent(own * inputs + theirs * (output + 2 * statistic), own * (output + 3 * statistic) + theirs * inputs)


def sent(shape: AttentionShape, algorithm: Algorithm) -> list[Sent]:
    """The bytes that each rank sends."""
    exchanged, keys = _all_to_all_sent(shape, algorithm.ulysses_degree), _keys_sent(shape, algorithm.ulysses_degree)
    return [Sent(a.forward + b.forward, a.backward + b.backward) for a, b in zip(exchanged, keys, strict=True)]


def _all_to_all_sent(shape: AttentionShape, ulysses_degree: int) -> list[Sent]:
    """The bytes of each rank's all-to-all."""
    own = lengths(shape.cp_layout, shape.length, shape.ranks)
    queries, keys = (shape.batch * shape.head_dim * n / ulysses_degree for n in (shape.heads, shape.kv_heads))
    heads = shape.batch * shape.heads / ulysses_degree
    return [
        _total(
            heads_sent(own[rank], own[other], queries, 2 * keys, queries, heads, shape.itemsize)
            for other in ulysses_ranks(shape.cp_layout, shape.ranks, rank, ulysses_degree)
            if other != rank
        )
        for rank in range(shape.ranks)
    ]


def _keys_sent(shape: AttentionShape, ulysses_degree: int) -> list[Sent]:
    """The bytes of keys, and of their gradients, that each rank sends."""
    rows = counts(shape, ulysses_degree)[1]
    width = 2 * shape.batch * shape.kv_heads / ulysses_degree * shape.head_dim
    of_union = [
        keys_sent(sum(leaving), sum(returning), width, shape.itemsize)
        for leaving, returning in zip(rows, zip(*rows, strict=True), strict=True)
    ]
    return [of_union[_union(shape, rank, ulysses_degree)] for rank in range(shape.ranks)]


def _union(shape: AttentionShape, rank: int, ulysses_degree: int) -> int:
    """The index of a rank's ``ulysses_ranks`` among those of all ranks."""
    ring_degree = shape.ranks // ulysses_degree
    return rank % ring_degree if shape.cp_layout == "striped" else rank // ulysses_degree


@functools.lru_cache(maxsize=256)
def counts(shape: AttentionShape, ulysses_degree: int) -> tuple[list[float], list[list[int]]]:
    """Visible pairs of the queries of each rank and its ``ulysses_ranks`` together, and the keys ``[source][target]``
    that such queries see of others."""
    ring_degree = shape.ranks // ulysses_degree
    first = 1 if shape.cp_layout == "striped" else ulysses_degree
    shards = [
        shard_ranges(shape.cp_layout, shape.length, shape.ranks, i * first, ulysses_degree) for i in range(ring_degree)
    ]
    if isinstance(shape.documents, tuple):
        # Needed here alone, and with it NumPy.
        from parallel_ops.context_parallel.placement import area, ranges_of, rows_sent

        layout, ranges = shape.cp_layout, ranges_of(shape.documents, *shape.bounds)
        if layout not in LAYOUTS:
            layout = layout_of([int(owner) // ulysses_degree for owner in layout.split(",")])
        areas: list[float] = area(ranges, layout, ring_degree).tolist()
        if layout == "striped":  # each document that is longer than the ranks needs all of its keys
            return areas, [[0 if q is k else count_tokens(k) for q in shards] for k in shards]
        return areas, rows_sent(ranges, layout, ring_degree).tolist()
    return [_pairs(shard, shape) for shard in shards], [
        [0 if q is k else count_tokens(visible_keys(k, q, *shape.bounds)) for q in shards] for k in shards
    ]


def _total(parts: Iterable[Sent]) -> Sent:
    listed = list(parts)
    return Sent(sum(s.forward for s in listed), sum(s.backward for s in listed))


def hiding_tokens(shape: AttentionShape, *, bandwidth: float, flops: float) -> Sent:
    """The number of tokens per rank above which a ring hides its transfers, forward and backward.

    Args:
        bandwidth: bytes/s that a rank sends. flops: FLOP/s of a rank.

    Raises:
        ValueError: with a window or documents a step does not grow with the square of its tokens; in contiguous layout
            under a causal mask ranks wait for each other.
    """
    if max(shape.window_size) >= 0 or shape.documents or (shape.causal and shape.cp_layout == "contiguous"):
        raise ValueError("hiding_tokens: there is no such length with a window, documents or causal contiguous tokens")
    half = 1 if shape.causal else 2
    w, group = shape.itemsize, shape.heads / shape.kv_heads
    return Sent(w * flops / (half * group * bandwidth), 2 * (w + summed(w)) * flops / (5 * half * group * bandwidth))


def algorithms(shape: AttentionShape) -> list[Algorithm]:
    """The algorithms that the numbers of heads and ranks allow."""
    sizes = [u for u in range(1, shape.ranks + 1) if shape.ranks % u == 0 and shape.kv_heads % u == 0]
    return [Algorithm(1, False), Algorithm(1, True), *(Algorithm(u, False) for u in sizes if u > 1)]


def seconds(shape: AttentionShape, algorithm: Algorithm, link: Link) -> float:
    """Seconds of forward and backward together on the slowest rank."""
    u = algorithm.ulysses_degree
    areas, rows = counts(shape, u)
    work = 4 * shape.head_dim * shape.heads / u * shape.batch / link.flops
    total = max(sum(s) for s in _all_to_all_sent(shape, u)) / link.bandwidth + (4 * link.latency if u > 1 else 0.0)
    if algorithm.all_gather:
        waited = max(sum(s) for s in _keys_sent(shape, u)) / link.bandwidth + 3 * link.latency
        return total + 3.5 * work * max(areas) + waited
    width = 2 * shape.batch * shape.kv_heads / u * shape.head_dim
    slowest = 0.0
    for area, arriving in zip(areas, zip(*rows, strict=True), strict=True):
        hops = [keys_sent(n, n, width, shape.itemsize) for n in arriving if n]
        found = 3.5 * work * area + 2 * len(hops) * _STEP_SECONDS
        for share, sizes in ((1.0, [hop.forward for hop in hops]), (2.5, [hop.backward for hop in hops])):
            hidden = 0.0 if shape.documents is True else share * work * area / (len(hops) + 1)
            found += sum(max(0.0, size / link.bandwidth + link.latency - hidden) for size in sizes)
        slowest = max(slowest, found)
    return total + slowest


def _pairs(shard: Sequence[TokenRange], shape: AttentionShape) -> float:
    """The number of (query, key) pairs to compute for a shard's queries."""
    left, right = shape.bounds
    widest = shape.length if left is None else left + 1
    if right != 0:
        return count_tokens(shard) * min(shape.length, widest + (shape.length if right is None else right))
    total = 0
    for part in shard:
        # Query p sees min(p + 1, widest) keys.
        growing = min(part.length, max(0, -(-(widest - part.start) // part.step)))
        total += growing * (part.start + 1) + part.step * growing * (growing - 1) // 2
        total += (part.length - growing) * widest
    return total


def gathered_bytes(shape: AttentionShape) -> float:
    """Bytes of all keys and values, and of their gradients as they are summed."""
    whole = 2 * shape.length * shape.batch * shape.kv_heads * shape.head_dim
    return whole * (shape.itemsize + summed(shape.itemsize))
