// sum_partials on the CPU: y = partials[0] + partials[1] + ... + bias + residual, in this order in fp32 (fp64 for
// fp64), rounded once.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "output.h"
#include "rows.h"

namespace parallel_ops::cpu {
namespace {

// kCount partials at once, so that the processor reads ahead in all of them; the sum so far stays in the first-level
// cache.
template <int kCount, class T>
PARALLEL_OPS_INLINE void add_loop(const T* const* parts, acc_t<T>* __restrict sum, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    acc_t<T> s = sum[i];
#pragma GCC unroll 8
    for (int p = 0; p < kCount; ++p) s += to_acc(parts[p][i]);
    sum[i] = s;
  }
}

template <class T>
PARALLEL_OPS_INLINE void round_loop(const acc_t<T>* __restrict sum, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = from_acc<T>(sum[i]);
}

#define DEFINE_TILES(T)                                                                                         \
  PARALLEL_OPS_MULTIVERSION void add_8(const T* const* p, acc_t<T>* sum, int64_t n) { add_loop<8>(p, sum, n); } \
  PARALLEL_OPS_MULTIVERSION void add_4(const T* const* p, acc_t<T>* sum, int64_t n) { add_loop<4>(p, sum, n); } \
  PARALLEL_OPS_MULTIVERSION void add_2(const T* const* p, acc_t<T>* sum, int64_t n) { add_loop<2>(p, sum, n); } \
  PARALLEL_OPS_MULTIVERSION void add_1(const T* const* p, acc_t<T>* sum, int64_t n) { add_loop<1>(p, sum, n); } \
  PARALLEL_OPS_MULTIVERSION void round_tile(const acc_t<T>* sum, T* y, int64_t n) { round_loop(sum, y, n); }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_TILES)
#undef DEFINE_TILES

Tensor sum_partials(const Tensor& partials, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual) {
  constexpr const char* kOp = "sum_partials";
  PARALLEL_OPS_CHECK(partials.is_cpu() && partials.dim() > 0 && partials.size(0) > 0, kOp,
                     ": partials must have at least one partial in their first dimension");
  const std::vector<int64_t> sizes(partials.sizes().begin() + 1, partials.sizes().end());
  Tensor y = empty_output(partials.scalar_type(), torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
  if (residual) check_like(kOp, "residual", *residual, y);
  check_bias(kOp, y, bias);
  const bool whole = !bias && partials.is_contiguous() && (!residual || residual->is_contiguous());
  const bool flat = whole || y.dim() == 0;
  const Shape2d shape = flat ? Shape2d{1, y.numel()} : rows_and_cols(y);
  const int64_t count = partials.size(0);
  dispatch(kOp, partials.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const int64_t flat_sizes[] = {count, shape.cols}, flat_strides[] = {partials.stride(0), 1};
    const Rows<T> parts =
        flat ? Rows<T>(kOp, "partials", partials, flat_sizes, 2, flat_strides) : Rows<T>(kOp, "partials", partials);
    std::optional<Rows<T>> added;
    if (residual) added.emplace(kOp, "residual", *residual);
    const Bias<A> biases(kOp, bias);
    T* out = static_cast<T*>(y.mutable_data_ptr());
    for_each_tile(shape, [&](int64_t row, int64_t col, int64_t n) {
      Scratch<T> scratch[8];
      Scratch<A> sum;
      const T* tiles[8];
      std::fill_n(sum.data, n, A(-0.0));  // the number to which any, -0.0 too, is added without a change
      for (int64_t first = 0, many; first < count; first += many) {
        many = count - first >= 8 ? 8 : count - first >= 4 ? 4 : count - first >= 2 ? 2 : 1;
        for (int64_t p = 0; p < many; ++p) {
          tiles[p] = parts.tile((first + p) * shape.rows + row, col, n, scratch[p].data);
        }
        many == 8   ? add_8(tiles, sum.data, n)
        : many == 4 ? add_4(tiles, sum.data, n)
        : many == 2 ? add_2(tiles, sum.data, n)
                    : add_1(tiles, sum.data, n);
      }
      if (bias) {
        const A* b = biases.tile(col);
        for (int64_t i = 0; i < n; ++i) sum.data[i] += b[i];
      }
      if (added) {
        tiles[0] = added->tile(row, col, n, scratch[0].data);
        add_1(tiles, sum.data, n);
      }
      round_tile(sum.data, out + row * shape.cols + col, n);
    });
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) { m.impl("sum_partials", TORCH_BOX(&sum_partials)); }

}  // namespace parallel_ops::cpu
