"""What context parallelism sends, what it takes, and which way is the fastest. No torch: the planner asks it too.

P ranks with n tokens each, batch b, H query and G kv heads of width d, w bytes an element, a = max(w, 4) bytes of one
that is summed. Bytes that a rank sends for one attention:

    ring, gathered   forward   (P - 1) 2 n b G d w
                     backward  (P - 1) 2 n b G d (w + a)            k and v again, and their gradients to their owner
    all-to-all       forward   (P - 1) / P n b (2 (H + G) d w + 2 H a)      q, k, v there, O and its M and Z back
                     backward  (P - 1) / P n b (2 (H + G) d w + 3 H a)      dO, C, W and D there, dq, dk, dv back
    hybrid of U      all-to-all over U, and a ring over P / U whose steps have n U tokens of G / U heads

That is without a mask; M, Z, C, W and D are the numbers of a row in ``ops/attention/block.py``. Keys that the
receiver's queries do not see are not sent. Causal in zigzag layout, in a step a rank sends all of its keys or the first
half, and of all steps together three quarters; contiguous, half on average.

A ring hides its transfer where a step computes longer than it sends. Causal in zigzag or striped layout, F FLOP/s and B
bytes/s, a step is half a square of n tokens, 2 H b d n^2 FLOPs forward and 5/2 of it backward:

    n  >=  w G F / (H B)   forward        n  >=  2 (w + a) G F / (5 H B)   backward        half of that if not causal

``chosen`` compares seconds: an all-to-all and a gather are waited for, a ring only for what it does not hide; with
documents nobody knows on the host how much there is to compute, so nothing counts as hidden.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel_ops.context_parallel.token_ranges import Run, counterparts, lengths, neighbours, runs, seen, tokens

# Seconds by which each step of a ring is longer than its arithmetic: launches, and the merge of its result.
_STEP_SECONDS = 20e-6

# What of ``keys_sent`` travels around a causal ring in zigzag layout. A step takes as long as all of it.
ZIGZAG_SHARE = 0.75

# Gathered keys and their gradients in fp32 may take as much as this where "auto" chooses.
_GATHERED_BYTES = 512 << 20


class Sent(NamedTuple):
    """Bytes, forward and backward."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One attention over a sequence that ``ranks`` ranks share.

    Args:
        length: tokens of the whole sequence. itemsize: bytes of an element of q, k and v.
        documents: tokens see those of their own document alone.
    """

    length: int
    ranks: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    layout: str = "zigzag"
    causal: bool = True
    window: int | None = None
    documents: bool = False


class Way(NamedTuple):
    """How an attention is shared out: ``ulysses_degree`` neighbours share out the heads, and the keys of the rest
    come one rank after another, or all at once if ``gathered``."""

    ulysses_degree: int
    gathered: bool

    def name(self, ranks: int) -> str:
        if self.gathered:
            return "gathered"
        if self.ulysses_degree == 1:
            return "ring"
        return "all_to_all" if self.ulysses_degree == ranks else f"hybrid of {self.ulysses_degree}"


class Choice(NamedTuple):
    """A way and the reason for it."""

    way: Way
    why: str


class Link(NamedTuple):
    """What a device does and what a rank sends: FLOP/s of attention, bytes per second, seconds of an exchange."""

    flops: float
    bandwidth: float
    latency: float = 0.0


def summed(itemsize: int) -> int:
    """Bytes of an element that is summed over ranks: fp32, or fp64 for fp64."""
    return max(itemsize, 4)


def keys_sent(leaving: float, returning: float, key_value_width: float, itemsize: int) -> Sent:
    """What goes to another rank: k and v of ``leaving`` tokens forward and again backward, and the gradients of
    ``returning`` ones of its own. ``key_value_width``: elements of a token's k and v together."""
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
    """What goes to another rank: ``own`` tokens in its heads, and results of ``theirs`` in the heads of this one. The
    widths are those of the heads of one rank, ``value_width`` that of the output."""
    inputs, output = (query_width + key_value_width) * itemsize, value_width * itemsize
    statistic = heads * summed(itemsize)
    return Sent(own * inputs + theirs * (output + 2 * statistic), own * (output + 3 * statistic) + theirs * inputs)


def sent(shape: AttentionShape, way: Way) -> list[Sent]:
    """Exactly what each rank sends."""
    inside, around = _inside(shape, way.ulysses_degree), _around(shape, way.ulysses_degree)
    return [Sent(a.forward + b.forward, a.backward + b.backward) for a, b in zip(inside, around, strict=True)]


def _inside(shape: AttentionShape, ulysses_degree: int) -> list[Sent]:
    """What goes to neighbours, for all-to-all."""
    own = lengths(shape.layout, shape.length, shape.ranks)
    queries, keys = (shape.batch * shape.head_dim * n / ulysses_degree for n in (shape.heads, shape.kv_heads))
    heads = shape.batch * shape.heads / ulysses_degree
    return [
        _total(
            heads_sent(own[rank], own[other], queries, 2 * keys, queries, heads, shape.itemsize)
            for other in neighbours(shape.layout, shape.ranks, rank, ulysses_degree)
            if other != rank
        )
        for rank in range(shape.ranks)
    ]


def _around(shape: AttentionShape, ulysses_degree: int) -> list[Sent]:
    """What goes around the ring, or is gathered."""
    shards = [runs(shape.layout, shape.length, shape.ranks, rank, ulysses_degree) for rank in range(shape.ranks)]
    width = 2 * shape.batch * shape.kv_heads / ulysses_degree * shape.head_dim
    return [
        _total(
            keys_sent(
                _seen(shape, shards[rank], shards[other]), _seen(shape, shards[other], shards[rank]), width,
                shape.itemsize,
            )
            for other in counterparts(shape.layout, shape.ranks, rank, ulysses_degree)
            if other != rank
        )
        for rank in range(shape.ranks)
    ]  # fmt: skip


def _seen(shape: AttentionShape, keys: tuple[Run, ...], queries: tuple[Run, ...]) -> int:
    return tokens(seen(keys, queries, shape.causal, shape.window))


def _total(parts: Iterable[Sent]) -> Sent:
    listed = list(parts)
    return Sent(sum(s.forward for s in listed), sum(s.backward for s in listed))


def hiding_tokens(shape: AttentionShape, *, bandwidth: float, flops: float) -> Sent:
    """From how many tokens a rank on a ring hides its transfers, forward and backward: bytes/s and FLOP/s of a rank.

    Raises:
        ValueError: a window or documents, with which a step does not grow with the square of its tokens, or contiguous
        tokens under a causal mask, where ranks wait for each other.
    """
    if shape.window is not None or shape.documents or (shape.causal and shape.layout == "contiguous"):
        raise ValueError("hiding_tokens: there is no such length with a window, documents or causal contiguous tokens")
    half = 1 if shape.causal else 2
    w, group = shape.itemsize, shape.heads / shape.kv_heads
    return Sent(w * flops / (half * group * bandwidth), 2 * (w + summed(w)) * flops / (5 * half * group * bandwidth))


def ways(shape: AttentionShape) -> list[Way]:
    """What the heads and ranks allow."""
    sizes = [u for u in range(1, shape.ranks + 1) if shape.ranks % u == 0 and shape.kv_heads % u == 0]
    return [Way(1, False), Way(1, True), *(Way(u, False) for u in sizes if u > 1)]


def seconds(shape: AttentionShape, way: Way, link: Link) -> float:
    """Forward and backward of the slowest rank."""
    u = way.ulysses_degree
    others = counterparts(shape.layout, shape.ranks, 0, u)
    shards = [runs(shape.layout, shape.length, shape.ranks, rank, u) for rank in others]
    work = max(_pairs(shard, shape) for shard in shards) * 4 * shape.head_dim * shape.heads / u * shape.batch
    compute = Sent(work / link.flops, 2.5 * work / link.flops)
    waited = [sum(s) for s in _inside(shape, u)]
    total = sum(compute) + max(waited) / link.bandwidth + (4 * link.latency if u > 1 else 0.0)
    if way.gathered:
        return total + max(sum(s) for s in _around(shape, u)) / link.bandwidth + 3 * link.latency
    arriving = [[_seen(shape, k, q) if k != q else 0 for k in shards] for q in shards]
    hops = max(sum(n > 0 for n in of_rank) for of_rank in arriving)
    largest = max(max(of_rank) for of_rank in arriving)
    width = 2 * shape.batch * shape.kv_heads / u * shape.head_dim
    for busy, size in zip(compute, keys_sent(largest, largest, width, shape.itemsize), strict=True):
        hidden = 0.0 if shape.documents else busy / (hops + 1)
        total += hops * (max(0.0, size / link.bandwidth + link.latency - hidden) + _STEP_SECONDS)
    return total


@functools.lru_cache(maxsize=4096)
def chosen(shape: AttentionShape, link: Link | None) -> Choice:
    """The fastest way; where nothing is known of the device (``None``), the one that sends least, and of several the
    first of ring, gathered, and all-to-all."""
    candidates = []
    for way in ways(shape):
        if way.gathered and _gathered_bytes(shape) > _GATHERED_BYTES:
            continue
        most = max(s.forward + s.backward for s in sent(shape, way))
        candidates.append((way, most if link is None else seconds(shape, way, link), most))
    best = min(candidates, key=lambda candidate: candidate[1])
    described = []
    for way, value, most in sorted(candidates, key=lambda candidate: candidate[1]):
        time = "" if link is None else f"{1e3 * value:.3g} ms, "
        described.append(f"{way.name(shape.ranks)} {time}{most / 2**20:.3g} MiB sent")
    reason = "sends least" if link is None else "fastest"
    return Choice(best[0], f"{best[0].name(shape.ranks)}: {reason} (forward and backward: {'; '.join(described)})")


def _pairs(shard: Sequence[Run], shape: AttentionShape) -> float:
    """How many (query, key) pairs there are to compute for a shard's queries."""
    if not shape.causal:
        return tokens(shard) * shape.length
    widest = shape.length if shape.window is None else shape.window
    total = 0
    for run in shard:
        # Query p sees min(p + 1, window) keys.
        growing = min(run.length, max(0, -(-(widest - run.start) // run.step)))
        total += growing * (run.start + 1) + run.step * growing * (growing - 1) // 2
        total += (run.length - growing) * widest
    return total


def _gathered_bytes(shape: AttentionShape) -> float:
    whole = 2 * shape.length * shape.batch * shape.kv_heads * shape.head_dim
    return whole * (shape.itemsize + summed(shape.itemsize))
