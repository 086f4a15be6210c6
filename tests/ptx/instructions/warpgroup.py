"""wgmma.mma_async: a matmul by four warps of matrices in shared memory, which runs behind until somebody waits for it.

The result is computed at once. Until the wait, to read its registers or to write its operands is a fault. That stores
are made visible by fence.proxy.async is not checked.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx.instructions.matrix import unpack
from ptx.program import Immediate, Instruction, Operand, Vector
from ptx.values import Array, Fault, from_bfloat16

if TYPE_CHECKING:
    from ptx.machine import Machine

Handler = Callable[["Machine", Instruction, Array | None], None]


@dataclasses.dataclass
class Product:
    """One under way, by some warpgroups of those that run here."""

    registers: set[str]
    groups: Array  # flags
    places: list[tuple[Array, Array]]  # (warpgroups, the places of shared memory that each reads)
    batch: int | None = None  # those that one commit_group closed

    def taken_by(self, threads: Array | None) -> bool:
        return threads is None or bool((np.repeat(self.groups, 128) & threads).any())


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


def _groups(machine: "Machine", mask: Array | None) -> Array:
    """The numbers of the warpgroups that take part."""
    if mask is None:
        return np.arange(machine.count // 128)
    threads = mask.reshape(-1, 128)
    if (threads.any(1) != threads.all(1)).any():
        raise Fault("wgmma by a part of its four warps")
    return np.flatnonzero(threads.all(1))


def _fetch(
    machine: "Machine", groups: Array, where: Operand, shape: tuple[int, int], kind: str, contiguous: bool
) -> Array:
    """[warpgroups, outer, depth] numbers, with the places noted as read by all four warps."""
    size = 4 if kind == "tf32" else 2
    first = groups * 128
    outer, depth = np.meshgrid(np.arange(shape[0]), np.arange(shape[1]), indexing="ij")
    descriptor = machine.wide(machine.read(where, "b64"))[first]
    address = Layout.of(descriptor).address(outer, depth, size, contiguous)
    program = np.repeat(machine.slot[first], address[0].size)
    for warp in range(4):
        number = np.repeat(machine.warp[first] + warp, address[0].size)
        raw = machine.shared.load(program, number, address.ravel(), size)
    places = machine.shared.places(program, address.ravel(), size).reshape(len(groups), -1)
    machine.products[-1].places.append((groups, places))
    machine.shared.hold(places, 1)
    words = np.ascontiguousarray(raw)
    if kind == "tf32":
        numbers = unpack("tf32", [words.view(np.uint32)[:, 0]])[0]
    else:
        half = words.view(np.uint16)[:, 0]
        numbers = from_bfloat16(half) if kind == "bf16" else half.view(np.float16).astype(np.float32)
    return numbers.reshape(address.shape)


def _multiply(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """wgmma.mma_async.sync.aligned.m64nNkK.f32.a.b d, a, b, scale-d, scale-a, scale-b, transpose-a, transpose-b"""
    groups = _groups(machine, mask)
    shape, to, kind, kind_b = instruction.modifiers[3:7]
    if to != "f32" or kind != kind_b or kind not in ("bf16", "f16", "tf32"):
        raise Fault("a matrix product of types that are not known here")
    cols, depth = (int(x) for x in shape.removeprefix("m64n").split("k"))
    d, a, b, scale, *flags = instruction.operands
    assert isinstance(d, Vector)
    from_registers = isinstance(a, Vector)
    signs = [_constant(f) for f in flags[:2]]
    transposed = [_constant(f) == 1 for f in flags[2:]] if len(flags) > 2 else [False, False]
    taking = np.zeros(machine.count // 128, np.bool_)
    taking[groups] = True
    # Matmuls of one register follow each other; between other instructions and a matmul lies a wait.
    machine.products.append(Product({r.name for r in d.parts}, taking, []))  # type: ignore[union-attr]
    left = (
        _fragment(machine, a.parts, kind, depth)[groups]
        if isinstance(a, Vector)
        else _fetch(machine, groups, a, (64, depth), kind, not transposed[0])
    )
    right = _fetch(
        machine, groups, b, (cols, depth), kind, not transposed[-1] if from_registers or len(flags) > 2 else True
    )
    product = np.zeros((machine.count // 128, 64, cols))
    product[groups] = signs[0] * signs[1] * np.matmul(left.astype(np.float64), right.astype(np.float64).swapaxes(1, 2))
    keep = machine.wide(machine.read(scale, "pred"))
    group, warp, quarter = machine.any_warp // 4, machine.any_warp % 4, machine.lane % 4
    for i, register in enumerate(d.parts):
        row = 16 * warp + machine.lane // 4 + 8 * (i // 2 % 2)
        old = np.where(keep, machine.raw(register.name, "f32"), 0.0)  # type: ignore[union-attr]
        value = product[group, row, 8 * (i // 4) + 2 * quarter + i % 2] + old
        machine.write(register, value.astype(np.float32), mask)


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
    """The matmuls since the last commit of these warpgroups become a batch."""
    taking = _groups(machine, mask)
    machine.batches += 1
    _part(machine, lambda p: p.batch is None, np.isin(np.arange(machine.count // 128), taking), machine.batches)


def _wait(machine: "Machine", instruction: Instruction, mask: Array | None) -> None:
    """All but the last n batches of these warpgroups have ended."""
    keep = _constant(instruction.operands[0])
    waiting = np.isin(np.arange(machine.count // 128), _groups(machine, mask))
    newer = np.zeros(len(waiting), np.int64)  # batches of each warpgroup
    for batch in sorted({p.batch for p in machine.products if p.batch is not None}, reverse=True):
        have = np.logical_or.reduce([p.groups for p in machine.products if p.batch == batch])
        _part(machine, lambda p, batch=batch: p.batch == batch, waiting & have & (newer >= keep), None)
        newer += have


def _part(machine: "Machine", which: Callable[[Product], bool], groups: Array, batch: int | None) -> None:
    """Takes ``groups`` out of the matmuls that are meant: into a batch, or, without one, they have ended."""
    products = []
    for product in machine.products:
        some = product.groups & groups
        if not which(product) or not some.any():
            products.append(product)
            continue
        inside = [(of[some[of]], places[some[of]]) for of, places in product.places]
        if batch is None:
            for _, places in inside:
                machine.shared.hold(places, -1)
        else:
            products.append(Product(product.registers, some, inside, batch))
        left = product.groups & ~groups
        if left.any():
            outside = [(of[left[of]], places[left[of]]) for of, places in product.places]
            products.append(Product(product.registers, left, outside, product.batch))
    machine.products = products
