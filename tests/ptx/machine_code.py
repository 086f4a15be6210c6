"""How often each machine instruction runs: the static code of ptxas, weighted by what the executor counted in the PTX.

ptxas keeps the loops of the PTX, in their order, or unrolls them. So each loop of the machine code is one of the PTX, a
copy with several trips in one, or the trips that are left over; what is outside loops runs as often as it does in PTX.
"""

import dataclasses
import re

from ptx.program import Program
from ptx.report import Report
from ptx.values import Fault

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)([^;]*);")
_LOADS_AND_STORES = ("LDG", "STG", "LDGSTS")


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    guarded: bool
    name: str  # LDG.E.128
    operands: str


@dataclasses.dataclass(frozen=True)
class Loop:
    first: int  # index of an instruction
    last: int
    accesses: int  # to global memory, without those of inner loops

    def __contains__(self, index: int) -> bool:
        return self.first <= index <= self.last


def instructions(sass: str) -> list[Instruction]:
    """Without padding, and without what is only called: slow paths of divisions and square roots."""
    code = [Instruction(int(a, 16), bool(guard), name, rest) for a, guard, name, rest in _LINE.findall(sass)]
    returns = [i for i, x in enumerate(code) if x.name.startswith("RET")]
    if returns:
        exits = [i for i, x in enumerate(code[: returns[0]]) if x.name == "EXIT" and not x.guarded]
        code = code[: exits[-1] + 1] if exits else code
    return [x for x in code if x.name != "NOP" and not _stays(x)]


def _stays(x: Instruction) -> bool:
    """The branch to itself behind the end of a kernel."""
    return x.name == "BRA" and _target(x) == x.address


def _target(x: Instruction) -> int | None:
    found = re.search(r"0x([0-9a-f]+)", x.operands)
    return int(found[1], 16) if found and x.name.startswith("BRA") else None


def _merged(pairs: list[tuple[int, int]], access: list[bool]) -> list[Loop]:
    """Loops by their first instruction; branches back to one place are one loop."""
    ends: dict[int, int] = {}
    for first, last in pairs:
        ends[first] = max(last, ends.get(first, last))
    loops = [Loop(first, last, 0) for first, last in sorted(ends.items())]
    counts = dict.fromkeys(range(len(loops)), 0)
    for i, is_access in enumerate(access):
        inner = _innermost(loops, i)
        if is_access and inner is not None:
            counts[inner] += 1
    return [dataclasses.replace(loop, accesses=counts[n]) for n, loop in enumerate(loops)]


def _innermost(loops: list[Loop], index: int) -> int | None:
    inside = [n for n, loop in enumerate(loops) if index in loop]
    return min(inside, key=lambda n: loops[n].last - loops[n].first, default=None)


def code_loops(code: list[Instruction]) -> list[Loop]:
    index = {x.address: i for i, x in enumerate(code)}
    back = [
        (index[t], i) for i, x in enumerate(code) if (t := _target(x)) is not None and t <= x.address and t in index
    ]
    return _merged(back, [x.name.split(".")[0] in _LOADS_AND_STORES for x in code])


def _loops_of_program(program: Program) -> list[Loop]:
    back = []
    for i, x in enumerate(program.instructions):
        if x.name == "bra":
            target = program.labels[x.operands[0].name]  # type: ignore[union-attr]
            if target <= i:
                back.append((target, i))
    access = [
        (x.name in ("ld", "st") and "global" in x.modifiers) or (x.name == "cp" and "ca" in x.modifiers)
        or (x.name == "cp" and "cg" in x.modifiers) for x in program.instructions
    ]  # fmt: skip
    return _merged(back, access)


@dataclasses.dataclass(frozen=True)
class Issued:
    """Machine instructions a warp, on average over the warps that were executed."""

    all: float
    by_name: dict[str, float]  # MUFU.EX2: 16.0
    loop: float  # those of them within loops
    trips: float  # of the loop that issues most

    def count(self, *prefixes: str) -> float:
        return sum(n for name, n in self.by_name.items() if name.startswith(prefixes))


def issued(sass: str, program: Program, report: Report) -> Issued:
    code = instructions(sass)
    warps = report.programs * report.warps
    ptx_loops, loops = _loops_of_program(program), code_loops(code)
    trips = [report.executed[loop.first] / warps for loop in ptx_loops]
    region = [_innermost(ptx_loops, i) for i in range(len(program.instructions))]
    density = {}  # how often an instruction of the region runs, over how often the region's first does
    for n in (None, *range(len(ptx_loops))):
        static = [i for i, r in enumerate(region) if r == n]
        runs = sum(report.executed[i] for i in static) / warps
        density[n] = runs / max(1, len(static)) / (trips[n] if n is not None and trips[n] else 1.0)
    weight, source = _weights(loops, ptx_loops, trips)
    by_name: dict[str, float] = {}
    in_loop: dict[int, float] = {}
    for i, x in enumerate(code):
        n = _innermost(loops, i)
        runs = density[None] if n is None else density[source[n]] * weight[n]
        by_name[x.name] = by_name.get(x.name, 0.0) + runs
        if n is not None:
            in_loop[n] = in_loop.get(n, 0.0) + runs
    main = max(in_loop, key=in_loop.__getitem__, default=None)
    return Issued(sum(by_name.values()), by_name, sum(in_loop.values()), 0.0 if main is None else weight[main])


def _weights(loops: list[Loop], ptx_loops: list[Loop], trips: list[float]) -> tuple[list[float], list[int]]:
    """(trips, loop of the PTX) of each loop of the machine code."""
    weight, source = [], []
    extra = len(loops) - len(ptx_loops)
    if extra < 0:
        raise Fault("ptxas has unrolled a loop whole, or merged two: its trips cannot be told")
    n = 0
    i = 0
    while i < len(loops):
        if n >= len(ptx_loops):
            raise Fault("the machine code has loops that the PTX lacks")
        accesses = ptx_loops[n].accesses
        unrolled = max(1, round(loops[i].accesses / accesses)) if accesses else 1
        rest = i + 1 < len(loops) and extra > 0 and unrolled > 1 and loops[i + 1].accesses < loops[i].accesses
        weight.append(float(int(trips[n]) // unrolled) if rest else trips[n] / unrolled)
        source.append(n)
        if rest:
            weight.append(trips[n] - unrolled * weight[-1])
            source.append(n)
            extra -= 1
        i += 2 if rest else 1
        n += 1
    return weight, source


@dataclasses.dataclass(frozen=True)
class Phase:
    """A loop of the PTX, the outermost of its nest."""

    trips: float
    barriers: float  # an iteration
    loads: bool
    copies_ahead: bool  # its loads are asynchronous copies


def memory_phases(program: Program, report: Report) -> list[Phase]:
    warps = report.programs * report.warps
    loops = _loops_of_program(program)
    outer = [x for x in loops if not any(y is not x and x.first in y and x.last in y for y in loops)]
    phases = []
    for loop in outer:
        trips = report.executed[loop.first] / warps
        inside = [(i, program.instructions[i]) for i in range(loop.first, loop.last + 1)]
        bars = sum(report.executed[i] for i, x in inside if x.name in ("bar", "barrier") and "warp" not in x.modifiers)
        copies = any(x.name == "cp" and "async" in x.modifiers for _, x in inside)
        # Values of one row, such as its statistics, come with the copies or out of a cache.
        loads = copies or any(x.name == "ld" and "global" in x.modifiers for _, x in inside)
        phases.append(Phase(trips, bars / warps / trips if trips else 0.0, loads, copies))
    return phases
