"""cross_entropy: row statistics with each logit read once, their combination, and the gradient in a second pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import as_rows, cdiv, next_power_of_2, to_acc, vector_cols
from parallel_ops.triton_kernels._launch import launch

# A program's part of a row stays in registers between its maximum and its sum: 16 warps with 32 fp32 values a thread.
# Longer rows are cut into such parts, whose statistics a second, tiny kernel merges.
PART_COLS = 16384
PART_COLS_FP64 = 4096
PART_WARPS = 16
# The gradient has nothing to keep: 8 warps with two 16-byte accesses in flight per thread.
GRADIENT_WARPS = 8
MERGE_ROWS = 128

# What `column` says of a row instead of a column of this shard.
ON_ANOTHER_SHARD = tl.constexpr(-1)
IGNORED = tl.constexpr(-2)
INVALID = tl.constexpr(-3)


@triton.jit
def _softcap(x, cap):
    """cap tanh(x / cap) and its derivative, without cancellation; -inf stays. Polynomial: Cephes, tanhf."""
    a = tl.abs(x / cap)
    e = tl.exp(-2.0 * a)
    r = 1.0 / (1.0 + e)
    if x.dtype == tl.float64:
        # No short polynomial serves fp64: tanh(a) = -expm1(-2a) / (1 + e), with expm1(v) = (e - 1) v / log(e).
        v = tl.where(e == 1.0, 1.0, tl.log(e))
        expm1 = tl.where(e == 1.0, -2.0 * a, tl.where(e < 0.1, e - 1.0, (e - 1.0) * (-2.0 * a) / v))
        t = -expm1 * r
    else:
        a2 = a * a
        p = -5.70498872745e-3 * a2 + 2.06390887954e-2
        p = p * a2 - 5.37397155531e-2
        p = p * a2 + 1.33314422036e-1
        p = p * a2 - 3.33332819422e-1
        t = tl.where(a < 0.625, a + a * a2 * p, (1.0 - e) * r)
    z = tl.where(x < 0.0, -cap * t, cap * t)
    return tl.where(x == float("-inf"), x, z), 4.0 * e * r * r


@triton.jit
def _statistics_kernel(
    x_ptr, target_ptr, out_ptr, column_ptr, rows, cols, x_stride, start, vocab, ignore_index, cap, parts,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    first = part * BLOCK_COLS
    col = first + tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=float("-inf"))
    z = to_acc(x)
    if SOFTCAP:
        z, _ = _softcap(z, cap)
    largest = tl.max(z, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # -inf - -inf would be NaN
    exps = tl.sum(tl.exp(z - base), axis=0)

    target = tl.load(target_ptr + row).to(tl.int64)
    valid = (target >= 0) & (target < vocab)
    here = valid & (target >= start) & (target - start < cols)
    column = tl.where(here, target - start, ON_ANOTHER_SHARD)
    column = tl.where(valid, column, INVALID)
    column = tl.where(target == ignore_index, IGNORED, column)
    in_part = (column >= first) & (column < first + BLOCK_COLS)
    at_target = to_acc(tl.load(x_ptr + row * x_stride + column, mask=in_part, other=0.0))
    if SOFTCAP:
        at_target, _ = _softcap(at_target, cap)
        at_target = tl.where(in_part, at_target, 0.0)

    width: tl.constexpr = 5 if SMOOTHING else 3
    out = out_ptr + part.to(tl.int64) * width * rows + row
    tl.store(out, largest)
    tl.store(out + rows, exps)
    tl.store(out + 2 * rows, at_target)
    if SMOOTHING:
        there = z != float("-inf")
        tl.store(out + 3 * rows, tl.sum(tl.where(there, z, 0.0), axis=0))
        tl.store(out + 4 * rows, tl.sum(tl.where(there, 1.0, 0.0).to(z.dtype), axis=0))
    if part == 0:
        tl.store(column_ptr + row, column)


@triton.jit
def _merge(in_ptr, parts, rows, row, mask, SMOOTHING: tl.constexpr):
    """The statistics of all parts, added in order."""
    width: tl.constexpr = 5 if SMOOTHING else 3
    largest = tl.load(in_ptr + row, mask=mask, other=0.0)
    exps = tl.load(in_ptr + rows + row, mask=mask, other=1.0)
    at_target = tl.load(in_ptr + 2 * rows + row, mask=mask, other=0.0)
    total = at_target * 0.0
    count = total + 1.0
    if SMOOTHING:
        total = tl.load(in_ptr + 3 * rows + row, mask=mask, other=0.0)
        count = tl.load(in_ptr + 4 * rows + row, mask=mask, other=1.0)
    p = in_ptr + row
    for _ in range(1, parts):
        p += width * rows
        other = tl.load(p, mask=mask, other=0.0)
        joint = tl.where(other > largest, other, largest)
        base = tl.where(joint == float("-inf"), 0.0, joint)
        other_exps = tl.load(p + rows, mask=mask, other=0.0)
        exps = exps * tl.exp(largest - base) + other_exps * tl.exp(other - base)
        largest = joint
        at_target += tl.load(p + 2 * rows, mask=mask, other=0.0)
        if SMOOTHING:
            total += tl.load(p + 3 * rows, mask=mask, other=0.0)
            count += tl.load(p + 4 * rows, mask=mask, other=0.0)
    return largest, exps, at_target, total, count


@triton.jit
def _merge_kernel(in_ptr, out_ptr, parts, rows, SMOOTHING: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = row < rows
    largest, exps, at_target, total, count = _merge(in_ptr, parts, rows, row, mask, SMOOTHING)
    tl.store(out_ptr + row, largest, mask=mask)
    tl.store(out_ptr + rows + row, exps, mask=mask)
    tl.store(out_ptr + 2 * rows + row, at_target, mask=mask)
    if SMOOTHING:
        tl.store(out_ptr + 3 * rows + row, total, mask=mask)
        tl.store(out_ptr + 4 * rows + row, count, mask=mask)


@triton.jit
def _combine_kernel(
    in_ptr, column_ptr, loss_ptr, saved_ptr, shards, rows, label_smoothing, z_loss,
    SMOOTHING: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = row < rows
    largest, exps, at_target, total, count = _merge(in_ptr, shards, rows, row, mask, SMOOTHING)
    log_exps = tl.log(exps)
    lse = largest + log_exps
    # Differences from the maximum first: at logits of 1e4, lse itself has only three decimals in fp32.
    loss = (largest - at_target) + log_exps
    if SMOOTHING:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * ((largest - total / count) + log_exps)
    loss += tl.where(z_loss == 0.0, 0.0, z_loss * lse * lse)  # lse^2 may overflow
    column = tl.load(column_ptr + row, mask=mask, other=0)
    loss = tl.where(column == IGNORED, 0.0, loss)
    loss = tl.where(column == INVALID, float("nan"), loss)
    tl.store(loss_ptr + row, loss, mask=mask)
    tl.store(saved_ptr + row, largest, mask=mask)
    tl.store(saved_ptr + rows + row, log_exps, mask=mask)
    if SMOOTHING:
        tl.store(saved_ptr + 2 * rows + row, count, mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, column_ptr, saved_ptr, dx_ptr, rows, cols, grad_stride, x_stride, label_smoothing, z_loss, cap,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(cols, BLOCK_COLS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = col < cols
    target = tl.load(column_ptr + row)
    grad = tl.load(grad_ptr + row * grad_stride)
    largest = tl.load(saved_ptr + row)
    log_exps = tl.load(saved_ptr + rows + row)
    z = to_acc(tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0))
    if SOFTCAP:
        z, slope = _softcap(z, cap)
    p = tl.exp((z - largest) - log_exps)
    weight = tl.where(col == target, 1.0 - label_smoothing, 0.0)
    if SMOOTHING:
        weight += label_smoothing / tl.load(saved_ptr + 2 * rows + row)
        weight = tl.where(z == float("-inf"), 0.0, weight)
    # The difference comes first: at p = weight it is exactly zero, and the z-loss keeps its digits.
    dx = grad * (p - weight) + grad * 2.0 * z_loss * (largest + log_exps) * p
    if SOFTCAP:
        dx *= slope
    dx = tl.where(target == IGNORED, 0.0, dx)
    dx = tl.where(target == INVALID, float("nan"), dx)
    tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def statistics(
    logits: Tensor, target: Tensor, out: Tensor, column: Tensor,
    *, start: int, vocab: int, ignore_index: int, softcap: float,
) -> None:  # fmt: skip
    """Fills ``out`` ``[3 or 5, rows]`` and ``column`` ``[rows]``; ``target`` is contiguous."""
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
        x, target, part_out, column, rows, cols, x_stride, start, vocab, ignore_index, softcap, parts,
        SOFTCAP=softcap > 0.0, SMOOTHING=width == 5, BLOCK_COLS=block_cols,
        num_warps=max(1, min(PART_WARPS, block_cols // 1024)),
    )  # fmt: skip
    if parts > 1:
        launch(
            _merge_kernel, (cdiv(rows, MERGE_ROWS),),
            part_out, out, parts, rows, SMOOTHING=width == 5, BLOCK_ROWS=MERGE_ROWS, num_warps=4,
        )  # fmt: skip


def combine(
    statistics: Tensor, column: Tensor, loss: Tensor, saved: Tensor, *, label_smoothing: float, z_loss: float
) -> None:
    """``statistics`` ``[shards, 3 or 5, rows]`` to ``loss`` ``[rows]`` and ``saved`` ``[2 or 3, rows]``."""
    shards, width, rows = statistics.shape
    if rows == 0:
        return
    launch(
        _combine_kernel, (cdiv(rows, MERGE_ROWS),),
        statistics.contiguous(), column, loss, saved, shards, rows, label_smoothing, z_loss,
        SMOOTHING=width == 5, BLOCK_ROWS=MERGE_ROWS, num_warps=4,
    )  # fmt: skip


def backward(
    grad: Tensor, logits: Tensor, column: Tensor, saved: Tensor, out: Tensor,
    *, label_smoothing: float, z_loss: float, softcap: float,
) -> None:  # fmt: skip
    """The gradient of the logits; ``out`` is contiguous and may be ``logits`` itself."""
    if logits.numel() == 0:
        return
    x, rows, cols, x_stride = as_rows(logits)
    grad = grad.reshape(-1)
    block_cols = 2 * vector_cols(logits.dtype, GRADIENT_WARPS)
    launch(
        _backward_kernel, (rows * cdiv(cols, block_cols),),
        grad, x, column, saved, out, rows, cols, grad.stride(0), x_stride, label_smoothing, z_loss, softcap,
        SOFTCAP=softcap > 0.0, SMOOTHING=label_smoothing != 0.0, BLOCK_COLS=block_cols, num_warps=GRADIENT_WARPS,
    )  # fmt: skip
