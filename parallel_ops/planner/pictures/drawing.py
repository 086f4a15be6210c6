"""Pictures of a simulated schedule as text for the terminal. One row for each rank, time to the right."""

from rich.style import Style
from rich.text import Text

from parallel_ops.planner.memory.timeline import Timeline
from parallel_ops.planner.pictures.bars import COLORS, NAMES, PARTS, Bar, bars, shades
from parallel_ops.planner.results import GIB
from parallel_ops.planner.schedules.schedule import Simulation

# Rows of the memory.
_ROWS = 10


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
    """The memory of a rank as coloured text under that of ``text``: columns of equal times, each with its largest
    memory, right of GiB."""
    margin, _, columns = _columns(simulation, width)
    totals, step = memory.totals, memory.times[-1]
    peak = max(totals)
    most = [-1] * columns
    for index, total in enumerate(totals):
        first = int(memory.times[index] / step * columns)
        last = max(first + 1, round(memory.times[index + 1] / step * columns))
        for column in range(first, min(last, columns)):
            if most[column] < 0 or total > totals[most[column]]:
                most[column] = index
    out, names = Text(no_wrap=True, overflow="crop"), memory.shown()
    for row in range(_ROWS, 0, -1):
        level = (row - 0.5) / _ROWS * peak
        label = f"{peak * row / _ROWS / GIB:.1f} " if row in (_ROWS, _ROWS // 2) else ""
        out.append(label.rjust(margin)[-margin:])
        for index in most:
            under = 0.0
            for name in names:
                under += memory.parts[name][index]
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


def _columns(simulation: Simulation, width: int) -> tuple[int, float, int]:
    """Columns of the names of ranks, columns of a unit of time, and columns of the step."""
    ranks = len(simulation.schedule)
    margin = len(f"rank {ranks - 1} ")
    room = max(1, width - margin)
    # A whole number of columns for the shortest pass keeps equal passes equally wide.
    passes = (bar for rank in range(ranks) for bar in bars(simulation, rank))
    shortest = min(bar.end - bar.start for bar in passes if bar.end > bar.start)
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
