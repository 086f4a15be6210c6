"""Gradients of rows of logits, in a second pass over them."""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import aligned, tile_of, to_acc
from parallel_ops.triton_kernels._math import capped, exp_nonpositive
from parallel_ops.triton_kernels.cross_entropy.statistics import IGNORED, load

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
    """Writes ``dx``, zeros for an ignored target, or NaN for one outside the vocabulary."""
    if target <= IGNORED:
        dx = tl.zeros_like(dx) + tl.where(target == IGNORED, 0.0, float("nan")).to(dx.dtype)
    if EVEN:
        tl.store(pointers, dx.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, dx.to(pointers.dtype.element_ty), mask=col < cols)
