"""Ends a run in which a rank does not go on, with one error on every rank that names it.

A collective waits for a rank that is stopped, or whose node hangs, without an error. So a thread of each rank writes
every second what its main thread does: a record of a beat, the number of activities so far and the present one. Rank 0
reads all records, the other ranks that of rank 0: one request a second each. A rank has stalled if

- its record has not changed for ``run.timeout``: the process is stopped, or its node cannot be reached; or
- it has the fewest activities behind it, and the present one has taken longer than it may: ``run.timeout``,
  and ``SLOW`` times as long for those that may be slow (start, first step, reading data, saving).

The ranks that wait for such a one have more activities behind them, so they are not blamed. Who finds one writes the
reason under one key, the first writer wins, and every rank ends with that reason. A rank that fails writes its own
error there: ranks that lose it raise that, and not the backend's error, which names an address at best.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel_ops.comm import PeerError
from parallel_ops.train.launch.rendezvous import agent_has_store, named

# Slow activities take as many times ``run.timeout``: with the default, torch's own half hour.
SLOW = 6
# The backend's timeouts come later than this module's, which say more.
_MARGIN_SECONDS = 60.0
# For no timeout: longer than a person debugs, and a number of milliseconds that 32 bits hold.
_NEVER_SECONDS = 7 * 86400.0
_BEAT_SECONDS = 1.0
_BEATS_A_TIMEOUT = 10
_FAILED = 1
# Of what torch says when a rank is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Socket")
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy")


def longest(timeout: float | None) -> float:
    """Seconds that the slowest activities may take."""
    return _NEVER_SECONDS if timeout is None else SLOW * timeout


def group_timeout(timeout: float | None) -> timedelta:
    """For process groups of a run: they give up only after its watch would have."""
    return timedelta(seconds=longest(timeout) + _MARGIN_SECONDS)


def is_lost(error: BaseException) -> bool:
    """Whether this is what a rank raises when it has lost another one."""
    if isinstance(error, PeerError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST)


class Activity:
    """What the main thread of a rank does. All ranks have the same activities, one after another."""

    def __init__(self) -> None:
        self.now = (0, "starting", True)

    def __call__(self, text: str, *, slow: bool = False) -> None:
        """The one before is over. ``slow``: this one may take ``SLOW`` times ``run.timeout``."""
        self.now = (self.now[0] + 1, text, slow)


class Clock:
    """Seconds for which this process has run, as it reads them in turns.

    A turn counts ``most`` seconds at most. In a longer one the process was stopped, and with it maybe all others, as by
    Ctrl-Z.
    """

    def __init__(self, most: float) -> None:
        self._most, self._sum, self._last = most, 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self._sum, self._last = self._sum + min(now - self._last, self._most), now
        return self._sum


@dataclass(frozen=True)
class Record:
    """What a rank writes of itself.

    Attributes:
        beat: grows with each record. count, text: of activities. allowance: times ``run.timeout`` that the present one
            may take. finished: the run is over for this rank.
    """

    beat: int = 0
    count: int = 0
    text: str = "starting"
    allowance: float = SLOW
    finished: bool = False


class Ledger:
    """The records of some ranks, and since when they are what they are, by the clock of who reads them."""

    def __init__(self, ranks: Iterable[int], timeout: float) -> None:
        self.timeout = timeout
        self.records = dict.fromkeys(ranks, Record())
        self._beat_at = dict.fromkeys(self.records, 0.0)
        self._began_at = dict.fromkeys(self.records, 0.0)

    def update(self, rank: int, record: Record, clock: float) -> None:
        """Takes a record that was read at ``clock``, in seconds."""
        known = self.records[rank]
        if record.beat != known.beat:
            self._beat_at[rank] = clock
        if record.count != known.count:
            self._began_at[rank] = clock
        self.records[rank] = record

    def finished(self) -> bool:
        """Whether the run is over for all ranks."""
        return all(record.finished for record in self.records.values())

    def silent(self, clock: float) -> str | None:
        """The reason to end, if a record has not changed for the timeout."""
        found = [
            rank for rank, record in self.records.items()
            if not record.finished and clock - self._beat_at[rank] > self.timeout
        ]  # fmt: skip
        if not found:
            return None
        last = "; ".join(
            f"rank {rank}'s last activity, {clock - self._began_at[rank]:.0f} s ago: {self.records[rank].text}"
            for rank in found
        )
        age = max(clock - self._beat_at[rank] for rank in found)
        return f"{named(found)} gave no sign of life for {age:.0f} s: stopped, or on a node that is lost; {last}"

    def stuck(self, clock: float) -> str | None:
        """The reason to end, if the ranks that are furthest behind have had the time of their activity."""
        running = {rank: record for rank, record in self.records.items() if not record.finished}
        fewest = min((record.count for record in running.values()), default=0)
        behind = {rank: record for rank, record in running.items() if record.count == fewest}
        late = [clock - self._began_at[rank] > r.allowance * self.timeout for rank, r in behind.items()]
        if not late or not all(late):
            return None
        age = min(clock - self._began_at[rank] for rank in behind)
        texts = dict.fromkeys(record.text for record in behind.values())
        others: dict[str, list[int]] = {}
        for rank, record in running.items():
            if rank not in behind:
                others.setdefault(record.text, []).append(rank)
        waiting = "".join(f"; {named(ranks)}: {text}" for text, ranks in others.items())
        return f"{named(behind)} did not go on for {age:.0f} s from: {' / '.join(texts)}{waiting}"


class Watch:
    """Threads that watch over the ranks of a run, from here until ``close``; all ranks have one.

    Args:
        store: with a prefix that nothing else has.
        timeout: ``run.timeout``.
        report: is called with the reason before the process ends; with exit code 1, since its main thread may wait for
            a collective forever.

    Attributes:
        activity: what the main thread does; it says so itself.
    """

    def __init__(self, store: Any, rank: int, ranks: int, timeout: float | None, report: Callable[[str], None]) -> None:
        self.activity = Activity()
        self._rank, self._ranks, self._report = rank, ranks, report
        self._timeout = math.inf if timeout is None else timeout
        self._interval = min(_BEAT_SECONDS, self._timeout / _BEATS_A_TIMEOUT)
        # A store's client does one thing at a time, and the main thread's may wait: each thread has its own.
        self._store, self._own = store, store.clone()
        self._ledger = Ledger(range(ranks) if rank == 0 else [0], self._timeout)
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
        """The run is over for this rank. Rank 0 waits until it is over for all."""
        self._closing.set()
        self._closed.wait()
        for thread in self._threads:
            thread.join()

    def failed(self, error: BaseException) -> None:
        """This rank ends with ``error``: the others raise it where they lose this one.

        Raises:
            PeerError: if the error is that others are lost, with the reason that all ranks have.
        """
        try:
            if is_lost(error):
                reason = self._publish(self._reason() or self._gone() or _first_line(error), at_once=False)
                raise PeerError(reason) from error
            self._publish(f"rank {self._rank}: {type(error).__name__}: {_first_line(error)}", at_once=False)
        except dist.DistError:
            if not is_lost(error):
                return
            # The store ended with rank 0, which may have lost another rank earlier, and written so.
            if self._known_reason is not None:
                raise PeerError(self._known_reason) from error
            whose = "the node of torchrun's agent is gone" if agent_has_store() else "rank 0 is gone"
            raise PeerError(f"{whose}, and with it the store of the run: {_first_line(error)}") from error
        self._let_others_read()

    def _reason(self) -> str | None:
        """The reason of all ranks, if another rank has one."""
        end = time.monotonic() + self._interval
        while not (found := self._store.check(["reason"])) and time.monotonic() < end:
            time.sleep(self._interval / 10)
        return json.loads(self._store.get("reason"))["text"] if found else None

    def _gone(self) -> str | None:
        """Which ranks have ended without a word: their records do not change any more."""
        others = [rank for rank in range(self._ranks) if rank != self._rank and self._store.check([_place(rank)])]
        before = self._read(self._store, others)
        time.sleep(3 * self._interval)
        after = self._read(self._store, others)
        gone = [rank for rank in others if not before[rank].finished and after[rank].beat == before[rank].beat]
        if not gone:
            return None
        last = "; ".join(f"rank {rank}'s last activity: {before[rank].text}" for rank in gone)
        return f"{named(gone)} {'is' if len(gone) == 1 else 'are'} gone: killed, or on a node that is lost; {last}"

    def _publish(self, text: str, *, at_once: bool) -> str:
        """Writes the reason, unless there is one; returns the one that there is."""
        said = self._store.compare_set("reason", "", json.dumps({"text": text, "at_once": at_once}))
        return json.loads(said)["text"]

    def _watch(self) -> None:
        clock = Clock(2 * self._interval)
        while not self._closed.is_set():
            if finished := self._closing.wait(self._interval):
                time.sleep(self._interval / 10)
            try:
                self._write(self._own, finished=finished)
                self._look(clock())
                over = self._rank > 0 or self._ledger.finished()
            except dist.DistError:
                over = True  # the store is gone: there is nothing to wait for
            if finished and over:
                self._closed.set()

    def _look(self, clock: float) -> None:
        if self._own.check(["reason"]):
            reason = json.loads(self._own.get("reason"))
            self._known_reason = reason["text"]
            since = self._reason_since = clock if self._reason_since is None else self._reason_since
            # A rank that has failed ends the others by its absence; where that shows too late, this does.
            if reason["at_once"] or clock - since > self._timeout:
                self._end(reason["text"])
        missing = set(self._ledger.records) - self._present
        self._present |= {rank for rank in missing if self._own.check([_place(rank)])}
        for rank, record in self._read(self._own, sorted(self._present)).items():
            self._ledger.update(rank, record, clock)
        reason = self._ledger.silent(clock) or (self._ledger.stuck(clock) if self._rank == 0 else None)
        if reason is not None:
            said = self._own.compare_set("reason", "", json.dumps({"text": self._limits(reason), "at_once": True}))
            self._end(json.loads(said)["text"])

    def _watch_store(self) -> None:
        """Ends the process where the store does not answer and the main thread does not go on either."""
        clock, since, seen = Clock(2 * self._interval), 0.0, (-1, -1)
        while not self._closed.wait(self._interval):
            now, (count, text, slow) = clock(), self.activity.now
            if seen != (self._beats, count) or in_debugger(self._main):
                seen, since = (self._beats, count), now
            if now - since > (SLOW if slow else 1) * self._timeout:
                whose = "torchrun's" if agent_has_store() else "rank 0's"
                self._end(self._limits(f"the store of the run, {whose}, does not answer; rank {self._rank}: {text}"))

    def _write(self, store: Any, *, finished: bool = False) -> None:
        count, text, slow = self.activity.now
        allowance = math.inf if in_debugger(self._main) else SLOW if slow else 1
        store.set(_place(self._rank), json.dumps([self._beats + 1, count, text, allowance, finished]))
        self._beats += 1

    def _read(self, store: Any, ranks: Sequence[int]) -> dict[int, Record]:
        """Records that are there."""
        places = [_place(rank) for rank in ranks]
        found = store.multi_get(places) if store.has_extended_api() else [store.get(place) for place in places]
        return {rank: Record(*json.loads(said)) for rank, said in zip(ranks, found, strict=True)}

    def _limits(self, reason: str) -> str:
        return f"{reason} (run.timeout is {self._timeout:g} s)"

    def _let_others_read(self) -> None:
        """The reason, where the store ends with this process."""
        if self._rank == 0 and not agent_has_store():
            time.sleep(3 * self._interval)

    def _end(self, reason: str) -> None:
        self._let_others_read()
        self._report(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by the interpreter's way out, which would wait for the main thread.
        os._exit(_FAILED)


def in_debugger(thread: int) -> bool:
    """Whether a thread of this process is in a Python debugger, at a prompt."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _place(rank: int) -> str:
    return f"at/{rank}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
