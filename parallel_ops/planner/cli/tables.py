"""Tables of plans and estimates."""

import os
import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallel_ops.planner.cli.comparison import CAUSES, MATTERS, close, least, why
from parallel_ops.planner.compute.software import era
from parallel_ops.planner.export import systems
from parallel_ops.planner.export.trainer import TRAINER
from parallel_ops.planner.results import DEVICE_MEMORY, GIB, Estimate, StageMemory
from parallel_ops.planner.search.result import SearchResult
from parallel_ops.planner.training_run import Expected

# Legend of Plan.describe.
NOTATION = (
    "dp, tp, pp, cp, ep: data, tensor, pipeline, context and expert parallelism, 1 where not named; zero: ZeRO stage; "
    "sp: sequence parallelism; b2 x 64: 64 micro-batches of 2 sequences; fp8: linears of layers, MFU of that peak; "
    "in italics: the time that a plan takes beside the first by cause, the memory that less recomputation or offload "
    "lacks, and rules of thumb that the plan breaks."
)


def console() -> Console:
    """A console; 120 columns wide if stdout is not a terminal and COLUMNS is not set."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=120)


def show(console: Console, *parts: str | Table) -> None:
    """Prints parts, each with an empty line after it."""
    for part in parts:
        console.print(part, highlight=False)
        console.print()


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
    out = new_table("", "", "*names")
    for kind, found in presets.items():
        out.add_row(kind, ", ".join(found))
    return out


def new_table(title: str, *columns: str) -> Table:
    """A table with these columns. Before a name, ``>`` is for figures and ``<`` for text, neither of which is wrapped,
    and ``*`` for the column that takes the room that is left."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title=title or None, title_justify="left")
    for column in columns:
        out.add_column(
            column.lstrip("<>*"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=column.startswith(("<", ">")),
            ratio=1 if column.startswith("*") else None,
        )
    return out


def plans(estimates: Sequence[Estimate], ties: int = 1) -> Table:
    """Ranked plans, the first ``ties`` marked as equal, each with the causes of its time beside the first (``why``) and
    the rules of thumb that it breaks."""
    # The first ± is of step, tokens/s and MFU, the second of memory.
    figures = ">step", ">tokens/s", ">MFU", ">±", ">memory", ">±", ">bubble"
    out = new_table("", ">#", "*plan", *figures, "runs in")
    for number, estimate in enumerate(estimates, 1):
        plan = Text(estimate.plan.describe())
        causes = why(estimates[0], estimate) if number > 1 else ""
        for reason in (*([causes] if causes else []), *(reason for _, reason in estimate.broken_rules)):
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
    """Faster plans that only just fit, and the near misses, see ``SearchResult.misses``."""
    out = new_table("Faster plans that only just fit, or need slightly more memory", "*plan", ">step", ">too much")
    for found in close(result)[:count]:
        out.add_row(found.plan.describe(), seconds(found.step), "fits by estimate")
    for miss in result.misses[:count]:
        out.add_row(miss.plan.describe(), seconds(miss.seconds), f"{least(miss.excess / GIB, 1)} GiB")
    return out


# Name and unit of a resource (``Gain``), what its figure is divided by, and decimals.
RESOURCES = {
    "memory": ("memory of a GPU", "GiB", GIB, 1),
    "flops": ("FLOP/s of a GPU", "TFLOP/s", 1e12, 0),
    "bandwidth": ("bandwidth of a GPU's memory", "GB/s", 1e9, 0),
    "intra": ("link inside a node, or a torus", "Gb/s", 1e9 / 8, 0),
    "inter": ("link between nodes", "Gb/s", 1e9 / 8, 0),
    "gpus": ("GPUs", "", 1, 0),
}


def gains(result: SearchResult) -> Table:
    """The step with more of one resource, see ``SearchResult.gains``."""
    title = "What more would change, the binding constraint first"
    out = new_table(title, "<more", ">", ">step", ">time", "*plan")
    for gain in result.gains:
        label, unit, size, digits = RESOURCES[gain.resource]
        more, plan = f"+{least(gain.more / size, digits)} {unit}".rstrip(), gain.plan.describe()
        change = f"{gain.seconds / result.best.step - 1:+.1%}"
        out.add_row(label, more, seconds(gain.seconds), change, "the first" if gain.plan == result.best.plan else plan)
    return out


def rejections(result: SearchResult) -> Table:
    """Reasons for rejections, each with an example: for memory, the plan with the least excess."""
    out = new_table("Plans that cannot run", "why", ">plans", "*example, or the nearest")
    for kind, (count, nearest) in result.rejected.nearest().items():
        out.add_row(kind, f"{count:,}", f"{nearest.plan.describe()}: {nearest.reason}")
    return out


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
    out = new_table("", estimate.plan.describe(), ">", ">±")
    for name in ("compute", "bubble", "exposed", "optimizer"):
        value = getattr(estimate, name)
        out.add_row(CAUSES.get(name, name), f"{seconds(value)}  {value / estimate.step:6.1%}")
    time, space = f"{estimate.error_band.time:.0%}", f"{estimate.error_band.memory:.0%}"
    out.add_row("step", f"{seconds(estimate.step)}  {1:6.1%}", time)
    out.add_section()
    out.add_row("tokens per second", f"{estimate.tokens_per_second:,.0f}", time)
    if (counted := estimate.loss_tokens_per_second) != estimate.tokens_per_second:
        out.add_row("tokens in the loss per second", f"{counted:,.0f}", time)
    out.add_row("TFLOP/s per GPU", f"{estimate.tflops_per_gpu:,.1f}", time)
    out.add_row("model, hardware FLOP/s utilisation", f"{estimate.mfu:.1%}, {estimate.hfu:.1%}", time)
    peak = estimate.peak_memory
    out.add_row(f"memory of stage {peak.stage}, the most", f"{peak.total / GIB:.1f} GiB", space)
    out.add_row("bubble: the slowest rank waits, of the pipeline's time", f"{estimate.bubble_fraction:.1%}")
    if estimate.cost:
        out.add_row("cost of a step", f"{estimate.cost:,.2f}", time)
        out.add_row("cost of a million tokens in the loss", f"{_million(estimate):,.4f}", time)
    if estimate.energy:
        out.add_row("energy of a step", f"{estimate.energy / 3.6e6:,.2f} kWh", time)
    return out


def price(estimate: Estimate) -> list[str]:
    """The cost of the first plan, as a sentence; none without a price."""
    if not estimate.cost:
        return []
    tokens = f"a million tokens in the loss {_million(estimate):,.4f}"
    return [f"Cost of the first plan: a step {estimate.cost:,.2f}, {tokens}."]


def _million(estimate: Estimate) -> float:
    return estimate.cost / (estimate.loss_tokens_per_second * estimate.step / 1e6)


def run(found: Expected) -> Table:
    """Cost of a whole run."""
    out = new_table("The run", "", ">")
    out.add_row(*("days", _short(found.days)) if found.days >= 1 else ("hours", f"{24 * found.days:,.2f}"))
    out.add_row("steps", f"{found.steps:,.0f}")
    saved = f"a checkpoint of {found.checkpoint:,.0f} s every {found.interval / 60:,.0f} min"
    lost = f"{found.failures:,.1f} failures; {saved}"
    out.add_row(f"goodput ({lost})", f"{found.goodput:.1%}")
    out.add_row("GPU hours", _short(found.gpu_hours))
    for label, value in (
        ("price of the GPU hours", found.money),
        ("kWh", found.kwh),
        ("price of the energy", found.energy),
    ):
        if value:
            out.add_row(label, _short(value))
    return out


def _short(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def memory(estimate: Estimate) -> Table:
    """Memory of each stage in GiB; of neighbours on one kind of GPU with the same parts once."""
    short = ">params", ">grads", ">optim", ">activ", ">logits", ">buffer", ">system"
    parts = [name for _, name in zip(DEVICE_MEMORY, short, strict=True)]
    out = new_table("Memory of one GPU, GiB", ">stage", *parts, ">total", ">of")
    gpus = estimate.cluster.stage_gpus(estimate.plan.pp)
    groups: list[list[StageMemory]] = []
    for stage in estimate.memory:
        first = groups[-1][0] if groups else None
        same = first and gpus[stage.stage] == gpus[first.stage]
        if same and all(abs(getattr(first, name) - getattr(stage, name)) < 0.005 * GIB for name in DEVICE_MEMORY):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    for first, *others in groups:
        label = f"{first.stage}-{others[-1].stage}" if others else f"{first.stage}"
        figures = [f"{getattr(first, name) / GIB:.1f}" for name in (*DEVICE_MEMORY, "total")]
        out.add_row(label, *figures, f"{gpus[first.stage].memory / GIB:.1f}")
    return out


def transfers(estimate: Estimate) -> Table:
    """Traffic of a step by group and collective."""
    figures = ">ranks", ">count", ">GB sent", ">time", ">exposed"
    out = new_table("Communication of a step", "*collective", "link", *figures)
    for t in estimate.transfers:
        numbers = (f"{t.size:,}", f"{t.count:,}", f"{t.bytes / 1e9:,.2f}", seconds(t.seconds), seconds(t.exposed))
        out.add_row(f"{t.group} {t.collective}, {t.algorithm}", t.link, *numbers)
    return out


def seconds(value: float) -> str:
    """A time in seconds or milliseconds."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"
