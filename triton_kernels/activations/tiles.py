"""A tile of gate and up of the activations: how it is read, clamped and activated."""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import to_acc
from parallel_ops.triton_kernels._math import LOG2_E, exp_nonpositive, reciprocal, sigmoid


@triton.jit
def clamped(x, LIMIT: tl.constexpr, BELOW: tl.constexpr):
    """x within the limit (from both sides with ``BELOW``), NaN included, and whether it was."""
    inside = ~(x > LIMIT)
    limit = tl.full(x.shape, LIMIT, x.dtype)
    y = tl.where(inside, x, limit)
    if BELOW:
        inside &= ~(x < -LIMIT)
        y = tl.where(x < -LIMIT, -limit, y)
    return y, inside


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, FAST: tl.constexpr):
    """act(z) and its derivative."""
    if ACTIVATION == "silu":
        if ALPHA == 1.0:
            s, s_slope = sigmoid(z, FAST)
            return z * s, s + z * s_slope
        else:
            s, s_slope = sigmoid(z * ALPHA, FAST)
            return z * s, s + z * ALPHA * s_slope
    elif ACTIVATION == "gelu tanh":
        # As z sigmoid(2u), which does not cancel for negative z.
        k0: tl.constexpr = 1.5957691216057308  # 2 sqrt(2/pi); without constexpr it would be fp32 for fp64 too
        k1: tl.constexpr = 0.071354816272600416  # k0 * 0.044715
        z2 = z * z
        if FAST:
            s = reciprocal(1.0 + tl.exp2(z * (-LOG2_E * k0 - LOG2_E * k1 * z2)), FAST)
            s_slope = s - s * s
        else:
            s, s_slope = sigmoid(z * (k0 + k1 * z2), FAST)
        return z * s, s + z * (k0 + 3.0 * k1 * z2) * s_slope
    else:
        root: tl.constexpr = 0.7071067811865476  # 1 / sqrt(2)
        density: tl.constexpr = 0.3989422804014327  # 1 / sqrt(2 pi)
        cdf = 0.5 * (1.0 + tl.erf(z * root))
        return z * cdf, cdf + z * density * exp_nonpositive(-0.5 * z * z, FAST)


@triton.jit
def pairs_of(base, row, col_block, rows, cols, stride, BLOCK_COLS: tl.constexpr):
    """Pointers and mask of a tile's pairs of gate and up, two elements for each of its columns."""
    both = col_block * (2 * BLOCK_COLS) + tl.arange(0, 2 * BLOCK_COLS)[None, :]
    return base + row * stride + both, (row < rows) & (both < 2 * cols)


@triton.jit
def load_gate_and_up(
    gate_ptr, up_ptr, row, col_block, rows, cols, gate_stride, up_stride, GATED: tl.constexpr, STEP: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The tile's gate and up, which is the gate where there is none. With a step of 2 one tensor has them in turn."""
    if STEP == 2:
        pointers, mask = pairs_of(gate_ptr, row, col_block, rows, cols, gate_stride, BLOCK_COLS)
        gate, up = tl.split(tl.reshape(tl.load(pointers, mask=mask), (row.shape[0], BLOCK_COLS, 2)))
        return to_acc(gate), to_acc(up)
    else:
        col = col_block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
        mask = (row < rows) & (col < cols)
        gate = to_acc(tl.load(gate_ptr + row * gate_stride + col, mask=mask))
        if GATED:
            return gate, to_acc(tl.load(up_ptr + row * up_stride + col, mask=mask))
        else:
            return gate, gate
