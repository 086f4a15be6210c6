"""``python -m benchmarks layouts``: area and keys sent of every layout, for packed documents, video and windows.

For each layout the largest area of a rank over the mean, and the keys that ranks send as a share of all keys to all
other ranks; then the milliseconds that the placement of the balanced layout takes, the least of twenty.
"""

import math
import time
from collections.abc import Iterator

import torch
import typer
from torch import Tensor

from parallel_ops.context_parallel import SequenceLayout, placement
from parallel_ops.ops.attention import block_causal_ranges, causal_ranges, document_ranges, intersect_ranges

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def packed(length: int, median: float, sigma: float) -> Tensor:
    """Ranges of causal documents of log-normal lengths."""
    draws = torch.randn(length // 32, generator=torch.Generator().manual_seed(0))
    edges = (math.log(median) + sigma * draws).exp().long().clamp(min=1).cumsum(0)
    return document_ranges(torch.cat([torch.zeros(1), edges[edges < length], torch.tensor([length])]).long())


def masks() -> Iterator[tuple[str, list[Tensor]]]:
    """Name and ranges of each kind of layer."""
    short, long = 1 << 17, 1 << 20
    yield "documents, 128K", [packed(short, 500, 1.5)]
    yield "documents, 1M", [packed(long, 500, 1.5)]
    yield "eight documents, 128K", [document_ranges(torch.tensor([0, 3, 9, 20, 36, 50, 71, 90, 128]) * 1024)]
    yield "video, 1M", [block_causal_ranges(4096, length=long)]
    full = packed(long, 500, 1.5)
    yield "window and full, 1M", [intersect_ranges(full, causal_ranges(long, window_size=(4095, 0))), full]
    yield "one causal sequence, 1M", [causal_ranges(long)]


def described(layout: SequenceLayout, kinds: list[Tensor]) -> str:
    areas = torch.tensor([layout.area(mask) for mask in kinds]).sum(0)
    rows = torch.tensor([layout.rows_sent(mask) for mask in kinds]).sum()
    sent = int(rows) / len(kinds) / layout.length / (layout.ranks - 1)
    return f"{areas.max() / areas.double().mean():.2f}, {100 * sent:.1f}%"


@app.command()
def main() -> None:
    """Largest area over mean, and keys sent as a share of all, of the layouts of context parallelism."""
    typer.echo("| data, tokens | ranks | zigzag | contiguous | balanced | ms |\n|---|---:|---|---|---|---:|")
    for name, kinds in masks():
        for ranks in (8, 64):
            seconds = []
            for _ in range(20):
                before = time.perf_counter()
                owners = placement.balanced([mask.numpy() for mask in kinds], ranks)
                seconds.append(time.perf_counter() - before)
            balanced = SequenceLayout(kinds[0].shape[1], ranks, owners)
            layouts = [SequenceLayout(balanced.length, ranks, kind) for kind in ("zigzag", "contiguous")]
            cells = " | ".join(described(layout, kinds) for layout in (*layouts, balanced))
            typer.echo(f"| {name} | {ranks} | {cells} | {1e3 * min(seconds):.1f} |")
