// layer_norm and rms_norm are one kernel (norm.cpp): RMSNorm is LayerNorm with the mean held at zero and no bias.
#pragma once

#include <optional>
#include <tuple>

#include <torch/csrc/stable/tensor.h>

namespace parallel_ops::cpu {

struct NormOptions {
  const char* op;      // for error messages
  bool centred;        // subtract the mean: LayerNorm
  bool zero_centered;  // the weight is an offset from one
};

struct NormOutputs {
  torch::stable::Tensor y;
  torch::stable::Tensor sum;   // x + residual in the wider dtype of the two, empty without a residual
  torch::stable::Tensor mean;  // per row, empty unless centred
  torch::stable::Tensor rstd;  // per row
};

// The weight and the bias may be of any dtype with the same arithmetic, the residual of the dtype of x or float32.
NormOutputs norm_forward(const NormOptions& options, const torch::stable::Tensor& x,
                         const std::optional<torch::stable::Tensor>& weight,
                         const std::optional<torch::stable::Tensor>& bias,
                         const std::optional<torch::stable::Tensor>& residual, double eps);

// Which gradients are computed; the others are empty. Those of the parameters need no value of a parameter, so that
// their half of a split backward reads neither.
struct NormNeeds {
  bool x;
  bool parameters;
};

struct NormGradients {
  torch::stable::Tensor dx;         // in the dtype of x: also the gradient of the residual
  torch::stable::Tensor narrow_dx;  // the same in the dtype of grad, empty where that is the dtype of x
  torch::stable::Tensor dweight;    // empty without a weight
  torch::stable::Tensor dbias;      // empty without a bias
};

// `x` is what was normalised: the input, or its sum with the residual, whose own gradient is then `grad_sum`.
NormGradients norm_backward(const NormOptions& options, const NormNeeds& needs, const torch::stable::Tensor& grad,
                            const std::optional<torch::stable::Tensor>& grad_sum, const torch::stable::Tensor& x,
                            const std::optional<torch::stable::Tensor>& weight,
                            const std::optional<torch::stable::Tensor>& bias,
                            const std::optional<torch::stable::Tensor>& mean, const torch::stable::Tensor& rstd);

}  // namespace parallel_ops::cpu
