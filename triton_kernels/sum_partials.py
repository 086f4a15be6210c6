"""sum_partials: the partials of all ranks, added in rank order in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import aligned, cdiv, next_power_of_2, tile_of, to_acc, unit_of, vector_cols
from parallel_ops.triton_kernels._launch import launch, remembered

NUM_WARPS = 4
# 16-byte loads that a thread has on their way: of one row from each of eight partials, or of more rows from fewer.
LOADS = 8
# Up to so many partials the loop over them is unrolled, so that the loads do not wait for the sums.
UNROLLED = 16
# Without a bias rows do not matter; fewer elements than this are one row, whose columns 32 bits count.
_ONE_ROW = 2**31 - 2**16


@triton.jit
def _sum_kernel(
    partials_ptr, bias_ptr, residual_ptr, y_ptr, count, rows, cols, col_blocks, stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, COUNT: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    cols = aligned(cols, UNIT)
    stride = aligned(stride, UNIT)
    row_block, col_block = tile_of(tl.program_id(0), col_blocks)
    row = row_block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = col_block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    mask = (row < rows) & (col < cols)
    at = row * cols + col
    total = to_acc(tl.load(partials_ptr + at, mask=mask))
    if COUNT > 0:
        for _ in tl.static_range(1, COUNT):
            partials_ptr += stride
            total += to_acc(tl.load(partials_ptr + at, mask=mask))
    else:
        for _ in range(1, count):
            partials_ptr += stride
            total += to_acc(tl.load(partials_ptr + at, mask=mask))
    if HAS_BIAS:
        total += tl.load(bias_ptr + col, mask=col < cols).to(total.dtype)
    if HAS_RESIDUAL:
        total += to_acc(tl.load(residual_ptr + at, mask=mask))
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)


@remembered
def sum_partials(partials: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor) -> None:
    """``y = partials[0] + partials[1] + ... + bias + residual``; ``y`` is contiguous."""
    if y.numel() == 0:
        return
    count, partials = partials.shape[0], partials.contiguous()
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    n = y.numel()
    cols = n if bias is None and n < _ONE_ROW else y.shape[-1]
    rows = n // cols
    unit = unit_of(cols)
    # Rows that do not begin at multiples of 16 bytes are read element by element, whose masks take registers.
    at_once = max(1, LOADS // next_power_of_2(count)) if unit * y.itemsize >= 16 else 1
    block_rows, block_cols = (1, at_once) if rows == 1 else (at_once, 1)
    block_cols *= vector_cols(y.dtype, NUM_WARPS)
    col_blocks = cdiv(cols, block_cols)
    launch(
        _sum_kernel, (cdiv(rows, block_rows) * col_blocks,),
        partials, bias, residual, y, count, rows, cols, col_blocks, n,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, COUNT=count if count <= UNROLLED else 0,
        UNIT=unit, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=NUM_WARPS,
    )  # fmt: skip
