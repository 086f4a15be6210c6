// Cross-entropy of whole rows of logits in one call.
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../check.h"
#include "cross_entropy_rows.h"

namespace parallel_ops::cpu {
namespace {

// Indices of parallel_ops/ops/cross_entropy/options.py:REDUCTIONS.
constexpr int64_t kNone = 0, kMean = 1;

// The sum of the rows' losses in their order, and what a mean divides it by: the rows that count, or their weights.
template <class A>
std::pair<A, A> sum_and_divisor(const std::vector<A>& losses, const int64_t* columns, const A* target_weights) {
  double total = 0, divisor = 0;
  for (size_t row = 0; row < losses.size(); ++row) {
    total += losses[row];
    if (columns[row] != kIgnored) divisor += target_weights ? target_weights[row] : A(1);
  }
  return {static_cast<A>(total), divisor == 0 ? A(1) : static_cast<A>(divisor)};
}

// (loss, column, saved, divisor): `loss` is a scalar, or one for each target for reduction none.
std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                         const std::optional<Tensor>& class_weight,
                                                         double label_smoothing, double z_loss, double softcap,
                                                         int64_t ignore_index, bool ignore_out_of_range,
                                                         int64_t reduction, bool /*inplace_backward*/) {
  const char* op = "cross_entropy";
  const LossOptions options{label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction};
  check_rows(op, logits, target);
  check_target(op, target);
  check_class_weight(op, class_weight, logits);
  const auto of_rows = logits.sizes(), of_targets = target.sizes();
  PARALLEL_OPS_CHECK(
      of_targets.size() + 1 == of_rows.size() && std::equal(of_targets.begin(), of_targets.end(), of_rows.begin()), op,
      ": target must have the shape of logits without its last dimension");
  const bool smooth = options.label_smoothing != 0, weighted = class_weight.has_value();
  const int64_t rows = target.numel(), cols = last_dim(logits), width = statistics_rows(smooth, weighted);
  Tensor column = empty_tensor({rows}, ScalarType::Long);
  Tensor saved = new_acc(logits, {saved_rows(smooth, weighted), rows});
  const std::vector<int64_t> scalar;
  Tensor loss = reduction == kNone ? new_acc(logits, target.sizes()) : new_acc(logits, scalar);
  Tensor divisor = new_acc(logits, scalar);
  int64_t* columns = static_cast<int64_t*>(column.mutable_data_ptr());
  dispatch(op, logits.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Logits<T> in(op, logits, target, class_weight, options);
    A* kept = static_cast<A*>(saved.mutable_data_ptr());
    std::vector<A> losses(static_cast<size_t>(rows)), target_weights(static_cast<size_t>(weighted ? rows : 0));
    for (int64_t row = 0; row < rows; ++row) {
      columns[row] = in.column(row, 0, cols);
      PARALLEL_OPS_CHECK(columns[row] != kInvalid, op, ": the target in row ", row, " is outside the vocabulary");
      if (weighted) target_weights[static_cast<size_t>(row)] = columns[row] >= 0 ? in.weight(columns[row]) : A(0);
    }
    const A* row_weights = weighted ? target_weights.data() : nullptr;
    std::vector<A> values(static_cast<size_t>(width * rows));
    all_statistics(in, rows, 0, cols, width, values.data(), columns);
    for (int64_t row = 0; row < rows; ++row) {
      losses[static_cast<size_t>(row)] =
          row_loss(values.data() + row, 1, 0, rows, width, columns[row], options, kept + row, rows);
    }
    A* out = static_cast<A*>(loss.mutable_data_ptr());
    const auto [total, count] = sum_and_divisor(losses, columns, row_weights);
    *static_cast<A*>(divisor.mutable_data_ptr()) = reduction == kMean ? count : A(1);
    if (reduction == kNone) {
      std::copy(losses.begin(), losses.end(), out);
    } else {
      *out = reduction == kMean ? total / count : total;
    }
  });
  return {loss, column, saved, divisor};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) { m.impl("cross_entropy", TORCH_BOX(&cross_entropy)); }

}  // namespace parallel_ops::cpu
