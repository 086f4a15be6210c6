"""The transport over a communicator of our own: one call of the binding enqueues all that an op exchanges.

    caller's stream   product, record ............................ wait, product
    NCCL's stream            wait, grouped sends and receives, record

The host waits for neither stream. What is sent and received is kept alive until the handle was waited for, as its
memory may be used again by the caller's stream from then on. What does not end in time aborts the communicator; the
next call and the next wait raise.

In leased memory (``Workspace``) an all-gather and an all-to-all need no multiprocessors (NCCL 2.28, within NVLink), and
sums are those of NCCL's symmetric kernels. Chunks whose place at the peer is known are put there by copy engines: the
receiver signals that its memory may be written, the sender puts and signals (2.29). Elsewhere they are grouped sends
and receives. Not yet run on GPUs.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import Tensor

from parallel_ops._nccl import Communicator, Event, Segment, is_capturing
from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.nccl.library import Library, NcclError
from parallel_ops.comm.nccl.pool import Lease, Pool, Window
from parallel_ops.comm.transport.base import Capabilities, Endpoint, Handle, Receive, Send, Workspace

# Multiprocessors that one operation may take from the product beside it, where NCCL's own choice is up to 32 of 132.
# By calculation, not by measurement: one CTA copies 25 to 30 GB/s, so 16 fill the 450 GB/s of an H100's links.
MAX_CTAS = 16

# A gathered input of 8,192 x 8,192 in 16 bits has 128 MiB, and a backward leases one and the sum of its gradient.
_LEAST_SEGMENT, _MOST_MEMORY = 64 << 20, 1 << 30

# Kinds of csrc/nccl/communicator.h, and data types of nccl.h.
_SEND, _RECV, _ALL_GATHER, _REDUCE_SCATTER, _ALL_REDUCE, _ALL_TO_ALL = range(6)
_UINT8 = 1
_SUMMED = {
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class _Batch:
    """What one launch exchanges."""

    __slots__ = ("_event", "_kept", "_op", "_transport")

    def __init__(self, transport: "NcclTransport", op: str, event: Event, kept: Sequence[Tensor]) -> None:
        self._transport, self._op, self._event, self._kept = transport, op, event, kept

    def wait(self) -> None:
        self._transport.join(self._op, self._event)
        self._kept = ()

    def __del__(self) -> None:
        if self._kept:  # an error came between
            self._transport.abandoned.append((self._event, self._kept))


class _Leased(Workspace):
    """Memory of the pool, while the block lasts."""

    __slots__ = ("_leases", "_op", "_transport")

    def __init__(self, transport: "NcclTransport", op: str) -> None:
        self._transport, self._op = transport, op
        self._leases: list[Lease] = []

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        shape = tuple(shape)
        nbytes = math.prod(shape) * like.itemsize
        pool = self._transport.pool
        lease = pool.take(nbytes, may_grow=not self._transport.capturing()) if nbytes else None
        if lease is None:
            return like.new_empty(shape)
        self._leases.append(lease)
        return pool.tensor(lease, shape, like.dtype, nbytes)

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and self._leases:
            self._transport.settle(self._op)
        for lease in self._leases:
            self._transport.pool.give(lease)
        self._leases.clear()


class NcclTransport(Endpoint):
    """This rank's end of a communicator that exists; ``connect`` makes them.

    Args:
        native: the communicator of the binding.
        library: its NCCL.
        rank, size: of the communicator.
        device: of its tensors.
        stream: the raw handle of the caller's stream.
        most_memory: bytes of registered memory.
        side: NCCL's stream, kept as long as this.
    """

    def __init__(
        self,
        native: Communicator,
        library: Library,
        rank: int,
        size: int,
        device: torch.device,
        stream: Callable[[], int],
        *,
        most_memory: int = _MOST_MEMORY,
        side: object = None,
    ) -> None:
        capabilities = Capabilities(
            name="nccl",
            device_types=(device.type,),
            asynchronous=True,
            stream_ordered=True,
            uses_compute_units=True,
        )
        super().__init__(rank, size, capabilities)
        self._native, self._library, self._device = native, library, device
        self._stream, self._side = stream, side
        self._index = -1 if device.index is None else device.index
        limit = most_memory if library.version_code >= 22700 else 0
        self.pool = Pool(self._grow, self._index, least=min(_LEAST_SEGMENT, most_memory), limit=limit)
        # NCCL 2.28 gathers without multiprocessors only what is itself in a window.
        self._in_place = library.version_code < 22900
        self.use_puts(native.puts)
        self._last: Event | None = None
        self.abandoned: list[tuple[Event, Sequence[Tensor]]] = []

    def use_puts(self, puts: bool) -> None:
        """Whether chunks are put into windows, by copy engines; the same on all ranks."""
        self.puts = puts
        self._capabilities = dataclasses.replace(self._capabilities, uses_compute_units=not puts)

    def workspace(self, op: str) -> Workspace:
        return _Leased(self, op)

    def _start(self, op: str, chunks: Sequence[Send | Receive]) -> list[Handle]:
        put, batch = self._placed(chunks), None
        kept = [chunk.tensor for chunk in chunks]
        if put:
            batch = self._put(op, [chunk for i, chunk in enumerate(chunks) if i in put], kept)
        calls: list[int] = []
        for i, chunk in enumerate(chunks):
            if i in put:
                continue
            tensor = chunk.tensor
            if isinstance(chunk, Send):
                calls += (_SEND, tensor.data_ptr(), 0, tensor.nbytes, _UINT8, chunk.peer)
            else:
                calls += (_RECV, 0, tensor.data_ptr(), tensor.nbytes, _UINT8, chunk.peer)
        if batch is None or calls:
            batch = self._launch(op, calls, kept)
        # One stream, so one event: every chunk is there when all are.
        return [batch] * len(chunks)

    def _placed(self, chunks: Sequence[Send | Receive]) -> set[int] | tuple[()]:
        """Which chunks are put into windows; both ends of each find the same."""
        if not (self.puts and self.pool.memory):
            return ()
        placed = {
            i
            for i, chunk in enumerate(chunks)
            if self.pool.find(chunk.tensor.data_ptr()) is not None
            and (isinstance(chunk, Receive) or (chunk.at is not None and self.pool.find(chunk.at.data_ptr())))
        }
        # Up to 2.29 signals are numbered by the host: a graph would repeat their numbers.
        return () if placed and self.capturing() else placed

    def _put(self, op: str, chunks: Sequence[Send | Receive], kept: Sequence[Tensor]) -> _Batch:
        arrivals: dict[int, int] = {}
        puts = []
        for chunk in chunks:
            if isinstance(chunk, Receive):
                arrivals[chunk.peer] = arrivals.get(chunk.peer, 0) + 1
            elif chunk.at is not None and (place := self.pool.find(chunk.at.data_ptr())) is not None:
                window = self.pool.windows[place[0]]
                puts.append((chunk.tensor.data_ptr(), place[1], chunk.tensor.nbytes, chunk.peer, window))
        counts = [(count, peer) for peer, count in arrivals.items()]
        return _Batch(self, op, self._enqueue(op, self._native.put, list(arrivals), puts, counts), kept)

    def all_gather(self, op: str, received: Tensor, sent: Tensor) -> Handle | None:
        address = sent.data_ptr()
        if self._in_place and self.pool.find(received.data_ptr()) is not None:
            own = received.view(self.size, -1)[self.rank]
            own.copy_(sent.reshape(-1))
            address = own.data_ptr()
        return self._collective(op, _ALL_GATHER, address, received, sent, sent.nbytes, _UINT8)

    def all_to_all(
        self, op: str, received: Tensor, sent: Tensor, rows: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Handle | None:
        address = sent.data_ptr()
        if rows is None:
            return self._collective(op, _ALL_TO_ALL, address, received, sent, sent.nbytes // self.size, _UINT8)
        calls: list[int] = []
        to = received.data_ptr()
        row = math.prod(sent.shape[1:]) * sent.itemsize
        for peer, (arriving, leaving) in enumerate(zip(*rows, strict=True)):
            if leaving:
                calls += (_SEND, address, 0, leaving * row, _UINT8, peer)
            if arriving:
                calls += (_RECV, 0, to, arriving * row, _UINT8, peer)
            address, to = address + leaving * row, to + arriving * row
        return self._launch(op, calls, (received, sent))

    def reduce_scatter(self, op: str, received: Tensor, sent: Tensor) -> Handle | None:
        if (dtype := _SUMMED.get(sent.dtype)) is None:
            return None
        return self._collective(op, _REDUCE_SCATTER, sent.data_ptr(), received, sent, received.numel(), dtype)

    def all_reduce(self, op: str, tensor: Tensor) -> Handle | None:
        if (dtype := _SUMMED.get(tensor.dtype)) is None:
            return None
        return self._collective(op, _ALL_REDUCE, tensor.data_ptr(), tensor, tensor, tensor.numel(), dtype)

    def _collective(
        self, op: str, kind: int, address: int, received: Tensor, sent: Tensor, count: int, dtype: int
    ) -> Handle | None:
        if not count:
            return None
        return self._launch(op, (kind, address, received.data_ptr(), count, dtype, 0), (received, sent))

    def _launch(self, op: str, calls: Sequence[int], kept: Sequence[Tensor]) -> _Batch:
        return _Batch(self, op, self._enqueue(op, self._native.launch, calls), kept)

    def _enqueue(self, op: str, start: Callable[..., Event], *arguments: object) -> Event:
        stream = self._stream()
        if self.abandoned and not is_capturing(stream):
            self.abandoned = [pair for pair in self.abandoned if not pair[0].done()]
        try:
            self._last = start(op, *arguments, stream)
        except NcclError as error:
            raise PeerError(f"{op}: rank {self.rank} could not start its transfers: {error}") from error
        return self._last

    def join(self, op: str, event: Event) -> None:
        """The caller's stream waits for the event of a batch. Raises PeerError if the communicator was aborted."""
        try:
            self._native.join(op, event, self._stream())
        except NcclError as error:
            raise PeerError(f"{op}: rank {self.rank} failed waiting for its transfers: {error}") from error

    def settle(self, op: str) -> None:
        """The caller's stream waits for all that was started, unless the communicator is gone."""
        if self._last is not None and self._native.alive:
            self.join(op, self._last)

    def capturing(self) -> bool:
        """Whether the caller's stream is captured in a CUDA graph."""
        return is_capturing(self._stream())

    def barrier(self, op: str) -> None:
        self._agreed(op, True)

    def _agreed(self, op: str, own: bool) -> bool:
        """Whether all ranks call this with ``True``. The host waits. Collective."""
        votes = torch.full((1,), int(own), dtype=torch.int32, device=self._device)
        address = votes.data_ptr()
        event = self._enqueue(op, self._native.launch, (_ALL_REDUCE, address, address, 1, _SUMMED[votes.dtype], 0))
        pause = 20e-6
        while not event.done():
            try:
                self._native.check(op)
            except NcclError as error:
                raise PeerError(f"{op}: rank {self.rank} failed at a barrier of {self.size} ranks: {error}") from error
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        self.join(op, event)
        return int(votes.item()) == self.size

    def _grow(self, size: int) -> Window | None:
        """A window of ``size`` bytes on every rank; ``None`` on all of them if one has no memory for it."""
        op, segment = "workspace", None
        # NCCL allocates on the current device. An error is for want of memory on this rank.
        with torch.cuda.device(self._index), contextlib.suppress(NcclError):
            segment = Segment(self._library, size)
        if not self._agreed(op, segment is not None) or segment is None:
            return None
        try:
            self._native.enroll(op, segment)
        except NcclError as error:
            raise PeerError(f"{op}: rank {self.rank} could not register {size} bytes: {error}") from error
        return segment

    def abort(self, reason: str) -> None:
        """Ends what it does on the GPU, now; every later call raises PeerError with this reason."""
        self._native.abort(f"it was aborted: {reason}")
