// Sums and maxima over a tile in a fixed order that vectorises.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace parallel_ops::cpu {

// A sum that must be taken in source order cannot be vectorised, and -ffast-math would leave the order to the
// compiler. So the order is written down: element i goes to lane i % kLanes, and the lanes are folded in halves. Four
// of the widest registers (256 bytes) hide the latency of the additions; narrower targets use more registers.
template <class A>
constexpr int64_t kLanes = 256 / sizeof(A);

// Lanes of a loop over exp, which is long enough to hide an addition behind: two registers of 16 floats.
constexpr int64_t kExpLanes = 32;

// Lanes folded in halves. Widths are constants, so that each step is one instruction.
template <int64_t kCount, class A>
PARALLEL_OPS_INLINE A sum_of_lanes(A* lanes) {
  constexpr int64_t kHalf = kCount / 2;
  for (int64_t l = 0; l < kHalf; ++l) lanes[l] += lanes[l + kHalf];
  if constexpr (kHalf > 1) return sum_of_lanes<kHalf>(lanes);
  return lanes[0];
}

template <int64_t kCount, class A>
PARALLEL_OPS_INLINE A max_of_lanes(A* lanes) {
  constexpr int64_t kHalf = kCount / 2;
  for (int64_t l = 0; l < kHalf; ++l) lanes[l] = lanes[l + kHalf] > lanes[l] ? lanes[l + kHalf] : lanes[l];
  if constexpr (kHalf > 1) return max_of_lanes<kHalf>(lanes);
  return lanes[0];
}

// term(0) + ... + term(n - 1), where term is PARALLEL_OPS_LAMBDA: sum_lanes<A>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA
// {...}).
#define PARALLEL_OPS_LAMBDA __attribute__((always_inline))

template <class A, class F>
PARALLEL_OPS_INLINE A sum_lanes(int64_t n, const F& term) {
  A lane[kLanes<A>] = {};
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) {
    for (int64_t l = 0; l < kLanes<A>; ++l) lane[l] += term(i + l);
  }
  for (int64_t l = 0; i + l < n; ++l) lane[l] += term(i + l);
  return sum_of_lanes<kLanes<A>>(lane);
}

}  // namespace parallel_ops::cpu
