"""Pipeline schedules: the actions of each rank, their times and the bubble.

    >>> simulation = simulate(actions("1f1b", pp=4, micro_batches=8))
    >>> round(simulation.bubble, 4)  # (p - 1) / (m + p - 1)
    0.2727

Each family has its own file in ``parallel_ops/planner/schedules/``, with its source.
"""

from collections.abc import Callable

from parallel_ops.planner.schedules.action import (
    WHOLE_BACKWARD,
    Action,
    Kind,
    Schedule,
    micro_batch_problem,
    nearest_micro_batches,
)
from parallel_ops.planner.schedules.memory_bounded import zb_2p
from parallel_ops.planner.schedules.one_f_one_b import gpipe, interleaved_one_f_one_b, one_f_one_b
from parallel_ops.planner.schedules.program import Program
from parallel_ops.planner.schedules.simulate import Simulation, peak_activations, simulate
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
        return interleaved_one_f_one_b(pp, micro_batches, virtual_stages)
    if kind == "zb-2p":
        return zb_2p(pp, micro_batches, times or Times(), 2 * pp if memory_limit is None else memory_limit, retained)
    return _FIXED[kind](pp, micro_batches)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"schedule: kind must be one of {', '.join(KINDS)}, got {kind!r}")
