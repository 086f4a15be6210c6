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
#include <optional>
#include <type_traits>
#include <vector>

#include "../column_sum.h"
#include "../output.h"
#include "../rows.h"
#include "norm_checks.h"
#include "norm_tile.h"

namespace parallel_ops::cpu {
namespace {

#define DEFINE_TILES(T)                                                                                                \
  PARALLEL_OPS_MULTIVERSION acc_t<T> total(const T* x, int64_t n) { return total_loop(x, n); }                         \
  PARALLEL_OPS_MULTIVERSION acc_t<T> squares(const T* x, acc_t<T> mean, int64_t n) {                                   \
    return squares_loop(x, mean, n);                                                                                   \
  }                                                                                                                    \
  PARALLEL_OPS_MULTIVERSION acc_t<T> dot_g(const T* dy, const acc_t<T>* w, int64_t n) { return dot_g_loop(dy, w, n); } \
  [[maybe_unused]] PARALLEL_OPS_MULTIVERSION void widen(const T* from, acc_t<T> offset, acc_t<T>* to, int64_t n) {     \
    for (int64_t i = 0; i < n; ++i) to[i] = to_acc(from[i]) + offset;                                                  \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_TILES)
#undef DEFINE_TILES

#define DEFINE_STREAM_TILES(T, S)                                                                                      \
  PARALLEL_OPS_MULTIVERSION void add(const T* x, const S* residual, S* sum, int64_t n) {                               \
    add_loop(x, residual, sum, n);                                                                                     \
  }                                                                                                                    \
  PARALLEL_OPS_MULTIVERSION void normalise(const S* x, const acc_t<T>* w, const acc_t<T>* b, const Row<acc_t<T>>& row, \
                                           T* y, int64_t n) {                                                          \
    normalise_loop(x, w, b, row, y, n);                                                                                \
  }                                                                                                                    \
  PARALLEL_OPS_MULTIVERSION acc_t<T> dot_g_xhat(const T* dy, const S* x, const acc_t<T>* w, const Row<acc_t<T>>& row,  \
                                                int64_t n) {                                                           \
    return dot_g_xhat_loop(dy, x, w, row, n);                                                                          \
  }                                                                                                                    \
  PARALLEL_OPS_MULTIVERSION void gradient(const T* dy, const S* x, const acc_t<T>* w, const S* dsum,                   \
                                          const Row<acc_t<T>>& row, S* dx, T* ndx, int64_t n) {                        \
    acc_t<T>* none = nullptr;                                                                                          \
    gradient_loop<0>(dy, x, w, dsum, row, dx, ndx, none, none, n);                                                     \
  }                                                                                                                    \
  PARALLEL_OPS_MULTIVERSION void gradient(const T* dy, const S* x, const acc_t<T>* w, const S* dsum,                   \
                                          const Row<acc_t<T>>& row, S* dx, T* ndx, acc_t<T>* dw, int64_t n) {          \
    acc_t<T>* none = nullptr;                                                                                          \
    gradient_loop<1>(dy, x, w, dsum, row, dx, ndx, dw, none, n);                                                       \
  }                                                                                                                    \
  PARALLEL_OPS_MULTIVERSION void gradient(const T* dy, const S* x, const acc_t<T>* w, const S* dsum,                   \
                                          const Row<acc_t<T>>& row, S* dx, T* ndx, acc_t<T>* dw, acc_t<T>* db,         \
                                          int64_t n) {                                                                 \
    gradient_loop<2>(dy, x, w, dsum, row, dx, ndx, dw, db, n);                                                         \
  }                                                                                                                    \
  PARALLEL_OPS_MULTIVERSION void sums(const T* dy, const S* x, const Row<acc_t<T>>& row, acc_t<T>* dw, int64_t n) {    \
    acc_t<T>* none = nullptr;                                                                                          \
    sums_loop<1>(dy, x, row, dw, none, n);                                                                             \
  }                                                                                                                    \
  PARALLEL_OPS_MULTIVERSION void sums(const T* dy, const S* x, const Row<acc_t<T>>& row, acc_t<T>* dw, acc_t<T>* db,   \
                                      int64_t n) {                                                                     \
    sums_loop<2>(dy, x, row, dw, db, n);                                                                               \
  }
DEFINE_STREAM_TILES(float, float)
DEFINE_STREAM_TILES(double, double)
DEFINE_STREAM_TILES(Half, Half)
DEFINE_STREAM_TILES(BFloat16, BFloat16)
DEFINE_STREAM_TILES(Half, float)
DEFINE_STREAM_TILES(BFloat16, float)
#undef DEFINE_STREAM_TILES

// Calls f(col, n) for the tiles of one row.
template <class F>
void for_each_tile_of_row(int64_t cols, const F& f) {
  for (int64_t col = 0; col < cols; col += kTileCols) f(col, std::min(kTileCols, cols - col));
}

// Calls f with values of the element types of `narrow` (x, y) and of what is normalised, `stream`.
template <class F>
void dispatch_stream(const char* op, ScalarType narrow, ScalarType stream, const F& f) {
  dispatch(op, narrow, [&](auto tag) {
    using T = decltype(tag);
    if (stream == narrow) return f(tag, tag);
    if constexpr (sizeof(T) == 2) {
      if (stream == ScalarType::Float) return f(tag, float{});
    }
    PARALLEL_OPS_CHECK(false, op, ": a residual stream must be of the dtype of x, or float32 for 16-bit x");
  });
}

// The weight in the dtype of the arithmetic, plus `offset`; ones where there is none.
template <class A>
std::vector<A> widened(const char* op, const std::optional<Tensor>& parameter, int64_t cols, A offset) {
  std::vector<A> out(static_cast<size_t>(cols), A(1));
  if (!parameter) return out;
  dispatch(op, parameter->scalar_type(), [&](auto tag) {
    using P = decltype(tag);
    if constexpr (std::is_same_v<acc_t<P>, A>) {
      const Rows<P> rows(op, "weight", *parameter);
      Scratch<P> scratch;
      for_each_tile_of_row(cols, [&](int64_t col, int64_t n) {
        widen(rows.tile(0, col, n, scratch.data), offset, out.data() + col, n);
      });
    }
  });
  return out;
}

}  // namespace

NormOutputs norm_forward(const NormOptions& options, const Tensor& x, const std::optional<Tensor>& weight,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, double eps) {
  check_parameters(options.op, x, weight, bias);
  if (residual) check_shape(options.op, "residual", *residual, x);
  const Shape2d shape = norm_shape(x);
  const auto statistics = [&](int64_t n) { return empty_tensor({n}, statistics_dtype(x)); };
  NormOutputs out{empty_output(x, x.sizes()),
                  residual ? empty_output(*residual, x.sizes()) : empty_tensor({0}, x.scalar_type()),
                  statistics(options.centred ? shape.rows : 0), statistics(shape.rows)};
  const ScalarType stream = residual ? residual->scalar_type() : x.scalar_type();
  dispatch_stream(options.op, x.scalar_type(), stream, [&](auto tag, auto stream_tag) {
    using T = decltype(tag);
    using S = decltype(stream_tag);
    using A = acc_t<T>;
    const Rows<T> xs(options.op, "x", x);
    std::optional<Rows<S>> residuals;
    if (residual) residuals.emplace(options.op, "residual", *residual);
    const auto weights = widened<A>(options.op, weight, shape.cols, options.zero_centered ? A(1) : A(0));
    const Bias<A> biases(options.op, bias);
    T* y = static_cast<T*>(out.y.mutable_data_ptr());
    S* sum = residual ? static_cast<S*>(out.sum.mutable_data_ptr()) : nullptr;
    A* mean = static_cast<A*>(out.mean.mutable_data_ptr());
    A* rstd = static_cast<A*>(out.rstd.mutable_data_ptr());
    const A scale = A(1) / static_cast<A>(shape.cols);

    const auto normalise_row = [&](int64_t r) {
      Scratch<T> sx;
      Scratch<S> sr;
      const auto tile = [&](int64_t col, int64_t n) -> const S* {
        if constexpr (std::is_same_v<S, T>) {
          if (!sum) return xs.tile(r, col, n, sx.data);
        }
        return sum + r * shape.cols + col;
      };
      if (sum) {
        for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) {
          add(xs.tile(r, col, n, sx.data), residuals->tile(r, col, n, sr.data), sum + r * shape.cols + col, n);
        });
      }
      Row<A> row{A(0), A(0), A(0), A(0)};
      if (options.centred) {
        for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) { row.mean += total(tile(col, n), n); });
        mean[r] = row.mean *= scale;
      }
      A variance = 0;
      for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) { variance += squares(tile(col, n), row.mean, n); });
      rstd[r] = row.rstd = A(1) / std::sqrt(variance * scale + static_cast<A>(eps));
      for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) {
        normalise(tile(col, n), weights.data() + col, biases.tile(col), row, y + r * shape.cols + col, n);
      });
    };
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, shape.cols));
    torch::stable::parallel_for(0, shape.rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) normalise_row(r);
    });
  });
  return out;
}

NormGradients norm_backward(const NormOptions& options, const NormNeeds& needs, const Tensor& grad,
                            const std::optional<Tensor>& grad_sum, const Tensor& x, const std::optional<Tensor>& weight,
                            const std::optional<Tensor>& bias, const std::optional<Tensor>& mean, const Tensor& rstd) {
  const Shape2d shape = norm_shape(x);
  check_parameters(options.op, x, weight, bias);
  check_shape(options.op, "grad", grad, x);
  if (grad_sum) check_like(options.op, "grad_sum", *grad_sum, x);
  if (mean) check_statistics(options.op, "mean", *mean, x, shape.rows);
  check_statistics(options.op, "rstd", rstd, x, shape.rows);
  const bool narrow = needs.x && grad.scalar_type() != x.scalar_type();
  const bool sum_weight = weight && needs.parameters, sum_bias = bias && needs.parameters;
  const auto none = [&] { return empty_tensor({0}, x.scalar_type()); };
  const auto sums_like = [&](bool wanted, const std::optional<Tensor>& parameter) {
    return wanted ? empty_tensor({shape.cols}, parameter->scalar_type()) : none();
  };
  NormGradients out{needs.x ? empty_output(x, x.sizes()) : none(), narrow ? empty_output(grad, x.sizes()) : none(),
                    sums_like(sum_weight, weight), sums_like(sum_bias, bias)};
  if (!needs.x && !sum_weight && !sum_bias) return out;
  dispatch_stream(options.op, grad.scalar_type(), x.scalar_type(), [&](auto tag, auto stream_tag) {
    using T = decltype(tag);
    using S = decltype(stream_tag);
    using A = acc_t<T>;
    const Rows<T> dys(options.op, "grad", grad);
    const Rows<S> dsums(options.op, grad_sum ? "grad_sum" : "x", grad_sum ? *grad_sum : x), xs(options.op, "x", x);
    std::vector<A> weights;
    if (needs.x) weights = widened<A>(options.op, weight, shape.cols, options.zero_centered ? A(1) : A(0));
    const A* means = mean ? readable<A>(options.op, "mean", *mean) : nullptr;
    const A* rstds = readable<A>(options.op, "rstd", rstd);
    S* dx = static_cast<S*>(out.dx.mutable_data_ptr());
    T* narrow_dx = narrow ? static_cast<T*>(out.narrow_dx.mutable_data_ptr()) : nullptr;
    const A scale = A(1) / static_cast<A>(shape.cols);

    // The row's own sums go to acc[0..cols) for the weight, if there is one, and to what follows for the bias.
    const auto row_gradient = [&](int64_t r, A* acc) {
      Scratch<T> sdy;
      Scratch<S> sx, sdsum;
      alignas(64) A unread[kTileCols];
      Row<A> row{means ? means[r] : A(0), rstds[r], A(0), A(0)};
      // Without a weight, its sums go where nothing reads them: the loops have one form for a bias, with both.
      const auto weight_sums = [&](int64_t col, int64_t n) {
        if (sum_weight) return acc + col;
        std::fill_n(unread, n, A(0));
        return unread;
      };
      const auto bias_sums = [&](int64_t col) { return acc + (sum_weight ? shape.cols : 0) + col; };
      if (!needs.x) {
        for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) {
          const T* dyt = dys.tile(r, col, n, sdy.data);
          const S* xt = xs.tile(r, col, n, sx.data);
          if (sum_bias) {
            sums(dyt, xt, row, weight_sums(col, n), bias_sums(col), n);
          } else {
            sums(dyt, xt, row, weight_sums(col, n), n);
          }
        });
        return;
      }
      for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) {
        const T* dyt = dys.tile(r, col, n, sdy.data);
        const A* wt = weights.data() + col;
        row.mean_g_xhat += dot_g_xhat(dyt, xs.tile(r, col, n, sx.data), wt, row, n);
        if (options.centred) row.mean_g += dot_g(dyt, wt, n);
      });
      row.mean_g *= scale;
      row.mean_g_xhat *= scale;
      for_each_tile_of_row(shape.cols, [&](int64_t col, int64_t n) {
        const T* dyt = dys.tile(r, col, n, sdy.data);
        const S* xt = xs.tile(r, col, n, sx.data);
        const A* wt = weights.data() + col;
        const S* dsumt = grad_sum ? dsums.tile(r, col, n, sdsum.data) : kZeroTile<S>.data;
        S* dxt = dx + r * shape.cols + col;
        T* ndxt = narrow ? narrow_dx + r * shape.cols + col : nullptr;
        if (sum_bias) {
          gradient(dyt, xt, wt, dsumt, row, dxt, ndxt, weight_sums(col, n), bias_sums(col), n);
        } else if (sum_weight) {
          gradient(dyt, xt, wt, dsumt, row, dxt, ndxt, acc + col, n);
        } else {
          gradient(dyt, xt, wt, dsumt, row, dxt, ndxt, n);
        }
      });
    };
    const ScalarType parameters = weight ? weight->scalar_type() : bias ? bias->scalar_type() : x.scalar_type();
    dispatch(options.op, parameters, [&](auto parameter_tag) {
      using P = decltype(parameter_tag);
      if constexpr (std::is_same_v<acc_t<P>, A>) {
        std::vector<P*> totals;
        if (sum_weight) totals.push_back(static_cast<P*>(out.dweight.mutable_data_ptr()));
        if (sum_bias) totals.push_back(static_cast<P*>(out.dbias.mutable_data_ptr()));
        for_each_row_summing_columns(shape, totals, row_gradient);
      }
    });
  });
  return out;
}

}  // namespace parallel_ops::cpu
