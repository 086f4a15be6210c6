"""Pipeline schedules: the actions of each rank, their times and the bubble.

    >>> simulation = simulate(actions("1f1b", pp=4, micro_batches=8))
    >>> round(simulation.bubble, 4)  # (p - 1) / (m + p - 1)
    0.2727

Each family has its own file in ``parallel_ops/planner/schedules/``, with its source.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from parallel_ops.planner.schedules.action import (
    WHOLE_BACKWARD,
    Action,
    Kind,
    Schedule,
    micro_batch_problem,
    nearest_micro_batches,
)
from parallel_ops.planner.schedules.memory_bounded import zb_2p
from parallel_ops.planner.schedules.one_f_one_b import gpipe, one_f_one_b
from parallel_ops.planner.schedules.program import Program
from parallel_ops.planner.schedules.times import Times
from parallel_ops.planner.schedules.v_shaped import dualpipe_v, zb_v
from parallel_ops.planner.schedules.zero_bubble import zb_h1, zb_h2
from parallel_ops.planner.speed import without_collection

__all__ = [
    "KINDS",
    "WHOLE_BACKWARD",
    "Action",
    "Kind",
    "Program",
    "Schedule",
    "Simulation",
    "Times",
    "actions",
    "chunks",
    "micro_batch_problem",
    "nearest_micro_batches",
    "peak_activations",
    "simulate",
]

KINDS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-2p", "zb-v", "dualpipe-v")

_FIXED: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}


def chunks(kind: str, virtual_stages: int = 1) -> int:
    """Stages per rank: ``virtual_stages`` for interleaved 1F1B, 2 for the V-shaped schedules, else 1."""
    _check_kind(kind)
    return virtual_stages if kind == "interleaved" else 2 if kind in ("zb-v", "dualpipe-v") else 1


@without_collection()
def actions(
    kind: str,
    pp: int,
    micro_batches: int,
    virtual_stages: int = 1,
    *,
    times: Times | None = None,
    memory_limit: float | None = None,
    retained: float = 1.0,
) -> Schedule:
    """The ordered actions of each rank.

    Args:
        kind: one of ``KINDS``.
        pp: number of pipeline ranks.
        micro_batches: number of micro-batches in a step.
        virtual_stages: stages per rank: at least 2 for ``interleaved``, 1 or 2 for ``zb-v`` and ``dualpipe-v`` (which
            have 2), else 1.
        times: for ``zb-2p``, whose order depends on them; ``None`` for F = I = W = 1.
        memory_limit: for ``zb-2p``: the largest number of micro-batches whose activations a rank may hold; ``None`` for
            ``2 * pp``.
        retained: for ``zb-2p``: the share of a micro-batch's activations that a rank still holds between I and W.

    Returns:
        One list per rank. Together they contain F, I and W of every stage and micro-batch exactly once; a B counts as I
        and W.

    Raises:
        ValueError: the kind is unknown, a size is below 1, the kind does not have this number of virtual stages or this
            option, or it cannot run this number of micro-batches (``micro_batch_problem``).
    """
    _check_kind(kind)
    for name, value in (("pp", pp), ("micro_batches", micro_batches), ("virtual_stages", virtual_stages)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"actions: {name} must be a whole number of at least 1, got {value!r}")
    if kind == "interleaved":
        if virtual_stages < 2:
            raise ValueError("actions: interleaved needs virtual_stages of at least 2, got 1; with 1 it is 1f1b")
    elif virtual_stages not in (1, chunks(kind)):
        raise ValueError(f"actions: virtual_stages is {virtual_stages}, but {kind} has {chunks(kind)} stage(s) a rank")
    if (reason := micro_batch_problem(kind, pp, micro_batches)) is not None:
        nearest = ", ".join(map(str, nearest_micro_batches(kind, pp, micro_batches)))
        raise ValueError(f"actions: {reason}; nearest: {nearest}")
    if kind != "zb-2p" and (times is not None or memory_limit is not None or retained != 1):
        raise ValueError(f"actions: times, memory_limit and retained are for zb-2p; {kind} is the same for all of them")
    if kind == "interleaved":
        return one_f_one_b(pp, micro_batches, virtual_stages)
    if kind == "zb-2p":
        return zb_2p(pp, micro_batches, times or Times(), 2 * pp if memory_limit is None else memory_limit, retained)
    return _FIXED[kind](pp, micro_batches)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"schedule: kind must be one of {', '.join(KINDS)}, got {kind!r}")


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
    starts, ends, busy = Program(actions).run(times or Times())
    return Simulation(actions, starts, ends, busy, tuple(peak_activations(order, retained) for order in actions))


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
