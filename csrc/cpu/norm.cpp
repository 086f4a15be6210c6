// Normalisation of rows on the CPU, forward and backward.
//
// A row is read from memory once and stays in the core's own caches for the passes that follow: statistics (two
// passes where the mean is subtracted, since E[x^2] - E[x]^2 cancels), then the output. The backward takes a row's
// two dot products, then its input gradient together with its share of the weight and bias gradients:
//
//   g = dy w,  xhat = (x - mean) rstd
//   dx = rstd (g - mean(g) - xhat mean(g xhat)) + dsum,   dweight = sum over rows of dy xhat,   dbias = that of dy
#include "norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "column_sum.h"
#include "lanes.h"
#include "output.h"
#include "rows.h"

namespace parallel_ops::cpu {
namespace {

// What the loops over a row's tiles need to know of the row.
template <class A>
struct Row {
  A offset;  // added to the weight: 1 where it is zero-centred
  A mean;
  A rstd;
  A mean_g;
  A mean_g_xhat;
};

// The sum is rounded to T before it is normalised, so that what is returned is what was normalised.
template <class T>
PARALLEL_OPS_INLINE void add_loop(const T* __restrict x, const T* __restrict residual, T* __restrict sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] = from_acc<T>(to_acc(x[i]) + to_acc(residual[i]));
}

template <class T>
PARALLEL_OPS_INLINE acc_t<T> total_loop(const T* __restrict x, int64_t n) {
  return sum_lanes<acc_t<T>>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA { return to_acc(x[i]); });
}

template <class T>
PARALLEL_OPS_INLINE acc_t<T> squares_loop(const T* __restrict x, acc_t<T> mean, int64_t n) {
  return sum_lanes<acc_t<T>>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA {
    const acc_t<T> d = to_acc(x[i]) - mean;
    return d * d;
  });
}

template <class T>
PARALLEL_OPS_INLINE void normalise_loop(const T* __restrict x, const T* __restrict weight, const T* __restrict bias,
                                        Row<acc_t<T>> row, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> xhat = (to_acc(x[i]) - row.mean) * row.rstd;
    y[i] = from_acc<T>(xhat * (to_acc(weight[i]) + row.offset) + to_acc(bias[i]));
  }
}

template <class T>
PARALLEL_OPS_INLINE acc_t<T> dot_g_loop(const T* __restrict dy, const T* __restrict weight, acc_t<T> offset,
                                        int64_t n) {
  return sum_lanes<acc_t<T>>(
      n, [&](int64_t i) PARALLEL_OPS_LAMBDA { return to_acc(dy[i]) * (to_acc(weight[i]) + offset); });
}

template <class T>
PARALLEL_OPS_INLINE acc_t<T> dot_g_xhat_loop(const T* __restrict dy, const T* __restrict x, const T* __restrict weight,
                                             Row<acc_t<T>> row, int64_t n) {
  return sum_lanes<acc_t<T>>(n, [&](int64_t i) PARALLEL_OPS_LAMBDA {
    return to_acc(dy[i]) * (to_acc(weight[i]) + row.offset) * ((to_acc(x[i]) - row.mean) * row.rstd);
  });
}

template <bool kBias, class T>
PARALLEL_OPS_INLINE void gradient_loop(const T* __restrict dy, const T* __restrict x, const T* __restrict weight,
                                       const T* __restrict dsum, Row<acc_t<T>> row, T* __restrict dx,
                                       acc_t<T>* __restrict dweight, acc_t<T>* __restrict dbias, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const acc_t<T> d = to_acc(dy[i]);
    const acc_t<T> g = d * (to_acc(weight[i]) + row.offset);
    const acc_t<T> xhat = (to_acc(x[i]) - row.mean) * row.rstd;
    dx[i] = from_acc<T>(row.rstd * (g - row.mean_g - xhat * row.mean_g_xhat) + to_acc(dsum[i]));
    dweight[i] += d * xhat;
    if constexpr (kBias) dbias[i] += d;
  }
}

#define DEFINE_TILES(T)                                                                                          \
  PARALLEL_OPS_MULTIVERSION void add(const T* x, const T* residual, T* sum, int64_t n) {                         \
    add_loop(x, residual, sum, n);                                                                               \
  }                                                                                                              \
  PARALLEL_OPS_MULTIVERSION acc_t<T> total(const T* x, int64_t n) { return total_loop(x, n); }                   \
  PARALLEL_OPS_MULTIVERSION acc_t<T> squares(const T* x, acc_t<T> mean, int64_t n) {                             \
    return squares_loop(x, mean, n);                                                                             \
  }                                                                                                              \
  PARALLEL_OPS_MULTIVERSION void normalise(const T* x, const T* w, const T* b, const Row<acc_t<T>>& row, T* y,   \
                                           int64_t n) {                                                          \
    normalise_loop(x, w, b, row, y, n);                                                                          \
  }                                                                                                              \
  PARALLEL_OPS_MULTIVERSION acc_t<T> dot_g(const T* dy, const T* w, acc_t<T> offset, int64_t n) {                \
    return dot_g_loop(dy, w, offset, n);                                                                         \
  }                                                                                                              \
  PARALLEL_OPS_MULTIVERSION acc_t<T> dot_g_xhat(const T* dy, const T* x, const T* w, const Row<acc_t<T>>& row,   \
                                                int64_t n) {                                                     \
    return dot_g_xhat_loop(dy, x, w, row, n);                                                                    \
  }                                                                                                              \
  PARALLEL_OPS_MULTIVERSION void gradient(const T* dy, const T* x, const T* w, const T* dsum,                    \
                                          const Row<acc_t<T>>& row, T* dx, acc_t<T>* dw, int64_t n) {            \
    gradient_loop<false>(dy, x, w, dsum, row, dx, dw, static_cast<acc_t<T>*>(nullptr), n);                       \
  }                                                                                                              \
  PARALLEL_OPS_MULTIVERSION void gradient_with_bias(const T* dy, const T* x, const T* w, const T* dsum,          \
                                                    const Row<acc_t<T>>& row, T* dx, acc_t<T>* dw, acc_t<T>* db, \
                                                    int64_t n) {                                                 \
    gradient_loop<true>(dy, x, w, dsum, row, dx, dw, db, n);                                                     \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_TILES)
#undef DEFINE_TILES

// Calls f(col, n) for the tiles of one row.
template <class F>
void for_each_tile_of_row(int64_t cols, const F& f) {
  for (int64_t col = 0; col < cols; col += kTileCols) f(col, std::min(kTileCols, cols - col));
}

// The dtype of the statistics: that of the arithmetic.
ScalarType statistics_dtype(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

void check_weight(const char* op, const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() > 0, op, ": x must have at least one dimension");
  STD_TORCH_CHECK(weight.is_cpu() && weight.scalar_type() == x.scalar_type(), op,
                  ": weight must be on the same device and of the same dtype as x");
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == last_dim(x), op,
                  ": weight must have one element for each element of the last dimension of x");
}

void check_statistics(const char* op, const char* name, const Tensor& t, const Tensor& x, int64_t rows) {
  STD_TORCH_CHECK(
      t.is_cpu() && t.scalar_type() == statistics_dtype(x) && t.dim() == 1 && t.size(0) == rows && t.is_contiguous(),
      op, ": ", name, " must be what the forward returned");
}

// rows_and_cols with as many rows as there are even when they are empty: each has its statistics.
Shape2d norm_shape(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return {rows, last_dim(x)};
}

}  // namespace

NormOutputs norm_forward(const NormOptions& options, const Tensor& x, const Tensor& weight,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, double eps) {
  check_weight(options.op, x, weight);
  check_bias(options.op, x, bias);
  if (residual) check_like(options.op, "residual", *residual, x);
  const Shape2d shape = norm_shape(x);
  const auto statistics = [&](int64_t n) { return empty_tensor({n}, statistics_dtype(x)); };
  NormOutputs out{empty_output(x, x.sizes()),
                  residual ? empty_output(x, x.sizes()) : empty_tensor({0}, x.scalar_type()),
                  statistics(options.centred ? shape.rows : 0), statistics(shape.rows)};
  dispatch(options.op, x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Rows<T> xs(x), residuals(residual ? *residual : x), weights(weight);
    const BiasTiles<T> biases(bias);
    T* y = static_cast<T*>(out.y.mutable_data_ptr());
    T* sum = residual ? static_cast<T*>(out.sum.mutable_data_ptr()) : nullptr;
    A* mean = static_cast<A*>(out.mean.mutable_data_ptr());
    A* rstd = static_cast<A*>(out.rstd.mutable_data_ptr());
    const A scale = A(1) / static_cast<A>(shape.cols);

    const auto normalise_row = [&](int64_t r) {
      Scratch<T> sx, sr, sw, sb;
      const auto tile = [&](int64_t col, int64_t n) {
        return sum ? sum + r * shape.cols + col : xs.tile(r, col, n, sx.data);
      };
      if (sum) {
        for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) {
          add(xs.tile(r, col, n, sx.data), residuals.tile(r, col, n, sr.data), sum + r * shape.cols + col, n);
        });
      }
      Row<A> row{options.zero_centered ? A(1) : A(0), A(0), A(0), A(0), A(0)};
      if (options.centred) {
        for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) { row.mean += total(tile(col, n), n); });
        mean[r] = row.mean *= scale;
      }
      A variance = 0;
      for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) { variance += squares(tile(col, n), row.mean, n); });
      rstd[r] = row.rstd = A(1) / std::sqrt(variance * scale + static_cast<A>(eps));
      for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) {
        const T* wt = weights.tile(0, col, n, sw.data);
        normalise(tile(col, n), wt, biases.tile(col, n, sb.data), row, y + r * shape.cols + col, n);
      });
    };
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, shape.cols));
    torch::stable::parallel_for(0, shape.rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) normalise_row(r);
    });
  });
  return out;
}

NormGradients norm_backward(const NormOptions& options, const Tensor& grad, const std::optional<Tensor>& grad_sum,
                            const Tensor& x, const Tensor& weight, const std::optional<Tensor>& mean,
                            const Tensor& rstd, bool has_bias) {
  const Shape2d shape = norm_shape(x);
  check_weight(options.op, x, weight);
  check_like(options.op, "grad", grad, x);
  if (grad_sum) check_like(options.op, "grad_sum", *grad_sum, x);
  if (mean) check_statistics(options.op, "mean", *mean, x, shape.rows);
  check_statistics(options.op, "rstd", rstd, x, shape.rows);
  NormGradients out{empty_output(x, x.sizes()), empty_tensor({shape.cols}, x.scalar_type()),
                    empty_tensor({has_bias ? shape.cols : 0}, x.scalar_type())};
  dispatch(options.op, x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Rows<T> dys(grad), dsums(grad_sum ? *grad_sum : x), xs(x), weights(weight);
    const A* means = mean ? static_cast<const A*>(mean->const_data_ptr()) : nullptr;
    const A* rstds = static_cast<const A*>(rstd.const_data_ptr());
    T* dx = static_cast<T*>(out.dx.mutable_data_ptr());
    const A scale = A(1) / static_cast<A>(shape.cols);

    // The row's own sums go to acc[0..cols) for the weight and acc[cols..2 cols) for the bias.
    const auto row_gradient = [&](int64_t r, A* acc) {
      Scratch<T> sdy, sx, sw, sdsum;
      Row<A> row{options.zero_centered ? A(1) : A(0), means ? means[r] : A(0), rstds[r], A(0), A(0)};
      for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) {
        const T* dyt = dys.tile(r, col, n, sdy.data);
        const T* wt = weights.tile(0, col, n, sw.data);
        row.mean_g_xhat += dot_g_xhat(dyt, xs.tile(r, col, n, sx.data), wt, row, n);
        if (options.centred) row.mean_g += dot_g(dyt, wt, row.offset, n);
      });
      row.mean_g *= scale;
      row.mean_g_xhat *= scale;
      for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) {
        const T* dyt = dys.tile(r, col, n, sdy.data);
        const T* xt = xs.tile(r, col, n, sx.data);
        const T* wt = weights.tile(0, col, n, sw.data);
        const T* dsumt = grad_sum ? dsums.tile(r, col, n, sdsum.data) : kZeroTile<T>.data;
        T* dxt = dx + r * shape.cols + col;
        if (has_bias) {
          gradient_with_bias(dyt, xt, wt, dsumt, row, dxt, acc + col, acc + shape.cols + col, n);
        } else {
          gradient(dyt, xt, wt, dsumt, row, dxt, acc + col, n);
        }
      });
    };
    std::vector<T*> sums{static_cast<T*>(out.dweight.mutable_data_ptr())};
    if (has_bias) sums.push_back(static_cast<T*>(out.dbias.mutable_data_ptr()));
    for_each_row_summing_columns(shape, sums, row_gradient);
  });
  return out;
}

}  // namespace parallel_ops::cpu
