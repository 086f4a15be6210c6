"""The command line: ``python -m benchmarks overlap``, or under ``torchrun`` for real transports.

    python -m benchmarks overlap                                            a paced link, one process
    torchrun --nproc-per-node 8 -m benchmarks overlap --transport c10d      processes: gloo or torch's NCCL
    torchrun --nproc-per-node 8 -m benchmarks overlap --transport nccl      GPUs: the package's own communicator

What is measured stands in ``overlap.py``.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks import results
from benchmarks.environment import describe
from benchmarks.overlap import Gemm, GroupTimer, Measured, Rounds, Row, gemms, measure, product_seconds
from benchmarks.simulated_link import SimulatedLink, SimulatedTransport
from benchmarks.timing import CudaTimer, HostTimer, Timer
from parallel_ops._internal.command_line import fail
from parallel_ops.comm.transport.base import Transport
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.comm.transport.registry import transport_of, use_transport
from parallel_ops.train.launch.worker import gpu_of_rank
from parallel_ops.train.malloc import keep_freed_memory

_FOLDER = Path(__file__).parent
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LINKS = (45.0, 170.0, 370.0, 450.0)  # GB/s: a network port, PCIe 5 and NVLink in practice and by the data sheet
_TRANSPORTS = ("paced", "c10d", "nccl")
_CPU_SCALE = 4  # smaller products take so little that Python between them shows, as it does not on a GPU

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    transport: Annotated[str, typer.Option(help="paced, c10d or nccl; the last two under torchrun.")] = "paced",
    model: Annotated[list[str] | None, typer.Option(help="llama-70b or gpt-175b; both by default.")] = None,
    link: Annotated[list[float] | None, typer.Option(help="GB/s of the paced link; repeatable.")] = None,
    latency_us: Annotated[float, typer.Option(help="Latency of a chunk on the paced link.")] = 0.0,
    size: Annotated[int, typer.Option(help="Tensor-parallel ranks of the paced link; else those of torchrun.")] = 8,
    scale: Annotated[int | None, typer.Option(help="Divides every dimension: 1 on a GPU, 4 on a CPU.")] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="bfloat16 on a GPU, float32 on a CPU by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds: a look, not a result.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for the CSV file.")] = None,
) -> None:
    """Communication hidden by the overlapped linears, for each product of a Llama-70B and a GPT-175B layer.

    Rows go to benchmarks/results/DEVICE-overlap.csv, those of --quick to benchmarks/results/quick.
    """
    _check(transport, link or [], latency_us)
    known = dict.fromkeys(gemm.model for gemm in gemms())
    for name in model or []:
        if name not in known:
            fail(f"unknown model {name!r}; choose from {', '.join(known)}")
    if device not in ("auto", "cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        fail(f"no device {device!r} here; choose from auto, cpu and, where there is a GPU, cuda")
    where = _device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    dtype = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    if dtype not in _DTYPES:
        fail(f"unknown dtype {dtype!r}; choose from {', '.join(_DTYPES)}")
    factor = scale or (1 if where.type == "cuda" else _CPU_SCALE)
    if transport != "paced":
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
        size = dist.get_world_size()
    chosen = [gemm for gemm in gemms() if gemm.model in (model or known)]
    for gemm in chosen:
        if size < 2 or any(n % (factor * size) for n in (gemm.rows, gemm.columns, gemm.inner)):
            fail(f"{size} ranks at scale {factor} do not divide {gemm.model} {gemm.layer} evenly, or are fewer than 2")
    session = _Session(where, dtype, size, factor, quick)
    rows = (
        session.paced(chosen, link or _LINKS, latency_us) if transport == "paced" else session.real(chosen, transport)
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        path = (output or _FOLDER / "results" / ("quick" if quick else "")) / f"{rows[0].device}-overlap.csv"
        results.merge(path, rows)
        console = Console() if sys.stdout.isatty() else Console(width=140)  # in a log file, lines may be long
        _print(console, rows)
        console.print(f"written to {path}", soft_wrap=True, highlight=False)
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclasses.dataclass
class _Session:
    """What all measurements of a run share."""

    device: torch.device
    dtype: str
    size: int
    scale: int
    quick: bool

    def __post_init__(self) -> None:
        if self.device.type == "cpu":
            keep_freed_memory()  # as in training; without it page faults of new outputs decide
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))  # one core is the link's
        self._environment = dataclasses.asdict(describe(self.device))

    def paced(self, chosen: list[Gemm], links: "list[float] | tuple[float, ...]", latency_us: float) -> list[Row]:
        timer: Timer = CudaTimer(1) if self.device.type == "cuda" else HostTimer(self.device)
        rounds = Rounds(3, 5) if self.quick else Rounds(9, 30, 20.0)
        rows = []
        for whole in chosen:
            gemm = whole.scaled(self.scale)
            gemm_seconds = 0.0
            if self.device.type == "cpu":
                gemm_seconds = product_seconds(gemm, self.size, _DTYPES[self.dtype], self.device, timer)
            for gb in links:
                bandwidth, latency = 1e9 * gb, 1e-6 * latency_us
                if self.device.type == "cpu":
                    ratio = whole.reference_ratio(bandwidth, self.size)
                    bandwidth = gemm.sent(self.size, _DTYPES[self.dtype].itemsize) / (ratio * gemm_seconds)
                transport = SimulatedTransport(self.size, 0, SimulatedLink(bandwidth, latency), self.device)
                measured = measure(gemm, transport, _DTYPES[self.dtype], self.device, timer, rounds)
                rows.append(self._row(gemm, measured, "paced", gb))
        return rows

    def real(self, chosen: list[Gemm], name: str) -> list[Row]:
        group = dist.group.WORLD
        assert group is not None
        transport: Transport = C10dTransport(group)
        if name == "nccl":
            if self.device.type != "cuda":
                fail("these ranks cannot send over nccl: it needs GPUs")
            use_transport(group, "nccl")
            transport = transport_of(group, self.device)
        timer, rounds = GroupTimer(group, self.device), Rounds(3, 3) if self.quick else Rounds(20, 20)
        rows = []
        for whole in chosen:
            gemm = whole.scaled(self.scale)
            measured = measure(gemm, transport, _DTYPES[self.dtype], self.device, timer, rounds, self._slowest)
            rows.append(self._row(gemm, measured, transport.capabilities.name, None))
        return rows

    def _slowest(self, medians: list[float]) -> list[float]:
        slowest = torch.tensor(medians, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return list(slowest.tolist())

    def _row(self, gemm: Gemm, measured: Measured, transport: str, link: float | None) -> Row:
        return Row(
            model=gemm.model,
            layer=gemm.layer,
            phase=gemm.phase,
            size=self.size,
            scale=self.scale,
            dtype=self.dtype,
            transport=transport,
            link_gb_per_s=link,
            ms_gemm=1e3 * measured.seconds["gemm"],
            ms_comm=1e3 * measured.seconds["comm"],
            ms_unfused=1e3 * measured.seconds["unfused"],
            ms_overlapped=1e3 * measured.overlapped,
            chunks=measured.chunks,
            ms_ideal=1e3 * measured.ideal,
            efficiency=measured.efficiency,
            chunking_tax=measured.chunking_tax,
            **self._environment,
        )


def _check(transport: str, links: list[float], latency_us: float) -> None:
    if transport not in _TRANSPORTS:
        fail(f"unknown transport {transport!r}; choose from {', '.join(_TRANSPORTS)}")
    if any(not gb > 0 for gb in links):
        fail(f"a link must have a positive bandwidth, got {links}")
    if latency_us < 0:
        fail(f"--latency-us must not be negative, got {latency_us}")
    if transport != "paced" and "RANK" not in os.environ:
        fail(f"the transport {transport} needs processes: torchrun --nproc-per-node N -m benchmarks overlap")


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(gpu_of_rank())
    return torch.device("cuda", torch.cuda.current_device())


def _print(console: Console, rows: list[Row]) -> None:
    first = rows[0]
    table = Table(
        title=f"overlap, {first.size} ranks, {first.transport}, {first.dtype}, dimensions / {first.scale}",
        title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in (
        "", "link\nGB/s", "gemm\nms", "comm\nms", "unfused\nms", "overl.\nms", "chunks", "ideal\nms",
    ):  # fmt: skip
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name in ("E", "chunking\ntax", "vs\nunfused"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        link = "" if row.link_gb_per_s is None else f"{row.link_gb_per_s:g}"
        times = (row.ms_gemm, row.ms_comm, row.ms_unfused, row.ms_overlapped)
        table.add_row(
            f"{row.model} {row.layer} ({row.phase})", link, *(f"{t:.3g}" for t in times), str(row.chunks),
            f"{row.ms_ideal:.3g}", f"{row.efficiency:.2f}", f"{row.chunking_tax:.2f}x",
            f"{row.ms_unfused / row.ms_overlapped:.2f}x",
        )  # fmt: skip
    console.print(table)
