"""Messages that an overlapped op has on their way while it computes."""

import os

from parallel_ops.comm.transport.base import Handle, Receive, Send, Transport

# Exchanges on their way while a piece is multiplied: with one, the link would idle between the end of a message and the
# end of the product that the host is busy with.
IN_FLIGHT = 2


def in_flight(transport: Transport) -> int:
    """How many exchanges are on their way while a piece is multiplied. Ranks need not agree on it."""
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
        while self._handles:
            self._handles.pop(0).wait()
        self._kept.clear()
