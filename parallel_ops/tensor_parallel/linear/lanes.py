"""Streams on which the products of one op take turns, so that the next fills the last wave of the one before.

    caller's stream   fork | product 0 .... | product 2 .... | product 4 ... | join
    second stream          |    product 1 .... | product 3 ....
    third stream           | messages of a gather, which wait for no product

A product of one shard has few tiles: its last wave leaves multiprocessors idle, and on one stream the next product must
not start before it has ended. On the other stream its tiles start as soon as there is room for them. Transformer
Engine's split overlap takes compute streams in turns, too. Not yet run on GPUs.

On CPUs, and where all streams share one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``), everything is in the
caller's stream.
"""

import contextlib
from types import TracebackType
from typing import Protocol

import torch

from parallel_ops._internal.overlap_schedule import LANES
from parallel_ops.comm.transport.base import Transport
from parallel_ops.comm.transport.exchange import one_queue

_CALLER, _SECOND, _MESSAGES = range(3)
_NOTHING = contextlib.nullcontext()


class Streams(Protocol):
    """A device's streams by number; 0 is the caller's."""

    def on(self, lane: int) -> contextlib.AbstractContextManager[object]:
        """What is enqueued in the block goes to the stream ``lane``."""
        ...

    def follow(self, lane: int, other: int) -> None:
        """What follows in ``lane`` runs after what ``other`` has been given so far."""
        ...


class Lanes:
    """The lanes of one op, while its block lasts. Behind the block the caller's stream has waited for all of them.

    What is used in a lane must have been allocated before the block, and be kept until its end.

    Args:
        streams: ``None`` to do everything in the caller's stream.
    """

    def __init__(self, streams: Streams | None) -> None:
        self._streams, self._next = streams, _CALLER

    @property
    def count(self) -> int:
        """Streams on which products take turns."""
        return 1 if self._streams is None else LANES

    def product(self) -> contextlib.AbstractContextManager[object]:
        """Of the next product, and of the messages before or behind it."""
        if self._streams is None:
            return _NOTHING
        lane, self._next = self._next, _SECOND if self._next == _CALLER else _CALLER
        return self._streams.on(lane)

    def messages(self) -> contextlib.AbstractContextManager[object]:
        """Of messages that are sent from what was there before the block."""
        return _NOTHING if self._streams is None else self._streams.on(_MESSAGES)

    def __enter__(self) -> "Lanes":
        if self._streams is not None:
            for lane in (_SECOND, _MESSAGES):
                self._streams.follow(lane, _CALLER)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        """Also after an error: memory that lanes use is freed in the caller's stream."""
        if self._streams is not None:
            for lane in (_SECOND, _MESSAGES):
                self._streams.follow(_CALLER, lane)


class _CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._others = [torch.cuda.Stream(device) for _ in (_SECOND, _MESSAGES)]

    def on(self, lane: int) -> contextlib.AbstractContextManager[object]:
        return _NOTHING if lane == _CALLER else torch.cuda.stream(self._stream(lane))

    def follow(self, lane: int, other: int) -> None:
        self._stream(lane).wait_stream(self._stream(other))

    def _stream(self, lane: int) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if lane == _CALLER else self._others[lane - 1]


_streams: dict[torch.device, Streams] = {}


def lanes_of(device: torch.device, transport: Transport) -> Lanes:
    """The lanes of an op on ``device`` whose messages go over ``transport``."""
    if device.type != "cuda" or not transport.capabilities.stream_ordered or one_queue():
        return Lanes(None)
    if device not in _streams:
        _streams[device] = _CudaStreams(device)
    return Lanes(_streams[device])
