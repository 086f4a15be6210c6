"""wgmma.mma_async: a product by four warps of matrices in shared memory, which runs behind until somebody waits for it.

The result is computed at once. Until the wait, to read its registers or to write its operands is a fault. That stores
are made visible by fence.proxy.async is not checked.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from support.ptx.matrix import unpack
from support.ptx.program import Immediate, Instruction, Operand, Vector
from support.ptx.values import Array, Fault, from_bfloat16

if TYPE_CHECKING:
    from support.ptx.machine import Machine

Handler = Callable[["Machine", Instruction, Array | None], None]


@dataclasses.dataclass
class Product:
    """One under way."""

    registers: set[str]
    places: list[Array]
    group: int | None = None


def handler(instruction: Instruction) -> Handler | None:
    if instruction.name != "wgmma":
        return None
    return {"fence": _fence, "mma_async": _multiply, "commit_group": _commit, "wait_group": _wait}[
        instruction.modifiers[0]
    ]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A matrix descriptor of the PTX ISA manual: where the 16-byte pieces of an operand lie."""

    start: Array  # byte addresses, one for each warpgroup
    leading: int
    stride: int
    row: int  # bytes of a row of the pattern that is swizzled: 16 (not swizzled), 32, 64 or 128

    @classmethod
    def of(cls, descriptor: Array) -> "Layout":
        fields = [(descriptor >> np.uint64(s)) & np.uint64(0x3FFF) for s in (0, 16, 32)]
        rest = np.unique(descriptor >> np.uint64(16))
        if len(rest) != 1 or (int(descriptor[0]) >> 49) & 7:
            raise Fault("a matrix descriptor of a kind that is not known here")
        row = {0: 16, 1: 128, 2: 64, 3: 32}[int(descriptor[0]) >> 62]
        return cls(fields[0].astype(np.int64) * 16, int(fields[1][0]) * 16, int(fields[2][0]) * 16, row)

    def address(self, outer: Array, depth: Array, size: int, depth_is_contiguous: bool) -> Array:
        """[warpgroups, ...] byte addresses of elements; ``outer``: the row of A or the column of B."""
        if depth_is_contiguous:
            piece, within = np.divmod(depth * size, 16)
            along = piece * 16 if self.row > 16 else piece * self.leading
            offset = outer // 8 * self.stride + outer % 8 * self.row + along + within
        else:
            block, within = np.divmod(outer * size, self.row)
            across, along = (self.leading, self.stride) if self.row > 16 else (self.stride, self.leading)
            offset = block * across + within + depth // 8 * along + depth % 8 * self.row
        address = self.start.reshape(-1, *[1] * offset.ndim) + offset
        bits = {16: 0, 32: 1, 64: 3, 128: 7}[self.row]
        return address ^ ((address >> 7 & bits) << 4)


def _fetch(machine: "Machine", descriptor: Array, shape: tuple[int, int], kind: str, contiguous: bool) -> Array:
    """[warpgroups, outer, depth] numbers, with the places noted as read by all four warps."""
    size = 4 if kind == "tf32" else 2
    outer, depth = np.meshgrid(np.arange(shape[0]), np.arange(shape[1]), indexing="ij")
    address = Layout.of(descriptor).address(outer, depth, size, contiguous)
    groups = len(descriptor)
    first = np.arange(groups) * 128
    program = np.repeat(machine.slot[first], address[0].size)
    for warp in range(4):
        number = np.repeat(machine.warp[first] + warp, address[0].size)
        raw = machine.shared.load(program, number, address.ravel(), size)
    machine.products[-1].places.append(machine.shared.places(program, address.ravel(), size))
    words = np.ascontiguousarray(raw)
    if kind == "tf32":
        numbers = unpack("tf32", [words.view(np.uint32)[:, 0]])[0]
    else:
        half = words.view(np.uint16)[:, 0]
        numbers = from_bfloat16(half) if kind == "bf16" else half.view(np.float16).astype(np.float32)
    return numbers.reshape(address.shape)


def _multiply(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """wgmma.mma_async.sync.aligned.m64nNkK.f32.a.b d, a, b, scale-d, scale-a, scale-b, transpose-a, transpose-b"""
    if mask is not None and (mask.reshape(-1, 128).any(1) != mask.reshape(-1, 128).all(1)).any():
        raise Fault("wgmma by a part of its four warps")
    if mask is not None:
        raise Fault("wgmma of some programs only is not known here")
    shape, to, kind, kind_b = instruction.modifiers[3:7]
    if to != "f32" or kind != kind_b or kind not in ("bf16", "f16", "tf32"):
        raise Fault("a matrix product of types that are not known here")
    cols, depth = (int(x) for x in shape.removeprefix("m64n").split("k"))
    d, a, b, scale, *flags = instruction.operands
    assert isinstance(d, Vector)
    from_registers = isinstance(a, Vector)
    signs = [_constant(f) for f in flags[:2]]
    transposed = [_constant(f) == 1 for f in flags[2:]] if len(flags) > 2 else [False, False]
    machine.products.append(Product({r.name for r in d.parts}, []))  # type: ignore[union-attr]
    first = np.arange(0, machine.count, 128)
    left = (
        _fragment(machine, a.parts, kind, depth)
        if isinstance(a, Vector)
        else _fetch(machine, machine.wide(machine.read(a, "b64"))[first], (64, depth), kind, not transposed[0])
    )
    right = _fetch(
        machine, machine.wide(machine.read(b, "b64"))[first], (cols, depth), kind,
        not transposed[-1] if from_registers or len(flags) > 2 else True,
    )  # fmt: skip
    machine.shared.under_way += machine.products[-1].places
    product = signs[0] * signs[1] * np.matmul(left.astype(np.float64), right.astype(np.float64).swapaxes(1, 2))
    keep = machine.wide(machine.read(scale, "pred"))
    group, warp, quarter = machine.any_warp // 4, machine.any_warp % 4, machine.lane % 4
    for i, register in enumerate(d.parts):
        row = 16 * warp + machine.lane // 4 + 8 * (i // 2 % 2)
        old = np.where(keep, machine.raw(register.name, "f32"), 0.0)  # type: ignore[union-attr]
        machine.write(
            register, (product[group, row, 8 * (i // 4) + 2 * quarter + i % 2] + old).astype(np.float32), None
        )


def _fragment(machine: "Machine", registers: tuple[Operand, ...], kind: str, depth: int) -> Array:
    """A from registers, spread over the threads as for mma.m16n8."""
    per_register = 1 if kind == "tf32" else 2
    numbers = unpack(kind, [machine.wide(machine.read(r, "b32")) for r in registers])
    a = np.zeros((machine.count // 128, 64, depth))
    group, warp, lane = machine.any_warp // 4, machine.any_warp % 4, machine.lane
    for i, x in enumerate(numbers):
        register, half = divmod(i, per_register)
        col = per_register * (lane % 4) + half + 4 * per_register * (register // 2)
        a[group, 16 * warp + lane // 4 + 8 * (register % 2), col] = x
    return a


def _constant(operand: Operand) -> int:
    assert isinstance(operand, Immediate)
    return int(operand.text)


def _fence(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """Orders registers, which are in order here."""


def _commit(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    number = 1 + max((p.group for p in machine.products if p.group is not None), default=machine.finished)
    for product in machine.products:
        if product.group is None:
            product.group = number


def _wait(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    groups = sorted({p.group for p in machine.products if p.group is not None})
    keep = _constant(instruction.operands[0])
    done = groups[: len(groups) - keep] if keep else groups
    machine.finished = max([machine.finished, *done])
    machine.products = [p for p in machine.products if p.group not in done]
    machine.shared.under_way = [place for p in machine.products for place in p.places]
