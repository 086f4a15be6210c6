"""Instructions that move data: between registers and memory, between threads, and copies that run behind."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx.instructions import atomics
from ptx.memory import global_memory, shared_memory
from ptx.program import Address, Instruction, Operand, Pair, Program, Symbol, Vector
from ptx.values import UNSIGNED, Array, Fault, bits, dtype

if TYPE_CHECKING:
    from ptx.machine import Machine

Handler = Callable[["Machine", Instruction, Array | None], None]


@dataclasses.dataclass
class Copy:
    """A cp.async of some threads: the places are claimed when it is issued and filled when somebody waits for it."""

    places: Array
    data: Array
    program: Array
    warp: Array
    thread: Array
    group: int = -1


def shared_unit(program: Program) -> int:
    """The narrowest access of a program to shared memory, in bytes, up to 4."""
    narrow = 4
    for i in program.instructions:
        if i.name in ("ld", "st") and _is_shared(i):
            narrow = min(narrow, bits(i.kind) // 8)
        elif i.name == "wgmma" or (i.name in ("ldmatrix", "stmatrix") and "trans" in i.modifiers):
            narrow = min(narrow, 2)
    return narrow


def handler(instruction: Instruction) -> Handler | None:
    if instruction.name in ("ld", "ldu") and "param" in instruction.modifiers:
        return _load_parameter
    if instruction.name == "ld" and atomics.acquires(instruction):
        return atomics.load
    if instruction.name == "cp":
        return _HANDLERS.get("cp." + ".".join(m for m in instruction.modifiers if m in _COPY_WORDS))
    return _HANDLERS.get(instruction.name)


_COPY_WORDS = ("async", "commit_group", "wait_group", "wait_all")


def address(machine: "Machine", operand: Operand) -> Array:
    assert isinstance(operand, Address)
    base = operand.base
    shared = isinstance(base, Symbol) or _is_narrow(machine, base)
    start = machine.wide(machine.read(base, "u32" if shared else "u64")).astype(np.uint64)
    return start + np.uint64(operand.offset & (2**64 - 1))


def _is_narrow(machine: "Machine", base: Operand) -> bool:
    value = machine.registers.get(getattr(base, "name", ""))
    return value is not None and value.dtype.itemsize == 4


def _vector(instruction: Instruction, operand: Operand) -> tuple[tuple[Operand, ...], int]:
    """(registers, bytes of each)"""
    return operand.parts if isinstance(operand, Vector) else (operand,), bits(instruction.kind) // 8


def _is_shared(instruction: Instruction) -> bool:
    return any(m.startswith("shared") for m in instruction.modifiers)


def load_global(machine: "Machine", where: Array, size: int, lanes: Array) -> Array:
    """[lanes, size] bytes from the addresses of ``lanes``."""
    data = np.empty((len(where), size), np.uint8)
    for buffer, some, offsets in machine.memory.find(where, size):
        at = lanes[some]
        number = machine.number[at]
        data[some] = global_memory.load(machine.memory, buffer, offsets, size, number, _stamp(machine, at))
        machine.report.note("load", buffer.name, offsets, size, machine.any_warp[at], number)
    return data


def _stamp(machine: "Machine", lanes: Array) -> Array:
    return (machine.shared.barriers[machine.slot[lanes]] << 20) + machine.thread[lanes]


def _indices(machine: "Machine", mask: Array | None) -> Array:
    return np.arange(machine.count) if mask is None else np.flatnonzero(mask)


def load_shared(machine: "Machine", where: Array, size: int, lanes: Array) -> Array:
    note_banks(machine, where, size, lanes)
    return machine.shared.load(machine.slot[lanes], machine.warp[lanes], where, size)


def store_shared(machine: "Machine", where: Array, size: int, data: Array, lanes: Array) -> None:
    note_banks(machine, where, size, lanes)
    machine.shared.store(machine.slot[lanes], machine.warp[lanes], where, size, data)


def note_banks(machine: "Machine", where: Array, size: int, lanes: Array) -> None:
    took, least = shared_memory.wavefronts(machine.any_warp[lanes], where, size)
    machine.report.wavefronts += took
    machine.report.least_wavefronts += least


def _load(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    registers, width = _vector(instruction, instruction.operands[0])
    size = width * len(registers)
    lanes = _indices(machine, mask)
    where = address(machine, instruction.operands[1])[lanes]
    data = (load_shared if _is_shared(instruction) else load_global)(machine, where, size, lanes)
    for i, register in enumerate(registers):
        part = np.ascontiguousarray(data[:, i * width : (i + 1) * width])
        kind = dtype(instruction.kind) if instruction.kind[0] == "s" else UNSIGNED[8 * width]
        spread(machine, register, part.view(kind)[:, 0], lanes, mask)


def spread(machine: "Machine", register: Operand, values: Array, lanes: Array, mask: Array | None) -> None:
    """Writes ``values``, one for each of ``lanes``."""
    if mask is not None:
        wide = np.zeros(machine.count, values.dtype)
        wide[lanes] = values
        values = wide
    machine.write(register, values, mask)


def _store(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    registers, width = _vector(instruction, instruction.operands[1])
    size = width * len(registers)
    lanes = _indices(machine, mask)
    where = address(machine, instruction.operands[0])[lanes]
    words = [machine.wide(machine.read(r, f"b{8 * width}"))[lanes] for r in registers]
    data = np.stack(words, axis=1).view(np.uint8)
    if _is_shared(instruction):
        store_shared(machine, where, size, data, lanes)
        return
    for buffer, some, offsets in machine.memory.find(where, size):
        at = lanes[some]
        number = machine.number[at]
        global_memory.store(buffer, offsets, size, data[some], number, _stamp(machine, at))
        machine.report.note("store", buffer.name, offsets, size, machine.any_warp[at], number)


def _load_parameter(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    target, source = instruction.operands
    assert isinstance(source, Address) and isinstance(source.base, Symbol)
    machine.write(target, machine.parameter(source.base.name, instruction.kind), mask)


def _copy(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """cp.async.ca.shared.global [to], [from], size, bytes read; the rest of size becomes zero."""
    to, source, *sizes = instruction.operands
    size = int(machine.read(sizes[0], "u32"))
    lanes = _indices(machine, mask)
    reads = machine.wide(machine.read(sizes[1], "u32"))[lanes] if len(sizes) > 1 else np.full(len(lanes), size)
    if not np.isin(reads, (0, size)).all():
        raise Fault("a copy of a part of its size is not known here")
    data = np.zeros((len(lanes), size), np.uint8)
    reading = reads > 0
    if reading.any():
        data[reading] = load_global(machine, address(machine, source)[lanes][reading], size, lanes[reading])
    where = address(machine, to)[lanes]
    note_banks(machine, where, size, lanes)
    program, warp = machine.slot[lanes], machine.warp[lanes]
    places = machine.shared.claim(program, warp, where, size)
    machine.copies.setdefault(-1, []).append(Copy(places, data, program, warp, lanes))


def _commit(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """The copies since the last commit of these threads become a group."""
    taking = np.ones(machine.count, np.bool_) if mask is None else mask
    groups = machine.registers.setdefault("groups committed", np.zeros(machine.count, np.int64))
    waiting = machine.copies.pop(-1, [])
    left = []
    for copy in waiting:
        mine = taking[copy.thread]
        if mine.any():
            for number in np.unique(groups[copy.thread[mine]]):
                some = mine & (groups[copy.thread] == number)
                machine.copies.setdefault(int(number), []).append(_part(copy, some))
        if not mine.all():
            left.append(_part(copy, ~mine))
    if left:
        machine.copies[-1] = left
    machine.registers["groups committed"] = np.where(taking, groups + 1, groups)


def _part(copy: Copy, some: Array) -> Copy:
    return Copy(copy.places[some], copy.data[some], copy.program[some], copy.warp[some], copy.thread[some])


def _wait(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """All but the last n groups of these threads have arrived."""
    keep = int(machine.read(instruction.operands[0], "u32")) if instruction.operands else 0
    if "wait_all" in instruction.modifiers:
        _commit(machine, instruction, mask)
    taking = np.ones(machine.count, np.bool_) if mask is None else mask
    groups = machine.registers.get("groups committed")
    if groups is None:
        return
    for number in sorted(n for n in machine.copies if n >= 0):
        left = []
        for copy in machine.copies[number]:
            done = taking[copy.thread] & (groups[copy.thread] - keep > number)
            if done.any():
                machine.shared.fill(copy.places[done], copy.data[done], copy.program[done], copy.warp[done])
            if not done.all():
                left.append(_part(copy, ~done))
        machine.copies[number] = left
        if not left:
            del machine.copies[number]


def _shuffle(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """shfl.sync.mode.b32 d|p, a, b, c, members"""
    target, source, by, clamp, *_ = instruction.operands
    lane = machine.lane
    step = machine.wide(machine.read(by, "u32")).astype(np.int64)
    limit = machine.wide(machine.read(clamp, "u32")).astype(np.int64)
    segment = (limit >> 8) & 31
    highest = (lane & segment) | (limit & 31 & ~segment)
    mode = instruction.modifiers[1]
    wanted = {"bfly": lane ^ step, "down": lane + step, "up": lane - step, "idx": (lane & segment) | (step & ~segment)}
    there = wanted[mode] >= (lane & segment) if mode == "up" else wanted[mode] <= highest
    place = np.arange(machine.count) - lane + np.where(there, wanted[mode], lane)
    if mask is not None and (mask & ~mask[place]).any():
        raise Fault("a shuffle from a thread that does not take part")
    targets = target.parts if isinstance(target, Pair) else (target,)
    machine.write(targets[0], machine.wide(machine.read(source, "b32"))[place], mask)
    if len(targets) > 1:
        machine.write(targets[1], there, mask)


def _reduce(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    machine.whole_warps(mask, "redux")
    kind, operation = instruction.kind, instruction.modifiers[1]
    x = machine.wide(machine.read(instruction.operands[1], kind)).reshape(-1, 32)
    nan = "NaN" in instruction.modifiers
    functions = {
        "max": np.maximum if nan or kind[0] != "f" else np.fmax,
        "min": np.minimum if nan or kind[0] != "f" else np.fmin,
        "add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    machine.write(instruction.operands[0], np.repeat(functions[operation].reduce(x, axis=1), 32).astype(x.dtype), mask)


def _vote(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    machine.whole_warps(mask, "vote")
    x = machine.wide(machine.read(instruction.operands[1], "pred")).reshape(-1, 32)
    mode = instruction.modifiers[1]
    if mode == "ballot":
        packed = (x.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
        machine.write(instruction.operands[0], np.repeat(packed, 32), mask)
    else:
        machine.write(instruction.operands[0], np.repeat({"any": x.any(1), "all": x.all(1)}[mode], 32), mask)


def _nothing(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """Orders what happens here one after the other anyway."""


def _policy(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """createpolicy: a hint to L2, which changes no value."""
    machine.write(instruction.operands[0], np.array(0, np.uint64), mask)


_HANDLERS: dict[str, Handler] = {
    **atomics.HANDLERS,
    "createpolicy": _policy,
    "ld": _load,
    "st": _store,
    "cp.async": _copy,
    "cp.async.commit_group": _commit,
    "cp.async.wait_group": _wait,
    "cp.async.wait_all": _wait,
    "shfl": _shuffle,
    "redux": _reduce,
    "vote": _vote,
    "bar": _nothing,  # bar.warp.sync
    "fence": _nothing,
    "membar": _nothing,
    "nanosleep": _nothing,  # the machine lets others go on
    "griddepcontrol": _nothing,
    "prefetch": _nothing,
    "prefetchu": _nothing,
    "applypriority": _nothing,
}
