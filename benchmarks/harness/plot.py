"""One chart an op: effective bandwidth of each provider, with clone as the line to reach. And one chart of all ops.

``python -m benchmarks.harness.plot benchmarks/results/DEVICE.csv docs/DEVICE.svg`` draws the latter.
"""

import math
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.report import Group, groups
from benchmarks.harness.results import PROVIDERS, Row, read
from benchmarks.harness.spec import DIRECTIONS

# Color and label of each provider; clone is a line.
LOOKS = {
    "parallel_ops": ("#0b6e4f", "parallel_ops"),
    "replay": ("#3f8f75", "parallel_ops, replayed as a CUDA graph"),
    "triton": ("#2f7f65", "parallel_ops, its own kernels"),
    "inplace": ("#7cc3a4", "parallel_ops, in place"),
    "eager": ("#b8bfc6", "PyTorch eager"),
    "compile": ("#6b9bd1", "torch.compile"),
    "torch": ("#8a6fb3", "PyTorch's own fused op"),
    "liger": ("#e3a857", "Liger-Kernel"),
    "cce": ("#c9645a", "cut-cross-entropy"),
    "sdpa_flash": ("#8a6fb3", "SDPA, flash"),
    "sdpa_efficient": ("#b39ddb", "SDPA, memory-efficient"),
    "sdpa_cudnn": ("#5e4b8b", "SDPA, cuDNN"),
    "sdpa_math": ("#d9d2e9", "SDPA, math"),
    "flex": ("#e3a857", "flex_attention"),
    "window": ("#7cc3a4", "parallel_ops, a window"),
    "documents": ("#4d9e7c", "parallel_ops, documents"),
}
_MAX_COLUMNS = 3
_INK = "#2b2f33"
_PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # keeps a number readable on the clone line


def plot_op(rows: Sequence[Row], path: Path) -> None:
    """Draws all shapes and dtypes of one op, a panel each."""
    panels: dict[tuple[str, str], dict[str, Group]] = {}
    for group in groups(rows):
        row = next(iter(group.values()))
        if row.direction in DIRECTIONS:
            panels.setdefault((row.dtype, row.shape), {})[row.direction] = group
    if not panels:
        return
    columns = min(_MAX_COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.2 * columns + 0.6, 3.1 * lines + 1.2), dpi=150, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten().tolist()
    present = {row.provider for row in rows}
    providers = [p for p in PROVIDERS if p in present and p != "clone"]
    for axis, ((dtype, shape), directions) in zip(axes, panels.items(), strict=False):
        _panel(axis, directions, providers)
        axis.set_title(f"{dtype}  {shape}", fontsize=9, color=_INK)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("GB/s of necessary traffic", fontsize=9, color=_INK)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    last = rows[-1]
    figure.suptitle(f"{last.op}  on {last.device}, torch {last.torch}", fontsize=11, color=_INK)
    figure.savefig(path)


def overview(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Percent of the speed of a copy that forward and backward together reach: by op, then provider, slowest first."""
    shown = ("eager", "compile", "parallel_ops")
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.direction == "full" and row.dtype == "bfloat16" and row.provider in shown and row.percent_of_clone:
            found.setdefault(row.op, {}).setdefault(row.provider, row.percent_of_clone)
    return {op: {name: found[op][name] for name in shown} for op in sorted(found)}


def plot_overview(rows: Sequence[Row], path: Path) -> None:
    """Draws ``overview`` as SVG: a group of bars for each op."""
    found, last = overview(rows), rows[-1]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axis = figure.subplots()
    for number, provider in enumerate(("eager", "compile", "parallel_ops")):
        places = [place + 0.27 * (number - 1) for place in range(len(found))]
        heights = [each[provider] for each in found.values()]
        bars = axis.bar(places, heights, 0.25, color=LOOKS[provider][0], label=LOOKS[provider][1])
        axis.bar_label(bars, [f"{height:.0f}" for height in heights], padding=1, fontsize=7, color=_INK, bbox=_PLATE)
    axis.axhline(100, color=_INK, linewidth=1, linestyle=(0, (3, 1.5)), label="a copy of the same bytes", zorder=0)
    names = [op.replace("vocab_parallel_", "").replace("_", "_\n") for op in found]
    axis.set_xticks(range(len(found)), names, fontsize=8, color=_INK)
    axis.set_ylabel("% of the speed of a copy", fontsize=9, color=_INK)
    axis.set_ylim(0, 112)
    axis.tick_params(axis="both", length=0, labelsize=8, labelcolor=_INK)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    title = f"Forward and backward in bfloat16 on {last.device}, torch {last.torch.partition('+')[0]}"
    axis.set_title(title, fontsize=10, color=_INK, loc="left")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "parallel_ops"}):
        figure.savefig(drawn := StringIO(), format="svg", metadata={"Date": None}, facecolor="white")
    path.write_text("".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines()))


def _panel(axis: Axes, directions: dict[str, Group], providers: Sequence[str]) -> None:
    width = 0.8 / len(providers)
    present = [d for d in DIRECTIONS if d in directions]
    for index, provider in enumerate(providers):
        bars = [(x, directions[d][provider]) for x, d in enumerate(present) if provider in directions[d]]
        left = [x - 0.4 + (index + 0.5) * width for x, _ in bars]
        heights = [row.gb_per_s or 0.0 for _, row in bars]
        drawn = axis.bar(left, heights, 0.94 * width, color=LOOKS[provider][0], label=LOOKS[provider][1])
        axis.bar_label(drawn, [_short(h) for h in heights], padding=2, fontsize=6.5, color=_INK, bbox=_PLATE)
    clones = [(x, directions[d]["clone"].gb_per_s) for x, d in enumerate(present) if "clone" in directions[d]]
    axis.hlines(
        [rate or 0.0 for _, rate in clones],
        [x - 0.46 for x, _ in clones],
        [x + 0.46 for x, _ in clones],
        colors=_INK,
        linewidth=1.4,
        linestyles=(0, (3, 1.5)),
        label="torch.clone",
    )
    axis.set_xticks(range(len(present)), present, fontsize=9, color=_INK)
    axis.tick_params(axis="both", length=0, labelsize=8, labelcolor=_INK)
    axis.grid(axis="y", color="#e4e7ea", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.margins(y=0.08)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#c9ced3")


def _short(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


if __name__ == "__main__":
    plot_overview(read(Path(sys.argv[1])), Path(sys.argv[2]))
