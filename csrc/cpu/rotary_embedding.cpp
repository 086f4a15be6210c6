// rotary_embedding on the CPU: each pair (a, b) of a head's first dimensions becomes (a cos - b sin, b cos + a sin);
// the backward is the same with sin negated.
#include <algorithm>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "output.h"
#include "rows.h"

namespace parallel_ops::cpu {
namespace {

// All heads of one token, which share its angles. Pairs are (i, half + i), or (2 i, 2 i + 1) where interleaved; the
// dimensions from 2 half on pass through.
struct Heads {
  int64_t count;
  int64_t stride;  // between heads of x; those of y are adjacent
  int64_t dims;
  int64_t half;
};

template <bool kInterleaved, class T>
PARALLEL_OPS_INLINE void rotate_loop(const T* __restrict x, const acc_t<T>* __restrict cos,
                                     const acc_t<T>* __restrict sin, T* __restrict y, Heads heads) {
  using A = acc_t<T>;
  for (int64_t h = 0; h < heads.count; ++h, x += heads.stride, y += heads.dims) {
    for (int64_t i = 0; i < heads.half; ++i) {
      const int64_t first = kInterleaved ? 2 * i : i;
      const int64_t second = kInterleaved ? 2 * i + 1 : heads.half + i;
      const A a = to_acc(x[first]), b = to_acc(x[second]);
      y[first] = from_acc<T>(a * cos[i] - b * sin[i]);
      y[second] = from_acc<T>(b * cos[i] + a * sin[i]);
    }
    for (int64_t i = 2 * heads.half; i < heads.dims; ++i) y[i] = x[i];
  }
}

#define DEFINE_ROTATE(T)                                                                                        \
  PARALLEL_OPS_MULTIVERSION void rotate_halves(const T* x, const acc_t<T>* cos, const acc_t<T>* sin, T* y,      \
                                               const Heads& heads) {                                            \
    rotate_loop<false>(x, cos, sin, y, heads);                                                                  \
  }                                                                                                             \
  PARALLEL_OPS_MULTIVERSION void rotate_interleaved(const T* x, const acc_t<T>* cos, const acc_t<T>* sin, T* y, \
                                                    const Heads& heads) {                                       \
    rotate_loop<true>(x, cos, sin, y, heads);                                                                   \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_ROTATE)
#undef DEFINE_ROTATE

void check_angles(const char* op, const Tensor& x, const Tensor& cos, const Tensor& sin) {
  STD_TORCH_CHECK(x.dim() == 3 || x.dim() == 4, op, ": x must be [s, b, h, d] or [t, h, d]");
  STD_TORCH_CHECK(cos.is_cpu() && sin.is_cpu() && cos.scalar_type() == sin.scalar_type(), op,
                  ": cos and sin must be on the same device as x and of one dtype");
  STD_TORCH_CHECK(cos.dim() == 2 && sin.dim() == 2 && cos.size(0) == sin.size(0) && cos.size(1) == sin.size(1), op,
                  ": cos and sin must be [positions, rotated dimensions / 2]");
  STD_TORCH_CHECK(2 * cos.size(1) <= last_dim(x), op, ": cos must have at most half as many columns as x has");
}

// The angles' row for each token, and that it exists: [s b], from positions [s], [s, b] or [t], or counted.
std::vector<int64_t> angle_rows(const char* op, const Tensor& x, const Tensor& cos,
                                const std::optional<Tensor>& positions) {
  const int64_t s = x.size(0), b = x.dim() == 4 ? x.size(1) : 1;
  std::vector<int64_t> rows(static_cast<size_t>(s * b));
  if (!positions) {
    STD_TORCH_CHECK(s <= cos.size(0), op, ": cos has fewer rows than x has positions");
    for (int64_t i = 0; i < s * b; ++i) rows[i] = i / b;
    return rows;
  }
  STD_TORCH_CHECK(positions->is_cpu() && positions->scalar_type() == ScalarType::Long, op,
                  ": positions must be int64 and on the same device as x");
  const bool per_batch = positions->dim() == 2;
  STD_TORCH_CHECK(
      (positions->dim() == 1 || (per_batch && x.dim() == 4 && positions->size(1) == b)) && positions->size(0) == s, op,
      ": positions must be [s], [s, b] or [t]");
  const auto* p = static_cast<const int64_t*>(positions->const_data_ptr());
  const int64_t stride_s = positions->stride(0), stride_b = per_batch ? positions->stride(1) : 0;
  for (int64_t i = 0; i < s * b; ++i) {
    rows[i] = p[(i / b) * stride_s + (i % b) * stride_b];
    STD_TORCH_CHECK(rows[i] >= 0 && rows[i] < cos.size(0), op, ": positions holds ", rows[i], ", but cos has ",
                    cos.size(0), " rows");
  }
  return rows;
}

Tensor rotate(const char* op, const Tensor& x, const Tensor& cos, const Tensor& sin,
              const std::optional<Tensor>& positions, bool interleaved, bool inverse) {
  check_angles(op, x, cos, sin);
  const std::vector<int64_t> angles = angle_rows(op, x, cos, positions);
  const int64_t b = x.dim() == 4 ? x.size(1) : 1, h = x.size(x.dim() - 2), d = last_dim(x), half = cos.size(1);
  Tensor y = empty_output(x, x.sizes());
  if (y.numel() == 0) return y;
  dispatch(op, x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const T* in = static_cast<const T*>(x.const_data_ptr());
    T* out = static_cast<T*>(y.mutable_data_ptr());
    const int64_t stride_s = x.stride(0), stride_b = x.dim() == 4 ? x.stride(1) : 0;
    const int64_t stride_h = x.stride(x.dim() - 2), stride_d = x.stride(x.dim() - 1);
    dispatch(op, cos.scalar_type(), [&](auto angle_tag) {
      using C = decltype(angle_tag);
      const Rows<C> coss(cos), sins(sin);
      const int64_t grain = std::max<int64_t>(1, kGrain / (h * d));
      torch::stable::parallel_for(0, static_cast<int64_t>(angles.size()), grain, [&](int64_t begin, int64_t end) {
        std::vector<A> c(static_cast<size_t>(half)), s(static_cast<size_t>(half));
        std::vector<C> scratch(static_cast<size_t>(half));
        std::vector<T> gathered(static_cast<size_t>(stride_d == 1 ? 0 : h * d));
        for (int64_t token = begin; token < end; ++token) {
          const C* row = coss.tile(angles[token], 0, half, scratch.data());
          for (int64_t i = 0; i < half; ++i) c[i] = static_cast<A>(to_acc(row[i]));
          row = sins.tile(angles[token], 0, half, scratch.data());
          for (int64_t i = 0; i < half; ++i) s[i] = static_cast<A>(inverse ? -to_acc(row[i]) : to_acc(row[i]));
          const T* heads = in + (token / b) * stride_s + (token % b) * stride_b;
          Heads shape{h, stride_h, d, half};
          if (stride_d != 1) {
            for (int64_t i = 0; i < h * d; ++i) gathered[i] = heads[(i / d) * stride_h + (i % d) * stride_d];
            heads = gathered.data();
            shape.stride = d;
          }
          T* to = out + token * h * d;
          interleaved ? rotate_interleaved(heads, c.data(), s.data(), to, shape)
                      : rotate_halves(heads, c.data(), s.data(), to, shape);
        }
      });
    });
  });
  return y;
}

Tensor forward(const Tensor& x, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& positions,
               bool interleaved) {
  return rotate("rotary_embedding", x, cos, sin, positions, interleaved, false);
}

Tensor backward(const Tensor& grad, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& positions,
                bool interleaved) {
  return rotate("rotary_embedding_backward", grad, cos, sin, positions, interleaved, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("rotary_embedding", TORCH_BOX(&forward));
  m.impl("rotary_embedding_backward", TORCH_BOX(&backward));
}

}  // namespace parallel_ops::cpu
