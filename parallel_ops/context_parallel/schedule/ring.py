"""Attention over the keys of all ranks: block by block as they arrive, or once all are there.

    ring       step k = 0, 1, ...: rank r attends to the keys of rank r - k and merges the result into its own; those of
               the next steps are on their way. Backward: the same, and the gradient of the keys of rank r - k goes
               straight there, in fp32; that rank adds what arrives to its own, in the order r, r + 1, ...
    gathered   all keys arrive, then are attended to at once. Backward: the same, and each rank adds what all ranks have
               for its keys in rank order

Keys go straight to who needs them: in step k every rank sends to one rank and receives from one, and what the queries
of the receiver cannot see does not travel. Under a causal mask in zigzag that is a quarter of the bytes of a ring that
hands everything on; under a window, all that lies further back. Nothing is rounded on the way, and a sum has one order,
so the error does not grow with the ring and every run has the same bits.

With CUDA's streams all is posted by one host thread, each rank in the same order (see ``comm/transport.py``).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from parallel_ops.comm.transport.base import Receive, Send, Transport
from parallel_ops.comm.transport.exchange import Exchange, in_flight
from parallel_ops.context_parallel.schedule.blocks import Gradients, Options, SoftmaxAccumulator
from parallel_ops.context_parallel.token_ranges import Run, merged, seen, tokens, where


@dataclass(frozen=True)
class Ring:
    """Ranks whose keys belong to one attention.

    Args:
        op: named in errors.
        ranks: their numbers in the transport's group, in the order of the ring.
        at: which of them this one is.
        shards: the tokens of each.
    """

    op: str
    transport: Transport
    ranks: Sequence[int]
    at: int
    shards: Sequence[tuple[Run, ...]]
    options: Options

    @property
    def own(self) -> tuple[Run, ...]:
        return self.shards[self.at]

    def parts(self, source: int, target: int) -> tuple[Run, ...]:
        """The keys of ``source`` that queries of ``target`` see."""
        return seen(self.shards[source], self.shards[target], self.options.causal, self.options.window)


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *, gathered: bool) -> SoftmaxAccumulator:
    """The attention of this rank's queries.

    Args:
        q: ``[s, b, h, d]``; k, v: ``[s, b, kv_heads, d]``, contiguous: this rank's.
        sink: ``[h]``.
    """
    carry = SoftmaxAccumulator(q, ring.own, sink, ring.options)
    if gathered:
        parts, keys = _gather(ring, k, v)
        carry.add(keys[0], keys[1], parts)
    else:
        feed = KVPrefetcher(ring, k, v)
        carry.add(k, v, ring.own)
        for _ in range(1, len(ring.shards)):
            parts, keys = feed.take()
            carry.add(keys[0], keys[1], parts)
    carry.finish()
    return carry


def backward(
    ring: Ring, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, *, gathered: bool
) -> tuple[Tensor, Tensor]:
    """dq, and dk and dv as ``[2, s, b, kv_heads, d]``, of this rank's tokens, in the dtype of ``rows``."""
    gradients = Gradients(grad, q, rows, ring.own, ring.options)
    if gathered:
        parts, keys = _gather(ring, k, v)
        total = _scatter(ring, gradients.add(keys[0], keys[1], parts), parts)
    else:
        feed = KVPrefetcher(ring, k, v)
        returns = KVGradReducer(ring, gradients.add(k, v, ring.own))
        for step in range(1, len(ring.shards)):
            parts, keys = feed.take()
            returns.post(step, gradients.add(keys[0], keys[1], parts))
        total = returns.total()
    gradients.finish()
    return gradients.dq, total


def _sends(ring: Ring, k: Tensor, v: Tensor, to: int) -> list[Send]:
    parts = [where(part, ring.own) for part in ring.parts(ring.at, to)]
    return [Send(t[part], ring.ranks[to]) for t in (k, v) for part in parts]


def _receives(ring: Ring, keys: Tensor, parts: Sequence[Run], among: Sequence[Run], source: int) -> list[Receive]:
    """Into ``keys`` ``[2, tokens of among, ...]``."""
    return [Receive(t[where(part, among)], ring.ranks[source]) for t in keys for part in parts]


class KVPrefetcher:
    """The keys of the other ranks, one rank after another, of which the next are on their way."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._ring, self._k, self._v = ring, k, v
        self._steps = iter(range(1, len(ring.shards)))
        self._posted: deque[tuple[tuple[Run, ...], Tensor, Exchange]] = deque()
        for _ in range(in_flight(ring.transport)):
            self._post()

    def take(self) -> tuple[tuple[Run, ...], Tensor]:
        """What the queries see of the next rank's keys: its places, and k and v."""
        parts, keys, exchange = self._posted.popleft()
        exchange.wait()
        self._post()
        return parts, keys

    def _post(self) -> None:
        for step in self._steps:
            ring, k = self._ring, self._k
            size = len(ring.shards)
            to, source = (ring.at + step) % size, (ring.at - step) % size
            parts = ring.parts(source, ring.at)
            keys = k.new_empty((2, tokens(parts), *k.shape[1:]))
            receives = _receives(ring, keys, parts, parts, source)
            self._posted.append(
                (parts, keys, Exchange(ring.op, ring.transport, _sends(ring, k, self._v, to), receives))
            )
            return


class KVGradReducer:
    """The gradients of keys, on their way to whose keys they are.

    Args:
        total: ``[2, s, ...]``: what this rank's queries give for its own keys. The others' shares are added to it.
    """

    def __init__(self, ring: Ring, total: Tensor) -> None:
        self._ring, self._total = ring, total
        self._posted: deque[tuple[tuple[Run, ...], Tensor, Exchange]] = deque()

    def post(self, step: int, shares: Tensor) -> None:
        """Sends the gradient of the keys that came in this step, and receives that of those that left."""
        ring, total = self._ring, self._total
        size = len(ring.shards)
        owner, source = (ring.at - step) % size, (ring.at + step) % size
        parts = ring.parts(ring.at, source)
        landing = total.new_empty((2, tokens(parts), *total.shape[2:]))
        sends, receives = [Send(shares, ring.ranks[owner])], [Receive(landing, ring.ranks[source])]
        self._posted.append((parts, landing, Exchange(ring.op, ring.transport, sends, receives)))
        if len(self._posted) > 1:  # it had the last step's computation to arrive
            self._add()

    def total(self) -> Tensor:
        while self._posted:
            self._add()
        return self._total

    def _add(self) -> None:
        parts, landing, exchange = self._posted.popleft()
        exchange.wait()
        _add_parts(self._total, self._ring.own, landing, parts)


def _add_parts(total: Tensor, own: Sequence[Run], shares: Tensor, parts: Sequence[Run]) -> None:
    for part in parts:
        total[:, where(part, own)] += shares[:, where(part, parts)]


def _gather(ring: Ring, k: Tensor, v: Tensor) -> tuple[tuple[Run, ...], Tensor]:
    """All keys that the queries see, in the order of the sequence where ranks have adjacent tokens."""
    size, at = len(ring.shards), ring.at
    parts = [ring.own if source == at else ring.parts(source, at) for source in range(size)]
    everything = merged([part for of_rank in parts for part in of_rank])
    keys = k.new_empty((2, tokens(everything), *k.shape[1:]))
    exchanges = []
    for step in range(1, size):
        to, source = (at + step) % size, (at - step) % size
        receives = _receives(ring, keys, parts[source], everything, source)
        exchanges.append(Exchange(ring.op, ring.transport, _sends(ring, k, v, to), receives))
    for t, own in zip(keys, (k, v), strict=True):
        for part in ring.own:
            t[where(part, everything)] = own[where(part, ring.own)]
    for exchange in exchanges:
        exchange.wait()
    return everything, keys


def _scatter(ring: Ring, shares: Tensor, places: Sequence[Run]) -> Tensor:
    """The gradients of this rank's keys, from those of all keys that each rank has seen; summed in rank order."""
    size, at = len(ring.shards), ring.at
    total = shares.new_zeros((2, tokens(ring.own), *shares.shape[2:]))
    landings, exchanges = [], []
    for source in range(size):
        parts = ring.own if source == at else ring.parts(at, source)
        landings.append((parts, shares.new_empty((2, tokens(parts), *shares.shape[2:]))))
    for step in range(1, size):
        to, source = (at + step) % size, (at - step) % size
        sends = [Send(t[where(part, places)], ring.ranks[to]) for t in shares for part in ring.parts(to, at)]
        parts, landing = landings[source]
        exchanges.append(Exchange(ring.op, ring.transport, sends, _receives(ring, landing, parts, parts, source)))
    for part in ring.own:
        landings[at][1][:, where(part, ring.own)] = shares[:, where(part, places)]
    for exchange in exchanges:
        exchange.wait()
    for parts, landing in landings:
        _add_parts(total, ring.own, landing, parts)
    return total
