// Gated activations on the CPU: y = w act(g) u; dg = dy w u act'(g), du = dy w act(g), dw = sum of dy act(g) u.
// bias_swiglu takes g and u as the halves of x + bias, silu_mul and gelu_mul as two tensors; w is one value a row. With
// options SiLU is g sigmoid(alpha g), g and u are clamped first, and u has an offset.
#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../check.h"
#include "../column_sum.h"
#include "../output.h"
#include "../rows.h"
#include "gated_tile.h"

namespace parallel_ops::cpu {
namespace {

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
  DEFINE_TILES_OF(T, swish, Act::kSwish)        \
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
  SwishOptions swish;
  const char* of_gate = "gate";  // the arguments that gate and up are, for error messages
  const char* of_up = "up";
};

Act silu_or_swish(const SwishOptions& o) {
  return o.alpha == 1.0 && !o.limit && o.up_offset == 0.0 ? Act::kSilu : Act::kSwish;
}

void check(const Operands& in) {
  check_like(in.op, "up", in.up, in.gate);
  PARALLEL_OPS_CHECK(in.gate.dim() > 0, in.op, ": expected at least one dimension");
  if (in.weights) {
    const auto rows = in.gate.sizes(), sizes = in.weights->sizes();
    const size_t dims = rows.size() - 1;
    PARALLEL_OPS_CHECK(in.weights->is_cpu() && sizes.size() >= dims &&
                           std::equal(rows.begin(), rows.begin() + dims, sizes.begin()) &&
                           (sizes.size() == dims || (sizes.size() == dims + 1 && sizes[dims] == 1)),
                       in.op, ": weights must be on the same device and have one element for each row");
  }
}

Tensor forward(const Operands& in) {
  check(in);
  const Shape2d shape = rows_and_cols(in.gate);
  Tensor y = empty_output(in.gate, in.gate.sizes());
  dispatch(in.op, in.gate.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const Rows<T> gates(in.op, in.of_gate, in.gate), ups(in.op, in.of_up, in.up);
    const Bias<acc_t<T>> biases(in.op, in.bias);
    std::optional<Values<acc_t<T>>> weights;
    if (in.weights) weights.emplace(in.op, "weights", *in.weights);
    const Swish<acc_t<T>> swish(in.swish);
    T* out = static_cast<T*>(y.mutable_data_ptr());
    for_each_tile(shape, [&](int64_t row, int64_t col, int64_t n) {
      Scratch<T> gate, up;
      const Tile<T> tile{gates.tile(row, col, n, gate.data),
                         ups.tile(row, col, n, up.data),
                         biases.tile(col),
                         biases.tile(shape.cols + col),
                         weights ? (*weights)[row] : acc_t<T>(1),
                         n,
                         swish};
      T* to = out + row * shape.cols + col;
      in.act == Act::kSilu       ? forward_silu(tile, to)
      : in.act == Act::kSwish    ? forward_swish(tile, to)
      : in.act == Act::kGeluTanh ? forward_gelu_tanh(tile, to)
                                 : forward_gelu_erf(tile, to);
    });
  });
  return y;
}

// dgate and dup: where the gradients of a row start, `stride` elements after those of the row before; within a row they
// are `step` elements apart, 1 or 2. Returns dbias and dweights, empty where there is no bias and are no weights.
std::tuple<Tensor, Tensor> backward(const Operands& in, const Tensor& dy, void* dgate, void* dup, int64_t stride,
                                    int64_t step = 1) {
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
    const Rows<T> dys(in.op, "grad", dy), gates(in.op, in.of_gate, in.gate), ups(in.op, in.of_up, in.up);
    const Bias<A> biases(in.op, in.bias);
    std::optional<Values<A>> weights;
    if (in.weights) weights.emplace(in.op, "weights", *in.weights);
    const Swish<A> swish(in.swish);
    std::vector<A> tile_sums(static_cast<size_t>(in.weights ? shape.rows * per_row : 0));
    const auto tile = [&](int64_t row, int64_t col, int64_t n, A* sum) {
      Scratch<T> grad, gate, up, dense_gate, dense_up;
      const T* d = dys.tile(row, col, n, grad.data);
      const Tile<T> t{gates.tile(row, col, n, gate.data),
                      ups.tile(row, col, n, up.data),
                      biases.tile(col),
                      biases.tile(shape.cols + col),
                      weights ? (*weights)[row] : A(1),
                      n,
                      swish};
      T* to_gate = static_cast<T*>(dgate) + row * stride + col * step;
      T* to_up = static_cast<T*>(dup) + row * stride + col * step;
      T* dg = step == 1 ? to_gate : dense_gate.data;
      T* du = step == 1 ? to_up : dense_up.data;
      A* of_weight = weights ? &tile_sums[static_cast<size_t>(row * per_row + col / kTileCols)] : nullptr;
      switch (in.act) {
        case Act::kSilu:
          backward_silu(t, d, dg, du, sum);
          if (of_weight) *of_weight = weight_silu(t, d);
          break;
        case Act::kSwish:
          backward_swish(t, d, dg, du, sum);
          if (of_weight) *of_weight = weight_swish(t, d);
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
      if (step == 1) return;
      for (int64_t i = 0; i < n; ++i) {
        to_gate[2 * i] = dg[i];
        to_up[2 * i] = du[i];
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

// Every second element of x, the first or the second of each pair, as a view.
Tensor of_pairs(const char* op, const Tensor& x, int64_t which) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end()), strides(x.strides().begin(), x.strides().end());
  const int64_t offset = which * strides.back();  // from the first element of x, not of its storage
  sizes.back() /= 2;
  strides.back() *= 2;
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch__reinterpret_tensor(x.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                                              strides.data(), offset, &handle);
  PARALLEL_OPS_CHECK(error == TORCH_SUCCESS, op, ": cannot make a view of x");
  return Tensor(handle);
}

// Gate and up of x, as views: its halves, or in turn.
Operands gate_and_up(const char* op, const Tensor& x, const std::optional<Tensor>& bias,
                     const std::optional<Tensor>& weights, const SwishOptions& swish, bool interleaved) {
  PARALLEL_OPS_CHECK(x.is_cpu() && x.dim() > 0 && last_dim(x) % 2 == 0, op, ": the last dimension of x must be even");
  check_bias(op, x, bias);
  check_memory(op, "x", x);  // before views are made of it
  PARALLEL_OPS_CHECK(!interleaved || !bias, op, ": there is no bias of gates and ups in turn");
  const int64_t cols = last_dim(x) / 2, last = x.dim() - 1;
  Tensor whole = x;
  return {op,
          silu_or_swish(swish),
          interleaved ? of_pairs(op, x, 0) : torch::stable::narrow(whole, last, 0, cols),
          interleaved ? of_pairs(op, x, 1) : torch::stable::narrow(whole, last, cols, cols),
          bias,
          weights,
          swish,
          "x",
          "x"};
}

Tensor bias_swiglu(const Tensor& x, const std::optional<Tensor>& bias, const std::optional<Tensor>& weights,
                   double alpha, std::optional<double> limit, double up_offset, bool interleaved) {
  return forward(gate_and_up("bias_swiglu", x, bias, weights, {alpha, limit, up_offset}, interleaved));
}

std::tuple<Tensor, Tensor, Tensor> bias_swiglu_backward(const Tensor& dy, const Tensor& x,
                                                        const std::optional<Tensor>& bias,
                                                        const std::optional<Tensor>& weights, double alpha,
                                                        std::optional<double> limit, double up_offset,
                                                        bool interleaved) {
  const Operands in = gate_and_up("bias_swiglu_backward", x, bias, weights, {alpha, limit, up_offset}, interleaved);
  const int64_t cols = last_dim(x) / 2;
  Tensor dx = empty_output(x, x.sizes());
  char* out = static_cast<char*>(dx.mutable_data_ptr());
  char* up = out + (interleaved ? 1 : cols) * x.element_size();
  const auto [dbias, dweights] = backward(in, dy, out, up, 2 * cols, interleaved ? 2 : 1);
  return {dx, dbias, dweights};
}

std::tuple<Tensor, Tensor, Tensor> two_tensors_backward(const Operands& in, const Tensor& dy) {
  Tensor dgate = empty_output(in.gate, in.gate.sizes()), dup = empty_output(in.gate, in.gate.sizes());
  const auto [_, dweights] = backward(in, dy, dgate.mutable_data_ptr(), dup.mutable_data_ptr(), last_dim(in.gate));
  return {dgate, dup, dweights};
}

Tensor silu_mul(const Tensor& gate, const Tensor& up, const std::optional<Tensor>& weights, double alpha,
                std::optional<double> limit, double up_offset) {
  const SwishOptions swish{alpha, limit, up_offset};
  return forward({"silu_mul", silu_or_swish(swish), gate, up, std::nullopt, weights, swish});
}

std::tuple<Tensor, Tensor, Tensor> silu_mul_backward(const Tensor& dy, const Tensor& gate, const Tensor& up,
                                                     const std::optional<Tensor>& weights, double alpha,
                                                     std::optional<double> limit, double up_offset) {
  const SwishOptions swish{alpha, limit, up_offset};
  return two_tensors_backward({"silu_mul_backward", silu_or_swish(swish), gate, up, std::nullopt, weights, swish}, dy);
}

Tensor gelu_mul(const Tensor& gate, const Tensor& up, const std::optional<Tensor>& weights, bool tanh) {
  return forward({"gelu_mul", tanh ? Act::kGeluTanh : Act::kGelu, gate, up, std::nullopt, weights, {}});
}

std::tuple<Tensor, Tensor, Tensor> gelu_mul_backward(const Tensor& dy, const Tensor& gate, const Tensor& up,
                                                     const std::optional<Tensor>& weights, bool tanh) {
  const Act act = tanh ? Act::kGeluTanh : Act::kGelu;
  return two_tensors_backward({"gelu_mul_backward", act, gate, up, std::nullopt, weights, {}}, dy);
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
