// The ops of block attention on the CPU: what they are given is checked and written down as a call.
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../check.h"
#include "../softmaxes/softmax.h"
#include "block.h"

namespace parallel_ops::cpu {
namespace {

template <class A>
PARALLEL_OPS_INLINE void delta_tasks(const Operand& grad_out, const Operand& out, const RowValues<A>& delta,
                                     const Tensor& like, int64_t begin, int64_t end) {
  const int64_t batch = like.size(1), heads = like.size(2), d = like.size(3);
  const RowScratch<A> one(d), two(d);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t h = row % heads, b = row / heads % batch, s = row / heads / batch;
    load_row(grad_out, s * grad_out.s + b * grad_out.b + h * grad_out.h, d, one.data);
    load_row(out, s * out.s + b * out.b + h * out.h, d, two.data);
    delta(b, h, s) = sum_lanes<A>(d, [&](int64_t i) PARALLEL_OPS_LAMBDA { return one.data[i] * two.data[i]; });
  }
}
#define DEFINE_DELTA(A)                                                                                             \
  PARALLEL_OPS_MULTIVERSION void delta_rows(const Operand& grad_out, const Operand& out, const RowValues<A>& delta, \
                                            const Tensor& like, int64_t begin, int64_t end) {                       \
    delta_tasks(grad_out, out, delta, like, begin, end);                                                            \
  }
DEFINE_DELTA(float)
DEFINE_DELTA(double)
#undef DEFINE_DELTA

BlockCall block_call(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                     const std::optional<Tensor>& spans, std::optional<int64_t> left, std::optional<int64_t> right,
                     double scale, double softcap, double p, const std::optional<Tensor>& seed,
                     const std::vector<int64_t>& places) {
  for (const Tensor* t : {&q, &k, &v}) {
    STD_TORCH_CHECK(t->is_cpu() && t->dim() == 4 && t->scalar_type() == q.scalar_type(), op,
                    ": q, k and v must be [s, b, h, d], of one dtype and on the CPU");
  }
  dispatch(op, q.scalar_type(), [](auto) {});
  const int64_t heads = q.size(2), kv_heads = k.size(2);
  STD_TORCH_CHECK(k.size(1) == q.size(1) && k.size(3) == q.size(3) && kv_heads > 0 && heads % kv_heads == 0, op,
                  ": k must have the batch and d of q, and heads that divide its");
  check_shape(op, "v", v, k);
  BlockCall call{Operand(op, "q", q),
                 Operand(op, "k", k),
                 Operand(op, "v", v),
                 q.size(0),
                 k.size(0),
                 q.size(1),
                 heads,
                 kv_heads,
                 q.size(3),
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
    STD_TORCH_CHECK(spans->is_cpu() && spans->scalar_type() == ScalarType::Int && spans->is_contiguous() &&
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
    STD_TORCH_CHECK(seed->is_cpu() && seed->scalar_type() == ScalarType::Long && seed->numel() == 1, op,
                    ": seed must be one int64 on the CPU");
    STD_TORCH_CHECK(places.size() == 6, op, ": places must be start and step of queries and keys, first head, batch");
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

void check_rows(const char* op, const char* name, const Tensor& t, const BlockCall& call) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == acc_dtype(call.q.dtype) && t.dim() == 3 && t.size(0) == call.batch &&
                      t.size(1) == call.heads && t.size(2) == call.sq,
                  op, ": ", name, " must be [b, heads, sq] in the dtype of the arithmetic");
  check_memory(op, name, t);
}

void check_result(const char* op, const char* name, const Tensor& t, const Tensor& like, bool arithmetic) {
  check_shape(op, name, t, like);
  const ScalarType acc = acc_dtype(like.scalar_type());
  STD_TORCH_CHECK(t.scalar_type() == acc || (!arithmetic && t.scalar_type() == like.scalar_type()), op, ": ", name,
                  " must have the dtype of the arithmetic", arithmetic ? "" : ", or that of the input");
}

void forward(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& spans,
             std::optional<int64_t> left, std::optional<int64_t> right, double scale, double softcap, double p,
             const std::optional<Tensor>& seed, std::vector<int64_t> places, Tensor out, Tensor lse, bool merge) {
  constexpr const char* kOp = "block_attention";
  ForwardCall call{block_call(kOp, q, k, v, spans, left, right, scale, softcap, p, seed, places),
                   Operand(kOp, "out", out), lse, merge};
  check_result(kOp, "out", out, q, merge);
  check_rows(kOp, "lse", lse, call);
  run_forward(call);
}

void backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse,
              const Tensor& delta, const std::optional<Tensor>& spans, std::optional<int64_t> left,
              std::optional<int64_t> right, double scale, double softcap, double p, const std::optional<Tensor>& seed,
              std::vector<int64_t> places, Tensor dq, Tensor dk, Tensor dv, bool accumulate) {
  constexpr const char* kOp = "block_attention_backward";
  BackwardCall call{block_call(kOp, q, k, v, spans, left, right, scale, softcap, p, seed, places),
                    Operand(kOp, "grad_out", grad_out),
                    lse,
                    delta,
                    Operand(kOp, "dq", dq),
                    Operand(kOp, "dk", dk),
                    Operand(kOp, "dv", dv),
                    accumulate,
                    1,
                    nullptr};
  check_like(kOp, "grad_out", grad_out, q);
  check_rows(kOp, "lse", lse, call);
  check_rows(kOp, "delta", delta, call);
  check_result(kOp, "dq", dq, q, accumulate);
  check_result(kOp, "dk", dk, k, false);
  check_result(kOp, "dv", dv, v, false);
  run_backward(call);
}

void delta(const Tensor& grad_out, const Tensor& out, Tensor delta) {
  constexpr const char* kOp = "attention_delta";
  check_result(kOp, "out", out, grad_out, false);
  dispatch(kOp, grad_out.scalar_type(), [](auto) {});
  STD_TORCH_CHECK(grad_out.dim() == 4 && delta.is_cpu() && delta.scalar_type() == acc_dtype(grad_out.scalar_type()) &&
                      delta.dim() == 3 && delta.size(0) == grad_out.size(1) && delta.size(1) == grad_out.size(2) &&
                      delta.size(2) == grad_out.size(0),
                  kOp, ": delta must be [b, heads, s] for grad_out [s, b, heads, d], in the dtype of the arithmetic");
  const Operand grads(kOp, "grad_out", grad_out), outs(kOp, "out", out);
  check_memory(kOp, "delta", delta);
  const int64_t rows = delta.numel();
  torch::stable::parallel_for(0, rows, ceil_div(kGrain, grad_out.size(3) + 1), [&](int64_t begin, int64_t end) {
    if (grad_out.scalar_type() == ScalarType::Double) {
      delta_rows(grads, outs, RowValues<double>(delta), grad_out, begin, end);
    } else {
      delta_rows(grads, outs, RowValues<float>(delta), grad_out, begin, end);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("block_attention_", TORCH_BOX(&forward));
  m.impl("block_attention_backward_", TORCH_BOX(&backward));
  m.impl("attention_delta_", TORCH_BOX(&delta));
}

}  // namespace parallel_ops::cpu
