"""Backward of layer_norm and rms_norm.

Up to ``MAX_BACKWARD`` columns, ``ROW_SPLITS`` programs walk over the rows with the weight's and bias's gradients in
registers and loads running ahead through shared memory: x and the incoming gradients are read once. Past that width one
kernel takes the rows' two dot products, and a second, over blocks of columns, has all gradients: x and the gradient are
read twice. The order of summation is set by the shape alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import as_rows, cdiv, column_sum, partial_sums, row_splits, vector_cols
from parallel_ops.triton_kernels._launch import launch
from parallel_ops.triton_kernels._norm_forward import WIDE_BLOCK, WIDE_WARPS, blocks, load

# Columns up to which the backward keeps a row, its gradient and the parameters' gradients in registers: at twice as
# many LayerNorm and RMSNorm both spill.
MAX_BACKWARD = 8192
# Elements of a backward tile: 8 a thread at 16 warps. At 16 a thread several narrow rows a tile spill.
BACKWARD_TILE = 4096
# One 16-byte load a thread, operand and row, two rows at a time.
WIDE_BACKWARD_WARPS = 4


def _backward_stages(x: Tensor, tile: int) -> int:
    """Stages of the backward's loads: 64 KiB of x and the gradient under way while a tile is worked on.

    An H200 needs 25 KiB in flight on each multiprocessor (4.8 TB/s, 700 ns), where one program runs; the incoming
    gradient of the sum adds half as much again, which an A100's 163 KiB of shared memory still holds.
    """
    return 1 + max(1, 65536 // (2 * tile * x.dtype.itemsize))


@triton.jit
def _backward_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows, cols, grad_stride, grad_sum_stride, x_stride, HAS_SUM: tl.constexpr, HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    col = tl.arange(0, BLOCK_COLS)[None, :]
    in_cols = col < cols
    weight = load(weight_ptr, col, in_cols)
    if ZERO_CENTERED:
        weight += 1.0
    # Summed over a tile's rows only at the end: until then each thread adds to its own.
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=dweight_ptr.dtype.element_ty)
    if HAS_BIAS:
        dbias = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=dweight_ptr.dtype.element_ty)
    for first in tl.range(split * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        mask = (row < rows) & in_cols
        grad = load(grad_ptr, row * grad_stride + col, mask)
        xhat = load(x_ptr, row * x_stride + col, mask)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        if CENTRED:
            xhat = tl.where(in_cols, xhat - tl.load(mean_ptr + row, mask=row < rows, other=0.0), 0.0)
        xhat *= rstd
        g = grad * weight
        dx = g - xhat * (tl.sum(g * xhat, axis=1, keep_dims=True) / cols)
        if CENTRED:
            dx -= tl.sum(g, axis=1, keep_dims=True) / cols
        dx *= rstd
        if HAS_SUM:
            dx += load(grad_sum_ptr, row * grad_sum_stride + col, mask)
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dweight += grad * xhat
        if HAS_BIAS:
            dbias += grad
    offset = split.to(tl.int64) * cols + col
    tl.store(dweight_ptr + offset, tl.sum(dweight, axis=0, keep_dims=True), mask=in_cols)
    if HAS_BIAS:
        tl.store(dbias_ptr + offset, tl.sum(dbias, axis=0, keep_dims=True), mask=in_cols)


@triton.jit
def _wide_dots_kernel(
    grad_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dots_ptr, rows, cols, grad_stride, x_stride,
    CENTRED: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """One row a program: mean(g xhat) and, where centred, mean(g)."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    dot = tl.zeros((BLOCK_COLS,), dtype=rstd.dtype)
    total = tl.zeros((BLOCK_COLS,), dtype=rstd.dtype)
    mean = tl.load(mean_ptr + row) if CENTRED else rstd * 0.0
    for first in range(0, cols, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)
        mask = col < cols
        weight = load(weight_ptr, col, mask)
        if ZERO_CENTERED:
            weight += 1.0
        g = load(grad_ptr, row * grad_stride + col, mask) * weight
        dot += g * (tl.where(mask, load(x_ptr, row * x_stride + col, mask) - mean, 0.0) * rstd)
        total += g
    tl.store(dots_ptr + row, tl.sum(dot) / cols)
    if CENTRED:
        tl.store(dots_ptr + rows + row, tl.sum(total) / cols)


@triton.jit
def _wide_backward_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dots_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows, cols, grad_stride, grad_sum_stride, x_stride, HAS_SUM: tl.constexpr, HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A block of columns a program: with the rows' dot products known, nothing ties columns together any more."""
    split = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    in_cols = col < cols
    weight = load(weight_ptr, col, in_cols)
    if ZERO_CENTERED:
        weight += 1.0
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=dweight_ptr.dtype.element_ty)
    if HAS_BIAS:
        dbias = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=dweight_ptr.dtype.element_ty)
    for first in range(split * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        in_rows = row < rows
        mask = in_rows & in_cols
        grad = load(grad_ptr, row * grad_stride + col, mask)
        xhat = load(x_ptr, row * x_stride + col, mask)
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)
        if CENTRED:
            xhat -= tl.load(mean_ptr + row, mask=in_rows, other=0.0)
        xhat *= rstd
        dx = grad * weight - xhat * tl.load(dots_ptr + row, mask=in_rows, other=0.0)
        if CENTRED:
            dx -= tl.load(dots_ptr + rows + row, mask=in_rows, other=0.0)
        dx *= rstd
        if HAS_SUM:
            dx += load(grad_sum_ptr, row * grad_sum_stride + col, mask)
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dweight += grad * xhat
        if HAS_BIAS:
            dbias += grad
    offset = split.to(tl.int64) * cols + col
    tl.store(dweight_ptr + offset, tl.sum(dweight, axis=0, keep_dims=True), mask=in_cols)
    if HAS_BIAS:
        tl.store(dbias_ptr + offset, tl.sum(dbias, axis=0, keep_dims=True), mask=in_cols)


def _partial(x: Tensor, rows: int, cols: int, block_rows: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Partial sums of the weight's and the bias's gradients, one row for each program that has rows to sum."""
    splits = row_splits(rows, block_rows)
    return partial_sums(cols, x, splits), partial_sums(cols, x, splits) if has_bias else None


def backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
    dx: Tensor, dweight: Tensor, dbias: Tensor | None, *, zero_centered: bool,
) -> None:  # fmt: skip
    """Gradients of the input, the weight and, where ``dbias`` is given, the bias; ``x`` is what was normalised."""
    if x.numel() == 0:
        dweight.zero_()
        if dbias is not None:
            dbias.zero_()
        return
    x, rows, cols, x_stride = as_rows(x)
    grad, _, _, grad_stride = as_rows(grad)
    grad_sum_stride = 0
    if grad_sum is not None:
        grad_sum, _, _, grad_sum_stride = as_rows(grad_sum)
    weight = weight.contiguous()
    has_bias, centred = dbias is not None, mean is not None
    if cols > MAX_BACKWARD:
        block_rows, block_cols = 2, vector_cols(x.dtype, WIDE_BACKWARD_WARPS)
        partial_weight, partial_bias = _partial(x, rows, cols, block_rows, has_bias)
        dots = torch.empty((2, rows), dtype=rstd.dtype, device=x.device)
        launch(
            _wide_dots_kernel, (rows,),
            grad, x, weight, mean, rstd, dots, rows, cols, grad_stride, x_stride,
            CENTRED=centred, ZERO_CENTERED=zero_centered, BLOCK_COLS=WIDE_BLOCK, num_warps=WIDE_WARPS,
        )  # fmt: skip
        launch(
            _wide_backward_kernel, (len(partial_weight), cdiv(cols, block_cols)),
            grad, grad_sum, x, weight, mean, rstd, dots, dx, partial_weight, partial_bias,
            rows, cols, grad_stride, grad_sum_stride, x_stride,
            HAS_SUM=grad_sum is not None, HAS_BIAS=has_bias, CENTRED=centred, ZERO_CENTERED=zero_centered,
            BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=WIDE_BACKWARD_WARPS,
        )  # fmt: skip
    else:
        block_rows, block_cols, num_warps = blocks(cols, BACKWARD_TILE, per_thread=8)
        partial_weight, partial_bias = _partial(x, rows, cols, block_rows, has_bias)
        launch(
            _backward_kernel, (len(partial_weight),),
            grad, grad_sum, x, weight, mean, rstd, dx, partial_weight, partial_bias,
            rows, cols, grad_stride, grad_sum_stride, x_stride,
            HAS_SUM=grad_sum is not None, HAS_BIAS=has_bias, CENTRED=centred, ZERO_CENTERED=zero_centered,
            BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, STAGES=_backward_stages(x, block_rows * block_cols),
            num_warps=num_warps,
        )  # fmt: skip
    column_sum(partial_weight, dweight)
    if dbias is not None and partial_bias is not None:
        column_sum(partial_bias, dbias)
