"""How much of the communication of a tensor-parallel layer its overlapped linears hide.

For each product of a layer, on one rank of ``size``:

    gemm        the whole product, all data there
    comm        the all-gather of its input, or the reduce-scatter of its output with the sum, and nothing else
    unfused     one after the other: the op with overlap="off"
    overlapped  the op with the number of chunks that is fastest
    chunked     the products that the overlapped op makes, without communication

    efficiency    (gemm + comm - overlapped) / min(gemm, comm)     1: all that can be hidden is hidden
    chunking tax  chunked / gemm                                   what smaller products cost
    ideal         gather  max(gemm, comm + gemm / size)            the last shard must arrive and be multiplied
                  scatter max(gemm + comm / size, gemm / size + comm)

Over a paced link one rank runs the real op, and chunks arrive when a link of that bandwidth would deliver them. On a
GPU the shapes are the models' own. On a CPU every dimension is divided by ``scale``, and the link is proportionate:
comm / gemm is what it would be on a GPU of REFERENCE_FLOPS with that link, whatever the CPU's speed.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.environment import Environment
from benchmarks.timing import Call, Stats, Timer, take_turns
from parallel_ops.comm.transport.base import Transport
from parallel_ops.tensor_parallel.linear.all_gather_linear import column_forward
from parallel_ops.tensor_parallel.linear.call import CANDIDATES, OFF
from parallel_ops.tensor_parallel.linear.chunked import (
    gather_order,
    multiply,
    scatter_order,
    start_gather,
    start_scatter,
)
from parallel_ops.tensor_parallel.linear.linear_reduce_scatter import row_forward

# Dense bfloat16 products as an H100 makes them in practice; it sets only how fast a proportionate link is.
REFERENCE_FLOPS = 650e12
REFERENCE_ITEMSIZE = 2
CHUNKS = CANDIDATES[1:]
_OP = "bench_overlap"


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One product of a layer, whole: ``[rows, inner] @ [inner, columns]``.

    A "gather" splits its columns over the ranks and gathers its rows; a "scatter" splits ``inner`` and scatters rows.
    """

    model: str
    layer: str
    phase: str
    rows: int
    columns: int
    inner: int

    def scaled(self, scale: int) -> "Gemm":
        return dataclasses.replace(
            self, rows=self.rows // scale, columns=self.columns // scale, inner=self.inner // scale
        )

    def flops(self, size: int) -> float:
        """Of one rank."""
        return 2.0 * self.rows * self.columns * self.inner / size

    def sent(self, size: int, itemsize: int) -> float:
        """Bytes that one rank receives (gather) or sends (scatter)."""
        width = self.inner if self.phase == "gather" else self.columns
        return self.rows * width * itemsize * (size - 1) / size

    def reference_ratio(self, bandwidth: float, size: int) -> float:
        """comm / gemm on the reference GPU."""
        return self.sent(size, REFERENCE_ITEMSIZE) / bandwidth / (self.flops(size) / REFERENCE_FLOPS)


def gemms() -> list[Gemm]:
    """The products of one layer, for 8192 tokens (Llama 2 70B, arXiv:2307.09288; GPT-3 175B, arXiv:2005.14165)."""
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
    """Times in milliseconds, medians. ``link_gb_per_s`` is what was asked for; None for a real transport."""

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


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How long to measure."""

    least: int
    most: int
    budget_s: float = math.inf


class GroupTimer:
    """Wall clock from a barrier to the end of the work of the device, the same number of rounds on every rank."""

    repeat = 1

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def round(self, batches: Sequence[Sequence[Call]]) -> list[float]:
        seconds = []
        for batch in batches:
            dist.barrier(group=self._group)
            self._synchronize()
            started = time.perf_counter()
            for call in batch:
                call()
            self._synchronize()
            seconds.append((time.perf_counter() - started) / len(batch))
        return seconds

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds, by what ``calls`` names them: gemm, comm, unfused, and for each number of chunks both others."""

    seconds: dict[str, float]
    size: int
    phase: str

    @property
    def chunks(self) -> int:
        return min(CHUNKS, key=lambda n: self.seconds[f"overlapped {n}"])

    @property
    def overlapped(self) -> float:
        return self.seconds[f"overlapped {self.chunks}"]

    @property
    def ideal(self) -> float:
        gemm, comm = self.seconds["gemm"], self.seconds["comm"]
        if self.phase == "gather":
            return max(gemm, comm + gemm / self.size)
        return max(gemm + comm / self.size, gemm / self.size + comm)

    @property
    def efficiency(self) -> float:
        gemm, comm = self.seconds["gemm"], self.seconds["comm"]
        return (gemm + comm - self.overlapped) / min(gemm, comm)

    @property
    def chunking_tax(self) -> float:
        return self.seconds[f"chunked {self.chunks}"] / self.seconds["gemm"]


def calls(gemm: Gemm, transport: Transport, dtype: torch.dtype, device: torch.device) -> dict[str, Call]:
    """Everything that is measured of one product."""
    size, rank = transport.size, transport.rank
    rows = [gemm.rows // size] * size
    gathers = gemm.phase == "gather"
    columns, inner = (gemm.columns // size, gemm.inner) if gathers else (gemm.columns, gemm.inner // size)
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


def measure(
    gemm: Gemm,
    transport: Transport,
    dtype: torch.dtype,
    device: torch.device,
    timer: Timer,
    rounds: Rounds,
    reduce: Callable[[list[float]], list[float]] = list,
) -> Measured:
    """Medians of rounds in which all calls take turns. ``reduce`` joins the medians of the ranks into one."""
    named = {name: [call] for name, call in calls(gemm, transport, dtype, device).items()}
    stats: dict[str, Stats] = take_turns(
        named, timer, min_rounds=rounds.least, max_rounds=rounds.most, budget_s=rounds.budget_s
    )
    medians = reduce([stats[name].median for name in named])
    return Measured(dict(zip(named, medians, strict=True)), transport.size, gemm.phase)


def product_seconds(gemm: Gemm, size: int, dtype: torch.dtype, device: torch.device, timer: Timer) -> float:
    """One rank's product alone, to set a proportionate link by."""
    inner = gemm.inner if gemm.phase == "gather" else gemm.inner // size
    columns = gemm.columns // size if gemm.phase == "gather" else gemm.columns
    x = torch.randn(gemm.rows, inner, device=device).to(dtype)
    weight = torch.randn(columns, inner, device=device).to(dtype)
    stats = take_turns(
        {"gemm": [lambda: multiply(x, weight, None)]}, timer, min_rounds=5, max_rounds=9, budget_s=math.inf
    )
    return stats["gemm"].median
