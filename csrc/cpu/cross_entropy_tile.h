// Cross-entropy within one tile of one row: its statistics, and its gradient.
#pragma once

#include <cmath>
#include <limits>

#include "lanes.h"
#include "math.h"
#include "rows.h"

namespace parallel_ops::cpu {

// What `column` says of a row instead of a column of this shard.
constexpr int64_t kOnAnotherShard = -1;
constexpr int64_t kIgnored = -2;
constexpr int64_t kInvalid = -3;

// Rows of the statistics tensor; without label smoothing only the first three are there.
enum Statistic { kMax, kSumExp, kTarget, kSum, kCount };
constexpr int64_t kPlain = 3;
constexpr int64_t kSmoothed = 5;

// Fewer rows than this are cut into column blocks, so that several threads share a row.
constexpr int64_t kFewRows = 16;
constexpr int64_t kBlockCols = 8 * kTileCols;

template <class A>
constexpr A kAbsent = -std::numeric_limits<A>::infinity();

// Statistics of a part of a row. `exps` is the sum of exp(z - max).
template <class A>
struct Part {
  A max = kAbsent<A>;
  A exps = 0;
  A sum = 0;
  A count = 0;

  PARALLEL_OPS_INLINE void add(A other_max, A other_exps, A other_sum, A other_count) {
    const A joint = other_max > max ? other_max : max;
    const A base = joint == kAbsent<A> ? A(0) : joint;  // -inf - -inf would be NaN
    exps = exps * exp_nonpositive(max - base) + other_exps * exp_nonpositive(other_max - base);
    max = joint;
    sum += other_sum;
    count += other_count;
  }
};

template <bool kCap, bool kSmooth, class T>
PARALLEL_OPS_INLINE Part<acc_t<T>> tile_statistics(const T* __restrict x, int64_t n, acc_t<T> cap) {
  using A = acc_t<T>;
  alignas(64) A z[kTileCols];
  alignas(64) A largest[kExpLanes], exps[kExpLanes] = {}, sums[kExpLanes] = {}, counts[kExpLanes] = {};
  for (int64_t i = 0; i < n; ++i) z[i] = kCap ? softcap(to_acc(x[i]), cap).value : to_acc(x[i]);
  const int64_t padded = ceil_div(n, kExpLanes) * kExpLanes;
  for (int64_t i = n; i < padded; ++i) z[i] = kAbsent<A>;
  for (int64_t l = 0; l < kExpLanes; ++l) largest[l] = kAbsent<A>;
  for (int64_t i = 0; i < padded; i += kExpLanes) {
    for (int64_t l = 0; l < kExpLanes; ++l) largest[l] = z[i + l] > largest[l] ? z[i + l] : largest[l];
  }
  if constexpr (kSmooth) {
    for (int64_t i = 0; i < padded; i += kExpLanes) {
      for (int64_t l = 0; l < kExpLanes; ++l) sums[l] += z[i + l] == kAbsent<A> ? A(0) : z[i + l];
      for (int64_t l = 0; l < kExpLanes; ++l) counts[l] += z[i + l] == kAbsent<A> ? A(0) : A(1);
    }
  }
  Part<A> part;
  part.max = max_of_lanes<kExpLanes>(largest);
  const A base = part.max == kAbsent<A> ? A(0) : part.max;
  for (int64_t i = 0; i < padded; i += kExpLanes) {
    for (int64_t l = 0; l < kExpLanes; ++l) exps[l] += exp_nonpositive(z[i + l] - base);
  }
  part.exps = sum_of_lanes<kExpLanes>(exps);
  if constexpr (kSmooth) {
    part.sum = sum_of_lanes<kExpLanes>(sums);
    part.count = sum_of_lanes<kExpLanes>(counts);
  }
  return part;
}

// What the gradient of one row needs beside its logits.
template <class A>
struct RowGradient {
  A max;
  A log_exps;
  A grad;
  A z_loss;   // grad 2 z_loss lse
  A uniform;  // label_smoothing / count
  A cap;
};

// `weight` is what the target distribution gives this column. The difference comes first: at p = weight it is exactly
// zero, and the z-loss keeps its digits.
template <bool kCap, class A>
PARALLEL_OPS_INLINE A gradient(A x, const RowGradient<A>& row, A weight) {
  Softcap<A> z{x, A(1)};
  if constexpr (kCap) z = softcap(z.value, row.cap);
  const A p = exp_nonpositive((z.value - row.max) - row.log_exps);
  const A g = row.grad * (p - (z.value == kAbsent<A> ? A(0) : weight)) + row.z_loss * p;
  return kCap ? g * z.slope : g;
}

// dx may be x itself. The arithmetic reads and writes the arithmetic type alone: GCC 12 turns a loop over 16-bit
// elements that does everything at once into shuffles.
template <bool kCap, bool kSmooth, class T>
PARALLEL_OPS_INLINE void tile_gradient(const T* x, T* dx, int64_t n, const RowGradient<acc_t<T>>& row) {
  using A = acc_t<T>;
  const RowGradient<A> r = row;
  alignas(64) A z[kTileCols];
  for (int64_t i = 0; i < n; ++i) z[i] = to_acc(x[i]);
  for (int64_t i = 0; i < n; ++i) z[i] = gradient<kCap>(z[i], r, kSmooth ? r.uniform : A(0));
  for (int64_t i = 0; i < n; ++i) dx[i] = from_acc<T>(z[i]);
}

}  // namespace parallel_ops::cpu
