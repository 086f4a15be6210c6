"""Messages that an overlapped op has on their way while it computes."""

import os
from collections.abc import Sequence

from torch import Tensor

from parallel_ops.comm.transport.base import Handle, Receive, Send, Transport

# Exchanges on their way while a piece is multiplied: with one, the link would idle between the end of a message and the
# end of the matmul that the host is busy with.
IN_FLIGHT = 2


def in_flight(transport: Transport) -> int:
    """How many exchanges are on their way while a piece is multiplied. Ranks need not agree on it."""
    return 1 if one_queue() and transport.capabilities.stream_ordered else IN_FLIGHT


def one_queue() -> bool:
    """Whether all streams of a GPU share one hardware queue, as Megatron-LM asks for."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


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
