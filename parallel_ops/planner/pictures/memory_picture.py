"""The memory of a pipeline rank over a step: as text, and under the picture of the pipeline."""

from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

from parallel_ops.planner.memory.timeline import Timeline
from parallel_ops.planner.results import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colour and legend of each part, from below: not the colours of passes, and of another lightness than its neighbours.
PARTS = {
    "states": ("#5b5f73", "parameters, gradients, optimizer"),
    "buffers": ("#b9bccb", "buffers, driver, allocator"),
    "activations": ("#8458b3", "activations in flight"),
    "recomputed": ("#d0bdf4", "recomputed activations"),
    "working": ("#d97b29", "working memory of a layer"),
    "logits": ("#b5473c", "logits"),
}
_ROWS = 10


def caption(timeline: Timeline) -> str:
    """The peak in one line."""
    peak, limit = max(timeline.totals), timeline.limit
    return f"Memory of rank {timeline.rank}: at most {peak / GIB:.1f} GiB of {limit / GIB:.1f}"


def shown(timeline: Timeline) -> list[str]:
    """The parts that are not always empty, from below."""
    return [name for name in PARTS if any(timeline.parts[name])]


def area_text(timeline: Timeline, margin: int, columns: int) -> Text:
    """The memory as coloured text: columns of equal times, each with its largest memory, right of GiB."""
    totals, step = timeline.totals, timeline.times[-1]
    peak = max(totals)
    most = [0] * columns
    for index, total in enumerate(totals):
        first = int(timeline.times[index] / step * columns)
        last = max(first + 1, round(timeline.times[index + 1] / step * columns))
        for column in range(first, min(last, columns)):
            if total > totals[most[column]]:
                most[column] = index
    out, names = Text(no_wrap=True, overflow="crop"), shown(timeline)
    for row in range(_ROWS, 0, -1):
        level = (row - 0.5) / _ROWS * peak
        label = f"{peak * row / _ROWS / GIB:.1f} " if row in (_ROWS, _ROWS // 2) else ""
        out.append(label.rjust(margin)[-margin:])
        for index in most:
            under = 0.0
            for name in names:
                under += timeline.parts[name][index]
                if under >= level:
                    out.append(name[0], Style(color=PARTS[name][0], bgcolor=PARTS[name][0]))
                    break
            else:
                out.append(" ")
        out.append("\n")
    for number, name in enumerate(names):
        out.append(("\n" if number == 3 else "") + " " * margin if number % 3 == 0 else "   ")
        out.append(name[0], Style(color="#ffffff", bgcolor=PARTS[name][0]))
        out.append(f" {PARTS[name][1]}")
    return out


def draw_memory(axes: "Axes", timeline: Timeline) -> None:
    """Draws the parts on top of each other, and the memory of the GPU as a line if it is near."""
    names, limit, peak = shown(timeline), timeline.limit / GIB, max(timeline.totals) / GIB
    rows = [[value / GIB for value in (*timeline.parts[name], timeline.parts[name][-1])] for name in names]
    colors, labels = zip(*(PARTS[name] for name in names), strict=True)
    axes.stackplot(timeline.times, rows, colors=colors, labels=labels, step="post", linewidth=0)
    axes.axhline(peak, color="#1f2328", linewidth=0.6, linestyle=":")
    if limit < 1.5 * peak:
        axes.axhline(limit, color="#b5473c", linewidth=0.8)
    axes.set(ylim=(0, max(peak, limit if limit < 1.5 * peak else 0) * 1.05), xlabel="seconds", ylabel="GiB")
    axes.set_title(caption(timeline), fontsize=9, loc="left")
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
