// scaled_masked_softmax on the CPU: y = softmax(scale * scores, masked); dx = scale * y * (dy - sum(dy * y)).
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../check.h"
#include "../output.h"
#include "../rows.h"
#include "softmax.h"

namespace parallel_ops::cpu {
namespace {

#define DEFINE_ROWS(T)                                                                                         \
  PARALLEL_OPS_MULTIVERSION RowResult<acc_t<T>> forward_row(const T* x, const void* mask, T* y, int64_t n,     \
                                                            acc_t<T> scale, acc_t<T> sink, acc_t<T>* z) {      \
    return softmax_forward(x, mask, y, n, scale, sink, z);                                                     \
  }                                                                                                            \
  PARALLEL_OPS_MULTIVERSION RowResult<acc_t<T>> forward_row(const T* x, const uint8_t* mask, T* y, int64_t n,  \
                                                            acc_t<T> scale, acc_t<T> sink, acc_t<T>* z) {      \
    return softmax_forward(x, mask, y, n, scale, sink, z);                                                     \
  }                                                                                                            \
  PARALLEL_OPS_MULTIVERSION RowResult<acc_t<T>> forward_row(const T* x, const acc_t<T>* mask, T* y, int64_t n, \
                                                            acc_t<T> scale, acc_t<T> sink, acc_t<T>* z) {      \
    return softmax_forward(x, mask, y, n, scale, sink, z);                                                     \
  }                                                                                                            \
  PARALLEL_OPS_MULTIVERSION acc_t<T> backward_row(const T* dy, const T* y, T* dx, int64_t n, acc_t<T> scale,   \
                                                  acc_t<T> sink_share) {                                       \
    return softmax_backward(dy, y, dx, n, scale, sink_share);                                                  \
  }                                                                                                            \
  [[maybe_unused]] PARALLEL_OPS_MULTIVERSION void widen(const T* mask, float* out, int64_t n) {                \
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(to_acc(mask[i]));                              \
  }                                                                                                            \
  [[maybe_unused]] PARALLEL_OPS_MULTIVERSION void widen(const T* mask, double* out, int64_t n) {               \
    for (int64_t i = 0; i < n; ++i) out[i] = to_acc(mask[i]);                                                  \
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
  return PaddedRows<M>("scaled_masked_softmax", "mask", mask, scores.sizes().begin(), dim, strides.data());
}

// A row that holds NaN is NaN throughout, save where it is masked.
template <class T, class Masked>
void fill_with_nan(T* y, int64_t n, const Masked& masked) {
  const acc_t<T> nan = std::numeric_limits<acc_t<T>>::quiet_NaN();
  for (int64_t i = 0; i < n; ++i) y[i] = from_acc<T>(masked(i) ? acc_t<T>(0) : nan);
}

// What a call's rows share.
template <class T>
struct Call {
  const Tensor& x;
  T* y;
  acc_t<T> scale;
  Sinks<acc_t<T>> sinks;
  acc_t<T>* shares;  // null without a sink

  void keep(int64_t row, const RowResult<acc_t<T>>& result) const {
    if (shares) shares[row] = result.sink_share;
  }
};

template <class T>
void forward_unmasked(const Call<T>& call) {
  const PaddedRows<T> xs("scaled_masked_softmax", "scores", call.x);
  const Shape2d shape = rows_and_cols(call.x);
  for_each_range_of_rows(shape, [&](int64_t begin, int64_t end) {
    const RowScratch<T> sx(shape.cols);
    const RowScratch<acc_t<T>> z(shape.cols);
    const void* no_mask = nullptr;
    for (int64_t row = begin; row < end; ++row) {
      const T* xt = xs.read(row, 0, shape.cols, sx.data);
      T* yt = call.y + row * shape.cols;
      call.keep(row, forward_row(xt, no_mask, yt, shape.cols, call.scale, call.sinks(row), z.data));
    }
  });
}

template <class T>
void forward_bool(const Call<T>& call, const Tensor& mask) {
  const PaddedRows<T> xs("scaled_masked_softmax", "scores", call.x);
  const auto masks = mask_rows<uint8_t>(mask, call.x);
  const Shape2d shape = rows_and_cols(call.x);
  for_each_range_of_rows(shape, [&](int64_t begin, int64_t end) {
    const RowScratch<T> sx(shape.cols);
    const RowScratch<uint8_t> sm(shape.cols);
    const RowScratch<acc_t<T>> z(shape.cols);
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* mt = masks.read(row, 0, shape.cols, sm.data);
      T* yt = call.y + row * shape.cols;
      const T* xt = xs.read(row, 0, shape.cols, sx.data);
      const auto result = forward_row(xt, mt, yt, shape.cols, call.scale, call.sinks(row), z.data);
      if (!result.finite) fill_with_nan(yt, shape.cols, [=](int64_t i) { return mt[i] != 0; });
      call.keep(row, result);
    }
  });
}

template <class M, class T>
void forward_additive(const Call<T>& call, const Tensor& mask) {
  using A = acc_t<T>;
  const PaddedRows<T> xs("scaled_masked_softmax", "scores", call.x);
  const auto masks = mask_rows<M>(mask, call.x);
  const Shape2d shape = rows_and_cols(call.x);
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
      T* yt = call.y + row * shape.cols;
      const T* xt = xs.read(row, 0, shape.cols, sx.data);
      const auto result = forward_row(xt, mt, yt, shape.cols, call.scale, call.sinks(row), z.data);
      if (!result.finite) fill_with_nan(yt, shape.cols, [=](int64_t i) { return mt[i] == kMasked<A>; });
      call.keep(row, result);
    }
  });
}

void check_mask(const Tensor& x, const Tensor& mask) {
  PARALLEL_OPS_CHECK(mask.is_cpu(), "scaled_masked_softmax: mask must be on the same device as scores");
  PARALLEL_OPS_CHECK(mask.dim() <= x.dim(), "scaled_masked_softmax: mask must not have more dimensions than scores");
  for (int64_t d = 1; d <= mask.dim(); ++d) {
    const int64_t size = mask.size(mask.dim() - d);
    PARALLEL_OPS_CHECK(size == 1 || size == x.size(x.dim() - d),
                       "scaled_masked_softmax: mask must be broadcastable to the shape of scores");
  }
}

std::tuple<Tensor, Tensor> forward(const Tensor& x, const std::optional<Tensor>& mask,
                                   const std::optional<Tensor>& sink, double scale) {
  constexpr const char* kOp = "scaled_masked_softmax";
  if (mask) check_mask(x, *mask);
  Tensor y = empty_output(x, x.sizes()), share = row_values(x, sink.has_value());
  dispatch(kOp, x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Call<T> call{x, static_cast<T*>(y.mutable_data_ptr()), static_cast<A>(scale), Sinks<A>(kOp, sink, x),
                       sink ? static_cast<A*>(share.mutable_data_ptr()) : nullptr};
    if (!mask) {
      forward_unmasked<T>(call);
    } else if (mask->scalar_type() == ScalarType::Bool || mask->scalar_type() == ScalarType::Byte) {
      forward_bool<T>(call, *mask);
    } else {
      dispatch("scaled_masked_softmax: mask", mask->scalar_type(),
               [&](auto mask_tag) { forward_additive<decltype(mask_tag), T>(call, *mask); });
    }
  });
  return {y, share};
}

std::tuple<Tensor, Tensor> backward(const Tensor& dy, const Tensor& y, const std::optional<Tensor>& share,
                                    double scale) {
  constexpr const char* kOp = "scaled_masked_softmax_backward";
  check_like(kOp, "grad", dy, y);
  Tensor dx = empty_output(y, y.sizes()), sink_grad = row_values(y, share.has_value());
  dispatch(kOp, y.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const PaddedRows<T> dys(kOp, "grad", dy), ys(kOp, "y", y);
    const SinkShares<A> shares(kOp, share, y);
    const Shape2d shape = rows_and_cols(y);
    T* out = static_cast<T*>(dx.mutable_data_ptr());
    A* sink_grads = share ? static_cast<A*>(sink_grad.mutable_data_ptr()) : nullptr;
    for_each_range_of_rows(shape, [&](int64_t begin, int64_t end) {
      const RowScratch<T> sdy(shape.cols), sy(shape.cols);
      for (int64_t row = begin; row < end; ++row) {
        const A gradient = backward_row(dys.read(row, 0, shape.cols, sdy.data), ys.read(row, 0, shape.cols, sy.data),
                                        out + row * shape.cols, shape.cols, static_cast<A>(scale), shares(row));
        if (sink_grads) sink_grads[row] = gradient;
      }
    });
  });
  return {dx, sink_grad};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("scaled_masked_softmax", TORCH_BOX(&forward));
  m.impl("scaled_masked_softmax_backward", TORCH_BOX(&backward));
}

}  // namespace parallel_ops::cpu
