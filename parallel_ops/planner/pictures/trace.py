"""Pictures of a pipeline that ran: under the planned one as SVG, and as a Chrome trace.

A run measures start and end of each action on each pipeline rank. ``measured`` makes a ``Simulation`` of them, so that
a planned and a measured pipeline have the same figures and are drawn alike.
"""

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

from parallel_ops.planner.pictures.bars import NAMES
from parallel_ops.planner.schedules.schedule import Action, Simulation, peak_activations


def measured(
    schedule: Sequence[Sequence[Action]], starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> Simulation:
    """The pipeline that a run measured.

    Args:
        schedule: the actions of each rank, in the order in which they ran.
        starts, ends: seconds on a clock that all ranks share, of each action, in the layout of ``schedule``.

    Returns:
        The pipeline with its first start at 0. ``busy`` counts time in which several actions of a rank overlap once.

    Raises:
        ValueError: the layouts differ, a rank has no action, a time is not finite, an action ends before it starts, or
            one starts before its predecessor.
    """
    sizes = [[len(row) for row in rows] for rows in (schedule, starts, ends)]
    if sizes[0] != sizes[1] or sizes[0] != sizes[2]:
        raise ValueError(f"measured: actions a rank are {sizes[0]}, but starts {sizes[1]} and ends {sizes[2]}")
    if not sizes[0] or not all(sizes[0]):
        raise ValueError("measured: every rank needs at least one action")
    for rank, rows in enumerate(zip(schedule, starts, ends, strict=True)):
        before = -math.inf
        for action, start, end in zip(*rows, strict=True):
            if not (math.isfinite(start) and math.isfinite(end)):
                raise ValueError(f"measured: rank {rank} has {action} from {start} to {end}; times must be finite")
            if end < start or start < before:
                reason = "it ends before it starts" if end < start else f"its predecessor starts at {before}"
                raise ValueError(f"measured: rank {rank} has {action} from {start} to {end}: {reason}")
            before = start
    origin = min(row[0] for row in starts)
    begun, ended = ([[time - origin for time in row] for row in rows] for rows in (starts, ends))
    busy = [_covered(zip(*rows, strict=True)) for rows in zip(begun, ended, strict=True)]
    return Simulation(schedule, begun, ended, busy, tuple(map(peak_activations, schedule)))


def _covered(spans: Iterator[tuple[float, float]]) -> float:
    """Time that spans cover, given in the order of their starts."""
    total, until = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def trace_svg(planned: Simulation, measured: Simulation, *, title: str) -> str:
    """The planned and, under it, the measured pipeline as an SVG file.

    Each is scaled to the full width, so lengths compare within one of them only. Needs matplotlib.

    Args:
        planned: from ``simulate`` or ``StepTime.simulation``, in seconds.
        measured: from ``measured``.
        title: what ran, in one line.

    Raises:
        ValueError: the two have different numbers of ranks, or one takes no time.
    """
    from parallel_ops.planner.pictures.figure import figure_of_both, write  # with all that an estimate imports

    ranks = len(planned.schedule), len(measured.schedule)
    if ranks[0] != ranks[1]:
        raise ValueError(f"trace: the planned pipeline has {ranks[0]} ranks, the measured one {ranks[1]}")
    if not planned.step_time or not measured.step_time:
        raise ValueError("trace: a pipeline that takes no time has no picture")
    out = io.StringIO()
    write(figure_of_both((planned, measured), _captions(planned, measured), title), out, "svg")
    return out.getvalue()


def chrome_trace(measured: Simulation) -> dict[str, Any]:
    """A measured pipeline as a Chrome trace: ``json.dump`` it to a file for Perfetto or chrome://tracing.

    Process 0 is the pipeline and its threads are the ranks; times are in microseconds. The members of a pair whose
    times overlap without one inside the other may be drawn wrongly: the format has no such events in one thread.
    """
    events: list[dict[str, Any]] = [_metadata("process_name", 0, {"name": "pipeline"})]
    for rank, rows in enumerate(zip(measured.schedule, measured.starts, measured.ends, strict=True)):
        events.append(_metadata("thread_name", rank, {"name": f"pipeline rank {rank}"}))
        events.append(_metadata("thread_sort_index", rank, {"sort_index": rank}))
        for action, start, end in zip(*rows, strict=True):
            events.append(
                {
                    "name": str(action),
                    "cat": NAMES[action.kind],
                    "ph": "X",
                    "ts": 1e6 * start,
                    "dur": 1e6 * (end - start),
                    "pid": 0,
                    "tid": rank,
                    "args": {"kind": action.kind, "micro_batch": action.micro_batch, "stage": action.stage},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(name: str, rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 0, "tid": rank, "args": arguments}


def _captions(planned: Simulation, measured: Simulation) -> tuple[str, str]:
    first, second = (f"step {_seconds(each.step_time)}, bubble {each.bubble:.1%}" for each in (planned, measured))
    longer = measured.step_time / planned.step_time - 1
    return (
        f"Planned: {first}, one row per rank; scaled to the full width",
        f"Measured: {second}; scaled to the same width, though its step is {abs(longer):.1%} "
        f"{'longer' if longer >= 0 else 'shorter'}",
    )


def _seconds(time: float) -> str:
    """Seconds or milliseconds."""
    return f"{time:.3g} s" if time >= 1 else f"{1e3 * time:.3g} ms"
