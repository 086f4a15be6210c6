"""``python -m benchmarks layouts``: area and keys sent of every layout, for packed documents, video and windows.

For each layout the largest area of a rank over the mean, and the keys that ranks send as a share of all keys to all
other ranks; then the CPU milliseconds that the placement of the balanced layout takes, the least of twenty. A second
table has seconds calculated by ``context_parallel/cost.py`` for eight H100s on 8, 4 and 2 nodes; no GPU runs.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor

from benchmarks.harness import options
from benchmarks.harness.timing import HostTimer, Rounds, take_turns
from benchmarks.parallel.ring_attention import REFERENCE_FLOPS
from parallel_ops.context_parallel import AttentionShape, Link, SequenceLayout, placement
from parallel_ops.context_parallel.cost import Algorithm, algorithms, seconds
from parallel_ops.context_parallel.selection import select_layout
from parallel_ops.ops.attention import block_causal_ranges, causal_ranges, document_ranges, intersect_ranges

# Bytes/s and seconds of an exchange of a 400 Gb/s port, nine tenths of its rate, and bytes/s of NVLink: assumed.
_PORT = Link(REFERENCE_FLOPS, 45e9, 10e-6, inside=370e9)
_LAYOUTS = ("zigzag", "contiguous", "balanced", "auto")
# Weights of the linears of a layer of Llama 3 8B; sequences that are drawn.
_LINEARS, _DRAWN = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336), 16


def edges_of(length: int, median: float, sigma: float, seed: int = 0) -> Tensor:
    """Starts of documents of log-normal lengths, and the end."""
    draws = torch.randn(length // 32, generator=torch.Generator().manual_seed(seed))
    edges = (math.log(median) + sigma * draws).exp().long().clamp(min=1).cumsum(0)
    return torch.cat([torch.zeros(1), edges[edges < length], torch.tensor([length])]).long()


class Kinds(NamedTuple):
    """A sequence: the ranges of each kind of layer, and what makes their masks for the placement, as a loader does."""

    ranges: list[Tensor]
    masks: Callable[[], list[Any]]


def packed(edges: Tensor, *windows: int | None) -> Kinds:
    """Causal documents, in layers with each of these windows."""
    length, full, lengths = int(edges[-1]), document_ranges(edges), edges.diff().tolist()
    cuts = [causal_ranges(length, window_size=(-1 if n is None else n, 0)) for n in windows]
    return Kinds(
        [intersect_ranges(full, mask) for mask in cuts], lambda: [placement.Documents(lengths, n, 0) for n in windows]
    )


def masks() -> Iterator[tuple[str, Kinds]]:
    short, long = 1 << 17, 1 << 20
    yield "documents, 128K", packed(edges_of(short, 500, 1.5), None)
    yield "documents, 1M", packed(edges_of(long, 500, 1.5), None)
    yield "eight documents, 128K", packed(torch.tensor([0, 3, 9, 20, 36, 50, 71, 90, 128]) * 1024, None)
    frames = block_causal_ranges(4096, length=long)
    yield "video, 1M", Kinds([frames], lambda: [frames.numpy()])
    yield "window and full, 1M", packed(edges_of(long, 500, 1.5), 4095, None)
    yield "one causal sequence, 1M", packed(torch.tensor([0, long]), None)


def _placed(kinds: Kinds, ranks: int) -> Any:
    return placement.balanced(kinds.masks(), ranks)


def described(layout: SequenceLayout, kinds: list[Tensor]) -> str:
    areas = torch.tensor([layout.area(mask) for mask in kinds]).sum(0)
    rows = torch.tensor([layout.rows_sent(mask) for mask in kinds]).sum()
    sent = int(rows) / len(kinds) / layout.length / (layout.ranks - 1)
    return f"{areas.max() / areas.double().mean():.2f}, {100 * sent:.1f}%"


def calculated(length: int, ranks: int, per_node: int) -> Iterator[str]:
    """Rows of the second table: seconds of packed documents, on average over drawn sequences."""
    linears = 6 * _LINEARS * length / ranks / REFERENCE_FLOPS
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(_DRAWN):
        documents = tuple(edges_of(length, 500, 1.5, seed).diff().tolist())
        shape = AttentionShape(
            length=length, ranks=ranks, batch=1, heads=32, kv_heads=8, head_dim=128, itemsize=2, documents=documents,
            ranks_per_node=per_node,
        )  # fmt: skip
        balanced = placement.balanced([placement.ranges_of(documents, None, 0)], ranks)
        chosen = select_layout([(1, shape)], None, _PORT).cp_layout
        for name, layout in zip(_LAYOUTS, (*_LAYOUTS[:2], balanced, chosen), strict=True):
            own = replace(shape, cp_layout=layout)
            least = min(seconds(own, algorithm, _PORT) for algorithm in algorithms(own))
            found.setdefault(name, []).append((seconds(own, Algorithm(1, False), _PORT), least))
    means = {name: torch.tensor(times).mean(0) for name, times in found.items()}
    for name, (ring, least) in means.items():
        zigzag, fastest = means["zigzag"]
        gains = zigzag / ring, fastest / least, (zigzag + linears) / (ring + linears)
        times = f"{1e3 * ring:.1f} | {1e3 * least:.1f}"
        yield f"| {per_node} | {name} | {times} | " + " | ".join(f"{x:.2f}" for x in gains) + " |"


def main() -> None:
    """Largest area over mean, and keys sent as a share of all, of the layouts of context parallelism."""
    typer.echo("| data, tokens | ranks | zigzag | contiguous | balanced | ms |\n|---|---:|---|---|---|---:|")
    timer = HostTimer(torch.device("cpu"), clock=time.thread_time)
    for name, kinds in masks():
        for ranks in (8, 64):
            place = functools.partial(_placed, kinds, ranks)
            least = take_turns({"": place}, timer, Rounds(20))[""].fastest
            balanced = SequenceLayout(kinds.ranges[0].shape[1], ranks, place())
            layouts = [SequenceLayout(balanced.length, ranks, kind) for kind in ("zigzag", "contiguous")]
            cells = " | ".join(described(layout, kinds.ranges) for layout in (*layouts, balanced))
            typer.echo(f"| {name} | {ranks} | {cells} | {1e3 * least:.1f} |")
    typer.echo(
        "\nCalculated: attention of Llama 3 8B, forward and backward; tokens/s of zigzag's\n\n"
        "| ranks a node | layout | ring ms | fastest ms | ring | fastest | layer with ring |\n"
        "|---:|---|---:|---:|---:|---:|---:|"
    )
    for per_node in (1, 2, 4):
        for row in calculated(1 << 17, 8, per_node):
            typer.echo(row)


app = options.single(main)
