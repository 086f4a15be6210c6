// One row of attention: probabilities from scores, forward and backward, over keys [begin, end) in whole groups of
// kLanes, of which the query sees [first, last).
#pragma once

#include <algorithm>
#include <cstdint>

#include "../lanes.h"
#include "../math.h"
#include "../philox.h"

namespace parallel_ops::cpu {

struct KeyRange {
  int64_t begin, end;   // computed, in whole groups
  int64_t first, last;  // seen
};

template <class A>
struct ScoreRule {
  A scale;
  A softcap;  // 0 for none
};

template <class A>
inline constexpr A kUnseen = -std::numeric_limits<A>::infinity();

// Prepares a row of raw scores: what it then holds, times the factor returned, are the logits, -inf where the query
// sees nothing.
template <class A>
PARALLEL_OPS_INLINE A logits_row(A* __restrict s, KeyRange keys, ScoreRule<A> rule) {
  A factor = rule.scale;
  if (rule.softcap != A(0)) {
    for (int64_t i = keys.begin; i < keys.end; ++i) s[i] = softcap(s[i] * rule.scale, rule.softcap).value;
    factor = A(1);
  } else if (rule.scale <= A(0)) {  // which would make something else of -inf
    for (int64_t i = keys.begin; i < keys.end; ++i) s[i] *= rule.scale;
    factor = A(1);
  }
  for (int64_t i = keys.begin; i < keys.first; ++i) s[i] = kUnseen<A>;
  for (int64_t i = keys.last; i < keys.end; ++i) s[i] = kUnseen<A>;
  return factor;
}

// Sums and maxima in two vectors, written as such: as an array of lanes GCC keeps them in memory, or takes maxima one
// by one. E is the engine of the products (product.h).
template <class E>
struct RowLanes {
  using Vector = typename E::Vector;
  Vector low, high;

  PARALLEL_OPS_INLINE static RowLanes at(const typename E::Acc* s) {
    const auto* vectors = reinterpret_cast<const Vector*>(s);
    return {vectors[0], vectors[1]};
  }
  PARALLEL_OPS_INLINE void store(typename E::Acc* to) const {
    reinterpret_cast<Vector*>(to)[0] = low;
    reinterpret_cast<Vector*>(to)[1] = high;
  }
};

template <class E, class A>
PARALLEL_OPS_INLINE A max_row(const A* __restrict s, KeyRange keys) {
  alignas(64) A lanes[E::kCols];
  const auto none = typename E::Vector{} + kUnseen<A>;
  RowLanes<E> most{none, none};
  for (int64_t i = keys.begin; i < keys.end; i += E::kCols) {
    const auto next = RowLanes<E>::at(s + i);
    most.low = next.low > most.low ? next.low : most.low;
    most.high = next.high > most.high ? next.high : most.high;
  }
  most.store(lanes);
  return max_of_lanes<E::kCols>(lanes);
}

// exp(factor s - shift) in place; returns the sum.
template <class E, class A>
PARALLEL_OPS_INLINE A exp_row(A* s, KeyRange keys, A factor, A shift) {
  alignas(64) A lanes[E::kCols];
  RowLanes<E> sum{};
  for (int64_t i = keys.begin; i < keys.end; i += E::kCols) {
    for (int64_t l = 0; l < E::kCols; ++l) s[i + l] = exp_or_zero(s[i + l] * factor - shift);
    const auto next = RowLanes<E>::at(s + i);
    sum.low += next.low;
    sum.high += next.high;
  }
  sum.store(lanes);
  return sum_of_lanes<E::kCols>(lanes);
}

// A query of the backward: its probabilities are weight * exp(score - shift). A weight of 0: it sees no key.
template <class A>
struct GradientRow {
  A shift, weight, delta;
};

// In place of raw scores and of dO V^T: what multiplies dO and what multiplies q and k. `kept` holds the factor of each
// probability under dropout, null without.
template <class A>
PARALLEL_OPS_INLINE void gradient_row(A* __restrict s, A* __restrict dp, const A* __restrict kept, KeyRange keys,
                                      ScoreRule<A> rule, GradientRow<A> row) {
  const A shift = row.shift, weight = row.weight, delta = row.delta;
  if (weight == A(0)) keys.first = keys.last = keys.end;
  if (rule.softcap != A(0)) {
    for (int64_t i = keys.begin; i < keys.end; ++i) {
      const auto capped = softcap(s[i] * rule.scale, rule.softcap);
      const A p = weight * exp_or_zero(capped.value - shift), keep = kept ? kept[i] : A(1);
      dp[i] = p * (dp[i] * keep - delta) * (rule.scale * capped.slope);
      s[i] = p * keep;
    }
  } else if (kept) {
    for (int64_t i = keys.begin; i < keys.end; ++i) {
      const A p = weight * exp_or_zero(s[i] * rule.scale - shift);
      dp[i] = p * (dp[i] * kept[i] - delta) * rule.scale;
      s[i] = p * kept[i];
    }
  } else {
    for (int64_t i = keys.begin; i < keys.end; ++i) {
      const A p = weight * exp_or_zero(s[i] * rule.scale - shift);
      dp[i] = p * (dp[i] - delta) * rule.scale;
      s[i] = p;
    }
  }
  for (int64_t i = keys.begin; i < keys.first; ++i) s[i] = dp[i] = A(0);
  for (int64_t i = keys.last; i < keys.end; ++i) s[i] = dp[i] = A(0);
}

// The mask of dropout by the place of batch, head, query and key in the whole.
struct DropoutRule {
  uint64_t threshold = 0;  // 0 for no dropout
  double factor = 1;
  uint64_t seed = 0;
  int64_t query_start = 0, query_step = 1, key_start = 0, key_step = 1, first_head = 0, first_batch = 0;
};

// The factors of the keys of a block, which begins at `key`, for one query: 0 where dropped. Up to three before and
// after the range are written too.
template <class A>
PARALLEL_OPS_INLINE void kept_row(A* __restrict kept, KeyRange keys, const DropoutRule& rule, int64_t batch,
                                  int64_t head, int64_t query, int64_t key) {
  const auto k0 = static_cast<uint32_t>(rule.seed), k1 = static_cast<uint32_t>(rule.seed >> 32);
  const auto c1 = static_cast<uint32_t>(rule.query_start + rule.query_step * query);
  const auto c2 = static_cast<uint32_t>(rule.first_head + head), c3 = static_cast<uint32_t>(rule.first_batch + batch);
  const A factor = static_cast<A>(rule.factor);
  const auto threshold = rule.threshold;
  if (rule.key_step == 1) {
    const int64_t place = rule.key_start + key + keys.begin, lead = place & 3;
    const auto c0 = static_cast<uint32_t>(place >> 2);
    const int64_t n = keys.end - keys.begin, counters = (lead + n + 3) / 4;
    A* to = kept + keys.begin - lead;
    for (int64_t i = 0; i < counters; ++i) {
      const Philox r = philox_rounds<10>({c0 + static_cast<uint32_t>(i), c1, c2, c3}, k0, k1);
      to[4 * i] = r.c0 >= threshold ? factor : A(0);
      to[4 * i + 1] = r.c1 >= threshold ? factor : A(0);
      to[4 * i + 2] = r.c2 >= threshold ? factor : A(0);
      to[4 * i + 3] = r.c3 >= threshold ? factor : A(0);
    }
    return;
  }
  for (int64_t i = keys.begin; i < keys.end; ++i) {
    const int64_t place = rule.key_start + rule.key_step * (key + i);
    const Philox r = philox_rounds<10>({static_cast<uint32_t>(place >> 2), c1, c2, c3}, k0, k1);
    const uint32_t low = place & 1 ? r.c1 : r.c0, high = place & 1 ? r.c3 : r.c2;
    kept[i] = (place & 2 ? high : low) >= threshold ? factor : A(0);
  }
}

}  // namespace parallel_ops::cpu
