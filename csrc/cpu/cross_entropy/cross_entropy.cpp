// Cross-entropy of whole rows of logits in one call, optionally with its gradient.
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../check.h"
#include "cross_entropy_rows.h"

namespace parallel_ops::cpu {
namespace {

// What a call gives: loss, reduced, and its divisor, which is 1 unless it is a mean.
enum Reduction { kNone, kMean, kSum };

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

// (loss, column, saved, divisor): `loss` is a scalar, or one for each target for reduction none. With `gradient`, that
// of the logits for an incoming gradient of 1 is written there while the row is in the cache; with `of_sum` that of the
// sum of the losses, whatever the reduction.
std::tuple<Tensor, Tensor, Tensor, Tensor> unsharded(const char* op, const Tensor& logits, const Tensor& target,
                                                     const std::optional<Tensor>& class_weight,
                                                     const LossOptions& options, int64_t ignore_index,
                                                     bool ignore_out_of_range, int64_t reduction, void* gradient,
                                                     bool of_sum = false) {
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
    const Logits<T> in(op, logits, target, class_weight, options.softcap, smooth);
    A* kept = static_cast<A*>(saved.mutable_data_ptr());
    std::vector<A> losses(static_cast<size_t>(rows)), target_weights(static_cast<size_t>(weighted ? rows : 0));
    for (int64_t row = 0; row < rows; ++row) {
      columns[row] = in.column(row, 0, cols, ignore_index, ignore_out_of_range);
      PARALLEL_OPS_CHECK(columns[row] != kInvalid, op, ": the target in row ", row, " is outside the vocabulary");
      if (weighted) target_weights[static_cast<size_t>(row)] = columns[row] >= 0 ? in.weight(columns[row]) : A(0);
    }
    const A* row_weights = weighted ? target_weights.data() : nullptr;
    const A scale = reduction == kMean && !of_sum ? A(1) / sum_and_divisor(losses, columns, row_weights).second : A(1);
    if (gradient && rows >= kFewRows) {
      const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cols));
      torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const Part<A> part = in.statistics(row, 0, cols);
          const A z = columns[row] >= 0 ? in.logit(row, columns[row]) : A(0);
          const A values[] = {part.max,       part.exps, z, part.sum, part.count, weighted ? row_weights[row] : A(0),
                              part.weight_sum};
          losses[static_cast<size_t>(row)] = row_loss(values, 1, 0, 1, width, columns[row], options, kept + row, rows);
          T* dx = static_cast<T*>(gradient) + row * cols;
          for (int64_t col = 0; col < cols; col += kTileCols) {
            const int64_t n = std::min(kTileCols, cols - col);
            row_gradient(in, row, col, n, columns[row], scale, kept + row, rows, options, dx + col);
          }
        }
      });
    } else {
      std::vector<A> values(static_cast<size_t>(width * rows));
      all_statistics(in, rows, 0, cols, ignore_index, ignore_out_of_range, width, values.data(), columns);
      for (int64_t row = 0; row < rows; ++row) {
        losses[static_cast<size_t>(row)] =
            row_loss(values.data() + row, 1, 0, rows, width, columns[row], options, kept + row, rows);
      }
      if (gradient) {
        for_each_tile({rows, cols}, [&](int64_t row, int64_t col, int64_t n) {
          T* dx = static_cast<T*>(gradient) + row * cols + col;
          row_gradient(in, row, col, n, columns[row], scale, kept + row, rows, options, dx);
        });
      }
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

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                         const std::optional<Tensor>& class_weight,
                                                         double label_smoothing, double z_loss, double softcap,
                                                         int64_t ignore_index, bool ignore_out_of_range,
                                                         int64_t reduction, bool /*inplace_backward*/) {
  return unsharded("cross_entropy", logits, target, class_weight, {label_smoothing, z_loss, softcap}, ignore_index,
                   ignore_out_of_range, reduction, nullptr);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> with_gradient(const Tensor& logits, const Tensor& target,
                                                                 const std::optional<Tensor>& class_weight,
                                                                 double label_smoothing, double z_loss, double softcap,
                                                                 int64_t ignore_index, bool ignore_out_of_range,
                                                                 int64_t reduction) {
  Tensor gradient = empty_output(logits, logits.sizes());
  auto [loss, column, saved, divisor] =
      unsharded("cross_entropy_with_gradient", logits, target, class_weight, {label_smoothing, z_loss, softcap},
                ignore_index, ignore_out_of_range, reduction, gradient.mutable_data_ptr());
  return {loss, column, saved, divisor, gradient};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> with_gradient_inplace(const Tensor& logits, const Tensor& target,
                                                                 const std::optional<Tensor>& class_weight,
                                                                 double label_smoothing, double z_loss, double softcap,
                                                                 int64_t ignore_index, bool ignore_out_of_range,
                                                                 int64_t reduction, bool of_sum) {
  const char* op = "cross_entropy_with_gradient_";
  PARALLEL_OPS_CHECK(logits.is_contiguous(), op, ": logits must be contiguous");
  return unsharded(op, logits, target, class_weight, {label_smoothing, z_loss, softcap}, ignore_index,
                   ignore_out_of_range, reduction, logits.mutable_data_ptr(), of_sum);
}

// gradient *= factor, a scalar; one of 1 costs nothing.
void scale_inplace(const Tensor& gradient, const Tensor& factor) {
  const char* op = "cross_entropy_scale_";
  PARALLEL_OPS_CHECK(gradient.is_cpu() && factor.is_cpu() && gradient.is_contiguous() && factor.numel() == 1, op,
                     ": expected a contiguous gradient and one factor");
  check_like_loss(op, factor, gradient.scalar_type());
  dispatch(op, gradient.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const auto by = *readable<acc_t<T>>(op, "factor", factor);
    if (by == acc_t<T>(1)) return;
    T* data = writable<T>(op, "gradient", gradient);
    for_each_tile({1, gradient.numel()}, [&](int64_t, int64_t col, int64_t n) {
      for (int64_t i = col; i < col + n; ++i) data[i] = from_acc<T>(to_acc(data[i]) * by);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  m.impl("cross_entropy_with_gradient", TORCH_BOX(&with_gradient));
  m.impl("cross_entropy_with_gradient_", TORCH_BOX(&with_gradient_inplace));
  m.impl("cross_entropy_scale_", TORCH_BOX(&scale_inplace));
}

}  // namespace parallel_ops::cpu
