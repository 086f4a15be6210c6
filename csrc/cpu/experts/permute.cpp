// permute and unpermute on the CPU: rows of tokens in the order by expert, and their weighted sums back.
#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../lanes.h"
#include "../output.h"
#include "../rows.h"

namespace parallel_ops::cpu {
namespace {

// A sum over rows, in order: as many columns at a time as registers hold, so that sums are not written in between.
template <class T>
PARALLEL_OPS_INLINE void sum_loop(const T* const* rows, const acc_t<T>* weights, int64_t terms, int64_t n, T* out) {
  using A = acc_t<T>;
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) {
    A sum[kLanes<A>] = {};
    for (int64_t j = 0; j < terms; ++j) {
      const T* __restrict y = rows[j] + i;
      const A weight = weights[j];
      asm volatile("");  // or GCC takes rows two by two, and their columns one by one
      for (int64_t l = 0; l < kLanes<A>; ++l) sum[l] += weight * to_acc(y[l]);
    }
    for (int64_t l = 0; l < kLanes<A>; ++l) out[i + l] = from_acc<T>(sum[l]);
  }
  for (; i < n; ++i) {
    A sum = A(0);
    for (int64_t j = 0; j < terms; ++j) sum += weights[j] * to_acc(rows[j][i]);
    out[i] = from_acc<T>(sum);
  }
}
template <class T>
PARALLEL_OPS_INLINE void scale_loop(const T* __restrict x, acc_t<T> weight, int64_t n, T* __restrict y) {
  for (int64_t i = 0; i < n; ++i) y[i] = from_acc<T>(weight * to_acc(x[i]));
}
// Both in one pass over x: y = weight x, and the sum of x z, whose element i goes to lane i % kLanes as in sum_lanes.
template <class T>
PARALLEL_OPS_INLINE acc_t<T> scale_and_dot_loop(const T* __restrict x, acc_t<T> weight, const T* __restrict z,
                                                int64_t n, T* __restrict y) {
  using A = acc_t<T>;
  A lane[kLanes<A>] = {};
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) {
    for (int64_t l = 0; l < kLanes<A>; ++l) {
      const A wide = to_acc(x[i + l]);
      lane[l] += wide * to_acc(z[i + l]);
      y[i + l] = from_acc<T>(weight * wide);
    }
  }
  for (int64_t l = 0; i + l < n; ++l) {
    const A wide = to_acc(x[i + l]);
    lane[l] += wide * to_acc(z[i + l]);
    y[i + l] = from_acc<T>(weight * wide);
  }
  return sum_of_lanes<kLanes<A>>(lane);
}

#define DEFINE_LOOPS(T)                                                                                            \
  PARALLEL_OPS_MULTIVERSION void sum_rows(const T* const* rows, const acc_t<T>* weights, int64_t terms, int64_t n, \
                                          T* out) {                                                                \
    sum_loop(rows, weights, terms, n, out);                                                                        \
  }                                                                                                                \
  PARALLEL_OPS_MULTIVERSION void scale_row(const T* x, acc_t<T> weight, int64_t n, T* y) {                         \
    scale_loop(x, weight, n, y);                                                                                   \
  }                                                                                                                \
  PARALLEL_OPS_MULTIVERSION acc_t<T> dot_row(const T* x, const T* y, int64_t n) {                                  \
    return sum_lanes<acc_t<T>>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA { return to_acc(x[i]) * to_acc(y[i]); });     \
  }                                                                                                                \
  PARALLEL_OPS_MULTIVERSION acc_t<T> scale_and_dot_row(const T* x, acc_t<T> weight, const T* z, int64_t n, T* y) { \
    return scale_and_dot_loop(x, weight, z, n, y);                                                                 \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_LOOPS)
#undef DEFINE_LOOPS

// The order by expert, whose numbers are checked first.
class Order {
 public:
  Order(const char* op, const Tensor& rows, const Tensor& places) {
    PARALLEL_OPS_CHECK(rows.is_cpu() && rows.scalar_type() == ScalarType::Int && rows.dim() == 1 &&
                           rows.is_contiguous() && places.is_cpu() && places.scalar_type() == ScalarType::Int &&
                           places.dim() == 2 && places.is_contiguous() && places.size(1) > 0,
                       op, ": order must be what sort_by_expert returned");
    rows_ = readable<int32_t>(op, "rows", rows);
    places_ = readable<int32_t>(op, "places", places);
    count_ = rows.size(0);
    tokens_ = places.size(0);
    choices_ = places.size(1);
    check(op, rows_, count_, tokens_ * choices_);
    check(op, places_, tokens_ * choices_, count_);
  }
  int64_t rows() const { return count_; }
  int64_t tokens() const { return tokens_; }
  int64_t choices() const { return choices_; }
  // The slot (token * choices + choice) of a row, -1 for padding.
  int64_t slot(int64_t row) const { return rows_[row]; }
  // The row of a slot, -1 where it was dropped.
  int64_t place(int64_t slot) const { return places_[slot]; }

 private:
  static void check(const char* op, const int32_t* values, int64_t count, int64_t end) {
    int32_t least = -1, most = -1;
    for (int64_t i = 0; i < count; ++i) {
      least = std::min(least, values[i]);
      most = std::max(most, values[i]);
    }
    PARALLEL_OPS_CHECK(least == -1 && most < end, op, ": order holds ", least < -1 ? least : most,
                       ", which is neither -1 nor below ", end);
  }
  const int32_t* rows_;
  const int32_t* places_;
  int64_t count_, tokens_, choices_;
};

void check_rows(const char* op, const char* name, const Tensor& t, int64_t rows) {
  PARALLEL_OPS_CHECK(t.is_cpu() && t.dim() == 2 && t.size(0) == rows, op, ": ", name, " must be [", rows, ", h]");
}

// Calls f(begin, end) for ranges of rows of `cols` columns, in parallel.
template <class F>
void for_rows(int64_t rows, int64_t cols, const F& f) {
  if (rows > 0) torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cols)), f);
}

Tensor permute(const Tensor& x, const Tensor& rows, const Tensor& places) {
  const char* op = "permute";
  const Order order(op, rows, places);
  check_rows(op, "x", x, order.tokens());
  const int64_t cols = x.size(1);
  Tensor out = empty_output(x, {order.rows(), cols});
  dispatch(op, x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const Rows<T> xs(op, "x", x);
    T* to = static_cast<T*>(out.mutable_data_ptr());
    for_each_tile({order.rows(), cols}, [&](int64_t row, int64_t col, int64_t n) {
      const int64_t slot = order.slot(row);
      T* y = to + row * cols + col;
      Scratch<T> scratch;
      if (slot < 0) {
        std::fill_n(y, n, T(0));
      } else {
        std::memcpy(static_cast<void*>(y), xs.tile(slot / order.choices(), col, n, scratch.data),
                    static_cast<size_t>(n) * sizeof(T));
      }
    });
  });
  return out;
}

void check_weights(const char* op, const Order& order, const std::optional<Tensor>& weights) {
  PARALLEL_OPS_CHECK(!weights || (weights->is_cpu() && weights->dim() == 2 && weights->size(0) == order.tokens() &&
                                  weights->size(1) == order.choices()),
                     op, ": weights must be [", order.tokens(), ", ", order.choices(), "]");
}

Tensor unpermute(const Tensor& y, const Tensor& rows, const Tensor& places, const std::optional<Tensor>& weights) {
  const char* op = "unpermute";
  const Order order(op, rows, places);
  check_rows(op, "y", y, order.rows());
  check_weights(op, order, weights);
  const int64_t cols = y.size(1), choices = order.choices();
  Tensor out = empty_output(y, {order.tokens(), cols});
  dispatch(op, y.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Rows<T> ys(op, "y", y);
    std::optional<Values<A>> w;
    if (weights) w.emplace(op, "weights", *weights);
    T* to = static_cast<T*>(out.mutable_data_ptr());
    for_rows(order.tokens(), choices * cols, [&](int64_t begin, int64_t end) {
      std::vector<Scratch<T>> scratch(static_cast<size_t>(choices));
      std::vector<const T*> from(static_cast<size_t>(choices));
      std::vector<A> factors(static_cast<size_t>(choices));
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t col = 0; col < cols; col += kTileCols) {
          const int64_t n = std::min(kTileCols, cols - col);
          size_t terms = 0;
          for (int64_t slot = token * choices; slot < (token + 1) * choices; ++slot) {
            const int64_t row = order.place(slot);
            if (row < 0) continue;
            from[terms] = ys.tile(row, col, n, scratch[terms].data);
            factors[terms++] = w ? (*w)[slot] : A(1);
          }
          sum_rows(from.data(), factors.data(), static_cast<int64_t>(terms), n, to + token * cols + col);
        }
      }
    });
  });
  return out;
}

// dy in the dtype of grad, and dweights in that of weights; either is empty where it is not needed. y is given where
// the gradient of weights is.
std::tuple<Tensor, Tensor> unpermute_backward(const Tensor& grad, const std::optional<Tensor>& y, const Tensor& rows,
                                              const Tensor& places, const std::optional<Tensor>& weights,
                                              bool needs_y) {
  const char* op = "unpermute_backward";
  const Order order(op, rows, places);
  check_rows(op, "grad", grad, order.tokens());
  check_weights(op, order, weights);
  const bool needs_weights = weights && y;
  const int64_t cols = grad.size(1), choices = order.choices();
  if (needs_weights) {
    check_rows(op, "y", *y, order.rows());
    PARALLEL_OPS_CHECK(y->size(1) == cols && y->scalar_type() == grad.scalar_type(), op,
                       ": y must have the width and dtype of grad");
  }
  Tensor dy = needs_y ? empty_output(grad, {order.rows(), cols}) : empty_tensor({0}, grad.scalar_type());
  Tensor dweights =
      needs_weights ? empty_tensor(weights->sizes(), weights->scalar_type()) : empty_tensor({0}, grad.scalar_type());
  dispatch(op, grad.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Rows<T> grads(op, "grad", grad);
    std::optional<Rows<T>> ys;
    std::optional<Values<A>> w;
    if (needs_weights) ys.emplace(op, "y", *y);
    if (weights) w.emplace(op, "weights", *weights);
    std::vector<A> dots(static_cast<size_t>(needs_weights ? order.tokens() * choices : 0));  // 0 for dropped slots
    T* to = static_cast<T*>(dy.mutable_data_ptr());
    for_rows(order.rows(), cols, [&](int64_t begin, int64_t end) {
      Scratch<T> grad_scratch, y_scratch;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t slot = order.slot(row);
        if (slot < 0) {
          if (needs_y) std::fill_n(to + row * cols, cols, T(0));
          continue;
        }
        const A weight = w ? (*w)[slot] : A(1);
        for (int64_t col = 0; col < cols; col += kTileCols) {
          const int64_t n = std::min(kTileCols, cols - col);
          const T* g = grads.tile(slot / choices, col, n, grad_scratch.data);
          T* dy_row = needs_y ? to + row * cols + col : nullptr;
          if (!needs_weights) {
            if (needs_y) scale_row(g, weight, n, dy_row);
            continue;
          }
          const T* y_row = ys->tile(row, col, n, y_scratch.data);
          dots[static_cast<size_t>(slot)] +=
              needs_y ? scale_and_dot_row(g, weight, y_row, n, dy_row) : dot_row(g, y_row, n);
        }
      }
    });
    if (needs_weights) store_values(dots.data(), dweights);
  });
  return {dy, dweights};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("permute", TORCH_BOX(&permute));
  m.impl("unpermute", TORCH_BOX(&unpermute));
  m.impl("unpermute_backward", TORCH_BOX(&unpermute_backward));
}

}  // namespace parallel_ops::cpu
