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

// Calls f(row, col, n, acc) for every tile of a rows x cols array, in parallel; f adds the n values it
// wants summed to acc[0..n). The sums over all rows go to out[0..cols). An op whose tile gives several column
// blocks (gate and up of SwiGLU) asks for kBlocks: block b is added to acc[b * kTileCols ..) and its sums go
// to out[b * cols ..).
template <class T, int kBlocks = 1, class F>
void for_each_tile_summing_columns(Shape2d shape, T* out, const F& f) {
  using A = acc_t<T>;
  if (shape.cols == 0) return;
  const int64_t sums = kBlocks * shape.cols;
  const int64_t chunks = std::max<int64_t>(1, std::min(kSumChunks, ceil_div(shape.rows, kSumGroup)));
  const int64_t chunk_rows = ceil_div(ceil_div(shape.rows, chunks), kSumGroup) * kSumGroup;
  const int64_t per_row = ceil_div(shape.cols, kTileCols);
  std::vector<A> partial(static_cast<size_t>(chunks * sums));

  const int64_t task_elements = std::max<int64_t>(1, chunk_rows * std::min(shape.cols, kTileCols));
  const int64_t grain = std::max<int64_t>(1, kGrain / task_elements);
  torch::stable::parallel_for(0, chunks * per_row, grain, [&](int64_t begin, int64_t end) {
    alignas(64) A group[kBlocks * kTileCols];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t chunk = task / per_row;
      const int64_t col = (task % per_row) * kTileCols;
      const int64_t n = std::min(kTileCols, shape.cols - col);
      A* sum = partial.data() + chunk * sums + col;  // zero from the vector's constructor
      const int64_t last = std::min(shape.rows, (chunk + 1) * chunk_rows);
      for (int64_t row = chunk * chunk_rows; row < last; row += kSumGroup) {
        for (int b = 0; b < kBlocks; ++b) std::fill_n(group + b * kTileCols, n, A(0));
        for (int64_t r = row; r < std::min(last, row + kSumGroup); ++r) f(r, col, n, group);
        for (int b = 0; b < kBlocks; ++b)
          for (int64_t i = 0; i < n; ++i) sum[b * shape.cols + i] += group[b * kTileCols + i];
      }
    }
  });

  constexpr int64_t kChunkGroup = 8;
  for_each_tile({1, sums}, [&](int64_t, int64_t col, int64_t n) {
    alignas(64) A total[kTileCols] = {};
    for (int64_t first = 0; first < chunks; first += kChunkGroup) {
      alignas(64) A group[kTileCols] = {};
      for (int64_t chunk = first; chunk < std::min(chunks, first + kChunkGroup); ++chunk) {
        const A* sum = partial.data() + chunk * sums + col;
        for (int64_t i = 0; i < n; ++i) group[i] += sum[i];
      }
      for (int64_t i = 0; i < n; ++i) total[i] += group[i];
    }
    for (int64_t i = 0; i < n; ++i) out[col + i] = from_acc<T>(total[i]);
  });
}

// The same where the sums may not be wanted: without `wanted`, f adds to an accumulator that nobody reads.
template <class T, int kBlocks = 1, class F>
void for_each_tile_summing_columns_if(bool wanted, Shape2d shape, T* out, const F& f) {
  if (wanted) return for_each_tile_summing_columns<T, kBlocks>(shape, out, f);
  for_each_tile(shape, [&](int64_t row, int64_t col, int64_t n) {
    alignas(64) acc_t<T> unread[kBlocks * kTileCols];
    f(row, col, n, unread);
  });
}

}  // namespace parallel_ops::cpu
