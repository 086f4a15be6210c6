"""The results of the demo: a table, a plot, a JSON file."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from benchmarks.demo.runs import Run
from benchmarks.harness import options
from parallel_ops.train.config import Settings
from parallel_ops.train.parallelize_model import PRECISIONS

# From wide and light to thin and dark, the last ones dashed and dotted on top: curves that agree stay visible.
STYLES = {
    "plain": ("#f4a261", 6.0, "solid"),
    "compiled": ("#e76f51", 3.4, "solid"),
    "fused": ("#8ab6d6", 2.2, "solid"),
    "fused-compiled": ("#1d3557", 1.8, (0, (4, 2))),
}
# The parallel runs, in their order: as many as the options can start.
PARALLEL_STYLES = (("#2a9d8f", 1.8, (0, (1, 2))), ("#6a4c93", 1.4, (0, (5, 3))), ("#b5179e", 1.4, (0, (2, 4))))


def final_loss(run: Run) -> float:
    """The mean over the last tenth of the steps: the loss of one batch is noisy."""
    last = run.losses[-max(1, len(run.losses) // 10) :]
    return sum(last) / len(last)


def loss_difference(a: Run, b: Run) -> float:
    """The largest difference of the losses of one step; NaN if a loss is NaN."""
    differences = [abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def speed_up(plain: Run, fused: Run) -> float:
    """The median time of a plain step / that of a fused one, as the table shows both."""
    return median(plain.seconds) / median(fused.seconds)


def table(settings: Settings, runs: Sequence[Run], products: Run) -> Table:
    """One column for each run; below them the comparison of the others with the first, and with the matmuls alone."""
    tokens = settings.plan.global_batch * settings.seq_length
    out = options.table("", *(run.name for run in runs))
    out.add_row("loss at the start", *(f"{run.losses[0]:.4f}" for run in runs))
    out.add_row("loss at the end", *(f"{final_loss(run):.4f}" for run in runs))
    out.add_row("median step time", *(f"{1e3 * median(run.seconds):,.1f} ms" for run in runs))
    out.add_row("tokens per second", *(f"{tokens / median(run.seconds):,.0f}" for run in runs))
    out.add_row("peak memory", *(_mebibytes(run.peak_memory) for run in runs))
    alone = median(products.seconds)
    out.add_row(
        f"matrix products alone, {1e3 * alone:,.1f} ms", *(f"{alone / median(run.seconds):.0%} of it" for run in runs)
    )
    first, *others = runs
    if others:
        out.add_section()
        out.add_row("largest loss difference", "", *(f"{loss_difference(first, run):.1e}" for run in others))
        out.add_row("speed-up of the medians", "", *(f"{speed_up(first, run):.2f}x" for run in others))
    return out


def _mebibytes(size: int | None) -> str:
    return "n/a" if size is None else f"{size / 2**20:,.0f} MiB"


def plot(settings: Settings, runs: Sequence[Run], path: Path) -> None:
    """Saves the loss curves, and the time of every step with its median, side by side."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    losses, times = figure.subplots(1, 2)
    steps = range(1, settings.run.steps + 1)
    parallel = iter(PARALLEL_STYLES)
    first, *others = runs
    for run in runs:
        color, width, dashes = STYLES[run.name] if run.name in STYLES else next(parallel)
        losses.plot(steps, run.losses, color=color, linewidth=width, linestyle=dashes, label=run.name)
        milliseconds = [1e3 * s for s in run.seconds]
        middle = median(milliseconds)
        times.plot(steps, milliseconds, "o", color=color, markersize=3.5, alpha=0.7, markeredgewidth=0)
        faster = f", {speed_up(first, run):.2f}x" if run is not first else ""
        times.axhline(middle, color=color, linewidth=1.6, label=f"{run.name} {middle:,.0f} ms{faster}")
    losses.set(title="Loss", xlabel="step", ylabel="cross entropy, nats per byte")
    times.set(
        title="Step time: medians, speed-up" if others else "Step time, with its median", xlabel="step", ylabel="ms"
    )
    # One slow step, such as the first, must not flatten all others.
    typical = sorted(1e3 * s for run in runs for s in run.seconds)
    times.set_ylim(0, (1.2 + 0.1 * ((len(runs) + 1) // 2)) * typical[int(0.95 * (len(typical) - 1))])
    if others:
        differences = [loss_difference(first, run) for run in others]
        largest = math.nan if any(map(math.isnan, differences)) else max(differences)
        losses.set_title(f"Loss (largest difference {largest:.1e})")
    for axes in (losses, times):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    losses.legend(edgecolor="none", framealpha=0.85)
    times.legend(edgecolor="none", framealpha=0.85, loc="upper right", ncols=2, fontsize="small")
    figure.suptitle(describe(settings), fontsize=10, color="0.35")
    figure.savefig(path, dpi=150)


def describe(settings: Settings) -> str:
    """The run in one line."""
    model, dtype = settings.config, str(PRECISIONS[settings.precision.dtype]).removeprefix("torch.")
    return (
        f"GPT, {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads, "
        f"ffn {model.resolved_ffn_hidden_size} {model.activation}; "
        f"batch {settings.plan.global_batch} x {model.seq_length} bytes; {dtype} on {settings.run.device}"
    )


def as_json(settings: Settings, runs: Sequence[Run], products: Run) -> str:
    """Everything in the table and the plot, for programs. Numbers that are not finite are null."""
    out: dict[str, Any] = {"description": describe(settings), "steps": settings.run.steps}
    out["matrix_products_seconds"] = products.seconds
    for number, run in enumerate(runs):
        out[run.name] = {
            "final_loss": _finite(final_loss(run)),
            "losses": [_finite(loss) for loss in run.losses],
            "seconds": run.seconds,
            "peak_memory_bytes": run.peak_memory,
        }
        if number:
            out[run.name]["largest_loss_difference"] = _finite(loss_difference(runs[0], run))
            out[run.name]["speed_up"] = speed_up(runs[0], run)
    return json.dumps(out, indent=1, allow_nan=False) + "\n"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
