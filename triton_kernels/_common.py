"""What the launchers share: tensors as rows, block sizes, and how bias gradients share rows (``_finish`` ends them)."""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._launch import temporary

# Partial sums per column of a bias gradient. 128 splits of the rows times the column blocks of a hidden size of
# 4,096 and more keep an H200's 132 SMs four programs deep, and cost 2% of the backward's traffic at
# 8,192 rows. A constant, not the SM count, so that every GPU gives the same bits.
ROW_SPLITS = 128

# Triton's interpreter knows no assembly.
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up. ``triton.cdiv`` goes through the wrapper of compile-time functions, 2 us a call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, for ``n >= 1``; ``triton.next_power_of_2`` costs as much."""
    return 1 << (n - 1).bit_length()


def as_rows(t: Tensor) -> tuple[Tensor, int, int, int]:
    """``t`` as ``(tensor, rows, cols, row_stride)`` with unit column stride, copied only if no view can do it."""
    cols = t.shape[-1]
    rows = t.numel() // cols if cols else 0
    if t.is_contiguous():
        return t, rows, cols, cols
    stride = _row_stride(t)
    if stride is None:
        t = t.contiguous()
        stride = cols
    return t, rows, cols, stride


def contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _row_stride(t: Tensor) -> int | None:
    """The distance between consecutive rows, if the leading dimensions merge into one and columns are adjacent."""
    if t.stride(-1) != 1 and t.shape[-1] != 1:
        return None
    merged: int | None = None
    expected = 0
    for size, stride in zip(reversed(t.shape[:-1]), reversed(t.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if merged is None:
            merged = stride
        elif stride != expected:
            return None
        expected = stride * size
    return t.shape[-1] if merged is None else merged


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; those of an H100 for tensors elsewhere, whose kernels are compiled or interpreted, not run."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


# Of the GPU for which kernels are chosen where there is none, for tests that compile them for one.
assumed_capability = 90
assumed_shared_memory = 227 * 1024


def capability(device: torch.device) -> int:
    """90 for compute capability 9.0; of a CUDA device, or the assumed one for tensors elsewhere."""
    return _cuda_capability(device) if device.type == "cuda" else assumed_capability


@functools.cache
def _cuda_capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have: Triton launches none that needs more. 227 KiB on an H100, 99 on many others."""
    return _cuda_shared_memory(device) if device.type == "cuda" else assumed_shared_memory


@functools.cache
def _cuda_shared_memory(device: torch.device) -> int:
    limit: int = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return limit


def vector_cols(dtype: torch.dtype, num_warps: int) -> int:
    """Columns that ``num_warps`` warps cover when each thread moves 16 bytes, the widest access there is."""
    return 32 * num_warps * 16 // dtype.itemsize


def unit_of(*counts: int) -> int:
    """The largest power of two up to 16 that divides all of ``counts``: columns, and strides of rows in elements."""
    return math.gcd(16, *counts)


@triton.jit
def aligned(n, UNIT: tl.constexpr):
    """``n``, which is a multiple of ``UNIT``, for a compiler that sees by itself only whether 16 divides ``n``.

    Accesses of 128 bits need 8 columns of 16 bits: without the hint a vocabulary shard of 4,008 is read element by
    element.
    """
    if UNIT == 1:
        return n
    else:
        shift: tl.constexpr = 1 if UNIT == 2 else 2 if UNIT == 4 else 3 if UNIT == 8 else 4
        return n >> shift << shift  # a division would look at the sign


@triton.jit
def tile_of(program, col_blocks):
    """(row block, column block) of a program. Unsigned: a signed division looks at signs, eight instructions more."""
    program, col_blocks = tl.cast(program, tl.uint32), tl.cast(col_blocks, tl.uint32)
    row_block = program // col_blocks
    return row_block.to(tl.int32), (program - row_block * col_blocks).to(tl.int32)


@triton.jit
def to_acc(x):
    """fp32 for fp32, fp16 and bf16; fp64 for fp64."""
    if x.dtype == tl.float64:
        return x
    elif COMPILED and x.dtype == tl.bfloat16 and x.numel > 1:
        # Two elements of a register in two instructions; the compiler's own conversion of the upper one takes two more.
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def quotient(a, b):
    """a / b, rounded correctly: the fp32 division that Triton takes otherwise is off by up to two units."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, tl.cast(b, tl.float32))


@triton.jit
def reread(x):
    """``x`` from where it was loaded to, for another use: 16-bit values wait there in pairs, one register for two.

    Without it the compiler widens them once and keeps the wide ones, twice as many registers, until their last use.
    """
    if not COMPILED or x.dtype.primitive_bitwidth != 16 or x.numel == 1:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def computed_here(n):
    """An int32 for a compiler that shall not compute ahead of a loop what follows from it, to keep it in registers."""
    if COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return n


def row_splits(rows: int, block_rows: int) -> int:
    """How many programs share the rows: ``ROW_SPLITS``, or fewer where there is not a block for each."""
    return min(ROW_SPLITS, cdiv(rows, block_rows))


def bias_gradient_cols(cols: int, dtype: torch.dtype, num_warps: int) -> int:
    """Columns of a program that sums over rows: four such blocks or more, so that narrow rows fill a GPU too.

    Four times ``ROW_SPLITS`` programs are at least three for each of up to 170 SMs.
    """
    return min(vector_cols(dtype, num_warps), max(64, next_power_of_2(cdiv(cols, 4))))


@triton.jit
def sum_within_threads(x, GROUPS: tl.constexpr):
    """The sums of every ``GROUPS``-th row, ``[GROUPS, cols]``: each thread adds what it holds, none waits."""
    return tl.sum(tl.reshape(x, (x.shape[0] // GROUPS, GROUPS, x.shape[1])), axis=0)


def scratch(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory that kernels use beside a launcher's tensors, on the device of ``like`` and by default in its dtype."""
    return temporary(functools.partial(torch.empty, shape, dtype=dtype or like.dtype, device=like.device))


def partial_sums(cols: int, like: Tensor, splits: int = ROW_SPLITS) -> Tensor:
    """The buffer for parts of the sums of columns: fp32, or fp64 for fp64 data."""
    return scratch(like, splits, cols, dtype=torch.float64 if like.dtype is torch.float64 else torch.float32)


def partial_sums_of(dweight: Tensor | None, dbias: Tensor | None, like: Tensor, splits: int) -> list[Tensor | None]:
    """Buffers for the parts of those gradients of ``like``'s columns that are there."""
    return [None if t is None else partial_sums(like.shape[-1], like, splits) for t in (dweight, dbias)]
