// The loops of the gated activations over one tile of one row.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "../dtype.h"
#include "../lanes.h"
#include "../math.h"

namespace parallel_ops::cpu {

// kSwish is SiLU with options.
enum class Act { kSilu, kSwish, kGeluTanh, kGelu };

struct SwishOptions {
  double alpha = 1.0;
  std::optional<double> limit;
  double up_offset = 0.0;
};

// The same in the type of the arithmetic; an infinite limit for none.
template <class A>
struct Swish {
  explicit Swish(const SwishOptions& o)
      : alpha(static_cast<A>(o.alpha)),
        limit(o.limit ? static_cast<A>(*o.limit) : std::numeric_limits<A>::infinity()),
        up_offset(static_cast<A>(o.up_offset)) {}
  A alpha, limit, up_offset;
};

// One tile of one row: inputs, biases (zeros where there are none) and the row's weight (1 where there is none).
template <class T>
struct Tile {
  const T* gate;
  const T* up;
  const acc_t<T>* gate_bias;
  const acc_t<T>* up_bias;
  acc_t<T> weight;
  int64_t n;
  Swish<acc_t<T>> swish;
};

// act(g) and its slope, and u as it is multiplied and its own slope.
template <class A>
struct Factors {
  Activation<A> act;
  A up;
  A up_slope;
};

// NaN passes, as in torch.clamp, whose gradient is 1 at the limit itself.
template <Act kAct, class A>
PARALLEL_OPS_INLINE Factors<A> factors(A g, A u, const Swish<A>& swish) {
  if constexpr (kAct == Act::kSwish) {
    const A limit = swish.limit, z = g > limit ? limit : g;
    const auto s = sigmoid(swish.alpha * z);
    const A slope = g > limit ? A(0) : s.value + swish.alpha * z * s.slope;
    const A clamped = u > limit ? limit : u < -limit ? -limit : u;
    return {{z * s.value, slope}, clamped + swish.up_offset, u > limit || u < -limit ? A(0) : A(1)};
  } else if constexpr (kAct == Act::kSilu) {
    return {silu(g), u, A(1)};
  } else {
    return {gelu<kAct == Act::kGeluTanh>(g), u, A(1)};
  }
}

template <Act kAct, class T>
PARALLEL_OPS_INLINE void forward_loop(const Tile<T>& t, T* __restrict y) {
  using A = acc_t<T>;
  const T* __restrict gate = t.gate, * __restrict up = t.up;
  const A* __restrict gate_bias = t.gate_bias, * __restrict up_bias = t.up_bias;
  const A weight = t.weight;
  const Swish<A> swish = t.swish;
  for (int64_t i = 0; i < t.n; ++i) {
    const auto f = factors<kAct>(to_acc(gate[i]) + gate_bias[i], to_acc(up[i]) + up_bias[i], swish);
    y[i] = from_acc<T>(f.act.value * f.up * weight);
  }
}

template <Act kAct, class T>
PARALLEL_OPS_INLINE void backward_loop(const Tile<T>& t, const T* __restrict dy, T* __restrict dgate, T* __restrict dup,
                                       acc_t<T>* __restrict sum) {
  using A = acc_t<T>;
  const T* __restrict gate = t.gate, * __restrict up = t.up;
  const A* __restrict gate_bias = t.gate_bias, * __restrict up_bias = t.up_bias;
  const A weight = t.weight;
  const Swish<A> swish = t.swish;
  for (int64_t i = 0; i < t.n; ++i) {
    const A d = to_acc(dy[i]) * weight;
    const auto f = factors<kAct>(to_acc(gate[i]) + gate_bias[i], to_acc(up[i]) + up_bias[i], swish);
    const A dg = d * f.up * f.act.slope;
    const A du = d * f.act.value * f.up_slope;
    dgate[i] = from_acc<T>(dg);
    dup[i] = from_acc<T>(du);
    sum[i] += dg;
    sum[kTileCols + i] += du;
  }
}

// The tile's part of the gradient of the row's weight.
template <Act kAct, class T>
PARALLEL_OPS_INLINE acc_t<T> weight_gradient(const Tile<T>& t, const T* dy) {
  return sum_lanes<acc_t<T>>(t.n, [&](int64_t i) PARALLEL_OPS_LAMBDA {
    const auto f = factors<kAct>(to_acc(t.gate[i]) + t.gate_bias[i], to_acc(t.up[i]) + t.up_bias[i], t.swish);
    return to_acc(dy[i]) * f.act.value * f.up;
  });
}

}  // namespace parallel_ops::cpu
