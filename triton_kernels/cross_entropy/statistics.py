"""Statistics of rows of logits, read once, and the losses made of them."""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import aligned, tile_of, to_acc
from parallel_ops.triton_kernels._math import capped, exp_nonpositive

# Values of `column` for rows whose target is not a column of this shard.
ON_ANOTHER_SHARD = tl.constexpr(-1)
IGNORED = tl.constexpr(-2)
INVALID = tl.constexpr(-3)


@triton.jit
def load(pointers, col, cols, EVEN: tl.constexpr, other):
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=col < cols, other=other)


@triton.jit
def column_of(target, start, vocab, cols, ignore_index, IGNORE_OUT_OF_RANGE: tl.constexpr):
    """The target of a row as a column of this shard, or a constant."""
    target = target.to(tl.int64)
    valid = (target >= 0) & (target < vocab)
    here = valid & (target >= start) & (target - start < cols)
    column = tl.where(here, target - start, ON_ANOTHER_SHARD)
    column = tl.where(valid, column, IGNORED if IGNORE_OUT_OF_RANGE else INVALID)
    return tl.where(target == ignore_index, IGNORED, column)


@triton.jit
def part_statistics(z, col, cols, weight_ptr, EVEN: tl.constexpr, SMOOTHING: tl.constexpr, WEIGHTED: tl.constexpr):
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
        w = tl.where(there, load(weight_ptr + col, col, cols, EVEN, 0.0).to(z.dtype), 0.0)
        total = tl.sum(tl.where(there, w * z, 0.0), axis=0)
        weights = tl.sum(w, axis=0)
    return largest, exps, total, count, weights


@triton.jit(do_not_specialize=["cap"])
def _statistics_kernel(
    x_ptr, target_ptr, weight_ptr, out_ptr, column_ptr, rows, cols, x_stride, start, vocab, ignore_index, parts,
    cap: tl.float64,
    IGNORE_OUT_OF_RANGE: tl.constexpr, SOFTCAP: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row, part = tile_of(tl.program_id(0), parts)
    row = row.to(tl.int64)
    cols = aligned(cols, UNIT)
    first = part * BLOCK_COLS
    col = first + tl.arange(0, BLOCK_COLS)
    x_ptr += row * aligned(x_stride, UNIT)
    z = to_acc(load(x_ptr + col, col, cols, EVEN, float("-inf")))
    if SOFTCAP:
        z, _ = capped(z, cap)
    largest, exps, total, count, weights = part_statistics(z, col, cols, weight_ptr, EVEN, WIDTH > 3, WIDTH > 5)

    column = column_of(tl.load(target_ptr + row), start, vocab, cols, ignore_index, IGNORE_OUT_OF_RANGE)
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
    """The statistics of all parts, added in order; rows past the last give values that are not used."""
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
        largest, exps = joined(largest, exps, tl.load(p, mask=mask, other=0.0), tl.load(p + rows, mask=mask, other=0.0))
        at_target += tl.load(p + 2 * rows, mask=mask, other=0.0)
        if WIDTH > 3:
            total += tl.load(p + 3 * rows, mask=mask, other=0.0)
            count += tl.load(p + 4 * rows, mask=mask, other=0.0)
        if WIDTH > 5:
            target_weight += tl.load(p + 5 * rows, mask=mask, other=0.0)
            weights += tl.load(p + 6 * rows, mask=mask, other=0.0)
    return largest, exps, at_target, total, count, target_weight, weights


@triton.jit
def joined(largest, exps, other, other_exps):
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
def store_loss(
    loss_ptr, saved_ptr, row, rows, mask, column, largest, exps, at_target, total, count, target_weight, weights,
    label_smoothing, z_loss, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes the losses of rows and what their gradients need."""
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


@triton.jit(do_not_specialize=["label_smoothing", "z_loss"])
def _combine_kernel(
    in_ptr, column_ptr, loss_ptr, saved_ptr, shards, rows, label_smoothing: tl.float64, z_loss: tl.float64,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask = row < rows
    largest, exps, at_target, total, count, target_weight, weights = _merge(in_ptr, shards, rows, row, mask, WIDTH)
    column = tl.load(column_ptr + row, mask=mask, other=0)
    store_loss(
        loss_ptr, saved_ptr, row, rows, mask, column, largest, exps, at_target, total, count, target_weight, weights,
        label_smoothing, z_loss, WIDTH,
    )  # fmt: skip
