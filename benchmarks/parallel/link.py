"""One rank whose peers are a link of set speed, or the ranks of torchrun, and medians of calls over either.

A paced link measures how much of a communication an op hides, on one GPU or one CPU. The op of one rank runs as it is;
a chunk from a peer arrives after ``latency + bytes / bandwidth``, chunks of one direction one after the other, and both
directions at once. The data that arrives is random.

On a GPU a stream for each direction is held up by a kernel that watches the clock, and received bytes are copied by a
copy engine, so that they also cost memory bandwidth. On a CPU a thread copies them, and ``wait`` sleeps until the
chunk is due: leave a core free for that thread.
"""

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from benchmarks.harness import options, results
from benchmarks.harness.environment import describe
from benchmarks.harness.timing import Call, HostTimer, Rounds, Timer, device_timer, take_turns
from parallel_ops._internal.command_line import fail
from parallel_ops.comm.nccl.connect import TWO_COMMUNICATORS, set_environment
from parallel_ops.comm.transport.base import Capabilities, Handle, Receive, Send, Transport
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.comm.transport.registry import transport_of, use_transport
from parallel_ops.train.launch.worker import gpu_of_rank

# Sleeping may end this much late, so the rest of a wait is spent awake.
_AWAKE_SECONDS = 2e-4


@dataclasses.dataclass(frozen=True)
class SimulatedLink:
    """Bytes per second that a rank can send, and receive at the same time, and seconds for each chunk."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, size: int) -> float:
        """Seconds of a chunk of ``size`` bytes once its turn has come."""
        return self.latency + size / self.bandwidth


class _CpuHandle:
    def __init__(self, due: float, copied: "concurrent.futures.Future[Tensor] | None") -> None:
        self._due, self._copied = due, copied

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.result()
        while (left := self._due - time.perf_counter()) > 0:
            if left > _AWAKE_SECONDS:
                time.sleep(left - _AWAKE_SECONDS)


class _CudaHandle:
    def __init__(self, event: torch.cuda.Event, chunk: Send | Receive) -> None:
        self._event = event
        self._chunk: Send | Receive | None = chunk  # its memory is in use until the current stream has waited

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
        self._chunk = None


class SimulatedTransport(Transport):
    """Rank ``rank`` of ``size``; the other ranks are not there.

    Args:
        device: of the tensors, CPU or CUDA.
    """

    def __init__(self, size: int, rank: int, link: SimulatedLink, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        super().__init__(rank, size, Capabilities("paced", (device.type,), on_gpu))
        self._link, self._device = link, device
        self._arrivals: dict[torch.dtype, Tensor] = {}
        if on_gpu:
            self._streams = {kind: torch.cuda.Stream(device) for kind in (Send, Receive)}
            self._since = {kind: torch.zeros(1, dtype=torch.int64, device=device) for kind in (Send, Receive)}
        else:
            self._free = {Send: 0.0, Receive: 0.0}  # when each direction has done all that was posted
            self._copier = concurrent.futures.ThreadPoolExecutor(1, "paced-link")

    def _start(self, op: str, chunks: Sequence[Send | Receive]) -> list[Handle]:
        # Made first: it takes time at the first chunk of its size, and the batch starts as one.
        arriving = [self._arriving(c.tensor) if isinstance(c, Receive) else None for c in chunks]
        post = self._post_on_gpu if self._device.type == "cuda" else self._post_on_cpu
        now = time.perf_counter()
        return [post(chunk, data, now) for chunk, data in zip(chunks, arriving, strict=True)]

    def _post_on_cpu(self, chunk: Send | Receive, arriving: Tensor | None, now: float) -> Handle:
        kind = type(chunk)
        self._free[kind] = max(self._free[kind], now) + self._link.seconds(chunk.tensor.nbytes)
        copied = None if arriving is None else self._copier.submit(chunk.tensor.copy_, arriving)
        return _CpuHandle(self._free[kind], copied)

    def _post_on_gpu(self, chunk: Send | Receive, arriving: Tensor | None, _: float) -> Handle:
        from benchmarks.parallel import link_kernels

        kind = type(chunk)
        stream, start = self._streams[kind], self._since[kind]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            link_kernels.note_time(start)
            if arriving is not None:
                chunk.tensor.copy_(arriving, non_blocking=True)
            link_kernels.hold(start, round(1e9 * self._link.seconds(chunk.tensor.nbytes)))
            event = torch.cuda.Event()
            event.record(stream)
        return _CudaHandle(event, chunk)

    def _arriving(self, like: Tensor) -> Tensor:
        """Random data of the shape and dtype of ``like``. Never zeros: a GPU runs faster on those than on real data."""
        known = self._arrivals.get(like.dtype)
        if known is None or known.numel() < like.numel():
            values = torch.randn(like.numel(), device=self._device)
            known = self._arrivals[like.dtype] = values.to(like.dtype)
        return known[: like.numel()].view(like.shape)


class Session:
    """A run over a paced link in this process, or over the processes of torchrun.

    Args:
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        dtype: A name of ``options.DTYPES``; ``None`` for bfloat16 on a GPU and float32 on a CPU.
        size: Ranks of a paced link. transport: ``"paced"``, ``"c10d"`` or ``"nccl"``, the last two under torchrun.
        links: GB/s of a paced link, measured one after another. output: Folder of the rows; see ``options.folder``.
        cpu_time: Times are CPU seconds of a process, all of its threads, in place of the clock on the wall.

    Attributes:
        shared: Columns of every row.
    """

    def __init__(
        self, device: str, dtype: str | None, size: int, transport: str, links: Sequence[float], quick: bool,
        output: Path | None, *, cpu_time: bool = False,
    ) -> None:  # fmt: skip
        if any(not gb > 0 for gb in links):  # not a number, too, which some versions of typer pass
            fail(f"a link must have a positive bandwidth, got {list(links)}")
        if cpu_time and (transport == "paced" or options.chosen_device(device) == "cuda"):
            fail("CPU seconds are of processes that compute on CPUs")
        if transport != "paced" and "RANK" not in os.environ:
            fail(f"the transport {transport} needs processes: torchrun --nproc-per-node N -m benchmarks ...")
        on_gpu = options.chosen_device(device) == "cuda"
        dtype = dtype or ("bfloat16" if on_gpu else "float32")
        options.check("dtype", [dtype], options.DTYPES)
        if on_gpu:
            torch.cuda.set_device(gpu_of_rank())
        elif transport == "nccl":
            fail("these ranks cannot send over nccl: it needs GPUs")
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.dtype, self.size, self.links, self.quick = options.DTYPES[dtype], size, links, quick
        self.transport, self.group, self.cpu_time = transport, None, cpu_time
        self.folder = options.folder(output, quick)
        if transport != "paced":
            if transport == "nccl":  # which NCCL reads in the next line
                set_environment(TWO_COMMUNICATORS)
            dist.init_process_group("nccl" if on_gpu else "gloo")
            self.group, self.size = dist.group.WORLD, dist.get_world_size()
        self.shared = {"dtype": dtype, "size": self.size, **dataclasses.asdict(describe(self.device))}

    @property
    def first(self) -> bool:
        """True on the rank that prints."""
        return self.group is None or self.group.rank() == 0

    def transports(
        self, bandwidth: Callable[[float], float], latency: float = 0.0
    ) -> Iterator[tuple[Transport, dict[str, Any]]]:
        """Transports with the columns that name them: one for each link, or that of the ranks.

        Args:
            bandwidth: Bytes per second of a CPU's paced link for GB/s that were asked for.
        """
        if self.group is not None:
            if self.transport == "nccl":
                use_transport(self.group, "nccl")
            real = transport_of(self.group, self.device) if self.transport == "nccl" else C10dTransport(self.group)
            name = real.capabilities.name + (", CPU time" if self.cpu_time else "")
            yield real, {"transport": name, "link_gb_per_s": None}
            return
        for gb in self.links:
            speed = 1e9 * gb if self.device.type == "cuda" else bandwidth(gb)
            paced = SimulatedTransport(self.size, 0, SimulatedLink(speed, latency), self.device)
            yield paced, {"transport": "paced", "link_gb_per_s": gb}

    def medians(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """Seconds of each, taking turns; of ranks the slowest, over the same number of rounds."""
        if self.group is None:
            timer: Timer = device_timer(self.device)
            rounds = Rounds(3, 5) if self.quick else Rounds(9, 30, 20.0)
        else:
            clock = time.process_time if self.cpu_time else time.perf_counter
            timer, rounds = HostTimer(self.device, group=self.group, clock=clock), Rounds(3 if self.quick else 20)
        stats = take_turns(calls, timer, rounds)
        seconds = torch.tensor([stats[name].median for name in calls], dtype=torch.float64, device=self.device)
        if self.group is not None:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return dict(zip(calls, seconds.tolist(), strict=True))

    def end(self, name: str, rows: Sequence[Any], table: Table) -> None:
        """Writes and prints the rows on the first rank, and leaves the group."""
        if self.first:
            console = options.console(140)
            console.print(table)
            path = self.folder / f"{rows[0].device}-{name}.csv"
            results.merge(path, rows)
            console.print(f"written to {path}", soft_wrap=True, highlight=False)
        if self.group is not None:
            dist.destroy_process_group()
