"""When the actions of a step ran: measured on each rank, collected on all."""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops.pipeline_parallel.executor import Observer
from parallel_ops.planner.schedules.action import Action


class Timed(NamedTuple):
    """An action and its start and end, in seconds since the start of the step."""

    action: Action
    start: float
    end: float


class Recorder(Observer):
    """Measures the actions of one step, from the arrival of their message until they have computed.

    On a GPU by events on its current stream, so that the host does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._origin = self._now()
        self._marks: list[tuple[Action, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        self._start = self._origin

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def restart(self, group: ProcessGroup | None) -> None:
        """Starts a step, at the same time on the ranks of ``group``; discards the step before."""
        if self._cuda:
            torch.cuda.synchronize()
        if group is not None:
            dist.barrier(group=group)
        self._marks, self._origin = [], self._now()

    def compute(self, action: Action) -> None:
        self._start = self._now()

    def computed(self, action: Action) -> None:
        self._marks.append((action, self._start, self._now()))

    def timed(self) -> list[Timed]:
        """The actions of the step, in their order."""
        if self._cuda:
            torch.cuda.synchronize()
        return [Timed(action, self._since(start), self._since(end)) for action, start, end in self._marks]

    def _since(self, mark: float | torch.cuda.Event) -> float:
        if isinstance(mark, float):
            assert isinstance(self._origin, float)
            return mark - self._origin
        assert not isinstance(self._origin, float)
        return self._origin.elapsed_time(mark) / 1000


def gathered(own: list[Timed], group: ProcessGroup | None) -> list[list[Timed]]:
    """The times of all ranks of a pipeline, on each of them."""
    if group is None:
        return [own]
    every: list[list[Timed] | None] = [None] * group.size()
    dist.all_gather_object(every, own, group=group)
    return [found for found in every if found is not None]
