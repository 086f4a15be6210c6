"""When a rank of a pipeline posts its receives, so that ranks may stand still at any time.

Messages run on streams of their own, and a receive that is posted keeps its stream until the message comes. Other
streams go on, but the host may not: loading a kernel, which CUDA does at its first launch, and giving memory back to
the device wait until the device has nothing left to do (CUDA C++ Programming Guide, "Lazy Loading", on concurrent
kernels). A rank that posts a receive before work that its peer needs in order to send can so wait for itself. On an
H100 1F1B with receives posted two ahead stood in its first step.

So a receive is posted when its sender has computed the message, by a clock on which every part of the list takes one
unit. Before a part may then stand only what parts with earlier starts compute, on whichever rank, and nothing waits in
a circle even if each part waits for all messages that its rank has posted before it.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from parallel_ops.pipeline_parallel.cut import Stages
from parallel_ops.planner.schedules.action import Action


class Key(NamedTuple):
    """What a message is: the input of a stage's F, or the gradient of its output for I or B.

    Attributes:
        kind: ``"F"`` or ``"B"``. stage: The stage that reads it. micro_batch: From 0.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        what = "activations" if self.kind == "F" else "gradients"
        return f"{what} of micro-batch {self.micro_batch} for stage {self.stage}"


class Place(NamedTuple):
    """A place in a rank's list: before an action, or within B, before its weight gradients."""

    action: Action
    weights: bool = False


class _Work(NamedTuple):
    """What runs between two places: an action, a pair, or the weight gradients of B."""

    place: Place
    reads: list[Key]
    sends: list[Key]
    units: int


def sent_by(action: Action, stages: int) -> Key | None:
    """The message that an action produces; ``None`` at the ends of the model."""
    kind, micro_batch, stage = action[:3]
    if kind == "F":
        return Key("F", stage + 1, micro_batch) if stage + 1 < stages else None
    if kind in ("I", "B"):
        return Key("B", stage - 1, micro_batch) if stage else None
    return None


def read_by(action: Action, stages: int) -> Key | None:
    """The message that an action waits for; ``None`` at the ends of the model, and of W."""
    kind, micro_batch, stage = action[:3]
    if kind == "F":
        return Key("F", stage, micro_batch) if stage else None
    if kind in ("I", "B"):
        return Key("B", stage, micro_batch) if stage + 1 < stages else None
    return None


def receives_of(schedule: Sequence[Sequence[Action]], stages: Stages, rank: int) -> dict[Place, list[tuple[int, Key]]]:
    """The receives that a rank posts at each place of its list, in their order: from which rank, and what.

    Raises:
        ValueError: The actions wait for each other in a circle.
    """
    lists = [deque(_works(order, stages.count)) for order in schedule]
    clocks, left, starts = [0] * len(lists), dict[Key, int](), list[tuple[int, Place]]()
    while any(lists):
        moved = False
        for peer, works in enumerate(lists):
            while works and all(key in left for key in works[0].reads):
                work, moved = works.popleft(), True
                start = max([clocks[peer], *(left[key] for key in work.reads)])
                clocks[peer] = start + work.units
                if peer == rank:
                    starts.append((start, work.place))
                left |= dict.fromkeys(work.sends, clocks[peer])
        if not moved:
            raise ValueError("pipeline: the actions of the schedule wait for each other in a circle")
    receives: dict[Place, list[tuple[int, Key]]] = {}
    for key, at in sorted(left.items(), key=lambda item: item[1]):  # of equal times, as their sender sends them
        sender = stages.rank_of(key.stage - 1 if key.kind == "F" else key.stage + 1)
        if stages.rank_of(key.stage) == rank != sender:
            _, place = starts[bisect_left(starts, at, key=lambda start: start[0])]
            receives.setdefault(place, []).append((sender, key))
    return receives


def _works(order: Sequence[Action], stages: int) -> Iterator[_Work]:
    group: list[Action] = []
    for action in order:
        group.append(action)
        if action.paired:
            continue
        reads, sends = ([key for each in group if (key := of(each, stages)) is not None] for of in (read_by, sent_by))
        yield _Work(Place(group[0]), reads, sends, len(group))
        if action.kind == "B":
            yield _Work(Place(action, weights=True), [], [], 1)
        group = []
