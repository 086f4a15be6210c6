"""Event simulation of a pipeline schedule: when each pass runs, given what each takes.

A rank runs its actions in order, each as soon as the rank is free and what it depends on has arrived. A message between
ranks takes the time of its link and occupies neither rank; stages on the same rank hand over at once. The order fixes
all times, so the simulation is exact, and its cost is linear in the number of actions.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parallel_ops.planner.schedules.action import Action

PerStage = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """What the passes of one micro-batch take, in any one unit of time.

    Each is one number for all stages or a sequence with one for each stage: the last stage has the logits, and a
    cluster may have two generations of GPUs. With v stages on a rank, each has 1/v of the rank's layers and time.

    Attributes:
        forward: F.
        input_grad: I, with the recomputation of activations if there is one.
        weight_grad: W. B takes I + W.
        link: from a stage to the next or back, if they are on different ranks; a sequence has ``stages - 1`` entries.
        pair: F and B of a DualPipe pair run together, as one number; F + I + W of their stages where None.

    Raises:
        ValueError: a time is negative or not finite.
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    link: PerStage = 0.0
    pair: float | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "input_grad", "weight_grad", "link", "pair"):
            value = getattr(self, name)
            for number in value if isinstance(value, Sequence) else (value,):
                if number is not None and not (math.isfinite(number) and number >= 0):
                    raise ValueError(f"Times: {name} must be finite and not negative, got {number}")

    def per_stage(self, name: str, count: int) -> list[float]:
        """One of the times, written out for ``count`` stages (or links)."""
        value = getattr(self, name)
        if not isinstance(value, Sequence):
            return [float(value)] * count
        if len(value) != count:
            raise ValueError(f"Times: {name} has {len(value)} entries; the schedule needs {count}, or one number")
        return [float(number) for number in value]


@dataclass(frozen=True)
class Simulation:
    """A schedule with its times.

    Attributes:
        schedule: the actions of each rank.
        starts, ends: when each action starts and ends, in the same layout and the unit of the given times. The members
            of a pair share both.
        busy: the time that each rank computes.
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
        """From the start of each rank's first action to the end of its last."""
        return [ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True)]

    @cached_property
    def step_time(self) -> float:
        """From the first start to the last end: the step, if all ranks wait for each other at the optimizer."""
        return max(ends[-1] for ends in self.ends) - min(starts[0] for starts in self.starts)

    @cached_property
    def step_time_without_barrier(self) -> float:
        """The longest span: the step, if a rank may begin the next one while others finish this one.

        The post-validation of the Zero Bubble paper (section 4) makes it so. The bubble that papers print for
        zero-bubble schedules is that of this time; for GPipe and 1F1B the two times are the same.
        """
        return max(self.spans)

    @property
    def bubbles(self) -> list[float]:
        """The share of ``step_time`` that each rank is idle."""
        return [1 - busy / self.step_time if self.step_time else 0.0 for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The share of ``step_time`` that the ranks are idle, on average."""
        return self._bubble(self.step_time)

    @property
    def bubble_without_barrier(self) -> float:
        """The share of ``step_time_without_barrier`` that the ranks are idle, on average."""
        return self._bubble(self.step_time_without_barrier)

    def _bubble(self, step: float) -> float:
        return 1 - sum(self.busy) / len(self.busy) / step if step else 0.0


def simulate(actions: Sequence[Sequence[Action]], times: Times | None = None, *, retained: float = 1.0) -> Simulation:
    """Runs a schedule: ``actions[rank]`` in order on each rank.

    Args:
        actions: as ``parallel_ops.planner.schedule.actions`` returns them, or written by hand.
        times: F = I = W = 1 and links that take no time where None.
        retained: the share of a micro-batch's activations that a rank still holds between I and W.

    Raises:
        ValueError: a pass is missing, doubled or on two ranks; ``times`` has the wrong number of entries; or the order
            cannot run, because ranks wait for each other in a circle (the message names who waits for what).
    """
    return _Run(actions, times or Times()).result(retained)


def check_complete(actions: Sequence[Sequence[Action]]) -> tuple[int, int, list[int]]:
    """Number of stages, number of micro-batches, and the rank of each stage, of a schedule that lacks nothing.

    Raises:
        ValueError: a pass is missing or doubled, a stage is on two ranks, a pair is not F and B, or a rank has nothing.
    """
    if not actions or not all(actions):
        raise ValueError("simulate: every rank needs at least one action")
    stages = 1 + max(action.stage for order in actions for action in order)
    micro_batches = 1 + max(action.micro_batch for order in actions for action in order)
    owners = [-1] * stages
    seen = {kind: bytearray(stages * micro_batches) for kind in "FIW"}
    for rank, order in enumerate(actions):
        for position, action in enumerate(order):
            kind, micro_batch, stage, paired = action
            if stage < 0 or micro_batch < 0 or kind not in ("F", "I", "W", "B"):
                raise ValueError(f"simulate: rank {rank} has {action}; kinds are F, I, W, B and numbers start at 0")
            if owners[stage] not in (-1, rank):
                raise ValueError(f"simulate: stage {stage} is on rank {owners[stage]} and on rank {rank}")
            owners[stage] = rank
            for one in "IW" if kind == "B" else kind:
                if seen[one][stage * micro_batches + micro_batch]:
                    raise ValueError(f"simulate: {one}{micro_batch} of stage {stage} runs twice")
                seen[one][stage * micro_batches + micro_batch] = 1
            if paired and (kind != "F" or position + 1 == len(order) or order[position + 1].kind != "B"):
                raise ValueError(f"simulate: rank {rank} pairs {action} with no B after it")
    for one, flags in seen.items():
        if (missing := flags.find(0)) >= 0:
            stage, micro_batch = divmod(missing, micro_batches)
            raise ValueError(f"simulate: {one}{micro_batch} of stage {stage} is missing")
    return stages, micro_batches, owners


class _Run:
    """One simulation. Ranks advance as far as they can; the end of a pass wakes the rank that waits for it."""

    def __init__(self, actions: Sequence[Sequence[Action]], times: Times) -> None:
        self.actions = actions
        self.stages, micro_batches, self.owners = check_complete(actions)
        self.forward = times.per_stage("forward", self.stages)
        self.input_grad = times.per_stage("input_grad", self.stages)
        self.weight_grad = times.per_stage("weight_grad", self.stages)
        self.pair = times.pair
        links = times.per_stage("link", self.stages - 1)
        owners = self.owners
        self.link = [0.0 if owners[s] == owners[s + 1] else links[s] for s in range(self.stages - 1)]
        # When F and I (or B) of each stage and micro-batch ended; NaN while they have not.
        self.forward_end = [[math.nan] * micro_batches for _ in range(self.stages)]
        self.backward_end = [[math.nan] * micro_batches for _ in range(self.stages)]
        self.starts: list[list[float]] = [[] for _ in actions]
        self.ends: list[list[float]] = [[] for _ in actions]
        self.clocks = [0.0] * len(actions)
        self.busy = [0.0] * len(actions)

    def result(self, retained: float) -> Simulation:
        waiting = deque(range(len(self.actions)))
        queued = [True] * len(self.actions)
        while waiting:
            rank = waiting.popleft()
            queued[rank] = False
            for other in self._advance(rank):
                if not queued[other]:
                    queued[other] = True
                    waiting.append(other)
        if any(len(ends) < len(order) for ends, order in zip(self.ends, self.actions, strict=True)):
            raise ValueError(self._deadlock())
        peaks = tuple(peak_activations(order, retained) for order in self.actions)
        return Simulation(self.actions, self.starts, self.ends, self.busy, peaks)

    def _advance(self, rank: int) -> set[int]:
        """Runs the rank until it has to wait; returns the ranks that may go on because of it."""
        order, starts, ends = self.actions[rank], self.starts[rank], self.ends[rank]
        woken: set[int] = set()
        while len(ends) < len(order):
            position = len(ends)
            group = order[position : position + 2] if order[position].paired else order[position : position + 1]
            start = self.clocks[rank]
            for action in group:
                ready = self._ready(action)
                if math.isnan(ready):
                    return woken
                start = max(start, ready)
            duration = sum(map(self._duration, group))
            if len(group) == 2 and self.pair is not None:
                duration = self.pair
            end = start + duration
            for action in group:
                starts.append(start)
                ends.append(end)
                if action.kind == "F":
                    self.forward_end[action.stage][action.micro_batch] = end
                    follower = min(action.stage + 1, self.stages - 1)
                elif action.kind == "W":
                    continue
                else:
                    self.backward_end[action.stage][action.micro_batch] = end
                    follower = max(action.stage - 1, 0)
                if self.owners[follower] != rank:
                    woken.add(self.owners[follower])
            self.clocks[rank] = end
            self.busy[rank] += duration
        return woken

    def _ready(self, action: Action) -> float:
        """When all that the action needs is on its rank; NaN where that is not known yet."""
        kind, mb, stage, _ = action
        if kind == "F":
            return 0.0 if stage == 0 else self.forward_end[stage - 1][mb] + self.link[stage - 1]
        if kind == "W":
            return self.backward_end[stage][mb]
        own = self.forward_end[stage][mb]
        if stage == self.stages - 1:
            return own
        behind = self.backward_end[stage + 1][mb] + self.link[stage]
        # A NaN of either makes the sum NaN; max would drop it.
        return max(own, behind) if not math.isnan(own + behind) else math.nan

    def _duration(self, action: Action) -> float:
        if action.kind == "F":
            return self.forward[action.stage]
        if action.kind == "I":
            return self.input_grad[action.stage]
        if action.kind == "W":
            return self.weight_grad[action.stage]
        return self.input_grad[action.stage] + self.weight_grad[action.stage]

    def _deadlock(self) -> str:
        waits = []
        for rank, (order, ends) in enumerate(zip(self.actions, self.ends, strict=True)):
            if len(ends) == len(order):
                continue
            position = len(ends)
            group = order[position : position + 2] if order[position].paired else order[position : position + 1]
            action = next(action for action in group if math.isnan(self._ready(action)))
            waits.append(f"rank {rank} waits at action {position} ({action}) for {self._missing(action)}")
        more = f"; and {len(waits) - 4} more ranks" if len(waits) > 4 else ""
        return "simulate: deadlock: " + "; ".join(waits[:4]) + more

    def _missing(self, action: Action) -> str:
        kind, mb, stage, _ = action
        if kind == "F":
            needed = Action("F", mb, stage - 1)
        elif kind == "W" or math.isnan(self.forward_end[stage][mb]):
            needed = Action("I" if kind == "W" else "F", mb, stage)
        else:
            needed = Action("I", mb, stage + 1)
        return f"{needed} on rank {self.owners[needed.stage]}"


def peak_activations(order: Sequence[Action], retained: float = 1.0) -> float:
    """The largest number of micro-batches that one rank holds, in the order given: see ``Simulation``.

    ``retained`` is the share of a micro-batch's activations that is held between I and W. In the layers of
    arXiv:2401.10241, section 2.3, it is 32 / (34 + 5as/h); the default of 1 is what autograd holds without more ado.
    """
    change = {"F": 1.0, "I": retained - 1.0, "W": -retained, "B": -1.0}
    held = peak = 0.0
    for action in order:
        held += change[action.kind]
        peak = max(peak, held)
    return peak / len({action.stage for action in order})
