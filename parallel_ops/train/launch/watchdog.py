"""Ends a run with a stalled rank, with one error on every rank that names it.

A collective waits without an error for a rank that is suspended or whose node hangs. So a thread of each rank writes a
heartbeat to the board every second: the number of activities so far and the current one. Rank 0 reads all heartbeats,
the other ranks that of rank 0: one request a second each. A rank has stalled if

- its heartbeat has not changed for ``run.timeout``: the process is suspended, or its node cannot be reached; or
- it has the fewest activities of those that do not wait for a pipeline stage, and the current one has exceeded its
  limit: ``run.timeout``, or ``SLOW`` times as long for the start, the first step, reading data and saving.

Ranks that wait for a stalled one have more activities, so they are not blamed. The first rank that finds a stalled one
writes the reason under one key, and every rank ends with it. A rank that fails writes its own error there: ranks that
lose the connection to it raise that error, since the backend's own names an address at best.
"""

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel_ops.comm.errors import Board, PeerError, named
from parallel_ops.train.launch.heartbeats import SLOW, Clock, Heartbeat, Heartbeats
from parallel_ops.train.launch.rendezvous import agent_has_store

# The backend's timeouts fire later than this module's, whose errors say more.
_MARGIN_SECONDS = 60.0
# Without a timeout: longer than a debugging session, in milliseconds within 32 bits.
_NEVER_SECONDS = 7 * 86400.0
_BEAT_SECONDS = 1.0
_BEATS_A_TIMEOUT = 10
_FAILED = 1
# Parts of torch's messages when a rank is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Socket")
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy")


def longest(timeout: float | None) -> float:
    """Limit of slow activities in seconds."""
    return _NEVER_SECONDS if timeout is None else SLOW * timeout


def group_timeout(timeout: float | None) -> timedelta:
    """Timeout of the process groups of a run, longer than any limit of ``Watchdog``."""
    return timedelta(seconds=longest(timeout) + _MARGIN_SECONDS)


def is_lost(error: BaseException) -> bool:
    """True if this is the error of a rank that has lost another one."""
    if isinstance(error, PeerError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST)


@contextlib.contextmanager
def noted(activity: "Activity") -> Iterator[None]:
    """Errors in the block get the current activity as a note; ``BaseException.add_note`` needs Python 3.11."""
    try:
        yield
    except Exception as error:
        error.__notes__ = [*getattr(error, "__notes__", ()), activity.now[1]]  # type: ignore[attr-defined]
        raise


def during(error: BaseException) -> str:
    """``" (in ...)"`` with the activity in which a rank raised an error; empty if it is not known."""
    notes = getattr(error, "__notes__", ())
    return f" (in {notes[-1]})" if notes else ""


class Activity:
    """The current activity of a rank's main thread. All ranks have the same sequence of activities."""

    def __init__(self) -> None:
        self.now = (0, "starting", True, False)

    def __call__(self, text: str, *, slow: bool = False, waits: bool = False) -> None:
        """Starts the next activity.

        Args:
            slow: It may take ``SLOW`` times ``run.timeout``.
            waits: It may wait for a rank with fewer or more activities, as a pipeline stage does.
        """
        self.now = (self.now[0] + 1, text, slow, waits)


class Watchdog:
    """Threads that watch the ranks of a run until ``close``; all ranks have one.

    Args:
        store: A store with a prefix of its own.
        timeout: ``run.timeout``.
        report: Called with the reason before the process exits with code 1. The main thread may be blocked in a
            collective, so it cannot raise.
        note: Called with each new activity, at most once a beat.

    Attributes:
        activity: Called by the main thread with what it does.
    """

    def __init__(
        self, store: Any, rank: int, ranks: int, timeout: float | None, report: Callable[[str], None],
        note: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.activity, self._note, self._noted = Activity(), note, -1
        self._rank, self._ranks, self._report = rank, ranks, report
        self._timeout = math.inf if timeout is None else timeout
        self._interval = min(_BEAT_SECONDS, self._timeout / _BEATS_A_TIMEOUT)
        # The main thread's request may block: each thread has a client of its own.
        self._board, self._own = (Board(client, rank, ranks, "watchdog") for client in (store, store.clone()))
        self._heartbeats = Heartbeats(range(ranks) if rank == 0 else [0], self._timeout)
        self._present: set[int] = set()
        self._main = threading.get_ident()
        self._beats = 0
        self._known_reason: str | None = None
        self._reason_since: float | None = None
        self._closing, self._closed = threading.Event(), threading.Event()
        self._write(self._own)
        self._threads = [
            threading.Thread(target=target, name=f"parallel_ops-{target.__name__.strip('_')}", daemon=True)
            for target in (self._watch, self._watch_store)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the watch of this rank. Rank 0 waits for all others."""
        self._closing.set()
        self._closed.wait()
        for thread in self._threads:
            thread.join()

    def failed(self, error: BaseException) -> None:
        """Publishes the error with which this rank ends. Ranks that lose the connection to it raise that error.

        Raises:
            PeerError: ``error`` is a lost connection; the message is the common reason of all ranks.
        """
        try:
            if is_lost(error):
                reason = self._publish(self._board, self._reason() or self._gone() or _first_line(error), at_once=False)
                raise PeerError(reason) from error
            text = f"rank {self._rank}: {type(error).__name__}: {_first_line(error)}{during(error)}"
            self._publish(self._board, text, at_once=False)
        except dist.DistError:
            if not is_lost(error):
                return
            # The store ended with rank 0, which may have published the loss of another rank before.
            if self._known_reason is not None:
                raise PeerError(self._known_reason) from error
            whose = "the node of torchrun's agent is gone" if agent_has_store() else "rank 0 is gone"
            raise PeerError(f"{whose}, and with it the store of the run: {_first_line(error)}") from error
        self._let_others_read()

    def _reason(self) -> str | None:
        """The reason that another rank has published, if any."""
        if self._board.await_all("reason", [0], self._interval):
            return None
        return json.loads(self._board.read("reason", [0])[0])["text"]

    def _gone(self) -> str | None:
        """A reason that names the ranks whose heartbeats no longer change."""
        others = self._board.having("heartbeat", (rank for rank in range(self._ranks) if rank != self._rank))
        before = self._read(self._board, others)
        time.sleep(3 * self._interval)
        after = self._read(self._board, others)
        gone = [rank for rank in others if not before[rank].finished and after[rank].beat == before[rank].beat]
        if not gone:
            return None
        last = "; ".join(f"rank {rank}'s last activity: {before[rank].text}" for rank in gone)
        return f"{named(gone)} {'is' if len(gone) == 1 else 'are'} gone: killed, or on a node that is lost; {last}"

    def _publish(self, board: Board, text: str, *, at_once: bool) -> str:
        """Publishes a reason unless there is one; returns the published one. ``board``: that of this thread."""
        return json.loads(board.write_first("reason", json.dumps({"text": text, "at_once": at_once})))["text"]

    def _watch(self) -> None:
        clock = Clock(2 * self._interval)
        while not self._closed.is_set():
            if finished := self._closing.wait(self._interval):
                time.sleep(self._interval / 10)
            try:
                self._write(self._own, finished=finished)
                self._look(clock())
                over = self._rank > 0 or self._heartbeats.finished()
            except dist.DistError:
                over = True  # the store is gone: there is nothing to wait for
            if finished and over:
                self._closed.set()

    def _look(self, clock: float) -> None:
        if self._own.having("reason", [0]):
            reason = json.loads(self._own.read("reason", [0])[0])
            self._known_reason = reason["text"]
            since = self._reason_since = clock if self._reason_since is None else self._reason_since
            # Ranks usually notice a failed one by the lost connection; this ends them if that takes too long.
            if reason["at_once"] or clock - since > self._timeout:
                self._end(reason["text"])
        self._present |= set(self._own.having("heartbeat", set(self._heartbeats.latest) - self._present))
        for rank, heartbeat in self._read(self._own, sorted(self._present)).items():
            self._heartbeats.update(rank, heartbeat, clock)
        reason = self._heartbeats.silent(clock) or (self._heartbeats.stuck(clock) if self._rank == 0 else None)
        if reason is not None:
            self._end(self._publish(self._own, self._limits(reason), at_once=True))

    def _watch_store(self) -> None:
        """Ends the process if the store does not answer and the main thread has stalled."""
        clock, since, seen = Clock(2 * self._interval), 0.0, (-1, -1)
        while not self._closed.wait(self._interval):
            now, (count, text, slow, _) = clock(), self.activity.now
            if seen != (self._beats, count) or in_debugger(self._main):
                seen, since = (self._beats, count), now
            if now - since > (SLOW if slow else 1) * self._timeout:
                whose = "torchrun's" if agent_has_store() else "rank 0's"
                self._end(self._limits(f"the store of the run, {whose}, does not answer; rank {self._rank}: {text}"))

    def _write(self, board: Board, *, finished: bool = False) -> None:
        count, text, slow, waits = self.activity.now
        allowance = math.inf if in_debugger(self._main) else SLOW if slow else 1
        if self._note is not None and count != self._noted:
            self._noted = count
            self._note(text)
        board.write("heartbeat", json.dumps([self._beats + 1, count, text, allowance, finished, waits]))
        self._beats += 1

    def _read(self, board: Board, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """Reads the heartbeats of ranks that have written one."""
        return {rank: Heartbeat(*json.loads(text)) for rank, text in board.read("heartbeat", ranks).items()}

    def _limits(self, reason: str) -> str:
        return f"{reason} (run.timeout is {self._timeout:g} s)"

    def _let_others_read(self) -> None:
        """Waits until other ranks have read the reason, if the store ends with this process."""
        if self._rank == 0 and not agent_has_store():
            time.sleep(3 * self._interval)

    def _end(self, reason: str) -> None:
        self._let_others_read()
        self._report(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        # A regular exit would wait for the main thread.
        os._exit(_FAILED)


def in_debugger(thread: int) -> bool:
    """True if a thread of this process is at the prompt of a Python debugger."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
