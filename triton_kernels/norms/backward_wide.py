"""Backward of norms over rows that no multiprocessor holds: one kernel takes the rows' dot products, and a second, over
blocks of columns, has all gradients. x and the gradient are read twice.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    aligned,
    cdiv,
    partial_sums_of,
    quotient,
    row_splits,
    scratch,
    tile_of,
    vector_cols,
)
from parallel_ops.triton_kernels._finish import arrive, finish_block, finish_both, finishers
from parallel_ops.triton_kernels._launch import launch
from parallel_ops.triton_kernels.norms.forward import WIDE_BLOCK, WIDE_WARPS, load, scaled

# One 16-byte load a thread, operand and row, two rows at a time.
WARPS = 4
BLOCK_ROWS = 2


@triton.jit
def _wide_dots_kernel(
    grad_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dots_ptr, rows, cols, grad_stride, x_stride, UNIT: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """One row a program: mean(g xhat) and, where the mean was subtracted, mean(g)."""
    cols, grad_stride, x_stride = aligned(cols, UNIT), aligned(grad_stride, UNIT), aligned(x_stride, UNIT)
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    dots = tl.zeros((BLOCK_COLS,), dtype=rstd.dtype)
    totals = tl.zeros((BLOCK_COLS,), dtype=rstd.dtype)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
    for first in range(0, cols, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)
        mask = col < cols
        grad = load(grad_ptr, row * grad_stride + col, mask)
        g = scaled(grad, None, weight_ptr, col, mask, ZERO_CENTERED)
        x = load(x_ptr, row * x_stride + col, mask)
        if mean_ptr is not None:
            x -= mean
            totals += g
        dots += g * x
    tl.store(dots_ptr + row, quotient(tl.sum(dots) * rstd, cols))
    if mean_ptr is not None:
        tl.store(dots_ptr + row + rows, quotient(tl.sum(totals), cols))


@triton.jit
def _wide_backward_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dots_ptr, dx_ptr, narrow_dx_ptr,
    partial_dweight_ptr, partial_dbias_ptr, dweight_ptr, dbias_ptr, counter_ptr, workers, splits, col_blocks,
    rows, cols, grad_stride, grad_sum_stride, x_stride, UNIT: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    FINISH_SPLITS: tl.constexpr, FINISH_COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A block of columns a program: with the rows' dot products known, nothing ties columns together any more.

    Without ``dx_ptr`` the parameters' gradients alone, which need neither the weight nor the dot products.
    """
    cols, grad_stride = aligned(cols, UNIT), aligned(grad_stride, UNIT)
    grad_sum_stride, x_stride = aligned(grad_sum_stride, UNIT), aligned(x_stride, UNIT)
    if counter_ptr is not None:
        if tl.program_id(0) >= workers:
            finish_both(
                partial_dweight_ptr, partial_dbias_ptr, dweight_ptr, dbias_ptr, counter_ptr, splits, workers, cols,
                FINISH_SPLITS, FINISH_COLS,
            )  # fmt: skip
            return
    split, col_block = tile_of(tl.program_id(0), col_blocks)
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    col = col_block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    in_cols = col < cols
    kept = None
    if weight_ptr is not None:
        kept = tl.load(weight_ptr + col, mask=in_cols, other=0.0)
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
    dbias = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
    for first in range(split * BLOCK_ROWS, rows, splits * BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        in_rows = row < rows
        mask = in_rows & in_cols
        grad = load(grad_ptr, row * grad_stride + col, mask)
        xhat = load(x_ptr, row * x_stride + col, mask)
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)
        if mean_ptr is not None:
            xhat -= tl.load(mean_ptr + row, mask=in_rows, other=0.0)
        xhat *= rstd
        if dx_ptr is not None:
            g = scaled(grad, kept, weight_ptr, col, in_cols, ZERO_CENTERED)
            dx = g - xhat * tl.load(dots_ptr + row, mask=in_rows, other=0.0)
            if mean_ptr is not None:
                dx -= tl.load(dots_ptr + row + rows, mask=in_rows, other=0.0)
            dx *= rstd
            if grad_sum_ptr is not None:
                dx += load(grad_sum_ptr, row * grad_sum_stride + col, mask)
            tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if narrow_dx_ptr is not None:
                tl.store(narrow_dx_ptr + row * cols + col, dx.to(narrow_dx_ptr.dtype.element_ty), mask=mask)
        dweight += grad * xhat
        dbias += grad
    offset = split.to(tl.int64) * cols + col
    if dweight_ptr is not None:
        tl.store(partial_dweight_ptr + offset, tl.sum(dweight, axis=0, keep_dims=True), mask=in_cols)
    if dbias_ptr is not None:
        tl.store(partial_dbias_ptr + offset, tl.sum(dbias, axis=0, keep_dims=True), mask=in_cols)
    if counter_ptr is not None:
        arrive(counter_ptr)


def wide_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    dx: Tensor | None, narrow_dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, count: Tensor | None,
    rows: int, cols: int, grad_stride: int, grad_sum_stride: int, x_stride: int, **flags: int,
) -> None:  # fmt: skip
    """The arguments of ``backward.backward`` as rows, with the counter of ``_finish`` if there are sums."""
    block_cols = vector_cols(x.dtype, WARPS)
    splits, col_blocks = row_splits(rows, BLOCK_ROWS), cdiv(cols, block_cols)
    sums = (dweight is not None) + (dbias is not None)
    dots = None
    if dx is not None:
        dots = scratch(rstd, 2, rows)
        launch(
            _wide_dots_kernel, (rows,),
            grad, x, weight, mean, rstd, dots, rows, cols, grad_stride, x_stride, **flags,
            BLOCK_COLS=WIDE_BLOCK, num_warps=WIDE_WARPS,
        )  # fmt: skip
    launch(
        _wide_backward_kernel, (splits * col_blocks + finishers(cols, sums),),
        grad, grad_sum, x, weight, mean, rstd, dots, dx, narrow_dx, *partial_sums_of(dweight, dbias, x, splits),
        dweight, dbias, count, splits * col_blocks, splits, col_blocks, rows, cols, grad_stride, grad_sum_stride,
        x_stride, **flags, **finish_block(cols, WARPS, sums),
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=block_cols, num_warps=WARPS,
    )  # fmt: skip
