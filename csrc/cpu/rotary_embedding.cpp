// rotary_embedding on the CPU: each pair (a, b) of a head's first dimensions becomes (a cos - b sin, b cos + a sin);
// the backward is the same with sin negated. One or two tensors (q and k) that share their tokens' angles, each into a
// new tensor or over itself.
#include <algorithm>
#include <optional>
#include <tuple>
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
  int64_t stride;      // between heads of x
  int64_t out_stride;  // and of y
  int64_t dims;
  int64_t half;
};

template <bool kInterleaved, class T>
PARALLEL_OPS_INLINE void rotate_loop(const T* __restrict x, const acc_t<T>* __restrict cos,
                                     const acc_t<T>* __restrict sin, T* __restrict y, Heads heads) {
  using A = acc_t<T>;
  for (int64_t h = 0; h < heads.count; ++h, x += heads.stride, y += heads.out_stride) {
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

// The sizes and strides of a tensor as [s, b, h, d]; packed [t, h, d] has a batch of one.
struct Tokens {
  explicit Tokens(const Tensor& t)
      : s(t.size(0)),
        b(t.dim() == 4 ? t.size(1) : 1),
        h(t.size(t.dim() - 2)),
        d(last_dim(t)),
        stride_s(t.stride(0)),
        stride_b(t.dim() == 4 ? t.stride(1) : 0),
        stride_h(t.stride(t.dim() - 2)),
        stride_d(t.stride(t.dim() - 1)) {}
  int64_t offset(int64_t token) const { return (token / b) * stride_s + (token % b) * stride_b; }
  int64_t s, b, h, d, stride_s, stride_b, stride_h, stride_d;
};

// What turns the tokens: angles [positions, R / 2] or one a token, and where each token is.
struct Angles {
  const Tensor& cos;
  const Tensor& sin;
  const std::optional<Tensor>& positions;
  const std::optional<Tensor>& cu_seqlens;
  bool interleaved;
};

void check_tensors(const char* op, const Tensor& q, const std::optional<Tensor>& k, const Angles& a) {
  PARALLEL_OPS_CHECK(q.is_cpu() && (q.dim() == 3 || q.dim() == 4), op, ": x must be [s, b, h, d] or [t, h, d]");
  const Tokens x(q);
  if (k) {
    PARALLEL_OPS_CHECK(k->is_cpu() && k->dim() == q.dim() && k->scalar_type() == q.scalar_type(), op,
                       ": k must be on the same device, and of the same dtype and dimensions as q");
    const Tokens other(*k);
    PARALLEL_OPS_CHECK(other.s == x.s && other.b == x.b && other.d == x.d, op,
                       ": k must have the tokens and width of q");
  }
  PARALLEL_OPS_CHECK(a.cos.is_cpu() && a.sin.is_cpu() && a.cos.scalar_type() == a.sin.scalar_type(), op,
                     ": cos and sin must be on the same device as x and of one dtype");
  PARALLEL_OPS_CHECK(a.cos.dim() == a.sin.dim() && (a.cos.dim() == 2 || (a.cos.dim() == 3 && q.dim() == 4)) &&
                         std::equal(a.cos.sizes().begin(), a.cos.sizes().end(), a.sin.sizes().begin()),
                     op, ": cos and sin must be [positions, rotated dimensions / 2], or have one row for each token");
  PARALLEL_OPS_CHECK(2 * last_dim(a.cos) <= x.d, op, ": cos must have at most half as many columns as x has");
  PARALLEL_OPS_CHECK(a.cos.dim() == 2 || (a.cos.size(0) == x.s && a.cos.size(1) == x.b && !a.positions), op,
                     ": cos with one row for each token must be [s, b, R / 2], and takes no positions");
}

// The row of the angles for each token, and that it exists.
std::vector<int64_t> angle_rows(const char* op, const Tokens& x, const Angles& a) {
  std::vector<int64_t> rows(static_cast<size_t>(x.s * x.b));
  if (a.positions) {
    const Tensor& positions = *a.positions;
    PARALLEL_OPS_CHECK(positions.is_cpu() && positions.scalar_type() == ScalarType::Long, op,
                       ": positions must be int64 and on the same device as x");
    const bool per_batch = positions.dim() == 2;
    PARALLEL_OPS_CHECK((positions.dim() == 1 || (per_batch && positions.size(1) == x.b)) && positions.size(0) == x.s,
                       op, ": positions must be [s], [s, b] or [t]");
    const auto* p = readable<int64_t>(op, "positions", positions);
    const int64_t stride_s = positions.stride(0), stride_b = per_batch ? positions.stride(1) : 0;
    for (int64_t i = 0; i < x.s * x.b; ++i) rows[i] = p[(i / x.b) * stride_s + (i % x.b) * stride_b];
  } else if (a.cu_seqlens) {
    const Tensor& starts = *a.cu_seqlens;
    PARALLEL_OPS_CHECK(starts.is_cpu() && starts.dim() == 1 && starts.is_contiguous() && starts.size(0) > 1 &&
                           x.b == 1 &&
                           (starts.scalar_type() == ScalarType::Int || starts.scalar_type() == ScalarType::Long),
                       op, ": cu_seqlens must be contiguous int32 or int64 of one dimension, and x packed");
    const bool wide = starts.scalar_type() == ScalarType::Long;
    const void* p = readable<void>(op, "cu_seqlens", starts);
    const auto at = [&](int64_t i) {
      return wide ? static_cast<const int64_t*>(p)[i] : static_cast<const int32_t*>(p)[i];
    };
    PARALLEL_OPS_CHECK(at(0) == 0 && at(starts.size(0) - 1) == x.s, op, ": cu_seqlens must run from 0 to ", x.s);
    for (int64_t i = 0, sequence = 0; i < x.s; ++i) {
      while (sequence + 1 < starts.size(0) && at(sequence + 1) <= i) ++sequence;
      rows[i] = i - at(sequence);
    }
  } else {
    for (int64_t i = 0; i < x.s * x.b; ++i) rows[i] = i / x.b;
  }
  const char* from = a.positions ? "positions" : a.cu_seqlens ? "cu_seqlens" : "x";
  for (const int64_t row : rows) {
    PARALLEL_OPS_CHECK(row >= 0 && row < a.cos.size(0), op, ": ", from, " holds ", row, ", but cos has ", a.cos.size(0),
                       " rows");
  }
  return rows;
}

// Rotates the heads of one token; x and y may be one tensor. `space` has room for two tokens.
template <class T>
void rotate_token(const T* in, const Tokens& x, T* out, const Tokens& y, int64_t token, const acc_t<T>* cos,
                  const acc_t<T>* sin, int64_t half, bool interleaved, T* space) {
  const T* heads = in + x.offset(token);
  T* to = out + y.offset(token);
  const int64_t elements = x.h * x.d;
  Heads shape{x.h, x.stride_h, y.stride_h, x.d, half};
  if (x.stride_d != 1 || in == out) {
    for (int64_t i = 0; i < elements; ++i) space[i] = heads[(i / x.d) * x.stride_h + (i % x.d) * x.stride_d];
    heads = space;
    shape.stride = x.d;
  }
  T* rotated = to;
  if (y.stride_d != 1) {
    rotated = space + elements;
    shape.out_stride = x.d;
  }
  interleaved ? rotate_interleaved(heads, cos, sin, rotated, shape) : rotate_halves(heads, cos, sin, rotated, shape);
  if (y.stride_d != 1) {
    for (int64_t i = 0; i < elements; ++i) to[(i / x.d) * y.stride_h + (i % x.d) * y.stride_d] = rotated[i];
  }
}

void rotate(const char* op, const Tensor& q, Tensor& to_q, const std::optional<Tensor>& k, Tensor* to_k,
            const Angles& a, bool inverse) {
  const Tokens xq(q), yq(to_q), xk(k ? *k : q), yk(k ? *to_k : to_q);
  const std::vector<int64_t> rows = angle_rows(op, xq, a);
  const int64_t half = last_dim(a.cos), widest = std::max(xq.h, xk.h) * xq.d;
  if (q.numel() == 0 && (!k || k->numel() == 0)) return;
  dispatch(op, q.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const T* in_q = readable<T>(op, inverse ? "grad_q" : "q", q);
    T* out_q = static_cast<T*>(to_q.mutable_data_ptr());
    const T* in_k = k ? readable<T>(op, inverse ? "grad_k" : "k", *k) : nullptr;
    T* out_k = k ? static_cast<T*>(to_k->mutable_data_ptr()) : nullptr;
    dispatch(op, a.cos.scalar_type(), [&](auto angle_tag) {
      using C = decltype(angle_tag);
      const bool per_token = a.cos.dim() == 3;
      const Rows<C> cos_rows(op, "cos", a.cos), sin_rows(op, "sin", a.sin);
      const auto angle_row = [&](int64_t token) { return per_token ? token : rows[static_cast<size_t>(token)]; };
      // Whole heads are read and written where they are, unless columns lie apart or an input is the output.
      const bool direct = in_q != out_q && (!k || in_k != out_k) && xq.stride_d == 1 && yq.stride_d == 1 &&
                          xk.stride_d == 1 && yk.stride_d == 1;
      const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, widest));
      torch::stable::parallel_for(0, static_cast<int64_t>(rows.size()), grain, [&](int64_t begin, int64_t end) {
        std::vector<A> c(static_cast<size_t>(half)), s(static_cast<size_t>(half));
        std::vector<C> scratch(static_cast<size_t>(half));
        std::vector<T> space(static_cast<size_t>(direct ? 0 : 2 * widest));
        int64_t at = -1;
        for (int64_t token = begin; token < end; ++token) {
          if (angle_row(token) != at) {  // the tokens of a batch follow each other, and mostly share their angles
            at = angle_row(token);
            const C* row = cos_rows.tile(at, 0, half, scratch.data());
            for (int64_t i = 0; i < half; ++i) c[i] = static_cast<A>(to_acc(row[i]));
            row = sin_rows.tile(at, 0, half, scratch.data());
            for (int64_t i = 0; i < half; ++i) s[i] = static_cast<A>(inverse ? -to_acc(row[i]) : to_acc(row[i]));
          }
          rotate_token(in_q, xq, out_q, yq, token, c.data(), s.data(), half, a.interleaved, space.data());
          if (k) rotate_token(in_k, xk, out_k, yk, token, c.data(), s.data(), half, a.interleaved, space.data());
        }
      });
    });
  });
}

// A tensor with the shape of x, contiguous as [s, b, h, d], or as [b, h, s, d] where heads come first.
Tensor output_like(const Tensor& x, bool heads_first) {
  if (!heads_first) return empty_output(x, x.sizes());
  const Tensor y = empty_output(x, {x.size(1), x.size(2), x.size(0), x.size(3)});
  return torch::stable::transpose(torch::stable::transpose(y, 0, 2), 1, 2);
}

std::tuple<Tensor, Tensor> rotated(const char* op, const Tensor& q, const std::optional<Tensor>& k, const Angles& a,
                                   bool heads_first, bool inverse) {
  check_tensors(op, q, k, a);
  PARALLEL_OPS_CHECK(!heads_first || q.dim() == 4, op, ": heads come first in [b, h, s, d] alone");
  Tensor to_q = output_like(q, heads_first);
  Tensor to_k = k ? output_like(*k, heads_first) : empty_tensor({0}, q.scalar_type());
  rotate(op, q, to_q, k, &to_k, a, inverse);
  return {to_q, to_k};
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const std::optional<Tensor>& k, const Tensor& cos,
                                   const Tensor& sin, const std::optional<Tensor>& positions,
                                   const std::optional<Tensor>& cu_seqlens, bool interleaved, bool heads_first) {
  return rotated("rotary_embedding", q, k, {cos, sin, positions, cu_seqlens, interleaved}, heads_first, false);
}

std::tuple<Tensor, Tensor> backward(const Tensor& grad_q, const std::optional<Tensor>& grad_k, const Tensor& cos,
                                    const Tensor& sin, const std::optional<Tensor>& positions,
                                    const std::optional<Tensor>& cu_seqlens, bool interleaved, bool heads_first) {
  return rotated("rotary_embedding_backward", grad_q, grad_k, {cos, sin, positions, cu_seqlens, interleaved},
                 heads_first, true);
}

void inplace(const Tensor& q, const std::optional<Tensor>& k, const Tensor& cos, const Tensor& sin,
             const std::optional<Tensor>& positions, const std::optional<Tensor>& cu_seqlens, bool interleaved) {
  const char* op = "rotary_embedding_";
  const Angles angles{cos, sin, positions, cu_seqlens, interleaved};
  check_tensors(op, q, k, angles);
  Tensor to_q = q;
  std::optional<Tensor> to_k = k;
  rotate(op, q, to_q, k, k ? &*to_k : nullptr, angles, false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("rotary_embedding", TORCH_BOX(&forward));
  m.impl("rotary_embedding_backward", TORCH_BOX(&backward));
  m.impl("rotary_embedding_", TORCH_BOX(&inplace));
}

}  // namespace parallel_ops::cpu
