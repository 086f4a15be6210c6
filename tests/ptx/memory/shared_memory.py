"""Shared memory of all programs of a launch: who wrote and read what since the last barrier, and bank conflicts."""

import numpy as np

from ptx.values import UNSIGNED, Array, Fault, distinct, first_of_each, lengths

_WARPS = 20  # bits of a stamp that hold the warp; those above count barriers
_SEVERAL = (1 << _WARPS) - 1  # read by more than one warp
_BANKS, _BANK_BYTES = 32, 4


class SharedMemory:
    """``unit``: the bytes of the narrowest access of the program, to which it is watched."""

    def __init__(self, programs: int, size: int, unit: int):
        self.size, self.unit = max(16, -(-size // 16) * 16), unit
        self._row = self.size // unit
        count = programs * self._row
        self.data = np.zeros(count, UNSIGNED[8 * unit])
        self._known = np.zeros(count, np.bool_)
        self._written = np.full(count, -1, np.int64)  # (barriers passed, warp) of the last write
        self._read = np.full(count, -1, np.int64)
        self.barriers = np.zeros(programs, np.int64)
        self._held = np.zeros(count, np.int32)  # by how many matmuls under way, which read it

    def _index(self, program: Array, address: Array, size: int) -> Array:
        address = address.astype(np.int64)
        if (address < 0).any() or (address + size > self.size).any():
            worst = int(address.max())
            raise Fault(f"outside shared memory: {size} bytes at {worst} of {self.size}")
        if (address % size).any():
            raise Fault(f"misaligned in shared memory for {size} bytes")
        first = program * self._row + address // self.unit
        return first[:, None] + np.arange(max(1, size // self.unit))

    def places(self, program: Array, address: Array, size: int) -> Array:
        return self._index(program, address, size)

    def hold(self, places: Array, by: int) -> None:
        """``by`` matmuls more read these places until they end, which is when they are held by as many less."""
        np.add.at(self._held, places.ravel(), by)

    def _stamp(self, program: Array, warp: Array) -> Array:
        return ((self.barriers[program] << _WARPS) + warp)[:, None]

    def load(self, program: Array, warp: Array, address: Array, size: int) -> Array:
        """[lanes, size] bytes; ``warp``: its number within the program."""
        index = self._index(program, address, size)
        stamp = self._stamp(program, warp)
        if not self._known[index].all():
            raise Fault("reads shared memory that nobody wrote, or that a copy under way will write")
        last = self._written[index]
        if (((last >> _WARPS) == (stamp >> _WARPS)) & (last != stamp)).any():
            raise Fault("race: reads shared memory that another warp wrote since the last barrier")
        before = self._read[index]
        shared = ((before >> _WARPS) == (stamp >> _WARPS)) & (before != stamp)
        self._read[index] = np.where(shared, stamp | _SEVERAL, stamp)
        # Of several lanes of one instruction the last one's stamp stands; warps that it hides are found here.
        hidden = self._read[index] != stamp
        if hidden.any():
            self._read[index[hidden]] |= _SEVERAL
        return np.ascontiguousarray(self.data[index]).view(np.uint8).reshape(len(address), -1)[:, :size]

    def claim(self, program: Array, warp: Array, address: Array, size: int) -> Array:
        """Checks a copy that will write, and notes it; the place is not known before ``fill``."""
        index = self._index(program, address, size)
        stamp = self._stamp(program, warp)
        self._check_write(index, stamp, np.ones(index.shape, np.bool_))
        self._known[index] = False
        self._written[index] = stamp
        if (self._written[index] != stamp).any():
            raise Fault("race: two warps write one place of shared memory")
        return index

    def fill(self, index: Array, data: Array, program: Array, warp: Array) -> None:
        """``data``: [lanes, bytes] for places that ``claim`` gave."""
        self.data[index] = np.ascontiguousarray(data).view(UNSIGNED[8 * self.unit])
        self._known[index] = True
        self._written[index] = self._stamp(program, warp)

    def store(self, program: Array, warp: Array, address: Array, size: int, data: Array) -> None:
        """Warps may write the same value to one place: where a layout holds copies, compiled code does."""
        index = self._index(program, address, size)
        stamp = self._stamp(program, warp)
        values = np.ascontiguousarray(data).view(UNSIGNED[8 * self.unit])
        self._check_write(index, stamp, self.data[index] != values)
        self.data[index] = values
        if (self.data[index] != values).any():
            raise Fault("race: threads write different values to one place of shared memory")
        self._known[index] = True
        self._written[index] = stamp

    def _check_write(self, index: Array, stamp: Array, changes: Array) -> None:
        if self._held[index].any():
            raise Fault("overwrites shared memory that a matrix product under way reads")
        for last, what in ((self._written[index], "wrote"), (self._read[index], "read")):
            if (((last >> _WARPS) == (stamp >> _WARPS)) & (last != stamp) & changes).any():
                raise Fault(f"race: overwrites shared memory that another warp {what} since the last barrier")

    def barrier(self, programs: Array) -> None:
        self.barriers[programs] += 1


def wavefronts(warp: Array, address: Array, size: int) -> tuple[int, int]:
    """(wavefronts that one instruction takes, the fewest that its distinct bytes could take).

    A wavefront delivers one 4-byte word of each of the 32 banks to a quarter of a warp for 16-byte accesses, half a
    warp for 8-byte accesses, and a whole warp for narrower ones; lanes that read one word share it.
    """
    lane = np.arange(len(warp))  # active lanes of a warp are neighbours here, which is what the hardware pairs up
    start = np.r_[0, np.flatnonzero(np.diff(warp)) + 1]
    lane = lane - np.repeat(start, np.diff(np.r_[start, len(warp)]))
    lanes_a_phase = min(32, 128 // size)
    phase = warp.astype(np.int64) * 32 + lane // lanes_a_phase
    words = max(1, size // _BANK_BYTES)
    word = (address.astype(np.int64)[:, None] // _BANK_BYTES + np.arange(words)).ravel()
    touched = distinct((np.repeat(phase, words) << 20) + word)
    counts = lengths(touched >> 20)
    banks = np.sort((touched >> 20) * _BANKS + touched % _BANKS, kind="stable")
    phases = np.flatnonzero(first_of_each(banks[first_of_each(banks)] // _BANKS))
    worst = np.maximum.reduceat(lengths(banks), phases)
    return int(worst.sum()), int((-(-counts // _BANKS)).sum())
