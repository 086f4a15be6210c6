"""The interface of transports: an overlapped op sends chunks to peers and waits for them one by one while it computes,
each batch of them as an ``Exchange``.

An op first posts all its receives and sends, in the same order on every rank, and then computes, waiting for each
chunk just before it needs it. Nothing is ever enqueued after something that waits for it. Between two ranks, chunks
arrive in the order in which they were sent. Wait for a handle before writing its sent tensor or reading its received
one.

    c10d        any torch process group, CPU or CUDA, within a node or across nodes; the default
    nccl        CUDA, over a communicator of the package's own; opt-in, see ``use_transport``
    loopback    ranks in one process, deterministic, for tests
    paced       one rank, whose peers are a link of set bandwidth and latency, for measuring
"""

import abc
import dataclasses
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """Properties of a transport.

    Args:
        name: the transport's name; part of the key under which measurements are kept.
        device_types: devices of its tensors: ``"cpu"``, ``"cuda"`` or both; a batch has one of them.
        stream_ordered: ``Handle.wait`` of a CUDA tensor returns at once and orders the current stream instead.
    """

    name: str
    device_types: tuple[str, ...]
    stream_ordered: bool


class Handle(Protocol):
    """A chunk in flight."""

    def wait(self) -> None:
        """Until the tensor may be used: by the caller on CPU, by the current stream on CUDA.

        Raises PeerError if the transfer failed or took longer than the transport's timeout.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Send:
    """``tensor``, contiguous, goes to rank ``peer`` of the group."""

    tensor: Tensor
    peer: int


@dataclasses.dataclass(frozen=True)
class Receive:
    """``tensor``, contiguous, is filled by the next chunk from rank ``peer`` of the group."""

    tensor: Tensor
    peer: int


class Transport(abc.ABC):
    """One rank's end of a group. This class checks chunks and has no collectives."""

    def __init__(self, rank: int, size: int, capabilities: Capabilities) -> None:
        self.rank, self.size, self.capabilities = rank, size, capabilities

    def post(self, op: str, chunks: Sequence[Send | Receive]) -> list[Handle]:
        """Starts all transfers as one batch and returns their handles in the same order.

        For every send there must be a receive of the same number of bytes in the corresponding batch of its peer.
        ``op`` is named in errors. Raises ValueError or TypeError for a chunk that cannot be sent, before any is.
        """
        check_chunks(op, chunks, self)
        return self._start(op, chunks) if chunks else []

    @abc.abstractmethod
    def _start(self, op: str, chunks: Sequence[Send | Receive]) -> list[Handle]:
        """``post`` of chunks that are right, at least one."""

    def all_gather(self, op: str, received: Tensor, sent: Tensor) -> Handle | None:
        """Starts one collective: part r of ``received`` is filled with ``sent`` of rank r, the own part too.

        This and the next three return ``None``, on all ranks alike, where the transport has no such collective or
        ``post`` is quicker. Their tensors are contiguous; the parts of a tensor are equal pieces of it in rank order.
        Their handles may be waited for more than once.
        """
        return None

    def all_to_all(
        self, op: str, received: Tensor, sent: Tensor, rows: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Handle | None:
        """Starts one collective: part r of ``received`` is filled with this rank's part of ``sent`` of rank r.

        Args:
            rows: the rows of each part of ``received`` and of ``sent``, if they are not equal.
        """
        return None

    def reduce_scatter(self, op: str, received: Tensor, sent: Tensor) -> Handle | None:
        """Starts one collective: ``received`` is filled with the sum of this rank's part of every rank's ``sent``.

        Dtype and order of the sum are the backend's.
        """
        return None

    def all_reduce(self, op: str, tensor: Tensor) -> Handle | None:
        """Starts one collective: ``tensor`` becomes the sum of those of all ranks, in the backend's dtype and order."""
        return None


_CHUNKS = (Send, Receive)


def check_chunks(op: str, chunks: Sequence[Send | Receive], transport: Transport) -> None:
    """ValueError or TypeError for a chunk that no transport could send."""
    rank, size, device_types = transport.rank, transport.size, transport.capabilities.device_types
    device = None
    for i, chunk in enumerate(chunks):
        if not isinstance(chunk, _CHUNKS):
            raise TypeError(f"{op}: chunks[{i}] must be a Send or a Receive, got {type(chunk).__name__}")
        tensor, peer = chunk.tensor, chunk.peer
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: chunks[{i}].tensor must be a tensor, got {type(tensor).__name__}")
        if not 0 <= peer < size or peer == rank:
            raise ValueError(
                f"{op}: chunks[{i}].peer is {peer}, but must be another rank of the {size}, and this is rank {rank}"
            )
        if tensor.device != device:
            if tensor.device.type not in device_types:
                raise ValueError(
                    f"{op}: chunks[{i}] is on {tensor.device}, "
                    f"but {transport.capabilities.name} sends from {' and '.join(device_types)}"
                )
            if device is not None:
                raise ValueError(
                    f"{op}: chunks[{i}] is on {tensor.device}, but chunks[0] on {device}; post them as two batches"
                )
            device = tensor.device
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: chunks[{i}] must be contiguous, got strides {tensor.stride()}")


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat: what travels, so that every dtype does."""
    flat = tensor.detach().view(-1)
    # One element is contiguous whatever its stride, but can be seen as bytes only with a stride of one.
    return (flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))).view(torch.uint8)


# Exchanges on their way while a piece is multiplied: with one, the link would idle between the end of a message and the
# end of the matmul that the host is busy with.
IN_FLIGHT = 2


def in_flight(transport: Transport) -> int:
    """How many exchanges are on their way while a piece is multiplied: one where all streams of a GPU share one
    hardware queue, as Megatron-LM asks for. Ranks need not agree on it."""
    one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return 1 if one_queue and transport.capabilities.stream_ordered else IN_FLIGHT


class Exchange:
    """Messages posted together. Empty ones are not sent, since both ends compute the sizes."""

    def __init__(self, op: str, transport: Transport, sends: list[Send], receives: list[Receive]) -> None:
        everything: list[Send | Receive] = [*receives, *sends]
        chunks = [chunk for chunk in everything if chunk.tensor.numel()]
        self._kept = chunks  # what is being sent must live until it has left
        self._handles: list[Handle] = list(transport.post(op, chunks))

    def wait(self) -> None:
        """Until all have arrived and left. May be called again."""
        waited: Handle | None = None
        while self._handles:
            handle = self._handles.pop(0)
            if handle is not waited:  # one launch has one handle for all of its chunks
                handle.wait()
            waited = handle
        self._kept.clear()


def start_exchange(
    op: str, transport: Transport, received: Tensor, sent: Tensor, rows: tuple[Sequence[int], Sequence[int]]
) -> Handle:
    """Starts an all-to-all of uneven parts: part r of ``received`` is filled by rank r.

    Args:
        received, sent: contiguous, of the same columns; must be kept until the wait.
        rows: of each part of ``received`` and of ``sent``.
    """
    if (handle := transport.all_to_all(op, received, sent, rows)) is not None:
        return handle
    arriving, leaving = (tensor.split(list(counts)) for tensor, counts in zip((received, sent), rows, strict=True))
    return exchange_parts(op, transport, arriving, leaving)


def exchange_parts(op: str, transport: Transport, arriving: Sequence[Tensor], leaving: Sequence[Tensor]) -> Exchange:
    """Starts one message to each rank and one from it: ``arriving[r]`` is filled with what rank r has for this one."""
    rank, size = transport.rank, transport.size
    arriving[rank].copy_(leaving[rank])
    others = [(rank + k) % size for k in range(1, size)]
    sends, receives = [Send(leaving[peer], peer) for peer in others], [Receive(arriving[peer], peer) for peer in others]
    return Exchange(op, transport, sends, receives)
