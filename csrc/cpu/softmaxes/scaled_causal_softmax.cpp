// scaled_causal_softmax on the CPU: each query's softmax over the keys it sees; the rest of its row is zeros,
// written without reading scores, y or dy there.
#include <algorithm>
#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "../check.h"
#include "../output.h"
#include "../rows.h"
#include "softmax.h"

namespace parallel_ops::cpu {
namespace {

#define DEFINE_ROWS(T)                                                                                       \
  PARALLEL_OPS_MULTIVERSION RowResult<acc_t<T>> forward_row(const T* x, T* y, int64_t n, acc_t<T> scale,     \
                                                            acc_t<T> sink, acc_t<T>* z) {                    \
    return softmax_forward(x, static_cast<const void*>(nullptr), y, n, scale, sink, z);                      \
  }                                                                                                          \
  PARALLEL_OPS_MULTIVERSION acc_t<T> backward_row(const T* dy, const T* y, T* dx, int64_t n, acc_t<T> scale, \
                                                  acc_t<T> sink_share) {                                     \
    return softmax_backward(dy, y, dx, n, scale, sink_share);                                                \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_ROWS)
#undef DEFINE_ROWS

Shape2d check_shape(const char* op, const Tensor& x, const std::optional<int64_t>& window) {
  PARALLEL_OPS_CHECK(x.dim() >= 2 && x.size(x.dim() - 2) <= x.size(x.dim() - 1), op,
                     ": there must be at least as many keys (last dimension) as queries (second to last)");
  PARALLEL_OPS_CHECK(!window || *window >= 1, op, ": window must be at least 1");
  return {x.size(x.dim() - 2), x.size(x.dim() - 1)};
}

// Calls f(row, first, n) for every query, in parallel: it sees keys first..first+n. Queries are taken from both
// ends of the triangle in turn (0, last, 1, last - 1, ...), so that every thread's share is the same work.
template <class T, class F>
void for_each_query(Shape2d shape, int64_t rows, std::optional<int64_t> window, T* out, const F& make) {
  for_each_range_of_rows({rows, shape.cols}, [&](int64_t begin, int64_t end) {
    const auto f = make();
    for (int64_t task = begin; task < end; ++task) {
      const int64_t turn = task % shape.rows;
      const int64_t query = turn % 2 == 0 ? turn / 2 : shape.rows - 1 - turn / 2;
      const int64_t row = task - turn + query;
      const int64_t last = query + 1 + shape.cols - shape.rows;
      const int64_t first = window && *window < last ? last - *window : 0;
      T* o = out + row * shape.cols;
      std::fill_n(o, first, T(0));
      f(row, first, last - first, o + first);
      std::fill_n(o + last, shape.cols - last, T(0));
    }
  });
}

std::tuple<Tensor, Tensor> forward(const Tensor& x, const std::optional<Tensor>& sink, double scale,
                                   std::optional<int64_t> window) {
  constexpr const char* kOp = "scaled_causal_softmax";
  const Shape2d shape = check_shape(kOp, x, window);
  Tensor y = empty_output(x, x.sizes()), share = row_values(x, sink.has_value());
  dispatch(kOp, x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const PaddedRows<T> xs(kOp, "scores", x);
    const Sinks<A> sinks(kOp, sink, x);
    A* shares = sink ? static_cast<A*>(share.mutable_data_ptr()) : nullptr;
    for_each_query(shape, rows_and_cols(x).rows, window, static_cast<T*>(y.mutable_data_ptr()), [&] {
      return [&, sx = RowScratch<T>(shape.cols), z = RowScratch<A>(shape.cols)](int64_t row, int64_t first, int64_t n,
                                                                                T* out) {
        const auto result =
            forward_row(xs.read(row, first, n, sx.data), out, n, static_cast<A>(scale), sinks(row), z.data);
        if (shares) shares[row] = result.sink_share;
      };
    });
  });
  return {y, share};
}

std::tuple<Tensor, Tensor> backward(const Tensor& dy, const Tensor& y, const std::optional<Tensor>& share, double scale,
                                    std::optional<int64_t> window) {
  constexpr const char* kOp = "scaled_causal_softmax_backward";
  const Shape2d shape = check_shape(kOp, y, window);
  check_like(kOp, "grad", dy, y);
  Tensor dx = empty_output(y, y.sizes()), sink_grad = row_values(y, share.has_value());
  dispatch(kOp, y.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const PaddedRows<T> dys(kOp, "grad", dy), ys(kOp, "y", y);
    const SinkShares<A> shares(kOp, share, y);
    A* sink_grads = share ? static_cast<A*>(sink_grad.mutable_data_ptr()) : nullptr;
    for_each_query(shape, rows_and_cols(y).rows, window, static_cast<T*>(dx.mutable_data_ptr()), [&] {
      return [&, sdy = RowScratch<T>(shape.cols), sy = RowScratch<T>(shape.cols)](int64_t row, int64_t first, int64_t n,
                                                                                  T* out) {
        const A gradient = backward_row(dys.read(row, first, n, sdy.data), ys.read(row, first, n, sy.data), out, n,
                                        static_cast<A>(scale), shares(row));
        if (sink_grads) sink_grads[row] = gradient;
      };
    });
  });
  return {dx, sink_grad};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("scaled_causal_softmax", TORCH_BOX(&forward));
  m.impl("scaled_causal_softmax_backward", TORCH_BOX(&backward));
}

}  // namespace parallel_ops::cpu
