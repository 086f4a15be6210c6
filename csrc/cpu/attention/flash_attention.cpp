// The ops of block attention on the CPU: what they are given is checked and written down as a call.
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../check.h"
#include "../softmaxes/softmax.h"
#include "block.h"

namespace parallel_ops::cpu {
namespace {

// shift, weight and delta of rows begin .. end - 1 of [s, b, heads], from their maxima, sums, outputs and gradients.
template <class A>
PARALLEL_OPS_INLINE void gradient_rows(const Operand& grad_out, const Operand& out, const Tensor& statistics,
                                       const Tensor& rows, const Tensor& like, int64_t begin, int64_t end) {
  const int64_t batch = like.size(1), heads = like.size(2), d = like.size(3);
  const RowValues<A> max(statistics, 0), sum(statistics, 1), shift(rows, 0), weight(rows, 1), delta(rows, 2);
  const RowScratch<A> one(d), two(d);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t h = row % heads, b = row / heads % batch, s = row / heads / batch;
    load_row(grad_out, s * grad_out.s + b * grad_out.b + h * grad_out.h, d, one.data);
    load_row(out, s * out.s + b * out.b + h * out.h, d, two.data);
    delta(b, h, s) = sum_lanes<A>(d, [&](int64_t i) PARALLEL_OPS_LAMBDA { return one.data[i] * two.data[i]; });
    const bool some = sum(b, h, s) != A(0);
    shift(b, h, s) = some ? max(b, h, s) : A(0);
    weight(b, h, s) = some ? A(1) / sum(b, h, s) : A(0);
  }
}
#define DEFINE_ROWS(NAME, A)                                                                                 \
  PARALLEL_OPS_MULTIVERSION void NAME(const Operand& grad_out, const Operand& out, const Tensor& statistics, \
                                      const Tensor& rows, const Tensor& like, int64_t begin, int64_t end) {  \
    gradient_rows<A>(grad_out, out, statistics, rows, like, begin, end);                                     \
  }
DEFINE_ROWS(rows_fp32, float)
DEFINE_ROWS(rows_fp64, double)
#undef DEFINE_ROWS

// The shape of `like` in all dimensions but the last.
void check_but_last(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  PARALLEL_OPS_CHECK(
      t.is_cpu() && t.dim() == 4 && std::equal(t.sizes().begin(), t.sizes().end() - 1, like.sizes().begin()), op, ": ",
      name, " must have the shape of the input but for d, and be on the CPU");
}

BlockCall block_call(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                     const std::optional<Tensor>& spans, std::optional<int64_t> left, std::optional<int64_t> right,
                     double scale, double softcap, double p, const std::optional<Tensor>& seed,
                     const std::vector<int64_t>& places) {
  for (const Tensor* t : {&q, &k, &v}) {
    PARALLEL_OPS_CHECK(t->is_cpu() && t->dim() == 4 && t->scalar_type() == q.scalar_type(), op,
                       ": q, k and v must be [s, b, h, d], of one dtype and on the CPU");
  }
  dispatch(op, q.scalar_type(), [](auto) {});
  const int64_t heads = q.size(2), kv_heads = k.size(2);
  PARALLEL_OPS_CHECK(k.size(1) == q.size(1) && k.size(3) == q.size(3) && kv_heads > 0 && heads % kv_heads == 0, op,
                     ": k must have the batch and d of q, and heads that divide its");
  check_but_last(op, "v", v, k);
  BlockCall call{Operand(op, "q", q),
                 Operand(op, "k", k),
                 Operand(op, "v", v),
                 q.size(0),
                 k.size(0),
                 q.size(1),
                 heads,
                 kv_heads,
                 q.size(3),
                 v.size(3),
                 scale,
                 softcap,
                 {},
                 {},
                 {},
                 0,
                 0,
                 0};
  const int32_t* bounds = nullptr;
  if (spans) {
    PARALLEL_OPS_CHECK(spans->is_cpu() && spans->scalar_type() == ScalarType::Int && spans->is_contiguous() &&
                           spans->dim() == 2 && spans->size(0) == 2 && spans->size(1) == call.sq,
                       op, ": spans must be contiguous int32 [2, sq]");
    bounds = readable<int32_t>(op, "spans", *spans);
  }
  call.first.resize(static_cast<size_t>(call.sq));
  call.last.resize(static_cast<size_t>(call.sq));
  for (int64_t i = 0; i < call.sq; ++i) {
    const int64_t first = bounds ? bounds[i] : left ? i + *left : 0;
    const int64_t last = bounds ? bounds[call.sq + i] : right ? i + *right + 1 : call.sk;
    call.first[static_cast<size_t>(i)] = std::clamp<int64_t>(first, 0, call.sk);
    call.last[static_cast<size_t>(i)] = std::clamp<int64_t>(last, 0, call.sk);
  }
  if (seed && p > 0) {
    PARALLEL_OPS_CHECK(seed->is_cpu() && seed->scalar_type() == ScalarType::Long && seed->numel() == 1, op,
                       ": seed must be one int64 on the CPU");
    PARALLEL_OPS_CHECK(places.size() == 6, op,
                       ": places must be start and step of queries and keys, first head, batch");
    call.dropout = {static_cast<uint64_t>(p * 4294967296.0 + 0.5),
                    p < 1 ? 1 / (1 - p) : 0.0,
                    static_cast<uint64_t>(*readable<int64_t>(op, "seed", *seed)),
                    places[0],
                    places[1],
                    places[2],
                    places[3],
                    places[4],
                    places[5]};
  }
  call.group = heads / kv_heads;
  call.chunk = std::max(kQueryBlock, round_up(std::min(kTaskRows / call.group, call.sq), kQueryBlock));
  const int64_t pairs = std::max<int64_t>(1, call.batch * kv_heads);
  while (pairs * ceil_div(call.sq, call.chunk) < kEnoughTasks && call.chunk > 2 * kQueryBlock) {
    call.chunk = round_up(call.chunk / 2, kQueryBlock);
  }
  call.chunks = ceil_div(call.sq, call.chunk);
  return call;
}

// [planes, b, heads, sq] for `like` [sq, b, heads, d].
void check_planes(const char* op, const char* name, const Tensor& t, int64_t planes, const Tensor& like) {
  PARALLEL_OPS_CHECK(t.is_cpu() && t.scalar_type() == acc_dtype(like.scalar_type()) && t.dim() == 4 &&
                         t.size(0) == planes && t.size(1) == like.size(1) && t.size(2) == like.size(2) &&
                         t.size(3) == like.size(0),
                     op, ": ", name, " must be [", planes, ", b, heads, sq] in the dtype of the arithmetic");
  check_memory(op, name, t);
}

// [s, b, heads, d_v] for q.
void check_values(const char* op, const char* name, const Tensor& t, const Tensor& q, const Tensor& v) {
  check_but_last(op, name, t, q);
  PARALLEL_OPS_CHECK(t.size(3) == v.size(3), op, ": ", name, " must have the d of v");
}

void check_result_dtype(const char* op, const char* name, const Tensor& t, const Tensor& like, bool arithmetic) {
  const ScalarType acc = acc_dtype(like.scalar_type());
  PARALLEL_OPS_CHECK(t.scalar_type() == acc || (!arithmetic && t.scalar_type() == like.scalar_type()), op, ": ", name,
                     " must have the dtype of the arithmetic", arithmetic ? "" : ", or that of the input");
}

void check_result(const char* op, const char* name, const Tensor& t, const Tensor& like, bool arithmetic) {
  check_shape(op, name, t, like);
  check_result_dtype(op, name, t, like, arithmetic);
}

void forward(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& spans,
             std::optional<int64_t> left, std::optional<int64_t> right, double scale, double softcap, double p,
             const std::optional<Tensor>& seed, std::vector<int64_t> places, Tensor out, Tensor statistics,
             bool merge) {
  constexpr const char* kOp = "block_attention";
  ForwardCall call{block_call(kOp, q, k, v, spans, left, right, scale, softcap, p, seed, places),
                   Operand(kOp, "out", out), statistics, merge};
  check_values(kOp, "out", out, q, v);
  check_result_dtype(kOp, "out", out, q, merge);
  check_planes(kOp, "statistics", statistics, 2, q);
  run_forward(call);
}

void backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rows,
              const std::optional<Tensor>& spans, std::optional<int64_t> left, std::optional<int64_t> right,
              double scale, double softcap, double p, const std::optional<Tensor>& seed, std::vector<int64_t> places,
              Tensor dq, Tensor dk, Tensor dv, bool accumulate) {
  constexpr const char* kOp = "block_attention_backward";
  BackwardCall call{block_call(kOp, q, k, v, spans, left, right, scale, softcap, p, seed, places),
                    Operand(kOp, "grad_out", grad_out),
                    rows,
                    Operand(kOp, "dq", dq),
                    Operand(kOp, "dk", dk),
                    Operand(kOp, "dv", dv),
                    accumulate,
                    1,
                    nullptr};
  PARALLEL_OPS_CHECK(grad_out.scalar_type() == q.scalar_type(), kOp, ": grad_out must have the dtype of q");
  check_values(kOp, "grad_out", grad_out, q, v);
  check_planes(kOp, "rows", rows, 3, q);
  check_result(kOp, "dq", dq, q, accumulate);
  check_result(kOp, "dk", dk, k, false);
  check_result(kOp, "dv", dv, v, false);
  run_backward(call);
}

void rows(const Tensor& grad_out, const Tensor& out, const Tensor& statistics, Tensor rows) {
  constexpr const char* kOp = "attention_gradient_rows";
  dispatch(kOp, grad_out.scalar_type(), [](auto) {});
  PARALLEL_OPS_CHECK(grad_out.is_cpu() && grad_out.dim() == 4, kOp, ": grad_out must be [s, b, heads, d], on the CPU");
  check_result(kOp, "out", out, grad_out, false);
  check_planes(kOp, "statistics", statistics, 2, grad_out);
  check_planes(kOp, "rows", rows, 3, grad_out);
  const Operand grads(kOp, "grad_out", grad_out), outs(kOp, "out", out);
  const int64_t count = grad_out.size(0) * grad_out.size(1) * grad_out.size(2);
  torch::stable::parallel_for(0, count, ceil_div(kGrain, grad_out.size(3) + 1), [&](int64_t begin, int64_t end) {
    if (grad_out.scalar_type() == ScalarType::Double) {
      rows_fp64(grads, outs, statistics, rows, grad_out, begin, end);
    } else {
      rows_fp32(grads, outs, statistics, rows, grad_out, begin, end);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("block_attention_", TORCH_BOX(&forward));
  m.impl("block_attention_backward_", TORCH_BOX(&backward));
  m.impl("attention_gradient_rows_", TORCH_BOX(&rows));
}

}  // namespace parallel_ops::cpu
