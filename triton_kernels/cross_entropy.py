"""cross_entropy: row statistics with each logit read once, their combination, and the gradient in a second pass; or all
of it in one kernel, for which the logits cross the memory bus once each way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import (
    aligned,
    as_rows,
    cdiv,
    next_power_of_2,
    tile_of,
    to_acc,
    unit_of,
    vector_cols,
)
from parallel_ops.triton_kernels._launch import launch
from parallel_ops.triton_kernels._math import capped, exp_nonpositive

# A program's part of a row stays in registers between its maximum and its sum: 8 warps with 64 fp32 values a thread,
# so that what a program does beside its elements is a quarter of its instructions. Longer rows are cut into such parts,
# whose statistics a second, tiny kernel merges.
PART_COLS = 16384
PART_COLS_FP64 = 4096
PART_ELEMENTS = 64
# The gradient has nothing to keep: 8 warps with four 16-byte accesses in flight per thread.
GRADIENT_WARPS = 8
GRADIENT_LOADS = 4
MERGE_ROWS = 128
# In one kernel a program has a whole row, in registers up to 64 bytes a thread. A longer one it reads twice, the second
# time from the L2 cache: programs of 32 warps with more than 32 registers a thread, so one a multiprocessor, keep 132
# rows of 131,072 bf16 logits there, 35 MB of an H100's 50.
ROW_WARPS = 32

# What `column` says of a row instead of a column of this shard.
ON_ANOTHER_SHARD = tl.constexpr(-1)
IGNORED = tl.constexpr(-2)
INVALID = tl.constexpr(-3)

# Options are fp64 for fp64 logits, and values that change do not compile a kernel each.
_OPTIONS = ["label_smoothing", "z_loss", "cap"]


@triton.jit
def _load(pointers, col, cols, EVEN: tl.constexpr, other):
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=col < cols, other=other)


@triton.jit
def _column(target, start, vocab, cols, ignore_index, IGNORE_INVALID: tl.constexpr):
    """Where the target of a row is."""
    target = target.to(tl.int64)
    valid = (target >= 0) & (target < vocab)
    here = valid & (target >= start) & (target - start < cols)
    column = tl.where(here, target - start, ON_ANOTHER_SHARD)
    column = tl.where(valid, column, IGNORED if IGNORE_INVALID else INVALID)
    return tl.where(target == ignore_index, IGNORED, column)


@triton.jit
def _part_statistics(z, col, cols, weight_ptr, EVEN: tl.constexpr, SMOOTHING: tl.constexpr, WEIGHTED: tl.constexpr):
    """(max, sum of exp(z - max), sum, count, sum of class weights) of a part of a row.

    The errors of fast exponentials are lost in the sum, for fp32 logits too.
    """
    largest = tl.max(z, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # -inf - -inf would be NaN
    exps = tl.sum(exp_nonpositive(z - base, True), axis=0)
    total, count, weights = exps, exps, exps
    if SMOOTHING:
        there = z != float("-inf")
        total = tl.sum(tl.where(there, z, 0.0), axis=0)
        count = tl.sum(tl.where(there, 1.0, 0.0).to(z.dtype), axis=0)
    if WEIGHTED:
        there = z != float("-inf")
        w = tl.where(there, _load(weight_ptr + col, col, cols, EVEN, 0.0).to(z.dtype), 0.0)
        total = tl.sum(tl.where(there, w * z, 0.0), axis=0)
        weights = tl.sum(w, axis=0)
    return largest, exps, total, count, weights


@triton.jit(do_not_specialize=["cap"])
def _statistics_kernel(
    x_ptr, target_ptr, weight_ptr, out_ptr, column_ptr, rows, cols, x_stride, start, vocab, ignore_index, parts,
    cap: tl.float64,
    IGNORE_INVALID: tl.constexpr, SOFTCAP: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row, part = tile_of(tl.program_id(0), parts)
    row = row.to(tl.int64)
    cols = aligned(cols, UNIT)
    first = part * BLOCK_COLS
    col = first + tl.arange(0, BLOCK_COLS)
    x_ptr += row * aligned(x_stride, UNIT)
    z = to_acc(_load(x_ptr + col, col, cols, EVEN, float("-inf")))
    if SOFTCAP:
        z, _ = capped(z, cap)
    largest, exps, total, count, weights = _part_statistics(z, col, cols, weight_ptr, EVEN, WIDTH > 3, WIDTH > 5)

    column = _column(tl.load(target_ptr + row), start, vocab, cols, ignore_index, IGNORE_INVALID)
    in_part = (column >= first) & (column < first + BLOCK_COLS)
    at_target = to_acc(tl.load(x_ptr + column, mask=in_part, other=0.0))
    if SOFTCAP:
        at_target, _ = capped(at_target, cap)
        at_target = tl.where(in_part, at_target, 0.0)

    out = out_ptr + part.to(tl.int64) * WIDTH * rows + row
    tl.store(out, largest)
    tl.store(out + rows, exps)
    tl.store(out + 2 * rows, at_target)
    if WIDTH > 3:
        tl.store(out + 3 * rows, total)
        tl.store(out + 4 * rows, count)
    if WIDTH > 5:
        tl.store(out + 5 * rows, tl.load(weight_ptr + column, mask=in_part, other=0.0).to(z.dtype))
        tl.store(out + 6 * rows, weights)
    if part == 0:
        tl.store(column_ptr + row, column)


@triton.jit
def _merge(in_ptr, parts, rows, row, mask, WIDTH: tl.constexpr):
    """The statistics of all parts, added in order; those that are not there are of no use."""
    largest = tl.load(in_ptr + row, mask=mask, other=0.0)
    exps = tl.load(in_ptr + rows + row, mask=mask, other=1.0)
    at_target = tl.load(in_ptr + 2 * rows + row, mask=mask, other=0.0)
    total, count, target_weight, weights = exps, exps, exps, exps
    if WIDTH > 3:
        total = tl.load(in_ptr + 3 * rows + row, mask=mask, other=0.0)
        count = tl.load(in_ptr + 4 * rows + row, mask=mask, other=1.0)
    if WIDTH > 5:
        target_weight = tl.load(in_ptr + 5 * rows + row, mask=mask, other=0.0)
        weights = tl.load(in_ptr + 6 * rows + row, mask=mask, other=0.0)
    p = in_ptr + row
    for _ in range(1, parts):
        p += WIDTH * rows
        largest, exps = _joined(
            largest, exps, tl.load(p, mask=mask, other=0.0), tl.load(p + rows, mask=mask, other=0.0)
        )
        at_target += tl.load(p + 2 * rows, mask=mask, other=0.0)
        if WIDTH > 3:
            total += tl.load(p + 3 * rows, mask=mask, other=0.0)
            count += tl.load(p + 4 * rows, mask=mask, other=0.0)
        if WIDTH > 5:
            target_weight += tl.load(p + 5 * rows, mask=mask, other=0.0)
            weights += tl.load(p + 6 * rows, mask=mask, other=0.0)
    return largest, exps, at_target, total, count, target_weight, weights


@triton.jit
def _joined(largest, exps, other, other_exps):
    """Maximum and sum of exponentials of two parts together."""
    joint = tl.where(other > largest, other, largest)
    base = tl.where(joint == float("-inf"), 0.0, joint)
    exps = exps * exp_nonpositive(largest - base, False) + other_exps * exp_nonpositive(other - base, False)
    return joint, exps


@triton.jit
def _merge_kernel(in_ptr, out_ptr, parts, rows, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = row < rows
    largest, exps, at_target, total, count, target_weight, weights = _merge(in_ptr, parts, rows, row, mask, WIDTH)
    tl.store(out_ptr + row, largest, mask=mask)
    tl.store(out_ptr + rows + row, exps, mask=mask)
    tl.store(out_ptr + 2 * rows + row, at_target, mask=mask)
    if WIDTH > 3:
        tl.store(out_ptr + 3 * rows + row, total, mask=mask)
        tl.store(out_ptr + 4 * rows + row, count, mask=mask)
    if WIDTH > 5:
        tl.store(out_ptr + 5 * rows + row, target_weight, mask=mask)
        tl.store(out_ptr + 6 * rows + row, weights, mask=mask)


@triton.jit
def _store_loss(
    loss_ptr, saved_ptr, row, rows, mask, column, largest, exps, at_target, total, count, target_weight, weights,
    label_smoothing, z_loss, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes the losses of rows and what their gradients need, and returns the logarithms of ``exps``."""
    eps, z_loss = tl.cast(label_smoothing, exps.dtype), tl.cast(z_loss, exps.dtype)
    log_exps = tl.log(exps)
    lse = largest + log_exps
    # Differences from the maximum first: at logits of 1e4, lse itself has only three decimals in fp32.
    loss = (largest - at_target) + log_exps
    if WIDTH > 5:
        spread = ((largest * weights - total) + log_exps * weights) / count
        loss = (1.0 - eps) * target_weight * loss + tl.where(eps == 0.0, 0.0, eps * spread)
    elif WIDTH > 3:
        loss = (1.0 - eps) * loss + eps * ((largest - total / count) + log_exps)
    loss += tl.where(z_loss == 0.0, 0.0, z_loss * lse * lse)  # lse^2 may overflow
    loss = tl.where(column == IGNORED, 0.0, loss)
    loss = tl.where(column == INVALID, float("nan"), loss)
    tl.store(loss_ptr + row, loss, mask=mask)
    tl.store(saved_ptr + row, largest, mask=mask)
    tl.store(saved_ptr + rows + row, log_exps, mask=mask)
    tl.store(saved_ptr + 2 * rows + row, at_target, mask=mask)
    if WIDTH > 3:
        tl.store(saved_ptr + 3 * rows + row, count, mask=mask)
    if WIDTH > 5:
        tl.store(saved_ptr + 4 * rows + row, target_weight, mask=mask)
        tl.store(saved_ptr + 5 * rows + row, weights, mask=mask)
    return log_exps


@triton.jit(do_not_specialize=["label_smoothing", "z_loss"])
def _combine_kernel(
    in_ptr, column_ptr, loss_ptr, saved_ptr, shards, rows, label_smoothing: tl.float64, z_loss: tl.float64,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = row < rows
    largest, exps, at_target, total, count, target_weight, weights = _merge(in_ptr, shards, rows, row, mask, WIDTH)
    column = tl.load(column_ptr + row, mask=mask, other=0)
    _store_loss(
        loss_ptr, saved_ptr, row, rows, mask, column, largest, exps, at_target, total, count, target_weight, weights,
        label_smoothing, z_loss, WIDTH,
    )  # fmt: skip


@triton.jit
def _gradient(
    x, col, cols, weight_ptr, target, grad, largest, log_exps, count, target_weight, weights,
    label_smoothing, z_loss, cap,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gradient of a part of a row of logits."""
    z = to_acc(x)
    eps, z_loss = tl.cast(label_smoothing, z.dtype), tl.cast(z_loss, z.dtype)
    slope = z
    if SOFTCAP:
        z, slope = capped(z, cap)
    p = exp_nonpositive((z - largest) - log_exps, FAST)
    of_target = 1.0 - eps
    uniform = eps / count if SMOOTHING else eps
    share = p
    if WEIGHTED:
        of_target *= target_weight
        share = p * (of_target + (uniform * weights if SMOOTHING else 0.0))
    weight = tl.where(col == target, of_target, 0.0)
    if SMOOTHING:
        if WEIGHTED:
            weight += uniform * _load(weight_ptr + col, col, cols, EVEN, 0.0).to(z.dtype)
        else:
            weight += uniform
        weight = tl.where(z == float("-inf"), 0.0, weight)
    # The difference comes first: at p = weight it is exactly zero, and the z-loss keeps its digits.
    dx = grad * (share - weight) + grad * 2.0 * z_loss * (largest + log_exps) * p
    if SOFTCAP:
        dx *= slope
    return dx


@triton.jit(do_not_specialize=_OPTIONS)
def _backward_kernel(
    grad_ptr, x_ptr, weight_ptr, column_ptr, saved_ptr, dx_ptr, rows, cols, blocks, grad_stride, x_stride,
    label_smoothing: tl.float64, z_loss: tl.float64, cap: tl.float64,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row, block = tile_of(tl.program_id(0), blocks)
    row = row.to(tl.int64)
    cols = aligned(cols, UNIT)
    fast: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    col = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    target = tl.load(column_ptr + row)
    largest = tl.load(saved_ptr + row)
    count, target_weight, weights = largest, largest, largest
    if SMOOTHING:
        count = tl.load(saved_ptr + 3 * rows + row)
    if WEIGHTED:
        target_weight = tl.load(saved_ptr + 4 * rows + row)
        weights = tl.load(saved_ptr + 5 * rows + row)
    x = _load(x_ptr + row * aligned(x_stride, UNIT) + col, col, cols, EVEN, 0.0)
    grad = tl.load(grad_ptr + row * grad_stride)
    dx = _gradient(
        x, col, cols, weight_ptr, target, grad, largest, tl.load(saved_ptr + rows + row), count, target_weight, weights,
        label_smoothing, z_loss, cap, SOFTCAP, SMOOTHING, WEIGHTED, EVEN, fast,
    )  # fmt: skip
    _store_gradient(dx_ptr + row * cols + col, col, cols, dx, target, EVEN)


@triton.jit
def _store_gradient(pointers, col, cols, dx, target, EVEN: tl.constexpr):
    """Writes ``dx``, or zeros or NaN for a target that is not one."""
    if target <= IGNORED:
        dx = tl.zeros_like(dx) + tl.where(target == IGNORED, 0.0, float("nan")).to(dx.dtype)
    if EVEN:
        tl.store(pointers, dx.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, dx.to(pointers.dtype.element_ty), mask=col < cols)


@triton.jit(do_not_specialize=_OPTIONS)
def _with_gradient_kernel(
    x_ptr, target_ptr, weight_ptr, scale_ptr, loss_ptr, column_ptr, saved_ptr, dx_ptr, rows, cols, x_stride,
    ignore_index, label_smoothing: tl.float64, z_loss: tl.float64, cap: tl.float64,
    IGNORE_INVALID: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = aligned(cols, UNIT)
    fast: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    x_ptr += row * aligned(x_stride, UNIT)
    dx_ptr += row * cols
    col = tl.arange(0, BLOCK_COLS)
    x = _load(x_ptr + col, col, cols, EVEN, float("-inf"))
    z = to_acc(x)
    if SOFTCAP:
        z, _ = capped(z, cap)
    largest, exps, total, count, weights = _part_statistics(z, col, cols, weight_ptr, EVEN, WIDTH > 3, WIDTH > 5)
    if not WHOLE:
        for first in range(BLOCK_COLS, cols, BLOCK_COLS):
            part = first + col
            z = to_acc(_load(x_ptr + part, part, cols, EVEN, float("-inf")))
            if SOFTCAP:
                z, _ = capped(z, cap)
            other, other_exps, other_total, other_count, other_weights = _part_statistics(
                z, part, cols, weight_ptr, EVEN, WIDTH > 3, WIDTH > 5
            )
            largest, exps = _joined(largest, exps, other, other_exps)
            total += other_total
            count += other_count
            weights += other_weights

    target = _column(tl.load(target_ptr + row), 0, cols, cols, ignore_index, IGNORE_INVALID)
    here = target >= 0
    at_target = to_acc(tl.load(x_ptr + target, mask=here, other=0.0))
    if SOFTCAP:
        at_target, _ = capped(at_target, cap)
    at_target = tl.where(here, at_target, 0.0)
    target_weight = at_target
    if WIDTH > 5:
        target_weight = tl.load(weight_ptr + target, mask=here, other=0.0).to(at_target.dtype)
    log_exps = _store_loss(
        loss_ptr, saved_ptr, row, rows, True, target, largest, exps, at_target, total, count, target_weight, weights,
        label_smoothing, z_loss, WIDTH,
    )  # fmt: skip
    tl.store(column_ptr + row, target)
    grad = tl.load(scale_ptr)
    tl.debug_barrier()  # dx may be x: its target has been read by all threads
    if WHOLE:
        dx = _gradient(
            x, col, cols, weight_ptr, target, grad, largest, log_exps, count, target_weight, weights,
            label_smoothing, z_loss, cap, SOFTCAP, SMOOTHING, WIDTH > 5, EVEN, fast,
        )  # fmt: skip
        _store_gradient(dx_ptr + col, col, cols, dx, target, EVEN)
    else:
        for first in range(0, cols, BLOCK_COLS):
            part = first + col
            x = _load(x_ptr + part, part, cols, EVEN, float("-inf"))
            dx = _gradient(
                x, part, cols, weight_ptr, target, grad, largest, log_exps, count, target_weight, weights,
                label_smoothing, z_loss, cap, SOFTCAP, SMOOTHING, WIDTH > 5, EVEN, fast,
            )  # fmt: skip
            _store_gradient(dx_ptr + part, part, cols, dx, target, EVEN)


@triton.jit
def _scale_kernel(gradient_ptr, factor_ptr, elements, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = index < aligned(elements, UNIT)
        scaled = to_acc(tl.load(gradient_ptr + index, mask=mask)) * factor
        tl.store(gradient_ptr + index, scaled.to(gradient_ptr.dtype.element_ty), mask=mask)


def statistics(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, out: Tensor, column: Tensor,
    *, start: int, vocab: int, ignore_index: int, ignore_invalid: bool, softcap: float,
) -> None:  # fmt: skip
    """Fills ``out`` ``[3, 5 or 7, rows]`` and ``column`` ``[rows]``; ``target`` is contiguous."""
    width, rows = out.shape
    if rows == 0:
        return
    x, _, cols, x_stride = as_rows(logits)
    limit = PART_COLS_FP64 if logits.dtype is torch.float64 else PART_COLS
    block_cols = min(limit, next_power_of_2(max(cols, 1)))
    parts = max(1, cdiv(cols, block_cols))
    part_out = out if parts == 1 else out.new_empty((parts, width, rows))
    launch(
        _statistics_kernel, (rows * parts,),
        x, target, _contiguous(class_weight), part_out, column, rows, cols, x_stride, start, vocab, ignore_index, parts,
        softcap,
        IGNORE_INVALID=ignore_invalid, SOFTCAP=softcap > 0.0, WIDTH=width, EVEN=cols % block_cols == 0 and cols > 0,
        UNIT=unit_of(cols, x_stride), BLOCK_COLS=block_cols, num_warps=max(1, block_cols // (32 * PART_ELEMENTS)),
    )  # fmt: skip
    if parts > 1:
        launch(
            _merge_kernel, (cdiv(rows, MERGE_ROWS),),
            part_out, out, parts, rows, WIDTH=width, BLOCK_ROWS=MERGE_ROWS, num_warps=4,
        )  # fmt: skip


def combine(
    statistics: Tensor, column: Tensor, loss: Tensor, saved: Tensor, *, label_smoothing: float, z_loss: float
) -> None:
    """``statistics`` ``[shards, 3, 5 or 7, rows]`` to ``loss`` ``[rows]`` and ``saved`` ``[3, 4 or 6, rows]``."""
    shards, width, rows = statistics.shape
    if rows == 0:
        return
    launch(
        _combine_kernel, (cdiv(rows, MERGE_ROWS),),
        statistics.contiguous(), column, loss, saved, shards, rows, label_smoothing, z_loss,
        WIDTH=width, BLOCK_ROWS=MERGE_ROWS, num_warps=4,
    )  # fmt: skip


def backward(
    grad: Tensor, logits: Tensor, class_weight: Tensor | None, column: Tensor, saved: Tensor, out: Tensor,
    *, label_smoothing: float, z_loss: float, softcap: float,
) -> None:  # fmt: skip
    """The gradient of the logits; ``out`` is contiguous and may be ``logits`` itself."""
    if logits.numel() == 0:
        return
    x, rows, cols, x_stride = as_rows(logits)
    grad = grad.reshape(-1)
    vector = vector_cols(logits.dtype, GRADIENT_WARPS)
    block_cols = min(GRADIENT_LOADS * vector, max(vector, next_power_of_2(cols)))
    blocks = cdiv(cols, block_cols)
    launch(
        _backward_kernel, (rows * blocks,),
        grad, x, _contiguous(class_weight), column, saved, out, rows, cols, blocks, grad.stride(0), x_stride,
        label_smoothing, z_loss, softcap,
        SOFTCAP=softcap > 0.0, SMOOTHING=label_smoothing != 0.0, WEIGHTED=class_weight is not None,
        EVEN=cols % block_cols == 0, UNIT=unit_of(cols, x_stride), BLOCK_COLS=block_cols, num_warps=GRADIENT_WARPS,
    )  # fmt: skip


def with_gradient(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, scale: Tensor,
    loss: Tensor, column: Tensor, saved: Tensor, gradient: Tensor,
    *, label_smoothing: float, z_loss: float, softcap: float, ignore_index: int, ignore_invalid: bool,
) -> None:  # fmt: skip
    """The losses of all rows of unsharded logits and their gradient for an incoming gradient of ``scale``.

    ``scale`` has one element and the dtype of ``loss``; ``gradient`` is contiguous and may be ``logits`` itself.
    """
    if target.numel() == 0:
        return
    x, rows, cols, x_stride = as_rows(logits)
    # Softcap and class weights take registers: half as many elements a thread, else they spill.
    thread_bytes = 32 if softcap > 0.0 or class_weight is not None else 64
    wide = 32 * ROW_WARPS * thread_bytes // (4 if logits.dtype is torch.float64 else 1) // logits.dtype.itemsize
    block_cols = min(wide, next_power_of_2(max(cols, 1)))
    smoothing = label_smoothing != 0.0
    launch(
        _with_gradient_kernel, (rows,),
        x, target, _contiguous(class_weight), scale, loss, column, saved, gradient, rows, cols, x_stride,
        ignore_index, label_smoothing, z_loss, softcap,
        IGNORE_INVALID=ignore_invalid, SOFTCAP=softcap > 0.0, SMOOTHING=smoothing,
        WIDTH=7 if class_weight is not None else 5 if smoothing else 3, EVEN=cols % block_cols == 0 and cols > 0,
        UNIT=unit_of(cols, x_stride), WHOLE=cols <= block_cols, BLOCK_COLS=block_cols,
        num_warps=max(1, min(ROW_WARPS, block_cols * logits.dtype.itemsize // (32 * thread_bytes))),
    )  # fmt: skip


def scale(gradient: Tensor, factor: Tensor) -> None:
    """``gradient *= factor``, which has one element; a factor of 1 moves nothing."""
    if gradient.numel() == 0:
        return
    block = 4 * vector_cols(gradient.dtype, 4)
    launch(
        _scale_kernel, (cdiv(gradient.numel(), block),),
        gradient, factor, gradient.numel(), UNIT=unit_of(gradient.numel()), BLOCK=block, num_warps=4,
    )  # fmt: skip


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()
