// Block attention backward on the CPU: see parallel_ops/ops/attention/block.py for the maths.
//
// Work is cut as in forward. Probabilities are computed again from the scores and each row's shift and weight. A
// chunk's gradient of queries is summed over the blocks of keys in scratch; the gradients of a head's keys and values
// are summed over all its chunks. Where there are few heads, their chunks are dealt out to several parts, each with its
// own sums, which are then added in order: shapes alone decide, so no bit depends on the number of threads.
#include "../output.h"
#include "../softmaxes/softmax.h"
#include "tiles.h"

namespace parallel_ops::cpu {
namespace {

// A row of the sums below, the same for all engines: whole vectors of each.
inline int64_t sums_row(int64_t d) { return round_up(d, 16); }

// Sums of the gradients of keys and values: [sk and some more, row] each, the keys' first.
template <class A>
struct KeySums {
  A *k, *v;
};
// Elements of the former, and of both.
inline int64_t sums_of_keys(const BackwardCall& call) { return (call.sk + kKeyBlock) * sums_row(call.d); }
inline int64_t sums_size(const BackwardCall& call) {
  return sums_of_keys(call) + (call.sk + kKeyBlock) * sums_row(call.d_v);
}

template <class E>
class Backward {
  using A = typename E::Acc;
  using Elem = typename E::Elem;
  using In = typename E::In;

 public:
  PARALLEL_OPS_INLINE explicit Backward(const BackwardCall& call)
      : call_(call),
        grad_(call.grad_out),
        shift_(call.rows, 0),
        weight_(call.rows, 1),
        delta_(call.rows, 2),
        width_(call.d),
        values_(call.d_v),
        rows_(round_up(call.chunk, kQueries<E>)),
        q_(call.group * rows_ * width_.row),
        do_(call.group * rows_ * values_.row),
        q_panels_(call.group * rows_ * width_.panels),
        do_panels_(call.group * rows_ * values_.panels),
        dq_(call.group * rows_ * width_.row),
        kv_(kKeyBlock * std::max(width_.row, values_.row)),
        k_(kKeyBlock * width_.panels),
        v_(kKeyBlock * values_.panels),
        k_panels_(kKeyBlock * width_.panels),
        scores_(kQueries<E> * kKeyBlock),
        ds_(kQueries<E> * kKeyBlock),
        narrow_(E::kPerStep > 1 ? kQueries<E> * kKeyBlock : 0),
        pairs_(E::kPerStep > 1 ? kQueries<E> * kKeyBlock : 0),
        kept_(kKeyBlock + 16) {}

  PARALLEL_OPS_INLINE void chunk(int64_t batch, int64_t kv, int64_t chunk, const KeySums<A>& sums, const Operand& dq,
                                 bool accumulate) {
    const int64_t query = chunk * call_.chunk, n = std::min(call_.chunk, call_.sq - query);
    const int64_t q_block = kQueries<E> * width_.panels / E::kPerStep;
    const int64_t do_block = kQueries<E> * values_.panels / E::kPerStep;
    for (int64_t g = 0; g < call_.group; ++g) {
      const int64_t head = kv * call_.group + g, row = g * rows_;
      load_rows(call_.q, batch, head, query, n, rows_, call_.d, width_.row, q_.data + row * width_.row);
      load_rows(grad_, batch, head, query, n, rows_, call_.d_v, values_.row, do_.data + row * values_.row);
      for (int64_t i = 0; i < rows_; i += kQueries<E>) {
        const int64_t panel = (row + i) / kQueries<E>;
        pack_panels<E>(q_.data + (row + i) * width_.row, kQueries<E>, width_.row, q_panels_.data + panel * q_block);
        pack_panels<E>(do_.data + (row + i) * values_.row, kQueries<E>, values_.row,
                       do_panels_.data + panel * do_block);
      }
    }
    std::fill_n(dq_.data, call_.group * rows_ * width_.row, A(0));
    const auto [first, last] = call_.keys_of(query, query + n);
    for (int64_t key = first; key < last; key += kKeyBlock) {
      const int64_t keys = std::min(kKeyBlock, last - key);
      load_rows(call_.v, batch, kv, key, keys, keys, call_.d_v, values_.row, kv_.data);
      pack_transposed<E>(kv_.data, keys, call_.d_v, values_.row, v_.data);
      load_rows(call_.k, batch, kv, key, keys, kKeyBlock, call_.d, width_.row, kv_.data);
      pack_transposed<E>(kv_.data, keys, call_.d, width_.row, k_.data);
      pack_panels<E>(kv_.data, kKeyBlock, width_.row, k_panels_.data);
      const KeySums<A> here{sums.k + key * width_.row, sums.v + key * values_.row};
      for (int64_t row = 0; row < n; row += kQueries<E>) {
        const Strips<E> strips(call_, query + row, std::min(kQueries<E>, n - row), key, keys);
        if (!strips.any) continue;
        for (int64_t g = 0; g < call_.group; ++g) {
          const int64_t panel = (g * rows_ + row) / kQueries<E>;
          block(strips, batch, kv * call_.group + g, g * rows_ + row,
                {q_panels_.data + panel * q_block, do_panels_.data + panel * do_block}, here);
        }
      }
    }
    for (int64_t g = 0; g < call_.group; ++g) {
      const int64_t head = kv * call_.group + g;
      for (int64_t i = 0; i < n; ++i) {
        A* row = dq_.data + (g * rows_ + i) * width_.row;
        const int64_t offset = (query + i) * dq.s + batch * dq.b + head * dq.h;
        if (accumulate) {
          const A* before = static_cast<const A*>(dq.data) + offset;
          for (int64_t c = 0; c < call_.d; ++c) row[c] += before[c * dq.d];
        }
        store_row(dq, offset, call_.d, row);
      }
    }
  }

  PARALLEL_OPS_INLINE int64_t row() const { return width_.row; }

 private:
  // q and dO of one block of queries.
  struct Panels {
    const In *q, *grad;
  };

  PARALLEL_OPS_INLINE void block(const Strips<E>& strips, int64_t batch, int64_t head, int64_t row,
                                 const Panels& panels, const KeySums<A>& sums) {
    block_scores<E>(strips, q_.data + row * width_.row, width_, k_.data, scores_.data);
    block_scores<E>(strips, do_.data + row * values_.row, values_, v_.data, ds_.data);
    const ScoreRule<A> rule{static_cast<A>(call_.scale), static_cast<A>(call_.softcap)};
    for (int64_t i = 0; i < strips.count * E::kRows; ++i) {
      const KeyRange keys = strips.range(call_, i);
      if (keys.begin == keys.end) continue;
      const int64_t query = strips.query + i;
      const GradientRow<A> own =
          i < strips.rows
              ? GradientRow<A>{shift_(batch, head, query), weight_(batch, head, query), delta_(batch, head, query)}
              : GradientRow<A>{A(0), A(0), A(0)};
      A* kept = nullptr;
      if (call_.dropout.threshold) {
        kept = kept_.data + 8;
        kept_row(kept, keys, call_.dropout, batch, head, query, strips.key);
      }
      gradient_row(scores_.data + i * kKeyBlock, ds_.data + i * kKeyBlock, kept, keys, rule, own);
    }
    A* dq = dq_.data + row * width_.row;
    if constexpr (E::kPerStep == 1) {
      add_over_queries<E>(strips, scores_.data, values_, panels.grad, sums.v);
      add_over_queries<E>(strips, ds_.data, width_, panels.q, sums.k);
      add_over_keys<E>(strips, ds_.data, width_, k_panels_.data, dq);
    } else {
      In* p = pairs_.data;
      In* ds = p + kQueries<E> / 2 * kKeyBlock;
      for (int64_t i = 0; i < strips.count * E::kRows; i += 2) {
        const int64_t r = i / E::kRows, from = strips.begin[r] * E::kCols, to = strips.end[r] * E::kCols;
        join_rows(scores_.data + i * kKeyBlock, static_cast<Elem*>(nullptr), p + i / 2 * kKeyBlock, from, to);
        join_rows(ds_.data + i * kKeyBlock, narrow_.data + i * kKeyBlock, ds + i / 2 * kKeyBlock, from, to);
      }
      add_over_queries<E>(strips, p, values_, panels.grad, sums.v);
      add_over_queries<E>(strips, ds, width_, panels.q, sums.k);
      add_over_keys<E>(strips, narrow_.data, width_, k_panels_.data, dq);
    }
  }

  // Two rows rounded, element beside element, and, if wanted, each by itself.
  PARALLEL_OPS_INLINE static void join_rows(const A* __restrict rows, Elem* __restrict apart, In* __restrict joined,
                                            int64_t from, int64_t to) {
    for (int64_t j = from; j < to; ++j) joined[j] = E::join(E::round(rows[j]), E::round(rows[kKeyBlock + j]));
    if (!apart) return;
    for (int64_t j = from; j < to; ++j) apart[j] = static_cast<Elem>(joined[j]);
    for (int64_t j = from; j < to; ++j) apart[kKeyBlock + j] = static_cast<Elem>(joined[j] >> 16);
  }

  const BlockCall& call_;
  const Operand& grad_;
  const RowValues<A> shift_, weight_, delta_;
  const Widths<E> width_, values_;
  const int64_t rows_;
  RowScratch<Elem> q_, do_;
  RowScratch<In> q_panels_, do_panels_;
  RowScratch<A> dq_;
  RowScratch<Elem> kv_;
  RowScratch<In> k_, v_, k_panels_;
  RowScratch<A> scores_, ds_;
  RowScratch<Elem> narrow_;
  RowScratch<In> pairs_;
  RowScratch<A> kept_;
};

template <class A>
PARALLEL_OPS_INLINE void write_row(const BackwardCall& call, const Operand& to, int64_t pair, int64_t key, int64_t d,
                                   const A* row) {
  store_row(to, key * to.s + pair / call.kv_heads * to.b + pair % call.kv_heads * to.h, d, row);
}

template <class E>
PARALLEL_OPS_INLINE void backward_tasks(const BackwardCall& call, int64_t begin, int64_t end) {
  using A = typename E::Acc;
  Backward<E> backward(call);
  const int64_t of_keys = sums_of_keys(call), size = sums_size(call);
  const RowScratch<A> own(call.parts == 1 ? size : 0);
  for (int64_t task = begin; task < end; ++task) {
    A* sums = call.parts == 1 ? own.data : static_cast<A*>(call.sums) + task * size;
    std::fill_n(sums, size, A(0));
    const int64_t part = task % call.parts, pair = task / call.parts;
    for (int64_t nth = part; nth < call.chunks; nth += call.parts) {
      backward.chunk(pair / call.kv_heads, pair % call.kv_heads, call.nth_chunk(nth), {sums, sums + of_keys}, call.dq,
                     call.accumulate);
    }
    if (call.parts > 1) continue;
    for (int64_t key = 0; key < call.sk; ++key) {
      write_row(call, call.dk, pair, key, call.d, sums + key * sums_row(call.d));
      write_row(call, call.dv, pair, key, call.d_v, sums + of_keys + key * sums_row(call.d_v));
    }
  }
}

// The gradients of one key from the sums of all parts, added in order.
template <class A>
void join_parts(const BackwardCall& call, int64_t pair, int64_t key) {
  const int64_t size = sums_size(call);
  A* sums = static_cast<A*>(call.sums) + pair * call.parts * size;
  const auto join = [&](const Operand& to, int64_t d, A* row) {
    for (int64_t part = 1; part < call.parts; ++part) {
      for (int64_t c = 0; c < d; ++c) row[c] += row[part * size + c];
    }
    write_row(call, to, pair, key, d, row);
  };
  join(call.dk, call.d, sums + key * sums_row(call.d));
  join(call.dv, call.d_v, sums + sums_of_keys(call) + key * sums_row(call.d_v));
}

#define DEFINE_TASKS(NAME, TARGET, ...)                                    \
  TARGET void NAME(const BackwardCall& call, int64_t begin, int64_t end) { \
    backward_tasks<__VA_ARGS__>(call, begin, end);                         \
  }
PARALLEL_OPS_FOR_EACH_ENGINE(DEFINE_TASKS)
#undef DEFINE_TASKS

}  // namespace

void run_backward(BackwardCall& call) {
  const int64_t pairs = call.batch * call.kv_heads;
  if (pairs == 0) return;
  call.parts = std::clamp<int64_t>(kEnoughTasks / pairs, 1, std::max<int64_t>(1, call.chunks));
  const int64_t size = call.parts == 1 ? 0 : pairs * call.parts * sums_size(call);
  Tensor sums = empty_output(acc_dtype(call.q.dtype), {size});
  call.sums = sums.mutable_data_ptr();
  const auto tasks = [&](int64_t begin, int64_t end) {
    switch (engine_for(call.q.dtype)) {
#define RUN(NAME, TARGET, ...) \
  case Engine::NAME:           \
    return NAME(call, begin, end);
      PARALLEL_OPS_FOR_EACH_ENGINE(RUN)
#undef RUN
    }
  };
  torch::stable::parallel_for(0, pairs * call.parts, 1, tasks);
  if (call.parts == 1) return;
  const int64_t grain = ceil_div(kGrain, (call.d + call.d_v) * call.parts);
  torch::stable::parallel_for(0, pairs * call.sk, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (call.q.dtype == ScalarType::Double) {
        join_parts<double>(call, i / call.sk, i % call.sk);
      } else {
        join_parts<float>(call, i / call.sk, i % call.sk);
      }
    }
  });
}

}  // namespace parallel_ops::cpu
