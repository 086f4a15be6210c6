// Cross-entropy within one tile of one row: its statistics, and its gradient.
#pragma once

#include <cmath>
#include <limits>

#include "../lanes.h"
#include "../math.h"
#include "../rows.h"

namespace parallel_ops::cpu {

// Values of `column` for rows whose target is not a column of this shard.
constexpr int64_t kOnAnotherShard = -1;
constexpr int64_t kIgnored = -2;
constexpr int64_t kInvalid = -3;

// Rows of the statistics tensor. Without label smoothing only the first three are there, without class weights only the
// first five; with class weights kSum is the weighted sum.
enum Statistic { kMax, kSumExp, kTarget, kSum, kCount, kTargetWeight, kWeightSum };
// Rows of the saved tensor, which has the first three, the first four, or all.
enum Saved { kSavedMax, kSavedLogSumExp, kSavedTarget, kSavedCount, kSavedTargetWeight, kSavedWeightSum };

inline int64_t statistics_rows(bool smooth, bool weighted) { return weighted ? 7 : smooth ? 5 : 3; }
inline int64_t saved_rows(bool smooth, bool weighted) { return weighted ? 6 : smooth ? 4 : 3; }

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
  A weight_sum = 0;

  PARALLEL_OPS_INLINE void add(const Part& other) {
    const A joint = other.max > max ? other.max : max;
    const A base = joint == kAbsent<A> ? A(0) : joint;  // -inf - -inf would be NaN
    exps = exps * exp_nonpositive(max - base) + other.exps * exp_nonpositive(other.max - base);
    max = joint;
    sum += other.sum;
    count += other.count;
    weight_sum += other.weight_sum;
  }
};

// `weights`, where there are any, are those of the tile's columns.
template <bool kCap, bool kSmooth, class T>
PARALLEL_OPS_INLINE Part<acc_t<T>> tile_statistics(const T* __restrict x, int64_t n, acc_t<T> cap,
                                                   const acc_t<T>* weights) {
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
    if (weights) {
      part.sum =
          sum_lanes<A>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA { return z[i] == kAbsent<A> ? A(0) : weights[i] * z[i]; });
      part.weight_sum =
          sum_lanes<A>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA { return z[i] == kAbsent<A> ? A(0) : weights[i]; });
    }
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
  A share;    // of p: 1, or what the class weights make of it
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
  const A g = row.grad * (p * row.share - (z.value == kAbsent<A> ? A(0) : weight)) + row.z_loss * p;
  return kCap ? g * z.slope : g;
}

// dx may be x itself; `weights`, where there are any, are those of the tile's columns. The arithmetic reads and writes
// the arithmetic type alone: GCC 12 turns a loop over 16-bit elements that does everything at once into shuffles.
template <bool kCap, bool kSmooth, class T>
PARALLEL_OPS_INLINE void tile_gradient(const T* x, T* dx, int64_t n, const RowGradient<acc_t<T>>& row,
                                       const acc_t<T>* weights) {
  using A = acc_t<T>;
  const RowGradient<A> r = row;
  alignas(64) A z[kTileCols];
  for (int64_t i = 0; i < n; ++i) z[i] = to_acc(x[i]);
  if (kSmooth && weights) {
    for (int64_t i = 0; i < n; ++i) z[i] = gradient<kCap>(z[i], r, r.uniform * weights[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) z[i] = gradient<kCap>(z[i], r, kSmooth ? r.uniform : A(0));
  }
  for (int64_t i = 0; i < n; ++i) dx[i] = from_acc<T>(z[i]);
}

}  // namespace parallel_ops::cpu
