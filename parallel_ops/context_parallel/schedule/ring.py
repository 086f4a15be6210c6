"""Attention over the keys of all ranks: block by block as they arrive, or after all have been gathered.

    ring         step k = 0, 1, ...: rank r attends to the keys of rank r - k and merges the result into its own, while
                 the keys of the next steps are in flight. Backward: the same, and the gradient of the keys of rank
                 r - k is sent to it in fp32; each rank adds what it receives to its own, in the order r, r + 1, ...
    all-gather   the same steps, but the keys of all of them are attended to at once

With several ranks a node, a step is a node: rank r gets the keys that any query of its node sees from the rank with its
place on node n - k, and the ranks of a node hand on to each other what they got, for the queries of each. Gradients of
keys go the same way back: summed on the node, then sent to the owner. So a node receives and sends one copy of each key
and gradient in the place of one for each of its ranks. The keys of the own node are step 0, behind those of the rank.

Keys are sent directly to the ranks that need them, those of a step in one message. Keys that the receiver's queries do
not see are not sent. Under a causal mask in zigzag layout this saves a quarter of the bytes of a ring that passes
everything on; under a window, all keys before it. With this package's kernels nothing is rounded in between and sums
have a fixed order, so the error does not grow with the ring and results are bitwise reproducible. torch's kernels round
each block's result, and its share of each gradient, to 16 bits.

On CUDA one host thread posts all exchanges, on every rank in the same order (see ``comm/transport/base.py``).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.comm.transport.base import Exchange, Receive, Send, Transport, in_flight
from parallel_ops.context_parallel.schedule.blocks import Gradients, SoftmaxAccumulator, pack_keys
from parallel_ops.context_parallel.token_ranges import count_tokens, local_slice, merged, visible_keys
from parallel_ops.ops.attention.options import AttentionOptions

Parts = tuple[TokenRange, ...]


class Rows(NamedTuple):
    """Rows ``[tokens, ...]`` of these tokens: keys and values packed, or their gradients; valid after ``wait``."""

    parts: Parts
    rows: Tensor
    exchange: Exchange | None = None

    def wait(self) -> "Rows":
        if self.exchange is not None:
            self.exchange.wait()
        return self

    def of(self, parts: Parts) -> Tensor:
        """The rows of some of the tokens, contiguous; copied only if they are apart."""
        places = [local_slice(part, self.parts) for part in parts]
        if not places:
            return self.rows[:0]
        if all(place.step == 1 for place in places) and all(a.stop == b.start for a, b in pairwise(places)):
            return self.rows[places[0].start : places[-1].stop]
        return torch.cat([self.rows[place] for place in places])

    def add_to(self, total: "Rows") -> None:
        for part in self.parts:
            total.rows[local_slice(part, total.parts)] += self.rows[local_slice(part, self.parts)]


def joined(found: Sequence[Rows], whole: Parts | None = None) -> Rows:
    """All rows, of the tokens ``whole``; without, in the order of the sequence if ranks have adjacent tokens."""
    if whole is None:
        if len(found) == 1:
            return found[0]
        whole = merged([part for rows in found for part in rows.parts])
    out = found[0].rows.new_empty((count_tokens(whole), *found[0].rows.shape[1:]))
    for rows in found:
        for part in rows.parts:
            out[local_slice(part, whole)] = rows.rows[local_slice(part, rows.parts)]
    return Rows(whole, out)


@dataclass(frozen=True)
class Ring:
    """The ranks that share the keys of an attention.

    Args:
        op: named in errors.
        ranks: their numbers in the transport's group, in the order of the ring.
        at: the index of this rank among them.
        shards: the tokens of each rank.
        mask: options whose mask the host knows; without it keys of other documents are sent too.
        per_node: ranks of a node, which are adjacent in the ring; 1 for a ring of one level.
    """

    op: str
    transport: Transport
    ranks: Sequence[int]
    at: int
    shards: Sequence[Parts]
    options: AttentionOptions
    mask: AttentionOptions | None = None
    per_node: int = 1

    @property
    def own(self) -> Parts:
        return self.shards[self.at]

    @property
    def nodes(self) -> int:
        return len(self.shards) // self.per_node

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """The other ranks of the node in the order of exchanges: the one sent to and the one received from."""
        m = self.per_node
        first, place = self.at // m * m, self.at % m
        return [(first + (place + k) % m, first + (place - k) % m) for k in range(1, m)]

    def origin(self, rank: int, step: int) -> int:
        """The owner of the keys that come to ``rank`` from another node in this step."""
        return (rank - step * self.per_node) % len(self.shards)

    def parts(self, source: int, target: int) -> Parts:
        """The keys of ``source`` that are visible to queries of ``target``."""
        return self._visible(source, self.shards[target])

    def crossing(self, source: int, target: int) -> Parts:
        """The keys of ``source`` that are visible to queries of any rank on the node of ``target``."""
        first = target // self.per_node * self.per_node
        return self._visible(source, tuple(q for shard in self.shards[first : first + self.per_node] for q in shard))

    def _visible(self, source: int, queries: Parts) -> Parts:
        limits = None if self.mask is None else self.mask.limits(queries)
        return visible_keys(self.shards[source], queries, self.options.left, self.options.right, limits)

    def exchange(self, sent: Tensor, to: int, parts: Parts, source: int) -> Rows:
        """Posts a message to one rank and receives the rows of ``parts`` from another."""
        received = sent.new_empty((count_tokens(parts), *sent.shape[1:]))
        ends = [Send(sent, self.ranks[to])], [Receive(received, self.ranks[source])]
        return Rows(parts, received, Exchange(self.op, self.transport, *ends))


def ring_forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, all_gather: bool) -> SoftmaxAccumulator:
    """The attention of this rank's queries.

    Args:
        q: ``[s, b, h, d]``; k: ``[s, b, kv_heads, d]``; v: ``[s, b, kv_heads, d_v]``; of this rank's tokens.
    """
    result = SoftmaxAccumulator(q, v.shape[3], ring.own, ring.options)
    steps = key_steps(ring, pack_keys(k, v), all_gather=all_gather)
    arriving = (keys for _, keys in steps)
    for keys in [joined(list(arriving))] if all_gather else arriving:
        result.add(keys.rows, keys.parts)
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
    gradients, reducer = Gradients(grad, q, rows, ring.own, ring.options, out), KeyGradients(ring)
    steps = key_steps(ring, pack_keys(k, v), all_gather=all_gather)
    if all_gather:
        numbers, arrived = zip(*steps, strict=True)
        keys = joined(arrived)
        shares = Rows(keys.parts, gradients.add(keys.rows, keys.parts))
        for number, (parts, *_) in zip(numbers, arrived, strict=True):
            reducer.add(number, Rows(parts, shares.of(parts)))
    else:
        for number, (parts, arriving, _) in steps:
            reducer.add(number, Rows(parts, gradients.add(arriving, parts)))
    gradients.finish()
    return gradients.dq, reducer.total()


def key_steps(ring: Ring, kv: Tensor, *, all_gather: bool = False) -> Iterator[tuple[int, Rows]]:
    """Steps and the keys of each that this rank's queries see; -1 and its own come first. The exchanges of the next
    steps, with ``all_gather`` those of all, are on their way while the caller computes.

    Args:
        kv: k and v of this rank, packed.
    """
    ahead = ring.nodes if all_gather else in_flight(ring.transport)
    from_nodes = _from_nodes(ring, kv, ahead)
    if ring.per_node == 1:
        for number, keys in enumerate(from_nodes):
            yield number or -1, keys
        return
    held = next(from_nodes)
    arriving = _handed_on(ring, 0, held)
    yield -1, held
    for number in range(ring.nodes):
        arrived = arriving
        if number:  # in step 0 what this rank has itself is attended to already
            parts = ring.parts(ring.origin(ring.at, number), ring.at)
            arrived = [Rows(parts, held.of(parts)), *arrived]
        if number + 1 < ring.nodes:
            held = next(from_nodes)
            arriving = _handed_on(ring, number + 1, held)
        yield number, joined([rows.wait() for rows in arrived])


def _from_nodes(ring: Ring, kv: Tensor, ahead: int) -> Iterator[Rows]:
    """This rank's keys, then those that it gets from the rank with its place on each other node."""
    own = Rows(ring.own, kv)

    def post(step: int) -> Rows:
        to, source = ring.origin(ring.at, -step), ring.origin(ring.at, step)
        return ring.exchange(own.of(ring.crossing(ring.at, to)), to, ring.crossing(source, ring.at), source)

    steps = iter(range(1, ring.nodes))
    posted = deque(map(post, islice(steps, ahead)))
    yield own
    while posted:
        arrived = posted.popleft().wait()
        posted.extend(map(post, islice(steps, 1)))
        yield arrived


def _handed_on(ring: Ring, step: int, held: Rows) -> list[Rows]:
    """Posts what the ranks of the node hand on to each other of the keys that they got in this step."""
    mine = ring.origin(ring.at, step)
    return [
        ring.exchange(held.of(ring.parts(mine, to)), to, ring.parts(ring.origin(source, step), ring.at), source)
        for to, source in ring.neighbours
    ]


class KeyGradients:
    """The sum of the gradients of this rank's keys, from the queries of all ranks.

    Those of other ranks' keys are sent to their owners, by way of the rank of the node that got the keys. What is sent
    is in flight during the next step's computation.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._summed: deque[tuple[int, Rows, list[Rows]]] = deque()  # on the node
        self._returned: deque[Rows] = deque()

    def add(self, step: int, shares: Rows) -> None:
        """The gradients of the keys of a step from this rank's queries. Those of its own keys come first."""
        ring = self._ring
        if step < 0:
            self._total = shares
            return
        if ring.per_node == 1:
            self._return(step, shares.rows)
            return
        mine = ring.origin(ring.at, step)
        arriving = [
            ring.exchange(shares.of(ring.parts(ring.origin(to, step), ring.at)), to, ring.parts(mine, source), source)
            for to, source in ring.neighbours
        ]
        held = self._total
        if step:
            crossed, parts = ring.crossing(mine, ring.at), ring.parts(mine, ring.at)
            held = Rows(crossed, shares.rows.new_zeros((count_tokens(crossed), *shares.rows.shape[1:])))
            Rows(parts, shares.of(parts)).add_to(held)
        self._summed.append((step, held, arriving))
        if len(self._summed) > 1:
            self._sum()

    def total(self) -> Tensor:
        while self._summed:
            self._sum()
        while self._returned:
            self._returned.popleft().wait().add_to(self._total)
        return self._total.rows

    def _sum(self) -> None:
        step, held, arriving = self._summed.popleft()
        for rows in arriving:
            rows.wait().add_to(held)
        if step:
            self._return(step, held.rows)

    def _return(self, step: int, shares: Tensor) -> None:
        """Sends the gradients of the keys received from another node, and receives those of the keys sent to one."""
        ring = self._ring
        owner, source = ring.origin(ring.at, step), ring.origin(ring.at, -step)
        self._returned.append(ring.exchange(shares, owner, ring.crossing(ring.at, source), source))
        if len(self._returned) > 1:  # it was in flight during the last step's computation
            self._returned.popleft().wait().add_to(self._total)
