"""The transport over a communicator of our own: one call of the binding enqueues all that an op exchanges.

    caller's stream   matmul, record ............................ wait, matmul
    NCCL's stream            wait, grouped sends and receives, record

The host waits for neither stream. What is sent and received is kept alive until the handle was waited for, as its
memory may be used again by the caller's stream from then on. What does not end in time aborts the communicator; the
next call and the next wait raise. Not yet run on several GPUs.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallel_ops._nccl import Communicator, Event, NcclError, is_capturing
from parallel_ops.comm.errors import PeerError
from parallel_ops.comm.transport.base import Capabilities, Handle, Receive, Send, Transport

# SMs that one operation may take from the matmul beside it, where NCCL's own choice is up to 32 of 132.
# By calculation, not by measurement: one CTA copies 25 to 30 GB/s, so 16 fill the 450 GB/s of an H100's links.
MAX_CTAS = 16

# Kinds of csrc/nccl/communicator.h, and data types of nccl.h.
_SEND, _RECV, _ALL_GATHER, _REDUCE_SCATTER, _ALL_REDUCE = range(5)
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
    """The handle of one launch."""

    __slots__ = ("_event", "_kept", "_op", "_transport")

    def __init__(self, transport: "NcclTransport", op: str, event: Event, kept: Sequence[Tensor]) -> None:
        self._transport, self._op, self._event, self._kept = transport, op, event, kept

    def wait(self) -> None:
        self._transport.join(self._op, self._event)
        self._kept = ()

    def __del__(self) -> None:
        if self._kept:  # an error came between
            self._transport.abandoned.append((self._event, self._kept))


class NcclTransport(Transport):
    """This rank's end of a communicator that exists; ``connect`` makes them.

    Args:
        native: the communicator of the binding.
        rank, size: of the communicator.
        device: of its tensors.
        stream: the raw handle of the caller's stream.
    """

    def __init__(
        self, native: Communicator, rank: int, size: int, device: torch.device, stream: Callable[[], int]
    ) -> None:
        super().__init__(rank, size, Capabilities("nccl", (device.type,), stream_ordered=True))
        self._native, self._stream = native, stream
        self.abandoned: list[tuple[Event, Sequence[Tensor]]] = []

    def _start(self, op: str, chunks: Sequence[Send | Receive]) -> list[Handle]:
        calls: list[int] = []
        for chunk in chunks:
            address, count = chunk.tensor.data_ptr(), chunk.tensor.nbytes
            if isinstance(chunk, Send):
                calls += (_SEND, address, 0, count, _UINT8, chunk.peer)
            else:
                calls += (_RECV, 0, address, count, _UINT8, chunk.peer)
        # One stream, so one event: every chunk is there when all are.
        return [self._launch(op, calls, [chunk.tensor for chunk in chunks])] * len(chunks)

    def all_gather(self, op: str, received: Tensor, sent: Tensor) -> Handle | None:
        return self._collective(op, _ALL_GATHER, received, sent, sent.nbytes, _UINT8)

    def all_to_all(
        self, op: str, received: Tensor, sent: Tensor, rows: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Handle | None:
        if rows is None:
            each = [sent.nbytes // self.size] * self.size
            arriving = leaving = each
        else:
            row = math.prod(sent.shape[1:]) * sent.itemsize
            arriving, leaving = ([count * row for count in counts] for counts in rows)
        calls: list[int] = []
        source, target = sent.data_ptr(), received.data_ptr()
        for peer, (incoming, outgoing) in enumerate(zip(arriving, leaving, strict=True)):
            if outgoing:
                calls += (_SEND, source, 0, outgoing, _UINT8, peer)
            if incoming:
                calls += (_RECV, 0, target, incoming, _UINT8, peer)
            source, target = source + outgoing, target + incoming
        return self._launch(op, calls, (received, sent))

    def reduce_scatter(self, op: str, received: Tensor, sent: Tensor) -> Handle | None:
        if (dtype := _SUMMED.get(sent.dtype)) is None:
            return None
        return self._collective(op, _REDUCE_SCATTER, received, sent, received.numel(), dtype)

    def all_reduce(self, op: str, tensor: Tensor) -> Handle | None:
        if (dtype := _SUMMED.get(tensor.dtype)) is None:
            return None
        return self._collective(op, _ALL_REDUCE, tensor, tensor, tensor.numel(), dtype)

    def _collective(self, op: str, kind: int, received: Tensor, sent: Tensor, count: int, dtype: int) -> Handle | None:
        if not count:
            return None
        return self._launch(op, (kind, sent.data_ptr(), received.data_ptr(), count, dtype, 0), (received, sent))

    def _launch(self, op: str, calls: Sequence[int], kept: Sequence[Tensor]) -> _Batch:
        stream = self._stream()
        if self.abandoned and not is_capturing(stream):
            self.abandoned = [pair for pair in self.abandoned if not pair[0].done()]
        try:
            return _Batch(self, op, self._native.launch(op, calls, stream), kept)
        except NcclError as error:
            raise PeerError(f"{op}: rank {self.rank} could not start its transfers: {error}") from error

    def join(self, op: str, event: Event) -> None:
        """The caller's stream waits for the event of a batch. Raises PeerError if the communicator was aborted."""
        try:
            self._native.join(op, event, self._stream())
        except NcclError as error:
            raise PeerError(f"{op}: rank {self.rank} failed waiting for its transfers: {error}") from error

    def abort(self, reason: str) -> None:
        """Ends what it does on the GPU, now; every later call raises PeerError with this reason."""
        self._native.abort(f"it was aborted: {reason}")
