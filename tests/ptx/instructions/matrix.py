"""Instructions of a whole warp on matrices: mma.sync, ldmatrix, stmatrix. Layouts are those of the PTX ISA manual."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx.instructions import transfers
from ptx.program import Instruction, Operand, Vector
from ptx.values import Array, Fault, from_bfloat16

if TYPE_CHECKING:
    from ptx.machine import Machine

Handler = Callable[["Machine", Instruction, Array | None], None]


def handler(instruction: Instruction) -> Handler | None:
    return {"mma": _multiply, "ldmatrix": _load, "stmatrix": _store}.get(instruction.name)


def _parts(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


def unpack(kind: str, registers: list[Array]) -> list[Array]:
    """The numbers in 32-bit registers, in order, as fp32."""
    if kind in ("f32", "tf32"):
        keep = np.uint32(0xFFFFFFFF if kind == "f32" else 0xFFFFE000)  # the tensor cores drop what tf32 lacks
        return [(r & keep).view(np.float32) for r in registers]
    halves = [(r >> np.uint32(shift)).astype(np.uint16) for r in registers for shift in (0, 16)]
    return [from_bfloat16(h) if kind == "bf16" else h.view(np.float16).astype(np.float32) for h in halves]


def _multiply(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """mma.sync.aligned.m16n8k{8,16}.row.col: D = A B + C, spread over the threads of a warp.

    Matmuls are summed in fp64 and rounded once; the order and the rounding of tensor cores are not documented.
    """
    machine.whole_warps(mask, "mma")
    m = instruction.modifiers
    shape, (to, kind, kind_b, from_) = next(x for x in m if x.startswith("m16n8")), m[-4:]
    if kind != kind_b or kind not in ("bf16", "f16", "tf32") or (to, from_) not in (("f32", "f32"), ("f16", "f16")):
        raise Fault("a matrix product of types that are not known here")
    depth = int(shape.rpartition("k")[2])
    per_register = 1 if kind == "tf32" else 2
    group, quarter, warp = machine.lane // 4, machine.lane % 4, machine.any_warp
    warps = machine.count // 32
    registers = [[machine.wide(machine.read(p, "b32")) for p in _parts(o)] for o in instruction.operands[1:]]
    a, b = np.zeros((warps, 16, depth)), np.zeros((warps, depth, 8))
    block = 4 * per_register  # columns of A that one register of each thread covers
    for i, x in enumerate(unpack(kind, registers[0])):
        register, half = divmod(i, per_register)
        a[warp, group + 8 * (register % 2), per_register * quarter + half + block * (register // 2)] = x
    for i, x in enumerate(unpack(kind, registers[1])):
        register, half = divmod(i, per_register)
        b[warp, per_register * quarter + half + block * register, group] = x
    c = np.zeros((warps, 16, 8))
    accumulators = unpack(to, registers[2])
    for i, x in enumerate(accumulators):
        c[warp, group + 8 * (i // 2), 2 * quarter + i % 2] = x
    d = (np.matmul(a, b) + c).astype(np.float32)
    results = [d[warp, group + 8 * (i // 2), 2 * quarter + i % 2] for i in range(len(accumulators))]
    write_numbers(machine, _parts(instruction.operands[0]), to, results, mask)


def write_numbers(
    machine: "Machine", registers: tuple[Operand, ...], kind: str, numbers: list[Array], mask: Array | None
) -> None:
    """fp32 numbers to registers of 32 bits: one each, or two for fp16."""
    if kind == "f16":
        raw = [n.astype(np.float16).view(np.uint16).astype(np.uint32) for n in numbers]
        values = [low | (high << np.uint32(16)) for low, high in zip(raw[::2], raw[1::2], strict=True)]
    else:
        values = [n.astype(np.float32) for n in numbers]
    for register, value in zip(registers, values, strict=True):
        machine.write(register, value, mask)


def _rows(machine: "Machine", where: Array, matrix: int) -> Array:
    """For each thread, the address of the row of the matrix that it holds a part of: thread 8 j + r gives row r."""
    first = np.arange(machine.count) - machine.lane
    return where[first + 8 * matrix + machine.lane // 4]


def _load(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """ldmatrix: 8x8 matrices of 16-bit numbers; thread 4 r + c gets row r, columns 2 c and 2 c + 1."""
    machine.whole_warps(mask, "ldmatrix")
    where = transfers.address(machine, instruction.operands[1])
    lanes = np.arange(machine.count) if mask is None else np.flatnonzero(mask)
    lane = machine.lane
    for j, register in enumerate(_parts(instruction.operands[0])):
        _note_rows(machine, where, j, lanes)
        if "trans" in instruction.modifiers:
            first = np.arange(machine.count) - lane
            halves = []
            for h in (0, 1):
                row = where[first + 8 * j + 2 * (lane % 4) + h] + (2 * (lane // 4)).astype(np.uint64)
                data = _shared(machine, row[lanes], 2, lanes)
                halves.append(data.view(np.uint16)[:, 0].astype(np.uint32))
            value = halves[0] | (halves[1] << np.uint32(16))
        else:
            row = _rows(machine, where, j) + (4 * (lane % 4)).astype(np.uint64)
            value = _shared(machine, row[lanes], 4, lanes).view(np.uint32)[:, 0]
        transfers.spread(machine, register, value, lanes, mask)


def _shared(machine: "Machine", where: Array, size: int, lanes: Array) -> Array:
    return np.ascontiguousarray(machine.shared.load(machine.slot[lanes], machine.warp[lanes], where, size))


def _note_rows(machine: "Machine", where: Array, matrix: int, lanes: Array) -> None:
    """A matrix is one wavefront if its eight rows of 16 bytes are in different banks."""
    giving = lanes[machine.lane[lanes] // 8 == matrix]
    transfers.note_banks(machine, where[giving], 16, giving)


def _store(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    machine.whole_warps(mask, "stmatrix")
    where = transfers.address(machine, instruction.operands[0])
    lanes = np.arange(machine.count) if mask is None else np.flatnonzero(mask)
    lane = machine.lane
    for j, register in enumerate(_parts(instruction.operands[1])):
        _note_rows(machine, where, j, lanes)
        value = machine.wide(machine.read(register, "b32"))[lanes]
        if "trans" in instruction.modifiers:
            first = np.arange(machine.count) - lane
            for h in (0, 1):
                row = where[first + 8 * j + 2 * (lane % 4) + h] + (2 * (lane // 4)).astype(np.uint64)
                data = (value >> np.uint32(16 * h)).astype(np.uint16).view(np.uint8).reshape(-1, 2)
                _put(machine, row[lanes], 2, data, lanes)
        else:
            row = _rows(machine, where, j) + (4 * (lane % 4)).astype(np.uint64)
            _put(machine, row[lanes], 4, np.ascontiguousarray(value).view(np.uint8).reshape(-1, 4), lanes)


def _put(machine: "Machine", where: Array, size: int, data: Array, lanes: Array) -> None:
    machine.shared.store(machine.slot[lanes], machine.warp[lanes], where, size, data)
