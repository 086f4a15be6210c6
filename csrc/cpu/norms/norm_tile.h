// The loops of the norms over one tile of one row.
#pragma once

#include <type_traits>

#include "../dtype.h"
#include "../lanes.h"

namespace parallel_ops::cpu {

// Values of a row that the loops over its tiles need.
template <class A>
struct Row {
  A mean;
  A rstd;
  A mean_g;
  A mean_g_xhat;
};

// T is the dtype of x and y, S that of what is normalised: the wider one of x and its residual. The sum is rounded to S
// before it is normalised, so that what is returned is what was normalised. Weight and bias come widened.
template <class T, class S>
PARALLEL_OPS_INLINE void add_loop(const T* __restrict x, const S* __restrict residual, S* __restrict sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] = from_acc<S>(to_acc(x[i]) + to_acc(residual[i]));
}

template <class S>
PARALLEL_OPS_INLINE acc_t<S> total_loop(const S* __restrict x, int64_t n) {
  return sum_lanes<acc_t<S>>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA { return to_acc(x[i]); });
}

template <class S>
PARALLEL_OPS_INLINE acc_t<S> squares_loop(const S* __restrict x, acc_t<S> mean, int64_t n) {
  return sum_lanes<acc_t<S>>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA {
    const acc_t<S> d = to_acc(x[i]) - mean;
    return d * d;
  });
}

template <class T, class S>
PARALLEL_OPS_INLINE void normalise_loop(const S* __restrict x, const acc_t<T>* __restrict weight,
                                        const acc_t<T>* __restrict bias, Row<acc_t<T>> row, T* __restrict y,
                                        int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> xhat = (to_acc(x[i]) - row.mean) * row.rstd;
    y[i] = from_acc<T>(xhat * weight[i] + bias[i]);
  }
}

template <class T>
PARALLEL_OPS_INLINE acc_t<T> dot_g_loop(const T* __restrict dy, const acc_t<T>* __restrict weight, int64_t n) {
  return sum_lanes<acc_t<T>>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA { return to_acc(dy[i]) * weight[i]; });
}

template <class T, class S>
PARALLEL_OPS_INLINE acc_t<T> dot_g_xhat_loop(const T* __restrict dy, const S* __restrict x,
                                             const acc_t<T>* __restrict weight, Row<acc_t<T>> row, int64_t n) {
  return sum_lanes<acc_t<T>>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA {
    return to_acc(dy[i]) * weight[i] * ((to_acc(x[i]) - row.mean) * row.rstd);
  });
}

// dx in S and, where that is another dtype, in T too. kSums: 0 for neither parameter's gradient, 1 for the weight's.
template <int kSums, class T, class S>
PARALLEL_OPS_INLINE void gradient_loop(const T* __restrict dy, const S* __restrict x, const acc_t<T>* __restrict weight,
                                       const S* __restrict dsum, Row<acc_t<T>> row, S* __restrict dx,
                                       T* __restrict narrow_dx, acc_t<T>* __restrict dweight,
                                       acc_t<T>* __restrict dbias, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> d = to_acc(dy[i]);
    const acc_t<T> xhat = (to_acc(x[i]) - row.mean) * row.rstd;
    const acc_t<T> v = row.rstd * (d * weight[i] - row.mean_g - xhat * row.mean_g_xhat) + to_acc(dsum[i]);
    dx[i] = from_acc<S>(v);
    if constexpr (!std::is_same_v<S, T>) narrow_dx[i] = from_acc<T>(v);
    if constexpr (kSums > 0) dweight[i] += d * xhat;
    if constexpr (kSums > 1) dbias[i] += d;
  }
}

// The sums alone, which need no weight.
template <int kSums, class T, class S>
PARALLEL_OPS_INLINE void sums_loop(const T* __restrict dy, const S* __restrict x, Row<acc_t<T>> row,
                                   acc_t<T>* __restrict dweight, acc_t<T>* __restrict dbias, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> d = to_acc(dy[i]);
    dweight[i] += d * ((to_acc(x[i]) - row.mean) * row.rstd);
    if constexpr (kSums > 1) dbias[i] += d;
  }
}

}  // namespace parallel_ops::cpu
