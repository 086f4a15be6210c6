"""Instructions that compute: each handler reads its operands, has NumPy compute all threads, and writes the result."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx.instructions import conversion, integers
from ptx.program import Instruction, Pair, Vector
from ptx.values import UNSIGNED, Array, Fault, bits, decoded, encoded, flushed, fused_multiply_add

if TYPE_CHECKING:
    from ptx.machine import Machine

Handler = Callable[["Machine", Instruction, Array | None], None]

_FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")


def handler(instruction: Instruction) -> Handler | None:
    name, modifiers = instruction.name, instruction.modifiers
    if name == "cvt":
        return conversion.convert
    if name in _HANDLERS:
        return _HANDLERS[name]
    if modifiers and modifiers[-1] in _FLOATS:
        if name in _APPROXIMATE and not any(m in modifiers for m in ("rn", "rz")):
            return _approximate
        if len(modifiers) > 1 and modifiers[-1] in ("f16", "bf16") and modifiers[-2] == "f32":
            return _mixed
        return _float if name in _FLOAT else None
    return integers.handler(instruction)


def _move(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    target, source = instruction.operands
    if isinstance(source, Vector):  # pack
        width = bits(instruction.kind) // len(source.parts)
        whole = UNSIGNED[bits(instruction.kind)]
        packed = np.zeros(1, whole)
        for i, part in enumerate(source.parts):
            packed = packed | (machine.wide(machine.read(part, f"b{width}")).astype(whole) << whole(width * i))
        machine.write(target, packed, mask)
    elif isinstance(target, Vector):  # unpack
        width = bits(instruction.kind) // len(target.parts)
        value = machine.wide(machine.read(source, f"b{bits(instruction.kind)}"))
        for i, part in enumerate(target.parts):
            machine.write(part, (value >> value.dtype.type(width * i)).astype(UNSIGNED[width]), mask)
    else:
        machine.write(target, machine.read(source, instruction.kind), mask)


def _select(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    target, yes, no, condition = instruction.operands
    kind = instruction.kind
    choice = np.where(machine.read(condition, "pred"), machine.read(yes, kind), machine.read(no, kind))
    machine.write(target, choice, mask)


_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_BOOLEANS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _compare(x: Array, y: Array, how: str, floating: bool) -> Array:
    if not floating:
        return _COMPARISONS[how](x, y)
    nan = np.isnan(x) | np.isnan(y)
    if how in ("nan", "num"):
        return nan if how == "nan" else ~nan
    if how.endswith("u"):  # unordered: true where one is NaN
        return _COMPARISONS[how[:-1]](x, y) | nan
    return _COMPARISONS[how](x, y) & ~nan


def _set_predicate(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    target, first, second, *rest = instruction.operands
    kind = instruction.kind
    floating = kind in _FLOATS
    x, y = machine.read(first, kind), machine.read(second, kind)
    pairs = list(zip(decoded(kind, x), decoded(kind, y), strict=True)) if floating else [(x, y)]
    results = [_compare(a, b, instruction.modifiers[0], floating) for a, b in pairs]
    if rest:
        results = [_BOOLEANS[instruction.modifiers[1]](r, machine.read(rest[0], "pred")) for r in results]
    targets = target.parts if isinstance(target, Pair) else (target,)
    if isinstance(target, Pair) and len(results) == 1:
        results.append(~results[0])
    for register, result in zip(targets, results, strict=True):
        machine.write(register, result, mask)


def _largest(x: Array, y: Array, *rest: Array) -> Array:
    if rest:  # three operands, from sm_100 on
        return _largest(_largest(x, y), *rest)
    return np.where((x == 0) & (y == 0), np.where(np.signbit(x), y, x), np.fmax(x, y))  # +0 is above -0


def _smallest(x: Array, y: Array, *rest: Array) -> Array:
    if rest:
        return _smallest(_smallest(x, y), *rest)
    return np.where((x == 0) & (y == 0), np.where(np.signbit(x), x, y), np.fmin(x, y))


_FLOAT: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": _smallest, "max": _largest,
    "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "rcp": np.reciprocal,
    "copysign": lambda sign, x: np.copysign(x, sign),
}  # fmt: skip


def _float(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """One rounding, in the type of the instruction; both halves of a pair alike."""
    kind, name = instruction.kind, instruction.name
    operands = [decoded(kind, machine.read(o, kind)) for o in instruction.operands[1:]]
    if "ftz" in instruction.modifiers:
        operands = [[flushed(x) for x in o] for o in operands]
    results = []
    for numbers in zip(*operands, strict=True):
        if name == "fma":
            result = fused_multiply_add(kind, *numbers)
        elif bits(kind) == 16 or kind in ("f16x2", "bf16x2"):
            result = _FLOAT[name](*(np.asarray(n, np.float64) for n in numbers))
        else:
            result = _FLOAT[name](*numbers)
        if "NaN" in instruction.modifiers:
            result = np.where(np.logical_or.reduce([np.isnan(n) for n in numbers]), np.nan, result)
        if "relu" in instruction.modifiers:
            result = np.where(result < 0, 0.0, result)
        if "sat" in instruction.modifiers:
            result = np.where(np.isnan(result), 0.0, np.clip(result, 0.0, 1.0))
        results.append(np.asarray(result))
    value = encoded(kind, results)
    machine.write(instruction.operands[0], flushed(value) if "ftz" in instruction.modifiers else value, mask)


_FLOAT["fma"] = fused_multiply_add


def _mixed(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """fma.rn.f32.bf16 d, a, b, c of sm_100: 16-bit a and b, fp32 c and d."""
    kind = instruction.kind
    *narrow, wide = instruction.operands[1:]
    numbers = [decoded(kind, machine.read(o, kind))[0].astype(np.float64) for o in narrow]
    numbers.append(machine.read(wide, "f32").astype(np.float64))
    operation = {"add": np.add, "sub": np.subtract, "fma": lambda x, y, z: x * y + z}[instruction.name]
    machine.write(instruction.operands[0], operation(*numbers).astype(np.float32), mask)


# The worst errors that the PTX ISA manual gives: floating-point instructions, section by section.
_APPROXIMATE: dict[str, tuple[Callable[..., Array], dict[str, float]]] = {
    "div": (np.divide, {"ulps": 2}),  # .approx for divisors of 2**-126 to 2**126, .full for all
    "rcp": (np.reciprocal, {"ulps": 1}),
    "sqrt": (np.sqrt, {"relative": 2.0**-23}),
    "rsqrt": (lambda x: 1 / np.sqrt(x), {"relative": 2.0**-22.4}),
    "ex2": (np.exp2, {"relative": 2.0**-22}),
    "lg2": (np.log2, {"absolute": 2.0**-22}),
    "sin": (np.sin, {"absolute": 2.0**-20.5}),
    "cos": (np.cos, {"absolute": 2.0**-20.5}),
    "tanh": (np.tanh, {"relative": 2.0**-11}),
}


def _approximate(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    kind, name = instruction.kind, instruction.name
    function, error = _APPROXIMATE[name]
    operands = [decoded(kind, machine.read(o, kind)) for o in instruction.operands[1:]]
    if kind == "f64":  # a seed for iterations, exact to the upper 32 bits
        exact = np.atleast_1d(function(*(o[0] for o in operands)))
        seed = exact.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)
        machine.write(instruction.operands[0], machine.wide(seed.view(np.float64).squeeze()), mask)
        return
    if "ftz" in instruction.modifiers:
        operands = [[flushed(x) for x in o] for o in operands]
    results = []
    for numbers in zip(*operands, strict=True):
        exact = function(*(np.asarray(n, np.float64) for n in numbers))
        if kind != "f32":  # ex2 and tanh of 16-bit types
            error = {"relative": 2.0**-8 if kind.startswith("bf16") else 2.0**-9.9}
        result = machine.approximation.off(np.atleast_1d(exact), **error)
        if name == "ex2":  # exact for integers: libdevice's exp and erf in fp64 take their powers of two from it
            result = np.where(numbers[0] == np.rint(numbers[0]), exact.astype(np.float32), result)
        results.append(result)
    value = encoded(kind, results)
    machine.write(instruction.operands[0], flushed(value) if "ftz" in instruction.modifiers else value, mask)


def _test_type(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    x = machine.read(instruction.operands[1], instruction.kind)
    tests = {"finite": np.isfinite, "infinite": np.isinf, "number": lambda x: ~np.isnan(x), "notanumber": np.isnan}
    if instruction.modifiers[0] not in tests:
        raise Fault("a test of numbers that is not known here")
    machine.write(instruction.operands[0], tests[instruction.modifiers[0]](x), mask)


_HANDLERS: dict[str, Handler] = {
    "mov": _move,
    "cvta": _move,
    "selp": _select,
    "setp": _set_predicate,
    "testp": _test_type,
}
