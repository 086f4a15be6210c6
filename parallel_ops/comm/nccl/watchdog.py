"""Ends a communicator whose work on the GPU fails or never finishes.

No thread waits for work on a stream: a kernel whose peer is gone would spin for ever, and so would the next
``torch.cuda.synchronize()``. A thread polls the oldest unfinished event; after the timeout, or when NCCL reports an
error, it aborts the communicator. The kernel ends, and the next call raises the reason.
"""

import collections
import contextlib
import threading
import time
import weakref
from typing import Protocol

import torch

from parallel_ops.comm._capture import begin_watch_thread
from parallel_ops.comm.nccl.library import NcclError

# Seconds between two looks: short beside any timeout, long beside the microsecond that a look takes.
_INTERVAL = 0.02


class Event(Protocol):
    """A ``torch.cuda.Event`` that was recorded."""

    def query(self) -> bool: ...


class Watched(Protocol):
    """A communicator of the binding."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def check(self, op: str) -> None: ...
    def abort(self, reason: str) -> None: ...


class Watchdog:
    """Watches the events of ``communicator``, which it does not keep alive. Its thread starts with the first event.

    Args:
        timeout: seconds that an event has.
        device: of the events.
    """

    def __init__(self, communicator: Watched, timeout: float, device: torch.device) -> None:
        self._timeout, self._device = timeout, device
        self._queue: collections.deque[tuple[str, Event, float]] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._op = "the watchdog"  # what it looked at last
        self._thread: threading.Thread | None = None
        self._communicator = weakref.ref(communicator, lambda _: self.close())

    def watch(self, op: str, event: Event) -> None:
        """From now, ``event`` has the timeout's time to complete. Events complete in the order of these calls."""
        with self._changed:
            if self._closed:
                return
            self._queue.append((op, event, time.monotonic() + self._timeout))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="parallel_ops nccl watchdog", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()

    def pending(self) -> int:
        """Events that have not been seen to complete."""
        return len(self._queue)

    def close(self) -> None:
        """Ends the thread; nothing is watched any more. The weak reference may call this from any thread."""
        self._closed = True
        # Without the lock, which this thread may hold if the collector runs inside watch().
        self._queue.clear()

    def _run(self) -> None:
        try:
            begin_watch_thread(self._device)
            while True:
                with self._changed:
                    # Woken now and then, to see that the communicator is gone.
                    while not self._queue and not self._closed:
                        self._changed.wait(1.0)
                    if self._closed:
                        return
                self._look()
                time.sleep(_INTERVAL)
        except NcclError:  # which aborted the communicator, with this reason
            self.close()
        except Exception as error:  # CUDA's own from the event, or a fault of this thread
            self.close()
            if (communicator := self._communicator()) is not None:
                communicator.abort(f"it was aborted after this error of {self._op}: {error}")

    def _look(self) -> None:
        communicator = self._communicator()
        while communicator is not None and self._queue:
            try:
                op, event, deadline = self._queue[0]
                self._op = op
            except IndexError:  # closed meanwhile
                return
            communicator.check(op)
            if not event.query():
                if time.monotonic() > deadline:
                    self.close()
                    communicator.abort(_overdue(op, communicator, self._timeout))
                return
            with contextlib.suppress(IndexError):
                self._queue.popleft()


def _overdue(op: str, communicator: Watched, timeout: float) -> str:
    return (
        f"it was aborted because {op} of rank {communicator.rank} of {communicator.size} was not done on the GPU "
        f"within {timeout:g} s: a peer is gone, stuck, or made a different call"
    )
