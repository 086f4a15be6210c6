"""The tensors that a launch was given, as a GPU's memory at made-up addresses, and the rules for who may touch them."""

import ctypes
import dataclasses
import mmap
from typing import Any

import numpy as np
import torch

from ptx.values import UNSIGNED, Array, Fault

# What tensors without memory hold, by storage, where it is not zero: the bytes of one element.
meta_values: dict[int, bytes] = {}

_GAP = 1 << 20  # between tensors, so that nothing of one is within reach of another
_ALIGNMENT = 512  # of torch's allocator on CUDA
_WARPS = 10  # bits of a stamp of reads that hold the warp
_SEVERAL = (1 << _WARPS) - 1  # read by more than one
_FLAGGED = 1 << 30  # bytes of a storage whose gaps between a tensor's elements are watched; of larger ones, the bounds


@dataclasses.dataclass
class Buffer:
    """A storage. Shadows have an entry for each ``unit`` bytes, the smallest element of the tensors that share it."""

    name: str  # of the first parameter that pointed here
    base: int
    data: Array
    unit: int
    reachable: Array | tuple[int, int]  # what the tensors of the launch cover, as flags or as (first, end)
    unwritten: Array | None  # None: all of it is known
    program: Array | None = None  # 1 + the program that wrote it in this launch
    thread: Array | None = None  # its thread and the number of barriers that it had passed
    read: Array | None = None  # 1 + the program, the number of barriers and the warp that read it last
    atomic: Array | None = None  # what atomic instructions touched, which others must leave alone

    def _shadows(self) -> None:
        if self.program is None:
            count = -(-len(self.data) // self.unit)
            self.program, self.thread = _zeros(count, np.int32), _zeros(count, np.int64)


class GlobalMemory:
    """``unwritten``: by address of a storage, one flag a byte for what nobody wrote yet; updated by stores."""

    def __init__(self, unwritten: dict[int, Array]):
        self.buffers: list[Buffer] = []
        self._known: dict[int | str, int] = {}
        self._unwritten = unwritten
        self._next = 1 << 30
        # By address: the programs that released there, and how many barriers each had passed. By program: what it
        # acquired, and how many barriers it had passed itself.
        self._released: dict[int, dict[int, int]] = {}
        self._acquired: dict[int, list[tuple[dict[int, int], int]]] = {}

    def pointer(self, name: str, t: torch.Tensor) -> int:
        """The address of ``t``. Only the elements that its strides reach may be touched."""
        storage = t.untyped_storage()
        size = storage.nbytes()
        if not size:
            return self._next
        # Launches that are only looked at may pass one tensor for several: each is a tensor of its own.
        key = f"{name} {storage._cdata}" if t.is_meta else storage.data_ptr()
        if key not in self._known:
            # Memory of a tensor that has none is zero, and takes no room where nobody writes.
            data = _imagined(storage._cdata, size) if t.is_meta else np.frombuffer(_memory(key, size), np.uint8)
            self._known[key] = len(self.buffers)
            nothing = (0, 0)
            self.buffers.append(
                Buffer(
                    name, self._next, data, t.element_size(), nothing, None if t.is_meta else self._unwritten.get(key)
                )
            )
            self._next += -(-(len(data) + _GAP) // _ALIGNMENT) * _ALIGNMENT
        buffer = self.buffers[self._known[key]]
        buffer.unit = min(buffer.unit, t.element_size())
        buffer.reachable = _union(buffer, _reach(t, len(buffer.data)))
        return buffer.base + t.storage_offset() * t.element_size()

    def find(self, address: Array, size: int) -> list[tuple[Buffer, Array | slice, Array]]:
        """(buffer, which of the lanes, offsets) of accesses of ``size`` bytes; raises for one that is not allowed."""
        if not self.buffers:
            raise Fault("an access to global memory, of which the launch has none")
        if (address % np.uint64(size)).any():
            raise Fault(f"misaligned: an address is no multiple of {size} bytes")
        bases = np.array([b.base for b in self.buffers], np.int64)
        address = address.astype(np.int64)
        owner = np.searchsorted(bases, address, side="right") - 1
        first = owner[0]
        groups = [(first, slice(None))] if (owner == first).all() else [(i, owner == i) for i in np.unique(owner)]
        found = []
        for i, lanes in groups:
            buffer = self.buffers[max(int(i), 0)]
            offsets = address[lanes] - buffer.base
            _check_reach(buffer, offsets, size)
            found.append((buffer, lanes, offsets))
        return found

    def touch_atomically(self, buffer: Buffer, offset: int, size: int, program: int) -> None:
        if buffer.unwritten is not None and buffer.unwritten[offset : offset + size].any():
            raise Fault(f"atomic on what nobody wrote, of {buffer.name}")
        if buffer.atomic is None:
            buffer.atomic = _zeros(-(-len(buffer.data) // buffer.unit), np.bool_)
        units = slice(offset // buffer.unit, (offset + size) // buffer.unit)
        if buffer.program is not None and ((buffer.program[units] > 0) & (buffer.program[units] != 1 + program)).any():
            raise Fault(f"atomic on what another program stored, of {buffer.name}")
        buffer.atomic[units] = True

    def release(self, address: int, program: int, epoch: int | None) -> None:
        """``epoch``: barriers that the program had passed; None for a change that releases nothing."""
        if epoch is not None:
            self._released.setdefault(address, {})[program] = epoch

    def acquire(self, address: int, program: int, epoch: int) -> None:
        released = self._released.get(address)
        acquired = self._acquired.setdefault(program, [])
        if released and not (acquired and acquired[-1][0] == released):
            acquired.append((dict(released), epoch))

    def ordered(self, buffer: Buffer, units: Array, program: Array, thread: Array) -> Array:
        """Of what other programs wrote: is it known to the program that reads it?"""
        assert buffer.program is not None and buffer.thread is not None
        writer, written = buffer.program[units] - 1, buffer.thread[units] >> 20
        known = np.zeros(units.shape, np.bool_)
        for reader in np.unique(program):
            for released, epoch in self._acquired.get(int(reader), []):
                most = np.full(max(int(writer.max(initial=0)), *released) + 1, -1, np.int64)
                most[list(released)] = list(released.values())
                seen = (program == reader) & (thread >> 20 > epoch)
                known |= seen[:, None] & (written < most[writer])
        return known


def _zeros(count: int, dtype: Any) -> Array:
    """Zeros that take room only where they are written.

    ``np.zeros`` has that too, but not in a process that told malloc to keep what it frees, as training does: there the
    shadows of a tensor of 2 GiB took 18.
    """
    return np.frombuffer(mmap.mmap(-1, max(count, 1) * np.dtype(dtype).itemsize), dtype)[:count]


def _imagined(storage: int, size: int) -> Array:
    element = meta_values.get(storage)
    if element is None:
        return _zeros(size, np.uint8)
    return np.frombuffer(bytearray(element * (size // len(element))), np.uint8)


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_uint8 * size).from_address(address)


def _reach(t: torch.Tensor, nbytes: int) -> Array | tuple[int, int]:
    size = t.element_size()
    first = t.storage_offset() * size
    extent = (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * size if t.numel() else 0
    if extent == t.numel() * size or nbytes > _FLAGGED:
        return first, first + extent
    flags = torch.zeros(nbytes // size, dtype=torch.bool)
    torch.as_strided(flags, t.shape, t.stride(), t.storage_offset()).fill_(True)
    return np.repeat(flags.numpy(), size)


def _union(buffer: Buffer, reach: Array | tuple[int, int]) -> Array | tuple[int, int]:
    have = buffer.reachable
    if isinstance(have, tuple) and isinstance(reach, tuple):
        if have[0] == have[1] or (reach[0] <= have[0] and have[1] <= reach[1]):
            return reach
        if reach[0] == reach[1] or (have[0] <= reach[0] and reach[1] <= have[1]):
            return have
    flags = np.zeros(len(buffer.data), np.bool_)
    for part in (have, reach):
        if isinstance(part, tuple):
            flags[part[0] : part[1]] = True
        else:
            flags |= part
    return flags


def _check_reach(buffer: Buffer, offsets: Array, size: int) -> None:
    if isinstance(buffer.reachable, tuple):
        first, end = buffer.reachable
        bad = (offsets < first) | (offsets + size > end)
    else:
        bad = (offsets < 0) | (offsets + size > len(buffer.data))
        inside = np.where(bad, 0, offsets)
        for k in range(0, size, buffer.unit):
            bad |= ~buffer.reachable[inside + k]
    if bad.any():
        where = f"byte {int(offsets[bad][0])} of {len(buffer.data)}"
        raise Fault(f"outside its tensor: {int(bad.sum())} threads, the first at {where} of {buffer.name}")


def _units(buffer: Buffer, offsets: Array, size: int) -> Array:
    return offsets[:, None] // buffer.unit + np.arange(max(1, size // buffer.unit))


def _check_atomic(buffer: Buffer, offsets: Array, size: int) -> None:
    if buffer.atomic is not None and buffer.atomic[_units(buffer, offsets, size)].any():
        raise Fault(f"race: plain and atomic accesses to one place of {buffer.name}")


def load(memory: GlobalMemory, buffer: Buffer, offsets: Array, size: int, program: Array, thread: Array) -> Array:
    """[lanes, size] bytes. ``thread``: the thread and the number of barriers behind it, as one number."""
    if buffer.unwritten is not None:
        flags = buffer.unwritten
        if any(flags[offsets + k].any() for k in range(0, size, buffer.unit)):
            raise Fault(f"reads what nobody wrote, of {buffer.name}")
    _check_atomic(buffer, offsets, size)
    if buffer.program is not None and buffer.thread is not None:
        units = _units(buffer, offsets, size)
        writer = buffer.program[units]
        others = (writer > 0) & (writer != 1 + program[:, None])
        if others.any() and not memory.ordered(buffer, units, program, thread)[others].all():
            raise Fault(f"reads what another program wrote, of {buffer.name}")
        _check_threads(buffer, units, thread, (writer > 0) & ~others, "reads what another thread wrote")
    _note_reader(buffer, _units(buffer, offsets, size), _reader(program, thread))
    word = min(size, 8)
    values = buffer.data[: len(buffer.data) // word * word].view(UNSIGNED[8 * word])
    picked = values[offsets[:, None] // word + np.arange(size // word)]
    return np.ascontiguousarray(picked).view(np.uint8).reshape(len(offsets), size)


def _reader(program: Array, thread: Array) -> Array:
    """The stamps of reads: 1 + the program, barriers, warp; 0 is nobody."""
    barriers, warp = thread >> 20, (thread & ((1 << 20) - 1)) >> 5
    return ((((1 + program.astype(np.int64)) << 20) + barriers << _WARPS) + warp)[:, None]


def _note_reader(buffer: Buffer, units: Array, stamp: Array) -> None:
    if buffer.read is None:
        buffer.read = _zeros(-(-len(buffer.data) // buffer.unit), np.int64)
    before = buffer.read[units]
    shared = ((before >> _WARPS) == (stamp >> _WARPS)) & (before != stamp)
    buffer.read[units] = np.where(shared, stamp | _SEVERAL, stamp)
    hidden = buffer.read[units] != stamp  # of several lanes of one instruction the last one's stamp stands
    if hidden.any():
        buffer.read[units[hidden]] |= _SEVERAL


def _check_threads(buffer: Buffer, units: Array, thread: Array, written: Array, what: str) -> None:
    """No barrier lies between a write and an access by another thread, if both have passed as many."""
    assert buffer.thread is not None
    last = buffer.thread[units]
    same_epoch = (last >> 20) == (thread >> 20)[:, None]
    if (written & same_epoch & (last != thread[:, None])).any():
        raise Fault(f"race: {what} since the last barrier, of {buffer.name}")


def store(buffer: Buffer, offsets: Array, size: int, data: Array, program: Array, thread: Array) -> None:
    buffer._shadows()
    assert buffer.program is not None and buffer.thread is not None
    _check_atomic(buffer, offsets, size)
    units = _units(buffer, offsets, size)
    writer = buffer.program[units]
    if ((writer > 0) & (writer != 1 + program[:, None])).any():
        raise Fault(f"two programs write one place of {buffer.name}")
    word = min(size, 8)
    values = buffer.data[: len(buffer.data) // word * word].view(UNSIGNED[8 * word])
    words = np.ascontiguousarray(data).view(UNSIGNED[8 * word])
    index = offsets[:, None] // word + np.arange(size // word)
    changes = (values[index] != words).any(1)[:, None]
    _check_threads(buffer, units, thread, (writer > 0) & changes, "overwrites what another thread wrote")
    if buffer.read is not None:
        last, stamp = buffer.read[units], _reader(program, thread)
        if (((last >> _WARPS) == (stamp >> _WARPS)) & (last != stamp) & changes).any():
            raise Fault(f"race: overwrites what another warp read since the last barrier, of {buffer.name}")
    buffer.program[units] = 1 + program[:, None]
    buffer.thread[units] = thread[:, None]
    if (buffer.program[units] != 1 + program[:, None]).any():
        raise Fault(f"two programs write one place of {buffer.name}")
    values[index] = words
    if (values[index] != words).any():
        raise Fault(f"race: threads write different values to one place of {buffer.name}")
    if buffer.unwritten is not None:
        for k in range(size):
            buffer.unwritten[offsets + k] = False
