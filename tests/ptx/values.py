"""The types of PTX as NumPy sees them. A register holds raw bits; an instruction says what they mean."""

import functools
import re

import numpy as np

Array = np.ndarray

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}


class Fault(Exception):
    """What a GPU would not forgive, or would not promise the result of."""


@functools.cache
def bits(kind: str) -> int:
    """The width of a type: 32 for ``f32`` and ``bf16x2``."""
    if kind == "pred":
        return 1
    digits = re.findall(r"\d+", kind)
    return int(digits[0]) * (int(digits[1]) if len(digits) > 1 else 1)


@functools.cache
def dtype(kind: str) -> np.dtype:
    """How NumPy sees a register of type ``kind``; types that NumPy lacks, and pairs, stay raw bits."""
    if kind == "pred":
        return np.dtype(np.bool_)
    table = {"s": SIGNED, "f": FLOAT}.get(kind[0], UNSIGNED) if re.fullmatch(r"[usfb]\d+", kind) else UNSIGNED
    return np.dtype(table[bits(kind)])


def from_bfloat16(raw: Array) -> Array:
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: Array) -> Array:
    """fp32 to bf16, rounded to nearest even."""
    x = np.asarray(x, np.float32)
    raw = x.view(np.uint32)
    rounded = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def to_tf32(x: Array) -> Array:
    """fp32 rounded to the 10 bits of mantissa that a tf32 matmul reads, to nearest, ties away from zero."""
    return ((np.asarray(x, np.float32).view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def decoded(kind: str, raw: Array) -> list[Array]:
    """The numbers in registers of a floating-point type: one, or two for a pair."""
    if kind in ("f32", "f64"):
        return [raw]
    if kind in ("f16x2", "bf16x2", "f32x2"):
        half = bits(kind) // 2
        parts = [(raw >> raw.dtype.type(shift)).astype(UNSIGNED[half]) for shift in (0, half)]
        return [decoded(kind[:-2], part.view(FLOAT[32]) if half == 32 else part)[0] for part in parts]
    return [from_bfloat16(raw) if kind == "bf16" else raw.view(np.float16).astype(np.float32)]


def encoded(kind: str, numbers: list[Array]) -> Array:
    """The inverse of ``decoded``: one rounding."""
    if kind in ("f32", "f64"):
        return np.asarray(numbers[0], FLOAT[bits(kind)])
    if kind in ("f16x2", "bf16x2", "f32x2"):
        half = bits(kind) // 2
        low, high = (np.atleast_1d(encoded(kind[:-2], [n])).view(UNSIGNED[half]) for n in numbers)
        wide = UNSIGNED[2 * half]
        return low.astype(wide) | (high.astype(wide) << wide(half))
    # Through fp32: from fp64, a second rounding matters once in 2**13 ties.
    rounded = np.asarray(numbers[0]).astype(np.float32)
    return to_bfloat16(rounded) if kind == "bf16" else np.atleast_1d(rounded.astype(np.float16)).view(np.uint16)


def fused_multiply_add(kind: str, x: Array, y: Array, z: Array) -> Array:
    """``x * y + z`` with one rounding."""
    if kind != "f64":
        return np.asarray(x, np.float64) * np.asarray(y, np.float64) + np.asarray(z, np.float64)
    product = x * y
    split = np.float64(2**27 + 1)
    x_high, y_high = split * x - (split * x - x), split * y - (split * y - y)
    x_low, y_low = x - x_high, y - y_high
    lost = x_low * y_low - (((product - x_high * y_high) - x_low * y_high) - x_high * y_low)
    total = product + z
    part = total - product
    lost = lost + ((product - (total - part)) + (z - part))
    return np.where(np.isfinite(lost), total + lost, total)


def flushed(x: Array) -> Array:
    """Subnormal fp32 numbers as zero, which ``.ftz`` asks for."""
    tiny = np.abs(x) < np.finfo(np.float32).smallest_normal
    return np.where(tiny, np.copysign(np.float32(0), x), x)


def first_of_each(ordered: Array) -> Array:
    """Where each value of an ordered array comes first."""
    first = np.empty(len(ordered), np.bool_)
    first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return first


def lengths(ordered: Array) -> Array:
    """How often each value of an ordered array is there."""
    return np.diff(np.append(np.flatnonzero(first_of_each(ordered)), len(ordered)))


def distinct(values: Array) -> Array:
    """As np.unique, which takes 3 to 50 times as long: addresses of threads come in runs that rise."""
    ordered = np.sort(values, kind="stable")
    return ordered[first_of_each(ordered)]
