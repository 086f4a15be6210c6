// Shapes and dtypes of the norms, and the checks of what does not fit them.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "../check.h"
#include "../rows.h"

namespace parallel_ops::cpu {

// The dtype of the statistics: that of the arithmetic.
inline ScalarType statistics_dtype(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_parameters(const char* op, const Tensor& x, const std::optional<Tensor>& weight,
                             const std::optional<Tensor>& bias) {
  PARALLEL_OPS_CHECK(x.dim() > 0, op, ": x must have at least one dimension");
  for (const auto* t : {&weight, &bias}) {
    if (!*t) continue;
    const char* name = t == &weight ? "weight" : "bias";
    PARALLEL_OPS_CHECK((*t)->is_cpu(), op, ": ", name, " must be on the same device as x");
    PARALLEL_OPS_CHECK(((*t)->scalar_type() == ScalarType::Double) == (x.scalar_type() == ScalarType::Double), op,
                       ": float64 parameters go with float64 x alone");
    PARALLEL_OPS_CHECK((*t)->dim() == 1 && (*t)->size(0) == last_dim(x), op, ": ", name,
                       " must have one element for each element of the last dimension of x");
  }
  PARALLEL_OPS_CHECK(!weight || !bias || weight->scalar_type() == bias->scalar_type(), op,
                     ": bias must be of the dtype of weight");
}

inline void check_statistics(const char* op, const char* name, const Tensor& t, const Tensor& x, int64_t rows) {
  PARALLEL_OPS_CHECK(
      t.is_cpu() && t.scalar_type() == statistics_dtype(x) && t.dim() == 1 && t.size(0) == rows && t.is_contiguous(),
      op, ": ", name, " must be what the forward returned");
}

// rows_and_cols with as many rows as there are even when they are empty: each has its statistics.
inline Shape2d norm_shape(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return {rows, last_dim(x)};
}

}  // namespace parallel_ops::cpu
