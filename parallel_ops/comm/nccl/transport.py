"""The transport over a communicator of our own: a batch is one grouped launch on a side stream.

The side stream first waits for the caller's, so that what a batch sends is there; ``Handle.wait`` makes the caller's
stream wait for the batch. The host waits for neither. A batch that fails or does not end aborts the communicator, and
the next call raises.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from parallel_ops.comm.errors import PeerError, TransportUnavailable
from parallel_ops.comm.nccl.communicator import DEFAULT_TIMEOUT, Communicator, Config, NcclError, NotSupported
from parallel_ops.comm.nccl.operations import Operation, all_reduce, receive, send
from parallel_ops.comm.nccl.watchdog import Event
from parallel_ops.comm.transport.base import Capabilities, Endpoint, Handle, Receive, Send


class Streams(Protocol):
    """The caller's stream and the side stream."""

    @property
    def side(self) -> torch.cuda.Stream: ...
    def fork(self) -> None:
        """The side stream waits for what the caller's has been given so far."""
        ...

    def join(self, event: Event) -> None:
        """The caller's stream waits for the event."""
        ...


class CudaStreams:
    """Streams of ``device``. The side stream has priority, so that a transfer does not queue behind a GEMM."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.side = torch.cuda.Stream(device, priority=-1)

    def fork(self) -> None:
        self.side.wait_stream(torch.cuda.current_stream(self._device))

    def join(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)  # type: ignore[arg-type]


class _Batch:
    def __init__(self, transport: "NcclTransport", op: str, event: Event) -> None:
        self._transport, self._op, self._event = transport, op, event

    def wait(self) -> None:
        self._transport.join(self._op, self._event)


class NcclTransport(Endpoint):
    """This rank's end of ``group``. Collective.

    Args:
        group: a process group of any backend, for making the communicator.
        config: of the communicator.
        timeout: seconds that a batch may take.

    Raises:
        TransportUnavailable: a rank has no CUDA device or no NCCL that can do it.
        TypeError, ValueError, NcclError: as :class:`~parallel_ops.comm.nccl.communicator.Communicator` does.
    """

    def __init__(self, group: ProcessGroup, *, config: Config | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        try:
            communicator = Communicator(group, config=config, timeout=timeout)
        except NotSupported as error:
            raise TransportUnavailable(f"NcclTransport: {error}") from error
        self._adopt(communicator, CudaStreams(communicator.device))

    def _adopt(self, communicator: Communicator, streams: Streams) -> None:
        capabilities = Capabilities(
            name="nccl",
            device_types=(communicator.device.type,),
            asynchronous=True,
            stream_ordered=True,
            uses_compute_units=True,
        )
        super().__init__(communicator.rank, communicator.size, capabilities)
        self._communicator, self._streams = communicator, streams

    @classmethod
    def from_communicator(cls, communicator: Communicator, streams: Streams | None = None) -> "NcclTransport":
        """Over a communicator that exists."""
        self = cls.__new__(cls)
        self._adopt(communicator, streams or CudaStreams(communicator.device))
        return self

    def _start(self, op: str, chunks: Sequence[Send | Receive]) -> list[Handle]:
        operations = [
            send(chunk.tensor, chunk.peer) if isinstance(chunk, Send) else receive(chunk.tensor, chunk.peer)
            for chunk in chunks
        ]
        try:
            event = self._enqueue(op, operations)
        except NcclError as error:
            peers = sorted({chunk.peer for chunk in chunks})
            raise PeerError(
                f"{op}: rank {self.rank} could not start its transfers with ranks {peers}: {error}"
            ) from error
        # One launch, so one event: every chunk is there when all are.
        return [_Batch(self, op, event)] * len(chunks)

    def _enqueue(self, op: str, operations: Sequence[Operation]) -> Event:
        self._communicator.refuse_capture(op)  # before the fork, which would draw the side stream into the capture
        self._streams.fork()
        return self._communicator.enqueue(op, operations, self._streams.side)

    def join(self, op: str, event: Event) -> None:
        """The current stream waits for the event of a batch. Raises PeerError if the communicator was aborted."""
        try:
            self._communicator.check(op)
        except NcclError as error:
            raise PeerError(f"{op}: rank {self.rank} failed waiting for its transfers: {error}") from error
        self._streams.join(event)

    def barrier(self, op: str) -> None:
        token = torch.zeros(1, dtype=torch.int32, device=self._communicator.device)
        try:
            self._communicator.wait(op, self._enqueue(op, [all_reduce(token, token)]))
        except NcclError as error:
            raise PeerError(f"{op}: rank {self.rank} failed at a barrier of {self.size} ranks: {error}") from error
