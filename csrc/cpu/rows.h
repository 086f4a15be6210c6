// A tensor of any strides seen as rows of its last dimension, and the tiles that threads work on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "dtype.h"
#include "memory.h"

namespace parallel_ops::cpu {

// Columns per tile: a tile's inputs and outputs (fp64: 8 KiB each) stay in the first-level cache.
constexpr int64_t kTileCols = 1024;
// Elements under which a second thread costs more than it brings (torch's own grain size).
constexpr int64_t kGrain = 32768;

// Reading side. tile() gives n elements of a row as contiguous memory: the tensor's own where the last
// dimension has stride 1, else gathered into the caller's scratch. So transposed, sliced and expanded
// (stride 0) tensors are read as they are, and no whole-tensor copy is ever made.
template <class T>
class Rows {
 public:
  Rows(const char* op, const char* name, const Tensor& t)
      : Rows(op, name, t, t.sizes().begin(), t.dim(), t.strides().begin()) {}

  // `strides` may differ from the tensor's own: zeros broadcast it to `sizes`.
  Rows(const char* op, const char* name, const Tensor& t, const int64_t* sizes, int64_t dim, const int64_t* strides)
      : base_(readable<T>(op, name, t)) {
    // The stride of a dimension of size 1 says nothing, and callers read contiguous tensors as one row.
    inner_stride_ = dim > 0 && sizes[dim - 1] != 1 ? strides[dim - 1] : 1;
    for (int64_t d = 0; d + 1 < dim; ++d) {
      if (sizes[d] == 1) continue;
      if (!dims_.empty() && dims_.back().second == strides[d] * sizes[d]) {
        dims_.back() = {dims_.back().first * sizes[d], strides[d]};
      } else {
        dims_.emplace_back(sizes[d], strides[d]);
      }
    }
  }

  const T* row(int64_t r) const {
    if (dims_.size() == 1) return base_ + r * dims_[0].second;
    int64_t offset = 0;
    for (size_t d = dims_.size(); d-- > 0;) {
      offset += (r % dims_[d].first) * dims_[d].second;
      r /= dims_[d].first;
    }
    return base_ + offset;
  }

  const T* tile(int64_t r, int64_t col, int64_t n, T* scratch) const {
    const T* p = row(r) + col * inner_stride_;
    if (inner_stride_ == 1) return p;
    for (int64_t i = 0; i < n; ++i) scratch[i] = p[i * inner_stride_];
    return scratch;
  }

 private:
  const T* base_;
  int64_t inner_stride_;
  std::vector<std::pair<int64_t, int64_t>> dims_;  // (size, stride) of the leading dimensions, merged
};

template <class T>
struct Scratch {
  alignas(64) T data[kTileCols];
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t last_dim(const Tensor& t) { return t.dim() == 0 ? 1 : t.size(t.dim() - 1); }

struct Shape2d {
  int64_t rows;
  int64_t cols;
};

inline Shape2d rows_and_cols(const Tensor& t) {
  const int64_t cols = last_dim(t);
  return {cols == 0 ? 0 : t.numel() / cols, cols};
}

// The elements of a tensor of any floating-point dtype, in order and as A: what every row shares, such as a bias. Those
// of a contiguous tensor of A are read where they are.
template <class A>
class Values {
 public:
  Values(const char* op, const char* name, const Tensor& t) {
    if (t.scalar_type() == (sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float) && t.is_contiguous()) {
      data_ = readable<A>(op, name, t);
      return;
    }
    copy_.resize(static_cast<size_t>(t.numel()));
    dispatch(op, t.scalar_type(), [&](auto tag) {
      using T = decltype(tag);
      const Rows<T> rows(op, name, t);
      const int64_t cols = last_dim(t);
      T element;
      for (int64_t i = 0; i < t.numel(); ++i) {
        copy_[static_cast<size_t>(i)] = static_cast<A>(to_acc(*rows.tile(i / cols, i % cols, 1, &element)));
      }
    });
    data_ = copy_.data();
  }
  const A* data() const { return data_; }
  A operator[](int64_t i) const { return data_[i]; }

 private:
  const A* data_ = nullptr;
  std::vector<A> copy_;
};

// Writes values to a contiguous tensor of any floating-point dtype, rounded to it.
template <class A>
void store_values(const A* values, Tensor& out) {
  dispatch("values", out.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    T* to = static_cast<T*>(out.mutable_data_ptr());
    for (int64_t i = 0; i < out.numel(); ++i) to[i] = from_acc<T>(static_cast<acc_t<T>>(values[i]));
  });
}

// A bias [H], added to every row. Without one, tiles are zeros: one loop serves both cases.
template <class T>
inline const Scratch<T> kZeroTile{};

// The tiles in the arithmetic type, from a bias of any dtype.
template <class A>
class Bias {
 public:
  Bias(const char* op, const std::optional<Tensor>& bias) {
    if (bias) values_.emplace(op, "bias", *bias);
  }
  const A* tile(int64_t col) const { return values_ ? values_->data() + col : kZeroTile<A>.data; }

 private:
  std::optional<Values<A>> values_;
};

// Calls f(row, col, n) for every tile of a rows x cols array, in parallel. Tiles are independent, so the
// result does not depend on how many threads share them.
template <class F>
void for_each_tile(Shape2d shape, const F& f) {
  if (shape.rows == 0 || shape.cols == 0) return;
  const int64_t per_row = ceil_div(shape.cols, kTileCols);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::min(shape.cols, kTileCols));
  torch::stable::parallel_for(0, shape.rows * per_row, grain, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t col = (tile % per_row) * kTileCols;
      f(tile / per_row, col, std::min(kTileCols, shape.cols - col));
    }
  });
}

}  // namespace parallel_ops::cpu
