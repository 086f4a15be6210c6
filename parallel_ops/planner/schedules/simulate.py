"""Simulation of a pipeline schedule: start and end of each pass, given its duration."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parallel_ops.planner.schedules.action import Action
from parallel_ops.planner.schedules.program import Program
from parallel_ops.planner.schedules.times import Times
from parallel_ops.planner.speed import without_collection


@dataclass(frozen=True)
class Simulation:
    """A schedule with its times.

    Attributes:
        schedule: the actions of each rank.
        starts, ends: of each action, in the layout of ``schedule`` and the unit of the given times. The members of a
            pair share both.
        busy: time that each rank computes.
        peak_activations: the largest number of micro-batches whose activations each rank holds, from F until W (or B).
            A micro-batch in one of the v stages of a rank counts 1/v.
    """

    schedule: Sequence[Sequence[Action]]
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    busy: Sequence[float]
    peak_activations: Sequence[float]

    @cached_property
    def spans(self) -> list[float]:
        """Time of each rank from the start of its first action to the end of its last."""
        return [ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True)]

    @cached_property
    def step_time(self) -> float:
        """Time from the first start to the last end: the step if all ranks wait for each other at the optimizer."""
        return max(ends[-1] for ends in self.ends) - min(starts[0] for starts in self.starts)

    @cached_property
    def step_time_without_barrier(self) -> float:
        """The longest span: the step if a rank may begin the next one while others finish this one (post-validation,
        Zero Bubble paper, section 4).

        The bubble that papers print for zero-bubble schedules is of this time. For GPipe and 1F1B both times are equal.
        """
        return max(self.spans)

    @property
    def bubbles(self) -> list[float]:
        """Share of ``step_time`` that each rank is idle."""
        return [1 - busy / self.step_time if self.step_time else 0.0 for busy in self.busy]

    @property
    def bubble(self) -> float:
        """Share of ``step_time`` that the ranks are idle, on average."""
        return self._bubble(self.step_time)

    @property
    def bubble_without_barrier(self) -> float:
        """Share of ``step_time_without_barrier`` that the ranks are idle, on average."""
        return self._bubble(self.step_time_without_barrier)

    def _bubble(self, step: float) -> float:
        return 1 - sum(self.busy) / len(self.busy) / step if step else 0.0


@without_collection()
def simulate(actions: Sequence[Sequence[Action]], times: Times | None = None, *, retained: float = 1.0) -> Simulation:
    """Simulates a schedule: each rank runs ``actions[rank]`` in order.

    Args:
        actions: the actions of each rank, from ``parallel_ops.planner.schedules.schedule.actions`` or written by hand.
        times: times of the passes; ``None`` for F = I = W = 1 and links of no time.
        retained: the share of a micro-batch's activations that a rank still holds between I and W.

    Raises:
        ValueError: a pass is missing, doubled or on two ranks; ``times`` has the wrong number of entries; or the order
            deadlocks (the message names the waiting ranks and what they wait for).
    """
    program = Program(actions)
    starts, ends, busy = program.run(times or Times())
    peaks = tuple(peak_activations(order, retained) for order in actions)
    return Simulation(actions, *program.by_rank(starts, ends), busy, peaks)


def peak_activations(order: Sequence[Action], retained: float = 1.0) -> float:
    """``Simulation.peak_activations`` of one rank that runs ``order``.

    ``retained`` is the share of a micro-batch's activations that is held between I and W. In the layers of
    arXiv:2401.10241, section 2.3, it is 32 / (34 + 5as/h); the default of 1 is that of autograd.
    """
    change = {"F": 1.0, "I": retained - 1.0, "W": -retained, "B": -1.0}
    held = peak = 0.0
    for action in order:
        held += change[action.kind]
        peak = max(peak, held)
    return peak / len({action.stage for action in order})
