// layer_norm on the CPU: y = (x - mean(x)) rstd weight + bias, with an optional residual added to x first.
#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "norm.h"

namespace parallel_ops::cpu {
namespace {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& x, const Tensor& weight,
                                                   const std::optional<Tensor>& bias,
                                                   const std::optional<Tensor>& residual, double eps,
                                                   bool zero_centered) {
  const auto out = norm_forward({"layer_norm", true, zero_centered}, x, weight, bias, residual, eps);
  return {out.y, out.sum, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const std::optional<Tensor>& grad_sum, const Tensor& x,
                                            const Tensor& weight, const Tensor& mean, const Tensor& rstd, bool has_bias,
                                            bool zero_centered) {
  const auto out =
      norm_backward({"layer_norm_backward", true, zero_centered}, grad, grad_sum, x, weight, mean, rstd, has_bias);
  return {out.dx, out.dweight, out.dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("layer_norm", TORCH_BOX(&forward));
  m.impl("layer_norm_backward", TORCH_BOX(&backward));
}

}  // namespace parallel_ops::cpu
