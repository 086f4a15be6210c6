"""bias_gelu: one pass forward, one pass backward with the bias gradient summed on the way."""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    as_rows,
    cdiv,
    column_sum,
    partial_sums,
    row_splits,
    sigmoid,
    to_acc,
    vector_cols,
)
from parallel_ops.triton_kernels._launch import launch

NUM_WARPS = 4
# Four rows a program: four independent 16-byte loads in flight per thread and operand, and one load of the bias.
BLOCK_ROWS = 4


@triton.jit
def _gelu(z, TANH: tl.constexpr):
    """gelu(z) and its derivative; the tanh form as z sigmoid(2u), which does not cancel for negative z."""
    if TANH:
        k0 = 1.5957691216057308  # 2 sqrt(2/pi)
        k1 = 0.071354816272600416  # k0 * 0.044715
        s, s_slope = sigmoid(z * (k0 + k1 * z * z))
        return z * s, s + z * (k0 + 3.0 * k1 * z * z) * s_slope
    else:
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        return z * cdf, cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)


@triton.jit
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr, rows, cols, x_stride,
    HAS_BIAS: tl.constexpr, TANH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(cols, BLOCK_COLS)
    row = (tl.program_id(0) // col_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = (tl.program_id(0) % col_blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    mask = (row < rows) & (col < cols)
    z = to_acc(tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0))
    if HAS_BIAS:
        z += to_acc(tl.load(bias_ptr + col, mask=col < cols, other=0.0))
    y, _ = _gelu(z, TANH)
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, rows, cols, splits, grad_stride, x_stride,
    HAS_BIAS: tl.constexpr, TANH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    # Column blocks on the first axis of the grid, the only one that may be longer than 65,535.
    split = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    in_cols = col < cols
    if HAS_BIAS:
        bias = to_acc(tl.load(bias_ptr + col, mask=in_cols, other=0.0))
        total = tl.zeros((1, BLOCK_COLS), dtype=partial_ptr.dtype.element_ty)
    for first in range(split * BLOCK_ROWS, rows, splits * BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        mask = (row < rows) & in_cols
        grad = to_acc(tl.load(grad_ptr + row * grad_stride + col, mask=mask, other=0.0))
        z = to_acc(tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0))
        if HAS_BIAS:
            z += bias
        _, slope = _gelu(z, TANH)
        dx = grad * slope
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            total += tl.sum(tl.where(mask, dx, 0.0), axis=0, keep_dims=True)
    if HAS_BIAS:
        tl.store(partial_ptr + split.to(tl.int64) * cols + col, total, mask=in_cols)


def forward(x: Tensor, bias: Tensor | None, y: Tensor, *, tanh: bool) -> None:
    """``y = gelu(x + bias)``; ``y`` is contiguous."""
    if x.numel() == 0:
        return
    x, rows, cols, x_stride = as_rows(x)
    bias = None if bias is None else bias.contiguous()
    block_cols = vector_cols(x.dtype, NUM_WARPS)
    grid = (cdiv(rows, BLOCK_ROWS) * cdiv(cols, block_cols),)
    launch(
        _forward_kernel, grid,
        x, bias, y, rows, cols, x_stride,
        HAS_BIAS=bias is not None, TANH=tanh, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=block_cols, num_warps=NUM_WARPS,
    )  # fmt: skip


def backward(grad: Tensor, x: Tensor, bias: Tensor | None, dx: Tensor, dbias: Tensor, *, tanh: bool) -> None:
    """``dx = grad * gelu'(x + bias)`` and, with a bias, ``dbias``, its sum over rows; ``dx`` is contiguous."""
    if x.numel() == 0:
        dbias.zero_()
        return
    x, rows, cols, x_stride = as_rows(x)
    grad, _, _, grad_stride = as_rows(grad)
    bias = None if bias is None else bias.contiguous()
    splits = row_splits(rows, BLOCK_ROWS)
    partial = None if bias is None else partial_sums(cols, x, splits)
    block_cols = vector_cols(x.dtype, NUM_WARPS)
    launch(
        _backward_kernel, (cdiv(cols, block_cols), splits),
        grad, x, bias, dx, partial, rows, cols, splits, grad_stride, x_stride,
        HAS_BIAS=bias is not None, TANH=tanh,
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=block_cols, num_warps=NUM_WARPS,
    )  # fmt: skip
    if partial is not None:
        column_sum(partial, dbias)
