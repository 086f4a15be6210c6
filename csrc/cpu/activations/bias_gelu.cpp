// bias_gelu on the CPU: y = gelu(x + bias); dx = dy * gelu'(x + bias), dbias = sum of dx over the rows.
#include <algorithm>
#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "../check.h"
#include "../column_sum.h"
#include "../math.h"
#include "../output.h"
#include "../rows.h"

namespace parallel_ops::cpu {
namespace {

template <bool kTanh, class T>
PARALLEL_OPS_INLINE void forward_loop(const T* __restrict x, const acc_t<T>* __restrict bias, T* __restrict y,
                                      int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = from_acc<T>(gelu<kTanh>(to_acc(x[i]) + bias[i]).value);
}

template <bool kTanh, class T>
PARALLEL_OPS_INLINE void backward_loop(const T* __restrict dy, const T* __restrict x, const acc_t<T>* __restrict bias,
                                       T* __restrict dx, acc_t<T>* __restrict dbias, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> g = to_acc(dy[i]) * gelu<kTanh>(to_acc(x[i]) + bias[i]).slope;
    dx[i] = from_acc<T>(g);
    dbias[i] += g;
  }
}

#define DEFINE_TILES(T)                                                                                            \
  PARALLEL_OPS_MULTIVERSION void forward_tanh(const T* x, const acc_t<T>* bias, T* y, int64_t n) {                 \
    forward_loop<true>(x, bias, y, n);                                                                             \
  }                                                                                                                \
  PARALLEL_OPS_MULTIVERSION void forward_erf(const T* x, const acc_t<T>* bias, T* y, int64_t n) {                  \
    forward_loop<false>(x, bias, y, n);                                                                            \
  }                                                                                                                \
  PARALLEL_OPS_MULTIVERSION void backward_tanh(const T* dy, const T* x, const acc_t<T>* bias, T* dx, acc_t<T>* db, \
                                               int64_t n) {                                                        \
    backward_loop<true>(dy, x, bias, dx, db, n);                                                                   \
  }                                                                                                                \
  PARALLEL_OPS_MULTIVERSION void backward_erf(const T* dy, const T* x, const acc_t<T>* bias, T* dx, acc_t<T>* db,  \
                                              int64_t n) {                                                         \
    backward_loop<false>(dy, x, bias, dx, db, n);                                                                  \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_TILES)
#undef DEFINE_TILES

Tensor forward(const Tensor& x, const std::optional<Tensor>& bias, bool tanh) {
  check_bias("bias_gelu", x, bias);
  Tensor y = empty_output(x, x.sizes());
  dispatch("bias_gelu", x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const Rows<T> xs("bias_gelu", "x", x);
    const Bias<acc_t<T>> biases("bias_gelu", bias);
    T* out = static_cast<T*>(y.mutable_data_ptr());
    // Contiguous rows without a bias are one long row, so that a narrow last dimension costs nothing.
    const Shape2d shape = !bias && x.is_contiguous() ? Shape2d{1, x.numel()} : rows_and_cols(x);
    for_each_tile(shape, [&](int64_t row, int64_t col, int64_t n) {
      Scratch<T> sx;
      const T* xt = xs.tile(row, col, n, sx.data);
      T* yt = out + row * shape.cols + col;
      tanh ? forward_tanh(xt, biases.tile(col), yt, n) : forward_erf(xt, biases.tile(col), yt, n);
    });
  });
  return y;
}

// Without a bias, dbias is empty.
std::tuple<Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const std::optional<Tensor>& bias, bool tanh) {
  check_bias("bias_gelu_backward", x, bias);
  check_like("bias_gelu_backward", "grad", dy, x);
  const Shape2d shape = !bias && x.is_contiguous() && dy.is_contiguous() ? Shape2d{1, x.numel()} : rows_and_cols(x);
  Tensor dx = empty_output(x, x.sizes());
  Tensor dbias = empty_tensor({bias ? shape.cols : 0}, bias ? bias->scalar_type() : x.scalar_type());
  dispatch("bias_gelu_backward", x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const Rows<T> dys("bias_gelu_backward", "grad", dy), xs("bias_gelu_backward", "x", x);
    const Bias<acc_t<T>> biases("bias_gelu_backward", bias);
    T* out = static_cast<T*>(dx.mutable_data_ptr());
    const auto tile = [&](int64_t row, int64_t col, int64_t n, acc_t<T>* sum) {
      Scratch<T> sdy, sx;
      const T* dyt = dys.tile(row, col, n, sdy.data);
      const T* xt = xs.tile(row, col, n, sx.data);
      T* dxt = out + row * shape.cols + col;
      tanh ? backward_tanh(dyt, xt, biases.tile(col), dxt, sum, n)
           : backward_erf(dyt, xt, biases.tile(col), dxt, sum, n);
    };
    for_each_tile_summing_columns_if<T>(bias.has_value(), shape, dbias, tile);
  });
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&forward));
  m.impl("bias_gelu_backward", TORCH_BOX(&backward));
}

}  // namespace parallel_ops::cpu
