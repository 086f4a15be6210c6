"""Runs a program: registers as arrays with an entry a thread, control flow, barriers.

Threads that are at different places run in groups, the earliest place first, so that those which parted meet again.
"""

import dataclasses

import numpy as np

from ptx.instructions import arithmetic, matrix, transfers, warpgroup
from ptx.memory.global_memory import GlobalMemory
from ptx.memory.shared_memory import SharedMemory
from ptx.program import Immediate, Instruction, Operand, Program, Register, Special, Symbol, register_bits
from ptx.report import Report
from ptx.values import FLOAT, SIGNED, UNSIGNED, Array, Fault, bits, dtype

_LIMIT = 2_000_000  # steps, after which a program counts as one that does not end
_PATIENCE = 1000  # turns of threads that sleep while no other runs


@dataclasses.dataclass
class Approximation:
    """Approximate instructions are off by their documented worst error, up or down by the bits of what they gave.

    A direction is as good as random, and the same for the same operands, as on a GPU. No ``seed``: they are exact.
    """

    seed: int | None

    def off(self, x: Array, *, relative: float = 0.0, ulps: float = 0.0, absolute: float = 0.0) -> Array:
        """fp64 ``x`` as fp32, with an error of that size."""
        if self.seed is None:
            return x.astype(np.float32)
        mixed = (x.view(np.uint64) ^ np.uint64(self.seed)) * np.uint64(0x9E3779B97F4A7C15)
        sign = np.where(
            ((mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(63), 1.0, -1.0
        )
        ulp = np.spacing(np.abs(x.astype(np.float32))).astype(np.float64)
        error = relative * np.abs(x) + ulps * ulp + absolute
        special = ~np.isfinite(x) | ((x == 0) & (absolute == 0))
        return np.where(special, x, x + sign * error).astype(np.float32)


class Machine:
    """``programs``: the numbers, within the grid, of the programs to run at once."""

    def __init__(
        self, program: Program, grid: tuple[int, int, int], programs: Array, warps: int, arguments: dict[str, object],
        memory: GlobalMemory, shared_bytes: int, report: Report, approximation: Approximation,
    ):  # fmt: skip
        self.program, self.memory, self.report, self.approximation = program, memory, report, approximation
        self.arguments = arguments
        self.threads = 32 * warps
        self.count = len(programs) * self.threads
        place = np.arange(self.count)
        self.slot = place // self.threads  # the program, of those that run here
        self.number = programs.astype(np.int64)[self.slot]  # the program, of all
        self.thread = place % self.threads
        self.lane = place % 32
        self.warp = self.thread // 32  # within the program
        self.any_warp = place // 32  # of those that run here
        x, y, _ = grid
        index = (self.number % x, self.number // x % y, self.number // (x * y))
        self._special = {"%tid.x": self.thread, "%laneid": self.lane, "%ntid.x": np.full(self.count, self.threads)}
        self._special["%warpid"] = self.warp
        for axis, i, n in zip("xyz", index, grid, strict=True):
            self._special[f"%ctaid.{axis}"] = i
            self._special[f"%nctaid.{axis}"] = np.full(self.count, n)
        self.registers: dict[str, Array] = {}
        self._declared: dict[str, int] = {}
        self.shared = SharedMemory(len(programs), shared_bytes, transfers.shared_unit(program))
        self.copies: dict[int, list[transfers.Copy]] = {}
        self.products: list[warpgroup.Product] = []  # under way, oldest first
        self.batches = 0  # of matmuls, closed by commit_group
        self.active: Array | None = None  # the threads that run the instruction; None is all
        self.live = np.ones(self.count, np.bool_)
        self._handlers = [_handler(i) for i in program.instructions]

    # Registers

    def read(self, operand: Operand, kind: str) -> Array:
        """The operand as an instruction of type ``kind`` sees it; a constant has no dimensions."""
        match operand:
            case Immediate():
                return operand.value(kind)
            case Register(name):
                return self._register(name, kind)
            case Special(name):
                return self._special[name].astype(UNSIGNED[bits(kind)]).view(dtype(kind))
            case Symbol(name):
                if name in self.program.shared_symbols:
                    return np.array(0, UNSIGNED[bits(kind)])  # Triton has one block of shared memory, from 0 on
                return self._register(name, kind)
        raise Fault(f"cannot read {operand}")

    def _register(self, name: str, kind: str) -> Array:
        if self.products and any(name in p.registers and p.taken_by(self.active) for p in self.products):
            raise Fault(f"reads {name}, which a matrix product under way will write")
        return self.raw(name, kind)

    def raw(self, name: str, kind: str) -> Array:
        value = self.registers.get(name)
        if kind == "pred":
            return np.zeros(self.count, np.bool_) if value is None else value
        width = bits(kind)
        if value is None:  # undefined: all ones, a NaN or an address outside everything
            value = np.full(self.count, -1, SIGNED[width]).view(UNSIGNED[width])
        if value.dtype.itemsize * 8 != width:
            value = value.astype(UNSIGNED[width])
        return value.view(dtype(kind))

    def write(self, operand: Operand, value: Array, mask: Array | None) -> None:
        if isinstance(operand, Symbol) and operand.name != "_":
            operand = Register(operand.name)
        if not isinstance(operand, Register) or operand.name == "_":
            return
        value = np.asarray(value)
        if value.dtype != np.bool_:
            width = value.dtype.itemsize * 8
            declared = self._declared.get(operand.name)
            if declared is None:
                declared = self._declared[operand.name] = register_bits(self.program, operand.name) or width
            if declared > width and value.dtype.kind != "f":
                table = SIGNED if value.dtype.kind == "i" else UNSIGNED
                value, width = value.astype(table[declared]), declared
            value = value.view(UNSIGNED[width])
        if value.ndim == 0:
            value = np.full(self.count, value)
        if mask is not None:
            old = self.registers.get(operand.name)
            old = np.zeros(1, value.dtype) if old is None else old.astype(value.dtype, copy=False)
            value = np.where(mask, value, old)
        self.registers[operand.name] = value

    def lanes(self, mask: Array | None) -> Array | slice:
        """An index of the threads that take part."""
        return slice(None) if mask is None else np.flatnonzero(mask)

    def wide(self, value: Array) -> Array:
        """One entry a thread."""
        return np.full(self.count, value) if value.ndim == 0 else value

    def whole_warps(self, mask: Array | None, what: str) -> None:
        if mask is not None:
            warps = mask.reshape(-1, 32)
            if (warps.any(1) != warps.all(1)).any():
                raise Fault(f"{what} by a part of a warp")

    def parameter(self, name: str, kind: str) -> Array:
        value = self.arguments[name]
        if isinstance(value, float):
            return np.array(value, FLOAT[bits(kind)]).view(UNSIGNED[bits(kind)])
        width = bits(kind)
        return np.array(int(value) & ((1 << width) - 1), UNSIGNED[width]).view(dtype(kind))  # type: ignore[call-overload]

    # Control flow

    def run(self) -> None:
        """Runs the program to its end."""
        groups: dict[int, Array] = {0: self.live.copy()}
        asleep: dict[int, Array] = {}  # until no other thread can go on
        steps = alone = 0
        with np.errstate(all="ignore"):
            while groups or asleep:
                if not groups:
                    groups, asleep, alone = asleep, {}, alone + 1
                    if alone > _PATIENCE:
                        raise Fault("waits for what no program does")
                place = min(groups)
                mask = groups.pop(place)
                ahead = min(groups, default=len(self._handlers))
                full = None if mask.all() else mask
                issued = int(mask.reshape(-1, 32).any(1).sum())
                while True:
                    steps += 1
                    if steps > _LIMIT:
                        raise Fault("does not end")
                    if place >= len(self._handlers):
                        raise Fault("runs past its end")
                    instruction = self.program.instructions[place]
                    self.report.executed[place] += issued
                    self.active = full
                    taking = self._taking(instruction, full)
                    place += 1
                    if instruction.name == "nanosleep":
                        _join(asleep, place, mask)
                        break
                    if instruction.name in ("bra", "ret", "exit"):
                        went = mask if taking is None else taking
                        stay = mask & ~went
                        if instruction.name == "bra":
                            _join(groups, self._target(instruction), went)
                        else:
                            self.live &= ~went
                        _join(groups, place, stay)
                        break
                    try:
                        self._step(instruction, place - 1, taking)
                    except Fault as fault:
                        raise Fault(f"{instruction.source}: {instruction.text}: {fault}") from None
                    if place >= ahead:
                        _join(groups, place, mask)
                        break

    def _taking(self, instruction: Instruction, mask: Array | None) -> Array | None:
        """The threads whose guard holds; None is all."""
        if instruction.guard is None:
            return mask
        guard = self._register(instruction.guard, "pred") ^ instruction.negated
        taking = guard if mask is None else guard & mask
        return None if mask is None and taking.all() else taking

    def _target(self, instruction: Instruction) -> int:
        label = instruction.operands[0]
        return self.program.labels[label.name]  # type: ignore[union-attr]

    def _step(self, instruction: Instruction, place: int, taking: Array | None) -> None:
        self.active = taking
        if instruction.name in ("bar", "barrier") and "warp" not in instruction.modifiers:
            self._barrier(instruction, taking)
        elif taking is None or taking.any():
            self._handlers[place](self, instruction, taking)

    def _barrier(self, instruction: Instruction, taking: Array | None) -> None:
        if "sync" not in instruction.modifiers or len(instruction.operands) > 1:
            raise Fault("only barriers of all threads are known here")
        waiting = (self.live if taking is None else taking).reshape(-1, self.threads)
        live = self.live.reshape(-1, self.threads)
        here = waiting.any(1)
        if (waiting[here] != live[here]).any():
            raise Fault("a barrier that not all threads reach")
        self.shared.barrier(np.flatnonzero(here))
        self.report.barriers += int(here.sum())


def _join(groups: dict[int, Array], place: int, mask: Array) -> None:
    if mask.any():
        groups[place] = groups[place] | mask if place in groups else mask


def _handler(instruction: Instruction):
    for module in (transfers, matrix, warpgroup, arithmetic):
        handler = module.handler(instruction)
        if handler is not None:
            return handler

    def unknown(machine: Machine, instruction: Instruction, mask: Array | None) -> None:
        raise Fault("an instruction that is not known here")

    return unknown
