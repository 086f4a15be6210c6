"""Registered memory that ops lease: segments of NCCL's allocator, each a window that all ranks have.

NCCL wants a symmetric buffer at the same place of its window on every rank. So what is leased, where, and when the pool
grows must not depend on what may differ between ranks: not on the collector, not on free memory. Leases are taken and
given back in program order, like collectives, and the first place that fits is taken; to grow, all ranks agree. A lease
that does not fit is not an error: the op then uses memory of torch's.

The next lease of a place may be written while kernels still read the former one, since these are ahead of it on the
caller's stream: NCCL's stream waits for that one before every launch, and no rank writes to another that has not come
so far.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# NCCL maps memory in pages of 2 MiB, and wants offsets of 4 KiB at most; 512 bytes are enough for every kernel.
_ALIGNMENT = 512
_PAGE = 2 << 20


class Window(Protocol):
    """A segment as the binding has it."""

    def tensor(self, device: int) -> object: ...


class Lease(NamedTuple):
    """A part of a segment."""

    segment: int
    start: int
    size: int


class Pool:
    """The segments of one communicator.

    Args:
        grow: makes a segment of so many bytes on all ranks, or returns ``None`` on all of them. Collective.
        device: CUDA device index; negative for memory of the host.
        least: bytes of a segment at least. limit: bytes of all segments together at most.
    """

    def __init__(self, grow: Callable[[int], Window | None], device: int, *, least: int, limit: int) -> None:
        self._grow, self._device, self._least, self._limit = grow, device, least, limit
        self._free: list[list[tuple[int, int]]] = []  # of each segment, (start, end) in order
        self._size = 0
        self.windows: list[Window] = []
        self.memory: list[Tensor] = []
        self.poisoned = False  # what is given back is filled with NaN, so that a test sees who still reads it

    def take(self, nbytes: int, *, may_grow: bool) -> Lease | None:
        """The first place of ``nbytes``."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        for segment, free in enumerate(self._free):
            for i, (start, end) in enumerate(free):
                if end - start >= size:
                    free[i : i + 1] = [(start + size, end)] if end - start > size else []
                    return Lease(segment, start, size)
        return self.take(nbytes, may_grow=False) if may_grow and self._grown(size) else None

    def give(self, lease: Lease) -> None:
        """Takes a lease back."""
        segment, start, size = lease
        if self.poisoned:
            self.memory[segment][start : start + size].fill_(0xFF)
        parts = sorted([*self._free[segment], (start, start + size)])
        joined = [parts[0]]
        for first, end in parts[1:]:
            if first == joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((first, end))
        self._free[segment] = joined

    def tensor(self, lease: Lease, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> Tensor:
        """The leased memory as a tensor."""
        memory = self.memory[lease.segment][lease.start : lease.start + nbytes]
        return memory.view(dtype).view(shape)

    def find(self, address: int) -> tuple[int, int] | None:
        """The segment in which ``address`` lies, and how far into it."""
        for segment, memory in enumerate(self.memory):
            if 0 <= (offset := address - memory.data_ptr()) < memory.numel():
                return segment, offset
        return None

    def _grown(self, size: int) -> bool:
        size = max(-(-size // _PAGE) * _PAGE, self._least)
        if self._size + size > self._limit:
            return False
        window = self._grow(size)
        if window is None:
            self._limit = 0  # on all ranks
            return False
        self.windows.append(window)
        self.memory.append(torch.utils.dlpack.from_dlpack(window.tensor(self._device)))
        self._free.append([(0, size)])
        self._size += size
        return True
