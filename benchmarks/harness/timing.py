"""Clocks and the order in which providers take turns.

In each round every provider runs once and the order changes from round to round, so that a slow spell of the machine
(another user, a clock step) falls on all of them alike. Medians and quartiles of the rounds are kept.

CPU: wall clock around the call with the garbage collector off. The outputs are freed inside the timed region, as in
training, where the next layer's tensors take their place.

CUDA: event pairs. The GPU first sleeps while the host enqueues the whole round behind it, so no launch gap is timed; a
round that the GPU caught up with is thrown away. A pair spans several calls, on different inputs and with different
outputs, to make short kernels long against the resolution of an event.
"""

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

Call = Callable[[], Any]


@dataclass(frozen=True)
class Stats:
    """Seconds per call over the rounds."""

    median: float
    p25: float
    p75: float
    fastest: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Stats":
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], samples[0])
        p25, median, p75 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, p25, p75, min(samples))


@dataclass(frozen=True)
class Rounds:
    """At least ``least`` rounds, then more until ``budget_s`` is spent or there are ``most``; ``None``: no more."""

    least: int
    most: int | None = None
    budget_s: float = math.inf


class Timer(Protocol):
    repeat: int  # calls behind one sample

    def round(self, batches: Sequence[Sequence[Call]]) -> list[float]:
        """Seconds per call of each batch of ``repeat`` calls, run one batch after the other."""


class HostTimer:
    """A clock of the host. On CUDA, the host's part of the calls: the device is waited for before, not after.

    Args:
        clock: Seconds; ``time.thread_time`` counts CPU time of the thread, on a machine in use.
        warm: Calls before each sample that are not timed, which find no memory of another provider.
        around: Makes a context of a call, entered outside of the timed region.
        group: Ranks that begin each sample together; the device is then waited for at its end, too.
        join: True if the ranks end each sample together.
    """

    def __init__(
        self, device: torch.device, repeat: int = 1, *, clock: Callable[[], float] = time.perf_counter, warm: int = 0,
        around: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
        group: dist.ProcessGroup | None = None, join: bool = False,
    ) -> None:  # fmt: skip
        self.repeat, self._clock, self._warm, self._around = repeat, clock, warm, around
        self._group, self._join = group, join
        self._cuda = device.type == "cuda"

    def round(self, batches: Sequence[Sequence[Call]]) -> list[float]:
        return [self._sample(batch) for batch in batches]

    def _sample(self, batch: Sequence[Call]) -> float:
        with contextlib.nullcontext() if self._around is None else self._around(batch[0]):
            for _ in range(self._warm):
                batch[0]()
            if self._group is not None:
                dist.barrier(group=self._group)
            self._wait()
            start = self._clock()
            for call in batch:
                call()
            if self._group is not None:
                self._wait()
                if self._join:
                    dist.barrier(group=self._group)
            return (self._clock() - start) / len(batch)

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


class CallTimer:
    """Calls that themselves return how long they took: seconds, or those of each rank, of which the longest count."""

    repeat = 1

    def round(self, batches: Sequence[Sequence[Call]]) -> list[float]:
        found = [batch[0]() for batch in batches]
        return [seconds if isinstance(seconds, float) else max(seconds) for seconds in found]


class CudaTimer:
    """Event pairs behind a backlog."""

    def __init__(self, repeat: int) -> None:
        self.repeat = repeat
        self._backlog_ms = 5.0
        torch.cuda._sleep(1_000_000)  # wake the GPU up
        start, end = _event(), _event()
        start.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        torch.cuda.synchronize()
        self._cycles_per_ms = 10_000_000 / start.elapsed_time(end)

    def round(self, batches: Sequence[Sequence[Call]]) -> list[float]:
        for _ in range(20):
            pairs = [(_event(), _event()) for _ in batches]
            torch.cuda.synchronize()
            torch.cuda._sleep(int(self._cycles_per_ms * self._backlog_ms))
            for (start, end), batch in zip(pairs, batches, strict=True):
                start.record()
                outputs = [call() for call in batch]
                end.record()
                del outputs
            caught_up = pairs[0][0].query()  # the sleep was over before everything was enqueued
            torch.cuda.synchronize()
            if not caught_up:
                return [
                    start.elapsed_time(end) / 1e3 / len(batch)
                    for (start, end), batch in zip(pairs, batches, strict=True)
                ]
            self._backlog_ms = min(2 * self._backlog_ms, 200.0)
        raise RuntimeError("the host could not stay ahead of the GPU: a provider waits for the device in every call")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def device_timer(device: torch.device) -> Timer:
    """Events on CUDA, elsewhere wall clock, around one call."""
    return CudaTimer(repeat=1) if device.type == "cuda" else HostTimer(device)


def take_turns(
    calls: Mapping[str, Call | Sequence[Call]], timer: Timer, rounds: Rounds
) -> dict[str, Stats]:  # fmt: skip
    """Times ``{provider: a call, or one call per input set}``, after a round that is not counted.

    No two calls in a row use the same input set, whichever provider they are of.
    """
    sets = {name: [given] if callable(given) else given for name, given in calls.items()}
    names = list(sets)
    samples: dict[str, list[float]] = {name: [] for name in names}
    turn = 0
    with _no_garbage_collection():
        deadline = time.monotonic() + rounds.budget_s
        for number in range((rounds.most or rounds.least) + 1):
            if number > rounds.least and time.monotonic() > deadline:
                break
            turns = order(names, number)
            batches = []
            for name in turns:
                batches.append([sets[name][(turn + i) % len(sets[name])] for i in range(timer.repeat)])
                turn += timer.repeat
            seconds = timer.round(batches)
            if number > 0:  # the first round fills the allocator's pools
                for name, value in zip(turns, seconds, strict=True):
                    samples[name].append(value)
    return {name: Stats.of(values) for name, values in samples.items()}


def order(names: Sequence[str], number: int) -> list[str]:
    """The turns of a round: rotated by one each time, reversed every other cycle, so that neighbours change, too."""
    first = number % len(names)
    turns = [*names[first:], *names[:first]]
    return turns[::-1] if (number // len(names)) % 2 else turns


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
