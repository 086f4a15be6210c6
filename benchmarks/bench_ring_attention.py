"""The command line: ``python -m benchmarks ring_attention``, or under ``torchrun`` for processes.

    python -m benchmarks ring_attention                                     a paced link, one process
    torchrun --nproc-per-node 2 -m benchmarks ring_attention --processes    processes: gloo or NCCL

What is measured stands in ``ring_attention.py``.
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
from benchmarks.overlap import GroupTimer, Rounds
from benchmarks.ring_attention import (
    DIRECTIONS,
    Measured,
    Row,
    Shape,
    measured,
    medians,
    ring_calls,
    torch_ring,
    whole_calls,
)
from benchmarks.simulated_link import SimulatedLink, SimulatedTransport
from benchmarks.timing import CudaTimer, HostTimer, Timer
from parallel_ops._internal.command_line import fail
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.train.launch.worker import gpu_of_rank

_FOLDER = Path(__file__).parent
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LINKS = (45.0, 370.0)  # GB/s: a network port and NVLink in practice
_LLAMA = Shape(tokens=8192, heads=32, kv_heads=8, head_dim=128)
_CPU = Shape(tokens=512, heads=4, kv_heads=1, head_dim=64)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    processes: Annotated[bool, typer.Option("--processes", help="Ranks of torchrun in place of a paced link.")] = False,
    link: Annotated[list[float] | None, typer.Option(help="GB/s of the paced link; repeatable.")] = None,
    size: Annotated[int, typer.Option(help="Ranks of the paced link; else those of torchrun.")] = 8,
    tokens: Annotated[int | None, typer.Option(help="Of a rank: 8192 on a GPU, 512 on a CPU by default.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="zigzag, striped or contiguous; repeatable.")] = None,
    documents: Annotated[int, typer.Option(help="Measured too: a sequence of so many documents.")] = 8,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="bfloat16 on a GPU, float32 on a CPU by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds: a look, not a result.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for the CSV file.")] = None,
) -> None:
    """Ring attention as a percentage of one device over the same total work, causal, forward and both.

    Rows go to benchmarks/results/DEVICE-ring_attention.csv, those of --quick to benchmarks/results/quick.
    """
    _check(device, link or [], layout or [], processes)
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    dtype = dtype or ("bfloat16" if on_gpu else "float32")
    if dtype not in _DTYPES:
        fail(f"unknown dtype {dtype!r}; choose from {', '.join(_DTYPES)}")
    if on_gpu:
        torch.cuda.set_device(gpu_of_rank())
    where = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    if not on_gpu:  # of processes each has one; one core is the paced link's
        torch.set_num_threads(1)
    if processes:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        size = dist.get_world_size()
    if size < 2:
        fail(f"a ring has at least 2 ranks, got {size}")
    base = _LLAMA if on_gpu else _CPU
    base = dataclasses.replace(base, tokens=tokens or base.tokens)
    shapes = [dataclasses.replace(base, layout=name) for name in layout or ("zigzag", "striped")]
    if documents > 1:
        shapes.append(dataclasses.replace(base, documents=documents))
    session = _Session(where, dtype, size, Rounds(3, 3) if quick else Rounds(9, 30, 30.0))
    rows = session.processes(shapes) if processes else session.paced(shapes, link or _LINKS)
    if not dist.is_initialized() or dist.get_rank() == 0:
        path = (output or _FOLDER / "results" / ("quick" if quick else "")) / f"{rows[0].device}-ring_attention.csv"
        results.merge(path, rows)
        console = Console() if sys.stdout.isatty() else Console(width=140)
        _print(console, rows)
        if processes:
            console.print(session.peer(base), soft_wrap=True, highlight=False)
        console.print(f"written to {path}", soft_wrap=True, highlight=False)
    elif processes:
        session.peer(base)
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclasses.dataclass
class _Session:
    """What all measurements of a run share."""

    device: torch.device
    dtype: str
    size: int
    rounds: Rounds

    def __post_init__(self) -> None:
        self._environment = dataclasses.asdict(describe(self.device))

    def paced(self, shapes: list[Shape], links: "list[float] | tuple[float, ...]") -> list[Row]:
        timer: Timer = CudaTimer(1) if self.device.type == "cuda" else HostTimer(self.device)
        dtype, rows = _DTYPES[self.dtype], []
        for shape in shapes:
            whole = {f"whole {n}": call for n, call in whole_calls(shape, self.size, dtype, self.device).items()}
            plain = dataclasses.replace(shape, documents=1)
            forward = {"forward": whole_calls(plain, self.size, dtype, self.device)["forward"]}
            whole_seconds = medians(forward, timer, Rounds(3, 3))["forward"]
            for gb in links:
                bandwidth = 1e9 * gb
                if self.device.type == "cpu":
                    bandwidth = shape.bandwidth(gb, self.size, dtype.itemsize, whole_seconds)
                transport = SimulatedTransport(self.size, 0, SimulatedLink(bandwidth), self.device)
                calls = {**whole, **ring_calls(shape, transport, dtype, self.device)}
                seconds = medians(calls, timer, self.rounds)
                rows += self._rows(shape, seconds, "paced", gb)
        return rows

    def processes(self, shapes: list[Shape]) -> list[Row]:
        """The whole is measured on the first rank while the others wait."""
        group = dist.group.WORLD
        assert group is not None
        dtype, rows = _DTYPES[self.dtype], []
        rounds = Rounds(self.rounds.least, self.rounds.least)  # as many on every rank
        transport = C10dTransport(group)
        for shape in shapes:
            whole = whole_calls(shape, self.size, dtype, self.device) if dist.get_rank() == 0 else {}
            calls = {f"whole {name}": whole.get(name, _nothing) for name in DIRECTIONS}
            calls |= ring_calls(shape, transport, dtype, self.device)
            seconds = medians(calls, GroupTimer(group, self.device), rounds)
            slowest = torch.tensor(list(seconds.values()), dtype=torch.float64, device=self.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds = dict(zip(seconds, slowest.tolist(), strict=True))
            rows += self._rows(shape, seconds, transport.capabilities.name, None)
        return rows

    def peer(self, shape: Shape) -> str:
        """PyTorch's own ring: its time, or why it has none."""
        group = dist.group.WORLD
        assert group is not None
        try:
            call = torch_ring(shape, self.size, _DTYPES[self.dtype], self.device)
        except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
            return f"PyTorch's context_parallel does not run here: {str(error).splitlines()[0]}"
        seconds = medians({"torch": call}, GroupTimer(group, self.device), Rounds(self.rounds.least, self.rounds.least))
        return f"PyTorch's context_parallel, forward, keys repeated: {1e3 * seconds['torch']:.3g} ms"

    def _rows(self, shape: Shape, seconds: dict[str, float], transport: str, link: float | None) -> list[Row]:
        return [
            self._row(shape, direction, measured(seconds, self.size, direction), transport, link)
            for direction in DIRECTIONS
        ]

    def _row(self, shape: Shape, direction: str, found: Measured, transport: str, link: float | None) -> Row:
        return Row(
            **dataclasses.asdict(shape),
            direction=direction,
            size=self.size,
            dtype=self.dtype,
            transport=transport,
            link_gb_per_s=link,
            ms_whole=1e3 * found.whole,
            ms_transfer=1e3 * found.transfer,
            ms_ring=1e3 * found.ring,
            percent=found.percent,
            overhead=found.overhead,
            **self._environment,
        )


def _check(device: str, links: list[float], layouts: list[str], processes: bool) -> None:
    if device not in ("auto", "cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        fail(f"no device {device!r} here; choose from auto, cpu and, where there is a GPU, cuda")
    if any(not gb > 0 for gb in links):
        fail(f"a link must have a positive bandwidth, got {links}")
    if processes and "RANK" not in os.environ:
        fail("--processes needs processes: torchrun --nproc-per-node N -m benchmarks ring_attention --processes")
    unknown = [name for name in layouts if name not in ("zigzag", "striped", "contiguous")]
    if unknown:
        fail(f"unknown layout {unknown[0]!r}; choose from zigzag, striped, contiguous")


def _nothing() -> None:
    pass


def _print(console: Console, rows: list[Row]) -> None:
    first = rows[0]
    table = Table(
        title=f"ring attention, {first.size} ranks of {first.tokens} tokens, {first.heads} heads and {first.kv_heads} "
        f"kv heads of {first.head_dim}, {first.dtype}, {first.transport}",
        title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in ("layout", "documents", "direction", "link\nGB/s", "whole / ranks\nms", "transfer\nms", "ring\nms"):
        table.add_column(name, justify="right" if "\n" in name else "left", no_wrap=True)
    for name in ("percent of\none device", "ring / (whole / ranks\n+ transfer)"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        link = "" if row.link_gb_per_s is None else f"{row.link_gb_per_s:g}"
        times = (row.ms_whole / row.size, row.ms_transfer, row.ms_ring)
        table.add_row(
            row.layout, str(row.documents), row.direction, link, *(f"{t:.3g}" for t in times), f"{row.percent:.1f}",
            f"{row.overhead:.2f}",
        )  # fmt: skip
    console.print(table)
