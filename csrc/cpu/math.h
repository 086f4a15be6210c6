// Elementary functions as straight-line code, so that loops over them vectorise on every target.
//
// fp32: within about two units in the last place of the exact value; NaN and infinities as in libm.
// fp64: libm itself (fp64 is for checking, not for speed).
#pragma once

#include <cmath>

#include "dtype.h"

namespace parallel_ops::cpu {

// exp(x) for x <= 0 as value * 2^k: exp(x) = 2^k exp(r) with |r| <= ln(2)/2 (Cody and Waite), then a degree-6
// minimax polynomial for exp(r). Sigmoids, densities and softmaxes need no other arguments.
struct ScaledExp {
  float value;
  uint32_t k;  // in the low bits, as two's complement
};
PARALLEL_OPS_INLINE ScaledExp scaled_exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
  const float shifted = x * 1.44269504f + kRound;
  const float k = shifted - kRound;
  const float r = (x - k * 0.693145751953125f) - k * 1.42860677e-6f;
  float p = 1.3887316e-3f;
  p = p * r + 8.3331104e-3f;
  p = p * r + 4.1666798e-2f;
  p = p * r + 1.6666672e-1f;
  p = p * r + 0.5f;
  return {p * r * r + r + 1.0f, bits_as<uint32_t>(shifted)};
}

// Subnormal results are rounded as such: 2^(k + 64), then 2^-64, since k reaches down to -150.
PARALLEL_OPS_INLINE float exp_nonpositive(float x) {
  const auto [p, k] = scaled_exp(x);
  const float e = p * bits_as<float>((k << 23) + ((127u + 64u) << 23)) * 0x1p-64f;
  return x < -104.0f ? 0.0f : e;
}
PARALLEL_OPS_INLINE double exp_nonpositive(double x) { return std::exp(x); }

// Results below the smallest normal number are zero. For softmaxes, where masked logits (-inf) are as common as any
// others, and products that underflow would cost x86 a microcode trap each.
PARALLEL_OPS_INLINE float exp_or_zero(float x) {
  constexpr float kLogSmallestNormal = -87.3365f;
  const auto [p, k] = scaled_exp(x);
  const float e = p * bits_as<float>((k << 23) + (127u << 23));
  return x < kLogSmallestNormal ? 0.0f : e;
}
PARALLEL_OPS_INLINE double exp_or_zero(double x) { return std::exp(x); }

// The logistic function and its derivative. Written in exp(-|x|), since 1 - value would lose all its digits
// where value is near 1.
template <class A>
struct Sigmoid {
  A value;
  A slope;
};

template <class A>
PARALLEL_OPS_INLINE Sigmoid<A> sigmoid(A x) {
  const A t = exp_nonpositive(-std::fabs(x));
  const A r = A(1) / (A(1) + t);
  return {x < A(0) ? t * r : r, t * r * r};
}

// Logits kept within (-cap, cap): cap tanh(x / cap) and its derivative. -inf marks a column that is not there and
// stays so. The derivative is 4e / (1 + e)^2 with e = exp(-2|x / cap|), since 1 - tanh^2 would cancel.
template <class A>
struct Softcap {
  A value;
  A slope;
};

PARALLEL_OPS_INLINE Softcap<float> softcap(float x, float cap) {
  const float a = std::fabs(x / cap);
  const float e = exp_nonpositive(-2.0f * a);
  const float r = 1.0f / (1.0f + e);
  // Near zero 1 - e loses its digits: a degree-9 odd minimax polynomial takes over (Moshier's Cephes, tanhf).
  const float a2 = a * a;
  float p = -5.70498872745e-3f;
  p = p * a2 + 2.06390887954e-2f;
  p = p * a2 + -5.37397155531e-2f;
  p = p * a2 + 1.33314422036e-1f;
  p = p * a2 + -3.33332819422e-1f;
  const float t = cap * (a < 0.625f ? a + a * a2 * p : (1.0f - e) * r);
  const float value = x < 0.0f ? -t : t;
  return {x == -INFINITY ? x : value, 4.0f * e * r * r};
}
PARALLEL_OPS_INLINE Softcap<double> softcap(double x, double cap) {
  const double e = std::exp(-2.0 * std::fabs(x / cap));
  const double value = cap * std::tanh(x / cap);
  return {x == -INFINITY ? x : value, 4.0 * e / ((1.0 + e) * (1.0 + e))};
}

// The standard normal's distribution function and density at x.
template <class A>
struct Normal {
  A cdf;
  A pdf;
};

// For a = |x|, cdf(-a) = exp(-a^2/2) R(a), where R is smooth; a degree-9 minimax polynomial in
// (a - 4) / (a + 4) has R to 1.9e-8 for all a up to 15, beyond which exp(-a^2/2) is zero in fp32.
PARALLEL_OPS_INLINE Normal<float> normal(float x) {
  const float a = std::fabs(x);
  const float bounded = a > 15.0f ? 15.0f : a;
  const float t = (bounded - 4.0f) / (bounded + 4.0f);
  float p = -6.428786845915191e-05f;
  p = p * t + -1.661462699013547e-04f;
  p = p * t + 6.577040063640089e-04f;
  p = p * t + 5.014270541967068e-04f;
  p = p * t + -8.498101736021096e-03f;
  p = p * t + 3.086575094661065e-02f;
  p = p * t + -7.170670656836022e-02f;
  p = p * t + 1.243791820453451e-01f;
  p = p * t + -1.703977423738499e-01f;
  p = p * t + 9.441064239659652e-02f;
  const float e = exp_nonpositive(-0.5f * (x * x));
  const float tail = e * p;
  return {x > 0.0f ? 1.0f - tail : tail, e * 0.3989422804f};
}
PARALLEL_OPS_INLINE Normal<double> normal(double x) {
  return {0.5 * std::erfc(-x * 0.70710678118654752440), std::exp(-0.5 * x * x) * 0.39894228040143267794};
}

// An activation and its derivative.
template <class A>
struct Activation {
  A value;
  A slope;
};

template <class A>
PARALLEL_OPS_INLINE Activation<A> silu(A z) {
  const auto s = sigmoid(z);
  return {z * s.value, s.value + z * s.slope};
}

// gelu(z) = z s. tanh form: s = sigmoid(2u), u = sqrt(2/pi) (z + 0.044715 z^3), which is (1 + tanh u) / 2 without the
// cancellation for negative z. Exact form: s is the normal cdf.
template <bool kTanh, class A>
PARALLEL_OPS_INLINE Activation<A> gelu(A z) {
  if constexpr (kTanh) {
    constexpr A k0 = A(1.5957691216057308);    // 2 sqrt(2/pi)
    constexpr A k1 = A(0.071354816272600416);  // k0 * 0.044715
    const A z2 = z * z;
    const auto s = sigmoid(z * (k0 + k1 * z2));
    return {z * s.value, s.value + z * (k0 + A(3) * k1 * z2) * s.slope};
  } else {
    const auto [cdf, pdf] = normal(z);
    return {z * cdf, cdf + z * pdf};
  }
}

}  // namespace parallel_ops::cpu
