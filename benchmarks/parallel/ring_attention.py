"""``python -m benchmarks ring_attention``: attention of a sequence that ranks share, beside that of one device.

    python -m benchmarks ring_attention                                     a paced link, one process
    torchrun --nproc-per-node 2 -m benchmarks ring_attention --processes    processes: gloo or NCCL

For one rank of ``size``, forward, and forward and backward:

    whole     flash attention of the whole sequence on one device
    ring      this rank's part of it, with the keys of the others on their way
    transfer  what the ring sends and receives, and nothing else

    percent   (whole / size) / ring             100: as if the ranks were one device
    overhead  ring / (whole / size + transfer)  above 1: time that neither arithmetic nor transfer explains

On a GPU the shapes are those of Llama 3 8B. On a CPU there are fewer tokens and heads, and the link is proportionate:
bytes take as long, against the arithmetic of a step, as they would for a GPU of REFERENCE_FLOPS with that link.
"""

import dataclasses
import functools
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.harness import options
from benchmarks.harness.environment import Environment
from benchmarks.harness.timing import Call, Rounds, device_timer, take_turns
from benchmarks.parallel.link import Session
from parallel_ops._internal.command_line import fail
from parallel_ops.comm.transport.base import Transport
from parallel_ops.context_parallel.batch_layout import layout_for
from parallel_ops.context_parallel.cost import keys_sent
from parallel_ops.context_parallel.schedule.blocks import pack_keys
from parallel_ops.context_parallel.schedule.ring import KeyGradients, Rows, key_steps
from parallel_ops.context_parallel.schedule.ulysses import Placement, attention_backward, attention_forward
from parallel_ops.ops.attention.flash_attention import flash_attention
from parallel_ops.ops.attention.options import AttentionOptions

# FLOP/s of attention as an H100 does it in practice; it sets only how fast a proportionate link is.
REFERENCE_FLOPS = 600e12
DIRECTIONS = ("forward", "both")
_OP = "bench_ring_attention"
_LINKS = (45.0, 370.0)  # GB/s: a network port and NVLink in practice


@dataclasses.dataclass(frozen=True)
class Shape:
    """A causal attention: ``tokens`` of one rank, and ``documents`` of different lengths in the whole sequence."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: str = "zigzag"
    documents: int = 1

    def cu_seqlens(self, size: int, device: torch.device) -> Tensor | None:
        """Documents whose lengths rise from the first to the last."""
        if self.documents == 1:
            return None
        share = torch.arange(self.documents + 1, dtype=torch.float64)
        share = share * (share + 1) / (self.documents * (self.documents + 1))
        return (share * size * self.tokens).round().to(device, torch.int32)

    def bandwidth(self, gb_per_s: float, size: int, itemsize: int, whole_seconds: float) -> float:
        """Bytes per second that are to this machine's arithmetic what ``gb_per_s`` is to a reference GPU's.

        Args:
            whole_seconds: Time here of a forward pass of the whole causal sequence without documents.
        """
        flops = 2 * self.heads * self.head_dim * (size * self.tokens) ** 2
        sent = keys_sent(self.tokens, self.tokens, 2 * self.kv_heads * self.head_dim, 2).forward
        reference = (sent / (gb_per_s * 1e9)) / (flops / REFERENCE_FLOPS)
        here = keys_sent(self.tokens, self.tokens, 2 * self.kv_heads * self.head_dim, itemsize).forward
        return here / (reference * whole_seconds)


_LLAMA = Shape(tokens=8192, heads=32, kv_heads=8, head_dim=128)
_CPU = Shape(tokens=512, heads=4, kv_heads=1, head_dim=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """Times in milliseconds, medians. ``link_gb_per_s``: as asked for; None for a real transport."""

    layout: str
    direction: str
    size: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    documents: int
    dtype: str
    transport: str
    link_gb_per_s: float | None
    ms_whole: float
    ms_transfer: float
    ms_ring: float
    percent: float
    overhead: float

    @property
    def key(self) -> tuple[str, ...]:
        link = "" if self.link_gb_per_s is None else f"{self.link_gb_per_s:g}"
        shape = (self.size, self.tokens, self.heads, self.kv_heads, self.head_dim, self.documents)
        return self.layout, self.direction, *map(str, shape), self.dtype, self.transport, link


def derived(seconds: dict[str, float], size: int, direction: str) -> dict[str, float]:
    """The columns of a row from the seconds of the calls, those of one device under ``whole`` and the direction."""
    whole, transfer, ring = (seconds[name] for name in (f"whole {direction}", f"transfer {direction}", direction))
    return {
        "ms_whole": 1e3 * whole, "ms_transfer": 1e3 * transfer, "ms_ring": 1e3 * ring,
        "percent": 100 * whole / size / ring, "overhead": ring / (whole / size + transfer),
    }  # fmt: skip


def whole_calls(shape: Shape, size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Call]:
    """The whole sequence on one device, by ``whole`` and the direction."""
    q, k, v = (t.requires_grad_() for t in _qkv(shape, size * shape.tokens, dtype, device))
    attend = functools.partial(flash_attention, q, k, v, cu_seqlens=shape.cu_seqlens(size, device))
    grad = torch.randn_like(q)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    return {"whole forward": forward, "whole both": lambda: torch.autograd.grad(attend(), (q, k, v), grad)}


def ring_calls(shape: Shape, transport: Transport, dtype: torch.dtype, device: torch.device) -> dict[str, Call]:
    """One rank's part, by direction, and ``transfer`` with the direction for its messages alone."""
    size, rank = transport.size, transport.rank
    bounds = shape.cu_seqlens(size, device)
    options = AttentionOptions(cu_seqlens=bounds, softmax_scale=shape.head_dim**-0.5, right=0)
    layout = layout_for(size * shape.tokens, size, shape.layout, cu_seqlens=bounds)
    placement = Placement(_OP, layout.length, layout.cp_layout, 1, False)
    call = placement, transport, options
    q, k, v = _qkv(shape, layout.lengths[rank], dtype, device)
    grad = torch.randn_like(q)
    ring = placement.ring(*call[1:], shape.heads, device)
    kv = pack_keys(k, v)
    shares = torch.zeros(kv.shape, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def both() -> object:
        out, statistics, _ = attention_forward(*call, q, k, v)
        return attention_backward(*call, grad, q, k, v, out, statistics)

    def transfer(direction: str) -> None:
        for phase in DIRECTIONS[: 1 + DIRECTIONS.index(direction)]:
            returns = KeyGradients(ring)
            for number, keys in key_steps(ring, kv):
                if phase == "both":
                    returns.add(number, Rows(keys.parts, shares[: len(keys.rows)].clone()))
            if phase == "both":
                returns.total()

    return {
        "forward": lambda: attention_forward(*call, q, k, v),
        "both": both,
        **{f"transfer {direction}": functools.partial(transfer, direction) for direction in DIRECTIONS},
    }


def main(
    processes: Annotated[bool, typer.Option("--processes", help="Ranks of torchrun in place of a paced link.")] = False,
    link: options.Links = None,
    size: Annotated[int, typer.Option(min=1, help="Ranks of the paced link; else those of torchrun.")] = 8,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a rank: 8192 on a GPU, 512 on a CPU by default.")
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="zigzag, striped, contiguous or balanced; repeatable.")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Measured too: a sequence of so many documents.")] = 8,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="CPU seconds of a process of --processes, where others use the machine.")
    ] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    quick: options.Quick = False,
    output: options.Output = None,
) -> None:
    """Ring attention as a percentage of one device over the same total work, causal, forward and both.

    Rows go to benchmarks/results/DEVICE-ring_attention.csv, those of --quick to benchmarks/results/quick.
    """
    options.check("layout", layout, ("zigzag", "striped", "contiguous", "balanced"))
    transport = "c10d" if processes else "paced"
    session = Session(device, dtype, size, transport, link or _LINKS, quick, output, cpu_time=cpu_time)
    if session.size < 2:
        fail(f"a ring has at least 2 ranks, got {session.size}")
    if session.device.type == "cpu":
        torch.set_num_threads(1)  # each process has one; one core is the paced link's
    base = _CPU if session.device.type == "cpu" else _LLAMA
    base = dataclasses.replace(base, tokens=tokens or base.tokens)
    shapes = [dataclasses.replace(base, layout=name) for name in layout or ("zigzag", "striped")]
    if documents > 1:
        shapes += [dataclasses.replace(base, documents=documents, layout=name) for name in ("zigzag", "balanced")]
    rows = [row for shape in shapes for row in _rows(session, shape)]
    session.end("ring_attention", rows, _table(rows))


app = options.single(main)


def _rows(session: Session, shape: Shape) -> list[Row]:
    # Ranks that wait leave caches to the first, which shows in its CPU seconds; so none waits then.
    measures = session.first or session.cpu_time
    whole = whole_calls(shape, session.size, session.dtype, session.device) if measures else {}

    @functools.cache
    def whole_seconds() -> float:
        plain = whole_calls(dataclasses.replace(shape, documents=1), session.size, session.dtype, session.device)
        return take_turns({"whole": plain["whole forward"]}, device_timer(session.device), Rounds(3))["whole"].median

    def bandwidth(gb: float) -> float:
        return shape.bandwidth(gb, session.size, session.dtype.itemsize, whole_seconds())

    rows = []
    for transport, named in session.transports(bandwidth):
        # The first rank measures the whole while the others wait.
        calls = {f"whole {name}": whole.get(f"whole {name}", lambda: None) for name in DIRECTIONS}
        seconds = session.medians({**calls, **ring_calls(shape, transport, session.dtype, session.device)})
        for direction in DIRECTIONS:
            columns = {**session.shared, **named, **derived(seconds, session.size, direction)}
            rows.append(Row(**dataclasses.asdict(shape), direction=direction, **columns))
    return rows


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    table = options.table(
        "layout", "documents", "direction", "link\nGB/s", "whole / ranks\nms", "transfer\nms", "ring\nms",
        "percent of\none device", "ring / (whole / ranks\n+ transfer)", left=("documents", "direction"),
        title=f"ring attention, {first.size} ranks of {first.tokens} tokens, {first.heads} heads and {first.kv_heads} "
        f"kv heads of {first.head_dim}, {first.dtype}, {first.transport}",
    )  # fmt: skip
    for row in rows:
        link = "" if row.link_gb_per_s is None else f"{row.link_gb_per_s:g}"
        times = (row.ms_whole / row.size, row.ms_transfer, row.ms_ring)
        table.add_row(
            row.layout, str(row.documents), row.direction, link, *(f"{t:.3g}" for t in times), f"{row.percent:.1f}",
            f"{row.overhead:.2f}",
        )  # fmt: skip
    return table


def _qkv(shape: Shape, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [torch.randn(tokens, 1, n, shape.head_dim, device=device).to(dtype) for n in heads]
