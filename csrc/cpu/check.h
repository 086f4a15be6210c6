// Checks that keep a direct call of an op from reading out of bounds. The Python functions check first and
// name the argument in a ValueError or TypeError; these are the safety net below them.
#pragma once

#include <algorithm>
#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "../error.h"
#include "rows.h"

namespace parallel_ops::cpu {

inline void check_shape(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  PARALLEL_OPS_CHECK(t.is_cpu() && x.is_cpu(), op, ": ", name, " must be on the same device as the input");
  PARALLEL_OPS_CHECK(t.dim() == x.dim() && std::equal(t.sizes().begin(), t.sizes().end(), x.sizes().begin()), op, ": ",
                     name, " must have the shape of the input");
}

inline void check_like(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  PARALLEL_OPS_CHECK(t.scalar_type() == x.scalar_type(), op, ": ", name, " must have the dtype of the input");
  check_shape(op, name, t, x);
}

inline void check_bias(const char* op, const Tensor& x, const std::optional<Tensor>& bias) {
  if (!bias) return;
  PARALLEL_OPS_CHECK(bias->is_cpu(), op, ": bias must be on the same device as x");
  PARALLEL_OPS_CHECK(bias->dim() == 1 && bias->size(0) == last_dim(x), op,
                     ": bias must have one element for each element of the last dimension of x");
}

}  // namespace parallel_ops::cpu
