// Cross-entropy over one shard of the vocabulary: row statistics, their combination into losses, and the gradient of
// the logits.
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../check.h"
#include "cross_entropy_rows.h"

namespace parallel_ops::cpu {
namespace {

std::tuple<Tensor, Tensor> statistics(const Tensor& logits, const Tensor& target,
                                      const std::optional<Tensor>& class_weight, int64_t start, int64_t vocab,
                                      double label_smoothing, double z_loss, double softcap, int64_t ignore_index,
                                      bool ignore_out_of_range, int64_t reduction) {
  const char* op = "cross_entropy_statistics";
  const LossOptions options{label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction};
  check_rows(op, logits, target);
  check_target(op, target);
  check_class_weight(op, class_weight, logits);
  const int64_t rows = target.numel(), width = statistics_rows(label_smoothing != 0, class_weight.has_value());
  Tensor out = new_acc(logits, {width, rows});
  Tensor column = empty_tensor({rows}, ScalarType::Long);
  dispatch(op, logits.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    all_statistics<T>({op, logits, target, class_weight, options}, rows, start, vocab, width,
                      static_cast<acc_t<T>*>(out.mutable_data_ptr()), static_cast<int64_t*>(column.mutable_data_ptr()));
  });
  return {out, column};
}

// [shards, 3, 5 or 7, rows] -> loss [rows] and what the gradient needs.
std::tuple<Tensor, Tensor> combine(const Tensor& statistics, const Tensor& column, double label_smoothing,
                                   double z_loss, double softcap, int64_t ignore_index, bool ignore_out_of_range,
                                   int64_t reduction) {
  const char* op = "cross_entropy_combine";
  check_like_loss(op, statistics, statistics.scalar_type());
  check_columns(op, column);
  const int64_t rows = column.numel();
  const int64_t width = statistics.dim() == 3 ? statistics.size(1) : 0;
  PARALLEL_OPS_CHECK((width == (label_smoothing != 0 ? 5 : 3) || width == 7) && statistics.size(2) == rows, op,
                     ": statistics must be [shards, 3, rows], 5 with label smoothing or 7 with class weights");
  Tensor loss = new_acc(statistics, {rows});
  Tensor saved = new_acc(statistics, {saved_rows(width > 3, width > 5), rows});
  const LossOptions options{label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction};
  dispatch(op, statistics.scalar_type(), [&](auto tag) {
    using A = acc_t<decltype(tag)>;
    const A* in = readable<A>(op, "statistics", statistics);
    const int64_t* columns = readable<int64_t>(op, "column", column);
    A* losses = static_cast<A*>(loss.mutable_data_ptr());
    A* kept = static_cast<A*>(saved.mutable_data_ptr());
    torch::stable::parallel_for(0, rows, kGrain / 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        losses[row] =
            row_loss(in + row, statistics.size(0), width * rows, rows, width, columns[row], options, kept + row, rows);
      }
    });
  });
  return {loss, saved};
}

// `grad` is one for each row, or with a divisor one for all, to be divided by it. `out` may be `logits`.
void backward(const Tensor& grad, const Tensor& logits, const std::optional<Tensor>& class_weight, const Tensor& column,
              const Tensor& saved, const std::optional<Tensor>& divisor, double label_smoothing, double z_loss,
              double softcap, int64_t ignore_index, bool ignore_out_of_range, int64_t reduction, const Tensor& out) {
  const char* op = "cross_entropy_backward";
  const LossOptions options{label_smoothing, z_loss, softcap, ignore_index, ignore_out_of_range, reduction};
  PARALLEL_OPS_CHECK(
      out.is_cpu() && out.is_contiguous() && out.scalar_type() == logits.scalar_type() && out.numel() == logits.numel(),
      op, ": out must be contiguous, with the shape and the dtype of logits");
  const int64_t rows = column.numel();
  check_rows(op, logits, divisor ? column : grad);
  check_columns(op, column);
  check_like_loss(op, saved, logits.scalar_type());
  check_class_weight(op, class_weight, logits);
  PARALLEL_OPS_CHECK(grad.scalar_type() == saved.scalar_type(), op, ": grad must have the dtype of the loss");
  const int64_t width = saved_rows(options.label_smoothing != 0, class_weight.has_value());
  if (divisor) check_like_loss(op, *divisor, logits.scalar_type());
  PARALLEL_OPS_CHECK(grad.is_cpu() && grad.numel() == (divisor ? 1 : rows) && (!divisor || divisor->numel() == 1), op,
                     ": grad must have one entry for each row of the logits, or one in all beside one divisor");
  PARALLEL_OPS_CHECK(saved.dim() == 2 && saved.size(0) == width && saved.size(1) == rows, op,
                     ": column and saved must have one entry for each row of the logits");
  dispatch(op, logits.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const int64_t* columns = readable<int64_t>(op, "column", column);
    const Logits<T> in(op, logits, column, class_weight, options);
    const std::vector<int64_t> sizes = [&] {  // grad as a column: rows of one element
      std::vector<int64_t> s(grad.sizes().begin(), grad.sizes().end());
      s.push_back(1);
      return s;
    }();
    std::vector<int64_t> strides(grad.strides().begin(), grad.strides().end());
    strides.push_back(1);
    const Rows<A> grads(op, "grad", grad, sizes.data(), grad.dim() + 1, strides.data());
    const A shared = divisor ? *grads.row(0) / *readable<A>(op, "divisor", *divisor) : A(0);
    const A* kept = readable<A>(op, "saved", saved);
    T* gradient = writable<T>(op, "out", out);
    if (out.mutable_data_ptr() != logits.mutable_data_ptr()) {  // fresh pages
      advise_huge_pages(gradient, out.numel() * static_cast<int64_t>(sizeof(T)));
    }
    const Shape2d shape{rows, in.cols()};
    for_each_tile(shape, [&](int64_t r, int64_t col, int64_t n) {
      T* dx = gradient + r * shape.cols + col;
      row_gradient(in, r, col, n, columns[r], divisor ? shared : *grads.row(r), kept + r, rows, options, dx);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("cross_entropy_statistics", TORCH_BOX(&statistics));
  m.impl("cross_entropy_combine", TORCH_BOX(&combine));
  m.impl("cross_entropy_backward", TORCH_BOX(&backward));
}

}  // namespace parallel_ops::cpu
