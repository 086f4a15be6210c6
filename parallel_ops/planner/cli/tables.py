"""Output of the commands: tables and JSON."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from parallel_ops.planner.compute.software import era, fitted_constants
from parallel_ops.planner.error_band import error_band
from parallel_ops.planner.export import systems
from parallel_ops.planner.export.trainer import TRAINER
from parallel_ops.planner.feasibility import memory_problem
from parallel_ops.planner.results import DEVICE_MEMORY, GIB, Estimate, Rejection, SearchResult
from parallel_ops.planner.schedules.schedule import Simulation
from parallel_ops.planner.training_run import Expected
from parallel_ops.planner.validation import Report
from parallel_ops.planner.validation.measurement import Measurement

# Legend of Plan.describe.
NOTATION = (
    "dp, tp, pp, cp, ep: data, tensor, pipeline, context and expert parallelism, 1 where not named; zero: ZeRO stage; "
    "sp: sequence parallelism; b2 x 64: 64 micro-batches of 2 sequences; fp8: linears of layers, MFU of that peak; "
    "in italics: rules of thumb that a plan breaks."
)


# Constants that change neither the choice nor the step time by this share are left out.
MATTERS = 0.005


def heading(estimate: Estimate) -> str:
    """Model, cluster, GPUs, batch and software in one line."""
    gpus = estimate.cluster.gpus
    machine = f"{estimate.cluster.name} ({gpus:,} GPU{'' if gpus == 1 else 's'})"
    batch = f"{estimate.plan.global_batch:,} x {estimate.model.seq_length:,} tokens a step"
    return f"{estimate.model.name} on {machine}, {batch}, times with the software of {estimate.software}"


def whose_times(estimates: Sequence[Estimate]) -> str:
    """Says which software the times are of, beside the systems that a plan runs in."""
    name = estimates[0].software
    other = "" if name == TRAINER.software else f", {TRAINER.software} for parallel-ops train"
    return f"Times are of {name} ({era(name).about}) whatever a plan runs in; --software takes another{other}."


def names(presets: Mapping[str, Sequence[str]]) -> Table:
    """The presets by kind."""
    out = _table()
    out.add_column("")
    out.add_column("names", ratio=1)
    for kind, found in presets.items():
        out.add_row(kind, ", ".join(found))
    return out


def _table(title: str = "") -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title=title or None, title_justify="left")


def tied(result: SearchResult, ties: int) -> str:
    """A sentence about ties; empty if there are none."""
    if ties < 2:
        return ""
    simplest = result.simplest.plan.describe()
    return f"The {ties} plans marked = are ties within this error: time them, or take the simplest, {simplest}."


def plans(estimates: Sequence[Estimate], ties: int = 1) -> Table:
    """Ranked plans, the first ``ties`` marked as equal, each with the rules of thumb that it breaks."""
    out = _table()
    out.add_column("#", justify="right")
    out.add_column("plan", ratio=1)
    # The first ± is of step, tokens/s and MFU, the second of memory.
    for name in ("step", "tokens/s", "MFU", "±", "memory", "±", "bubble"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("runs in")
    for number, estimate in enumerate(estimates, 1):
        plan = Text(estimate.plan.describe())
        for _, reason in estimate.broken_rules:
            plan.append(f"\n{reason}", "dim italic")
        out.add_row(
            f"{number}{'=' if number <= ties > 1 else ' '}",
            plan,
            seconds(estimate.step),
            f"{estimate.tokens_per_second:,.0f}",
            f"{estimate.mfu:.1%}",
            f"{estimate.error_band.time:.0%}",
            f"{estimate.peak_memory.total / GIB:.1f} GiB",
            f"{estimate.error_band.memory:.0%}",
            f"{estimate.bubble_fraction:.1%}",
            ", ".join(systems(estimate.model, estimate.cluster, estimate.plan)),
        )
    return out


def misses(result: SearchResult, count: int = 3) -> Table:
    """The near misses, see ``SearchResult.misses``."""
    out = _table("Faster plans that need slightly more memory")
    out.add_column("plan", ratio=1)
    for name in ("step", "too much"):
        out.add_column(name, justify="right", no_wrap=True)
    for miss in result.misses[:count]:
        out.add_row(miss.plan.describe(), seconds(miss.seconds), f"{miss.excess / GIB:.1f} GiB")
    return out


def rejections(result: SearchResult) -> Table:
    """Reasons for rejections, each with an example: for memory, the plan with the least excess."""
    out = _table("Plans that cannot run")
    out.add_column("why")
    out.add_column("plans", justify="right")
    out.add_column("example, or the nearest", ratio=1)
    for kind, count, nearest in nearest_rejections(result):
        out.add_row(kind, f"{count:,}", f"{nearest.plan.describe()}: {nearest.reason}")
    return out


def nearest_rejections(result: SearchResult) -> list[tuple[str, int, Rejection]]:
    """Kind of reason, number of plans, and the one that lacks the least memory."""
    examples: dict[str, Rejection] = {}
    for rejection in result.rejected:
        if rejection.excess < examples.setdefault(rejection.kind, rejection).excess:
            examples[rejection.kind] = rejection
    return [(kind, count, examples[kind]) for kind, count in result.reasons().items()]


def sensitivity(result: SearchResult) -> list[str]:
    """Sensitivity to each constant that matters, one sentence each."""
    lines = []
    for entry in result.sensitivity:
        if not entry.changes and abs(entry.seconds) < MATTERS:
            continue
        line = f"{entry.constant}: {abs(entry.seconds):.1%} of the step time between -20 % and +20 %"
        for change, plan in (("-20 %", entry.low), ("+20 %", entry.high)):
            if entry.changes and plan != result.best.plan:
                line += f"; at {change} the best plan is {plan.describe()}"
        lines.append(line)
    return lines


def summary(estimate: Estimate) -> Table:
    """Time by cause, throughput, utilisation and memory of one estimate."""
    out = _table()
    out.add_column(estimate.plan.describe())
    out.add_column("", justify="right")
    out.add_column("±", justify="right")
    for name in ("compute", "bubble", "exposed", "optimizer"):
        label = "exposed communication" if name == "exposed" else name
        out.add_row(label, f"{seconds(getattr(estimate, name))}  {getattr(estimate, name) / estimate.step:6.1%}")
    time, space = f"{estimate.error_band.time:.0%}", f"{estimate.error_band.memory:.0%}"
    out.add_row("step", f"{seconds(estimate.step)}  {1:6.1%}", time)
    out.add_section()
    out.add_row("tokens per second", f"{estimate.tokens_per_second:,.0f}", time)
    out.add_row("TFLOP/s per GPU", f"{estimate.tflops_per_gpu:,.1f}", time)
    out.add_row("model, hardware FLOP/s utilisation", f"{estimate.mfu:.1%}, {estimate.hfu:.1%}", time)
    peak = estimate.peak_memory
    out.add_row(f"memory of stage {peak.stage}, the most", f"{peak.total / GIB:.1f} GiB", space)
    out.add_row("bubble: the slowest rank waits, of the pipeline's time", f"{estimate.bubble_fraction:.1%}")
    if estimate.cost:
        out.add_row("cost of a step", f"{estimate.cost:,.2f}", time)
    if estimate.energy:
        out.add_row("energy of a step", f"{estimate.energy / 3.6e6:,.2f} kWh", time)
    return out


def run(found: Expected) -> Table:
    """Cost of a whole run."""
    out = _table("The run")
    out.add_column("")
    out.add_column("", justify="right")
    out.add_row("days", f"{found.days:,.1f}")
    out.add_row("steps", f"{found.steps:,.0f}")
    saved = f"a checkpoint of {found.checkpoint:,.0f} s every {found.interval / 60:,.0f} min"
    lost = f"{found.failures:,.1f} failures; {saved}"
    out.add_row(f"goodput ({lost})", f"{found.goodput:.1%}")
    out.add_row("GPU hours", f"{found.gpu_hours:,.0f}")
    for label, value in (
        ("price of the GPU hours", found.money),
        ("kWh", found.kwh),
        ("price of the energy", found.energy),
    ):
        if value:
            out.add_row(label, f"{value:,.0f}")
    return out


def memory(estimate: Estimate) -> Table:
    """Memory of each stage in GiB."""
    out = _table("Memory of one GPU, GiB")
    short = dict(zip(DEVICE_MEMORY, ("params", "grads", "optim", "activ", "logits", "buffer", "system"), strict=True))
    for name in ("stage", *DEVICE_MEMORY, "total", "of"):
        out.add_column(short.get(name, name), justify="right", no_wrap=True)
    for group in estimate.stage_groups():
        parts = [f"{getattr(group.memory, name) / GIB:.1f}" for name in (*DEVICE_MEMORY, "total")]
        out.add_row(group.label, *parts, f"{group.gpu.memory / GIB:.1f}")
    return out


def transfers(estimate: Estimate) -> Table:
    """Traffic of a step by group and collective."""
    out = _table("Communication of a step")
    out.add_column("collective", ratio=1)
    out.add_column("link")
    for name in ("ranks", "count", "GB sent", "time", "exposed"):
        out.add_column(name, justify="right", no_wrap=True)
    for t in estimate.transfers:
        numbers = (f"{t.size:,}", f"{t.count:,}", f"{t.bytes / 1e9:,.2f}", seconds(t.seconds), seconds(t.exposed))
        out.add_row(f"{t.group} {t.collective}, {t.algorithm}", t.link, *numbers)
    return out


def summaries(report: Report) -> Table:
    """The errors of each quantity of each published table."""
    out = _table("Errors against published tables: positive is too slow, or too much")
    out.add_column("table", ratio=1)
    out.add_column("quantity")
    for name in ("rows", "fitted", "mean", "bias", "largest"):
        out.add_column(name, justify="right", no_wrap=True)
    for found in report.summaries():
        errors = f"{found.mean:.1%}", f"{found.bias:+.1%}", f"{found.largest:+.1%}"
        out.add_row(
            f"{found.source.partition(':')[0].partition(',')[0]}: {found.table}",
            found.quantity,
            str(found.rows),
            str(found.fitted),
            *errors,
        )
    return out


def own_runs(rows: Sequence[Measurement]) -> Table:
    """Measured and predicted seconds of a step, for runs of a user's own."""
    out = _table("Seconds of a step: positive errors are too slow")
    out.add_column("run", ratio=1)
    for name in ("measured", "planner", "error", "±"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in own_runs_data(rows):
        seconds, found = row["measured"], row["predicted"]
        figures = f"{seconds:.4g}", f"{found:.4g}", f"{found / seconds - 1:+.1%}", f"{row['band']:.0%}"
        out.add_row(f"{row['table']}: {row['run']}", *figures)
    return out


def own_runs_data(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Data of ``own_runs``."""
    return [
        {
            "table": row.table, "run": row.name, "measured": row.seconds, "predicted": row.predicted(),
            "band": error_band(row.cluster, row.plan, software=row.software, experts=row.model.expert_kind).time,
        }
        for row in rows
    ]  # fmt: skip


def left_out(report: Report) -> Table:
    """The errors of each table of step times with constants that were fitted without it."""
    out = _table("Step times of each table, fitted without it, and what that changes for the other tables")
    out.add_column("table", ratio=1)
    for name in ("rows", "mean", "bias", "others", "most moved", ""):
        out.add_column(name, justify="right", no_wrap=True)
    for found in report.left_out:
        others = f"{found.others:+.1%}", f"{found.most:+.1%}", found.most_moved
        out.add_row(found.table, str(found.rows), f"{found.mean:.1%}", f"{found.bias:+.1%}", *others)
    return out


def constants() -> Table:
    """The fitted constants of software, their values in fits that leave out one table each, and their tables."""
    out = _table("Fitted constants of software, and their range when any one table is left out")
    out.add_column("constant", no_wrap=True)
    for name in ("value", "range"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("tables that carry it", ratio=1)
    for found in fitted_constants():
        few = f" (range: ± {found.half_width:.0%} on its estimates)" if found.half_width else ""
        span = f"{found.low:.4g} to {found.high:.4g}"
        out.add_row(found.name, f"{found.value:.4g}", span, f"{len(found.tables)}: {', '.join(found.tables)}{few}")
    return out


def errors(report: Report) -> list[Table]:
    """Every row, one table per published table: published and predicted figures."""
    parts: dict[str, Table] = {}
    for row in report.rows:
        title = f"{row.source}, {row.table}"
        if title not in parts:
            parts[title] = out = _table(title)
            out.add_column("", ratio=1)
            out.add_column("quantity", width=18)
            for name in ("published", "planner", "error", "role"):
                out.add_column(name, justify="right", no_wrap=True, width=8 if name == "error" else 9)
        quantity = f"{row.quantity}, {row.unit}" if row.unit else row.quantity
        figures = f"{row.published:.4g}", f"{row.predicted:.4g}", f"{row.error:+.1%}"
        parts[title].add_row(row.name, quantity, *figures, row.role)
    return list(parts.values())


def promises(report: Report) -> Table:
    """The promises, and whether each holds."""
    out = _table("Promises")
    out.add_column("", ratio=1)
    for name in ("found", "at most", ""):
        out.add_column(name, justify="right", no_wrap=True)
    for promise in report.promises:
        verdict = "holds" if promise.met else "does not hold"
        out.add_row(promise.name, f"{promise.value:.4g}", f"{promise.limit:.4g}", verdict)
    return out


def report_data(report: Report) -> dict[str, Any]:
    """The error table as plain data."""
    return {
        "tables": [dataclasses.asdict(found) for found in report.summaries()],
        "rows": [{**dataclasses.asdict(row), "error": row.error} for row in report.rows],
        "left_out": [dataclasses.asdict(found) for found in report.left_out],
        "constants": [found._asdict() for found in fitted_constants()],
        "promises": [{**dataclasses.asdict(promise), "met": promise.met} for promise in report.promises],
    }


def seconds(value: float) -> str:
    """A time in seconds or milliseconds."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def estimate_data(estimate: Estimate) -> dict[str, Any]:
    """An estimate as plain data, with its properties; cluster and model by name."""
    data = {f.name: getattr(estimate, f.name) for f in dataclasses.fields(estimate)}
    data |= {
        "model": estimate.model.name,
        "seq_length": estimate.model.seq_length,
        "cluster": estimate.cluster.name,
        "plan": dataclasses.asdict(estimate.plan),
        "memory": [{**dataclasses.asdict(stage), "total": stage.total} for stage in estimate.memory],
        "transfers": [dataclasses.asdict(transfer) for transfer in estimate.transfers],
        "broken_rules": dict(estimate.broken_rules),
        "tflops_per_gpu": estimate.tflops_per_gpu,
        "error_band": dataclasses.asdict(estimate.error_band),
        "tight": estimate.tight,
        "fits": memory_problem(estimate.cluster, estimate.plan, estimate.memory) is None,
        "systems": systems(estimate.model, estimate.cluster, estimate.plan),
    }
    return data


def search_data(result: SearchResult, shown: Sequence[Estimate]) -> dict[str, Any]:
    """A search as plain data."""
    return {
        "plans": [estimate_data(found) for found in shown],
        "ties": result.ties,
        "simplest": dataclasses.asdict(result.simplest.plan),
        "misses": [
            {"plan": dataclasses.asdict(miss.plan), "excess": miss.excess, "step": miss.seconds}
            for miss in result.misses
        ],
        "rejected": [
            {
                "kind": kind,
                "plans": count,
                "example": f"{nearest.plan.describe()}: {nearest.reason}",
                "plan": dataclasses.asdict(nearest.plan),
                "reason": nearest.reason,
                "excess": nearest.excess,
            }
            for kind, count, nearest in nearest_rejections(result)
        ],
        "sensitivity": [dataclasses.asdict(entry) for entry in result.sensitivity],
    }


def simulation_data(simulation: Simulation) -> dict[str, Any]:
    """A simulated schedule as plain data: kind, micro-batch, stage, start and end of each pass."""
    ranks = [
        [{**action._asdict(), "start": start, "end": end} for action, start, end in zip(*rows, strict=True)]
        for rows in zip(simulation.schedule, simulation.starts, simulation.ends, strict=True)
    ]
    return {
        "step_time": simulation.step_time,
        "step_time_without_barrier": simulation.step_time_without_barrier,
        "bubble": simulation.bubble,
        "bubble_without_barrier": simulation.bubble_without_barrier,
        "bubbles": simulation.bubbles,
        "peak_activations": list(simulation.peak_activations),
        "ranks": ranks,
    }


def as_json(data: Any) -> str:
    """JSON in which numbers that are not finite are null."""
    return json.dumps(_finite(data), indent=1, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data
