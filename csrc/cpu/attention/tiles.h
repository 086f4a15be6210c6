// The products of block attention, over the tiles that some query sees.
#pragma once

#include "block.h"

namespace parallel_ops::cpu {

template <class E>
struct Widths {
  explicit Widths(int64_t d) : row(round_up(d, 16)), panels(round_up(row, E::kCols)), steps(ceil_div(d, E::kPerStep)) {}
  int64_t row;     // elements of a row of q, k, v or out in scratch
  int64_t panels;  // columns of all panels of such rows
  int64_t steps;   // of a product over d
};

// Raw scores of a block: q k^T, or dO v^T.
template <class E>
PARALLEL_OPS_INLINE void block_scores(const Strips<E>& strips, const typename E::Elem* rows, const Widths<E>& width,
                                      const typename E::In* transposed, typename E::Acc* scores) {
  for (int64_t t = 0; t < strips.tiles; ++t) {
    const auto* panel = transposed + t * width.steps * E::kCols;
    for (int64_t r = 0; r < strips.count; ++r) {
      if (!strips.computes(r, t)) continue;
      const auto* a = reinterpret_cast<const typename E::In*>(rows + r * E::kRows * width.row);
      product_tile<E, false, 2>(a, width.row / E::kPerStep, 1, panel, width.steps,
                                scores + r * E::kRows * kKeyBlock + t * E::kCols, kKeyBlock);
    }
  }
}

// to [rows, row] += weights [rows, keys] X [keys, row], X in panels of kKeyBlock steps.
template <class E>
PARALLEL_OPS_INLINE void add_over_keys(const Strips<E>& strips, const typename E::Elem* weights, const Widths<E>& width,
                                       const typename E::In* panels, typename E::Acc* to) {
  constexpr int64_t kSteps = kKeyBlock / E::kPerStep, kTileSteps = E::kCols / E::kPerStep;
  for (int64_t col = 0; col < width.row; col += E::kCols, panels += kSteps * E::kCols) {
    for (int64_t r = 0; r < strips.count; ++r) {
      const int64_t begin = strips.begin[r] * kTileSteps, steps = strips.end[r] * kTileSteps - begin;
      if (steps == 0) continue;
      const auto* a = reinterpret_cast<const typename E::In*>(weights + r * E::kRows * kKeyBlock) + begin;
      product<E, true>(a, kSteps, 1, panels + begin * E::kCols, steps, to + r * E::kRows * width.row + col, width.row,
                       width.row - col);
    }
  }
}

// to [keys, row] += weights^T [keys, rows] X [rows, row], X in panels of kQueryBlock steps.
template <class E>
PARALLEL_OPS_INLINE void add_over_queries(const Strips<E>& strips, const typename E::In* weights,
                                          const Widths<E>& width, const typename E::In* panels, typename E::Acc* to) {
  constexpr int64_t kSteps = kQueries<E> / E::kPerStep, kStripSteps = E::kRows / E::kPerStep;
  for (int64_t col = 0; col < width.row; col += E::kCols, panels += kSteps * E::kCols) {
    for (int64_t t = 0; t < strips.tiles; ++t) {
      for (int64_t r = 0; r < strips.count; ++r) {
        if (!strips.computes(r, t)) continue;
        const int64_t begin = r * kStripSteps;
        while (r + 1 < strips.count && strips.computes(r + 1, t)) ++r;
        const int64_t steps = (r + 1) * kStripSteps - begin;
        for (int64_t key = t * E::kCols; key < std::min((t + 1) * E::kCols, strips.keys); key += E::kKeyRows) {
          product<E, true, E::kKeyRows>(weights + begin * kKeyBlock + key, 1, kKeyBlock, panels + begin * E::kCols,
                                        steps, to + key * width.row + col, width.row, width.row - col);
        }
      }
    }
  }
}

}  // namespace parallel_ops::cpu
