"""Attention over the keys of all ranks: block by block as they arrive, or after all have been gathered.

    ring         step k = 0, 1, ...: rank r attends to the keys of rank r - k and merges the result into its own, while
                 the keys of the next steps are in flight. Backward: the same, and the gradient of the keys of rank
                 r - k is sent to it in fp32; each rank adds what it receives to its own, in the order r, r + 1, ...
    all-gather   all keys are gathered, then attended to at once. Backward: the same, and each rank adds the gradients
                 of its keys in rank order

Keys are sent directly to the ranks that need them: in step k every rank sends to one rank and receives from one, keys
and values of all its tokens in one message. Keys that the receiver's queries do not see are not sent. Under a causal
mask in zigzag layout this saves a quarter of the bytes of a ring that passes everything on; under a window, all keys
before it. With this package's kernels nothing is rounded in between and sums have a fixed order, so the error does not
grow with the ring and results are bitwise reproducible. torch's kernels round each block's result, and its share of
each gradient, to 16 bits.

On CUDA one host thread posts all exchanges, on every rank in the same order (see ``comm/transport/base.py``).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.comm.transport.base import Receive, Send, Transport
from parallel_ops.comm.transport.exchange import Exchange, in_flight
from parallel_ops.context_parallel.schedule.blocks import Gradients, SoftmaxAccumulator, pack_keys, query_limits
from parallel_ops.context_parallel.token_ranges import count_tokens, local_slice, merged, visible_keys
from parallel_ops.ops.attention.options import AttentionOptions


@dataclass(frozen=True)
class Ring:
    """The ranks that share the keys of an attention.

    Args:
        op: named in errors.
        ranks: their numbers in the transport's group, in the order of the ring.
        at: the index of this rank among them.
        shards: the tokens of each rank.
        ranges: the key ranges of ``options`` on the CPU; without them keys of other documents are sent too.
        levels: rings between nodes and inside of one, by which keys are gathered in two steps.
    """

    op: str
    transport: Transport
    ranks: Sequence[int]
    at: int
    shards: Sequence[tuple[TokenRange, ...]]
    options: AttentionOptions
    ranges: Tensor | None = None
    levels: "tuple[Ring, Ring] | None" = None

    @property
    def own(self) -> tuple[TokenRange, ...]:
        return self.shards[self.at]

    def parts(self, source: int, target: int) -> tuple[TokenRange, ...]:
        """The keys of ``source`` that are visible to queries of ``target``."""
        queries, ranges = self.shards[target], self.ranges
        limits = None if ranges is None else query_limits(ranges, queries)
        return visible_keys(self.shards[source], queries, self.options.left, self.options.right, limits)


def ring_forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, all_gather: bool) -> SoftmaxAccumulator:
    """The attention of this rank's queries.

    Args:
        q: ``[s, b, h, d]``; k: ``[s, b, kv_heads, d]``; v: ``[s, b, kv_heads, d_v]``; of this rank's tokens.
    """
    result = SoftmaxAccumulator(q, v.shape[3], ring.own, ring.options)
    if all_gather:
        parts, keys = _all_gather(ring, pack_keys(k, v))
        result.add(keys, parts)
    else:
        kv = pack_keys(k, v)
        prefetcher = KVPrefetcher(ring, kv)
        result.add(kv, ring.own)
        for _ in range(1, len(ring.shards)):
            parts, keys = prefetcher.take()
            result.add(keys, parts)
    result.finish()
    return result


def ring_backward(
    ring: Ring, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, out: Tensor | None = None, *,
    all_gather: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq, and dk and dv packed as ``[s, b, kv_heads, d + d_v]``, of this rank's tokens, in the dtype of ``rows``.

    Args:
        rows: result of ``attention_gradient_rows`` for the final output. out: that output, if it is on this rank.
    """
    gradients = Gradients(grad, q, rows, ring.own, ring.options, out)
    if all_gather:
        parts, keys = _all_gather(ring, pack_keys(k, v))
        shares = gradients.add(keys, parts)
        for level in reversed(ring.levels or (ring,)):
            shares, parts = _scatter(level, shares, parts), level.own
        total = shares
    else:
        kv = pack_keys(k, v)
        prefetcher = KVPrefetcher(ring, kv)
        reducer = KVGradReducer(ring, gradients.add(kv, ring.own))
        for step in range(1, len(ring.shards)):
            parts, keys = prefetcher.take()
            reducer.post(step, gradients.add(keys, parts))
        total = reducer.total()
    gradients.finish()
    return gradients.dq, total


def _send(ring: Ring, kv: Tensor, to: int) -> list[Send]:
    """All keys for the rank in one message, copied together only if they are apart; none if it sees none."""
    places = [local_slice(part, ring.own) for part in ring.parts(ring.at, to)]
    if not places:
        return []
    adjacent = all(a.stop == b.start for a, b in pairwise(places))
    keys = kv[places[0].start : places[-1].stop] if adjacent else torch.cat([kv[place] for place in places])
    return [Send(keys, ring.ranks[to])]


def _sends(ring: Ring, kv: Tensor, to: int) -> list[Send]:
    return [Send(kv[local_slice(part, ring.own)], ring.ranks[to]) for part in ring.parts(ring.at, to)]


def _receives(
    ring: Ring, keys: Tensor, parts: Sequence[TokenRange], buffer: Sequence[TokenRange], source: int
) -> list[Receive]:
    """Receives into ``keys``, which holds the tokens of ``buffer``."""
    return [Receive(keys[local_slice(part, buffer)], ring.ranks[source]) for part in parts]


class KVPrefetcher:
    """Receives the keys of the other ranks one rank after another, and posts the next exchanges ahead.

    Received keys rotate through ``in_flight + 1`` buffers: those on their way, and those attended to.

    Args:
        kv: k and v of this rank, packed.
    """

    def __init__(self, ring: Ring, kv: Tensor) -> None:
        self._ring, self._kv, ahead = ring, kv, in_flight(ring.transport)
        most = max(count_tokens(shard) for shard in ring.shards)
        self._buffers = [kv.new_empty((most, *kv.shape[1:])) for _ in range(min(ahead + 1, len(ring.shards) - 1))]
        self._steps = iter(range(1, len(ring.shards)))
        self._posted: deque[tuple[tuple[TokenRange, ...], Tensor, Exchange]] = deque()
        for _ in range(ahead):
            self._post()

    def take(self) -> tuple[tuple[TokenRange, ...], Tensor]:
        """The next rank's keys that the queries see: their token ranges, and k and v packed."""
        parts, keys, exchange = self._posted.popleft()
        exchange.wait()
        self._post()
        return parts, keys

    def _post(self) -> None:
        for step in self._steps:
            ring, size = self._ring, len(self._ring.shards)
            to, source = (ring.at + step) % size, (ring.at - step) % size
            parts = ring.parts(source, ring.at)
            keys = self._buffers[step % len(self._buffers)][: count_tokens(parts)]
            sends, receives = _send(ring, self._kv, to), [Receive(keys, ring.ranks[source])]
            self._posted.append((parts, keys, Exchange(ring.op, ring.transport, sends, receives)))
            return


class KVGradReducer:
    """Sends the gradients of keys to the ranks that own these, and sums those of this rank's keys.

    Args:
        total: ``[s, ...]``, packed, the gradients of this rank's keys from its own queries. The others are added to it.
    """

    def __init__(self, ring: Ring, total: Tensor) -> None:
        self._ring, self._total = ring, total
        self._posted: deque[tuple[tuple[TokenRange, ...], Tensor, Exchange]] = deque()

    def post(self, step: int, shares: Tensor) -> None:
        """Sends the gradient of the keys received in ``step``, and receives that of the keys sent in it."""
        ring, total = self._ring, self._total
        size = len(ring.shards)
        owner, source = (ring.at - step) % size, (ring.at + step) % size
        parts = ring.parts(ring.at, source)
        received = total.new_empty((count_tokens(parts), *total.shape[1:]))
        sends, receives = [Send(shares, ring.ranks[owner])], [Receive(received, ring.ranks[source])]
        self._posted.append((parts, received, Exchange(ring.op, ring.transport, sends, receives)))
        if len(self._posted) > 1:  # it was in flight during the last step's computation
            self._add()

    def total(self) -> Tensor:
        while self._posted:
            self._add()
        return self._total

    def _add(self) -> None:
        parts, received, exchange = self._posted.popleft()
        exchange.wait()
        _add_parts(self._total, self._ring.own, received, parts)


def _add_parts(total: Tensor, own: Sequence[TokenRange], shares: Tensor, parts: Sequence[TokenRange]) -> None:
    for part in parts:
        total[local_slice(part, own)] += shares[local_slice(part, parts)]


def _all_gather(ring: Ring, kv: Tensor) -> tuple[tuple[TokenRange, ...], Tensor]:
    """``_gather``, in two steps if there are two levels."""
    parts = ring.own
    for level in ring.levels or (ring,):
        parts, kv = _gather(level, kv)
    return parts, kv


def _gather(ring: Ring, kv: Tensor) -> tuple[tuple[TokenRange, ...], Tensor]:
    """All keys visible to the queries, in the order of the sequence if ranks have adjacent tokens."""
    size, at = len(ring.shards), ring.at
    parts = [ring.own if source == at else ring.parts(source, at) for source in range(size)]
    everything = merged([part for of_rank in parts for part in of_rank])
    keys = kv.new_empty((count_tokens(everything), *kv.shape[1:]))
    exchanges = []
    for step in range(1, size):
        to, source = (at + step) % size, (at - step) % size
        receives = _receives(ring, keys, parts[source], everything, source)
        exchanges.append(Exchange(ring.op, ring.transport, _sends(ring, kv, to), receives))
    for part in ring.own:
        keys[local_slice(part, everything)] = kv[local_slice(part, ring.own)]
    for exchange in exchanges:
        exchange.wait()
    return everything, keys


def _scatter(ring: Ring, shares: Tensor, ranges: Sequence[TokenRange]) -> Tensor:
    """The gradients of this rank's keys, summed over all ranks in rank order.

    Args:
        shares: the gradients of the keys ``ranges`` from this rank's queries.
    """
    size, at = len(ring.shards), ring.at
    total = shares.new_zeros((count_tokens(ring.own), *shares.shape[1:]))
    arrivals, exchanges = [], []
    for source in range(size):
        parts = ring.own if source == at else ring.parts(at, source)
        arrivals.append((parts, shares.new_empty((count_tokens(parts), *shares.shape[1:]))))
    for step in range(1, size):
        to, source = (at + step) % size, (at - step) % size
        sends = [Send(shares[local_slice(part, ranges)], ring.ranks[to]) for part in ring.parts(to, at)]
        parts, received = arrivals[source]
        exchanges.append(Exchange(ring.op, ring.transport, sends, _receives(ring, received, parts, parts, source)))
    for part in ring.own:
        arrivals[at][1][local_slice(part, ring.own)] = shares[local_slice(part, ranges)]
    for exchange in exchanges:
        exchange.wait()
    for parts, received in arrivals:
        _add_parts(total, ring.own, received, parts)
    return total
