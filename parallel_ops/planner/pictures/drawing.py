"""Pictures of a simulated schedule: text for the terminal, SVG and PNG. One row for each rank, time to the right."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

from parallel_ops.planner.memory.timeline import Timeline
from parallel_ops.planner.pictures.bars import BUBBLE, COLORS, NAMES, Bar, bars, shades
from parallel_ops.planner.pictures.memory_picture import area_text, draw_memory
from parallel_ops.planner.schedules.schedule import Simulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".svg", ".png")

_SMALLEST_FONT = 4.5
# Each label is a matplotlib object; this many take about a second.
_MOST_LABELS = 3000


def summary(kind: str, simulation: Simulation) -> str:
    """The schedule in one line."""
    ranks = len(simulation.schedule)
    micro_batches = 1 + max(action.micro_batch for action in simulation.schedule[0])
    even = max(simulation.busy) <= min(simulation.busy) * (1 + 1e-9)
    bubble = f"bubble {simulation.bubble:.1%}{'' if even else ' on average over the ranks'}"
    if simulation.step_time_without_barrier < simulation.step_time * (1 - 1e-9):
        bubble += f" ({simulation.bubble_without_barrier:.1%} with no barrier at the optimizer)"
    peak = max(simulation.peak_activations)
    return f"{kind}, {ranks} ranks, {micro_batches} micro-batches: {bubble}, at most {peak:.4g} micro-batches in flight"


def text(simulation: Simulation, width: int) -> Text:
    """The schedule as coloured text of at most ``width`` columns.

    A pass has its letter, lower case for odd chunks of a rank, and its micro-batch if there is room. Dots are idle
    time. Passes shorter than a column are left out, so a long schedule still shows its outline.
    """
    margin, scale, columns = _columns(simulation, width)
    out = Text(no_wrap=True, overflow="crop")
    for rank in range(len(simulation.schedule)):
        out.append(f"rank {rank} ".rjust(margin))
        column = 0
        for bar in bars(simulation, rank):
            # The members of a pair share their time; each gets half of it in a row of text.
            middle = (bar.start + bar.end) / 2
            first = round((middle if bar.half == 2 else bar.start) * scale)
            last = min(round((middle if bar.half == 1 else bar.end) * scale), columns)
            if last <= column:
                continue
            out.append("·" * (first - column), Style(dim=True))
            _append_cell(out, bar, last - max(first, column))
            column = last
        out.append("·" * (columns - column) + "\n", Style(dim=True))
    seen = shades(simulation)
    out.append(" " * margin)
    for kind in dict.fromkeys(kind for kind, _ in seen):
        out.append(kind, _style(kind, False))
        out.append(f" {NAMES[kind]}   ")
    out.append("·", Style(dim=True))
    out.append(" idle")
    if any(pale for _, pale in seen):
        out.append("\n" + " " * margin)
        for kind in (kind for kind, pale in seen if pale):
            out.append(kind.lower(), _style(kind, True))
        out.append(" the same for odd chunks of a rank")
    return out


def memory_text(simulation: Simulation, memory: Timeline, width: int) -> Text:
    """The memory of a rank as coloured text under that of ``text``."""
    margin, _, columns = _columns(simulation, width)
    return area_text(memory, margin, columns)


def _columns(simulation: Simulation, width: int) -> tuple[int, float, int]:
    """Columns of the names of ranks, columns of a unit of time, and columns of the step."""
    margin = len(f"rank {len(simulation.schedule) - 1} ")
    room = max(1, width - margin)
    # A whole number of columns for the shortest pass keeps equal passes equally wide.
    shortest = min(bar.end - bar.start for bar in bars(simulation, 0) if bar.end > bar.start)
    whole = int(room * shortest / simulation.step_time)
    scale = whole / shortest if whole else room / simulation.step_time
    return margin, scale, max(1, round(simulation.step_time * scale))


def _append_cell(out: Text, bar: Bar, width: int) -> None:
    letter = bar.action.kind.lower() if bar.pale else bar.action.kind
    label = f"{letter}{bar.action.micro_batch}"
    out.append((label if len(label) <= width else letter)[:width].ljust(width), _style(bar.action.kind, bar.pale))


def _style(kind: str, pale: bool) -> Style:
    fill, ink = COLORS[kind][pale]
    return Style(color=ink, bgcolor=fill)


def save(simulation: Simulation, path: Path, title: str = "", memory: Timeline | None = None) -> None:
    """Saves the picture as SVG or PNG, by the suffix of ``path``. Arguments: see ``figure``.

    Raises:
        ValueError: the suffix is another one.
    """
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise ValueError(f"a picture's name must end in {' or '.join(PICTURE_FORMATS)}, got {path}")
    from matplotlib import rc_context

    # Text is stored as text; ids do not change from run to run.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "parallel_ops"}):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure(simulation, title, memory).savefig(path, dpi=160, metadata=metadata)


def figure(simulation: Simulation, title: str = "", memory: Timeline | None = None) -> "Figure":
    """The picture as a matplotlib figure, with the ``memory`` of a rank below it."""
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = len(simulation.schedule)
    passes = max(len(order) for order in simulation.schedule)
    row = 0.36 if ranks <= 16 else 0.22
    high, below = 1.45 + row * ranks, 2.6 if memory else 0.0
    size = (min(16.0, max(7.5, 0.24 * passes)), high + below)
    out = Figure(figsize=size, layout="constrained")
    if memory:
        axes, under = out.subplots(2, sharex=True, height_ratios=(row * ranks + 0.5, below - 0.6))
        draw_memory(under, memory)
    else:
        axes = out.subplots()
    step = simulation.step_time
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
    points = 72 * (size[0] - 1) / step
    digits = max(len(str(bar.action.micro_batch)) for bar, _, _ in labels)
    for bar, y, height in labels:
        font = min(8.0, 72 * row * height * 0.7, (bar.end - bar.start) * points / (0.62 * digits + 0.25))
        if font >= _SMALLEST_FONT and len(labels) <= _MOST_LABELS:
            ink = COLORS[bar.action.kind][bar.pale][1]
            text = str(bar.action.micro_batch)
            axes.text((bar.start + bar.end) / 2, y, text, size=font, color=ink, ha="center", va="center_baseline")
    handles = [
        Patch(facecolor=COLORS[kind][pale][0], label=NAMES[kind] + (", odd chunks" if pale else ""))
        for kind, pale in shades(simulation)
    ]
    handles.append(Patch(facecolor=BUBBLE, label="bubble"))
    if memory:
        handles += under.get_legend_handles_labels()[0]
    axes.set(xlim=(0, step), ylim=(ranks - 0.5, -0.5), xlabel="" if memory else "time", ylabel="rank")
    axes.set_yticks(range(0, ranks, 1 if ranks <= 32 else 4))
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    out.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles) if len(handles) < 5 else 3 if memory else 4,
        frameon=False,
        fontsize=8,
    )
    if title:
        axes.set_title(title, fontsize=9, loc="left")
    return out
