// Gated activations on the CPU: y = w act(g) u; dg = dy w u act'(g), du = dy w act(g), dw = sum of dy act(g) u.
// bias_swiglu takes g and u as the halves of x + bias, silu_mul and gelu_mul as two tensors; w is one value a row.
#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "column_sum.h"
#include "lanes.h"
#include "math.h"
#include "output.h"
#include "rows.h"

namespace parallel_ops::cpu {
namespace {

enum class Act { kSilu, kGeluTanh, kGelu };

template <Act kAct, class A>
PARALLEL_OPS_INLINE Activation<A> activate(A z) {
  if constexpr (kAct == Act::kSilu) return silu(z);
  return gelu<kAct == Act::kGeluTanh>(z);
}

// One tile of one row: inputs, biases (zeros where there are none) and the row's weight (1 where there is none).
template <class T>
struct Tile {
  const T* gate;
  const T* up;
  const acc_t<T>* gate_bias;
  const acc_t<T>* up_bias;
  acc_t<T> weight;
  int64_t n;
};

template <Act kAct, class T>
PARALLEL_OPS_INLINE void forward_loop(const Tile<T>& t, T* __restrict y) {
  using A = acc_t<T>;
  const T* __restrict gate = t.gate, * __restrict up = t.up;
  const A* __restrict gate_bias = t.gate_bias, * __restrict up_bias = t.up_bias;
  const A weight = t.weight;
  for (int64_t i = 0; i < t.n; ++i) {
    y[i] = from_acc<T>(activate<kAct>(to_acc(gate[i]) + gate_bias[i]).value * (to_acc(up[i]) + up_bias[i]) * weight);
  }
}

template <Act kAct, class T>
PARALLEL_OPS_INLINE void backward_loop(const Tile<T>& t, const T* __restrict dy, T* __restrict dgate, T* __restrict dup,
                                       acc_t<T>* __restrict sum) {
  using A = acc_t<T>;
  const T* __restrict gate = t.gate, * __restrict up = t.up;
  const A* __restrict gate_bias = t.gate_bias, * __restrict up_bias = t.up_bias;
  const A weight = t.weight;
  for (int64_t i = 0; i < t.n; ++i) {
    const A d = to_acc(dy[i]) * weight;
    const auto act = activate<kAct>(to_acc(gate[i]) + gate_bias[i]);
    const A dg = d * (to_acc(up[i]) + up_bias[i]) * act.slope;
    const A du = d * act.value;
    dgate[i] = from_acc<T>(dg);
    dup[i] = from_acc<T>(du);
    sum[i] += dg;
    sum[kTileCols + i] += du;
  }
}

// The tile's part of the gradient of the row's weight.
template <Act kAct, class T>
PARALLEL_OPS_INLINE acc_t<T> weight_gradient(const Tile<T>& t, const T* dy) {
  return sum_lanes<acc_t<T>>(t.n, [&](int64_t i) PARALLEL_OPS_LAMBDA {
    return to_acc(dy[i]) * activate<kAct>(to_acc(t.gate[i]) + t.gate_bias[i]).value * (to_acc(t.up[i]) + t.up_bias[i]);
  });
}

#define DEFINE_TILES_OF(T, NAME, ACT)                                                                            \
  PARALLEL_OPS_MULTIVERSION void forward_##NAME(const Tile<T>& t, T* y) { forward_loop<ACT>(t, y); }             \
  PARALLEL_OPS_MULTIVERSION void backward_##NAME(const Tile<T>& t, const T* dy, T* dgate, T* dup, acc_t<T>* s) { \
    backward_loop<ACT>(t, dy, dgate, dup, s);                                                                    \
  }                                                                                                              \
  PARALLEL_OPS_MULTIVERSION acc_t<T> weight_##NAME(const Tile<T>& t, const T* dy) {                              \
    return weight_gradient<ACT>(t, dy);                                                                          \
  }
#define DEFINE_TILES(T)                         \
  DEFINE_TILES_OF(T, silu, Act::kSilu)          \
  DEFINE_TILES_OF(T, gelu_tanh, Act::kGeluTanh) \
  DEFINE_TILES_OF(T, gelu_erf, Act::kGelu)
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_TILES)
#undef DEFINE_TILES
#undef DEFINE_TILES_OF

// The operands of one call. Gate and up have the shape of the output.
struct Operands {
  const char* op;
  Act act;
  Tensor gate, up;
  std::optional<Tensor> bias;  // of gate, then up
  std::optional<Tensor> weights;
};

void check(const Operands& in) {
  check_like(in.op, "up", in.up, in.gate);
  STD_TORCH_CHECK(in.gate.dim() > 0, in.op, ": expected at least one dimension");
  if (in.weights) {
    int64_t rows = 1;
    for (int64_t d = 0; d + 1 < in.gate.dim(); ++d) rows *= in.gate.size(d);
    STD_TORCH_CHECK(in.weights->is_cpu() && in.weights->numel() == rows, in.op,
                    ": weights must be on the same device and have one element for each row");
  }
}

Tensor forward(const Operands& in) {
  check(in);
  const Shape2d shape = rows_and_cols(in.gate);
  Tensor y = empty_output(in.gate, in.gate.sizes());
  dispatch(in.op, in.gate.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const Rows<T> gates(in.gate), ups(in.up);
    const Bias<acc_t<T>> biases(in.bias);
    std::optional<Values<acc_t<T>>> weights;
    if (in.weights) weights.emplace(*in.weights);
    T* out = static_cast<T*>(y.mutable_data_ptr());
    for_each_tile(shape, [&](int64_t row, int64_t col, int64_t n) {
      Scratch<T> gate, up;
      const Tile<T> tile{gates.tile(row, col, n, gate.data), ups.tile(row, col, n, up.data),          biases.tile(col),
                         biases.tile(shape.cols + col),      weights ? (*weights)[row] : acc_t<T>(1), n};
      T* to = out + row * shape.cols + col;
      in.act == Act::kSilu       ? forward_silu(tile, to)
      : in.act == Act::kGeluTanh ? forward_gelu_tanh(tile, to)
                                 : forward_gelu_erf(tile, to);
    });
  });
  return y;
}

// dgate and dup: where the gradients of a row start, `stride` elements after those of the row before. Returns dbias and
// dweights, empty where there is no bias and are no weights.
std::tuple<Tensor, Tensor> backward(const Operands& in, const Tensor& dy, void* dgate, void* dup, int64_t stride) {
  check(in);
  check_like(in.op, "grad", dy, in.gate);
  const Shape2d shape = rows_and_cols(in.gate);
  const int64_t per_row = ceil_div(shape.cols, kTileCols);
  const ScalarType dtype = dy.scalar_type();
  Tensor dbias = in.bias ? empty_tensor({2 * shape.cols}, in.bias->scalar_type()) : empty_tensor({0}, dtype);
  Tensor dweights =
      in.weights ? empty_tensor(in.weights->sizes(), in.weights->scalar_type()) : empty_tensor({0}, dtype);
  dispatch(in.op, in.gate.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Rows<T> dys(dy), gates(in.gate), ups(in.up);
    const Bias<A> biases(in.bias);
    std::optional<Values<A>> weights;
    if (in.weights) weights.emplace(*in.weights);
    std::vector<A> tile_sums(static_cast<size_t>(in.weights ? shape.rows * per_row : 0));
    const auto tile = [&](int64_t row, int64_t col, int64_t n, A* sum) {
      Scratch<T> grad, gate, up;
      const T* d = dys.tile(row, col, n, grad.data);
      const Tile<T> t{gates.tile(row, col, n, gate.data), ups.tile(row, col, n, up.data),   biases.tile(col),
                      biases.tile(shape.cols + col),      weights ? (*weights)[row] : A(1), n};
      T* dg = static_cast<T*>(dgate) + row * stride + col;
      T* du = static_cast<T*>(dup) + row * stride + col;
      A* of_weight = weights ? &tile_sums[static_cast<size_t>(row * per_row + col / kTileCols)] : nullptr;
      switch (in.act) {
        case Act::kSilu:
          backward_silu(t, d, dg, du, sum);
          if (of_weight) *of_weight = weight_silu(t, d);
          break;
        case Act::kGeluTanh:
          backward_gelu_tanh(t, d, dg, du, sum);
          if (of_weight) *of_weight = weight_gelu_tanh(t, d);
          break;
        case Act::kGelu:
          backward_gelu_erf(t, d, dg, du, sum);
          if (of_weight) *of_weight = weight_gelu_erf(t, d);
          break;
      }
    };
    for_each_tile_summing_columns_if<T, 2>(in.bias.has_value(), shape, dbias, tile);
    if (in.weights) {
      std::vector<double> sums(static_cast<size_t>(in.weights->numel()));
      for (size_t i = 0; i < tile_sums.size(); ++i) sums[i / static_cast<size_t>(per_row)] += tile_sums[i];
      store_values(sums.data(), dweights);
    }
  });
  return {dbias, dweights};
}

// The halves of x, as views.
Operands halves(const char* op, const Tensor& x, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& weights) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() > 0 && last_dim(x) % 2 == 0, op, ": the last dimension of x must be even");
  check_bias(op, x, bias);
  const int64_t cols = last_dim(x) / 2, last = x.dim() - 1;
  Tensor whole = x;
  return {op,   Act::kSilu, torch::stable::narrow(whole, last, 0, cols), torch::stable::narrow(whole, last, cols, cols),
          bias, weights};
}

Tensor bias_swiglu(const Tensor& x, const std::optional<Tensor>& bias, const std::optional<Tensor>& weights) {
  return forward(halves("bias_swiglu", x, bias, weights));
}

std::tuple<Tensor, Tensor, Tensor> bias_swiglu_backward(const Tensor& dy, const Tensor& x,
                                                        const std::optional<Tensor>& bias,
                                                        const std::optional<Tensor>& weights) {
  const Operands in = halves("bias_swiglu_backward", x, bias, weights);
  const int64_t cols = last_dim(x) / 2;
  Tensor dx = empty_output(x, x.sizes());
  char* out = static_cast<char*>(dx.mutable_data_ptr());
  const auto [dbias, dweights] = backward(in, dy, out, out + cols * x.element_size(), 2 * cols);
  return {dx, dbias, dweights};
}

std::tuple<Tensor, Tensor, Tensor> two_tensors_backward(const Operands& in, const Tensor& dy) {
  Tensor dgate = empty_output(in.gate, in.gate.sizes()), dup = empty_output(in.gate, in.gate.sizes());
  const auto [_, dweights] = backward(in, dy, dgate.mutable_data_ptr(), dup.mutable_data_ptr(), last_dim(in.gate));
  return {dgate, dup, dweights};
}

Tensor silu_mul(const Tensor& gate, const Tensor& up, const std::optional<Tensor>& weights) {
  return forward({"silu_mul", Act::kSilu, gate, up, std::nullopt, weights});
}

std::tuple<Tensor, Tensor, Tensor> silu_mul_backward(const Tensor& dy, const Tensor& gate, const Tensor& up,
                                                     const std::optional<Tensor>& weights) {
  return two_tensors_backward({"silu_mul_backward", Act::kSilu, gate, up, std::nullopt, weights}, dy);
}

Tensor gelu_mul(const Tensor& gate, const Tensor& up, const std::optional<Tensor>& weights, bool tanh) {
  return forward({"gelu_mul", tanh ? Act::kGeluTanh : Act::kGelu, gate, up, std::nullopt, weights});
}

std::tuple<Tensor, Tensor, Tensor> gelu_mul_backward(const Tensor& dy, const Tensor& gate, const Tensor& up,
                                                     const std::optional<Tensor>& weights, bool tanh) {
  const Act act = tanh ? Act::kGeluTanh : Act::kGelu;
  return two_tensors_backward({"gelu_mul_backward", act, gate, up, std::nullopt, weights}, dy);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("bias_swiglu", TORCH_BOX(&bias_swiglu));
  m.impl("bias_swiglu_backward", TORCH_BOX(&bias_swiglu_backward));
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
  m.impl("silu_mul_backward", TORCH_BOX(&silu_mul_backward));
  m.impl("gelu_mul", TORCH_BOX(&gelu_mul));
  m.impl("gelu_mul_backward", TORCH_BOX(&gelu_mul_backward));
}

}  // namespace parallel_ops::cpu
