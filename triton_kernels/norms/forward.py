"""Forward of layer_norm and rms_norm: RMSNorm is LayerNorm with the mean held at zero and no bias (``CENTRED=False``).

Rows of up to ``MAX_FORWARD`` bytes stay in registers, several rows a program where they are narrow, so that x and the
residual are read once; between one use and the next they wait in their own dtype. Wider rows are read twice.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    aligned,
    as_rows,
    cdiv,
    next_power_of_2,
    quotient,
    reread,
    to_acc,
    unit_of,
)
from parallel_ops.triton_kernels._launch import launch, remembered

# Bytes of a row, and of its residual, that stay on chip: 64 registers a thread at 16 warps, half of what there is.
MAX_FORWARD = 128 * 1024
# Elements of a row that a warp takes, 32 a thread: what a row costs beside its elements, two sums over threads and a
# division, is 11 instructions an element at 16, half of all. Rows of up to 16,384 columns take at most 8 warps, so that
# several programs fit an SM.
WARP_COLS = 1024
NARROW = 16384
# Columns a step of the kernels for wide rows: 8 warps with 16 values a thread.
WIDE_BLOCK = 4096
WIDE_WARPS = 8


@triton.jit
def load(ptr, offset, mask):
    return to_acc(tl.load(ptr + offset, mask=mask, other=0.0))


@triton.jit
def scaled(x, kept, weight_ptr, col, mask, ZERO_CENTERED: tl.constexpr):
    """``x`` times the weight, ``kept`` or loaded, or one more where it is zero-centred; ``x`` without a weight."""
    if weight_ptr is None:
        return x
    else:
        weight = load(weight_ptr, col, mask) if kept is None else to_acc(reread(kept))
        return x * (weight + 1.0 if ZERO_CENTERED else weight)


@triton.jit
def reciprocal_root(x):
    """1 / sqrt(x), both rounded correctly: fp32's fast forms are off by up to 4 units in the last place together."""
    if x.dtype == tl.float64:
        return 1.0 / tl.sqrt(x)
    else:
        return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def _wide(x, acc: tl.constexpr):
    return x if x.dtype == acc else to_acc(reread(x))


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr,
    rows, cols, x_stride, residual_stride, eps: tl.float64, UNIT: tl.constexpr,
    CENTRED: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    CHUNKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    cols, x_stride = aligned(cols, UNIT), aligned(x_stride, UNIT)
    residual_stride = aligned(residual_stride, UNIT)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    in_rows = row < rows
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    kept = ()
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        mask = in_rows & (col < cols)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        if residual_ptr is not None:
            # Rounded before it is normalised, so that what is returned is what was normalised.
            wide = to_acc(x) + load(residual_ptr, row * residual_stride + col, mask)
            x = reread(wide.to(sum_ptr.dtype.element_ty))
            tl.store(sum_ptr + row * cols + col, x, mask=mask)
        wide = to_acc(x)
        kept += (wide if CHUNKS * BLOCK_COLS <= 8192 else x,)
        # Not a product and a sum: where a thread has one element of a row, the product would be contracted with the sum
        # over threads, and threads that share a row would get different bits.
        sums = (wide if chunk == 0 else sums + wide) if CENTRED else tl.fma(wide, wide, sums)
    mean = quotient(tl.sum(sums, axis=1, keep_dims=True), cols)
    variance = mean
    if CENTRED:
        tl.store(mean_ptr + row, mean, mask=in_rows)
        squares = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
        for chunk in tl.static_range(CHUNKS):
            col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
            x = _wide(kept[chunk], acc) - mean
            if not WHOLE and chunk == CHUNKS - 1:
                x = tl.where(col < cols, x, 0.0)
            squares = tl.fma(x, x, squares)
        variance = quotient(tl.sum(squares, axis=1, keep_dims=True), cols)
    rstd = reciprocal_root(variance + tl.cast(eps, acc))
    tl.store(rstd_ptr + row, rstd, mask=in_rows)
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        in_cols = col < cols
        x = _wide(kept[chunk], acc)
        if CENTRED:
            x -= mean
        y = scaled(x * rstd, None, weight_ptr, col, in_cols, ZERO_CENTERED)
        if bias_ptr is not None:
            y += load(bias_ptr, col, in_cols)
        tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=in_rows & in_cols)


@triton.jit
def _wide_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr,
    cols, x_stride, residual_stride, eps: tl.float64, UNIT: tl.constexpr,
    CENTRED: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """One row a program. The blocks' means and squares are joined by the formula of Chan, Golub and LeVeque."""
    cols, x_stride = aligned(cols, UNIT), aligned(x_stride, UNIT)
    residual_stride = aligned(residual_stride, UNIT)
    row = tl.program_id(0).to(tl.int64)
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    mean = tl.zeros((), dtype=acc)
    squares = tl.zeros((), dtype=acc)
    for first in range(0, cols, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)
        mask = col < cols
        x = load(x_ptr, row * x_stride + col, mask)
        if residual_ptr is not None:
            x += load(residual_ptr, row * residual_stride + col, mask)
            rounded = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * cols + col, rounded, mask=mask)
            x = to_acc(rounded)
        if CENTRED:
            count = tl.minimum(BLOCK_COLS, cols - first)
            block_mean = quotient(tl.sum(x), count)
            delta = block_mean - mean
            x = tl.where(mask, x - block_mean, 0.0)
            share = quotient(count.to(acc), first + count)
            squares += delta * delta * share * first
            mean += delta * share
        squares += tl.sum(x * x)
    rstd = reciprocal_root(quotient(squares, cols) + tl.cast(eps, acc))
    if CENTRED:
        tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    if residual_ptr is not None:
        tl.debug_barrier()  # other threads of this program wrote what is read back here
    for first in range(0, cols, BLOCK_COLS):
        col = first + tl.arange(0, BLOCK_COLS)
        mask = col < cols
        if residual_ptr is not None:
            x = load(sum_ptr, row * cols + col, mask)
        else:
            x = load(x_ptr, row * x_stride + col, mask)
        y = scaled((x - mean) * rstd, None, weight_ptr, col, mask, ZERO_CENTERED)
        if bias_ptr is not None:
            y += load(bias_ptr, col, mask)
        tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


def tile(cols: int, unit: int) -> dict[str, int | bool]:
    """Rows and columns of a chunk, chunks of a row, whether they fill it, and warps, for rows that stay on chip."""
    padded = max(16, next_power_of_2(cols))
    # Elements that come one by one each have an address, for which there is no place beside 32 of them.
    dense = unit >= 8
    if padded <= WARP_COLS:
        return {
            "BLOCK_ROWS": WARP_COLS // padded,
            "BLOCK_COLS": padded,
            "CHUNKS": 1,
            "WHOLE": padded == cols,
            "num_warps": 1 if dense else 2,
        }
    num_warps = min(8 if cols <= NARROW else 16, padded // WARP_COLS)
    # 32, 16 or 8 elements a thread, as they divide the row; longer rows would spill with 32.
    elements = (1024, 512) if cols <= NARROW and dense else (512,)
    block_cols = next((num_warps * n for n in elements if cols % (num_warps * n) == 0), num_warps * 256)
    return {
        "BLOCK_ROWS": 1,
        "BLOCK_COLS": block_cols,
        "CHUNKS": cdiv(cols, block_cols),
        "WHOLE": cols % block_cols == 0,
        "num_warps": num_warps,
    }


@remembered
def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, y: Tensor, total: Tensor,
    mean: Tensor | None, rstd: Tensor, *, eps: float, zero_centered: bool,
) -> None:  # fmt: skip
    """``y`` from ``x + residual``, which goes to ``total``; without a ``mean`` to write to, RMSNorm."""
    if x.numel() == 0:
        return
    x, rows, cols, x_stride = as_rows(x)
    residual_stride = 0
    if residual is not None:
        residual, _, _, residual_stride = as_rows(residual)
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    tensors = (x, residual, weight, bias, y, total, mean, rstd)
    sizes = (cols, x_stride, residual_stride, eps)
    flags = {"UNIT": unit_of(*sizes[:3]), "CENTRED": mean is not None, "ZERO_CENTERED": zero_centered}
    itemsize = x.dtype.itemsize if residual is None else 2 * total.dtype.itemsize
    if cols * itemsize > MAX_FORWARD:
        launch(_wide_forward_kernel, (rows,), *tensors, *sizes, **flags, BLOCK_COLS=WIDE_BLOCK, num_warps=WIDE_WARPS)
        return
    config = tile(cols, flags["UNIT"])
    grid = (cdiv(rows, config["BLOCK_ROWS"]),)
    launch(_forward_kernel, grid, *tensors, rows, *sizes, **flags, **config)
