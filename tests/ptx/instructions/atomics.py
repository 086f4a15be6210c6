"""Atomic instructions on global memory, and the order between programs that they make.

What a program stored before a barrier and a release may be read by one that acquired, saw the release and passed a
barrier. All else that two programs share is a fault (``global_memory``).
"""

from typing import TYPE_CHECKING

import numpy as np

from ptx.program import Instruction
from ptx.values import SIGNED, UNSIGNED, Array, Fault, bits

if TYPE_CHECKING:
    from ptx.machine import Machine


def acquires(instruction: Instruction) -> bool:
    return instruction.has("global", "acquire") or instruction.has("global", "acq_rel")


def releases(instruction: Instruction) -> bool:
    return instruction.has("global", "release") or instruction.has("global", "acq_rel")


def _table(kind: str) -> dict[int, type]:
    return SIGNED if kind[0] == "s" else UNSIGNED


def touch(
    machine: "Machine", instruction: Instruction, mask: Array | None, where: Array, change: Array | None
) -> Array:
    """Each thread after the other; returns what they found, one entry a thread of the mask.

    ``change``: what to add or to put there; None: nothing, for a load that acquires.
    """
    kind = instruction.kind
    size, number = bits(kind) // 8, _table(kind)[bits(kind)]
    lanes = np.arange(machine.count) if mask is None else np.flatnonzero(mask)
    found = np.zeros(len(lanes), number)
    for i, lane in enumerate(lanes):
        ((buffer, _, (offset,)),) = machine.memory.find(where[lane : lane + 1], size)
        program, epoch = int(machine.number[lane]), int(machine.shared.barriers[machine.slot[lane]])
        values = buffer.data[: len(buffer.data) // size * size].view(number)
        place = offset // size
        found[i] = values[place]
        machine.memory.touch_atomically(buffer, int(offset), size, program)
        key = buffer.base + int(offset)
        if acquires(instruction):
            machine.memory.acquire(key, program, epoch)
        if change is not None:
            values[place] = change[lane] if instruction.has("exch") else values[place] + change[lane]
            machine.memory.release(key, program, epoch if releases(instruction) else None)
    return found


def _atomic(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    from ptx.instructions import transfers

    if not instruction.has("global") or not (instruction.has("add") or instruction.has("exch")):
        raise Fault("an atomic instruction that is not known here")
    if instruction.kind not in ("u32", "s32", "b32", "u64", "b64"):
        raise Fault("atomic floating point, whose result depends on the order")
    target, place, change = instruction.operands if instruction.name == "atom" else (None, *instruction.operands)
    where = transfers.address(machine, place)
    values = machine.wide(machine.read(change, instruction.kind))
    found = touch(machine, instruction, mask, where, values)
    if target is not None:
        lanes = np.arange(machine.count) if mask is None else np.flatnonzero(mask)
        transfers.spread(machine, target, found, lanes, mask)


def load(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """ld.acquire"""
    from ptx.instructions import transfers

    lanes = np.arange(machine.count) if mask is None else np.flatnonzero(mask)
    found = touch(machine, instruction, mask, transfers.address(machine, instruction.operands[1]), None)
    transfers.spread(machine, instruction.operands[0], found, lanes, mask)


HANDLERS = {"atom": _atomic, "red": _atomic}
