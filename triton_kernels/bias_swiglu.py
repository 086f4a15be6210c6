"""bias_swiglu: one pass forward, one pass backward; both halves read and written in place, dbias summed on the way."""

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
# Rows a program: four independent 16-byte loads in flight per thread forward (two rows of two halves), six backward.
# The bf16 backward then takes 120 registers a thread for sm_90, so four blocks fit a multiprocessor; with four rows it
# takes 185, and two fit.
BLOCK_ROWS = 2


@triton.jit
def _forward_kernel(
    x_ptr, bias_ptr, y_ptr, rows, cols, x_stride,
    HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(cols, BLOCK_COLS)
    row = (tl.program_id(0) // col_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = (tl.program_id(0) % col_blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    mask = (row < rows) & (col < cols)
    gate = to_acc(tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0))
    up = to_acc(tl.load(x_ptr + cols + row * x_stride + col, mask=mask, other=0.0))
    if HAS_BIAS:
        gate += to_acc(tl.load(bias_ptr + col, mask=col < cols, other=0.0))
        up += to_acc(tl.load(bias_ptr + cols + col, mask=col < cols, other=0.0))
    s, _ = sigmoid(gate)
    tl.store(y_ptr + row * cols + col, (gate * s * up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, rows, cols, splits, grad_stride, x_stride,
    HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    # Column blocks on the first axis of the grid, the only one that may be longer than 65,535.
    split = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    in_cols = col < cols
    if HAS_BIAS:
        gate_bias = to_acc(tl.load(bias_ptr + col, mask=in_cols, other=0.0))
        up_bias = to_acc(tl.load(bias_ptr + cols + col, mask=in_cols, other=0.0))
        gate_total = tl.zeros((1, BLOCK_COLS), dtype=partial_ptr.dtype.element_ty)
        up_total = tl.zeros((1, BLOCK_COLS), dtype=partial_ptr.dtype.element_ty)
    for first in range(split * BLOCK_ROWS, rows, splits * BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        mask = (row < rows) & in_cols
        grad = to_acc(tl.load(grad_ptr + row * grad_stride + col, mask=mask, other=0.0))
        gate = to_acc(tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0))
        up = to_acc(tl.load(x_ptr + cols + row * x_stride + col, mask=mask, other=0.0))
        if HAS_BIAS:
            gate += gate_bias
            up += up_bias
        s, slope = sigmoid(gate)
        dgate = grad * up * (s + gate * slope)
        dup = grad * (gate * s)
        dx_row = dx_ptr + 2 * row * cols
        tl.store(dx_row + col, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_row + cols + col, dup.to(dx_ptr.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            gate_total += tl.sum(tl.where(mask, dgate, 0.0), axis=0, keep_dims=True)
            up_total += tl.sum(tl.where(mask, dup, 0.0), axis=0, keep_dims=True)
    if HAS_BIAS:
        partial_row = partial_ptr + split.to(tl.int64) * 2 * cols
        tl.store(partial_row + col, gate_total, mask=in_cols)
        tl.store(partial_row + cols + col, up_total, mask=in_cols)


def forward(x: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """``y = silu(gate) * up`` for the halves of ``x + bias``; ``y`` is contiguous."""
    if y.numel() == 0:
        return
    x, rows, width, x_stride = as_rows(x)
    cols = width // 2
    bias = None if bias is None else bias.contiguous()
    block_cols = vector_cols(x.dtype, NUM_WARPS)
    grid = (cdiv(rows, BLOCK_ROWS) * cdiv(cols, block_cols),)
    launch(
        _forward_kernel, grid,
        x, bias, y, rows, cols, x_stride,
        HAS_BIAS=bias is not None, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=block_cols, num_warps=NUM_WARPS,
    )  # fmt: skip


def backward(grad: Tensor, x: Tensor, bias: Tensor | None, dx: Tensor, dbias: Tensor) -> None:
    """``dx``, and with a bias ``dbias``, its sum over rows; ``dx`` is contiguous and has the shape of ``x``."""
    if x.numel() == 0:
        dbias.zero_()
        return
    x, rows, width, x_stride = as_rows(x)
    grad, _, cols, grad_stride = as_rows(grad)
    bias = None if bias is None else bias.contiguous()
    splits = row_splits(rows, BLOCK_ROWS)
    partial = None if bias is None else partial_sums(width, x, splits)
    block_cols = vector_cols(x.dtype, NUM_WARPS)
    launch(
        _backward_kernel, (cdiv(cols, block_cols), splits),
        grad, x, bias, dx, partial, rows, cols, splits, grad_stride, x_stride,
        HAS_BIAS=bias is not None, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=block_cols,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    if partial is not None:
        column_sum(partial, dbias)
