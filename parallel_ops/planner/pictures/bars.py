"""The passes of a pipeline as bars, the memory of a rank by part, and their colours: what every picture shares."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from parallel_ops.planner.schedules.schedule import Action, Simulation

# Fill and text colour of a rank's even chunks, and paler ones of odd chunks. The fills also differ in lightness, for
# grey prints and colour-blind readers.
COLORS = {
    "F": (("#3d6fb4", "#ffffff"), ("#a9c4e8", "#12305c")),
    "I": (("#2a9d8f", "#ffffff"), ("#a8dcd4", "#0b4a42")),
    "W": (("#f2b632", "#4a3500"), ("#fbe3ac", "#4a3500")),
    "B": (("#12564d", "#ffffff"), ("#7db5ac", "#06332d")),
}
NAMES = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "whole backward"}
BUBBLE = "#e7e7ea"
# Colour and legend of each part of the memory, from below: not the colours of passes, and of another lightness than its
# neighbours.
PARTS = {
    "states": ("#5b5f73", "parameters, gradients, optimizer"),
    "buffers": ("#b9bccb", "buffers, driver, allocator"),
    "activations": ("#8458b3", "activations in flight"),
    "recomputed": ("#d0bdf4", "recomputed activations"),
    "working": ("#d97b29", "working memory of a layer"),
    "logits": ("#b5473c", "logits"),
}


class Bar(NamedTuple):
    """One pass as drawn. ``pale``: of an odd chunk. ``half``: 0 for a whole row, 1 and 2 for the members of a pair."""

    action: Action
    start: float
    end: float
    pale: bool
    half: int


def bars(simulation: Simulation, rank: int) -> Iterator[Bar]:
    """The passes of one rank in the order of time; the first pass of any rank starts at 0.

    The members of a pair share their row where they overlap. In a measured pipeline they may have run one after the
    other.
    """
    origin = min(starts[0] for starts in simulation.starts)
    ranks = len(simulation.schedule)
    half = 0
    starts = simulation.starts[rank]
    rows = (simulation.schedule[rank], starts, simulation.ends[rank], (*starts[1:], math.inf))
    for action, start, end, following in zip(*rows, strict=True):
        together = action.paired and (following < end or following == start)
        half = 1 if together else 2 if half == 1 else 0
        yield Bar(action, start - origin, end - origin, action.stage // ranks % 2 == 1, half)


def shades(simulation: Simulation) -> list[tuple[str, bool]]:
    """The kinds of pass in the picture, each with whether it is pale."""
    seen = {(bar.action.kind, bar.pale) for bar in bars(simulation, 0)}
    return [(kind, pale) for kind in COLORS for pale in (False, True) if (kind, pale) in seen]
