// A call of block attention: its tensors, what each query sees, and how it is cut into tasks that threads share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <torch/csrc/stable/tensor.h>

#include "../../error.h"
#include "../dtype.h"
#include "../rows.h"
#include "attention_rows.h"
#include "product.h"

namespace parallel_ops::cpu {

// Blocks of queries by keys whose scores stay in the second-level cache together with what makes them.
constexpr int64_t kQueryBlock = 64, kKeyBlock = 256;
// The queries of a block in whole tiles.
template <class E>
constexpr int64_t kQueries = kQueryBlock / E::kRows * E::kRows;
// Queries, those of all heads of a key together, that share one packing of the keys; and tasks that are enough for
// the threads of a workstation. Shapes alone decide, so that no bit depends on the number of threads.
constexpr int64_t kTaskRows = 1024, kEnoughTasks = 16;

// A tensor [s, b, h, d] of any strides.
struct Operand {
  Operand(const char* op, const char* name, const Tensor& t)
      : data(const_cast<void*>(readable<void>(op, name, t))),
        dtype(t.scalar_type()),
        s(t.stride(0)),
        b(t.stride(1)),
        h(t.stride(2)),
        d(t.stride(3)) {}
  void* data;
  ScalarType dtype;
  int64_t s, b, h, d;
};

// One value for each batch, head and query, of any strides: plane n of a tensor [planes, b, heads, sq], whose memory
// was checked where the op took it.
template <class A>
struct RowValues {
  RowValues(const Tensor& t, int64_t plane)
      : data(static_cast<A*>(const_cast<void*>(t.const_data_ptr())) + plane * t.stride(0)),
        b(t.stride(1)),
        h(t.stride(2)),
        s(t.stride(3)) {}
  A& operator()(int64_t batch, int64_t head, int64_t query) const { return data[batch * b + head * h + query * s]; }
  A* data;
  int64_t b, h, s;
};

struct BlockCall {
  Operand q, k, v;
  int64_t sq, sk, batch, heads, kv_heads;
  int64_t d, d_v;  // of a row of q and k, and of v and out
  double scale, softcap;
  DropoutRule dropout;
  std::vector<int64_t> first, last;  // keys that each query sees
  int64_t group, chunk, chunks;

  // From both ends in turn, so that neighbours together are the same work however much later queries see.
  int64_t nth_chunk(int64_t n) const { return n % 2 == 0 ? n / 2 : chunks - 1 - n / 2; }

  int64_t first_key(int64_t query) const { return first[static_cast<size_t>(query)]; }
  int64_t last_key(int64_t query) const { return last[static_cast<size_t>(query)]; }

  // From the first key that any of the queries begin .. end - 1 sees to after the last one; both 0 if none sees a key.
  PARALLEL_OPS_INLINE std::pair<int64_t, int64_t> keys_of(int64_t begin, int64_t end) const {
    int64_t from = sk, to = 0;
    for (int64_t query = begin; query < end; ++query) {
      if (first_key(query) >= last_key(query)) continue;
      from = std::min(from, first_key(query));
      to = std::max(to, last_key(query));
    }
    return {std::min(from, to), to};
  }
};

struct ForwardCall : BlockCall {
  Operand out;
  Tensor statistics;
  bool merge;
};

struct BackwardCall : BlockCall {
  Operand grad_out;
  Tensor rows;  // shift, weight and delta
  Operand dq, dk, dv;
  bool accumulate;
  int64_t parts;  // of the chunks of one head of keys, each with sums of its own
  void* sums;     // of all parts of all heads, if there are several
};

void run_forward(const ForwardCall& call);
void run_backward(BackwardCall& call);

inline ScalarType acc_dtype(ScalarType dtype) { return dtype == ScalarType::Double ? dtype : ScalarType::Float; }

template <class T, class A>
PARALLEL_OPS_INLINE void load_elements(const void* data, int64_t offset, int64_t stride, int64_t n, A* __restrict out) {
  const T* from = static_cast<const T*>(data) + offset;
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<A>(to_acc(from[i]));
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<A>(to_acc(from[i * stride]));
  }
}

template <class T, class A>
PARALLEL_OPS_INLINE void store_elements(void* data, int64_t offset, int64_t stride, int64_t n,
                                        const A* __restrict values) {
  T* to = static_cast<T*>(data) + offset;
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) to[i] = from_acc<T>(static_cast<acc_t<T>>(values[i]));
  } else {
    for (int64_t i = 0; i < n; ++i) to[i * stride] = from_acc<T>(static_cast<acc_t<T>>(values[i]));
  }
}

// d elements of a row as the operand of a product, or as what is computed with.
PARALLEL_OPS_INLINE void load_row(const Operand& x, int64_t offset, int64_t d, float* out) {
  if (x.dtype == ScalarType::Float) return load_elements<float>(x.data, offset, x.d, d, out);
  if (x.dtype == ScalarType::Half) return load_elements<Half>(x.data, offset, x.d, d, out);
  load_elements<BFloat16>(x.data, offset, x.d, d, out);
}
PARALLEL_OPS_INLINE void load_row(const Operand& x, int64_t offset, int64_t d, double* out) {
  load_elements<double>(x.data, offset, x.d, d, out);
}
PARALLEL_OPS_INLINE void load_row(const Operand& x, int64_t offset, int64_t d, uint16_t* __restrict out) {
  const uint16_t* from = static_cast<const uint16_t*>(x.data) + offset;
  for (int64_t i = 0; i < d; ++i) out[i] = from[i * x.d];
}
PARALLEL_OPS_INLINE void store_row(const Operand& x, int64_t offset, int64_t d, const float* values) {
  if (x.dtype == ScalarType::Float) return store_elements<float>(x.data, offset, x.d, d, values);
  if (x.dtype == ScalarType::Half) return store_elements<Half>(x.data, offset, x.d, d, values);
  store_elements<BFloat16>(x.data, offset, x.d, d, values);
}
PARALLEL_OPS_INLINE void store_row(const Operand& x, int64_t offset, int64_t d, const double* values) {
  store_elements<double>(x.data, offset, x.d, d, values);
}

// Rows s .. s + n - 1 of one head, in rows of `width` elements, zero past d and past the n-th up to `rows`.
template <class Elem>
PARALLEL_OPS_INLINE void load_rows(const Operand& x, int64_t batch, int64_t head, int64_t s, int64_t n, int64_t rows,
                                   int64_t d, int64_t width, Elem* out) {
  for (int64_t i = 0; i < n; ++i, out += width) {
    load_row(x, (s + i) * x.s + batch * x.b + head * x.h, d, out);
    std::fill(out + d, out + width, Elem(0));
  }
  std::fill_n(out, (rows - n) * width, Elem(0));
}

// Which tiles of kCols keys each strip of kRows queries computes of a block. The strips of a tile need not be adjacent:
// one whose queries see no key may lie between two that see the tile.
template <class E>
struct Strips {
  static constexpr int64_t kMost = kQueries<E> / E::kRows;
  int64_t count, tiles, rows, query, key, keys;
  int64_t begin[kMost], end[kMost];  // tiles of a strip
  bool any = false;

  // Queries query .. query + rows - 1 and keys key .. key + keys - 1.
  PARALLEL_OPS_INLINE Strips(const BlockCall& call, int64_t query, int64_t rows, int64_t key, int64_t keys)
      : count(ceil_div(rows, E::kRows)),
        tiles(ceil_div(keys, E::kCols)),
        rows(rows),
        query(query),
        key(key),
        keys(keys) {
    for (int64_t r = 0; r < count; ++r) {
      const auto [from, to] = call.keys_of(query + r * E::kRows, query + std::min(rows, (r + 1) * E::kRows));
      const int64_t first = std::clamp<int64_t>(from - key, 0, keys), last = std::clamp<int64_t>(to - key, 0, keys);
      begin[r] = first < last ? first / E::kCols : 0;
      end[r] = first < last ? ceil_div(last, E::kCols) : 0;
      any = any || first < last;
    }
  }

  PARALLEL_OPS_INLINE bool computes(int64_t strip, int64_t tile) const {
    return begin[strip] <= tile && tile < end[strip];
  }

  // The keys that row i of the block sees, among those that its strip computes.
  PARALLEL_OPS_INLINE KeyRange range(const BlockCall& call, int64_t i) const {
    const int64_t r = i / E::kRows, from = begin[r] * E::kCols, to = end[r] * E::kCols;
    if (i >= rows) return {from, to, to, to};
    const int64_t first = std::clamp(call.first_key(query + i) - key, from, to);
    return {from, to, first, std::clamp(std::min(call.last_key(query + i) - key, keys), first, to)};
  }
};

}  // namespace parallel_ops::cpu
