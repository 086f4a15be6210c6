"""What the launchers share: tensors as rows, block sizes, and the column sum behind every bias gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._launch import launch

# Partial sums per column of a bias gradient. 128 splits of the rows times the column blocks of a hidden size of
# 4,096 and more keep an H200's 132 multiprocessors four programs deep, and cost 2% of the backward's traffic at
# 8,192 rows. A constant, not the multiprocessor count, so that every GPU gives the same bits.
ROW_SPLITS = 128


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


def vector_cols(dtype: torch.dtype, num_warps: int) -> int:
    """Columns that ``num_warps`` warps cover when each thread moves 16 bytes, the widest access there is."""
    return 32 * num_warps * 16 // dtype.itemsize


@triton.jit
def to_acc(x):
    """fp32 for fp32, fp16 and bf16; fp64 for fp64."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def sigmoid(x):
    """The logistic function and its derivative, in exp(-|x|): 1 - s would lose its digits where s is near 1."""
    t = tl.exp(-tl.abs(x))
    r = 1.0 / (1.0 + t)
    return tl.where(x < 0.0, t * r, r), t * r * r


@triton.jit
def _column_sum_kernel(partial_ptr, out_ptr, splits, cols, BLOCK_SPLITS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    split = tl.arange(0, BLOCK_SPLITS)
    offsets = split[:, None].to(tl.int64) * cols + col[None, :]
    mask = (split[:, None] < splits) & (col[None, :] < cols)
    total = tl.sum(tl.load(partial_ptr + offsets, mask=mask, other=0.0), axis=0)
    tl.store(out_ptr + col, total.to(out_ptr.dtype.element_ty), mask=col < cols)


def column_sum(partial: Tensor, out: Tensor) -> None:
    """``out[j] = sum_i partial[i, j]`` in a fixed order; ``partial`` has at most ``ROW_SPLITS`` rows."""
    splits, cols = partial.shape
    block_cols = 32
    launch(
        _column_sum_kernel, (cdiv(cols, block_cols),),
        partial, out, splits, cols, BLOCK_SPLITS=ROW_SPLITS, BLOCK_COLS=block_cols, num_warps=4,
    )  # fmt: skip


def row_splits(rows: int, block_rows: int) -> int:
    """How many programs share the rows: ``ROW_SPLITS``, or fewer where there is not a block for each."""
    return min(ROW_SPLITS, cdiv(rows, block_rows))


def partial_sums(cols: int, like: Tensor, splits: int = ROW_SPLITS) -> Tensor:
    """The buffer for ``column_sum``: fp32, or fp64 for fp64 data."""
    dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    return torch.empty((splits, cols), dtype=dtype, device=like.device)
