"""How often each machine instruction runs: the static code of ptxas, weighted by what the executor counted in the PTX.

ptxas keeps the loops of the PTX, mostly in their order, or unrolls them. So each loop of the machine code is one of the
PTX, a copy with several trips in one, or the trips that are left over; what is outside loops runs as often as in PTX.
Loops that changed places are told by how they access memory.
"""

import dataclasses
import itertools
import re

from ptx.program import Instruction as PtxInstruction
from ptx.program import Program
from ptx.report import Report
from ptx.values import Fault

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)([^;]*);")
_MOVED = 6  # loops of which every order is tried
_KINDS = {"LDG": 0, "STG": 1, "LDGSTS": 2}


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
    kinds: tuple[int, int, int]  # loads, stores and copies of global memory, without those of inner loops

    @property
    def accesses(self) -> int:
        return sum(self.kinds)

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


def _merged(pairs: list[tuple[int, int]], access: list[int | None]) -> list[Loop]:
    """Loops by their first instruction; branches back to one place are one loop. ``access``: which of ``kinds``."""
    ends: dict[int, int] = {}
    for first, last in pairs:
        ends[first] = max(last, ends.get(first, last))
    loops = [Loop(first, last, (0, 0, 0)) for first, last in sorted(ends.items())]
    counts = [[0, 0, 0] for _ in loops]
    for i, kind in enumerate(access):
        inner = _innermost(loops, i)
        if kind is not None and inner is not None:
            counts[inner][kind] += 1
    return [dataclasses.replace(loop, kinds=(a, b, c)) for loop, (a, b, c) in zip(loops, counts, strict=True)]


def _innermost(loops: list[Loop], index: int) -> int | None:
    inside = [n for n, loop in enumerate(loops) if index in loop]
    return min(inside, key=lambda n: loops[n].last - loops[n].first, default=None)


def code_loops(code: list[Instruction]) -> list[Loop]:
    index = {x.address: i for i, x in enumerate(code)}
    back = [
        (index[t], i) for i, x in enumerate(code) if (t := _target(x)) is not None and t <= x.address and t in index
    ]
    return _merged(back, [_KINDS.get(x.name.split(".")[0]) for x in code])


def _loops_of_program(program: Program) -> list[Loop]:
    back = []
    for i, x in enumerate(program.instructions):
        if x.name == "bra":
            target = program.labels[x.operands[0].name]  # type: ignore[union-attr]
            if target <= i:
                back.append((target, i))
    return _merged(back, [_access(x) for x in program.instructions])


def _access(x: PtxInstruction) -> int | None:
    if x.name == "cp" and ("ca" in x.modifiers or "cg" in x.modifiers):
        return 2
    return {"ld": 0, "st": 1}.get(x.name) if "global" in x.modifiers else None


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
    if len(loops) < len(ptx_loops):
        raise Fault("ptxas has unrolled a loop whole, or merged two: its trips cannot be told")
    numbers = range(len(ptx_loops))
    orders = itertools.permutations(numbers) if len(numbers) <= _MOVED else [tuple(numbers)]
    found = [w for w in (_in_order(loops, ptx_loops, trips, order) for order in orders) if w is not None]
    if not found:
        raise Fault("the machine code has loops that the PTX lacks")
    _, weight, source = min(found, key=lambda w: w[0])  # of as good ones the first: loops in their order
    return weight, source


def _in_order(
    loops: list[Loop], ptx_loops: list[Loop], trips: list[float], order: tuple[int, ...]
) -> tuple[int, list[float], list[int]] | None:
    """(accesses that do not fit, trips, loop of the PTX), if ptxas kept the loops in this order."""
    weight: list[float] = []
    source: list[int] = []
    extra, unlike, i = len(loops) - len(ptx_loops), 0, 0
    for n in order:
        if i == len(loops):
            return None
        loop = ptx_loops[n]
        unrolled = max(1, round(loops[i].accesses / loop.accesses)) if loop.accesses else 1
        rest = i + 1 < len(loops) and extra > 0 and unrolled > 1 and loops[i + 1].accesses < loops[i].accesses
        unlike += sum(abs(a - unrolled * b) for a, b in zip(loops[i].kinds, loop.kinds, strict=True))
        weight.append(float(int(trips[n]) // unrolled) if rest else trips[n] / unrolled)
        source.append(n)
        if rest:
            unlike += sum(abs(a - b) for a, b in zip(loops[i + 1].kinds, loop.kinds, strict=True))
            weight.append(trips[n] - unrolled * weight[-1])
            source.append(n)
            extra -= 1
        i += 2 if rest else 1
    return (unlike, weight, source) if i == len(loops) else None


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
