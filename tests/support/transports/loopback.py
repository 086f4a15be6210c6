"""Ranks inside one process, one at a time, in an order that a seed decides.

The code of a rank is what it would be over any transport: a function of its end of the group. It lets others run where
it posts or waits.

What other transports forgive sometimes, this one refuses always:

    a deadlock                          raises on every rank that is in it, with what each of them waits for
    reading a chunk before its wait     sees bytes of 0xFF (NaN), since the chunk is put there by the wait
    writing a chunk before its wait     sends what was written, since the chunk is read as late as is allowed
    a chunk never received, a handle never waited for, sizes that differ      raise

With ``credits=0`` a send is complete when its receive is posted, as in NCCL; with ``credits=k`` up to k chunks between
two ranks may be sent ahead.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.transport.base import Capabilities, Handle, Receive, Send, Transport, as_bytes
from support.ranks.turns import Turns, without_failures

R = TypeVar("R")


class LoopbackGroup(Generic[R]):
    """A group of ``size`` ranks.

    Args:
        size: how many ranks.
        seed: which rank goes next whenever several could. ``None``: the lowest after the one that ran.
        credits: how many chunks may be sent from one rank to another before they are received.
    """

    def __init__(self, size: int, *, seed: int | None = None, credits: int = 0) -> None:
        self.size, self.seed, self.credits = size, seed, credits

    def run(self, rank_main: Callable[["LoopbackTransport"], R]) -> list[R]:
        """What ``rank_main`` returned on each rank.

        Raises the first rank's own exception, if a rank ended with one; else PeerError, if some ranks waited in vain.
        """
        return without_failures(self.outcomes(rank_main))

    def outcomes(self, rank_main: Callable[["LoopbackTransport"], R]) -> list[R | BaseException]:
        """What ``rank_main`` returned on each rank, or the exception that it ended with."""
        turns, network = Turns(self.size, self.seed), _Network(self.credits)
        ends = [LoopbackTransport(self, rank, turns, network) for rank in range(self.size)]

        def main(rank: int) -> R:
            result = rank_main(ends[rank])
            ends[rank].check_finished()
            return result

        results = turns.outcomes(main)
        for source, target in network.unreceived():
            if not isinstance(results[source], BaseException):
                results[source] = PeerError(f"rank {source} sent a chunk that rank {target} never received")
        return results


class _Transfer:
    """A chunk from its first post to its last wait."""

    def __init__(self) -> None:
        self.source: Tensor | None = None
        self.target: Tensor | None = None
        self._sent: Tensor | None = None

    @property
    def matched(self) -> bool:
        return self.source is not None and self.target is not None

    def snapshot(self) -> Tensor:
        """What was sent, read when the first of the two ranks has waited."""
        if self._sent is None:
            assert self.source is not None
            self._sent = self.source.clone()
        return self._sent


class _Network:
    """The transfers between every two ranks, matched in the order in which they were posted."""

    def __init__(self, credits: int) -> None:
        self.credits = credits
        self._links: dict[tuple[int, int], list[_Transfer]] = collections.defaultdict(list)
        self._posted: dict[tuple[int, int, type], int] = collections.Counter()
        self.at_barrier: dict[int, int] = collections.Counter()

    def post(self, source: int, target: int, chunk: Send | Receive) -> _Transfer:
        link, key = self._links[source, target], (source, target, type(chunk))
        if self._posted[key] == len(link):
            link.append(_Transfer())
        transfer = link[self._posted[key]]
        self._posted[key] += 1
        if isinstance(chunk, Send):
            transfer.source = as_bytes(chunk.tensor)
        else:
            transfer.target = as_bytes(chunk.tensor)
            transfer.target.fill_(0xFF)
        return transfer

    def unreceived(self) -> list[tuple[int, int]]:
        """Between which ranks a chunk was sent that nobody posted a receive for."""
        return sorted(ends for ends, link in self._links.items() if any(t.target is None for t in link))

    def may_leave(self, source: int, target: int, transfer: _Transfer) -> bool:
        """The chunk is received, or there is credit for it."""
        if transfer.matched:
            return True
        ahead = [t for t in self._links[source, target] if not t.matched]
        return ahead.index(transfer) < self.credits


class _LoopbackHandle:
    def __init__(self, end: "LoopbackTransport", op: str, chunk: Send | Receive, transfer: _Transfer) -> None:
        self._end, self.op, self._chunk, self._transfer = end, op, chunk, transfer
        self.done = False

    def __str__(self) -> str:
        verb = "for a chunk from" if isinstance(self._chunk, Receive) else "for a chunk to be received by"
        return f"{verb} rank {self._chunk.peer}"

    def wait(self) -> None:
        if self.done:
            return
        end, transfer = self._end, self._transfer
        if isinstance(self._chunk, Send):
            end.wait_until(lambda: end.network.may_leave(end.rank, self._chunk.peer, transfer), self.op, str(self))
            transfer.snapshot()
        else:
            end.wait_until(lambda: transfer.matched, self.op, str(self))
        self.done = True
        if transfer.source is not None and transfer.target is not None:
            if transfer.source.numel() != transfer.target.numel():
                raise PeerError(
                    f"{self.op}: rank {end.rank} waits {self}, and the two do not agree on its size: "
                    f"{transfer.source.numel()} bytes sent, {transfer.target.numel()} expected"
                )
            if isinstance(self._chunk, Receive):
                transfer.target.copy_(transfer.snapshot())


class LoopbackTransport(Transport):
    """One rank's end of a LoopbackGroup."""

    def __init__(self, group: LoopbackGroup[Any], rank: int, turns: Turns, network: _Network) -> None:
        super().__init__(rank, group.size, Capabilities("loopback", ("cpu",), False))
        self._turns, self.network = turns, network
        self._handles: list[_LoopbackHandle] = []

    def _start(self, op: str, chunks: Sequence[Send | Receive]) -> list[Handle]:
        handles = []
        for chunk in chunks:
            ends = (self.rank, chunk.peer) if isinstance(chunk, Send) else (chunk.peer, self.rank)
            handles.append(_LoopbackHandle(self, op, chunk, self.network.post(*ends, chunk)))
        self._handles += handles
        self.wait_until(lambda: True, op, "")
        return list(handles)

    def barrier(self, op: str) -> None:
        counts = self.network.at_barrier
        counts[self.rank] += 1
        own = counts[self.rank]
        self.wait_until(lambda: all(counts[r] >= own for r in range(self.size)), op, "at a barrier")

    def wait_until(self, ready: Callable[[], bool], op: str, what: str) -> None:
        self._turns.give(self.rank, ready, op, what)

    def check_finished(self) -> None:
        """PeerError if the rank left something behind."""
        left = [h for h in self._handles if not h.done]
        if left:
            raise PeerError(f"{left[0].op}: rank {self.rank} ended without waiting {left[0]}")
