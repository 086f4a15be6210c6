"""Forward of layer_norm and rms_norm: RMSNorm is LayerNorm with the mean held at zero and no bias (``CENTRED=False``).

Rows of up to ``MAX_FORWARD`` columns stay in registers, several rows a program where they are narrow, so that x and the
residual are read once. Wider rows are read twice, the second time from the second-level cache: 132 programs with rows
of 128 KiB are 17 MiB.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import as_rows, cdiv, next_power_of_2, to_acc
from parallel_ops.triton_kernels._launch import launch

# Columns that stay on chip in the forward: 16 warps hold 32 fp32 values a thread beside as many weights in flight.
MAX_FORWARD = 16384
# Elements of a forward tile: 16 a thread at 4 warps, two or four independent 16-byte loads each.
FORWARD_TILE = 2048
# Columns a step of the kernels for wide rows: 8 warps with 16 values a thread.
WIDE_BLOCK = 4096
WIDE_WARPS = 8


@triton.jit
def load(ptr, offset, mask):
    return to_acc(tl.load(ptr + offset, mask=mask, other=0.0))


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr,
    rows, cols, x_stride, residual_stride, eps, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    in_cols = col < cols
    mask = (row < rows) & in_cols
    x = load(x_ptr, row * x_stride + col, mask)
    if HAS_RESIDUAL:
        x += load(residual_ptr, row * residual_stride + col, mask)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * cols + col, rounded, mask=mask)
        x = to_acc(rounded)
    if CENTRED:
        mean = tl.sum(x, axis=1, keep_dims=True) / cols
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(in_cols, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / cols + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    weight = load(weight_ptr, col, in_cols)
    if ZERO_CENTERED:
        weight += 1.0
    y = x * rstd * weight
    if HAS_BIAS:
        y += load(bias_ptr, col, in_cols)
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _wide_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, cols, x_stride, residual_stride, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """One row a program. The blocks' means and squares are joined by the formula of Chan, Golub and LeVeque."""
    row = tl.program_id(0).to(tl.int64)
    mean = tl.zeros((), dtype=mean_ptr.dtype.element_ty if CENTRED else rstd_ptr.dtype.element_ty)
    squares = tl.zeros((), dtype=rstd_ptr.dtype.element_ty)
    for first in range(0, cols, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)
        mask = col < cols
        x = load(x_ptr, row * x_stride + col, mask)
        if HAS_RESIDUAL:
            x += load(residual_ptr, row * residual_stride + col, mask)
            rounded = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * cols + col, rounded, mask=mask)
            x = to_acc(rounded)
        if CENTRED:
            count = tl.minimum(BLOCK_COLS, cols - first)
            block_mean = tl.sum(x) / count
            delta = block_mean - mean
            x = tl.where(mask, x - block_mean, 0.0)
            share = count.to(mean.dtype) / (first + count)
            squares += delta * delta * share * first
            mean += delta * share
        squares += tl.sum(x * x)
    rstd = 1.0 / tl.sqrt(squares / cols + eps)
    if CENTRED:
        tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    if HAS_RESIDUAL:
        tl.debug_barrier()  # other threads of this program wrote what is read back here
    for first in range(0, cols, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)
        mask = col < cols
        x = load(sum_ptr, row * cols + col, mask) if HAS_RESIDUAL else load(x_ptr, row * x_stride + col, mask)
        weight = load(weight_ptr, col, mask)
        if ZERO_CENTERED:
            weight += 1.0
        y = (x - mean) * rstd * weight
        if HAS_BIAS:
            y += load(bias_ptr, col, mask)
        tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


def blocks(cols: int, tile: int, per_thread: int) -> tuple[int, int, int]:
    """Rows and columns of a tile of about ``tile`` elements that holds whole rows, and its warps."""
    block_cols = max(16, next_power_of_2(cols))
    block_rows = max(1, tile // block_cols)
    return block_rows, block_cols, min(16, max(4, block_rows * block_cols // (32 * per_thread)))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, total: Tensor,
    mean: Tensor | None, rstd: Tensor, *, eps: float, zero_centered: bool,
) -> None:  # fmt: skip
    """``y`` from ``x + residual``, which goes to ``total``; without a ``mean`` to write to, RMSNorm."""
    if x.numel() == 0:
        return
    x, rows, cols, x_stride = as_rows(x)
    residual_stride = 0
    if residual is not None:
        residual, _, _, residual_stride = as_rows(residual)
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    tensors = (x, residual, weight, bias, y, total, mean, rstd)
    flags = {
        "HAS_RESIDUAL": residual is not None,
        "HAS_BIAS": bias is not None,
        "CENTRED": mean is not None,
        "ZERO_CENTERED": zero_centered,
    }
    if cols > MAX_FORWARD:
        launch(
            _wide_forward_kernel, (rows,),
            *tensors, cols, x_stride, residual_stride, eps, **flags, BLOCK_COLS=WIDE_BLOCK, num_warps=WIDE_WARPS,
        )  # fmt: skip
        return
    block_rows, block_cols, num_warps = blocks(cols, FORWARD_TILE, per_thread=16)
    launch(
        _forward_kernel, (cdiv(rows, block_rows),),
        *tensors, rows, cols, x_stride, residual_stride, eps, **flags,
        BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols, num_warps=num_warps,
    )  # fmt: skip
