#include "cross_entropy_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "../check.h"

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

}  // namespace

void check_rows(const char* op, const Tensor& logits, const Tensor& rows) {
  PARALLEL_OPS_CHECK(logits.is_cpu() && rows.is_cpu(), op, ": all tensors must be on the CPU");
  PARALLEL_OPS_CHECK(logits.dim() > 0, op, ": logits must have at least one dimension");
  int64_t count = 1;
  for (int64_t d = 0; d + 1 < logits.dim(); ++d) count *= logits.size(d);
  PARALLEL_OPS_CHECK(rows.numel() == count, op, ": expected one element for each row of the logits");
}

void check_like_loss(const char* op, const Tensor& t, ScalarType dtype) {
  const ScalarType acc = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  PARALLEL_OPS_CHECK(t.is_cpu() && t.is_contiguous() && t.scalar_type() == acc, op,
                     ": statistics must be contiguous and float32, or float64 for float64 logits");
}

void check_columns(const char* op, const Tensor& column) {
  PARALLEL_OPS_CHECK(column.is_cpu() && column.is_contiguous() && column.scalar_type() == ScalarType::Long, op,
                     ": column must be contiguous int64");
}

void check_class_weight(const char* op, const std::optional<Tensor>& class_weight, const Tensor& logits) {
  PARALLEL_OPS_CHECK(!class_weight || (class_weight->is_cpu() && class_weight->dim() == 1 &&
                                       class_weight->size(0) == last_dim(logits)),
                     op, ": class_weight must have one element for each column of the logits");
}

void check_target(const char* op, const Tensor& target) {
  PARALLEL_OPS_CHECK(
      target.is_contiguous() && (target.scalar_type() == ScalarType::Long || target.scalar_type() == ScalarType::Int),
      op, ": target must be contiguous int64 or int32");
}

Tensor new_acc(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return empty_tensor(sizes, like.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float);
}

template <class T>
Part<acc_t<T>> Logits<T>::statistics(int64_t row, int64_t first, int64_t last) const {
  Scratch<T> scratch;
  Part<A> total, part;
  for (int64_t col = first; col < last; col += kTileCols) {
    const int64_t n = std::min(kTileCols, last - col);
    statistics_tile(rows_.tile(row, col, n, scratch.data), n, cap_, smooth_, weights(col), part);
    total.add(part);
  }
  return total;
}

template <class T>
acc_t<T> Logits<T>::logit(int64_t row, int64_t column) const {
  T element;
  const T* x = rows_.tile(row, column, 1, &element);
  if (!(cap_ > 0) || to_acc(*x) != to_acc(*x)) return to_acc(*x);
  // The bits that the row's maximum has, if it is this one, whatever instructions softcap is compiled to here.
  Part<A> part;
  statistics_tile(x, 1, cap_, false, nullptr, part);
  return part.max;
}

template <class T>
void all_statistics(const Logits<T>& logits, int64_t rows, int64_t start, int64_t vocab, int64_t width, acc_t<T>* out,
                    int64_t* column) {
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
    column[row] = logits.column(row, start, vocab);
    const bool here = column[row] >= 0;
    const A values[] = {total.max,       total.exps,  here ? logits.logit(row, column[row]) : A(0),
                        total.sum,       total.count, here ? logits.weight(column[row]) : A(0),
                        total.weight_sum};
    for (int64_t i = 0; i < width; ++i) out[i * rows + row] = values[i];
  }
}

template <class A>
A row_loss(const A* in, int64_t shards, int64_t shard_stride, int64_t stride, int64_t width, int64_t column,
           const LossOptions& o, A* saved, int64_t rows) {
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

template <class T>
void row_gradient(const Logits<T>& logits, int64_t row, int64_t col, int64_t n, int64_t column, acc_t<T> g,
                  const acc_t<T>* saved, int64_t rows, const LossOptions& o, T* dx) {
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

#define INSTANTIATE(T)                                                                                           \
  template class Logits<T>;                                                                                      \
  template void all_statistics<T>(const Logits<T>&, int64_t, int64_t, int64_t, int64_t, acc_t<T>*, int64_t*);    \
  template void row_gradient<T>(const Logits<T>&, int64_t, int64_t, int64_t, int64_t, acc_t<T>, const acc_t<T>*, \
                                int64_t, const LossOptions&, T*);
PARALLEL_OPS_FOR_EACH_DTYPE(INSTANTIATE)
#undef INSTANTIATE
template float row_loss<float>(const float*, int64_t, int64_t, int64_t, int64_t, int64_t, const LossOptions&, float*,
                               int64_t);
template double row_loss<double>(const double*, int64_t, int64_t, int64_t, int64_t, int64_t, const LossOptions&,
                                 double*, int64_t);

}  // namespace parallel_ops::cpu
