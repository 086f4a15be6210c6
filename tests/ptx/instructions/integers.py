"""Instructions on integers and bits."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx.program import Instruction
from ptx.values import Array, bits, dtype

if TYPE_CHECKING:
    from ptx.machine import Machine

Handler = Callable[["Machine", Instruction, Array | None], None]


def handler(instruction: Instruction) -> Handler | None:
    name = instruction.name
    if name in ("mul", "mad"):
        return _multiply
    if name in _SPECIAL:
        return _special
    return _plain if name in _PLAIN else None


def _divide(x: Array, y: Array) -> Array:
    """Towards zero; what a GPU gives for a division by zero is not defined, here all ones."""
    safe = np.where(y == 0, np.ones_like(y), y)
    quotient = x // safe
    rest = x - quotient * safe
    return np.where(y == 0, ~np.zeros_like(x), quotient + ((rest != 0) & ((x < 0) != (safe < 0))).astype(x.dtype))


def _remainder(x: Array, y: Array) -> Array:
    return np.fmod(x, np.where(y == 0, np.ones_like(y), y))


_PLAIN: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "div": _divide, "rem": _remainder, "min": np.minimum, "max": np.maximum,
    "neg": np.negative, "abs": np.abs, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert,
}  # fmt: skip


def _plain(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    kind = instruction.kind
    operands = [machine.read(o, kind) for o in instruction.operands[1:]]
    result = np.asarray(_PLAIN[instruction.name](*operands)).astype(dtype(kind))
    if "relu" in instruction.modifiers:  # of min and max
        result = np.maximum(result, np.zeros_like(result))
    machine.write(instruction.operands[0], result, mask)


def _upper_half(x: Array, y: Array, kind: str) -> Array:
    """The upper half of the product of two integers of 64 bits, by halves."""
    if kind[0] == "s":
        upper = _upper_half(x.view(np.uint64), y.view(np.uint64), "u64").view(np.int64)
        return upper - np.where(x < 0, y, 0) - np.where(y < 0, x, 0)
    shift, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    x_low, x_high, y_low, y_high = x & low, x >> shift, y & low, y >> shift
    middle = x_high * y_low + ((x_low * y_low) >> shift)
    carried = x_low * y_high + (middle & low)
    return x_high * y_high + (middle >> shift) + (carried >> shift)


def _multiply(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """mul and mad: .lo, .hi or .wide of the product."""
    kind = instruction.kind
    x, y = (np.atleast_1d(machine.read(o, kind)) for o in instruction.operands[1:3])
    result = kind
    if "wide" in instruction.modifiers:
        result = f"{kind[0]}{2 * bits(kind)}"
        product = x.astype(dtype(result)) * y.astype(dtype(result))
    elif "hi" in instruction.modifiers:
        if bits(kind) == 64:
            product = _upper_half(*np.broadcast_arrays(x, y), kind)
        else:
            wide = dtype(f"{kind[0]}64")
            product = ((x.astype(wide) * y.astype(wide)) >> wide.type(bits(kind))).astype(dtype(kind))
    else:
        product = x * y
    if instruction.name == "mad":
        product = product + machine.read(instruction.operands[3], result)
    machine.write(instruction.operands[0], machine.wide(product.squeeze()), mask)


def _shift(x: Array, by: Array, left: bool) -> Array:
    """Shifts by more than the width give zero, or the sign."""
    width = x.dtype.itemsize * 8
    signed = x.dtype.kind == "i"
    over = by >= width
    amount = np.minimum(by, width - 1).astype(x.dtype)
    shifted = np.left_shift(x, amount) if left else np.right_shift(x, amount)
    return shifted if signed and not left else np.where(over, np.zeros_like(shifted), shifted)


def _shift_left(machine: "Machine", i: Instruction) -> Array:
    return _shift(machine.read(i.operands[1], i.kind), machine.read(i.operands[2], "u32"), left=True)


def _shift_right(machine: "Machine", i: Instruction) -> Array:
    return _shift(machine.read(i.operands[1], i.kind), machine.read(i.operands[2], "u32"), left=False)


def _extract(machine: "Machine", i: Instruction) -> Array:
    """bfe: some bits, extended by their sign if the type has one."""
    x, first, count = machine.read(i.operands[1], i.kind), *(machine.read(o, "u32") & 0xFF for o in i.operands[2:4])
    width = bits(i.kind)
    first, count = first.astype(np.int64), count.astype(np.int64)
    if i.kind[0] == "u":
        field = _shift(x, first.astype(np.uint32), left=False)
        return field & np.where(count >= width, ~x.dtype.type(0), (1 << np.minimum(count, 62)) - 1).astype(x.dtype)
    up = np.clip(width - first - count, 0, width - 1)
    down = np.clip(width - count, 0, width - 1).astype(x.dtype)
    return np.where(count == 0, 0, np.right_shift(np.left_shift(x, up.astype(x.dtype)), down)).astype(x.dtype)


def _insert(machine: "Machine", i: Instruction) -> Array:
    """bfi: some bits of a into b."""
    a, b = (machine.read(o, i.kind) for o in i.operands[1:3])
    first, count = ((machine.read(o, "u32") & 0xFF).astype(np.uint64) for o in i.operands[3:5])
    field = (((np.uint64(1) << np.minimum(count, np.uint64(63))) - np.uint64(1)) << first).astype(a.dtype)
    return (b & ~field) | (_shift(a, first.astype(np.uint32), left=True) & field)


def _permute(machine: "Machine", i: Instruction) -> Array:
    """prmt: each byte of the result is one of the eight of a and b, or that byte's sign."""
    a, b, selection = (np.atleast_1d(machine.read(o, "b32")).astype(np.uint64) for o in i.operands[1:4])
    both = a | (b << np.uint64(32))
    result = np.zeros(1, np.uint64)
    for k in range(4):
        chosen = (selection >> np.uint64(4 * k)) & np.uint64(15)
        byte = (both >> ((chosen & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result = result | (np.where(chosen & np.uint64(8), sign, byte) << np.uint64(8 * k))
    return machine.wide(result.astype(np.uint32).squeeze())


def _lookup(machine: "Machine", i: Instruction) -> Array:
    """lop3: any function of three bits, as a table of eight."""
    a, b, c = (np.asarray(machine.read(o, "b32")) for o in i.operands[1:4])
    table = int(machine.read(i.operands[4], "u32"))
    result = np.zeros(1, np.uint32)
    for row in range(8):
        if table >> row & 1:
            result = result | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
    return machine.wide(result.squeeze())


def _funnel(machine: "Machine", i: Instruction) -> Array:
    """shf: a shift of the 64 bits b:a, the upper (left) or lower (right) half of which is the result."""
    low, high, by = (np.atleast_1d(machine.read(o, "b32")).astype(np.uint64) for o in i.operands[1:4])
    by = by & np.uint64(31) if "wrap" in i.modifiers else np.minimum(by, np.uint64(32))
    both = low | (high << np.uint64(32))
    shifted = (both << by) >> np.uint64(32) if "l" in i.modifiers else both >> by
    return machine.wide(shifted.astype(np.uint32).squeeze())


def _count_ones(machine: "Machine", i: Instruction) -> Array:
    return np.bitwise_count(machine.read(i.operands[1], i.kind)).astype(np.uint32)


def _leading_zeros(machine: "Machine", i: Instruction) -> Array:
    x = np.asarray(machine.read(i.operands[1], i.kind))
    for k in range(bits(i.kind).bit_length() - 1):
        x = x | (x >> x.dtype.type(1 << k))
    return np.uint32(bits(i.kind)) - np.bitwise_count(x).astype(np.uint32)


def _reverse(machine: "Machine", i: Instruction) -> Array:
    x = machine.wide(machine.read(i.operands[1], i.kind))
    width = bits(i.kind)
    bit = [((x >> x.dtype.type(k)) & x.dtype.type(1)) << x.dtype.type(width - 1 - k) for k in range(width)]
    return np.bitwise_or.reduce(bit)


_SPECIAL: dict[str, Callable[["Machine", Instruction], Array]] = {
    "shl": _shift_left, "shr": _shift_right, "bfe": _extract, "bfi": _insert, "prmt": _permute, "lop3": _lookup,
    "shf": _funnel, "popc": _count_ones, "clz": _leading_zeros, "brev": _reverse,
}  # fmt: skip


def _special(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    machine.write(instruction.operands[0], _SPECIAL[instruction.name](machine, instruction), mask)
