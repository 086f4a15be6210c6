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
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Stats:
    """Seconds per call over the rounds."""

    median: float
    p25: float
    p75: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Stats":
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        p25, median, p75 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, p25, p75)


class Timer(Protocol):
    repeat: int  # calls behind one sample

    def round(self, batches: Sequence[Sequence[Call]]) -> list[float]:
        """Seconds per call of each batch of ``repeat`` calls, run one batch after the other."""


class HostTimer:
    """Wall clock. On CUDA this times the host's part of the calls, since the device is waited for before, not after."""

    def __init__(self, device: torch.device, repeat: int = 1) -> None:
        self.repeat = repeat
        self._cuda = device.type == "cuda"

    def round(self, batches: Sequence[Sequence[Call]]) -> list[float]:
        seconds = []
        for batch in batches:
            if self._cuda:
                torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for call in batch:
                call()
            seconds.append((time.perf_counter_ns() - start) / 1e9 / len(batch))
        return seconds


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


def take_turns(
    calls: Mapping[str, Sequence[Call]], timer: Timer, *, min_rounds: int, max_rounds: int, budget_s: float
) -> dict[str, Stats]:
    """Times ``{provider: one call per input set}`` until ``budget_s`` is spent or ``max_rounds`` are done.

    No two calls in a row use the same input set, whichever provider they are of.
    """
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    turn = 0
    with _no_garbage_collection():
        deadline = time.monotonic() + budget_s
        for number in range(max_rounds + 1):
            if number > min_rounds and time.monotonic() > deadline:
                break
            order = _order(names, number)
            batches = []
            for name in order:
                batches.append([calls[name][(turn + i) % len(calls[name])] for i in range(timer.repeat)])
                turn += timer.repeat
            seconds = timer.round(batches)
            if number > 0:  # the first round fills the allocator's pools
                for name, value in zip(order, seconds, strict=True):
                    samples[name].append(value)
    return {name: Stats.of(values) for name, values in samples.items()}


def _order(names: list[str], number: int) -> list[str]:
    """Rotated by one each round, and reversed every other cycle, so that neighbours change too."""
    first = number % len(names)
    order = names[first:] + names[:first]
    return order[::-1] if (number // len(names)) % 2 else order


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
