"""bias_dropout_add: one pass each way; the mask is drawn in registers, dbias summed on the way."""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    as_rows,
    cdiv,
    column_sum,
    partial_sums,
    row_splits,
    to_acc,
    vector_cols,
)
from parallel_ops.triton_kernels._launch import launch
from parallel_ops.triton_kernels._philox import keep_block

NUM_WARPS = 4
# Rows a program: four independent 16-byte loads in flight per thread, two rows of x and residual, four of the gradient;
# two where blocks start before the tensor, whose masks take registers (Triton 3.6 spills at four).
FORWARD_ROWS = 2
BACKWARD_ROWS = 4
SHIFTED_BACKWARD_ROWS = 2

# Values that change from call to call must not compile a kernel each.
_UNSPECIALISED = ["scale", "last_dropped", "index_offset"]


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _forward_kernel(
    x_ptr, bias_ptr, residual_ptr, y_ptr, seed_ptr, rows, cols, x_stride, residual_stride,
    scale: tl.float64, last_dropped: tl.uint32, index_offset: tl.int64,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, SHIFT: tl.constexpr, BY_FOUR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(cols + SHIFT, BLOCK_COLS)
    row = (tl.program_id(0) // col_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    start = (tl.program_id(0) % col_blocks).to(tl.int64) * BLOCK_COLS - SHIFT
    col = start + tl.arange(0, BLOCK_COLS)[None, :]
    in_cols = (col >= 0) & (col < cols)
    mask = (row < rows) & in_cols
    z = to_acc(tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0))
    if HAS_BIAS:
        z += to_acc(tl.load(bias_ptr + col, mask=in_cols, other=0.0))
    y = to_acc(tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0))
    if DROPOUT:
        vector: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
        first = index_offset + row * cols + start
        keep = keep_block(tl.load(seed_ptr), first, last_dropped, BLOCK_COLS, BY_FOUR, vector)
        # Chosen, not multiplied by zero: a dropped element is the residual whatever x holds.
        y = tl.where(keep, y + z * tl.cast(scale, z.dtype), y)
    else:
        y += z
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _backward_kernel(
    grad_ptr, dx_ptr, partial_ptr, seed_ptr, rows, cols, splits, grad_stride,
    scale: tl.float64, last_dropped: tl.uint32, index_offset: tl.int64,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, SHIFT: tl.constexpr, BY_FOUR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    # Column blocks on the first axis of the grid, the only one that may be longer than 65,535.
    split = tl.program_id(1)
    start = tl.program_id(0).to(tl.int64) * BLOCK_COLS - SHIFT
    col = start + tl.arange(0, BLOCK_COLS)[None, :]
    in_cols = (col >= 0) & (col < cols)
    vector: tl.constexpr = 128 // grad_ptr.dtype.element_ty.primitive_bitwidth
    if DROPOUT:
        seed = tl.load(seed_ptr)
    if HAS_BIAS:
        total = tl.zeros((1, BLOCK_COLS), dtype=partial_ptr.dtype.element_ty)
    for first in range(split * BLOCK_ROWS, rows, splits * BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        mask = (row < rows) & in_cols
        dx = to_acc(tl.load(grad_ptr + row * grad_stride + col, mask=mask, other=0.0))
        if DROPOUT:
            keep = keep_block(seed, index_offset + row * cols + start, last_dropped, BLOCK_COLS, BY_FOUR, vector)
            dx = tl.where(keep, dx * tl.cast(scale, dx.dtype), 0.0)
            tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            total += tl.sum(tl.where(mask, dx, 0.0), axis=0, keep_dims=True)
    if HAS_BIAS:
        tl.store(partial_ptr + split.to(tl.int64) * cols + col, total, mask=in_cols)


def _dropout(p: float, seed: Tensor | None, index_offset: int, cols: int) -> dict[str, object]:
    """What both kernels need to draw: words up to ``last_dropped`` are dropped, four columns drawn for at a time."""
    threshold = int(p * 2.0**32 + 0.5)
    dropout = seed is not None
    if dropout and threshold == 0:
        raise ValueError(f"bias_dropout_add: p = {p} drops nothing, so seed must be None")
    by_four = cols % 4 == 0
    return {
        "scale": 1.0 / (1.0 - p) if p < 1.0 else 0.0,
        "last_dropped": threshold - 1 if dropout else 0,
        "index_offset": index_offset,
        "DROPOUT": dropout,
        # Blocks start where four elements share a draw, even when the tensor does not.
        "SHIFT": index_offset % 4 if dropout and by_four else 0,
        "BY_FOUR": by_four,
    }


def forward(
    x: Tensor, bias: Tensor | None, residual: Tensor, y: Tensor, *, p: float, seed: Tensor | None, index_offset: int
) -> None:
    """``y = residual + dropout(x + bias)``; ``y`` is contiguous; no ``seed``, no dropout."""
    if x.numel() == 0:
        return
    x, rows, cols, x_stride = as_rows(x)
    residual, _, _, residual_stride = as_rows(residual)
    bias = None if bias is None else bias.contiguous()
    block_cols = vector_cols(x.dtype, NUM_WARPS)
    dropout = _dropout(p, seed, index_offset, cols)
    grid = (cdiv(rows, FORWARD_ROWS) * cdiv(cols + dropout["SHIFT"], block_cols),)
    launch(
        _forward_kernel, grid,
        x, bias, residual, y, seed, rows, cols, x_stride, residual_stride,
        HAS_BIAS=bias is not None, BLOCK_ROWS=FORWARD_ROWS, BLOCK_COLS=block_cols, num_warps=NUM_WARPS, **dropout,
    )  # fmt: skip


def backward(grad: Tensor, dx: Tensor, dbias: Tensor, *, p: float, seed: Tensor | None, index_offset: int) -> None:
    """``dx`` (left alone without a ``seed``; contiguous) and, if ``dbias`` has elements, its sum over rows."""
    if grad.numel() == 0:
        dbias.zero_()
        return
    grad, rows, cols, grad_stride = as_rows(grad)
    dropout = _dropout(p, seed, index_offset, cols)
    block_rows = SHIFTED_BACKWARD_ROWS if dropout["SHIFT"] else BACKWARD_ROWS
    splits = row_splits(rows, block_rows)
    partial = partial_sums(cols, grad, splits) if dbias.numel() else None
    block_cols = vector_cols(grad.dtype, NUM_WARPS)
    grid = (cdiv(cols + dropout["SHIFT"], block_cols), splits)
    launch(
        _backward_kernel, grid,
        grad, dx, partial, seed, rows, cols, splits, grad_stride,
        HAS_BIAS=partial is not None, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
        num_warps=NUM_WARPS, **dropout,
    )  # fmt: skip
    if partial is not None:
        column_sum(partial, dbias)
