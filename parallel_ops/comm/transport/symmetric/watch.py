"""Frees the streams of a rank whose peers do not respond.

A thread watches the oldest batch in flight. After the timeout it sets the flags that this rank waits for. It repeats
this until every batch has finished, since a peer that is only late may overwrite a flag. The data received then are
invalid, so the failure is recorded before the first flag is set, and every later call raises it. An error of the
thread, or of an interrupted enqueue, is a failure too.
"""

import collections
import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from parallel_ops.comm._capture import begin_watch_thread
from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.transport.symmetric.lanes import Event, Lane, Memory

_LONGEST_PERIOD = 1.0


@dataclasses.dataclass
class _Batch:
    op: str
    posted: float
    event: Event
    peers: Sequence[int]


class Watch:
    """Watches what its owner enqueues. Its thread ends when the owner is gone and nothing is under way any more.

    Until then it keeps ``memory``, which copies under way use.

    Args:
        owner: the transport.
        expected: what this rank's flags are to become, given all that was enqueued; must not keep the owner alive.
        timeout: seconds that a batch has.
    """

    def __init__(self, owner: object, memory: Memory, expected: Callable[[], list[int]], timeout: float) -> None:
        self._owner, self._memory, self._expected, self._timeout = weakref.ref(owner), memory, expected, timeout
        self._under_way: collections.deque[_Batch] = collections.deque()
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """PeerError if something was lost."""
        if self._failure is not None:
            raise PeerError(self._failure)

    def start(self) -> None:
        """Before anything is enqueued, so that nothing is without a watch."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="parallel_ops symmetric watch", daemon=True)
            thread.start()
            self._thread = thread

    def add(self, op: str, peers: Sequence[int], lanes: Sequence[Lane]) -> None:
        """All that the lanes were given so far has the timeout's time from now.

        Events are queried by the watch thread only: a query here could invalidate a graph captured by another thread.
        """
        with self._lock:
            for lane in lanes:
                self._under_way.append(_Batch(op, time.monotonic(), lane.event(), peers))

    def fail(self, reason: str) -> None:
        """From now on every call raises this, and the streams are freed."""
        with self._lock:
            self._failure = self._failure or reason

    def _run(self) -> None:
        rank, size = self._memory.rank, self._memory.size
        who = f"rank {rank} of {size}"
        try:
            begin_watch_thread(self._memory.device)
        except Exception as error:
            self.fail(f"symmetric transport: {who} cannot watch its transfers: {error}")
        while True:
            time.sleep(min(self._timeout / 10, _LONGEST_PERIOD))
            try:
                self._look()
            except Exception as error:
                self.fail(f"symmetric transport: {who} failed to watch its transfers: {error}")
                with contextlib.suppress(Exception):
                    self._memory.release(self._expected())
                if self._owner() is None:  # what cannot be watched need not be kept for
                    return
            else:
                if self._owner() is None and not self._under_way:
                    return

    def _look(self) -> None:
        with self._lock:
            while self._under_way and self._under_way[0].event.done():
                self._under_way.popleft()
            if not self._under_way:
                return
            oldest = self._under_way[0]
            if self._failure is None and time.monotonic() - oldest.posted >= self._timeout:
                self._failure = self._late(oldest)
            if self._failure is not None:
                self._memory.release(self._expected())

    def _late(self, batch: _Batch) -> str:
        rank, size = self._memory.rank, self._memory.size
        pairs = zip(self._memory.flags(), self._expected(), strict=True)
        silent = sorted({i % size for i, (flag, expected) in enumerate(pairs) if (flag - expected) % (1 << 32)})
        return (
            f"{batch.op}: rank {rank} of {size} waited {self._timeout:g} s for its transfers with ranks "
            f"{list(batch.peers)}; no report from ranks {[p for p in silent if p in batch.peers] or silent}"
        )
