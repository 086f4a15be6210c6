// rms_norm on the CPU: y = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps), with an optional residual added to x first.
#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "norm.h"

namespace parallel_ops::cpu {
namespace {

using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const Optional& weight, const Optional& residual,
                                           double eps, bool zero_centered) {
  const auto out = norm_forward({"rms_norm", false, zero_centered}, x, weight, std::nullopt, residual, eps);
  return {out.y, out.sum, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Optional& grad_sum, const Tensor& x,
                                            const Optional& weight, const Tensor& rstd, bool zero_centered,
                                            bool needs_x, bool needs_weight) {
  const auto out = norm_backward({"rms_norm_backward", false, zero_centered}, {needs_x, needs_weight}, grad, grad_sum,
                                 x, weight, std::nullopt, std::nullopt, rstd);
  return {out.dx, out.narrow_dx, out.dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&forward));
  m.impl("rms_norm_backward", TORCH_BOX(&backward));
}

}  // namespace parallel_ops::cpu
