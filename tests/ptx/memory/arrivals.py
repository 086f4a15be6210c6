"""Rows that arrive while a kernel runs, as copy engines bring them, in every order that programs can tell apart.

A program that waits for a flag sees of its surroundings only what is there when it looks. So an execution is told by
how many looks each program has made when each piece arrives; what programs do between looks commutes. A piece that has
not arrived is memory that nobody wrote, and one that has is known only to who acquired its flag (``global_memory``).
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ptx.machine import Machine
from ptx.memory.global_memory import Buffer, GlobalMemory
from ptx.values import Fault

_STRANGER = 1 << 20  # the first number of a program that is none of the launch


@dataclasses.dataclass(frozen=True)
class Arrival:
    """``data`` comes to byte ``first`` of the tensor of a parameter, then ``flags[index]`` becomes ``value``."""

    name: str
    first: int
    data: bytes
    flags: str
    index: int
    value: int

    def bring(self, memory: GlobalMemory, number: int) -> None:
        rows, flags = (_buffer(memory, name) for name in (self.name, self.flags))
        end = self.first + len(self.data)
        rows.data[self.first : end] = np.frombuffer(self.data, np.uint8)
        if rows.unwritten is not None:
            rows.unwritten[self.first : end] = False
        rows.note_writer(self.first, end, _STRANGER + number)
        flags.data[4 * self.index : 4 * self.index + 4].view(np.int32)[:] = self.value
        memory.release(flags.base + 4 * self.index, _STRANGER + number, 1)


def _buffer(memory: GlobalMemory, name: str) -> Buffer:
    return next(buffer for buffer in memory.buffers if buffer.name == name)


class Duplicate(Exception):
    """A program could not make as many looks before an arrival: another interleaving is the same execution."""


class Interleaving:
    """Runs programs in turns: ``before[i][p]`` looks of program p come before arrival i.

    Raises:
        Duplicate: a program waits, or ends, before that. Fault: by what a program does, or if one waits for ever.
    """

    def __init__(self, arrivals: Sequence[Arrival], before: Sequence[Sequence[int]]) -> None:
        self.arrivals, self.before = arrivals, before

    def __call__(self, machines: Sequence[Machine], memory: GlobalMemory) -> None:
        running = [machine.turns() for machine in machines]
        state = [next(program, "end") for program in running]
        made = [0] * len(running)

        def advance(p: int) -> None:
            made[p] += state[p] == "look"
            state[p] = next(running[p], "end")

        for number, (arrival, wanted) in enumerate(zip(self.arrivals, self.before, strict=True)):
            for p, looks in enumerate(wanted):
                while made[p] < looks:
                    if state[p] != "look":
                        raise Duplicate
                    advance(p)
            arrival.bring(memory, number)
            for p, now in enumerate(state):
                if now == "sleep":  # woken, and about to look again
                    advance(p)
        for p in range(len(running)):
            while state[p] != "end":
                if state[p] == "sleep":
                    raise Fault(f"program {p} waits for what nobody brings")
                advance(p)


def interleavings(programs: int, arrivals: int, looks: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """``before`` of all interleavings, with up to ``looks`` looks of each program before the last arrival."""
    each = [counts for counts in itertools.product(range(looks + 1), repeat=arrivals) if list(counts) == sorted(counts)]
    for chosen in itertools.product(each, repeat=programs):
        yield tuple(zip(*chosen, strict=True))
