// What the softmaxes share: one row's forward and backward, the scratch that a row needs, and the walk over rows.
//
// Forward, with the row's logits kept in fp32 scratch in between: (1) read the row, write its logits, take their
// maximum; (2) exponentiate in place and sum; (3) scale, round, write. Memory sees one read and one write, and
// exp is computed once. Backward reads y and dy twice, the second time from the cache.
//
// Maxima and sums run in kLanes fixed lanes, joined in a fixed order: the compiler can vectorise them without
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
#include "math.h"
#include "rows.h"

namespace parallel_ops::cpu {

// Two 64-byte registers of fp32: enough chains to hide the latency of an addition behind exp.
constexpr int64_t kLanes = 32;

template <class A>
inline constexpr A kMasked = -std::numeric_limits<A>::infinity();

template <class A>
PARALLEL_OPS_INLINE A sum_of_lanes(A* lanes) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

template <class A>
PARALLEL_OPS_INLINE A max_of_lanes(A* lanes) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t l = 0; l < width; ++l) lanes[l] = lanes[l + width] > lanes[l] ? lanes[l + width] : lanes[l];
  return lanes[0];
}

// memcpy by the library: with a size it knows to be small, GCC writes `rep movs` instead, which is slow to start.
template <class T>
PARALLEL_OPS_INLINE void copy_few(T* to, const T* from, int64_t n) {
#if defined(__GNUC__)
  asm("" : "+r"(n));  // forget what is known of n
#endif
  std::memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
}

// The last, incomplete group of a row, copied here so that it runs through whole-group loops like any other.
template <class T>
struct PaddedGroup {
  alignas(64) T data[kLanes] = {};
  PARALLEL_OPS_INLINE void of(const T* p, int64_t n) { copy_few(data, p, n); }
  PARALLEL_OPS_INLINE void to(T* p, int64_t n) const { copy_few(p, data, n); }
};

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

// y = softmax of the logits; `z` is scratch for n elements rounded up to kLanes. M is void without a mask. A row
// whose logits are all -inf gives zeros. Returns false if the row came out as NaN, in which case masked elements
// (0 * NaN) are still to be put right.
template <class T, class M>
PARALLEL_OPS_INLINE bool softmax_forward(const T* __restrict x, const M* __restrict mask, T* __restrict y, int64_t n,
                                         acc_t<T> scale, acc_t<T>* __restrict z) {
  using A = acc_t<T>;
  const int64_t whole = n / kLanes * kLanes;
  const int64_t rest = n - whole;
  alignas(64) A lanes[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) lanes[l] = kMasked<A>;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      const A v = logit(x, mask, i + l, scale);
      z[i + l] = v;
      lanes[l] = v > lanes[l] ? v : lanes[l];
    }
  }
  if (rest > 0) {
    A* zr = z + whole;
    PaddedGroup<T> px;
    px.of(x + whole, rest);
    if constexpr (std::is_void_v<M>) {
      for (int64_t l = 0; l < kLanes; ++l) zr[l] = logit(px.data, mask, l, scale);
    } else {
      PaddedGroup<M> pm;
      pm.of(mask + whole, rest);
      for (int64_t l = 0; l < kLanes; ++l) zr[l] = logit(px.data, pm.data, l, scale);
    }
    for (int64_t l = rest; l < kLanes; ++l) zr[l] = kMasked<A>;
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] = zr[l] > lanes[l] ? zr[l] : lanes[l];
  }
  const A max = max_of_lanes(lanes);
  // The maximum passes over NaN; exp and the sum do not. -inf - -inf would be NaN too, so such a row shifts by zero.
  const A shift = max == kMasked<A> ? A(0) : max;

  for (int64_t l = 0; l < kLanes; ++l) lanes[l] = A(0);
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      const A e = exp_or_zero(z[i + l] - shift);
      z[i + l] = e;
      lanes[l] += e;
    }
  }
  const A sum = sum_of_lanes(lanes);
  const A inverse = sum == A(0) ? A(0) : A(1) / sum;
  for (int64_t i = 0; i < whole; ++i) y[i] = from_acc<T>(z[i] * inverse);
  if (rest > 0) {
    PaddedGroup<T> py;
    for (int64_t l = 0; l < kLanes; ++l) py.data[l] = from_acc<T>(z[whole + l] * inverse);
    py.to(y + whole, rest);
  }
  return sum == sum;
}

template <class T>
PARALLEL_OPS_INLINE T softmax_gradient(T dy, T y, acc_t<T> sum, acc_t<T> scale) {
  return from_acc<T>(scale * (to_acc(y) * (to_acc(dy) - sum)));
}

// dx = scale * y * (dy - sum(dy * y)), and zero where y is: masked elements get no gradient, whatever the row holds.
template <class T>
PARALLEL_OPS_INLINE void softmax_backward(const T* __restrict dy, const T* __restrict y, T* __restrict dx, int64_t n,
                                          acc_t<T> scale) {
  using A = acc_t<T>;
  const int64_t whole = n / kLanes * kLanes;
  const int64_t rest = n - whole;
  PaddedGroup<T> pdy, py;
  alignas(64) A lanes[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) lanes[l] = A(0);
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += to_acc(dy[i + l]) * to_acc(y[i + l]);
  if (rest > 0) {
    pdy.of(dy + whole, rest);
    py.of(y + whole, rest);
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += to_acc(pdy.data[l]) * to_acc(py.data[l]);
  }
  const A sum = sum_of_lanes(lanes);

  for (int64_t i = 0; i < whole; ++i) dx[i] = softmax_gradient(dy[i], y[i], sum, scale);
  if (rest > 0) {
    PaddedGroup<T> pdx;
    for (int64_t l = 0; l < kLanes; ++l) pdx.data[l] = softmax_gradient(pdy.data[l], py.data[l], sum, scale);
    pdx.to(dx + whole, rest);
  }
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
  static int64_t padded(int64_t n) { return ceil_div(n, kLanes) * kLanes; }
  std::unique_ptr<unsigned char[]> memory_;
};

// Calls f(begin, end) for ranges of rows, in parallel.
template <class F>
void for_each_range_of_rows(Shape2d shape, const F& f) {
  if (shape.rows == 0 || shape.cols == 0) return;
  torch::stable::parallel_for(0, shape.rows, std::max<int64_t>(1, kGrain / shape.cols), f);
}

}  // namespace parallel_ops::cpu
