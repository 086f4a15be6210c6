"""Pictures of pipelines by matplotlib. One row for each rank, time to the right."""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from parallel_ops.planner.memory.timeline import Timeline
from parallel_ops.planner.pictures.bars import BUBBLE, COLORS, NAMES, PARTS, bars, shades
from parallel_ops.planner.results import GIB
from parallel_ops.planner.schedules.schedule import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

PICTURE_FORMATS = (".svg", ".png")

_SMALLEST_FONT = 4.5
# Each label is a matplotlib object; this many take about a second.
_MOST_LABELS = 3000


def save(simulation: Simulation, path: Path, title: str = "", memory: Timeline | None = None) -> None:
    """Saves the picture as SVG or PNG, by the suffix of ``path``. Arguments: see ``figure``.

    Raises:
        ValueError: the suffix is another one.
    """
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise ValueError(f"a picture's name must end in {' or '.join(PICTURE_FORMATS)}, got {path}")
    write(figure(simulation, title, memory), path, path.suffix.lower()[1:])


def write(made: "Figure", file: Path | IO[str], kind: str) -> None:
    """Writes a figure as ``"svg"`` or ``"png"``. Text is stored as text; ids do not change from run to run."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "parallel_ops"}):
        made.savefig(file, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)


def figure(simulation: Simulation, title: str = "", memory: Timeline | None = None) -> "Figure":
    """The picture as a matplotlib figure, with the ``memory`` of a rank below it."""
    from matplotlib.figure import Figure

    width, row, tall = _sizes(simulation)
    below = 2.6 if memory else 0.0
    out = Figure(figsize=(width, 1.45 + tall + below), layout="constrained")
    if memory:
        axes, under = out.subplots(2, sharex=True, height_ratios=(tall + 0.5, below - 0.6))
        _draw_memory(under, memory)
    else:
        axes = out.subplots()
    _draw(axes, simulation, width, row)
    axes.set(xlabel="" if memory else "time")
    handles = _handles(simulation)
    if memory:
        handles += under.get_legend_handles_labels()[0]
    _legend(out, handles, columns=3 if memory else 4)
    if title:
        axes.set_title(title, fontsize=9, loc="left")
    return out


def figure_of_both(pipelines: Sequence[Simulation], captions: Sequence[str], title: str) -> "Figure":
    """Pipelines of the same ranks below each other, each over the full width, with its caption."""
    from matplotlib.figure import Figure

    width, row, tall = _sizes(pipelines[0])
    out = Figure(figsize=(width, 0.9 + len(pipelines) * (0.8 + tall)), layout="constrained")
    for axes, pipeline, text in zip(out.subplots(len(pipelines)), pipelines, captions, strict=True):
        _draw(axes, pipeline, width, row)
        axes.set_xticks((0, pipeline.step_time), ("0", f"{pipeline.step_time:.3g} s"))
        axes.set_title(text, fontsize=9, loc="left")
    out.suptitle(title, fontsize=11)
    _legend(out, _handles(pipelines[0]), columns=4)
    return out


def _sizes(simulation: Simulation) -> tuple[float, float, float]:
    """Inches of the width, of a row, and of all rows."""
    ranks, passes = len(simulation.schedule), max(len(order) for order in simulation.schedule)
    row = 0.36 if ranks <= 16 else 0.22
    return min(16.0, max(7.5, 0.24 * passes)), row, row * ranks


def _draw(axes: "Axes", simulation: Simulation, width: float, row: float) -> None:
    """Draws the passes; ``width`` and ``row``: inches of the figure and of a row."""
    from matplotlib.collections import PolyCollection

    ranks, step = len(simulation.schedule), simulation.step_time
    axes.broken_barh([(0, step)], (-0.5, ranks), facecolor=BUBBLE, edgecolor="none", zorder=0)
    boxes: dict[tuple[str, bool], list[tuple[float, float, float, float]]] = {}
    labels = []
    for rank in range(ranks):
        for bar in bars(simulation, rank):
            top, height = {0: (-0.45, 0.9), 1: (-0.45, 0.45), 2: (0.0, 0.45)}[bar.half]
            boxes.setdefault((bar.action.kind, bar.pale), []).append(
                (bar.start, rank + top, bar.end - bar.start, height)
            )
            labels.append((bar, rank + top + height / 2, height))
    for (kind, pale), rectangles in boxes.items():
        corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in rectangles]
        axes.add_collection(
            PolyCollection(corners, facecolors=COLORS[kind][pale][0], edgecolors="white", linewidths=0.4)
        )
    # In points; a digit is about 0.6 of its size wide. Sized for the longest number, so that equal passes look equal.
    points = 72 * (width - 1) / step
    digits = max(len(str(bar.action.micro_batch)) for bar, _, _ in labels)
    for bar, y, height in labels:
        font = min(8.0, 72 * row * height * 0.7, (bar.end - bar.start) * points / (0.62 * digits + 0.25))
        if font >= _SMALLEST_FONT and len(labels) <= _MOST_LABELS:
            ink = COLORS[bar.action.kind][bar.pale][1]
            text = str(bar.action.micro_batch)
            axes.text((bar.start + bar.end) / 2, y, text, size=font, color=ink, ha="center", va="center_baseline")
    axes.set(xlim=(0, step), ylim=(ranks - 0.5, -0.5), ylabel="rank")
    axes.set_yticks(range(0, ranks, 1 if ranks <= 32 else 4))
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def _handles(simulation: Simulation) -> "list[Patch]":
    from matplotlib.patches import Patch

    found = [
        Patch(facecolor=COLORS[kind][pale][0], label=NAMES[kind] + (", odd chunks" if pale else ""))
        for kind, pale in shades(simulation)
    ]
    return [*found, Patch(facecolor=BUBBLE, label="bubble")]


def _legend(out: "Figure", handles: "list[Patch]", columns: int) -> None:
    """The legend below all; in one row if it has few entries."""
    columns = len(handles) if len(handles) < 5 else columns
    out.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _draw_memory(axes: "Axes", timeline: Timeline) -> None:
    """Draws the parts on top of each other, and the memory of the GPU as a line if it is near."""
    names, limit, peak = timeline.shown(), timeline.limit / GIB, max(timeline.totals) / GIB
    rows = [[value / GIB for value in (*timeline.parts[name], timeline.parts[name][-1])] for name in names]
    colors, labels = zip(*(PARTS[name] for name in names), strict=True)
    axes.stackplot(timeline.times, rows, colors=colors, labels=labels, step="post", linewidth=0)
    axes.axhline(peak, color="#1f2328", linewidth=0.6, linestyle=":")
    if limit < 1.5 * peak:
        axes.axhline(limit, color="#b5473c", linewidth=0.8)
    axes.set(ylim=(0, max(peak, limit if limit < 1.5 * peak else 0) * 1.05), xlabel="seconds", ylabel="GiB")
    axes.set_title(timeline.caption, fontsize=9, loc="left")
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
