"""What a launch did, counted while it ran."""

import collections
import dataclasses
from typing import Any

import numpy as np

from ptx.values import Array, distinct, first_of_each, lengths

SECTOR = 32  # bytes, the unit in which global memory moves


@dataclasses.dataclass
class Traffic:
    """Loads or stores of one operand. ``sectors`` and ``least`` are summed over warps and instructions."""

    bytes: int = 0  # asked for, each byte of a warp's instruction once
    sectors: int = 0
    least: int = 0  # the fewest sectors that could hold those bytes
    widths: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # bits: bytes moved
    per_program: list[Array] = dataclasses.field(default_factory=list)  # (program, sector) of each instruction

    def distinct(self) -> int:
        """Bytes in the sectors that the launch touched, each counted once."""
        return SECTOR * len(np.unique(self._all() & ((1 << 40) - 1))) if self.per_program else 0

    def distinct_per_program(self) -> int:
        """The same, with a sector counted once for each program that touched it."""
        return SECTOR * len(np.unique(self._all())) if self.per_program else 0

    def _all(self) -> Array:
        self.per_program = [np.unique(np.concatenate(self.per_program))]
        return self.per_program[0]


@dataclasses.dataclass
class Report:
    """One launch. Counts are of the programs that were executed."""

    specialised: Any  # aot.Launch; None for PTX that Triton did not make
    grid: tuple[int, ...]
    warps: int
    programs: int
    shared_bytes: int
    stands_for: int  # programs of the launch: all, or all of a kind
    waits: bool = False  # a kind that waits for the other one
    loads: dict[str, Traffic] = dataclasses.field(default_factory=lambda: collections.defaultdict(Traffic))
    stores: dict[str, Traffic] = dataclasses.field(default_factory=lambda: collections.defaultdict(Traffic))
    executed: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # place: warps
    names: dict[int, str] = dataclasses.field(default_factory=dict)  # place: instruction
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes of the storage of each operand
    element_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    barriers: int = 0  # summed over programs
    wavefronts: int = 0
    least_wavefronts: int = 0

    @property
    def name(self) -> str:
        return self.specialised.name

    @property
    def instructions(self) -> int:
        """Issued, summed over warps."""
        return sum(self.executed.values())

    def count(self, name: str) -> int:
        """Issued instructions of one name, such as ``ex2``."""
        return sum(n for place, n in self.executed.items() if self.names[place] == name)

    def note(self, kind: str, operand: str, address: Array, size: int, warp: Array, program: Array) -> None:
        traffic = (self.loads if kind == "load" else self.stores)[operand]
        address = address.astype(np.int64)
        place = distinct((warp.astype(np.int64) << 40) + address)
        sectors = np.count_nonzero(first_of_each(place // SECTOR))
        traffic.sectors += sectors if size <= SECTOR else sectors * size // SECTOR
        traffic.bytes += len(place) * size
        traffic.widths[8 * size] += len(place) * size
        traffic.least += int((-(-lengths(place >> 40) * size // SECTOR)).sum())
        traffic.per_program.append(distinct((program.astype(np.int64) << 40) + address // SECTOR))

    @property
    def sector_ratio(self) -> float:
        """Sectors moved per warp against the least possible."""
        all_traffic = [*self.loads.values(), *self.stores.values()]
        return sum(t.sectors for t in all_traffic) / max(1, sum(t.least for t in all_traffic))

    @property
    def bank_ratio(self) -> float:
        return self.wavefronts / max(1, self.least_wavefronts)
