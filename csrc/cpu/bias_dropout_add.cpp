// bias_dropout_add on the CPU: y = residual + keep * (x + bias) / (1 - p); dx = keep * dy / (1 - p),
// dbias = sum of dx over the rows. The keep mask is drawn again from the seed in backward.
#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "column_sum.h"
#include "output.h"
#include "philox.h"
#include "rows.h"

namespace parallel_ops::cpu {
namespace {

// What a tile needs to draw its part of the mask. An element is kept when its word is above last_dropped.
struct Dropout {
  bool on = false;
  uint64_t seed = 0;
  uint64_t index_offset = 0;
  uint32_t last_dropped = 0;
  double scale = 1.0;
  const int64_t* positions = nullptr;  // of x[t] in the whole tensor; null where x is one part of it
  int64_t rows_each = 1;               // rows of cols elements in x[t]

  // The index of the first element of a row, but for index_offset.
  uint64_t index_of(int64_t row, int64_t cols) const {
    if (positions) row = positions[row / rows_each] * rows_each + row % rows_each;
    return static_cast<uint64_t>(row) * static_cast<uint64_t>(cols);
  }
};

Dropout dropout(const char* op, double p, const std::optional<Tensor>& seed, int64_t index_offset,
                const std::optional<Tensor>& positions, const Tensor& x) {
  PARALLEL_OPS_CHECK(p >= 0.0 && p <= 1.0, op, ": p must be between 0 and 1, got ", p);
  PARALLEL_OPS_CHECK(index_offset >= 0, op, ": index_offset must not be negative");
  Dropout d;
  if (!seed) return d;
  PARALLEL_OPS_CHECK(seed->is_cpu() && seed->scalar_type() == ScalarType::Long && seed->numel() == 1, op,
                     ": seed must be one int64 element on the device of the input");
  // Words below the threshold are dropped; at p = 1 it is 2^32, which 32 bits do not hold, hence one less.
  const auto threshold = static_cast<uint64_t>(p * 4294967296.0 + 0.5);
  PARALLEL_OPS_CHECK(threshold > 0, op, ": p = ", p, " drops nothing, so seed must be None");
  d.on = true;
  d.seed = static_cast<uint64_t>(*readable<int64_t>(op, "seed", *seed));
  d.index_offset = static_cast<uint64_t>(index_offset);
  d.last_dropped = static_cast<uint32_t>(threshold - 1);
  d.scale = p < 1.0 ? 1.0 / (1.0 - p) : 0.0;
  if (positions && x.numel() > 0) {
    PARALLEL_OPS_CHECK(positions->is_cpu() && positions->scalar_type() == ScalarType::Long && positions->dim() == 1 &&
                           positions->is_contiguous() && x.dim() > 1 && positions->size(0) == x.size(0),
                       op, ": row_positions must be contiguous int64 [", x.size(0), "], one for each x[t]");
    check_memory(op, "row_positions", *positions);
    d.positions = static_cast<const int64_t*>(positions->const_data_ptr());
    d.rows_each = x.numel() / x.size(0) / x.size(x.dim() - 1);
  }
  return d;
}

// A dropped element is the residual's own bits whatever x holds: chosen, not multiplied by zero.
template <class T>
PARALLEL_OPS_INLINE void forward_loop(const T* __restrict x, const acc_t<T>* __restrict bias,
                                      const T* __restrict residual, T* __restrict y, int64_t n, const Dropout& d,
                                      uint64_t index) {
  if (!d.on) {
    for (int64_t i = 0; i < n; ++i) y[i] = from_acc<T>(to_acc(residual[i]) + (to_acc(x[i]) + bias[i]));
    return;
  }
  PhiloxWords buffer;
  const uint32_t* __restrict words = philox_words(d.seed, d.index_offset + index, n, buffer);
  const auto scale = static_cast<acc_t<T>>(d.scale);
  const uint32_t last_dropped = d.last_dropped;
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> r = to_acc(residual[i]);
    const acc_t<T> kept = r + (to_acc(x[i]) + bias[i]) * scale;
    y[i] = from_acc<T>(words[i] > last_dropped ? kept : r);
  }
}

// v or zero, by a mask of bits: a choice would let the compiler branch around the rounding of zero to fp16, and the
// loop would not vectorise.
PARALLEL_OPS_INLINE float if_kept(bool kept, float v) {
  return bits_as<float>(bits_as<uint32_t>(v) & -static_cast<uint32_t>(kept));
}
PARALLEL_OPS_INLINE double if_kept(bool kept, double v) {
  return bits_as<double>(bits_as<uint64_t>(v) & -static_cast<uint64_t>(kept));
}

template <class T>
PARALLEL_OPS_INLINE void backward_loop(const T* __restrict dy, T* __restrict dx, acc_t<T>* __restrict sum, int64_t n,
                                       const Dropout& d, uint64_t index) {
  if (!d.on) {
    for (int64_t i = 0; i < n; ++i) sum[i] += to_acc(dy[i]);
    return;
  }
  PhiloxWords buffer;
  const uint32_t* __restrict words = philox_words(d.seed, d.index_offset + index, n, buffer);
  const auto scale = static_cast<acc_t<T>>(d.scale);
  const uint32_t last_dropped = d.last_dropped;
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> g = if_kept(words[i] > last_dropped, to_acc(dy[i]) * scale);
    dx[i] = from_acc<T>(g);
    sum[i] += g;
  }
}

#define DEFINE_TILES(T)                                                                                             \
  PARALLEL_OPS_MULTIVERSION void forward_tile(const T* x, const acc_t<T>* bias, const T* residual, T* y, int64_t n, \
                                              const Dropout& d, uint64_t index) {                                   \
    forward_loop(x, bias, residual, y, n, d, index);                                                                \
  }                                                                                                                 \
  PARALLEL_OPS_MULTIVERSION void backward_tile(const T* dy, T* dx, acc_t<T>* sum, int64_t n, const Dropout& d,      \
                                               uint64_t index) {                                                    \
    backward_loop(dy, dx, sum, n, d, index);                                                                        \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_TILES)
#undef DEFINE_TILES

// Reads tiles of a tensor of any floating-point dtype as T.
template <class T>
class Converted {
 public:
  Converted(const char* op, const char* name, const Tensor& t) {
    dispatch(op, t.scalar_type(), [&](auto tag) {
      using From = decltype(tag);
      read_ = [rows = Rows<From>(op, name, t)](int64_t row, int64_t col, int64_t n, T* to) -> const T* {
        Scratch<From> scratch;
        const From* from = rows.tile(row, col, n, scratch.data);
        if constexpr (std::is_same_v<From, T>) {
          std::copy_n(from, n, to);
        } else {
          for (int64_t i = 0; i < n; ++i) to[i] = from_acc<T>(static_cast<acc_t<T>>(to_acc(from[i])));
        }
        return to;
      };
    });
  }
  const T* tile(int64_t row, int64_t col, int64_t n, T* to) const { return read_(row, col, n, to); }

 private:
  std::function<const T*(int64_t, int64_t, int64_t, T*)> read_;
};

// x and residual give tiles of T, whatever their dtypes; y is of T, and may be x itself.
template <class T, class Reader>
void add(const char* op, const Tensor& x, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
         const Dropout& drop, T* out) {
  const Reader xs(op, "x", x);
  std::optional<Reader> residuals;
  if (residual) residuals.emplace(op, "residual", *residual);
  const Bias<acc_t<T>> biases(op, bias);
  const bool flat = !bias && !drop.positions && x.is_contiguous() && (!residual || residual->is_contiguous());
  const Shape2d shape = flat ? Shape2d{1, x.numel()} : rows_and_cols(x);
  for_each_tile(shape, [&](int64_t row, int64_t col, int64_t n) {
    Scratch<T> sx, sr;
    const int64_t index = row * shape.cols + col;
    const T* from = xs.tile(row, col, n, sx.data);
    if (from == out + index) from = std::copy_n(from, n, sx.data) - n;  // the loop's pointers must not alias
    const T* added = residuals ? residuals->tile(row, col, n, sr.data) : kZeroTile<T>.data;
    forward_tile(from, biases.tile(col), added, out + index, n, drop,
                 drop.index_of(row, shape.cols) + static_cast<uint64_t>(col));
  });
}

void add_to(const char* op, const Tensor& x, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
            double p, const std::optional<Tensor>& seed, int64_t index_offset, const std::optional<Tensor>& positions,
            Tensor& y) {
  check_bias(op, x, bias);
  if (residual) check_shape(op, "residual", *residual, x);
  const Dropout drop = dropout(op, p, seed, index_offset, positions, x);
  const ScalarType dtype = y.scalar_type();
  dispatch(op, dtype, [&](auto tag) {
    using T = decltype(tag);
    T* out = static_cast<T*>(y.mutable_data_ptr());
    if (x.scalar_type() == dtype && (!residual || residual->scalar_type() == dtype)) {
      add<T, Rows<T>>(op, x, bias, residual, drop, out);
    } else {
      add<T, Converted<T>>(op, x, bias, residual, drop, out);
    }
  });
}

// y has the wider dtype of x and residual, as their sum in PyTorch.
Tensor forward(const Tensor& x, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
               ScalarType dtype, double p, const std::optional<Tensor>& seed, int64_t index_offset,
               const std::optional<Tensor>& positions) {
  Tensor y = empty_output(dtype, x.sizes());
  add_to("bias_dropout_add", x, bias, residual, p, seed, index_offset, positions, y);
  return y;
}

void inplace(const Tensor& x, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, double p,
             const std::optional<Tensor>& seed, int64_t index_offset, const std::optional<Tensor>& positions) {
  PARALLEL_OPS_CHECK(x.is_cpu() && x.is_contiguous(), "bias_dropout_add_: x must be contiguous");
  Tensor y = x;
  add_to("bias_dropout_add_", x, bias, residual, p, seed, index_offset, positions, y);
}

// Writes n elements of T to a contiguous tensor of any floating-point dtype, from `index` on.
template <class T>
void convert(const T* from, int64_t n, const Tensor& out, int64_t index) {
  dispatch("bias_dropout_add_backward", out.scalar_type(), [&](auto tag) {
    using To = decltype(tag);
    To* to = static_cast<To*>(out.mutable_data_ptr()) + index;
    for (int64_t i = 0; i < n; ++i) to[i] = from_acc<To>(static_cast<acc_t<To>>(to_acc(from[i])));
  });
}

// Without dropout dx is dy, which the caller has: an empty tensor stands for it. Without a bias, dbias is empty.
std::tuple<Tensor, Tensor> backward(const Tensor& dy, ScalarType dtype, std::optional<ScalarType> bias_dtype, double p,
                                    const std::optional<Tensor>& seed, int64_t index_offset,
                                    const std::optional<Tensor>& positions) {
  const Dropout drop = dropout("bias_dropout_add_backward", p, seed, index_offset, positions, dy);
  const bool bias = bias_dtype.has_value();
  const Shape2d shape = !bias && !drop.positions && dy.is_contiguous() ? Shape2d{1, dy.numel()} : rows_and_cols(dy);
  Tensor dx = seed ? empty_output(dtype, dy.sizes()) : empty_tensor({0}, dtype);
  Tensor dbias = empty_tensor({bias ? shape.cols : 0}, bias ? *bias_dtype : dtype);
  const bool same = dtype == dy.scalar_type();
  dispatch("bias_dropout_add_backward", dy.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const Rows<T> dys("bias_dropout_add_backward", "grad", dy);
    T* out = same ? static_cast<T*>(dx.mutable_data_ptr()) : nullptr;
    const auto tile = [&](int64_t row, int64_t col, int64_t n, acc_t<T>* sum) {
      Scratch<T> sdy, sdx;
      const int64_t index = row * shape.cols + col;
      T* to = same && drop.on ? out + index : sdx.data;
      backward_tile(dys.tile(row, col, n, sdy.data), to, sum, n, drop,
                    drop.index_of(row, shape.cols) + static_cast<uint64_t>(col));
      if (!same && drop.on) convert(to, n, dx, index);
    };
    for_each_tile_summing_columns_if<T>(bias, shape, dbias, tile);
  });
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("bias_dropout_add", TORCH_BOX(&forward));
  m.impl("bias_dropout_add_", TORCH_BOX(&inplace));
  m.impl("bias_dropout_add_backward", TORCH_BOX(&backward));
}

}  // namespace parallel_ops::cpu
