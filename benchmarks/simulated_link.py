"""One rank whose peers are a link: every chunk takes the time that the link would take, whatever machine this is.

It measures how much of a communication an op hides, on one GPU or one CPU. The op of one rank runs as it is; a chunk
from a peer arrives after ``latency + bytes / bandwidth``, chunks of one direction one after the other, and both
directions at once. The data that arrives is random.

On a GPU a stream for each direction is held up by a kernel that watches the clock, and received bytes are copied by a
copy engine, so that they also cost memory bandwidth. On a CPU a thread copies them, and ``wait`` sleeps until the
chunk is due: leave a core free for that thread.
"""

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_ops.comm.transport.base import Capabilities, Endpoint, Handle, Receive, Send

# Sleeping may end this much late, so the rest of a wait is spent awake.
_AWAKE_SECONDS = 2e-4


@dataclasses.dataclass(frozen=True)
class SimulatedLink:
    """What a rank can send, and receive at the same time: bytes per second, and seconds for each chunk."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or math.isnan(self.bandwidth):
            raise ValueError(f"SimulatedLink: bandwidth must be positive (bytes per second), got {self.bandwidth}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"SimulatedLink: latency must be a number of seconds of at least 0, got {self.latency}")

    def seconds(self, size: int) -> float:
        """How long a chunk of ``size`` bytes is under way once its turn has come."""
        return self.latency + size / self.bandwidth


class _CpuHandle:
    def __init__(self, due: float, copied: "concurrent.futures.Future[None] | None") -> None:
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


class SimulatedTransport(Endpoint):
    """Rank ``rank`` of ``size``; the other ranks are not there.

    Args:
        device: of the tensors, CPU or CUDA.
    """

    def __init__(self, size: int, rank: int, link: SimulatedLink, device: torch.device) -> None:
        if size < 1:
            raise ValueError(f"SimulatedTransport: size must be at least 1, got {size}")
        if not 0 <= rank < size:
            raise ValueError(f"SimulatedTransport: rank must be in [0, {size}), got {rank}")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"SimulatedTransport: device must be a CPU or CUDA device, got {device}")
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
        copied = None if arriving is None else self._copier.submit(_copy, chunk.tensor, arriving)
        return _CpuHandle(self._free[kind], copied)

    def _post_on_gpu(self, chunk: Send | Receive, arriving: Tensor | None, _: float) -> Handle:
        from benchmarks import simulated_link_kernels as paced_link

        kind = type(chunk)
        stream, start = self._streams[kind], self._since[kind]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            paced_link.note_time(start)
            if arriving is not None:
                chunk.tensor.copy_(arriving, non_blocking=True)
            paced_link.hold(start, round(1e9 * self._link.seconds(chunk.tensor.nbytes)))
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


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
