// scaled_masked_softmax on the CPU: y = softmax(scale * scores, masked); dx = scale * y * (dy - sum(dy * y)).
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "output.h"
#include "rows.h"
#include "softmax.h"

namespace parallel_ops::cpu {
namespace {

#define DEFINE_ROWS(T)                                                                                          \
  PARALLEL_OPS_MULTIVERSION bool forward_row(const T* x, const void* no_mask, T* y, int64_t n, acc_t<T> scale,  \
                                             acc_t<T>* z) {                                                     \
    return softmax_forward(x, no_mask, y, n, scale, z);                                                         \
  }                                                                                                             \
  PARALLEL_OPS_MULTIVERSION bool forward_row(const T* x, const uint8_t* mask, T* y, int64_t n, acc_t<T> scale,  \
                                             acc_t<T>* z) {                                                     \
    return softmax_forward(x, mask, y, n, scale, z);                                                            \
  }                                                                                                             \
  PARALLEL_OPS_MULTIVERSION bool forward_row(const T* x, const acc_t<T>* mask, T* y, int64_t n, acc_t<T> scale, \
                                             acc_t<T>* z) {                                                     \
    return softmax_forward(x, mask, y, n, scale, z);                                                            \
  }                                                                                                             \
  PARALLEL_OPS_MULTIVERSION void backward_row(const T* dy, const T* y, T* dx, int64_t n, acc_t<T> scale) {      \
    softmax_backward(dy, y, dx, n, scale);                                                                      \
  }                                                                                                             \
  [[maybe_unused]] PARALLEL_OPS_MULTIVERSION void widen(const T* mask, float* out, int64_t n) {                 \
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(to_acc(mask[i]));                               \
  }                                                                                                             \
  [[maybe_unused]] PARALLEL_OPS_MULTIVERSION void widen(const T* mask, double* out, int64_t n) {                \
    for (int64_t i = 0; i < n; ++i) out[i] = to_acc(mask[i]);                                                   \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_ROWS)
#undef DEFINE_ROWS

// The rows of a mask broadcast against the scores: size-1 dimensions are read again and again, never expanded.
template <class M>
PaddedRows<M> mask_rows(const Tensor& mask, const Tensor& scores) {
  const int64_t dim = scores.dim(), missing = dim - mask.dim();
  std::vector<int64_t> strides(static_cast<size_t>(dim), 0);
  for (int64_t d = 0; d < mask.dim(); ++d)
    if (mask.size(d) != 1) strides[static_cast<size_t>(missing + d)] = mask.stride(d);
  return PaddedRows<M>(mask, scores.sizes().begin(), dim, strides.data());
}

// A row that holds NaN is NaN throughout, save where it is masked.
template <class T, class Masked>
void fill_with_nan(T* y, int64_t n, const Masked& masked) {
  const acc_t<T> nan = std::numeric_limits<acc_t<T>>::quiet_NaN();
  for (int64_t i = 0; i < n; ++i) y[i] = from_acc<T>(masked(i) ? acc_t<T>(0) : nan);
}

template <class T>
void forward_unmasked(const Tensor& x, T* out, acc_t<T> scale) {
  const PaddedRows<T> xs(x);
  const Shape2d shape = rows_and_cols(x);
  for_each_range_of_rows(shape, [&](int64_t begin, int64_t end) {
    const RowScratch<T> sx(shape.cols);
    const RowScratch<acc_t<T>> z(shape.cols);
    const void* no_mask = nullptr;
    for (int64_t row = begin; row < end; ++row)
      forward_row(xs.read(row, 0, shape.cols, sx.data), no_mask, out + row * shape.cols, shape.cols, scale, z.data);
  });
}

template <class T>
void forward_bool(const Tensor& x, const Tensor& mask, T* out, acc_t<T> scale) {
  const PaddedRows<T> xs(x);
  const auto masks = mask_rows<uint8_t>(mask, x);
  const Shape2d shape = rows_and_cols(x);
  for_each_range_of_rows(shape, [&](int64_t begin, int64_t end) {
    const RowScratch<T> sx(shape.cols);
    const RowScratch<uint8_t> sm(shape.cols);
    const RowScratch<acc_t<T>> z(shape.cols);
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* mt = masks.read(row, 0, shape.cols, sm.data);
      T* yt = out + row * shape.cols;
      if (!forward_row(xs.read(row, 0, shape.cols, sx.data), mt, yt, shape.cols, scale, z.data))
        fill_with_nan(yt, shape.cols, [=](int64_t i) { return mt[i] != 0; });
    }
  });
}

template <class M, class T>
void forward_additive(const Tensor& x, const Tensor& mask, T* out, acc_t<T> scale) {
  using A = acc_t<T>;
  const PaddedRows<T> xs(x);
  const auto masks = mask_rows<M>(mask, x);
  const Shape2d shape = rows_and_cols(x);
  for_each_range_of_rows(shape, [&](int64_t begin, int64_t end) {
    const RowScratch<T> sx(shape.cols);
    const RowScratch<M> sm(shape.cols);
    const RowScratch<A> wide(shape.cols), z(shape.cols);
    for (int64_t row = begin; row < end; ++row) {
      const M* narrow = masks.read(row, 0, shape.cols, sm.data);
      const A* mt = wide.data;
      if constexpr (std::is_same_v<M, A>) {
        mt = narrow;
      } else {
        widen(narrow, wide.data, shape.cols);
      }
      T* yt = out + row * shape.cols;
      if (!forward_row(xs.read(row, 0, shape.cols, sx.data), mt, yt, shape.cols, scale, z.data))
        fill_with_nan(yt, shape.cols, [=](int64_t i) { return mt[i] == kMasked<A>; });
    }
  });
}

void check_mask(const Tensor& x, const Tensor& mask) {
  STD_TORCH_CHECK(mask.is_cpu(), "scaled_masked_softmax: mask must be on the same device as scores");
  STD_TORCH_CHECK(mask.dim() <= x.dim(), "scaled_masked_softmax: mask must not have more dimensions than scores");
  for (int64_t d = 1; d <= mask.dim(); ++d) {
    const int64_t size = mask.size(mask.dim() - d);
    STD_TORCH_CHECK(size == 1 || size == x.size(x.dim() - d),
                    "scaled_masked_softmax: mask must be broadcastable to the shape of scores");
  }
}

Tensor forward(const Tensor& x, const std::optional<Tensor>& mask, double scale) {
  if (mask) check_mask(x, *mask);
  Tensor y = empty_output(x, x.sizes());
  dispatch("scaled_masked_softmax", x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    T* out = static_cast<T*>(y.mutable_data_ptr());
    const auto s = static_cast<acc_t<T>>(scale);
    if (!mask) {
      forward_unmasked<T>(x, out, s);
    } else if (mask->scalar_type() == ScalarType::Bool) {
      forward_bool<T>(x, *mask, out, s);
    } else {
      dispatch("scaled_masked_softmax: mask", mask->scalar_type(),
               [&](auto mask_tag) { forward_additive<decltype(mask_tag), T>(x, *mask, out, s); });
    }
  });
  return y;
}

Tensor backward(const Tensor& dy, const Tensor& y, double scale) {
  check_like("scaled_masked_softmax_backward", "grad", dy, y);
  Tensor dx = empty_output(y, y.sizes());
  dispatch("scaled_masked_softmax_backward", y.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const PaddedRows<T> dys(dy), ys(y);
    const Shape2d shape = rows_and_cols(y);
    T* out = static_cast<T*>(dx.mutable_data_ptr());
    for_each_range_of_rows(shape, [&](int64_t begin, int64_t end) {
      const RowScratch<T> sdy(shape.cols), sy(shape.cols);
      for (int64_t row = begin; row < end; ++row)
        backward_row(dys.read(row, 0, shape.cols, sdy.data), ys.read(row, 0, shape.cols, sy.data),
                     out + row * shape.cols, shape.cols, static_cast<acc_t<T>>(scale));
    });
  });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("scaled_masked_softmax", TORCH_BOX(&forward));
  m.impl("scaled_masked_softmax_backward", TORCH_BOX(&backward));
}

}  // namespace parallel_ops::cpu
