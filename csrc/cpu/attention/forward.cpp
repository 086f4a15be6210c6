// Block attention forward on the CPU: see parallel_ops/ops/attention/block.py for the maths.
//
// A task takes the queries of a chunk, those of all heads that share a key together, through the keys that they see,
// block by block, each packed once for all of them. Scores exist for kQueryBlock x kKeyBlock at a time, in the cache. A
// row's maximum, sum and output so far are carried from block to block and written, or merged, at the end. Maximum and
// sum stay apart: the logarithm of the sum, added to a large maximum, would lose the digits that merging needs.
#include <cmath>

#include "../softmaxes/softmax.h"
#include "tiles.h"

namespace parallel_ops::cpu {
namespace {

template <class A>
struct RowStatistics {
  RowValues<A> max, sum;
};

template <class E>
class Forward {
  using A = typename E::Acc;
  using Statistics = RowStatistics<A>;
  using Elem = typename E::Elem;
  using In = typename E::In;

 public:
  PARALLEL_OPS_INLINE Forward(const BlockCall& call)
      : call_(call),
        width_(call.d),
        values_(call.d_v),
        rows_(round_up(call.chunk, E::kRows)),
        q_(call.group * rows_ * width_.row),
        o_(call.group * rows_ * values_.row),
        max_(call.group * rows_),
        sum_(call.group * rows_),
        kv_(kKeyBlock * std::max(width_.row, values_.row)),
        k_(kKeyBlock * width_.panels),
        v_(kKeyBlock * values_.panels),
        scores_(kQueries<E> * kKeyBlock),
        weights_(kQueries<E> * kKeyBlock),
        kept_(kKeyBlock + 16) {}

  PARALLEL_OPS_INLINE void task(int64_t task, const Operand& out, const Statistics& statistics, bool merge) {
    const int64_t chunk = call_.nth_chunk(task % call_.chunks), kv = task / call_.chunks % call_.kv_heads;
    const int64_t batch = task / call_.chunks / call_.kv_heads;
    const int64_t query = chunk * call_.chunk, n = std::min(call_.chunk, call_.sq - query);
    for (int64_t g = 0; g < call_.group; ++g) {
      load_rows(call_.q, batch, kv * call_.group + g, query, n, rows_, call_.d, width_.row,
                q_.data + g * rows_ * width_.row);
    }
    std::fill_n(o_.data, call_.group * rows_ * values_.row, A(0));
    std::fill_n(max_.data, call_.group * rows_, kUnseen<A>);
    std::fill_n(sum_.data, call_.group * rows_, A(0));
    const auto [first, last] = call_.keys_of(query, query + n);
    for (int64_t key = first; key < last; key += kKeyBlock) {
      const int64_t keys = std::min(kKeyBlock, last - key), padded = round_up(keys, E::kCols);
      load_rows(call_.k, batch, kv, key, keys, padded, call_.d, width_.row, kv_.data);
      pack_transposed<E>(kv_.data, keys, call_.d, width_.row, k_.data);
      load_rows(call_.v, batch, kv, key, keys, kKeyBlock, call_.d_v, values_.row, kv_.data);
      pack_panels<E>(kv_.data, kKeyBlock, values_.row, v_.data);
      for (int64_t row = 0; row < n; row += kQueries<E>) {
        const Strips<E> strips(call_, query + row, std::min(kQueries<E>, n - row), key, keys);
        if (!strips.any) continue;
        for (int64_t g = 0; g < call_.group; ++g) block(strips, batch, kv * call_.group + g, g * rows_ + row);
      }
    }
    for (int64_t g = 0; g < call_.group; ++g) {
      for (int64_t i = 0; i < n; ++i) {
        write(batch, kv * call_.group + g, query + i, g * rows_ + i, out, statistics, merge);
      }
    }
  }

 private:
  PARALLEL_OPS_INLINE void block(const Strips<E>& strips, int64_t batch, int64_t head, int64_t row) {
    block_scores<E>(strips, q_.data + row * width_.row, width_, k_.data, scores_.data);
    const ScoreRule<A> rule{static_cast<A>(call_.scale), static_cast<A>(call_.softcap)};
    for (int64_t i = 0; i < strips.count * E::kRows; ++i) {
      const KeyRange keys = strips.range(call_, i);
      if (keys.begin == keys.end) continue;
      A* s = scores_.data + i * kKeyBlock;
      const A factor = logits_row(s, keys, rule);
      const A old = max_.data[row + i], largest = max_row<E>(s, keys) * factor;
      const A max = largest > old ? largest : old;
      const A shift = max == kUnseen<A> ? A(0) : max;
      const A sum = exp_row<E>(s, keys, factor, shift);
      const A shrink = exp_or_zero(old - shift);
      if (shrink != A(1)) {
        A* o = o_.data + (row + i) * values_.row;
        for (int64_t c = 0; c < values_.row; ++c) o[c] *= shrink;
      }
      max_.data[row + i] = max;
      sum_.data[row + i] = sum_.data[row + i] * shrink + sum;
      if (call_.dropout.threshold) {
        A* kept = kept_.data + 8;
        kept_row(kept, keys, call_.dropout, batch, head, strips.query + i, strips.key);
        for (int64_t j = keys.begin; j < keys.end; ++j) s[j] *= kept[j];
      }
      if constexpr (E::kPerStep > 1) {
        Elem* w = weights_.data + i * kKeyBlock;
        for (int64_t j = keys.begin; j < keys.end; ++j) w[j] = E::round(s[j]);
      }
    }
    const Elem* weights;
    if constexpr (E::kPerStep > 1) {
      weights = weights_.data;
    } else {
      weights = scores_.data;
    }
    add_over_keys<E>(strips, weights, values_, v_.data, o_.data + row * values_.row);
  }

  PARALLEL_OPS_INLINE void write(int64_t batch, int64_t head, int64_t query, int64_t row, const Operand& out,
                                 const Statistics& statistics, bool merge) {
    A max = max_.data[row], sum = sum_.data[row];
    A* o = o_.data + row * values_.row;
    A factor = sum == A(0) ? A(0) : A(1) / sum;
    A &max_place = statistics.max(batch, head, query), &sum_place = statistics.sum(batch, head, query);
    const int64_t offset = query * out.s + batch * out.b + head * out.h;
    if (merge) {
      if (sum == A(0)) return;
      const A largest = max > max_place ? max : max_place;
      const A old = sum_place * std::exp(max_place - largest), block = std::exp(max - largest);
      max = largest;
      sum = old + sum * block;
      factor = block / sum;
      const A keep = old / sum;
      A* before = kept_.data;  // in pieces that fit
      for (int64_t c = 0; c < call_.d_v; c += kKeyBlock) {
        const int64_t n = std::min(kKeyBlock, call_.d_v - c);
        load_row(out, offset + c * out.d, n, before);
        for (int64_t j = 0; j < n; ++j) o[c + j] = before[j] * keep + o[c + j] * factor;
      }
    } else {
      for (int64_t c = 0; c < call_.d_v; ++c) o[c] *= factor;
    }
    max_place = max;
    sum_place = sum;
    store_row(out, offset, call_.d_v, o);
  }

  const BlockCall& call_;
  const Widths<E> width_, values_;
  const int64_t rows_;
  RowScratch<Elem> q_;
  RowScratch<A> o_, max_, sum_;
  RowScratch<Elem> kv_;
  RowScratch<In> k_, v_;
  RowScratch<A> scores_;
  RowScratch<Elem> weights_;
  RowScratch<A> kept_;
};

template <class E>
PARALLEL_OPS_INLINE void forward_tasks(const ForwardCall& call, int64_t begin, int64_t end) {
  Forward<E> forward(call);
  using A = typename E::Acc;
  const RowStatistics<A> statistics{RowValues<A>(call.statistics, 0), RowValues<A>(call.statistics, 1)};
  for (int64_t task = begin; task < end; ++task) forward.task(task, call.out, statistics, call.merge);
}

#define DEFINE_TASKS(NAME, TARGET, ...)                                   \
  TARGET void NAME(const ForwardCall& call, int64_t begin, int64_t end) { \
    forward_tasks<__VA_ARGS__>(call, begin, end);                         \
  }
PARALLEL_OPS_FOR_EACH_ENGINE(DEFINE_TASKS)
#undef DEFINE_TASKS

}  // namespace

void run_forward(const ForwardCall& call) {
  const auto tasks = [&](int64_t begin, int64_t end) {
    switch (engine_for(call.q.dtype)) {
#define RUN(NAME, TARGET, ...) \
  case Engine::NAME:           \
    return NAME(call, begin, end);
      PARALLEL_OPS_FOR_EACH_ENGINE(RUN)
#undef RUN
    }
  };
  torch::stable::parallel_for(0, call.batch * call.kv_heads * call.chunks, 1, tasks);
}

}  // namespace parallel_ops::cpu
