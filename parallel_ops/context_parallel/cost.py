"""Bytes and seconds of context parallelism, and its fastest algorithm. No torch: the planner uses it too.

P ranks with n tokens each, batch b, H query and G kv heads of width d, w bytes an element, a = max(w, 4) bytes of one
that is summed. Bytes that a rank sends for one attention:

    ring, all-gather forward   (P - 1) 2 n b G d w
                     backward  (P - 1) 2 n b G d (w + a)            k and v again, and their gradients
    all-to-all       forward   (P - 1) / P n b (2 (H + G) d w + 2 H a)      q, k, v there, O and its M and Z back
                     backward  (P - 1) / P n b (2 (H + G) d w + 3 H a)      dO, C, W and D there, dq, dk, dv back
    hybrid of U      all-to-all over U, and a ring over P / U whose steps have n U tokens of G / U heads

    two levels       of a key and its gradient one copy for each other node, and inside of nodes what neighbours see

That is without a mask; M, Z, C, W and D are the numbers of a row in ``ops/attention/block.py``. Keys that are not
visible to the receiver's queries are not sent. Under a causal mask in zigzag layout, each step sends all keys of a rank
or their first half, three quarters over all steps; in contiguous layout half on average.

A ring hides its transfers if a step computes longer than it sends. Under a causal mask in zigzag or striped
layout, with F FLOP/s and B bytes/s, a step is half a square of n tokens, 2 H b d n^2 FLOPs forward and 5/2 of it
backward:

    n  >=  w G F / (H B)   forward        n  >=  2 (w + a) G F / (5 H B)   backward        half of that if not causal

``seconds`` are those of the slowest rank: its arithmetic, all of an all-to-all and of an all-gather, and the part of a
ring that is not hidden; both levels send at the same time. With lengths of documents, visible pairs and keys are
counted (``placement.py``); where the device alone knows them, nothing counts as hidden. ``selection.py`` compares.
"""

from collections.abc import Iterable
from typing import NamedTuple

from parallel_ops.context_parallel.counts import AttentionShape, Keys, counts, hops
from parallel_ops.context_parallel.token_ranges import lengths, ulysses_ranks

# Seconds that a step of a ring takes beside its arithmetic: launches, and the merge of its result.
_STEP_SECONDS = 20e-6

# The share of ``keys_sent`` that a causal ring in zigzag layout sends. A step takes as long as all of it.
ZIGZAG_SHARE = 0.75


class Sent(NamedTuple):
    """Bytes, forward and backward."""

    forward: float
    backward: float


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
    """Rates of a rank.

    Attributes:
        flops: FLOP/s of attention. bandwidth: bytes per second that it sends. latency: seconds of an exchange.
        inside: bytes per second to ranks of its node, where that is another link.
    """

    flops: float
    bandwidth: float
    latency: float = 0.0
    inside: float | None = None

    def seconds(self, between: float, inside: float) -> float:
        """Seconds of bytes between nodes and inside of one."""
        return max(between / self.bandwidth, inside / (self.inside or self.bandwidth))


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
    return [_total(levels) for levels in sent_by_level(shape, algorithm)]


def sent_by_level(shape: AttentionShape, algorithm: Algorithm) -> list[tuple[Sent, Sent]]:
    """The bytes that each rank sends to other nodes, and to ranks of its own."""
    exchanged, keys = _all_to_all_sent(shape, algorithm.ulysses_degree), _keys_sent(shape, algorithm.ulysses_degree)
    return [
        (_total(between), _total(inside))
        for between, inside in (zip(a, b, strict=True) for a, b in zip(exchanged, keys, strict=True))
    ]


def _all_to_all_sent(shape: AttentionShape, ulysses_degree: int) -> list[tuple[Sent, Sent]]:
    """The bytes of each rank's all-to-all, by level."""
    if ulysses_degree == 1:
        return [(Sent(0.0, 0.0),) * 2] * shape.ranks
    own, m = lengths(shape.cp_layout, shape.length, shape.ranks), shape.ranks_per_node
    queries, keys = (shape.batch * shape.head_dim * n / ulysses_degree for n in (shape.heads, shape.kv_heads))
    heads = shape.batch * shape.heads / ulysses_degree

    def of_rank(rank: int, inside: bool) -> Sent:
        return _total(
            heads_sent(own[rank], own[other], queries, 2 * keys, queries, heads, shape.itemsize)
            for other in ulysses_ranks(shape.cp_layout, shape.ranks, rank, ulysses_degree)
            if other != rank and (other // m == rank // m) == inside
        )

    return [(of_rank(rank, False), of_rank(rank, True)) for rank in range(shape.ranks)]


def _keys_sent(shape: AttentionShape, ulysses_degree: int) -> list[tuple[Sent, Sent]]:
    """The bytes of keys, and of their gradients, that each rank sends, by level."""
    width = 2 * shape.batch * shape.kv_heads / ulysses_degree * shape.head_dim

    def total(level: Iterable[Keys]) -> Sent:
        leaving, arriving = map(sum, zip(*level, strict=True))
        return keys_sent(leaving, arriving, width, shape.itemsize)

    steps = (zip(*each, strict=True) for each in hops(shape, ulysses_degree))
    of_union = [(total(between), total(inside)) for between, inside in steps]
    if shape.cp_layout == "striped":
        return of_union * ulysses_degree
    return [of_union[rank // ulysses_degree] for rank in range(shape.ranks)]


def _total(parts: Iterable[Sent]) -> Sent:
    listed = list(parts)
    return Sent(sum(s.forward for s in listed), sum(s.backward for s in listed))


def algorithms(shape: AttentionShape) -> list[Algorithm]:
    """The algorithms that the numbers of heads and ranks allow."""
    sizes = [u for u in range(1, shape.ranks + 1) if shape.ranks % u == 0 and shape.kv_heads % u == 0]
    return [Algorithm(1, False), Algorithm(1, True), *(Algorithm(u, False) for u in sizes if u > 1)]


def seconds(shape: AttentionShape, algorithm: Algorithm, link: Link) -> float:
    """Seconds of forward and backward together on the slowest rank."""
    u = algorithm.ulysses_degree
    areas = counts(shape, u)[0]
    work = 4 * shape.head_dim * shape.heads / u * shape.batch / link.flops
    total = max(link.seconds(*map(sum, levels)) for levels in _all_to_all_sent(shape, u))
    total += 4 * link.latency if u > 1 else 0.0
    if algorithm.all_gather:
        waited = max(link.seconds(*map(sum, levels)) for levels in _keys_sent(shape, u)) + 3 * link.latency
        return total + 3.5 * work * max(areas) + waited
    key = keys_sent(1, 1, 2 * shape.batch * shape.kv_heads / u * shape.head_dim, shape.itemsize)
    slowest = 0.0
    for area, steps in zip(areas, hops(shape, u), strict=True):
        arriving = [step for between, inside in steps if any(step := (between.arriving, inside.arriving))]
        found = 3.5 * work * area + 2 * len(arriving) * _STEP_SECONDS
        for size, share in zip(key, (1.0, 2.5), strict=True):
            hidden = 0.0 if shape.documents is True else share * work * area / (len(arriving) + 1)
            waits = (link.seconds(size * between, size * inside) + link.latency for between, inside in arriving)
            found += sum(max(0.0, wait - hidden) for wait in waits)
        slowest = max(slowest, found)
    return total + slowest


def gathered_bytes(shape: AttentionShape) -> float:
    """Bytes of all keys and values, and of their gradients as they are summed."""
    whole = 2 * shape.length * shape.batch * shape.kv_heads * shape.head_dim
    return whole * (shape.itemsize + summed(shape.itemsize))
