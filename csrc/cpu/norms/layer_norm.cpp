// layer_norm on the CPU: y = (x - mean(x)) rstd weight + bias, with an optional residual added to x first.
#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "norm.h"

namespace parallel_ops::cpu {
namespace {

using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& x, const Optional& weight, const Optional& bias,
                                                   const Optional& residual, double eps, bool zero_centered) {
  const auto out = norm_forward({"layer_norm", true, zero_centered}, x, weight, bias, residual, eps);
  return {out.y, out.sum, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad, const Optional& grad_sum, const Tensor& x,
                                                    const Optional& weight, const Optional& bias, const Tensor& mean,
                                                    const Tensor& rstd, bool zero_centered, bool needs_x,
                                                    bool needs_parameters) {
  const auto out = norm_backward({"layer_norm_backward", true, zero_centered}, {needs_x, needs_parameters}, grad,
                                 grad_sum, x, weight, bias, mean, rstd);
  return {out.dx, out.narrow_dx, out.dweight, out.dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("layer_norm", TORCH_BOX(&forward));
  m.impl("layer_norm_backward", TORCH_BOX(&backward));
}

}  // namespace parallel_ops::cpu
