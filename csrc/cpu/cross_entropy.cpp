// Cross-entropy on the CPU: row statistics over one shard of the vocabulary, their combination into losses, and the
// gradient of the logits; and the same for an unsharded vocabulary in one call. parallel_ops/ops/cross_entropy.py has
// the formulas.
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "cross_entropy_tile.h"
#include "output.h"
#include "rows.h"

namespace parallel_ops::cpu {
namespace {

#define DEFINE_TILES(T)                                                                                        \
  PARALLEL_OPS_MULTIVERSION void statistics_tile(const T* x, int64_t n, acc_t<T> cap, bool smooth,             \
                                                 const acc_t<T>* weights, Part<acc_t<T>>& out) {               \
    out = cap > 0 ? (smooth ? tile_statistics<true, true>(x, n, cap, weights)                                  \
                            : tile_statistics<true, false>(x, n, cap, weights))                                \
                  : (smooth ? tile_statistics<false, true>(x, n, cap, weights)                                 \
                            : tile_statistics<false, false>(x, n, cap, weights));                              \
  }                                                                                                            \
  PARALLEL_OPS_MULTIVERSION void gradient_tile(const T* x, T* dx, int64_t n, const RowGradient<acc_t<T>>& row, \
                                               const acc_t<T>* weights) {                                      \
    if (row.cap > 0) {                                                                                         \
      row.uniform != 0 ? tile_gradient<true, true>(x, dx, n, row, weights)                                     \
                       : tile_gradient<true, false>(x, dx, n, row, weights);                                   \
    } else {                                                                                                   \
      row.uniform != 0 ? tile_gradient<false, true>(x, dx, n, row, weights)                                    \
                       : tile_gradient<false, false>(x, dx, n, row, weights);                                  \
    }                                                                                                          \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_TILES)
#undef DEFINE_TILES

// How a row's loss is made of its logits.
struct Options {
  double label_smoothing;
  double z_loss;
  double softcap;
};

void check_rows(const char* op, const Tensor& logits, const Tensor& rows) {
  STD_TORCH_CHECK(logits.is_cpu() && rows.is_cpu(), op, ": all tensors must be on the CPU");
  STD_TORCH_CHECK(logits.dim() > 0, op, ": logits must have at least one dimension");
  int64_t count = 1;
  for (int64_t d = 0; d + 1 < logits.dim(); ++d) count *= logits.size(d);
  STD_TORCH_CHECK(rows.numel() == count, op, ": expected one element for each row of the logits");
}

void check_like_loss(const char* op, const Tensor& t, ScalarType dtype) {
  const ScalarType acc = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous() && t.scalar_type() == acc, op,
                  ": statistics must be contiguous and float32, or float64 for float64 logits");
}

void check_columns(const char* op, const Tensor& column) {
  STD_TORCH_CHECK(column.is_cpu() && column.is_contiguous() && column.scalar_type() == ScalarType::Long, op,
                  ": column must be contiguous int64");
}

Tensor new_acc(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return empty_tensor(sizes, like.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float);
}

// What the kernels read of one call's logits and targets.
template <class T>
class Logits {
 public:
  using A = acc_t<T>;

  Logits(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& class_weight, double cap, bool smooth)
      : rows_(logits), cols_(last_dim(logits)), cap_(static_cast<A>(cap)), smooth_(smooth || class_weight.has_value()) {
    if (class_weight) weights_.emplace(*class_weight);
    wide_ = target.scalar_type() == ScalarType::Long;
    target_ = target.const_data_ptr();
  }

  // Where the target of a row is: a column of the shard that starts at `start`, or one of the constants.
  int64_t column(int64_t row, int64_t start, int64_t vocab, int64_t ignore_index, bool ignore_invalid) const {
    const int64_t t = wide_ ? static_cast<const int64_t*>(target_)[row] : static_cast<const int32_t*>(target_)[row];
    if (t == ignore_index) return kIgnored;
    if (t < 0 || t >= vocab) return ignore_invalid ? kIgnored : kInvalid;
    return t >= start && t - start < cols_ ? t - start : kOnAnotherShard;
  }

  Part<A> statistics(int64_t row, int64_t first, int64_t last) const {
    Scratch<T> scratch;
    Part<A> total, part;
    for (int64_t col = first; col < last; col += kTileCols) {
      const int64_t n = std::min(kTileCols, last - col);
      statistics_tile(rows_.tile(row, col, n, scratch.data), n, cap_, smooth_, weights(col), part);
      total.add(part);
    }
    return total;
  }

  A logit(int64_t row, int64_t column) const {
    T element;
    const T* x = rows_.tile(row, column, 1, &element);
    if (!(cap_ > 0) || to_acc(*x) != to_acc(*x)) return to_acc(*x);
    // The bits that the row's maximum has, if it is this one, whatever instructions softcap is compiled to here.
    Part<A> part;
    statistics_tile(x, 1, cap_, false, nullptr, part);
    return part.max;
  }

  A weight(int64_t column) const { return weights_ ? (*weights_)[column] : A(1); }
  const A* weights(int64_t col) const { return weights_ ? weights_->data() + col : nullptr; }
  bool weighted() const { return weights_.has_value(); }
  const Rows<T>& rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  A cap() const { return cap_; }

 private:
  Rows<T> rows_;
  int64_t cols_;
  A cap_;
  bool smooth_;
  std::optional<Values<A>> weights_;
  bool wide_ = true;
  const void* target_ = nullptr;
};

// The statistics of all rows and where their targets are.
template <class T>
void all_statistics(const Logits<T>& logits, int64_t rows, int64_t start, int64_t vocab, int64_t ignore_index,
                    bool ignore_invalid, int64_t width, acc_t<T>* out, int64_t* column) {
  using A = acc_t<T>;
  const int64_t cols = logits.cols();
  const int64_t block = rows < kFewRows ? kBlockCols : std::max<int64_t>(cols, 1);
  const int64_t blocks = std::max<int64_t>(1, ceil_div(cols, block));
  std::vector<Part<A>> parts(static_cast<size_t>(rows * blocks));
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, std::min(block, cols)));
  torch::stable::parallel_for(0, rows * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = (task % blocks) * block;
      parts[static_cast<size_t>(task)] = logits.statistics(task / blocks, first, std::min(cols, first + block));
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    Part<A> total = parts[static_cast<size_t>(row * blocks)];
    for (int64_t b = 1; b < blocks; ++b) total.add(parts[static_cast<size_t>(row * blocks + b)]);
    column[row] = logits.column(row, start, vocab, ignore_index, ignore_invalid);
    const bool here = column[row] >= 0;
    const A values[] = {total.max,       total.exps,  here ? logits.logit(row, column[row]) : A(0),
                        total.sum,       total.count, here ? logits.weight(column[row]) : A(0),
                        total.weight_sum};
    for (int64_t i = 0; i < width; ++i) out[i * rows + row] = values[i];
  }
}

void check_class_weight(const char* op, const std::optional<Tensor>& class_weight, const Tensor& logits) {
  STD_TORCH_CHECK(!class_weight ||
                      (class_weight->is_cpu() && class_weight->dim() == 1 && class_weight->size(0) == last_dim(logits)),
                  op, ": class_weight must have one element for each column of the logits");
}

void check_target(const char* op, const Tensor& target) {
  STD_TORCH_CHECK(
      target.is_contiguous() && (target.scalar_type() == ScalarType::Long || target.scalar_type() == ScalarType::Int),
      op, ": target must be contiguous int64 or int32");
}

std::tuple<Tensor, Tensor> statistics(const Tensor& logits, const Tensor& target,
                                      const std::optional<Tensor>& class_weight, int64_t start, int64_t vocab,
                                      int64_t ignore_index, bool ignore_invalid, double softcap, bool smoothing) {
  const char* op = "cross_entropy_statistics";
  check_rows(op, logits, target);
  check_target(op, target);
  check_class_weight(op, class_weight, logits);
  const int64_t rows = target.numel(), width = statistics_rows(smoothing, class_weight.has_value());
  Tensor out = new_acc(logits, {width, rows});
  Tensor column = empty_tensor({rows}, ScalarType::Long);
  dispatch(op, logits.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    all_statistics<T>({logits, target, class_weight, softcap, smoothing}, rows, start, vocab, ignore_index,
                      ignore_invalid, width, static_cast<acc_t<T>*>(out.mutable_data_ptr()),
                      static_cast<int64_t*>(column.mutable_data_ptr()));
  });
  return {out, column};
}

// The loss of one row from the statistics of all shards, which lie `shard_stride` apart, and each shard's `stride`;
// what the gradient needs goes to `saved`, whose values lie `rows` apart.
template <class A>
A row_loss(const A* in, int64_t shards, int64_t shard_stride, int64_t stride, int64_t width, int64_t column,
           const Options& o, A* saved, int64_t rows) {
  const bool smooth = width > 3, weighted = width > 5;
  Part<A> all;
  A target = 0, target_weight = 0;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const A* s = in + shard * shard_stride;
    const auto value = [&](Statistic i) { return i < width ? s[i * stride] : A(0); };
    all.add({value(kMax), value(kSumExp), value(kSum), value(kCount), value(kWeightSum)});
    target += value(kTarget);
    target_weight += value(kTargetWeight);
  }
  const A log_exps = std::log(all.exps), lse = all.max + log_exps;
  const A eps = static_cast<A>(o.label_smoothing);
  // Differences from the maximum first: at logits of 1e4, lse itself has only three decimals in fp32.
  A value = (all.max - target) + log_exps;
  if (weighted) {
    value *= (A(1) - eps) * target_weight;
    if (eps != 0) value += eps * ((all.max * all.weight_sum - all.sum) + log_exps * all.weight_sum) / all.count;
  } else if (smooth) {
    value = (A(1) - eps) * value + eps * ((all.max - all.sum / all.count) + log_exps);
  }
  value += static_cast<A>(o.z_loss) * lse * lse;
  const A kept[] = {all.max, log_exps, target, all.count, target_weight, all.weight_sum};
  for (int64_t i = 0; i < saved_rows(smooth, weighted); ++i) saved[i * rows] = kept[i];
  return column == kIgnored ? A(0) : column == kInvalid ? std::numeric_limits<A>::quiet_NaN() : value;
}

// [shards, 3, 5 or 7, rows] -> loss [rows] and what the gradient needs.
std::tuple<Tensor, Tensor> combine(const Tensor& statistics, const Tensor& column, double label_smoothing,
                                   double z_loss) {
  const char* op = "cross_entropy_combine";
  check_like_loss(op, statistics, statistics.scalar_type());
  check_columns(op, column);
  const int64_t rows = column.numel();
  const int64_t width = statistics.dim() == 3 ? statistics.size(1) : 0;
  STD_TORCH_CHECK((width == (label_smoothing != 0 ? 5 : 3) || width == 7) && statistics.size(2) == rows, op,
                  ": statistics must be [shards, 3, rows], 5 with label smoothing or 7 with class weights");
  Tensor loss = new_acc(statistics, {rows});
  Tensor saved = new_acc(statistics, {saved_rows(width > 3, width > 5), rows});
  const Options options{label_smoothing, z_loss, 0.0};
  dispatch(op, statistics.scalar_type(), [&](auto tag) {
    using A = acc_t<decltype(tag)>;
    const A* in = static_cast<const A*>(statistics.const_data_ptr());
    const int64_t* columns = static_cast<const int64_t*>(column.const_data_ptr());
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

// The gradient of n logits of a row from `col` on; g is the incoming gradient, `saved` the row's, `rows` apart.
template <class T>
void row_gradient(const Logits<T>& logits, int64_t row, int64_t col, int64_t n, int64_t column, acc_t<T> g,
                  const acc_t<T>* saved, int64_t rows, const Options& o, T* dx) {
  using A = acc_t<T>;
  if (column == kIgnored || column == kInvalid) {
    std::fill_n(dx, n, from_acc<T>(column == kIgnored ? A(0) : std::numeric_limits<A>::quiet_NaN()));
    return;
  }
  const A eps = static_cast<A>(o.label_smoothing);
  const A max = saved[kSavedMax * rows], log_exps = saved[kSavedLogSumExp * rows];
  const A uniform = eps != 0 ? eps / saved[kSavedCount * rows] : A(0);
  A share = 1, of_target = A(1) - eps;
  if (logits.weighted()) {
    of_target *= saved[kSavedTargetWeight * rows];
    share = of_target + uniform * saved[kSavedWeightSum * rows];
  }
  const A z_term = g * A(2) * static_cast<A>(o.z_loss) * (max + log_exps);
  const RowGradient<A> gradients{max, log_exps, g, z_term, share, uniform, logits.cap()};
  Scratch<T> scratch;
  const T* x = logits.rows().tile(row, col, n, scratch.data);
  const int64_t here = column - col;
  const bool has_target = here >= 0 && here < n;
  const A at_target = has_target ? to_acc(x[here]) : A(0);  // read before it is overwritten
  gradient_tile(x, dx, n, gradients, logits.weights(col));
  if (has_target) {
    // Once more with the target's share, so that the sum is rounded once.
    const A weight = of_target + (logits.weighted() ? uniform * logits.weight(column) : uniform);
    dx[here] = from_acc<T>(logits.cap() > 0 ? gradient<true>(at_target, gradients, weight)
                                            : gradient<false>(at_target, gradients, weight));
  }
}

// `grad` is one for each row, or with a divisor one for all, to be divided by it.
void write_gradient(const char* op, const Tensor& grad, const Tensor& logits, const std::optional<Tensor>& class_weight,
                    const Tensor& column, const Tensor& saved, const std::optional<Tensor>& divisor,
                    const Options& options, void* out) {
  const int64_t rows = column.numel();
  check_rows(op, logits, divisor ? column : grad);
  check_columns(op, column);
  check_like_loss(op, saved, logits.scalar_type());
  check_class_weight(op, class_weight, logits);
  STD_TORCH_CHECK(grad.scalar_type() == saved.scalar_type(), op, ": grad must have the dtype of the loss");
  const int64_t width = saved_rows(options.label_smoothing != 0, class_weight.has_value());
  if (divisor) check_like_loss(op, *divisor, logits.scalar_type());
  STD_TORCH_CHECK(grad.is_cpu() && grad.numel() == (divisor ? 1 : rows) && (!divisor || divisor->numel() == 1), op,
                  ": grad must have one entry for each row of the logits, or one in all beside one divisor");
  STD_TORCH_CHECK(saved.dim() == 2 && saved.size(0) == width && saved.size(1) == rows, op,
                  ": column and saved must have one entry for each row of the logits");
  dispatch(op, logits.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Logits<T> in(logits, column, class_weight, options.softcap, false);
    const std::vector<int64_t> sizes = [&] {  // grad as a column: rows of one element
      std::vector<int64_t> s(grad.sizes().begin(), grad.sizes().end());
      s.push_back(1);
      return s;
    }();
    std::vector<int64_t> strides(grad.strides().begin(), grad.strides().end());
    strides.push_back(1);
    const Rows<A> grads(grad, sizes.data(), grad.dim() + 1, strides.data());
    const A shared = divisor ? *grads.row(0) / *static_cast<const A*>(divisor->const_data_ptr()) : A(0);
    const int64_t* columns = static_cast<const int64_t*>(column.const_data_ptr());
    const A* kept = static_cast<const A*>(saved.const_data_ptr());
    const Shape2d shape{rows, in.cols()};
    for_each_tile(shape, [&](int64_t r, int64_t col, int64_t n) {
      T* dx = static_cast<T*>(out) + r * shape.cols + col;
      row_gradient(in, r, col, n, columns[r], divisor ? shared : *grads.row(r), kept + r, rows, options, dx);
    });
  });
}

Tensor backward(const Tensor& grad, const Tensor& logits, const std::optional<Tensor>& class_weight,
                const Tensor& column, const Tensor& saved, const std::optional<Tensor>& divisor, double label_smoothing,
                double z_loss, double softcap) {
  Tensor out = empty_output(logits, logits.sizes());
  write_gradient("cross_entropy_backward", grad, logits, class_weight, column, saved, divisor,
                 {label_smoothing, z_loss, softcap}, out.mutable_data_ptr());
  return out;
}

void backward_inplace(const Tensor& grad, const Tensor& logits, const std::optional<Tensor>& class_weight,
                      const Tensor& column, const Tensor& saved, const std::optional<Tensor>& divisor,
                      double label_smoothing, double z_loss, double softcap) {
  STD_TORCH_CHECK(logits.is_contiguous(), "cross_entropy_backward_: logits must be contiguous");
  write_gradient("cross_entropy_backward_", grad, logits, class_weight, column, saved, divisor,
                 {label_smoothing, z_loss, softcap}, logits.mutable_data_ptr());
}

// What one call without a group gives: loss, reduced, and its divisor, which is 1 unless it is a mean.
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
                                                     const std::optional<Tensor>& class_weight, const Options& options,
                                                     int64_t ignore_index, bool ignore_invalid, int64_t reduction,
                                                     void* gradient, bool of_sum = false) {
  check_rows(op, logits, target);
  check_target(op, target);
  check_class_weight(op, class_weight, logits);
  const auto of_rows = logits.sizes(), of_targets = target.sizes();
  STD_TORCH_CHECK(
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
    const Logits<T> in(logits, target, class_weight, options.softcap, smooth);
    A* kept = static_cast<A*>(saved.mutable_data_ptr());
    std::vector<A> losses(static_cast<size_t>(rows)), target_weights(static_cast<size_t>(weighted ? rows : 0));
    for (int64_t row = 0; row < rows; ++row) {
      columns[row] = in.column(row, 0, cols, ignore_index, ignore_invalid);
      STD_TORCH_CHECK(columns[row] != kInvalid, op, ": the target in row ", row, " is outside the vocabulary");
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
      all_statistics(in, rows, 0, cols, ignore_index, ignore_invalid, width, values.data(), columns);
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
                                                         int64_t ignore_index, bool ignore_invalid, int64_t reduction,
                                                         bool /*inplace_backward*/) {
  return unsharded("cross_entropy", logits, target, class_weight, {label_smoothing, z_loss, softcap}, ignore_index,
                   ignore_invalid, reduction, nullptr);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> with_gradient(const Tensor& logits, const Tensor& target,
                                                                 const std::optional<Tensor>& class_weight,
                                                                 double label_smoothing, double z_loss, double softcap,
                                                                 int64_t ignore_index, bool ignore_invalid,
                                                                 int64_t reduction) {
  Tensor gradient = empty_output(logits, logits.sizes());
  auto [loss, column, saved, divisor] =
      unsharded("cross_entropy_with_gradient", logits, target, class_weight, {label_smoothing, z_loss, softcap},
                ignore_index, ignore_invalid, reduction, gradient.mutable_data_ptr());
  return {loss, column, saved, divisor, gradient};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> with_gradient_inplace(const Tensor& logits, const Tensor& target,
                                                                 const std::optional<Tensor>& class_weight,
                                                                 double label_smoothing, double z_loss, double softcap,
                                                                 int64_t ignore_index, bool ignore_invalid,
                                                                 int64_t reduction, bool of_sum) {
  const char* op = "cross_entropy_with_gradient_";
  STD_TORCH_CHECK(logits.is_contiguous(), op, ": logits must be contiguous");
  return unsharded(op, logits, target, class_weight, {label_smoothing, z_loss, softcap}, ignore_index, ignore_invalid,
                   reduction, logits.mutable_data_ptr(), of_sum);
}

// gradient *= factor, a scalar; one of 1 costs nothing.
void scale_inplace(const Tensor& gradient, const Tensor& factor) {
  const char* op = "cross_entropy_scale_";
  STD_TORCH_CHECK(gradient.is_cpu() && factor.is_cpu() && gradient.is_contiguous() && factor.numel() == 1, op,
                  ": expected a contiguous gradient and one factor");
  check_like_loss(op, factor, gradient.scalar_type());
  dispatch(op, gradient.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const auto by = *static_cast<const acc_t<T>*>(factor.const_data_ptr());
    if (by == acc_t<T>(1)) return;
    T* data = static_cast<T*>(gradient.mutable_data_ptr());
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
  m.impl("cross_entropy_statistics", TORCH_BOX(&statistics));
  m.impl("cross_entropy_combine", TORCH_BOX(&combine));
  m.impl("cross_entropy_backward", TORCH_BOX(&backward));
  m.impl("cross_entropy_backward_", TORCH_BOX(&backward_inplace));
}

}  // namespace parallel_ops::cpu
