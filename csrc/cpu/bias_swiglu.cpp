// bias_swiglu on the CPU: y = silu(g) * u, where g and u are the halves of x + bias;
// dg = dy * u * silu'(g), du = dy * silu(g), dbias = sum of [dg, du] over the rows.
#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "column_sum.h"
#include "math.h"
#include "output.h"
#include "rows.h"

namespace parallel_ops::cpu {
namespace {

template <class T>
PARALLEL_OPS_INLINE void forward_loop(const T* __restrict gate, const T* __restrict up, const T* __restrict gate_bias,
                                      const T* __restrict up_bias, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> g = to_acc(gate[i]) + to_acc(gate_bias[i]);
    const acc_t<T> u = to_acc(up[i]) + to_acc(up_bias[i]);
    y[i] = from_acc<T>(g * sigmoid(g).value * u);
  }
}

template <class T>
PARALLEL_OPS_INLINE void backward_loop(const T* __restrict dy, const T* __restrict gate, const T* __restrict up,
                                       const T* __restrict gate_bias, const T* __restrict up_bias, T* __restrict dgate,
                                       T* __restrict dup, acc_t<T>* __restrict sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> d = to_acc(dy[i]);
    const acc_t<T> g = to_acc(gate[i]) + to_acc(gate_bias[i]);
    const acc_t<T> u = to_acc(up[i]) + to_acc(up_bias[i]);
    const auto s = sigmoid(g);
    const acc_t<T> dg = d * u * (s.value + g * s.slope);
    const acc_t<T> du = d * (g * s.value);
    dgate[i] = from_acc<T>(dg);
    dup[i] = from_acc<T>(du);
    sum[i] += dg;
    sum[kTileCols + i] += du;
  }
}

#define DEFINE_TILES(T)                                                                                               \
  PARALLEL_OPS_MULTIVERSION void forward_tile(const T* gate, const T* up, const T* gate_bias, const T* up_bias, T* y, \
                                              int64_t n) {                                                            \
    forward_loop(gate, up, gate_bias, up_bias, y, n);                                                                 \
  }                                                                                                                   \
  PARALLEL_OPS_MULTIVERSION void backward_tile(const T* dy, const T* gate, const T* up, const T* gate_bias,           \
                                               const T* up_bias, T* dgate, T* dup, acc_t<T>* sum, int64_t n) {        \
    backward_loop(dy, gate, up, gate_bias, up_bias, dgate, dup, sum, n);                                              \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_TILES)
#undef DEFINE_TILES

// The shape of the output: half as many columns as x.
Shape2d halves(const char* op, const Tensor& x) {
  STD_TORCH_CHECK(x.dim() > 0 && last_dim(x) % 2 == 0, op, ": the last dimension of x must be even");
  const Shape2d shape = rows_and_cols(x);
  return {shape.rows, shape.cols / 2};
}

std::vector<int64_t> output_sizes(const Tensor& x, Shape2d shape) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = shape.cols;
  return sizes;
}

Tensor forward(const Tensor& x, const std::optional<Tensor>& bias) {
  check_bias("bias_swiglu", x, bias);
  const Shape2d shape = halves("bias_swiglu", x);
  Tensor y = empty_output(x, output_sizes(x, shape));
  dispatch("bias_swiglu", x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const Rows<T> xs(x);
    const BiasTiles<T> biases(bias);
    T* out = static_cast<T*>(y.mutable_data_ptr());
    for_each_tile(shape, [&](int64_t row, int64_t col, int64_t n) {
      Scratch<T> gate, up, gate_bias, up_bias;
      forward_tile(xs.tile(row, col, n, gate.data), xs.tile(row, shape.cols + col, n, up.data),
                   biases.tile(col, n, gate_bias.data), biases.tile(shape.cols + col, n, up_bias.data),
                   out + row * shape.cols + col, n);
    });
  });
  return y;
}

// Without a bias, dbias is empty.
std::tuple<Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const std::optional<Tensor>& bias) {
  check_bias("bias_swiglu_backward", x, bias);
  const Shape2d shape = halves("bias_swiglu_backward", x);
  const std::vector<int64_t> sizes = output_sizes(x, shape);
  STD_TORCH_CHECK(dy.is_cpu() && dy.scalar_type() == x.scalar_type() && dy.dim() == x.dim() &&
                      std::equal(sizes.begin(), sizes.end(), dy.sizes().begin()),
                  "bias_swiglu_backward: grad must have the shape, dtype and device of the output");
  Tensor dx = empty_output(x, x.sizes());
  Tensor dbias = empty_tensor({bias ? 2 * shape.cols : 0}, x.scalar_type());
  dispatch("bias_swiglu_backward", x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const Rows<T> dys(dy), xs(x);
    const BiasTiles<T> biases(bias);
    T* out = static_cast<T*>(dx.mutable_data_ptr());
    const auto tile = [&](int64_t row, int64_t col, int64_t n, acc_t<T>* sum) {
      Scratch<T> grad, gate, up, gate_bias, up_bias;
      T* dgate = out + row * 2 * shape.cols + col;
      backward_tile(dys.tile(row, col, n, grad.data), xs.tile(row, col, n, gate.data),
                    xs.tile(row, shape.cols + col, n, up.data), biases.tile(col, n, gate_bias.data),
                    biases.tile(shape.cols + col, n, up_bias.data), dgate, dgate + shape.cols, sum, n);
    };
    for_each_tile_summing_columns_if<T, 2>(bias.has_value(), shape, static_cast<T*>(dbias.mutable_data_ptr()), tile);
  });
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("bias_swiglu", TORCH_BOX(&forward));
  m.impl("bias_swiglu_backward", TORCH_BOX(&backward));
}

}  // namespace parallel_ops::cpu
