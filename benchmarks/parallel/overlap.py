"""``python -m benchmarks overlap``: how much of a layer's communication its overlapped linears hide.

    python -m benchmarks overlap                                            a paced link, one process
    torchrun --nproc-per-node 8 -m benchmarks overlap --transport c10d      processes: gloo or torch's NCCL
    torchrun --nproc-per-node 8 -m benchmarks overlap --transport nccl      GPUs: the package's own communicator

For each matmul of a layer, on one rank of ``size``:

    gemm        the whole matmul, all data there
    comm        the all-gather of its input, or the reduce-scatter of its output with the sum, and nothing else
    unfused     one after the other: the op with overlap="off"
    overlapped  the op with the number of chunks that is fastest
    chunked     the matmuls that the overlapped op makes, without communication

    efficiency    (gemm + comm - overlapped) / min(gemm, comm)     1: all that can be hidden is hidden
    chunking tax  chunked / gemm                                   what smaller matmuls cost
    ideal         gather  max(gemm, comm + gemm / size)            the last shard must arrive and be multiplied
                  scatter max(gemm + comm / size, gemm / size + comm)

On a GPU the shapes are the models' own. On a CPU every dimension is divided by ``scale``, and the link is
proportionate: comm / gemm is what it would be on a GPU of REFERENCE_FLOPS with that link, whatever the CPU's speed.
"""

import dataclasses
import functools
import math
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.harness import options
from benchmarks.harness.environment import Environment
from benchmarks.harness.timing import Call, HostTimer, Rounds, take_turns
from benchmarks.parallel.link import Session
from parallel_ops._internal.command_line import fail, processors
from parallel_ops.comm.transport.base import Transport
from parallel_ops.tensor_parallel.linear.all_gather_linear import column_forward
from parallel_ops.tensor_parallel.linear.choose import CANDIDATES, OFF
from parallel_ops.tensor_parallel.linear.chunked import (
    gather_order,
    multiply,
    scatter_order,
    start_gather,
    start_scatter,
)
from parallel_ops.tensor_parallel.linear.linear_reduce_scatter import row_forward
from parallel_ops.train.launch.malloc import keep_freed_memory

# Dense bfloat16 matmuls as an H100 makes them in practice; it sets only how fast a proportionate link is.
REFERENCE_FLOPS = 650e12
REFERENCE_ITEMSIZE = 2
CHUNKS = CANDIDATES[1:]
_LINKS = (45.0, 170.0, 370.0, 450.0)  # GB/s: a network port, PCIe 5 and NVLink in practice and by the data sheet
_TRANSPORTS = ("paced", "c10d", "nccl")
_CPU_SCALE = 4  # smaller matmuls take so little that Python between them shows, as it does not on a GPU
_OP = "bench_overlap"


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One matmul of a layer, whole: ``[rows, inner] @ [inner, columns]``.

    A "gather" splits its columns over the ranks and gathers its rows; a "scatter" splits ``inner`` and scatters rows.
    """

    model: str
    layer: str
    phase: str
    rows: int
    columns: int
    inner: int

    def scaled(self, scale: int) -> "Gemm":
        sizes = {name: getattr(self, name) // scale for name in ("rows", "columns", "inner")}
        return dataclasses.replace(self, **sizes)

    def flops(self, size: int) -> float:
        """Floating-point operations of one rank."""
        return 2.0 * self.rows * self.columns * self.inner / size

    def sent(self, size: int, itemsize: int) -> float:
        """Bytes that one rank receives (gather) or sends (scatter)."""
        width = self.inner if self.phase == "gather" else self.columns
        return self.rows * width * itemsize * (size - 1) / size

    def reference_ratio(self, bandwidth: float, size: int) -> float:
        """comm / gemm on the reference GPU."""
        return self.sent(size, REFERENCE_ITEMSIZE) / bandwidth / (self.flops(size) / REFERENCE_FLOPS)

    def local(self, size: int) -> tuple[int, int]:
        """Columns and inner size of one rank's matmul."""
        if self.phase == "gather":
            return self.columns // size, self.inner
        return self.columns, self.inner // size


def gemms() -> list[Gemm]:
    """The matmuls of one layer, for 8192 tokens (Llama 2 70B, arXiv:2307.09288; GPT-3 175B, arXiv:2005.14165)."""
    tokens = 8192
    llama = {"hidden": 8192, "qkv": (64 + 2 * 8) * 128, "fc1": 2 * 28672, "ffn": 28672}
    gpt = {"hidden": 12288, "qkv": 3 * 12288, "fc1": 49152, "ffn": 49152}
    return [
        gemm
        for model, n in (("llama-70b", llama), ("gpt-175b", gpt))
        for gemm in (
            Gemm(model, "qkv", "gather", tokens, n["qkv"], n["hidden"]),
            Gemm(model, "proj", "scatter", tokens, n["hidden"], n["hidden"]),
            Gemm(model, "fc1", "gather", tokens, n["fc1"], n["hidden"]),
            Gemm(model, "fc2", "scatter", tokens, n["hidden"], n["ffn"]),
        )
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """Times in milliseconds, medians. ``link_gb_per_s``: as asked for; None for a real transport."""

    model: str
    layer: str
    phase: str
    size: int
    scale: int
    dtype: str
    transport: str
    link_gb_per_s: float | None
    ms_gemm: float
    ms_comm: float
    ms_unfused: float
    ms_overlapped: float
    chunks: int
    ms_ideal: float
    efficiency: float
    chunking_tax: float

    @property
    def key(self) -> tuple[str, ...]:
        link = "" if self.link_gb_per_s is None else f"{self.link_gb_per_s:g}"
        return self.model, self.layer, str(self.size), str(self.scale), self.dtype, self.transport, link


def derived(seconds: dict[str, float], size: int, phase: str) -> dict[str, float | int]:
    """The columns of a row from the seconds of ``calls``."""
    gemm, comm = seconds["gemm"], seconds["comm"]
    chunks = min(CHUNKS, key=lambda n: seconds[f"overlapped {n}"])
    overlapped = seconds[f"overlapped {chunks}"]
    ideal = max(gemm, comm + gemm / size) if phase == "gather" else max(gemm + comm / size, gemm / size + comm)
    return {
        "ms_gemm": 1e3 * gemm, "ms_comm": 1e3 * comm, "ms_unfused": 1e3 * seconds["unfused"],
        "ms_overlapped": 1e3 * overlapped, "chunks": chunks, "ms_ideal": 1e3 * ideal,
        "efficiency": (gemm + comm - overlapped) / min(gemm, comm), "chunking_tax": seconds[f"chunked {chunks}"] / gemm,
    }  # fmt: skip


def calls(gemm: Gemm, transport: Transport, dtype: torch.dtype, device: torch.device) -> dict[str, Call]:
    """Every measured call of one matmul: gemm, comm, unfused, and overlapped and chunked by number of chunks."""
    size, rank = transport.size, transport.rank
    rows = [gemm.rows // size] * size
    gathers = gemm.phase == "gather"
    columns, inner = gemm.local(size)
    whole = torch.randn(gemm.rows, inner, device=device).to(dtype)
    weight = torch.randn(columns, inner, device=device).to(dtype)
    parts = torch.randn(gemm.rows, columns, device=device).to(dtype)
    shard = whole[: rows[0]].clone()

    def chunked(chunks: int) -> None:
        order, out = gather_order if gathers else scatter_order, whole.new_empty(gemm.rows, columns)
        for start, stop in order(rank, rows, chunks):
            multiply(whole[start:stop], weight, None, out[start:stop])

    def comm() -> Tensor:
        if gathers:
            gathered, exchange = start_gather(_OP, transport, shard, rows)
            exchange.wait()
            return gathered
        return start_scatter(_OP, transport, parts, rows, (rows[rank], columns), exact=True).total()

    def op(chunks: int) -> object:
        if gathers:
            return column_forward(transport, shard, rows, [weight], [None], chunks)
        return row_forward(transport, whole, rows, weight, None, chunks)

    result: dict[str, Call] = {
        "gemm": lambda: multiply(whole, weight, None),
        "comm": comm,
        "unfused": functools.partial(op, OFF),
    }
    for chunks in CHUNKS:
        result[f"overlapped {chunks}"] = functools.partial(op, chunks)
        result[f"chunked {chunks}"] = functools.partial(chunked, chunks)
    return result


def proportionate(gemm: Gemm, size: int, dtype: torch.dtype) -> float:
    """Bytes that a rank sends, per second of its matmul on this CPU: a link with comm / gemm = 1."""
    columns, inner = gemm.local(size)
    x, weight = torch.randn(gemm.rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    timer = HostTimer(torch.device("cpu"))
    stats = take_turns({"gemm": lambda: multiply(x, weight, None)}, timer, Rounds(5, 9))
    return gemm.sent(size, dtype.itemsize) / stats["gemm"].median


def main(
    transport: Annotated[str, typer.Option(help="paced, c10d or nccl; the last two under torchrun.")] = "paced",
    model: Annotated[list[str] | None, typer.Option(help="llama-70b or gpt-175b; both by default.")] = None,
    link: options.Links = None,
    latency_us: Annotated[float, typer.Option(min=0, help="Latency of a chunk on the paced link.")] = 0.0,
    size: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel ranks of the paced link; else those of torchrun.")
    ] = 8,
    scale: Annotated[int | None, typer.Option(min=1, help="Divides every dimension: 1 on a GPU, 4 on a CPU.")] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    quick: options.Quick = False,
    output: options.Output = None,
) -> None:
    """Communication hidden by the overlapped linears, for each matmul of a Llama-70B and a GPT-175B layer.

    Rows go to benchmarks/results/DEVICE-overlap.csv, those of --quick to benchmarks/results/quick.
    """
    known = dict.fromkeys(gemm.model for gemm in gemms())
    options.check("transport", [transport], _TRANSPORTS)
    options.check("model", model, known)
    if not math.isfinite(latency_us):
        fail(f"--latency-us must be finite, got {latency_us}")
    session = Session(device, dtype, size, transport, link or _LINKS, quick, output)
    on_cpu = session.device.type == "cpu"
    factor = scale or (_CPU_SCALE if on_cpu else 1)
    chosen = [gemm for gemm in gemms() if gemm.model in (model or known)]
    for gemm in chosen:
        if session.size < 2 or any(n % (factor * session.size) for n in (gemm.rows, gemm.columns, gemm.inner)):
            fail(
                f"{session.size} ranks at scale {factor} do not divide {gemm.model} {gemm.layer} evenly, or are fewer "
                "than 2"
            )
    if on_cpu:
        keep_freed_memory()  # as in training; without it page faults of new outputs decide
        torch.set_num_threads(max(1, processors() - 1))  # one core is the link's
    rows = [row for gemm in chosen for row in _rows(session, gemm, factor, 1e-6 * latency_us)]
    session.end("overlap", rows, _table(rows))


app = options.single(main)


def _rows(session: Session, whole: Gemm, scale: int, latency: float) -> list[Row]:
    gemm = whole.scaled(scale)

    @functools.cache
    def sent_per_product() -> float:
        return proportionate(gemm, session.size, session.dtype)

    def bandwidth(gb: float) -> float:
        return sent_per_product() / whole.reference_ratio(1e9 * gb, session.size)

    rows = []
    for transport, named in session.transports(bandwidth, latency):
        seconds = session.medians(calls(gemm, transport, session.dtype, session.device))
        columns = {**session.shared, **named, **derived(seconds, session.size, gemm.phase)}
        rows.append(Row(model=gemm.model, layer=gemm.layer, phase=gemm.phase, scale=scale, **columns))
    return rows


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    table = options.table(
        "", "link\nGB/s", "gemm\nms", "comm\nms", "unfused\nms", "overl.\nms", "chunks", "ideal\nms", "E",
        "chunking\ntax", "vs\nunfused",
        title=f"overlap, {first.size} ranks, {first.transport}, {first.dtype}, dimensions / {first.scale}",
    )  # fmt: skip
    for row in rows:
        link = "" if row.link_gb_per_s is None else f"{row.link_gb_per_s:g}"
        times = (row.ms_gemm, row.ms_comm, row.ms_unfused, row.ms_overlapped)
        table.add_row(
            f"{row.model} {row.layer} ({row.phase})", link, *(f"{t:.3g}" for t in times), str(row.chunks),
            f"{row.ms_ideal:.3g}", f"{row.efficiency:.2f}", f"{row.chunking_tax:.2f}x",
            f"{row.ms_unfused / row.ms_overlapped:.2f}x",
        )  # fmt: skip
    return table
