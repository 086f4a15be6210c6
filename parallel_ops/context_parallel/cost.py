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

``select`` compares seconds: all of an all-to-all and of an all-gather, and the part of a ring that is not hidden. With
documents the amount of computation is not known on the host, so nothing counts as hidden.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.context_parallel.token_ranges import (
    count_tokens,
    lengths,
    ring_ranks,
    shard_ranges,
    ulysses_ranks,
    visible_keys,
)

# Seconds that a step of a ring takes beside its arithmetic: launches, and the merge of its result.
_STEP_SECONDS = 20e-6

# The share of ``keys_sent`` that a causal ring in zigzag layout sends. A step takes as long as all of it.
ZIGZAG_SHARE = 0.75

# Above this size of gathered keys and their gradients in fp32, "auto" does not select the all-gather.
_MAX_GATHERED_BYTES = 512 << 20


class Sent(NamedTuple):
    """Bytes, forward and backward."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """An attention over a sequence that ``ranks`` ranks share.

    Args:
        length: tokens of the whole sequence. itemsize: bytes of an element of q, k and v.
        window_size: as in ``flash_attention``. documents: tokens see only their own document.
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
    documents: bool = False

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


class Selection(NamedTuple):
    """An algorithm and the reason for it."""

    algorithm: Algorithm
    reason: str


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
    shards = [
        shard_ranges(shape.cp_layout, shape.length, shape.ranks, rank, ulysses_degree) for rank in range(shape.ranks)
    ]
    width = 2 * shape.batch * shape.kv_heads / ulysses_degree * shape.head_dim
    return [
        _total(
            keys_sent(
                _visible_tokens(shape, shards[rank], shards[other]),
                _visible_tokens(shape, shards[other], shards[rank]),
                width, shape.itemsize,
            )
            for other in ring_ranks(shape.cp_layout, shape.ranks, rank, ulysses_degree)
            if other != rank
        )
        for rank in range(shape.ranks)
    ]  # fmt: skip


def _visible_tokens(shape: AttentionShape, keys: tuple[TokenRange, ...], queries: tuple[TokenRange, ...]) -> int:
    return count_tokens(visible_keys(keys, queries, *shape.bounds))


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
    others = ring_ranks(shape.cp_layout, shape.ranks, 0, u)
    shards = [shard_ranges(shape.cp_layout, shape.length, shape.ranks, rank, u) for rank in others]
    work = max(_pairs(shard, shape) for shard in shards) * 4 * shape.head_dim * shape.heads / u * shape.batch
    compute = Sent(work / link.flops, 2.5 * work / link.flops)
    waited = [sum(s) for s in _all_to_all_sent(shape, u)]
    total = sum(compute) + max(waited) / link.bandwidth + (4 * link.latency if u > 1 else 0.0)
    if algorithm.all_gather:
        return total + max(sum(s) for s in _keys_sent(shape, u)) / link.bandwidth + 3 * link.latency
    arriving = [[_visible_tokens(shape, k, q) if k != q else 0 for k in shards] for q in shards]
    hops = max(sum(n > 0 for n in of_rank) for of_rank in arriving)
    largest = max(max(of_rank) for of_rank in arriving)
    width = 2 * shape.batch * shape.kv_heads / u * shape.head_dim
    for busy, size in zip(compute, keys_sent(largest, largest, width, shape.itemsize), strict=True):
        hidden = 0.0 if shape.documents else busy / (hops + 1)
        total += hops * (max(0.0, size / link.bandwidth + link.latency - hidden) + _STEP_SECONDS)
    return total


@functools.lru_cache(maxsize=4096)
def select(shape: AttentionShape, link: Link | None) -> Selection:
    """The fastest algorithm, or without ``link`` the one that sends fewest bytes; ties go to ring, then all-gather."""
    candidates = []
    for algorithm in algorithms(shape):
        if algorithm.all_gather and _gathered_bytes(shape) > _MAX_GATHERED_BYTES:
            continue
        most = max(s.forward + s.backward for s in sent(shape, algorithm))
        candidates.append((algorithm, most if link is None else seconds(shape, algorithm, link), most))
    best = min(candidates, key=lambda candidate: candidate[1])
    described = []
    for algorithm, value, most in sorted(candidates, key=lambda candidate: candidate[1]):
        time = "" if link is None else f"{1e3 * value:.3g} ms, "
        described.append(f"{algorithm.name(shape.ranks)} {time}{most / 2**20:.3g} MiB sent")
    reason = "sends least" if link is None else "fastest"
    return Selection(best[0], f"{best[0].name(shape.ranks)}: {reason} (forward and backward: {'; '.join(described)})")


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


def _gathered_bytes(shape: AttentionShape) -> float:
    whole = 2 * shape.length * shape.batch * shape.kv_heads * shape.head_dim
    return whole * (shape.itemsize + summed(shape.itemsize))
