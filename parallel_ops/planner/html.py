"""One HTML page about one or several plans, complete in itself: no script, no font, no picture comes from elsewhere."""

from collections.abc import Iterable, Sequence
from html import escape

from parallel_ops.planner import drawing
from parallel_ops.planner.results import DEVICE_MEMORY, GIB, Estimate
from parallel_ops.planner.schedule import Simulation
from parallel_ops.planner.stage_groups import stage_groups

MEMORY_COLORS = {
    "parameters": "#3d6fb4",
    "gradients": "#7f9fd6",
    "optimizer": "#1b3a66",
    "activations": "#2a9d8f",
    "logits": "#8fcfc5",
    "buffers": "#f2b632",
    "runtime": "#a3a3ad",
}
STEP_COLORS = {"compute": "#3d6fb4", "bubble": "#c9c9d0", "exposed": "#e07a3f", "optimizer": "#1b3a66"}

_STYLE = """
:root { color-scheme: light dark; --line: #d9d9de; --quiet: #63636e; --track: #ededf0; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3c3c44; --quiet: #a5a5b0; --track: #2c2c33; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1.25rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p, .legend { color: var(--quiet); margin: .25rem 0 .75rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.figures div { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.figures b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.figures span { color: var(--quiet); font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; }
td.wide, th.wide { text-align: left; white-space: normal; min-width: 15rem; }
.bar { display: flex; height: 1.1rem; min-width: 8rem; background: var(--track); border-radius: .2rem;
  overflow: hidden; }
.stages { display: grid; grid-template-columns: auto 1fr auto; gap: .3rem .7rem; align-items: center; }
.stages span { font-variant-numeric: tabular-nums; white-space: nowrap; }
.over { color: var(--bad); font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .85rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem; margin-right: .35rem;
  vertical-align: -.08rem; }
svg { display: block; width: 100%; min-width: 44rem; }
"""


def page(
    estimates: Sequence[Estimate], simulation: Simulation | None = None, rejected: Iterable[tuple[str, int, str]] = ()
) -> str:
    """The page.

    Args:
        estimates: the best plan first; its memory, traffic and pipeline are shown in full.
        simulation: its pipeline; None where it has one stage.
        rejected: kind of reason, number of plans, an example of the reason.
    """
    best = estimates[0]
    title = f"{best.model.name} on {best.cluster.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(best.plan.describe())}. {best.plan.gpus:,} GPUs, {best.plan.global_batch:,} sequences of "
        f"{best.model.sequence:,} tokens a step. Figures are estimates, not measurements.</p>",
        _figures(best),
        _memory(best),
    ]
    if simulation is not None:
        summary = drawing.summary(best.plan.schedule, simulation)
        picture = f'<div class="scroll" tabindex="0">{pipeline_svg(simulation, summary)}</div>'
        parts += [
            "<h2>Pipeline</h2>",
            f"<p>{escape(summary)}. One row a rank.</p>",
            picture,
            _legend(_pipeline_legend(simulation)),
        ]
    parts += [_plans(estimates), _traffic(best), _rejections(list(rejected))]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _figures(best: Estimate) -> str:
    peak = best.peak_memory
    shown = [
        (f"{best.step:.3g} s", "step"),
        (f"{best.tokens_per_second:,.0f}", "tokens per second"),
        (f"{best.mfu:.1%}", "model FLOP/s utilisation"),
        (f"{best.tflops_per_gpu:,.0f}", "TFLOP/s per GPU"),
        (f"{peak.total / GIB:.1f} GiB", f"memory of stage {peak.stage}, the most"),
        (f"{best.bubble_fraction:.1%}", "bubble of the slowest stage"),
    ]
    if best.cost:
        shown.append((f"{best.cost:,.2f}", "cost of a step"))
    if best.energy:
        shown.append((f"{best.energy / 3.6e6:,.1f} kWh", "energy of a step"))
    return (
        '<div class="figures">'
        + "".join(f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in shown)
        + "</div>"
    )


def _memory(best: Estimate) -> str:
    groups = stage_groups(best)
    scale = max(max(group.memory.total, group.gpu.memory) for group in groups)
    rows = []
    for group in groups:
        stage, gpu = group.memory, group.gpu
        segments = [(MEMORY_COLORS[name], name, getattr(stage, name) / scale) for name in DEVICE_MEMORY]
        over = ' class="over"' if stage.total > gpu.memory else ""
        amount = f"{stage.total / GIB:.1f} of {gpu.memory / GIB:.1f} GiB"
        rows.append(f"<span>stage {group.label}</span>{_bar(segments)}<span{over}>{amount}</span>")
    return (
        "<h2>Memory of each pipeline stage</h2>"
        + _legend((color, name) for name, color in MEMORY_COLORS.items())
        + f'<div class="stages">{"".join(rows)}</div>'
    )


def _plans(estimates: Sequence[Estimate]) -> str:
    slowest = max(estimate.step for estimate in estimates)
    columns = ("#", "plan:", "step", "where it goes", "tokens/s", "MFU", "memory", "bubble", "rules of thumb broken:")
    rows = []
    for number, estimate in enumerate(estimates, 1):
        segments = [(color, name, getattr(estimate, name) / slowest) for name, color in STEP_COLORS.items()]
        rows.append(
            (
                str(number),
                escape(estimate.plan.describe()),
                f"{estimate.step:.3g} s",
                _bar(segments),
                f"{estimate.tokens_per_second:,.0f}",
                f"{estimate.mfu:.1%}",
                f"{estimate.peak_memory.total / GIB:.1f} GiB",
                f"{estimate.bubble_fraction:.1%}",
                escape("; ".join(reason for _, reason in estimate.broken_rules)),
            )
        )
    names = {"exposed": "exposed communication"}
    legend = _legend((color, names.get(name, name)) for name, color in STEP_COLORS.items())
    return f"<h2>Plans compared</h2>{legend}{_table(columns, rows)}"


def _traffic(best: Estimate) -> str:
    columns = ("collective:", "ranks", "link", "count", "sent by a GPU", "time", "exposed")
    rows = [
        (
            escape(f"{t.group} {t.collective} ({t.algorithm})"),
            f"{t.size:,}",
            escape(t.link),
            f"{t.count:,}",
            f"{t.bytes / 1e9:,.2f} GB",
            f"{t.seconds:.3g} s",
            f"{t.exposed:.3g} s",
        )
        for t in best.transfers
    ]
    return f"<h2>Traffic of a step</h2>{_table(columns, rows)}" if rows else ""


def _rejections(rejected: list[tuple[str, int, str]]) -> str:
    rows = [(escape(kind), f"{count:,}", escape(example)) for kind, count, example in rejected]
    return f"<h2>Plans that cannot run</h2>{_table(('why:', 'plans', 'for example:'), rows)}" if rows else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of HTML cells that scrolls in itself; a column whose name ends in a colon holds sentences."""
    classes = [' class="wide"' if name.endswith(":") else "" for name in columns]
    head = "".join(f"<th{kind}>{escape(name.rstrip(':'))}</th>" for name, kind in zip(columns, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><tr>{head}</tr>{body}</table></div>'


def _bar(segments: Iterable[tuple[str, str, float]]) -> str:
    """Parts of a whole, each as a colour, a name and a share of the width."""
    parts = "".join(
        f'<div style="width:{100 * share:.2f}%;background:{color}" title="{escape(name)}"></div>'
        for color, name, share in segments
        if share > 0
    )
    return f'<div class="bar">{parts}</div>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for color, name in entries)
    return f'<div class="legend">{items}</div>'


def _pipeline_legend(simulation: Simulation) -> Iterable[tuple[str, str]]:
    for kind, pale in drawing.legend(simulation):
        yield drawing.COLORS[kind][pale][0], drawing.NAMES[kind] + (", odd chunks" if pale else "")
    yield drawing.BUBBLE, "bubble"


def pipeline_svg(simulation: Simulation, label: str) -> str:
    """The pipeline as an ``<svg>`` element: one path for each colour, so that thousands of passes stay small."""
    ranks = len(simulation.schedule)
    width, margin, row = 1200.0, 30.0, 22.0 if ranks <= 16 else 14.0
    scale = (width - margin) / simulation.step_time
    paths: dict[str, list[str]] = {}
    labels = []
    digits = max(len(str(action.micro_batch)) for action in simulation.schedule[0])
    for rank in range(ranks):
        labels.append(
            f'<text x="{margin - 8:g}" y="{(rank + 0.5) * row:g}" text-anchor="end" fill="currentColor">{rank}</text>'
        )
        for bar in drawing.bars(simulation, rank):
            fill, ink = drawing.COLORS[bar.action.kind][bar.pale]
            x, w = margin + bar.start * scale, (bar.end - bar.start) * scale
            height = (row - 2) / (2 if bar.half else 1)
            y = rank * row + 1 + (height if bar.half == 2 else 0)
            # A hair of bubble between passes, while they are wide enough for it.
            gap = 0.6 if w > 3 else 0
            paths.setdefault(fill, []).append(f"M{x:.2f} {y:g}h{w - gap:.2f}v{height:g}h{gap - w:.2f}z")
            if w > 6.5 * digits + 2 and height > 9:
                text = f'<text x="{x + w / 2:.1f}" y="{y + height / 2:g}" text-anchor="middle" fill="{ink}">'
                labels.append(f"{text}{bar.action.micro_batch}</text>")
    shapes = "".join(f'<path fill="{fill}" d="{"".join(parts)}"/>' for fill, parts in paths.items())
    back = f'<rect x="{margin:g}" width="{width - margin:g}" height="{ranks * row:g}" fill="{drawing.BUBBLE}"/>'
    return (
        f'<svg viewBox="0 0 {width:g} {ranks * row:g}" role="img" aria-label="{escape(label)}" '
        f'font-size="10" dominant-baseline="central">{back}{shapes}{"".join(labels)}</svg>'
    )
