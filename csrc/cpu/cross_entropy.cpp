// Cross-entropy over one shard of the vocabulary, on the CPU: row statistics, their combination into loss and
// logsumexp, and the gradient of the logits. parallel_ops/tensor_parallel/cross_entropy.py has the formulas.
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "cross_entropy_tile.h"
#include "output.h"
#include "rows.h"

namespace parallel_ops::cpu {
namespace {

#define DEFINE_TILES(T)                                                                                            \
  PARALLEL_OPS_MULTIVERSION void statistics_tile(const T* x, int64_t n, acc_t<T> cap, bool smooth,                 \
                                                 Part<acc_t<T>>& out) {                                            \
    out = cap > 0 ? (smooth ? tile_statistics<true, true>(x, n, cap) : tile_statistics<true, false>(x, n, cap))    \
                  : (smooth ? tile_statistics<false, true>(x, n, cap) : tile_statistics<false, false>(x, n, cap)); \
  }                                                                                                                \
  PARALLEL_OPS_MULTIVERSION void gradient_tile(const T* x, T* dx, int64_t n, const RowGradient<acc_t<T>>& row) {   \
    if (row.cap > 0) {                                                                                             \
      row.uniform != 0 ? tile_gradient<true, true>(x, dx, n, row) : tile_gradient<true, false>(x, dx, n, row);     \
    } else {                                                                                                       \
      row.uniform != 0 ? tile_gradient<false, true>(x, dx, n, row) : tile_gradient<false, false>(x, dx, n, row);   \
    }                                                                                                              \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_TILES)
#undef DEFINE_TILES

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
  const bool wide = like.scalar_type() == ScalarType::Double;
  return empty_tensor(sizes, wide ? ScalarType::Double : ScalarType::Float);
}

template <class T, class Target>
void row_statistics(const Tensor& logits, const Tensor& target, int64_t start, int64_t vocab, int64_t ignore_index,
                    double cap, bool smooth, acc_t<T>* out, int64_t* column) {
  using A = acc_t<T>;
  const int64_t cols = last_dim(logits), rows = target.numel();
  const Rows<T> xs(logits);
  const Target* targets = static_cast<const Target*>(target.const_data_ptr());
  const int64_t block = rows < kFewRows ? kBlockCols : std::max<int64_t>(cols, 1);
  const int64_t blocks = std::max<int64_t>(1, ceil_div(cols, block));
  std::vector<Part<A>> parts(static_cast<size_t>(rows * blocks));
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, std::min(block, cols)));
  torch::stable::parallel_for(0, rows * blocks, grain, [&](int64_t begin, int64_t end) {
    Scratch<T> scratch;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / blocks, first = (task % blocks) * block;
      const int64_t last = std::min(cols, first + block);
      Part<A> total, part;
      for (int64_t col = first; col < last; col += kTileCols) {
        const int64_t n = std::min(kTileCols, last - col);
        statistics_tile(xs.tile(row, col, n, scratch.data), n, static_cast<A>(cap), smooth, part);
        total.add(part.max, part.exps, part.sum, part.count);
      }
      parts[static_cast<size_t>(task)] = total;
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    Part<A> total = parts[static_cast<size_t>(row * blocks)];
    for (int64_t b = 1; b < blocks; ++b) {
      const Part<A>& part = parts[static_cast<size_t>(row * blocks + b)];
      total.add(part.max, part.exps, part.sum, part.count);
    }
    const int64_t t = static_cast<int64_t>(targets[row]);
    const bool valid = t >= 0 && t < vocab, here = valid && t >= start && t - start < cols;
    column[row] = t == ignore_index ? kIgnored : !valid ? kInvalid : here ? t - start : kOnAnotherShard;
    A z = 0;
    if (column[row] >= 0) {
      T element;
      z = to_acc(*xs.tile(row, column[row], 1, &element));
      if (cap > 0) z = softcap(z, static_cast<A>(cap)).value;
    }
    out[kMax * rows + row] = total.max;
    out[kSumExp * rows + row] = total.exps;
    out[kTarget * rows + row] = z;
    if (smooth) {
      out[kSum * rows + row] = total.sum;
      out[kCount * rows + row] = total.count;
    }
  }
}

std::tuple<Tensor, Tensor> statistics(const Tensor& logits, const Tensor& target, int64_t start, int64_t vocab,
                                      int64_t ignore_index, double softcap, bool smoothing) {
  const char* op = "cross_entropy_statistics";
  check_rows(op, logits, target);
  STD_TORCH_CHECK(target.is_contiguous(), op, ": target must be contiguous");
  const int64_t rows = target.numel();
  Tensor out = new_acc(logits, {smoothing ? kSmoothed : kPlain, rows});
  Tensor column = empty_tensor({rows}, ScalarType::Long);
  int64_t* columns = static_cast<int64_t*>(column.mutable_data_ptr());
  dispatch(op, logits.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    auto* values = static_cast<acc_t<T>*>(out.mutable_data_ptr());
    switch (target.scalar_type()) {
      case ScalarType::Long:
        return row_statistics<T, int64_t>(logits, target, start, vocab, ignore_index, softcap, smoothing, values,
                                          columns);
      case ScalarType::Int:
        return row_statistics<T, int32_t>(logits, target, start, vocab, ignore_index, softcap, smoothing, values,
                                          columns);
      default:
        STD_TORCH_CHECK(false, op, ": target must be int64 or int32");
    }
  });
  return {out, column};
}

// [shards, 3 or 5, rows] -> loss [rows] and what the gradient needs: (max, log of the sum of exponentials[, count]).
std::tuple<Tensor, Tensor> combine(const Tensor& statistics, const Tensor& column, double label_smoothing,
                                   double z_loss) {
  const char* op = "cross_entropy_combine";
  check_like_loss(op, statistics, statistics.scalar_type());
  check_columns(op, column);
  const int64_t rows = column.numel();
  const bool smooth = label_smoothing != 0;
  STD_TORCH_CHECK(
      statistics.dim() == 3 && statistics.size(1) == (smooth ? kSmoothed : kPlain) && statistics.size(2) == rows, op,
      ": statistics must be [shards, 3, rows], or [shards, 5, rows] with label smoothing");
  Tensor loss = empty_tensor({rows}, statistics.scalar_type());
  Tensor saved = empty_tensor({smooth ? 3 : 2, rows}, statistics.scalar_type());
  dispatch(op, statistics.scalar_type(), [&](auto tag) {
    using A = acc_t<decltype(tag)>;
    const A* in = static_cast<const A*>(statistics.const_data_ptr());
    const int64_t* columns = static_cast<const int64_t*>(column.const_data_ptr());
    A* losses = static_cast<A*>(loss.mutable_data_ptr());
    A* kept = static_cast<A*>(saved.mutable_data_ptr());
    const int64_t shards = statistics.size(0), stride = statistics.size(1) * rows;
    const A eps = static_cast<A>(label_smoothing);
    torch::stable::parallel_for(0, rows, kGrain / 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        Part<A> all;
        A target = 0;
        for (int64_t shard = 0; shard < shards; ++shard) {
          const A* s = in + shard * stride + row;
          all.add(s[kMax * rows], s[kSumExp * rows], smooth ? s[kSum * rows] : A(0), smooth ? s[kCount * rows] : A(0));
          target += s[kTarget * rows];
        }
        const A log_exps = std::log(all.exps), lse = all.max + log_exps;
        // Differences from the maximum first: at logits of 1e4, lse itself has only three decimals in fp32.
        A value = (all.max - target) + log_exps;
        if (smooth) value = (A(1) - eps) * value + eps * ((all.max - all.sum / all.count) + log_exps);
        value += static_cast<A>(z_loss) * lse * lse;
        if (columns[row] == kIgnored) value = 0;
        if (columns[row] == kInvalid) value = std::numeric_limits<A>::quiet_NaN();
        losses[row] = value;
        kept[row] = all.max;
        kept[rows + row] = log_exps;
        if (smooth) kept[2 * rows + row] = all.count;
      }
    });
  });
  return {loss, saved};
}

void write_gradient(const char* op, const Tensor& grad, const Tensor& logits, const Tensor& column, const Tensor& saved,
                    double label_smoothing, double z_loss, double cap, void* out) {
  const int64_t rows = column.numel();
  const bool smooth = label_smoothing != 0;
  check_rows(op, logits, grad);
  check_columns(op, column);
  check_like_loss(op, saved, logits.scalar_type());
  STD_TORCH_CHECK(grad.scalar_type() == saved.scalar_type(), op, ": grad must have the dtype of the loss");
  STD_TORCH_CHECK(
      grad.numel() == rows && saved.dim() == 2 && saved.size(0) == (smooth ? 3 : 2) && saved.size(1) == rows, op,
      ": grad, column and saved must have one entry for each row of the logits");
  dispatch(op, logits.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Rows<T> xs(logits);
    const std::vector<int64_t> sizes = [&] {  // grad as a column: rows of one element
      std::vector<int64_t> s(grad.sizes().begin(), grad.sizes().end());
      s.push_back(1);
      return s;
    }();
    std::vector<int64_t> strides(grad.strides().begin(), grad.strides().end());
    strides.push_back(1);
    const Rows<A> grads(grad, sizes.data(), grad.dim() + 1, strides.data());
    const int64_t* columns = static_cast<const int64_t*>(column.const_data_ptr());
    const A* kept = static_cast<const A*>(saved.const_data_ptr());
    const A eps = static_cast<A>(label_smoothing);
    const Shape2d shape{rows, last_dim(logits)};
    for_each_tile(shape, [&](int64_t r, int64_t col, int64_t n) {
      T* dx = static_cast<T*>(out) + r * shape.cols + col;
      const int64_t target = columns[r];
      if (target == kIgnored || target == kInvalid) {
        std::fill_n(dx, n, from_acc<T>(target == kIgnored ? A(0) : std::numeric_limits<A>::quiet_NaN()));
        return;
      }
      const A g = *grads.row(r), max = kept[r], log_exps = kept[rows + r];
      const A uniform = smooth ? eps / kept[2 * rows + r] : A(0);
      const A z_term = g * A(2) * static_cast<A>(z_loss) * (max + log_exps);
      const RowGradient<A> row{max, log_exps, g, z_term, uniform, static_cast<A>(cap)};
      Scratch<T> scratch;
      const T* x = xs.tile(r, col, n, scratch.data);
      const int64_t here = target - col;
      const bool has_target = here >= 0 && here < n;
      const A at_target = has_target ? to_acc(x[here]) : A(0);  // read before it is overwritten
      gradient_tile(x, dx, n, row);
      if (has_target) {
        // Once more with the target's share, so that the sum is rounded once.
        const A weight = (A(1) - eps) + uniform;
        const A exact = cap > 0 ? gradient<true>(at_target, row, weight) : gradient<false>(at_target, row, weight);
        dx[here] = from_acc<T>(exact);
      }
    });
  });
}

Tensor backward(const Tensor& grad, const Tensor& logits, const Tensor& column, const Tensor& saved,
                double label_smoothing, double z_loss, double softcap) {
  Tensor out = empty_output(logits, logits.sizes());
  write_gradient("cross_entropy_backward", grad, logits, column, saved, label_smoothing, z_loss, softcap,
                 out.mutable_data_ptr());
  return out;
}

void backward_inplace(const Tensor& grad, const Tensor& logits, const Tensor& column, const Tensor& saved,
                      double label_smoothing, double z_loss, double softcap) {
  STD_TORCH_CHECK(logits.is_contiguous(), "cross_entropy_backward_: logits must be contiguous");
  write_gradient("cross_entropy_backward_", grad, logits, column, saved, label_smoothing, z_loss, softcap,
                 logits.mutable_data_ptr());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("cross_entropy_statistics", TORCH_BOX(&statistics));
  m.impl("cross_entropy_combine", TORCH_BOX(&combine));
  m.impl("cross_entropy_backward", TORCH_BOX(&backward));
  m.impl("cross_entropy_backward_", TORCH_BOX(&backward_inplace));
}

}  // namespace parallel_ops::cpu
