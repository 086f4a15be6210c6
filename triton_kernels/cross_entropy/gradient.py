"""Gradients of rows of logits: in a second pass, or in the one kernel that has the loss too."""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import aligned, tile_of, to_acc
from parallel_ops.triton_kernels._math import capped, exp_nonpositive
from parallel_ops.triton_kernels.cross_entropy.statistics import (
    IGNORED,
    column_of,
    joined,
    load,
    part_statistics,
    store_loss,
)

# Options are fp64 for fp64 logits, and values that change do not compile a kernel each.
_OPTIONS = ["label_smoothing", "z_loss", "cap"]


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
            weight += uniform * load(weight_ptr + col, col, cols, EVEN, 0.0).to(z.dtype)
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
    x = load(x_ptr + row * aligned(x_stride, UNIT) + col, col, cols, EVEN, 0.0)
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
    IGNORE_OUT_OF_RANGE: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = aligned(cols, UNIT)
    fast: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    x_ptr += row * aligned(x_stride, UNIT)
    dx_ptr += row * cols
    col = tl.arange(0, BLOCK_COLS)
    x = load(x_ptr + col, col, cols, EVEN, float("-inf"))
    z = to_acc(x)
    if SOFTCAP:
        z, _ = capped(z, cap)
    largest, exps, total, count, weights = part_statistics(z, col, cols, weight_ptr, EVEN, WIDTH > 3, WIDTH > 5)
    if not WHOLE:
        for first in range(BLOCK_COLS, cols, BLOCK_COLS):
            part = first + col
            z = to_acc(load(x_ptr + part, part, cols, EVEN, float("-inf")))
            if SOFTCAP:
                z, _ = capped(z, cap)
            other, other_exps, other_total, other_count, other_weights = part_statistics(
                z, part, cols, weight_ptr, EVEN, WIDTH > 3, WIDTH > 5
            )
            largest, exps = joined(largest, exps, other, other_exps)
            total += other_total
            count += other_count
            weights += other_weights

    target = column_of(tl.load(target_ptr + row), 0, cols, cols, ignore_index, IGNORE_OUT_OF_RANGE)
    here = target >= 0
    at_target = to_acc(tl.load(x_ptr + target, mask=here, other=0.0))
    if SOFTCAP:
        at_target, _ = capped(at_target, cap)
    at_target = tl.where(here, at_target, 0.0)
    target_weight = at_target
    if WIDTH > 5:
        target_weight = tl.load(weight_ptr + target, mask=here, other=0.0).to(at_target.dtype)
    log_exps = store_loss(
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
            x = load(x_ptr + part, part, cols, EVEN, float("-inf"))
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
