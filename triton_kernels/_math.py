"""Elementary functions of the kernels, for the units that GPUs have.

For 16-bit data (``FAST``) the special function unit's own results do: they are off by some 2^-22, which the rounding of
the output hides a thousandfold, and flushing of subnormals saves three instructions each. In fp32 they would be twice
as far off as PyTorch's, so arithmetic is done on multiply-add units there. fp64 goes to libdevice.
"""

import triton
import triton.language as tl

from parallel_ops.triton_kernels._common import COMPILED

LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp_nonpositive(x, FAST: tl.constexpr):
    """exp(x) for x <= 0; where ``FAST``, results below the smallest normal number may be zero."""
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
        # 2^k in two factors, since it is no normal number itself where the result is none.
        two_to_k = ((shifted.to(tl.int32, bitcast=True) + 127 + 64) << 23).to(tl.float32, bitcast=True)
        return tl.where(x < -104.0, 0.0, (p * r * r + r + 1.0) * two_to_k * 5.421010862427522e-20)


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


@triton.jit
def capped(x, cap):
    """cap tanh(x / cap) and its derivative, without cancellation; -inf stays. Polynomial: Cephes, tanhf."""
    cap = tl.cast(cap, x.dtype)
    if x.dtype == tl.float64:
        a = tl.abs(x / cap)
        e = tl.exp(-2.0 * a)
        r = 1.0 / (1.0 + e)
        # No short polynomial serves fp64: tanh(a) = -expm1(-2a) / (1 + e), with expm1(v) = (e - 1) v / log(e).
        v = tl.where(e == 1.0, 1.0, tl.log(e))
        expm1 = tl.where(e == 1.0, -2.0 * a, tl.where(e < 0.1, e - 1.0, (e - 1.0) * (-2.0 * a) / v))
        t = -expm1 * r
    else:
        # The remainder gives the quotient's last digits, whatever the division on the device is worth.
        inverse = 1.0 / cap
        a = tl.abs(x) * inverse
        a += tl.where(a < float("inf"), (tl.abs(x) - a * cap) * inverse, 0.0)
        e = exp_nonpositive(-2.0 * a, False)
        r = reciprocal(1.0 + e, False)
        a2 = a * a
        p = -5.70498872745e-3 * a2 + 2.06390887954e-2
        p = p * a2 - 5.37397155531e-2
        p = p * a2 + 1.33314422036e-1
        p = p * a2 - 3.33332819422e-1
        t = tl.where(a < 0.625, a + a * a2 * p, (1.0 - e) * r)
    z = tl.where(x < 0.0, -cap * t, cap * t)
    return tl.where(x == float("-inf"), x, z), 4.0 * e * r * r
