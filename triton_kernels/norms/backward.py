"""Backward of layer_norm and rms_norm.

Programs, as many as run at once, walk over the rows with the gradients of weight and bias in registers and loads
running ahead through shared memory: x and the incoming gradient are read once. Where those sums leave no room for a
row, one kernel takes the rows' dot products and a second, over blocks of columns, has all gradients: x and the gradient
are read twice. The order of summation is set by the shape and the GPU. ``_finish`` sums the programs' parts in the same
launch.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    aligned,
    as_rows,
    cdiv,
    multiprocessors,
    next_power_of_2,
    partial_sums_of,
    quotient,
    reread,
    shared_memory,
    to_acc,
    unit_of,
)
from parallel_ops.triton_kernels._finish import arrive, counter, finish_block, finish_both, finishers
from parallel_ops.triton_kernels._launch import launch, remembered
from parallel_ops.triton_kernels.norms.backward_wide import wide_backward
from parallel_ops.triton_kernels.norms.forward import load, scaled

# Bytes of a row that fits beside the sums, and columns where there is a bias, which takes as many registers again.
MAX_BACKWARD = 32 * 1024
MAX_BACKWARD_BIAS = 12288
# Elements of a chunk of a row, or of several rows: 8 a thread, one 16-byte load of bf16.
WARPS = 8
CHUNK = 2048


@triton.jit
def _add_both(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _backward_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, narrow_dx_ptr, partial_dweight_ptr,
    partial_dbias_ptr, dweight_ptr, dbias_ptr, counter_ptr, workers,
    rows, cols, grad_stride, grad_sum_stride, x_stride, UNIT: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    FINISH_SPLITS: tl.constexpr, FINISH_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    cols, grad_stride = aligned(cols, UNIT), aligned(grad_stride, UNIT)
    grad_sum_stride, x_stride = aligned(grad_sum_stride, UNIT), aligned(x_stride, UNIT)
    split = tl.program_id(0)
    if counter_ptr is not None:
        if split >= workers:
            finish_both(
                partial_dweight_ptr, partial_dbias_ptr, dweight_ptr, dbias_ptr, counter_ptr, workers, workers, cols,
                FINISH_SPLITS, FINISH_COLS,
            )  # fmt: skip
            return
    acc: tl.constexpr = rstd_ptr.dtype.element_ty
    # Summed over a tile's rows only at the end: until then each thread adds to its own.
    dweight = ()
    dbias = ()
    weights = ()
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        dweight += (tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc),)
        dbias += (tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc),)
        if weight_ptr is not None:
            # By every row's threads: a load of one row would come in another layout, which all others would be given.
            every = tl.zeros((BLOCK_ROWS, 1), tl.int32) + col
            weights += (tl.load(weight_ptr + every, mask=every < cols, other=0.0),)
    for first in tl.range(split * BLOCK_ROWS, rows, workers * BLOCK_ROWS, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        in_rows = row < rows
        grads = ()
        xs = ()
        for chunk in tl.static_range(CHUNKS):
            col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
            # Chunks before the last are whole: rows of 32 KiB leave no register for a mask more.
            mask = in_rows & (col < cols) if chunk == CHUNKS - 1 else in_rows
            grads += (tl.load(grad_ptr + row * grad_stride + col, mask=mask, other=0.0),)
            xs += (tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0),)
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0)
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row, mask=in_rows, other=0.0)

        dots = tl.zeros((BLOCK_ROWS, BLOCK_COLS), acc)
        totals = dots
        for chunk in tl.static_range(CHUNKS):
            col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
            kept = weights[chunk] if weight_ptr is not None else None
            grad, x = to_acc(grads[chunk]), to_acc(xs[chunk])
            g = scaled(grad, kept, weight_ptr, col, col < cols, ZERO_CENTERED)
            if mean_ptr is not None:
                x -= mean
                totals = g if chunk == 0 else totals + g
            dots += g * x
        # dx = rstd (g - mean(g) - xhat mean(g xhat)), with the factors of a row gathered.
        shift = tl.zeros((BLOCK_ROWS, 1), acc)
        if mean_ptr is not None:
            dot, total = tl.reduce((dots, totals), 1, _add_both, keep_dims=True)
            shift = rstd * quotient(total, cols)
        else:
            dot = tl.sum(dots, axis=1, keep_dims=True)
        slope = rstd * quotient(dot * rstd, cols)

        new_dweight = ()
        new_dbias = ()
        for chunk in tl.static_range(CHUNKS):
            col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
            mask = in_rows & (col < cols) if chunk == CHUNKS - 1 else in_rows
            grad, xhat = to_acc(reread(grads[chunk])), to_acc(reread(xs[chunk]))
            if mean_ptr is not None:
                xhat -= mean
            xhat *= rstd
            kept = weights[chunk] if weight_ptr is not None else None
            dx = scaled(grad, kept, weight_ptr, col, col < cols, ZERO_CENTERED) * rstd - (xhat * slope + shift)
            if grad_sum_ptr is not None:
                dx += load(grad_sum_ptr, row * grad_sum_stride + col, mask)
            tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if narrow_dx_ptr is not None:
                tl.store(narrow_dx_ptr + row * cols + col, dx.to(narrow_dx_ptr.dtype.element_ty), mask=mask)
            new_dweight += (dweight[chunk] + grad * xhat if dweight_ptr is not None else dweight[chunk],)
            new_dbias += (dbias[chunk] + grad if dbias_ptr is not None else dbias[chunk],)
        dweight = new_dweight
        dbias = new_dbias
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        offset = split.to(tl.int64) * cols + col
        if dweight_ptr is not None:
            tl.store(partial_dweight_ptr + offset, tl.sum(dweight[chunk], axis=0, keep_dims=True), mask=col < cols)
        if dbias_ptr is not None:
            tl.store(partial_dbias_ptr + offset, tl.sum(dbias[chunk], axis=0, keep_dims=True), mask=col < cols)
    if counter_ptr is not None:
        arrive(counter_ptr)


def tile(cols: int) -> dict[str, int]:
    """Rows and columns of a chunk, and chunks of a row.

    Rows of up to 1,024 columns are one warp's each, whose sums need no barrier; of up to 2,048, two warps'.
    """
    padded = max(16, next_power_of_2(cols))
    block_cols = min(padded, max(256, padded // 4)) if cols <= CHUNK else CHUNK
    return {"BLOCK_ROWS": CHUNK // block_cols, "BLOCK_COLS": block_cols, "CHUNKS": cdiv(cols, block_cols)}


def _stages(tile_bytes: int, programs: int, staged: int, room: int) -> int:
    """Stages of the loads: 64 KiB of x and the gradient under way on each SM while a tile is worked on.

    An H200 needs 25 KiB in flight on each (4.8 TB/s, 700 ns); the incoming gradient of the sum adds half as much again,
    which an A100's 163 KiB of shared memory still holds. Fewer where ``room`` does not hold so many ``staged`` bytes:
    with one, loads go to registers.
    """
    return 1 + min(max(1, 65536 // (programs * tile_bytes)), room // staged)


def _room(x: Tensor, weight: Tensor | None, unit: int) -> int:
    """Bytes of shared memory for what is staged, beside a KiB for the sums of rows and what else is exchanged.

    Weights narrower than x, or rows that do not begin at 16 bytes, are loaded in other pieces than what is staged, so
    threads exchange each chunk of weights. In 99 KiB that has no place beside 96 of fp32.
    """
    apart = weight is not None and (weight.dtype.itemsize < x.dtype.itemsize or unit * x.dtype.itemsize < 16)
    return shared_memory(x.device) - 1024 - (CHUNK * max(4, x.dtype.itemsize) if apart else 0)


@remembered
def backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    dx: Tensor | None, narrow_dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, *, zero_centered: bool,
) -> None:  # fmt: skip
    """Gradients of what was normalised, of the weight and of the bias; without a ``mean``, RMSNorm.

    ``narrow_dx``, where there is one, gets what ``dx`` gets in its own dtype. Without ``dx`` the weight is not read.
    """
    if x.numel() == 0:
        for parameter in (dweight, dbias):
            if parameter is not None:
                parameter.zero_()
        return
    x, rows, cols, x_stride = as_rows(x)
    grad, _, _, grad_stride = as_rows(grad)
    grad_sum_stride = 0
    if dx is None:
        grad_sum = weight = None
    if grad_sum is not None:
        grad_sum, _, _, grad_sum_stride = as_rows(grad_sum)
    weight = None if weight is None else weight.contiguous()
    sizes = (rows, cols, grad_stride, grad_sum_stride, x_stride)
    flags = {"UNIT": unit_of(*sizes[1:]), "ZERO_CENTERED": zero_centered}

    sums = [gradient for gradient in (dweight, dbias) if gradient is not None]
    count = counter(x.device) if sums else None

    if (
        dx is not None
        and cols * x.dtype.itemsize <= MAX_BACKWARD
        and (dbias is None or x.dtype.itemsize > 2 or cols <= MAX_BACKWARD_BIAS)
    ):
        config = tile(cols)
        programs = 2 if config["CHUNKS"] <= 2 else 1  # as the sums leave registers
        splits = min(cdiv(rows, config["BLOCK_ROWS"]), programs * multiprocessors(x.device))
        elements = config["BLOCK_ROWS"] * config["BLOCK_COLS"] * config["CHUNKS"]
        staged = elements * sum(t.dtype.itemsize for t in (grad, grad_sum, x) if t is not None)
        stages = _stages(2 * elements * x.dtype.itemsize, programs, staged, _room(x, weight, flags["UNIT"]))
        launch(
            _backward_kernel, (splits + finishers(cols, len(sums)),),
            grad, grad_sum, x, weight, mean, rstd, dx, narrow_dx, *partial_sums_of(dweight, dbias, x, splits),
            dweight, dbias, count, splits, *sizes, **flags, **finish_block(cols, WARPS, len(sums)), **config,
            STAGES=stages, num_warps=WARPS,
        )  # fmt: skip
    else:
        wide_backward(grad, grad_sum, x, weight, mean, rstd, dx, narrow_dx, dweight, dbias, count, *sizes, **flags)
