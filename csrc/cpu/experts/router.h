// A row of the router: what its logits give the experts, which of them are chosen, and how much each weighs.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "../dtype.h"
#include "../lanes.h"
#include "../math.h"

namespace parallel_ops::cpu {

// Added to sums that are divided by, so that rows whose scores are all zero are defined (DeepSeek-V3).
constexpr double kTiny = 1e-20;

struct Router {
  int64_t experts;
  int64_t top_k;
  int64_t groups;
  int64_t top_groups;
  bool sigmoid;
  bool top_k_first;
  bool normalize;
  double scale;
};

// exp(x - logsumexp) of each expert, and logsumexp.
template <class A>
PARALLEL_OPS_INLINE A softmax_of(const A* __restrict x, int64_t n, A* __restrict p) {
  A largest = x[0];
  for (int64_t i = 0; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  for (int64_t i = 0; i < n; ++i) p[i] = exp_or_zero(x[i] - largest);
  const A sum = sum_lanes<A>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA { return p[i]; });
  const A scale = A(1) / sum;
  for (int64_t i = 0; i < n; ++i) p[i] *= scale;
  if (std::isinf(largest)) {  // as torch.logsumexp, but that -inf - -inf is NaN in p
    bool nan = false;
    for (int64_t i = 0; i < n; ++i) nan = nan || x[i] != x[i];
    return nan ? sum : largest;
  }
  return largest + std::log(sum);
}

// Scores as integers in their order, for maxima that vectorise. NaN counts as infinity, -0 as 0; below all is kOut.
template <class A>
using Key = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
template <class A>
constexpr Key<A> kOut = std::numeric_limits<Key<A>>::min();

template <class A>
PARALLEL_OPS_INLINE Key<A> key_of(A score) {
  const A ordered = score != score ? std::numeric_limits<A>::infinity() : score + A(0);
  const Key<A> bits = bits_as<Key<A>>(ordered);
  return bits < 0 ? bits ^ std::numeric_limits<Key<A>>::max() : bits;
}
template <class A>
PARALLEL_OPS_INLINE A score_of(Key<A> key) {
  return bits_as<A>(key < 0 ? key ^ std::numeric_limits<Key<A>>::max() : key);
}

// The first of the largest keys, which is then out.
template <class K>
PARALLEL_OPS_INLINE int64_t take_largest(K* keys, int64_t n) {
  K largest = keys[0];
  for (int64_t i = 1; i < n; ++i) largest = keys[i] > largest ? keys[i] : largest;
  int64_t at = 0;
  while (keys[at] != largest) ++at;
  keys[at] = std::numeric_limits<K>::min();
  return at;
}

// Takes out all experts but those of the best groups; a group's score is the sum of its two best.
template <class A>
PARALLEL_OPS_INLINE void limit_groups(const Router& router, Key<A>* keys, Key<A>* groups) {
  const int64_t size = router.experts / router.groups;
  for (int64_t g = 0; g < router.groups; ++g) {
    Key<A> first = kOut<A>, second = kOut<A>;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) {
      const Key<A> key = keys[i];
      second = key > first ? first : key > second ? key : second;
      first = key > first ? key : first;
    }
    groups[g] = size == 1 ? first : key_of(score_of<A>(first) + score_of<A>(second));
  }
  for (int64_t i = 0; i < router.top_groups; ++i) take_largest(groups, router.groups);
  for (int64_t g = 0; g < router.groups; ++g) {
    if (groups[g] == kOut<A>) continue;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) keys[i] = kOut<A>;
  }
}

// Space for a row.
template <class A>
struct RowSpace {
  A* x;       // logits
  A* p;       // their softmax
  A* scores;  // what weights are made of: p, the sigmoid, or the logits (top_k_first)
  A* slopes;  // the derivative of the sigmoid
  Key<A>* keys;
  Key<A>* groups;
};

template <class A>
PARALLEL_OPS_INLINE void sigmoid_of(const A* __restrict x, int64_t n, A* __restrict value, A* __restrict slope) {
  for (int64_t i = 0; i < n; ++i) {
    const auto s = sigmoid(x[i]);
    value[i] = s.value;
    slope[i] = s.slope;
  }
}

template <class A>
PARALLEL_OPS_INLINE A sum_of(const A* values, int64_t n) {
  return sum_lanes<A>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA { return values[i]; });
}

// The weights before they are scaled: u of the chosen experts, in order, and what they are divided by.
template <class A>
PARALLEL_OPS_INLINE A chosen_scores(const Router& router, const RowSpace<A>& s, const int64_t* chosen, A* u) {
  const int64_t k = router.top_k;
  if (router.top_k_first && !router.sigmoid) {
    A largest = s.x[chosen[0]], sum = A(0);
    for (int64_t j = 1; j < k; ++j) largest = s.x[chosen[j]] > largest ? s.x[chosen[j]] : largest;
    for (int64_t j = 0; j < k; ++j) sum += u[j] = exp_or_zero(s.x[chosen[j]] - largest);
    return sum;
  }
  const A* scores = router.sigmoid ? s.scores : s.p;
  A sum = A(0);
  for (int64_t j = 0; j < k; ++j) sum += u[j] = scores[chosen[j]];
  return router.normalize ? sum + A(kTiny) : A(1);
}

// Returns logsumexp. Adds the row's probabilities to `sums`.
template <class A>
PARALLEL_OPS_INLINE A route_row(const Router& router, const A* bias, const RowSpace<A>& s, int64_t* chosen, A* weights,
                                A* sums) {
  const int64_t n = router.experts;
  const A logsumexp = softmax_of(s.x, n, s.p);
  if (router.sigmoid) {
    sigmoid_of(s.x, n, s.scores, s.slopes);
    const A total = A(1) / (sum_of(s.scores, n) + A(kTiny));
    for (int64_t i = 0; i < n; ++i) sums[i] += s.scores[i] * total;
  } else {
    for (int64_t i = 0; i < n; ++i) sums[i] += s.p[i];
  }
  const A* choice = router.top_k_first ? s.x : router.sigmoid ? s.scores : s.p;
  if (bias) {
    for (int64_t i = 0; i < n; ++i) s.keys[i] = key_of(choice[i] + bias[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) s.keys[i] = key_of(choice[i]);
  }
  if (router.top_groups < router.groups) limit_groups<A>(router, s.keys, s.groups);
  for (int64_t j = 0; j < router.top_k; ++j) chosen[j] = take_largest(s.keys, n);
  const A scale = A(router.scale) / chosen_scores(router, s, chosen, weights);
  for (int64_t j = 0; j < router.top_k; ++j) weights[j] *= scale;
  return logsumexp;
}

// What a row's gradient is made of. A pointer is null where there is no such gradient.
template <class A>
struct RowGradients {
  const A* weights;     // [k]
  const A* score_sums;  // [n]
  A z_sum;              // 0 where there is none
};

// dx. `u` has room for k values and `gradients` for n.
template <class A>
PARALLEL_OPS_INLINE void route_row_backward(const Router& router, const RowGradients<A>& grad, const RowSpace<A>& s,
                                            const int64_t* chosen, A* u, A* gradients, A* dx) {
  const int64_t n = router.experts, k = router.top_k;
  const A logsumexp = softmax_of(s.x, n, s.p);
  if (router.sigmoid) sigmoid_of(s.x, n, s.scores, s.slopes);

  // Of the probabilities: gradients[i] for each, and what is common to all.
  A common = A(0), total = A(1);
  const A* q = router.sigmoid ? s.scores : s.p;
  if (grad.score_sums) {
    total = router.sigmoid ? A(1) / (sum_of(s.scores, n) + A(kTiny)) : A(1);
    common = total * sum_lanes<A>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA { return q[i] * grad.score_sums[i]; });
    for (int64_t i = 0; i < n; ++i) gradients[i] = total * (grad.score_sums[i] - common);
  } else {
    for (int64_t i = 0; i < n; ++i) gradients[i] = A(0);
  }
  const A z = A(2) * logsumexp * grad.z_sum;

  const bool of_softmax = !router.sigmoid && !router.top_k_first;
  if (grad.weights) {
    const A divisor = chosen_scores(router, s, chosen, u);
    const bool divided = router.normalize || (router.top_k_first && !router.sigmoid);
    A dot = A(0);
    for (int64_t j = 0; j < k; ++j) dot += grad.weights[j] * (u[j] / divisor);
    const A scale = A(router.scale) / divisor;
    A of_all = A(0);
    for (int64_t j = 0; j < k; ++j) {
      const A du = scale * (grad.weights[j] - (divided ? dot : A(0)));
      u[j] = router.top_k_first && !router.sigmoid ? u[j] * du : du;
      of_all += s.p[chosen[j]] * u[j];
    }
    if (of_softmax) {
      for (int64_t j = 0; j < k; ++j) gradients[chosen[j]] += u[j];
      for (int64_t i = 0; i < n; ++i) gradients[i] -= of_all;
    } else if (router.sigmoid) {
      for (int64_t j = 0; j < k; ++j) gradients[chosen[j]] += u[j];
    }
  }
  if (router.sigmoid) {
    for (int64_t i = 0; i < n; ++i) dx[i] = s.slopes[i] * gradients[i] + z * s.p[i];
  } else {
    for (int64_t i = 0; i < n; ++i) dx[i] = s.p[i] * (gradients[i] + z);
  }
  if (grad.weights && router.top_k_first && !router.sigmoid) {
    for (int64_t j = 0; j < k; ++j) dx[chosen[j]] += u[j];
  }
}

}  // namespace parallel_ops::cpu
