"""The picture of a pipeline as elements of an SVG."""

from collections.abc import Iterable

from parallel_ops.planner.pictures.bars import BUBBLE, COLORS, NAMES, bars, shades
from parallel_ops.planner.schedules.schedule import Simulation

WIDTH, MARGIN = 1200.0, 30.0


def legend(simulation: Simulation) -> Iterable[tuple[str, str]]:
    """Colour and name of each kind of pass, and of the bubble."""
    for kind, pale in shades(simulation):
        yield COLORS[kind][pale][0], NAMES[kind] + (", odd chunks" if pale else "")
    yield BUBBLE, "bubble"


def pipeline_marks(simulation: Simulation) -> tuple[str, float]:
    """The passes over the full width, and the height. It has one path per colour to keep thousands of passes small."""
    ranks = len(simulation.schedule)
    points = (WIDTH - MARGIN) / simulation.step_time
    row = 22.0 if ranks <= 16 else 14.0
    paths: dict[str, list[str]] = {}
    labels = []
    digits = max(len(str(action.micro_batch)) for action in simulation.schedule[0])
    for rank in range(ranks):
        labels.append(
            f'<text x="{MARGIN - 8:g}" y="{(rank + 0.5) * row:g}" text-anchor="end" fill="currentColor">{rank}</text>'
        )
        for bar in bars(simulation, rank):
            fill, ink = COLORS[bar.action.kind][bar.pale]
            height = (row - 2) / (2 if bar.half else 1)
            y = rank * row + 1 + (height if bar.half == 2 else 0)
            left, w = MARGIN + bar.start * points, (bar.end - bar.start) * points
            # A thin gap between passes that are wide enough.
            gap = 0.6 if w > 3 else 0
            paths.setdefault(fill, []).append(f"M{left:.2f} {y:g}h{w - gap:.2f}v{height:g}h{gap - w:.2f}z")
            if w > 6.5 * digits + 2 and height > 9:
                text = f'<text x="{left + w / 2:.1f}" y="{y + height / 2:g}" text-anchor="middle" fill="{ink}">'
                labels.append(f"{text}{bar.action.micro_batch}</text>")
    shapes = "".join(f'<path fill="{fill}" d="{"".join(parts)}"/>' for fill, parts in paths.items())
    tall = ranks * row
    back = f'<rect x="{MARGIN:g}" width="{WIDTH - MARGIN:g}" height="{tall:g}" fill="{BUBBLE}"/>'
    return f"{back}{shapes}{''.join(labels)}", tall
