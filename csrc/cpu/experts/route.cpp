// route on the CPU: softmax or sigmoid, choice of the experts, weights and the sums of the auxiliary losses, a row of
// logits at a time.
#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../check.h"
#include "../column_sum.h"
#include "../output.h"
#include "../rows.h"
#include "router.h"

namespace parallel_ops::cpu {
namespace {

#define DEFINE_ROWS(A)                                                                                                \
  PARALLEL_OPS_MULTIVERSION A route_one(const Router& router, const A* bias, const RowSpace<A>& s, int64_t* to,       \
                                        A* weights, A* sums) {                                                        \
    return route_row(router, bias, s, to, weights, sums);                                                             \
  }                                                                                                                   \
  PARALLEL_OPS_MULTIVERSION void route_one_backward(const Router& router, const RowGradients<A>& grad,                \
                                                    const RowSpace<A>& s, const int64_t* chosen, A* u, A* d, A* dx) { \
    route_row_backward(router, grad, s, chosen, u, d, dx);                                                            \
  }
DEFINE_ROWS(float)
DEFINE_ROWS(double)
#undef DEFINE_ROWS

#define DEFINE_CONVERSIONS(T)                                                 \
  PARALLEL_OPS_MULTIVERSION void widen(const T* x, int64_t n, acc_t<T>* y) {  \
    for (int64_t i = 0; i < n; ++i) y[i] = to_acc(x[i]);                      \
  }                                                                           \
  PARALLEL_OPS_MULTIVERSION void narrow(const acc_t<T>* x, int64_t n, T* y) { \
    for (int64_t i = 0; i < n; ++i) y[i] = from_acc<T>(x[i]);                 \
  }
PARALLEL_OPS_FOR_EACH_DTYPE(DEFINE_CONVERSIONS)
#undef DEFINE_CONVERSIONS

// The memory behind a RowSpace, one for each thread.
template <class T>
class Space {
 public:
  using A = acc_t<T>;
  explicit Space(const Router& router)
      : values_(static_cast<size_t>(5 * router.experts + router.top_k)),
        keys_(static_cast<size_t>(router.experts + router.groups)),
        scratch_(static_cast<size_t>(router.experts)),
        n_(router.experts) {
    A* v = values_.data();
    row = {v, v + n_, v + 2 * n_, v + 3 * n_, keys_.data(), keys_.data() + n_};
    gradients = v + 4 * n_;
    u = v + 5 * n_;
  }
  void read(const Rows<T>& logits, int64_t r) { widen(logits.tile(r, 0, n_, scratch_.data()), n_, row.x); }

  RowSpace<A> row;
  A* gradients;
  A* u;

 private:
  std::vector<A> values_;
  std::vector<Key<A>> keys_;
  std::vector<T> scratch_;
  int64_t n_;
};

Router checked_router(const char* op, const Tensor& logits, int64_t top_k, int64_t groups, int64_t top_groups,
                      bool sigmoid, bool top_k_first, bool normalize, double scale) {
  PARALLEL_OPS_CHECK(logits.is_cpu() && logits.dim() == 2 && logits.size(1) > 0, op, ": logits must be [t, n]");
  const int64_t n = logits.size(1);
  PARALLEL_OPS_CHECK(groups > 0 && n % groups == 0 && top_groups > 0 && top_groups <= groups, op,
                     ": groups must divide the experts, and top_groups be at most groups");
  PARALLEL_OPS_CHECK(top_k > 0 && top_k <= top_groups * (n / groups), op,
                     ": top_k must be at least 1 and at most the experts of the top groups");
  return {n, top_k, groups, top_groups, sigmoid, top_k_first, normalize, scale};
}

ScalarType accumulation(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Calls f(begin, end) for ranges of chunks of rows, in parallel.
template <class F>
void for_chunks(const RowChunks& chunks, int64_t cols, const F& f) {
  torch::stable::parallel_for(0, chunks.count, std::max<int64_t>(1, kGrain / (chunks.rows * cols + 1)), f);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> route(const Tensor& logits, const std::optional<Tensor>& bias,
                                                         int64_t top_k, bool sigmoid, int64_t groups,
                                                         int64_t top_groups, bool top_k_first, bool normalize,
                                                         double scale) {
  const char* op = "route";
  const Router router = checked_router(op, logits, top_k, groups, top_groups, sigmoid, top_k_first, normalize, scale);
  const int64_t t = logits.size(0), n = router.experts;
  PARALLEL_OPS_CHECK(!bias || (bias->is_cpu() && bias->dim() == 1 && bias->size(0) == n), op, ": bias must be [", n,
                     "]");
  Tensor weights = empty_tensor({t, top_k}, accumulation(logits));
  Tensor sums = empty_tensor({n}, accumulation(logits)), z_sum = empty_tensor({}, accumulation(logits));
  Tensor experts = empty_tensor({t, top_k}, ScalarType::Long), load = empty_tensor({n}, ScalarType::Int);
  dispatch(op, logits.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Rows<T> rows(op, "logits", logits);
    std::optional<Values<A>> biases;
    if (bias) biases.emplace(op, "bias", *bias);
    A* to_weights = static_cast<A*>(weights.mutable_data_ptr());
    A* to_sums = static_cast<A*>(sums.mutable_data_ptr());
    int64_t* to_experts = static_cast<int64_t*>(experts.mutable_data_ptr());
    const RowChunks chunks = row_chunks(t);
    std::vector<A> logsumexps(static_cast<size_t>(t)), partial(static_cast<size_t>(chunks.count * n));
    for_chunks(chunks, n, [&](int64_t begin, int64_t end) {
      Space<T> space(router);
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t last = std::min(t, (chunk + 1) * chunks.rows);
        for (int64_t row = chunk * chunks.rows; row < last; ++row) {
          space.read(rows, row);
          logsumexps[static_cast<size_t>(row)] =
              route_one(router, biases ? biases->data() : nullptr, space.row, to_experts + row * top_k,
                        to_weights + row * top_k, partial.data() + chunk * n);
        }
      }
    });
    add_chunks<A>(partial.data(), chunks.count, n, n, to_sums);
    double z = 0;
    for (const A l : logsumexps) z += static_cast<double>(l) * static_cast<double>(l);
    *static_cast<A*>(z_sum.mutable_data_ptr()) = static_cast<A>(z);
    int32_t* to_load = static_cast<int32_t*>(load.mutable_data_ptr());
    std::fill_n(to_load, n, 0);
    for (int64_t i = 0; i < t * top_k; ++i) ++to_load[to_experts[i]];
  });
  return {weights, sums, z_sum, experts, load};
}

Tensor route_backward(const Tensor& logits, const Tensor& experts, const std::optional<Tensor>& grad_weights,
                      const std::optional<Tensor>& grad_score_sums, const std::optional<Tensor>& grad_z_sum,
                      bool sigmoid, bool top_k_first, bool normalize, double scale) {
  const char* op = "route_backward";
  PARALLEL_OPS_CHECK(experts.is_cpu() && experts.dim() == 2 && experts.scalar_type() == ScalarType::Long &&
                         experts.is_contiguous() && logits.dim() == 2 && experts.size(0) == logits.size(0),
                     op, ": experts must be what route returned");
  const int64_t t = logits.size(0), top_k = experts.size(1);
  const Router router = checked_router(op, logits, top_k, 1, 1, sigmoid, top_k_first, normalize, scale);
  const int64_t n = router.experts;
  const int64_t* chosen = readable<int64_t>(op, "experts", experts);
  for (int64_t i = 0; i < t * top_k; ++i) {
    PARALLEL_OPS_CHECK(chosen[i] >= 0 && chosen[i] < n, op, ": experts holds ", chosen[i], " of ", n);
  }
  if (grad_weights) check_shape(op, "grad_weights", *grad_weights, experts);
  PARALLEL_OPS_CHECK(
      !grad_score_sums || (grad_score_sums->is_cpu() && grad_score_sums->dim() == 1 && grad_score_sums->size(0) == n),
      op, ": grad_score_sums must be [", n, "]");
  PARALLEL_OPS_CHECK(!grad_z_sum || (grad_z_sum->is_cpu() && grad_z_sum->dim() == 0), op,
                     ": grad_z_sum must be one number");
  Tensor dlogits = empty_output(logits, logits.sizes());
  dispatch(op, logits.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Rows<T> rows(op, "logits", logits);
    std::optional<Values<A>> of_weights, of_sums, of_z;
    if (grad_weights) of_weights.emplace(op, "grad_weights", *grad_weights);
    if (grad_score_sums) of_sums.emplace(op, "grad_score_sums", *grad_score_sums);
    if (grad_z_sum) of_z.emplace(op, "grad_z_sum", *grad_z_sum);
    T* to = static_cast<T*>(dlogits.mutable_data_ptr());
    for_chunks(row_chunks(t), n, [&](int64_t begin, int64_t end) {
      const int64_t per_chunk = row_chunks(t).rows;
      Space<T> space(router);
      std::vector<A> dx(static_cast<size_t>(n));
      for (int64_t row = begin * per_chunk; row < std::min(t, end * per_chunk); ++row) {
        space.read(rows, row);
        const RowGradients<A> grad{of_weights ? of_weights->data() + row * top_k : nullptr,
                                   of_sums ? of_sums->data() : nullptr, of_z ? (*of_z)[0] : A(0)};
        route_one_backward(router, grad, space.row, chosen + row * top_k, space.u, space.gradients, dx.data());
        narrow(dx.data(), n, to + row * n);
      }
    });
  });
  return dlogits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(parallel_ops, CPU, m) {
  m.impl("route", TORCH_BOX(&route));
  m.impl("route_backward", TORCH_BOX(&route_backward));
}

}  // namespace parallel_ops::cpu
