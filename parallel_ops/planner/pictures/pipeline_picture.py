"""The picture of a pipeline as an ``<svg>`` element. The middle of a long one, which repeats, is folded away."""

from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from parallel_ops.planner.pictures.bars import BUBBLE, COLORS, NAMES, bars, shades
from parallel_ops.planner.schedules.schedule import Simulation

WIDTH, MARGIN = 1200.0, 30.0
# Width of the fold, and least width of a pass.
FOLD, NARROWEST = 34.0, 6.0


class Scale(NamedTuple):
    """Horizontal scale: times from ``start`` to ``stop`` are folded to ``FOLD`` points. Without a fold both are the
    end."""

    start: float
    stop: float
    points: float

    def at(self, time: float) -> float:
        """Horizontal position of a time."""
        x = MARGIN + min(time, self.start) * self.points
        return x + FOLD + (time - self.stop) * self.points if time > self.stop else x

    def parts(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """Left and right edges of the visible parts of a pass."""
        if start < self.start:
            yield self.at(start), self.at(min(end, self.start))
        if end > self.stop:
            yield self.at(max(start, self.stop)) + (FOLD if start <= self.stop else 0), self.at(end)


def whole(simulation: Simulation) -> Scale:
    """The scale of a picture without a fold."""
    step = simulation.step_time
    return Scale(step, step, (WIDTH - MARGIN) / step)


def fold(simulation: Simulation) -> Scale:
    """The scale of a picture: the whole pipeline, or both ends if passes would be too narrow.

    Each end has the filling or draining of the pipeline, and as much again of the steady state.
    """
    room, step = WIDTH - MARGIN, simulation.step_time
    passes = max(map(len, simulation.schedule))
    if step / passes * room / step >= NARROWEST:
        return whole(simulation)
    origin = min(starts[0] for starts in simulation.starts)
    # Time to fill or to drain the pipeline, the longer of the two.
    ramp = max(starts[0] for starts in simulation.starts) - origin
    ramp = max(ramp, step - min(ends[-1] for ends in simulation.ends) - origin)
    each = max(2 * ramp, 0.5 * (room - FOLD) / NARROWEST * step / passes)
    if 2 * each > 0.8 * step:
        return whole(simulation)
    return Scale(each, step - each, (room - FOLD) / (2 * each))


def folded(simulation: Simulation) -> tuple[int, int]:
    """The first and last micro-batch whose forward pass on rank 0 is folded away; (0, -1) if none is."""
    scale = fold(simulation)
    numbers = [
        bar.action.micro_batch
        for bar in bars(simulation, 0)
        if bar.action.kind == "F" and bar.start > scale.start and bar.end < scale.stop
    ]
    return (min(numbers), max(numbers)) if numbers else (0, -1)


def legend(simulation: Simulation) -> Iterable[tuple[str, str]]:
    """Colour and name of each kind of pass, and of the bubble."""
    for kind, pale in shades(simulation):
        yield COLORS[kind][pale][0], NAMES[kind] + (", odd chunks" if pale else "")
    yield BUBBLE, "bubble"


def pipeline_svg(simulation: Simulation, label: str) -> str:
    """The pipeline as an ``<svg>`` element."""
    marks, tall = pipeline_marks(simulation, fold(simulation))
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {tall:g}" role="img" aria-label="{escape(label)}" '
        f'font-size="10" dominant-baseline="central">{marks}</svg>'
    )


def pipeline_marks(simulation: Simulation, scale: Scale) -> tuple[str, float]:
    """What such an element contains, and its height. It has one path per colour to keep thousands of passes small."""
    ranks = len(simulation.schedule)
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
            for left, right in scale.parts(bar.start, bar.end):
                w = right - left
                # A thin gap between passes that are wide enough.
                gap = 0.6 if w > 3 else 0
                paths.setdefault(fill, []).append(f"M{left:.2f} {y:g}h{w - gap:.2f}v{height:g}h{gap - w:.2f}z")
                if w > 6.5 * digits + 2 and height > 9:
                    text = f'<text x="{left + w / 2:.1f}" y="{y + height / 2:g}" text-anchor="middle" fill="{ink}">'
                    labels.append(f"{text}{bar.action.micro_batch}</text>")
    shapes = "".join(f'<path fill="{fill}" d="{"".join(parts)}"/>' for fill, parts in paths.items())
    tall = ranks * row
    back = "".join(
        f'<rect x="{left:.2f}" width="{right - left:.2f}" height="{tall:g}" fill="{BUBBLE}"/>'
        for left, right in scale.parts(0.0, simulation.step_time)
    )
    if scale.start < scale.stop < simulation.step_time:
        middle = scale.at(scale.start) + FOLD / 2
        labels += [
            f'<text x="{middle:.1f}" y="{(rank + 0.5) * row:g}" text-anchor="middle" fill="currentColor">···</text>'
            for rank in range(ranks)
        ]
    return f"{back}{shapes}{''.join(labels)}", tall
