"""Ranks as threads of which one runs at a time, in an order that a seed decides."""

import dataclasses
import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from parallel_ops.comm.errors import PeerError

R = TypeVar("R")


@dataclasses.dataclass
class _Waiting:
    ready: Callable[[], bool]
    op: object
    what: str

    def __str__(self) -> str:
        return f"{self.what} ({self.op})"


class Turns:
    """Lets one rank run at a time, and notices when none can go on; the same seed gives the same run.

    Args:
        size: Number of ranks.
        seed: Who goes next whenever several could. ``None``: the lowest rank after the one that ran.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self._size = size
        self._random = None if seed is None else random.Random(seed)
        self._lock = threading.Lock()
        # One for each thread: each is woken for its own turn, not all 16 for everybody's.
        self._turns = [threading.Condition(self._lock) for _ in range(size)]
        self._running: int | None = None
        self._waiting: dict[int, _Waiting] = {rank: _Waiting(lambda: True, "", "to start") for rank in range(size)}
        self._ended: dict[int, BaseException | None] = {}
        self._stuck: dict[int, str] = {}

    def outcomes(self, main: Callable[[int], R]) -> list[R | BaseException]:
        """What ``main(rank)`` returned on each rank, or the exception that it ended with."""
        results: list[Any] = [None] * self._size

        def serve(rank: int) -> None:
            try:
                with self._lock:
                    self._turns[rank].wait_for(lambda: self._running == rank)
                results[rank] = main(rank)
            except BaseException as error:
                results[rank] = error
            with self._lock:
                self._ended[rank] = results[rank] if isinstance(results[rank], BaseException) else None
                self._pass_on(rank)

        threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        with self._lock:
            self._pass_on(self._size - 1)
        for thread in threads:
            thread.join()
        return results

    def give(self, rank: int, ready: Callable[[], bool], op: object, what: str) -> None:
        """Lets others run until ``ready()``. PeerError if that cannot come about any more."""
        with self._lock:
            self._waiting[rank] = _Waiting(ready, op, what)
            self._pass_on(rank)
            self._turns[rank].wait_for(lambda: self._running == rank)
            in_vain = self._stuck.pop(rank, None)
        if in_vain is not None:
            raise PeerError(in_vain)

    def _pass_on(self, rank: int) -> None:
        self._running = self._next(rank)
        if self._running is not None:
            self._turns[self._running].notify()

    def _next(self, rank: int) -> int | None:
        if self._stuck:  # the ranks of a deadlock end one after another
            return min(self._stuck)
        able = [r for r in sorted(self._waiting) if self._waiting[r].ready()]
        if able:
            after = [r for r in able if r > rank]
            chosen = self._random.choice(able) if self._random else (after or able)[0]
            del self._waiting[chosen]
            return chosen
        if self._waiting:
            self._stuck = {r: self._why(r) for r in self._waiting}
            self._waiting.clear()
            return min(self._stuck)
        return None

    def _why(self, rank: int) -> str:
        own = self._waiting[rank]
        others = [f"rank {r} waits {w}" for r, w in sorted(self._waiting.items()) if r != rank]
        for r, error in sorted(self._ended.items()):
            others.append(f"rank {r} has finished" if error is None else f"rank {r} raised {type(error).__name__}")
        return f"{own.op}: rank {rank} waits {own.what}, in vain: {', '.join(others) or 'there is no other rank'}"


def without_failures(outcomes: list[R | BaseException]) -> list[R]:
    """The results. Raises a rank's own exception, if one ended with one; else PeerError, if ranks waited in vain."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for failure in sorted(failures, key=lambda f: isinstance(f, PeerError)):
        raise failure
    return outcomes  # type: ignore[return-value]
