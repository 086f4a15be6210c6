"""cvt: between types of numbers."""

from typing import TYPE_CHECKING

import numpy as np

from ptx.program import Instruction
from ptx.values import Array, Fault, decoded, dtype, encoded, flushed, to_tf32

if TYPE_CHECKING:
    from ptx.machine import Machine

_TO_INTEGER = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
_FLOATS = ("f16", "bf16", "f32", "f64")


def convert(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    modifiers, operands = instruction.modifiers, instruction.operands
    to, source = modifiers[-2], modifiers[-1]
    if to in ("f16x2", "bf16x2") and len(operands) == 3:  # the first operand is the upper half
        high, low = (np.asarray(machine.read(o, source)) for o in operands[1:])
        value = encoded(to, [machine.wide(low), machine.wide(high)])
    elif to == "tf32":
        value = to_tf32(machine.read(operands[1], "f32"))
    elif source in _FLOATS:
        value = _from_float(instruction, to, decoded(source, machine.read(operands[1], source))[0])
    else:
        x = machine.read(operands[1], source)
        if to in ("f32", "f64"):
            value = x.astype(dtype(to))
        elif to in _FLOATS:
            value = encoded(to, [x.astype(np.float64)])
        else:
            value = _saturated(x, to) if "sat" in modifiers else x.astype(dtype(to))
    machine.write(operands[0], value, mask)


def _from_float(instruction: Instruction, to: str, x: Array) -> Array:
    modifiers = instruction.modifiers
    how = next((m for m in modifiers if m in _TO_INTEGER), None)
    if "ftz" in modifiers and x.dtype == np.float32:
        x = flushed(x)
    if to in _FLOATS:
        if "rz" in modifiers or "rm" in modifiers or "rp" in modifiers:
            raise Fault("only rounding to nearest is known here")
        x = _TO_INTEGER[how](x) if how else x
        if "relu" in modifiers:
            x = np.where(x < 0, 0, x)
        value = encoded(to, [x])
        return flushed(value) if "ftz" in modifiers and to == "f32" else value
    if how is None:
        raise Fault("a conversion to an integer without a rounding")
    limits = np.iinfo(dtype(to))
    whole = np.nan_to_num(_TO_INTEGER[how](x.astype(np.longdouble)), nan=0)
    return np.clip(whole, limits.min, limits.max).astype(dtype(to))


def _saturated(x: Array, to: str) -> Array:
    limits = np.iinfo(dtype(to))
    return np.clip(x.astype(object), limits.min, limits.max).astype(dtype(to))
