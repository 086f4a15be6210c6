"""Ranks as threads of which one runs at a time, in a random order, with messages as NCCL orders them.

Operations of a communicator run in order on each rank: one that waits for its peer holds back those behind it. Which
operations share a communicator is a choice of the test.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from parallel_ops.pipeline_parallel.messages import Key


class Deadlock(RuntimeError):
    """Every rank that is left waits for another."""


class _Operation:
    def __init__(self, tensor: Tensor, receives: bool, key: Key) -> None:
        self.tensor, self.receives, self.key, self.done = tensor, receives, key, False


class World:
    """The ranks of a run.

    Args:
        size: Number of ranks. seed: Of the order in which they run.
        communicator: Of (rank, peer, receives), the communicator of an operation on a rank.
    """

    def __init__(self, size: int, seed: int, communicator: Callable[[int, int, bool], Any]) -> None:
        self._size, self._random, self._communicator = size, random.Random(seed), communicator
        self._queues: dict[tuple[int, Any], deque[tuple[int, _Operation]]] = {}
        self._turn, self._live, self._blocked = 0, set(range(size)), set[int]()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self.most_posted = 0

    def run(self, function: Callable[[int, "Link"], Any]) -> list[Any]:
        """What ``function(rank, link)`` returned on each rank.

        Raises:
            Deadlock: no rank could go on. Any other error that a rank raised.
        """
        results: list[Any] = [None] * self._size

        def work(rank: int) -> None:
            try:
                self._await_turn(rank)
                results[rank] = function(rank, Link(self, rank))
            except BaseException as error:
                self._failure = self._failure or error
            with self._changed:
                self._live.discard(rank)
                self._choose()

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if self._failure is not None:
            raise self._failure
        return results

    def post(self, rank: int, peer: int, operation: _Operation) -> None:
        queue = self._queues.setdefault((rank, self._communicator(rank, peer, operation.receives)), deque())
        queue.append((peer, operation))
        self.most_posted = max(self.most_posted, sum(o.receives for q in self._queues.values() for _, o in q))
        self._match()

    def switch(self, rank: int, *, blocked: bool) -> None:
        """Lets another rank run; ``blocked``: this one cannot go on before a message arrives."""
        with self._changed:
            if blocked:
                self._blocked.add(rank)
            self._choose()
        self._await_turn(rank)

    def _match(self) -> None:
        """Completes operations that are first on both of their ranks, until there are none."""
        found = True
        while found:
            found = False
            for (rank, _), queue in self._queues.items():
                if not queue or queue[0][1].receives:
                    continue
                peer, sent = queue[0]
                other = self._queues.get((peer, self._communicator(peer, rank, True)))
                if not other or other[0][0] != rank or not other[0][1].receives:
                    continue
                received = other[0][1]
                assert received.key == sent.key, (received.key, sent.key)
                received.tensor.copy_(sent.tensor)
                sent.done = received.done = found = True
                queue.popleft()
                other.popleft()
                self._blocked.clear()

    def _choose(self) -> None:
        ready = sorted(self._live - self._blocked)
        if not ready and self._live:
            self._failure = self._failure or Deadlock(f"ranks {sorted(self._live)} wait for each other")
            self._blocked.clear()
        elif ready:
            self._turn = self._random.choice(ready)
        self._changed.notify_all()

    def _await_turn(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank or self._failure is not None, 60)
        if self._failure is not None:
            raise self._failure


class Link:
    """The messages of a rank, as ``parallel_ops.pipeline_parallel.messages.Link``."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def send(self, tensor: Tensor, rank: int, key: Key) -> "_Work":
        return self._post(_Operation(tensor.clone(), False, key), rank)

    def receive(self, tensor: Tensor, rank: int, key: Key) -> "_Work":
        tensor.fill_(float("nan"))
        return self._post(_Operation(tensor, True, key), rank)

    def _post(self, operation: _Operation, peer: int) -> "_Work":
        self._world.post(self._rank, peer, operation)
        self._world.switch(self._rank, blocked=False)
        return _Work(self._world, self._rank, operation)


class _Work:
    def __init__(self, world: World, rank: int, operation: _Operation) -> None:
        self._world, self._rank, self._operation = world, rank, operation

    def wait(self) -> None:
        while not self._operation.done:
            self._world.switch(self._rank, blocked=True)

    def is_completed(self) -> bool:
        return self._operation.done
