"""Reads PTX into instructions."""

import dataclasses
import functools
import re
import struct

import numpy as np

from ptx.values import FLOAT, Array, Fault, bits, dtype

SPECIAL = ("%tid", "%ctaid", "%ntid", "%nctaid", "%laneid", "%warpid", "%cluster_ctarank")


@dataclasses.dataclass(frozen=True)
class Register:
    name: str


@dataclasses.dataclass(frozen=True)
class Special:
    """A register that the hardware fills, such as %tid.x."""

    name: str


@dataclasses.dataclass(frozen=True)
class Immediate:
    text: str

    @functools.cache  # noqa: B019  (one entry a constant of a program)
    def value(self, kind: str) -> Array:
        if self.text[:2] in ("0f", "0F"):
            return np.array(np.frombuffer(struct.pack("<I", int(self.text[2:], 16)), np.float32)[0])
        if self.text[:2] in ("0d", "0D"):
            return np.array(np.frombuffer(struct.pack("<Q", int(self.text[2:], 16)), np.float64)[0])
        if kind == "pred":
            return np.array(int(self.text) != 0)
        if kind[0] == "f" and "." in self.text:
            return np.array(float(self.text), FLOAT[bits(kind)])
        raw = int(self.text.rstrip("U"), 0) & ((1 << bits(kind)) - 1)
        return np.array(np.frombuffer(raw.to_bytes(8, "little"), dtype(kind))[0])


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A name of shared memory or of a parameter."""

    name: str


@dataclasses.dataclass(frozen=True)
class Address:
    base: "Operand"
    offset: int


@dataclasses.dataclass(frozen=True)
class Vector:
    parts: tuple["Operand", ...]


@dataclasses.dataclass(frozen=True)
class Pair:
    """``p|q``: two destinations."""

    parts: tuple["Operand", ...]


Operand = Register | Special | Immediate | Symbol | Address | Vector | Pair


@dataclasses.dataclass(frozen=True)
class Instruction:
    text: str
    guard: str | None
    negated: bool
    name: str  # without modifiers: ld
    modifiers: tuple[str, ...]  # global, v4, b32
    operands: tuple[Operand, ...]
    source: str  # bias_gelu.py:37

    @property
    def kind(self) -> str:
        return self.modifiers[-1]

    def has(self, *modifiers: str) -> bool:
        return all(m in self.modifiers for m in modifiers)


@dataclasses.dataclass
class Program:
    instructions: list[Instruction]
    labels: dict[str, int]
    parameters: list[tuple[str, str]]  # (name, type)
    register_bits: dict[str, int]  # by the letters of the name
    shared_symbols: list[str]


_INSTRUCTION = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+(?:.*?\s)?(\w+)\s*$")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$")
_SHARED = re.compile(r"\.shared\b.*?(\w+)\s*\[(\d*)\]")
_LOCATION = re.compile(r"\s*\.loc\s.*//\s*(\S+?:\d+)")  # the comment has the name of the file


def parse(ptx: str) -> Program:
    """The one kernel of a module."""
    program = Program([], {}, [], {}, [])
    source, inside = "", False
    for raw in ptx.splitlines():
        line = raw.split("//")[0].strip()
        if m := _LOCATION.match(raw):
            source = m[1]
        elif not inside and (m := _PARAMETER.match(line.rstrip(",)"))):
            program.parameters.append((m[2], m[1]))
        elif m := _SHARED.search(line):
            if line.startswith((".shared", ".extern", ".global .shared")):
                program.shared_symbols.append(m[1])
        elif line.startswith(".section"):
            break
        elif line == "{":
            inside = True
        elif inside:
            _read_line(line, source, program)
    return program


def _read_line(line: str, source: str, program: Program) -> None:
    for part in line.split(";"):
        text = part.strip()
        while text.startswith("{") and "}" not in text:  # a scope of inline assembly
            text = text[1:].strip()
        if text in ("", "}", "{"):
            continue
        if m := re.match(r"([$\w]+):\s*", text):
            program.labels[m[1]] = len(program.instructions)
            text = text[m.end() :]
            if not text:
                continue
        if m := _REGISTERS.match(text):
            for name in m[2].split(","):
                program.register_bits[_letters(name.strip())] = bits(m[1])
        elif not text.startswith("."):
            program.instructions.append(_instruction(text, source))


def _letters(register: str) -> str:
    return re.match(r"%?[a-zA-Z_]+", register)[0]  # type: ignore[index]


def register_bits(program: Program, register: str) -> int | None:
    return program.register_bits.get(_letters(register))


def _instruction(text: str, source: str) -> Instruction:
    m = _INSTRUCTION.match(text)
    if m is None:
        raise Fault(f"cannot read the instruction {text!r}")
    name, *modifiers = m[3].replace("::", "__").split(".")
    operands = tuple(_operand(o) for o in _split(m[4]))
    return Instruction(text, m[2], m[1] == "!", name, tuple(modifiers), operands, source)


def _split(text: str) -> list[str]:
    """At the commas that are outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()] if text[start:].strip() else parts


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return Vector(tuple(_operand(part) for part in _split(text[1:-1])))
    if text.startswith("["):
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return Address(_operand(base), int(offset, 0) if offset else 0)
    if "|" in text:
        return Pair(tuple(_operand(part.strip()) for part in text.split("|")))
    if text.startswith(SPECIAL):
        return Special(text)
    if re.match(r"-?\d", text):
        return Immediate(text)
    return Register(text) if text.startswith("%") else Symbol(text)
