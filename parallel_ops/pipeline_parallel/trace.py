"""When the actions of a step ran: measured on each rank, collected on all."""

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops.pipeline_parallel.executor import Observer
from parallel_ops.planner.pictures.trace import measured
from parallel_ops.planner.schedules.action import Action
from parallel_ops.planner.schedules.schedule import Simulation
from parallel_ops.planner.schedules.times import Times


class Timed(NamedTuple):
    """An action and its times, in seconds since the start of the step.

    Attributes:
        split: For B, when the gradient of the stage's input was there; otherwise the end.
    """

    action: Action
    start: float
    split: float
    end: float


_Mark = float | torch.cuda.Event


class Recorder(Observer):
    """Measures the actions of one step, from the arrival of their message until they have computed.

    On a GPU by events on its current stream, so that the host does not wait. Nothing is measured before ``restart``.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._active = device.type == "cuda", False
        self._origin = self._now()
        self._marks: list[tuple[Action, _Mark, _Mark, _Mark]] = []
        self._starts: dict[Action, _Mark] = {}
        self._split: _Mark | None = None

    def _now(self) -> "_Mark":
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
        self._active, self._marks, self._origin = True, [], self._now()

    def compute(self, action: Action) -> None:
        if self._active:
            self._starts[action], self._split = self._now(), None

    def input_gradient(self, action: Action) -> None:
        if self._active:
            self._split = self._now()

    def computed(self, action: Action) -> None:
        if not self._active:
            return
        end = self._now()
        split = self._split if action.kind == "B" else None
        self._marks.append((action, self._starts.pop(action), split or end, end))

    def timed(self) -> list[Timed]:
        """The actions of the step, in their order. Ends the measurement."""
        self._active = False
        if self._cuda:
            torch.cuda.synchronize()
        return [Timed(action, *map(self._since, marks)) for action, *marks in self._marks]

    def _since(self, mark: "_Mark") -> float:
        if isinstance(mark, float):
            assert isinstance(self._origin, float)
            return mark - self._origin
        assert not isinstance(self._origin, float)
        return self._origin.elapsed_time(mark) / 1000


def times_of(timed: Sequence[Sequence[Timed]]) -> Times:
    """The median time of each pass of each stage, and of a pair of F and B, for a simulation of the same schedule.

    Args:
        timed: Of all ranks of a pipeline.
    """
    alone: dict[str, dict[int, list[float]]] = {"F": {}, "I": {}, "W": {}}
    paired: dict[str, dict[int, list[float]]] = {"F": {}, "I": {}, "W": {}}
    pairs: list[float] = []
    for own in timed:
        with_f = False
        for action, start, split, end in own:
            found = paired if with_f or action.paired else alone
            parts = {"B": (("I", split - start), ("W", end - split))}.get(action.kind, ((action.kind, end - start),))
            for kind, seconds in parts:
                found[kind].setdefault(action.stage, []).append(seconds)
            pairs += [end - start] if action.paired else []
            with_f = action.paired
    # Of a stage whose passes are all in pairs: half of a pair each.
    for kind, stages in paired.items():
        for stage, seconds_of in stages.items():
            alone[kind].setdefault(stage, [seconds / 2 for seconds in seconds_of])
    order = range(len(alone["F"]))
    forward, input_grad, weight_grad = ([median(alone[kind][stage]) for stage in order] for kind in "FIW")
    return Times(
        forward=forward, input_grad=input_grad, weight_grad=weight_grad, input_grad_first=True,
        pair=median(pairs) if pairs else None,
    )  # fmt: skip


def simulation_of(timed: Sequence[Sequence[Timed]]) -> Simulation:
    """The measured step of all ranks, as a simulation has it."""
    each = ([[getattr(one, name) for one in own] for own in timed] for name in ("action", "start", "end"))
    return measured(*each)


def gathered(own: list[Timed], group: ProcessGroup | None) -> list[list[Timed]]:
    """The times of all ranks of a pipeline, on each of them."""
    if group is None:
        return [own]
    every: list[list[Timed] | None] = [None] * group.size()
    dist.all_gather_object(every, own, group=group)
    return [found for found in every if found is not None]
