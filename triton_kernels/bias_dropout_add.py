"""bias_dropout_add: one pass each way; the mask is drawn in registers, dbias summed on the way.

Every operand may have a dtype of its own; arithmetic is in fp32, or in fp64 where the output is.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    aligned,
    as_rows,
    bias_gradient_cols,
    cdiv,
    partial_sums,
    row_splits,
    sum_within_threads,
    tile_of,
    to_acc,
    unit_of,
    vector_cols,
)
from parallel_ops.triton_kernels._finish import (
    arrive,
    counter,
    finish_block,
    finishers,
    sum_columns,
    wait_for_workers,
)
from parallel_ops.triton_kernels._launch import launch, remembered
from parallel_ops.triton_kernels._philox import keep_block

NUM_WARPS = 4
# Rows of a tile with all threads side by side: 16-byte loads in flight per thread and operand. The forward's eight
# amortise what a program computes beside its elements, 4 instructions of 22 an element at four. One where blocks start
# before the tensor, whose masks take registers (two spill), and where elements are drawn for one by one and nothing but
# x is read, for which the compiler keeps all of a tile's draws (eight spill).
FORWARD_ROWS = 8
BACKWARD_ROWS = 4
SHIFTED_ROWS = 1

# Values that change from call to call must not compile a kernel each.
_UNSPECIALISED = ["scale", "last_dropped", "index_offset"]


@triton.jit
def _first_index(index_offset, row, rows, cols, start, positions_ptr, rows_each):
    """The index in the whole tensor of column ``start`` of rows; ``rows_each`` adjacent ones share a position."""
    if positions_ptr is not None:
        number = row.to(tl.uint32) // tl.cast(rows_each, tl.uint32)
        within = row - number.to(tl.int64) * rows_each
        row = tl.load(positions_ptr + number, mask=row < rows, other=0) * rows_each + within
    return index_offset + row * cols + start


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _forward_kernel(
    x_ptr, bias_ptr, residual_ptr, y_ptr, seed_ptr, positions_ptr, rows, cols, col_blocks, x_stride, residual_stride,
    rows_each, scale: tl.float64, last_dropped: tl.uint32, index_offset: tl.int64,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, SHIFT: tl.constexpr,
    BY_FOUR: tl.constexpr, CARRY: tl.constexpr, VECTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    cols = aligned(cols, UNIT)
    row_block, col_block = tile_of(tl.program_id(0), col_blocks)
    row = row_block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    start = col_block * BLOCK_COLS - SHIFT
    col = start + tl.arange(0, BLOCK_COLS)[None, :]
    in_cols = (col >= 0) & (col < cols)
    mask = (row < rows) & in_cols
    z = to_acc(tl.load(x_ptr + row * aligned(x_stride, UNIT) + col, mask=mask))
    acc: tl.constexpr = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    z = z.to(acc)
    if HAS_RESIDUAL:
        y = to_acc(tl.load(residual_ptr + row * aligned(residual_stride, UNIT) + col, mask=mask)).to(acc)
    else:
        y = tl.zeros_like(z)
    if HAS_BIAS:
        z += tl.load(bias_ptr + col, mask=in_cols).to(acc)
    if DROPOUT:
        first = _first_index(index_offset, row, rows, cols, start, positions_ptr, rows_each)
        keep = keep_block(tl.load(seed_ptr), index_offset, first, last_dropped, BLOCK_COLS, BY_FOUR, CARRY, VECTOR)
        # Chosen, not multiplied by zero: a dropped element is the residual whatever x holds.
        y = tl.where(keep, y + z * tl.cast(scale, acc), y)
    else:
        y += z
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _backward_kernel(
    grad_ptr, dx_ptr, partial_ptr, dbias_ptr, counter_ptr, seed_ptr, positions_ptr, rows, cols, col_blocks, splits,
    workers, grad_stride, rows_each, scale: tl.float64, last_dropped: tl.uint32, index_offset: tl.int64,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, SHIFT: tl.constexpr, BY_FOUR: tl.constexpr, CARRY: tl.constexpr,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, GROUPS: tl.constexpr,
    FINISH_SPLITS: tl.constexpr, FINISH_COLS: tl.constexpr,
):  # fmt: skip
    cols = aligned(cols, UNIT)
    if HAS_BIAS:
        if tl.program_id(0) >= workers:
            wait_for_workers(counter_ptr, workers)
            sum_columns(
                partial_ptr, dbias_ptr, tl.program_id(0) - workers, splits, cols, FINISH_SPLITS, FINISH_COLS
            )  # fmt: skip
            return
    split, col_block = tile_of(tl.program_id(0), col_blocks)
    start = col_block * BLOCK_COLS - SHIFT
    seed = tl.load(seed_ptr) if DROPOUT else 0
    if HAS_BIAS:
        total = tl.zeros((GROUPS, BLOCK_COLS), dtype=partial_ptr.dtype.element_ty)
        for first in range(split * BLOCK_ROWS, rows, splits * BLOCK_ROWS):
            dx = _backward_tile(
                grad_ptr, dx_ptr, seed, positions_ptr, first, start, rows, cols, grad_stride, rows_each,
                scale, last_dropped, index_offset, DROPOUT, BY_FOUR, CARRY, VECTOR, UNIT, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
            total += sum_within_threads(dx.to(total.dtype), GROUPS)
        col = start + tl.arange(0, BLOCK_COLS)[None, :]
        partial_ptr += split.to(tl.int64) * cols
        tl.store(partial_ptr + col, tl.sum(total, axis=0, keep_dims=True), mask=(col >= 0) & (col < cols))
        arrive(counter_ptr)
    else:
        _backward_tile(
            grad_ptr, dx_ptr, seed, positions_ptr, split.to(tl.int64) * BLOCK_ROWS, start, rows, cols, grad_stride,
            rows_each, scale, last_dropped, index_offset, DROPOUT, BY_FOUR, CARRY, VECTOR, UNIT, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip


@triton.jit
def _backward_tile(
    grad_ptr, dx_ptr, seed, positions_ptr, first, start, rows, cols, grad_stride, rows_each,
    scale, last_dropped, index_offset,
    DROPOUT: tl.constexpr, BY_FOUR: tl.constexpr, CARRY: tl.constexpr, VECTOR: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Writes the tile of dx and returns it, zero outside of the tensor."""
    row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
    col = start + tl.arange(0, BLOCK_COLS)[None, :]
    mask = (row < rows) & (col >= 0) & (col < cols)
    dx = to_acc(tl.load(grad_ptr + row * aligned(grad_stride, UNIT) + col, mask=mask, other=0.0))
    if DROPOUT:
        start_of_rows = _first_index(index_offset, row, rows, cols, start, positions_ptr, rows_each)
        keep = keep_block(seed, index_offset, start_of_rows, last_dropped, BLOCK_COLS, BY_FOUR, CARRY, VECTOR)
        dx = tl.where(keep, dx * tl.cast(scale, dx.dtype), 0.0)
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    return dx


def _dropout(
    p: float, seed: Tensor | None, index_offset: int, row_positions: Tensor | None, rows: int, cols: int
) -> dict[str, object]:
    """What both kernels need to draw: words up to ``last_dropped`` are dropped, four columns drawn for at a time."""
    threshold = int(p * 2.0**32 + 0.5)
    dropout = seed is not None
    if dropout and threshold == 0:
        raise ValueError(f"bias_dropout_add: p = {p} drops nothing, so seed must be None")
    if row_positions is not None and rows >= 2**32:
        raise ValueError(f"bias_dropout_add: row_positions are for fewer than 2^32 rows, got {rows}")
    by_four = cols % 4 == 0
    return {
        "scale": 1.0 / (1.0 - p) if p < 1.0 else 0.0,
        "last_dropped": threshold - 1 if dropout else 0,
        "index_offset": index_offset,
        "DROPOUT": dropout,
        # Blocks start where four elements share a draw, even when the tensor does not.
        "SHIFT": index_offset % 4 if dropout and by_four else 0,
        "BY_FOUR": by_four,
        # Of tensors that reach over a multiple of 2^34 elements, as any positions may.
        "CARRY": dropout
        and (row_positions is not None or index_offset >> 34 != (index_offset + rows * cols - 1) >> 34),
        "rows_each": 1 if row_positions is None else rows // row_positions.shape[0],
    }


def forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, *, p: float, seed: Tensor | None,
    index_offset: int, row_positions: Tensor | None = None,
) -> None:  # fmt: skip
    """``y = residual + dropout(x + bias)``; ``y`` is contiguous, and may be x; no ``seed``, no dropout."""
    _forward(x, bias, residual, y, seed, row_positions, p=p, index_offset=index_offset)


@remembered
def _forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, seed: Tensor | None,
    row_positions: Tensor | None, *, p: float, index_offset: int,
) -> None:  # fmt: skip
    if x.numel() == 0:
        return
    x, rows, cols, x_stride = as_rows(x)
    has_residual, residual_stride = residual is not None, 0
    if residual is not None:
        residual, _, _, residual_stride = as_rows(residual)
    bias = None if bias is None else bias.contiguous()
    dtypes = (x.dtype, y.dtype, *(() if residual is None else (residual.dtype,)))
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    block_cols = vector_cols(narrow, NUM_WARPS)
    dropout = _dropout(p, seed, index_offset, row_positions, rows, cols)
    one_by_one = dropout["DROPOUT"] and not dropout["BY_FOUR"] and not has_residual
    block_rows = SHIFTED_ROWS if dropout["SHIFT"] or one_by_one else FORWARD_ROWS
    col_blocks = cdiv(cols + dropout["SHIFT"], block_cols)
    launch(
        _forward_kernel, (cdiv(rows, block_rows) * col_blocks,),
        x, bias, residual, y, seed, row_positions, rows, cols, col_blocks, x_stride, residual_stride,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=has_residual, VECTOR=16 // narrow.itemsize,
        UNIT=unit_of(cols, x_stride, residual_stride), BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
        num_warps=NUM_WARPS, **dropout,
    )  # fmt: skip


def backward(
    grad: Tensor, dx: Tensor, dbias: Tensor, *, p: float, seed: Tensor | None, index_offset: int,
    row_positions: Tensor | None = None,
) -> None:  # fmt: skip
    """``dx`` (left alone without a ``seed``; contiguous) and, if ``dbias`` has elements, its sum over rows."""
    _backward(grad, dx, dbias, seed, row_positions, p=p, index_offset=index_offset)


@remembered
def _backward(
    grad: Tensor, dx: Tensor, dbias: Tensor, seed: Tensor | None, row_positions: Tensor | None, *, p: float,
    index_offset: int,
) -> None:  # fmt: skip
    if grad.numel() == 0:
        dbias.zero_()
        return
    has_bias = dbias.numel() > 0
    if seed is None and not has_bias:
        return
    grad, rows, cols, grad_stride = as_rows(grad)
    dropout = _dropout(p, seed, index_offset, row_positions, rows, cols)
    narrow = grad.dtype if seed is None else min(grad.dtype, dx.dtype, key=lambda dtype: dtype.itemsize)
    widest = vector_cols(narrow, NUM_WARPS)
    block_cols = bias_gradient_cols(cols, narrow, NUM_WARPS) if has_bias else widest
    groups = widest // block_cols
    block_rows = groups * (SHIFTED_ROWS if dropout["SHIFT"] else BACKWARD_ROWS)
    col_blocks = cdiv(cols + dropout["SHIFT"], block_cols)
    splits = row_splits(rows, block_rows) if has_bias else cdiv(rows, block_rows)
    partial = partial_sums(cols, grad, splits) if has_bias else None
    workers = col_blocks * splits
    launch(
        _backward_kernel, (workers + (finishers(cols) if has_bias else 0),),
        grad, dx, partial, dbias if has_bias else None, counter(grad.device) if has_bias else None, seed, row_positions,
        rows, cols, col_blocks, splits, workers, grad_stride,
        HAS_BIAS=has_bias, VECTOR=16 // narrow.itemsize, UNIT=unit_of(cols, grad_stride),
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, GROUPS=groups, **finish_block(cols, NUM_WARPS),
        num_warps=NUM_WARPS, **dropout,
    )  # fmt: skip
