// Column sums (the gradient of a bias) taken while an elementwise backward walks over its tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "rows.h"

namespace parallel_ops::cpu {

// Rows are summed 16 at a time, those sums within a chunk, and the chunks 8 at a time. The grouping is set
// by the shape alone, so the bits do not depend on the thread count; three levels keep the rounding error
// at that of PyTorch's cascade summation.
constexpr int64_t kSumGroup = 16;
constexpr int64_t kSumChunks = 64;

struct RowChunks {
  int64_t count;
  int64_t rows;
};

inline RowChunks row_chunks(int64_t rows) {
  const int64_t count = std::max<int64_t>(1, std::min(kSumChunks, ceil_div(rows, kSumGroup)));
  return {count, ceil_div(ceil_div(rows, count), kSumGroup) * kSumGroup};
}

// out[0..cols) = the sum of `chunks` rows of `partial`, which lie `stride` apart.
template <class T>
void add_chunks(const acc_t<T>* partial, int64_t chunks, int64_t stride, int64_t cols, T* out) {
  using A = acc_t<T>;
  constexpr int64_t kChunkGroup = 8;
  for_each_tile({1, cols}, [&](int64_t, int64_t col, int64_t n) {
    alignas(64) A total[kTileCols], group[kTileCols];
    std::fill_n(total, n, A(0));
    for (int64_t first = 0; first < chunks; first += kChunkGroup) {
      std::fill_n(group, n, A(0));
      for (int64_t chunk = first; chunk < std::min(chunks, first + kChunkGroup); ++chunk) {
        const A* sum = partial + chunk * stride + col;
        for (int64_t i = 0; i < n; ++i) group[i] += sum[i];
      }
      for (int64_t i = 0; i < n; ++i) total[i] += group[i];
    }
    for (int64_t i = 0; i < n; ++i) out[col + i] = from_acc<T>(total[i]);
  });
}

// Calls f(row, col, n, acc) for every tile of a rows x cols array, in parallel; f adds the n values to
// be summed to acc[0..n). The sums over all rows go to out, of cols elements. An op whose tile gives several column
// blocks (gate and up of SwiGLU) takes kBlocks: block b is added to acc[b * kTileCols ..) and its sums go
// to out[b * cols ..).
template <class T, int kBlocks = 1, class F>
void for_each_tile_summing_columns(Shape2d shape, Tensor& out, const F& f) {
  using A = acc_t<T>;
  if (shape.cols == 0) return;
  const int64_t sums = kBlocks * shape.cols;
  const RowChunks chunks = row_chunks(shape.rows);
  const int64_t per_row = ceil_div(shape.cols, kTileCols);
  std::vector<A> partial(static_cast<size_t>(chunks.count * sums));

  const int64_t task_elements = std::max<int64_t>(1, chunks.rows * std::min(shape.cols, kTileCols));
  const int64_t grain = std::max<int64_t>(1, kGrain / task_elements);
  torch::stable::parallel_for(0, chunks.count * per_row, grain, [&](int64_t begin, int64_t end) {
    alignas(64) A group[kBlocks * kTileCols];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t chunk = task / per_row;
      const int64_t col = (task % per_row) * kTileCols;
      const int64_t n = std::min(kTileCols, shape.cols - col);
      A* sum = partial.data() + chunk * sums + col;  // zero from the vector's constructor
      const int64_t last = std::min(shape.rows, (chunk + 1) * chunks.rows);
      for (int64_t row = chunk * chunks.rows; row < last; row += kSumGroup) {
        for (int b = 0; b < kBlocks; ++b) std::fill_n(group + b * kTileCols, n, A(0));
        for (int64_t r = row; r < std::min(last, row + kSumGroup); ++r) f(r, col, n, group);
        for (int b = 0; b < kBlocks; ++b)
          for (int64_t i = 0; i < n; ++i) sum[b * shape.cols + i] += group[b * kTileCols + i];
      }
    }
  });

  std::vector<A> total(static_cast<size_t>(sums));
  add_chunks<A>(partial.data(), chunks.count, sums, sums, total.data());
  store_values(total.data(), out);
}

// The same for a row that needs a pass of its own before its values are known: calls f(row, acc) for whole rows; f adds
// what is to be summed to acc[0..cols), acc[cols..2 cols) and so on, and the sums go to out[0], out[1] and so on.
template <class T, class F>
void for_each_row_summing_columns(Shape2d shape, const std::vector<T*>& out, const F& f) {
  using A = acc_t<T>;
  if (shape.cols == 0) return;
  const RowChunks chunks = row_chunks(shape.rows);
  const int64_t width = static_cast<int64_t>(out.size()) * shape.cols;
  std::vector<A> partial(static_cast<size_t>(chunks.count * width));

  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, chunks.rows * shape.cols));
  torch::stable::parallel_for(0, chunks.count, grain, [&](int64_t begin, int64_t end) {
    std::vector<A> group(static_cast<size_t>(width));
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A* sum = partial.data() + chunk * width;
      const int64_t last = std::min(shape.rows, (chunk + 1) * chunks.rows);
      for (int64_t row = chunk * chunks.rows; row < last; row += kSumGroup) {
        std::fill(group.begin(), group.end(), A(0));
        for (int64_t r = row; r < std::min(last, row + kSumGroup); ++r) f(r, group.data());
        for (int64_t i = 0; i < width; ++i) sum[i] += group[i];
      }
    }
  });
  for (size_t i = 0; i < out.size(); ++i) {
    add_chunks(partial.data() + static_cast<int64_t>(i) * shape.cols, chunks.count, width, shape.cols, out[i]);
  }
}

// The same with optional sums: without `wanted`, f adds to an accumulator that is not read.
template <class T, int kBlocks = 1, class F>
void for_each_tile_summing_columns_if(bool wanted, Shape2d shape, Tensor& out, const F& f) {
  if (wanted) return for_each_tile_summing_columns<T, kBlocks>(shape, out, f);
  for_each_tile(shape, [&](int64_t row, int64_t col, int64_t n) {
    alignas(64) acc_t<T> unread[kBlocks * kTileCols];
    f(row, col, n, unread);
  });
}

}  // namespace parallel_ops::cpu
