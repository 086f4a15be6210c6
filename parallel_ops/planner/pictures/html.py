"""A self-contained HTML page about one or several plans, without scripts or external files."""

from collections.abc import Iterable, Sequence
from html import escape

from parallel_ops.planner.compute.software import era
from parallel_ops.planner.error_band import tied
from parallel_ops.planner.export import TARGETS
from parallel_ops.planner.pictures import pipeline_picture
from parallel_ops.planner.pictures.frame import bar, document, legend, table
from parallel_ops.planner.results import DEVICE_MEMORY, GIB, Estimate, NearMiss
from parallel_ops.planner.schedules.schedule import Simulation

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


def page(
    estimates: Sequence[Estimate],
    simulation: Simulation | None = None,
    rejected: Iterable[tuple[str, int, str]] = (),
    misses: Iterable[NearMiss] = (),
) -> str:
    """The text of the page.

    Args:
        estimates: the best plan first; its memory, traffic, pipeline and configurations are shown in full.
        simulation: pipeline of the best plan; ``None`` if it has one stage.
        rejected: kind of reason, number of plans, and an example of the reason.
        misses: see ``SearchResult.misses``.
    """
    best = estimates[0]
    title = f"{best.model.name} on {best.cluster.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(best.plan.describe())}. {best.plan.gpus:,} GPUs, {best.plan.global_batch:,} sequences of "
        f"{best.model.seq_length:,} tokens a step, times with the software of {escape(best.software)} "
        f"({escape(era(best.software).about)}). Figures are estimates, not measurements: "
        f"{escape(best.error_band.sentence())}</p>",
        _figures(best),
        _exports(best),
        _memory(best),
    ]
    if simulation is not None:
        parts += _pipeline(best, simulation)
    parts += [_plans(estimates), _misses(best, list(misses)), _traffic(best), _rejections(list(rejected))]
    return document(title, parts)


def _figures(best: Estimate) -> str:
    peak, band = best.peak_memory, best.error_band
    time, space = f"± {band.time:.0%}", f"± {band.memory:.0%}"
    shown = [
        (f"{best.step:.3g} s", time, "step"),
        (f"{best.tokens_per_second:,.0f}", time, "tokens per second"),
        (f"{best.mfu:.1%}", time, "model FLOP/s utilisation"),
        (f"{best.tflops_per_gpu:,.0f}", time, "TFLOP/s per GPU"),
        (f"{peak.total / GIB:.1f} GiB", space, f"memory of stage {peak.stage}, the most"),
    ]
    if best.cost:
        shown.append((f"{best.cost:,.2f}", time, "cost of a step"))
    if best.energy:
        shown.append((f"{best.energy / 3.6e6:,.1f} kWh", time, "energy of a step"))
    return (
        '<div class="figures">'
        + "".join(f"<div><b>{escape(a)} <i>{b}</i></b><span>{escape(c)}</span></div>" for a, b, c in shown)
        + "</div>"
    )


def _exports(best: Estimate) -> str:
    """The plan as each system's configuration, or the reason why it cannot run it."""
    parts = ["<h2>Configurations</h2>"]
    for name, system in TARGETS.items():
        reason = system.problem(best.model, best.cluster, best.plan)
        if reason is None:
            text = escape(system.write(best.model, best.cluster, best.plan))
            parts.append(f"<details><summary>{name}</summary><pre>{text}</pre></details>")
        else:
            hint = f"{reason}. Search for plans that it can run: <code>plan --for {name}</code>"
            parts.append(f"<details><summary>{name} <span>cannot run this plan</span></summary><p>{hint}</p></details>")
    return "".join(parts)


def _pipeline(best: Estimate, simulation: Simulation) -> list[str]:
    plan, busy = best.plan, simulation.busy
    slowest = max(range(len(busy)), key=busy.__getitem__)
    text = (
        f"{plan.schedule}, one row per rank, {plan.micro_batches:,} micro-batches. The bubble is the time that a rank "
        f"waits for others: {best.bubble_fraction:.1%} of the pipeline's time on the slowest rank, {slowest}, by which "
        "the step is longer"
    )
    mean = simulation.bubble if plan.optimizer_barrier else simulation.bubble_without_barrier
    if mean > best.bubble_fraction + 0.005:
        text += f"; ranks with less to do wait longer, {mean:.1%} on average"
    first, last = pipeline_picture.folded(simulation)
    if last >= first:
        text += f". The dots stand for micro-batches {first} to {last}, which repeat the pattern"
    picture = pipeline_picture.pipeline_svg(simulation, text)
    return [
        f"<h2>Pipeline</h2><p>{escape(text)}.</p>",
        f'<div class="scroll" tabindex="0">{picture}</div>',
        legend(pipeline_picture.legend(simulation)),
    ]


def _memory(best: Estimate) -> str:
    groups = best.stage_groups()
    scale = max(max(group.memory.total, group.gpu.memory) for group in groups)
    rows = []
    for group in groups:
        stage, gpu = group.memory, group.gpu
        segments = [(MEMORY_COLORS[name], name, getattr(stage, name) / scale) for name in DEVICE_MEMORY]
        over = ' class="over"' if stage.total > gpu.memory else ""
        amount = f"{stage.total / GIB:.1f} of {gpu.memory / GIB:.1f} GiB"
        rows.append(f"<span>stage {group.label}</span>{bar(segments)}<span{over}>{amount}</span>")
    return (
        "<h2>Memory of each pipeline stage</h2>"
        + legend((color, name) for name, color in MEMORY_COLORS.items())
        + f'<div class="stages">{"".join(rows)}</div>'
    )


def _plans(estimates: Sequence[Estimate]) -> str:
    slowest = max(estimate.step for estimate in estimates)
    columns = ("#", "plan:", "step", "where it goes", "tokens/s", "MFU", "±", "memory", "±", "rules of thumb broken:")
    best = estimates[0]
    ties = sum(tied(estimate.step, best.step, best.error_band.time) for estimate in estimates)
    rows = []
    for number, estimate in enumerate(estimates, 1):
        segments = [(color, name, getattr(estimate, name) / slowest) for name, color in STEP_COLORS.items()]
        rows.append(
            (
                f"{number} =" if number <= ties > 1 else str(number),
                escape(estimate.plan.describe()),
                f"{estimate.step:.3g} s",
                bar(segments),
                f"{estimate.tokens_per_second:,.0f}",
                f"{estimate.mfu:.1%}",
                f"{estimate.error_band.time:.0%}",
                f"{estimate.peak_memory.total / GIB:.1f} GiB",
                f"{estimate.error_band.memory:.0%}",
                escape("; ".join(reason for _, reason in estimate.broken_rules)),
            )
        )
    names = {"exposed": "exposed communication"}
    causes = legend((color, names.get(name, name)) for name, color in STEP_COLORS.items())
    equal = "<p>Plans marked = are ties within the error: choose the simplest, or time them.</p>" if ties > 1 else ""
    return f"<h2>Plans compared</h2>{equal}{causes}{table(columns, rows)}"


def _misses(best: Estimate, misses: list[NearMiss]) -> str:
    columns = ("plan:", "step", "than the best", "too much memory", "where:")
    rows = [
        (
            escape(miss.plan.describe()),
            f"{miss.seconds:.3g} s",
            f"{miss.seconds / best.step - 1:+.1%}",
            f"{miss.excess / GIB:.1f} GiB",
            escape(miss.reason),
        )
        for miss in misses
    ]
    return f"<h2>Faster plans that need slightly more memory</h2>{table(columns, rows)}" if rows else ""


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
    return f"<h2>Traffic of a step</h2>{table(columns, rows)}" if rows else ""


def _rejections(rejected: list[tuple[str, int, str]]) -> str:
    rows = [(escape(kind), f"{count:,}", escape(example)) for kind, count, example in rejected]
    return f"<h2>Plans that cannot run</h2>{table(('why:', 'plans', 'example, or the nearest:'), rows)}" if rows else ""
