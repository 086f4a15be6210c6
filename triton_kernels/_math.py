"""Elementary functions of the kernels, for the units that GPUs have.

For 16-bit data (``FAST``) the special function unit's own results do: they are off by some 2^-22, which the rounding of
the output hides a thousandfold, and flushing of subnormals saves three instructions each. In fp32 they would be twice
as far off as PyTorch's, so arithmetic is done on multiply-add units there. fp64 goes to libdevice.
"""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import COMPILED

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp_nonpositive(x, FAST: tl.constexpr):
    """exp(x) for x <= 0; results below the smallest normal number are zero (but in fp64)."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    elif FAST:
        return tl.exp2(x * LOG2_E)
    else:
        # exp(x) = 2^k exp(r), |r| <= ln(2)/2 (Cody and Waite); exp(r) by a minimax polynomial, as csrc/cpu/math.h.
        shifted = x * LOG2_E + 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, left in the low bits
        k = shifted - 12582912.0
        r = (x - k * 0.693145751953125) - k * 1.42860677e-6
        p = 1.3887316e-3 * r + 8.3331104e-3
        p = p * r + 4.1666798e-2
        p = p * r + 1.6666672e-1
        p = p * r + 0.5
        two_to_k = ((shifted.to(tl.int32, bitcast=True) + 127) << 23).to(tl.float32, bitcast=True)
        return tl.where(x < -87.3365, 0.0, (p * r * r + r + 1.0) * two_to_k)


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    """1 / x for finite x >= 1, and 0 for infinity where ``FAST``."""
    if x.dtype == tl.float64:
        return 1.0 / x
    elif FAST:
        # A division would take seven instructions; this is one, off by a unit in the last place.
        if COMPILED:
            return tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            return 1.0 / x
    else:
        # Newton's step takes back the two units in the last place by which div.full may be off.
        r = 1.0 / x
        return r + r * (1.0 - x * r)


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """The logistic function and its derivative."""
    if FAST:
        s = reciprocal(1.0 + tl.exp2(x * -LOG2_E), FAST)
        return s, s - s * s
    else:
        # In exp(-|x|): 1 - s would lose its digits where s is near 1.
        t = exp_nonpositive(-tl.abs(x), FAST)
        r = reciprocal(1.0 + t, FAST)
        return tl.where(x < 0.0, t * r, r), t * r * r
