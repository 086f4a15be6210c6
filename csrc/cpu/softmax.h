// What the softmaxes share: one row's forward and backward, the scratch that a row needs, and the walk over rows.
//
// Forward, with the row's logits kept in fp32 scratch in between: (1) read the row, write its logits, take their
// maximum; (2) exponentiate in place and sum; (3) scale, round, write. Memory sees one read and one write, and
// exp is computed once. Backward reads y and dy twice, the second time from the cache.
//
// Maxima and sums run in kExpLanes fixed lanes, joined in a fixed order: the compiler can vectorise them without
// being told to reorder additions, and the bits do not depend on the thread count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include <torch/csrc/stable/ops.h>

#include "dtype.h"
#include "lanes.h"
#include "math.h"
#include "rows.h"

namespace parallel_ops::cpu {

template <class A>
inline constexpr A kMasked = -std::numeric_limits<A>::infinity();

// scale * x; -inf where a boolean mask is set; plus an additive mask, whose -inf wins over whatever x is.
template <class T>
PARALLEL_OPS_INLINE acc_t<T> logit(const T* x, const void*, int64_t i, acc_t<T> scale) {
  return to_acc(x[i]) * scale;
}
template <class T>
PARALLEL_OPS_INLINE acc_t<T> logit(const T* x, const uint8_t* mask, int64_t i, acc_t<T> scale) {
  const acc_t<T> v = to_acc(x[i]) * scale;
  return mask[i] ? kMasked<acc_t<T>> : v;
}
template <class T>
PARALLEL_OPS_INLINE acc_t<T> logit(const T* x, const acc_t<T>* mask, int64_t i, acc_t<T> scale) {
  const acc_t<T> m = mask[i], v = to_acc(x[i]) * scale + m;
  return m == kMasked<acc_t<T>> ? m : v;
}

// The logits of a row's last, incomplete group, -inf past the first `valid`, and their lane maxima.
template <class T, class M>
PARALLEL_OPS_INLINE void last_group(const T* __restrict x, const M* __restrict mask, int32_t valid, acc_t<T> scale,
                                    acc_t<T>* __restrict z, acc_t<T>* __restrict lanes) {
  using A = acc_t<T>;
  for (int64_t l = 0; l < kExpLanes; ++l) z[l] = logit(x, mask, l, scale);
  for (int32_t l = 0; l < kExpLanes; ++l) z[l] = l < valid ? z[l] : kMasked<A>;
  for (int64_t l = 0; l < kExpLanes; ++l) lanes[l] = z[l] > lanes[l] ? z[l] : lanes[l];
}

// y = softmax of the logits; x, mask and the scratch z are readable up to n rounded up to kExpLanes. M is void without
// a mask. A row whose logits are all -inf gives zeros. Returns false if the row came out as NaN, in which case masked
// elements (0 * NaN) are still to be put right.
template <class T, class M>
PARALLEL_OPS_INLINE bool softmax_forward(const T* __restrict x, const M* __restrict mask, T* __restrict y, int64_t n,
                                         acc_t<T> scale, acc_t<T>* __restrict z) {
  using A = acc_t<T>;
  const auto mask_at = [mask](int64_t i) {
    if constexpr (std::is_void_v<M>) {
      return mask;
    } else {
      return mask + i;
    }
  };
  const int64_t whole = n / kExpLanes * kExpLanes;
  alignas(64) A lanes[kExpLanes];
  for (int64_t l = 0; l < kExpLanes; ++l) lanes[l] = kMasked<A>;
  for (int64_t i = 0; i < whole; i += kExpLanes) {
    for (int64_t l = 0; l < kExpLanes; ++l) {
      const A v = logit(x, mask, i + l, scale);
      z[i + l] = v;
      lanes[l] = v > lanes[l] ? v : lanes[l];
    }
  }
  if (whole < n) last_group(x + whole, mask_at(whole), static_cast<int32_t>(n - whole), scale, z + whole, lanes);
  const A max = max_of_lanes<kExpLanes>(lanes);
  // The maximum passes over NaN; exp and the sum do not. -inf - -inf would be NaN too, so such a row shifts by zero.
  const A shift = max == kMasked<A> ? A(0) : max;

  for (int64_t l = 0; l < kExpLanes; ++l) lanes[l] = A(0);
  for (int64_t i = 0; i < n; i += kExpLanes) {
    for (int64_t l = 0; l < kExpLanes; ++l) {
      const A e = exp_or_zero(z[i + l] - shift);
      z[i + l] = e;
      lanes[l] += e;
    }
  }
  const A sum = sum_of_lanes<kExpLanes>(lanes);
  const A inverse = sum == A(0) ? A(0) : A(1) / sum;
  for (int64_t i = 0; i < n; ++i) y[i] = from_acc<T>(z[i] * inverse);
  return sum == sum;
}

template <class T>
PARALLEL_OPS_INLINE T softmax_gradient(T dy, T y, acc_t<T> sum, acc_t<T> scale) {
  return from_acc<T>(scale * (to_acc(y) * (to_acc(dy) - sum)));
}

// dx = scale * y * (dy - sum(dy * y)), and zero where y is: masked elements get no gradient, whatever the row holds.
// dy and y are readable up to n rounded up to kExpLanes.
template <class T>
PARALLEL_OPS_INLINE void softmax_backward(const T* __restrict dy, const T* __restrict y, T* __restrict dx, int64_t n,
                                          acc_t<T> scale) {
  using A = acc_t<T>;
  const int64_t whole = n / kExpLanes * kExpLanes;
  alignas(64) A lanes[kExpLanes];
  for (int64_t l = 0; l < kExpLanes; ++l) lanes[l] = A(0);
  for (int64_t i = 0; i < whole; i += kExpLanes)
    for (int64_t l = 0; l < kExpLanes; ++l) lanes[l] += to_acc(dy[i + l]) * to_acc(y[i + l]);
  if (whole < n) {
    const auto rest = static_cast<int32_t>(n - whole);
    for (int32_t l = 0; l < kExpLanes; ++l) {
      const A product = to_acc(dy[whole + l]) * to_acc(y[whole + l]);
      lanes[l] += l < rest ? product : A(0);
    }
  }
  const A sum = sum_of_lanes<kExpLanes>(lanes);
  for (int64_t i = 0; i < n; ++i) dx[i] = softmax_gradient(dy[i], y[i], sum, scale);
  // Every dy is finite if the sum is, and dy - sum too if the sum is not huge; otherwise 0 * (dy - sum) may be NaN.
  constexpr A kHuge = std::numeric_limits<A>::max() * std::numeric_limits<A>::epsilon() / 4;
  if (!(std::fabs(sum) < kHuge)) {
    for (int64_t i = 0; i < n; ++i)
      if (to_acc(y[i]) == A(0)) dx[i] = from_acc<T>(A(0));
  }
}

// Uninitialised, 64-byte aligned memory for one row, owned by one thread for the rows it works on.
template <class T>
class RowScratch {
 public:
  explicit RowScratch(int64_t n) : memory_(new unsigned char[static_cast<size_t>(padded(n)) * sizeof(T) + 64]) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    data = reinterpret_cast<T*>((address + 63) / 64 * 64);
  }
  T* data;

 private:
  static int64_t padded(int64_t n) { return ceil_div(n, kExpLanes) * kExpLanes; }
  std::unique_ptr<unsigned char[]> memory_;
};

// Rows of a tensor as softmax_forward and softmax_backward read them: in whole groups. What lies between the end of a
// row and the end of the tensor may be read (and is not used); a row that ends less than a group before the tensor does
// is copied. So short rows need no scalar remainder and no copy: a copy in small pieces read back whole costs a
// store-forwarding stall, some 40 ns a row.
template <class T>
class PaddedRows {
 public:
  PaddedRows(const Tensor& t, const int64_t* sizes, int64_t dim, const int64_t* strides)
      : rows_(t, sizes, dim, strides), end_(static_cast<const T*>(t.const_data_ptr()) + extent(sizes, dim, strides)) {}
  explicit PaddedRows(const Tensor& t) : PaddedRows(t, t.sizes().begin(), t.dim(), t.strides().begin()) {}

  const T* read(int64_t row, int64_t col, int64_t n, T* scratch) const {
    const T* p = rows_.tile(row, col, n, scratch);
    if (p == scratch || end_ - p >= ceil_div(n, kExpLanes) * kExpLanes) return p;
    std::memcpy(scratch, p, static_cast<size_t>(n) * sizeof(T));
    return scratch;
  }

 private:
  static int64_t extent(const int64_t* sizes, int64_t dim, const int64_t* strides) {
    int64_t last = 0;
    for (int64_t d = 0; d < dim; ++d) last += (sizes[d] - 1) * strides[d];
    return last + 1;
  }
  Rows<T> rows_;
  const T* end_;
};

// Calls f(begin, end) for ranges of rows, in parallel.
template <class F>
void for_each_range_of_rows(Shape2d shape, const F& f) {
  if (shape.rows == 0 || shape.cols == 0) return;
  torch::stable::parallel_for(0, shape.rows, std::max<int64_t>(1, kGrain / shape.cols), f);
}

}  // namespace parallel_ops::cpu
