// Shared by the softmaxes: one row's forward and backward, the scratch that a row needs, and the walk over rows.
//
// Forward, with the row's logits kept in fp32 scratch in between: (1) read the row, write its logits, take their
// maximum; (2) exponentiate in place and sum; (3) scale, round, write. Memory sees one read and one write, and
// exp is computed once. Backward reads y and dy twice, the second time from the cache.
//
// Maxima and sums run in kExpLanes fixed lanes, joined in a fixed order: the compiler can vectorise them without
// leave to reorder additions, and the bits do not depend on the thread count.
//
// A sink is one more logit of a row, whose probability is in no output; -inf is no sink.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>

#include <torch/csrc/stable/ops.h>

#include "../../error.h"
#include "../dtype.h"
#include "../lanes.h"
#include "../math.h"
#include "../output.h"
#include "../rows.h"

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

// What a row leaves behind besides its probabilities.
template <class A>
struct RowResult {
  A sink_share;  // the probability of the sink
  bool finite;   // false if the row came out as NaN: masked elements (0 * NaN) are still to be put right
};

// y = softmax of the logits; x, mask and the scratch z are readable up to n rounded up to kExpLanes. M is void without
// a mask. A row whose logits are all -inf gives zeros.
template <class T, class M>
PARALLEL_OPS_INLINE RowResult<acc_t<T>> softmax_forward(const T* __restrict x, const M* __restrict mask,
                                                        T* __restrict y, int64_t n, acc_t<T> scale, acc_t<T> sink,
                                                        acc_t<T>* __restrict z) {
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
  const A largest = max_of_lanes<kExpLanes>(lanes);
  const A max = sink > largest ? sink : largest;
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
  const A sink_exp = exp_or_zero(sink - shift);
  const A sum = sum_of_lanes<kExpLanes>(lanes) + sink_exp;
  const A inverse = sum == A(0) ? A(0) : A(1) / sum;
  for (int64_t i = 0; i < n; ++i) y[i] = from_acc<T>(z[i] * inverse);
  return {sink_exp * inverse, sum == sum};
}

template <class T>
PARALLEL_OPS_INLINE T softmax_gradient(T dy, T y, acc_t<T> mean, acc_t<T> scale) {
  return from_acc<T>(scale * (to_acc(y) * (to_acc(dy) - mean)));
}

// dx = scale * y * (dy - mean), mean that of dy under the row's probabilities, and zero where y is: masked elements get
// no gradient, whatever the row holds. dy and y are readable up to n rounded up to kExpLanes. Returns the gradient of
// the row's sink, whose probability is `sink_share`.
//
// The saved y is rounded, so the mean is divided by what y sums to, not by what it should sum to: else a dy with a mean
// would leave that mean times the rounding error of the sum.
template <class T>
PARALLEL_OPS_INLINE acc_t<T> softmax_backward(const T* __restrict dy, const T* __restrict y, T* __restrict dx,
                                              int64_t n, acc_t<T> scale, acc_t<T> sink_share) {
  using A = acc_t<T>;
  const int64_t whole = n / kExpLanes * kExpLanes;
  alignas(64) A weighted[kExpLanes];
  alignas(64) A lanes[kExpLanes];
  for (int64_t l = 0; l < kExpLanes; ++l) weighted[l] = lanes[l] = A(0);
  for (int64_t i = 0; i < whole; i += kExpLanes) {
    for (int64_t l = 0; l < kExpLanes; ++l) {
      weighted[l] += to_acc(dy[i + l]) * to_acc(y[i + l]);
      lanes[l] += to_acc(y[i + l]);
    }
  }
  if (whole < n) {
    const auto rest = static_cast<int32_t>(n - whole);
    for (int32_t l = 0; l < kExpLanes; ++l) {
      const A v = to_acc(y[whole + l]), product = to_acc(dy[whole + l]) * v;
      weighted[l] += l < rest ? product : A(0);
      lanes[l] += l < rest ? v : A(0);
    }
  }
  const A total = sum_of_lanes<kExpLanes>(lanes);
  const A product = sum_of_lanes<kExpLanes>(weighted);
  const A mean = total == A(0) ? A(0) : product / total * (A(1) - sink_share);
  for (int64_t i = 0; i < n; ++i) dx[i] = softmax_gradient(dy[i], y[i], mean, scale);
  // Every dy is finite if their sum is, and dy - mean too if the mean is not huge; otherwise 0 * (dy - mean) may be
  // NaN.
  constexpr A kHuge = std::numeric_limits<A>::max() * std::numeric_limits<A>::epsilon() / 4;
  if (!(std::fabs(product) < kHuge && std::fabs(mean) < kHuge)) {
    for (int64_t i = 0; i < n; ++i)
      if (to_acc(y[i]) == A(0)) dx[i] = from_acc<T>(A(0));
  }
  return sink_share == A(0) ? A(0) : -sink_share * mean;
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
  PaddedRows(const char* op, const char* name, const Tensor& t, const int64_t* sizes, int64_t dim,
             const int64_t* strides)
      : rows_(op, name, t, sizes, dim, strides),
        end_(static_cast<const T*>(t.const_data_ptr()) + extent(sizes, dim, strides)) {}
  PaddedRows(const char* op, const char* name, const Tensor& t)
      : PaddedRows(op, name, t, t.sizes().begin(), t.dim(), t.strides().begin()) {}

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

// The sink of every row: of its head, the last dimension but two, or one for all; -inf where there is none.
template <class A>
class Sinks {
 public:
  Sinks(const char* op, const std::optional<Tensor>& sink, const Tensor& scores) {
    if (!sink) return;
    PARALLEL_OPS_CHECK(
        sink->is_cpu() && sink->scalar_type() == (sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float), op,
        ": sink must be on the same device as scores, float32 (float64 for float64 scores)");
    PARALLEL_OPS_CHECK(sink->dim() == 1 && sink->is_contiguous(), op, ": sink must be a contiguous vector");
    heads_ = sink->numel();
    PARALLEL_OPS_CHECK(heads_ == 1 || (scores.dim() >= 3 && heads_ == scores.size(scores.dim() - 3)), op,
                       ": sink must have one element, or one for each head (the last dimension of scores but two)");
    queries_ = scores.dim() >= 2 ? std::max<int64_t>(1, scores.size(scores.dim() - 2)) : 1;
    sinks_ = readable<A>(op, "sink", *sink);
  }
  A operator()(int64_t row) const { return sinks_ ? sinks_[row / queries_ % heads_] : kMasked<A>; }

 private:
  const A* sinks_ = nullptr;
  int64_t heads_ = 1, queries_ = 1;
};

// A value of the arithmetic for each row of `like`, or none.
inline Tensor row_values(const Tensor& like, bool wanted) {
  const ScalarType dtype = like.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  return empty_tensor({wanted ? rows_and_cols(like).rows : 0}, dtype);
}

// Each row's probability of its sink; zero where there is none.
template <class A>
class SinkShares {
 public:
  SinkShares(const char* op, const std::optional<Tensor>& shares, const Tensor& y) {
    if (!shares) return;
    PARALLEL_OPS_CHECK(shares->is_cpu() &&
                           shares->scalar_type() == (sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float) &&
                           shares->is_contiguous() && shares->numel() == rows_and_cols(y).rows,
                       op, ": sink_share must be what the forward returned");
    shares_ = readable<A>(op, "sink_share", *shares);
  }
  A operator()(int64_t row) const { return shares_ ? shares_[row] : A(0); }

 private:
  const A* shares_ = nullptr;
};

// Calls f(begin, end) for ranges of rows, in parallel.
template <class F>
void for_each_range_of_rows(Shape2d shape, const F& f) {
  if (shape.rows == 0 || shape.cols == 0) return;
  torch::stable::parallel_for(0, shape.rows, std::max<int64_t>(1, kGrain / shape.cols), f);
}

}  // namespace parallel_ops::cpu
