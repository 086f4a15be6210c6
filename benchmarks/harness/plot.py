"""Draws the chart of all ops: ``python -m benchmarks.harness.plot benchmarks/results/DEVICE.csv docs/DEVICE.svg``."""

import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.harness.results import Row, read

# Color and label of each provider that is shown.
LOOKS = {
    "eager": ("#b8bfc6", "PyTorch eager"),
    "compile": ("#6b9bd1", "torch.compile"),
    "parallel_ops": ("#0b6e4f", "parallel_ops"),
}
_INK = "#2b2f33"
_PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # keeps a number readable on the line of a copy


def overview(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Percent of the speed of a copy that forward and backward together reach: by op, then provider, slowest first.

    Of the ops that all providers were measured on.
    """
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.direction == "full" and row.dtype == "bfloat16" and row.provider in LOOKS and row.percent_of_clone:
            found.setdefault(row.op, {}).setdefault(row.provider, row.percent_of_clone)
    return {op: {name: found[op][name] for name in LOOKS} for op in sorted(found) if len(found[op]) == len(LOOKS)}


def plot_overview(rows: Sequence[Row], path: Path) -> None:
    """Draws ``overview`` as SVG: a group of bars for each op."""
    found = overview(rows)
    last = [row for row in rows if row.op in found][-1]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axis = figure.subplots()
    for number, (provider, (color, label)) in enumerate(LOOKS.items()):
        places = [place + 0.27 * (number - 1) for place in range(len(found))]
        heights = [each[provider] for each in found.values()]
        bars = axis.bar(places, heights, 0.25, color=color, label=label)
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


if __name__ == "__main__":
    plot_overview(read(Path(sys.argv[1])), Path(sys.argv[2]))
