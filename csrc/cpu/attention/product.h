// Small matrix products of what lies in the cache, in the arithmetic type: C (+)= A B by tiles of C that stay in
// registers.
//
// B comes in panels of kCols columns, each contiguous: panel[step][column]. A is read where it is, one element at a
// time, so it may be transposed. An engine defines one step of a product: a multiplication, or for bf16, where the
// processor has an instruction for it, two multiplications of neighbours that share a 32-bit word.
//
// Vectors are written as such, in GCC's and Clang's own types, because loops over arrays are not kept in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../dtype.h"

#if defined(PARALLEL_OPS_ARM_BF16)
#include <sys/auxv.h>
#endif

namespace parallel_ops::cpu {

// A step is a product in the arithmetic type, in vectors of kBytes; tiles of kTileRows x 2 vectors leave registers for
// what is multiplied, and are enough to hide the latency of additions. Tiles of keys have kTileKeys rows, which divide
// kCols.
template <class A, int kBytes, int64_t kTileRows, int64_t kTileKeys = kTileRows>
struct Plain {
  using Acc = A;
  using Elem = A;  // what operands are made of
  using In = A;    // what one step takes of them
  typedef A Vector __attribute__((vector_size(kBytes), may_alias));
  typedef A InVector __attribute__((vector_size(kBytes), may_alias));
  static constexpr int64_t kPerStep = 1, kLanes = kBytes / sizeof(A), kCols = 2 * kLanes, kRows = kTileRows;
  static constexpr int64_t kKeyRows = kTileKeys;

  PARALLEL_OPS_INLINE static Vector multiply_add(In a, InVector b, Vector sum) { return sum + a * b; }
  PARALLEL_OPS_INLINE static Elem round(A v) { return v; }
  PARALLEL_OPS_INLINE static In join(Elem first, Elem) { return first; }
};

#if defined(PARALLEL_OPS_X86_TARGETS) || defined(PARALLEL_OPS_ARM_BF16)
// A step multiplies two bf16 and their two neighbours and adds both to an fp32 sum. No plain code compiles to that
// instruction, which does twice the products of fp32.
template <int kBytes>
struct Bf16Pairs {
  using Acc = float;
  using Elem = uint16_t;
  using In = uint32_t;
  typedef float Vector __attribute__((vector_size(kBytes), may_alias));
  typedef uint32_t InVector __attribute__((vector_size(kBytes), may_alias));
  static constexpr int64_t kPerStep = 2, kLanes = kBytes / 4, kCols = 2 * kLanes, kRows = 8, kKeyRows = 8;

  PARALLEL_OPS_INLINE static Vector multiply_add(In a, InVector b, Vector sum) {
#if defined(PARALLEL_OPS_ARM_BF16)
    // As a float, so that it is loaded into the vector register that the instruction takes it from.
    asm("bfdot %0.4s, %1.8h, %2.2h[0]" : "+w"(sum) : "w"(b), "w"(bits_as<float>(a)));
#else
    const InVector all = a - InVector{};
    asm("vdpbf16ps %1, %2, %0" : "+v"(sum) : "v"(b), "v"(all));
#endif
    return sum;
  }
  PARALLEL_OPS_INLINE static Elem round(float v) { return from_acc<BFloat16>(v).x; }
  PARALLEL_OPS_INLINE static In join(Elem first, Elem second) { return first | static_cast<uint32_t>(second) << 16; }
};
#endif

// Every engine: M(name, target, the type). A function for one is compiled for its target. AVX2 has 16 registers: with
// 12 sums the products run at 117 GFLOP/s a core, with 8 at 109 (2026-11, EPYC, 96 x 384 x 192). NEON, which every
// aarch64 has, has 32 of 16 bytes: 16 sums keep its four multipliers busy.
#if defined(PARALLEL_OPS_X86_TARGETS)
#define PARALLEL_OPS_FOR_EACH_ENGINE(M)                      \
  M(kFp32, , Plain<float, 16, 4>)                            \
  M(kFp64, , Plain<double, 16, 4>)                           \
  M(kFp32V3, PARALLEL_OPS_X86_64_V3, Plain<float, 32, 6, 4>) \
  M(kFp32V4, PARALLEL_OPS_X86_64_V4, Plain<float, 64, 8>)    \
  M(kBf16, PARALLEL_OPS_X86_64_V4, Bf16Pairs<64>)
#elif defined(PARALLEL_OPS_ARM_BF16)
#define PARALLEL_OPS_FOR_EACH_ENGINE(M) \
  M(kFp32, , Plain<float, 16, 8>)       \
  M(kFp64, , Plain<double, 16, 4>)      \
  M(kBf16, PARALLEL_OPS_ARM_BF16, Bf16Pairs<16>)
#elif defined(__AVX512F__)
#define PARALLEL_OPS_FOR_EACH_ENGINE(M) \
  M(kFp32, , Plain<float, 64, 8>)       \
  M(kFp64, , Plain<double, 16, 4>)
#elif defined(__AVX2__)
#define PARALLEL_OPS_FOR_EACH_ENGINE(M) \
  M(kFp32, , Plain<float, 32, 6, 4>)    \
  M(kFp64, , Plain<double, 16, 4>)
#else
#define PARALLEL_OPS_FOR_EACH_ENGINE(M) \
  M(kFp32, , Plain<float, 16, 4>)       \
  M(kFp64, , Plain<double, 16, 4>)
#endif

#define PARALLEL_OPS_NAME(NAME, ...) NAME,
enum class Engine { PARALLEL_OPS_FOR_EACH_ENGINE(PARALLEL_OPS_NAME) };
#undef PARALLEL_OPS_NAME

inline Engine engine_for(ScalarType dtype) {
  if (dtype == ScalarType::Double) return Engine::kFp64;
#if defined(PARALLEL_OPS_X86_TARGETS)
  static const bool v4 = __builtin_cpu_supports("x86-64-v4"), v3 = __builtin_cpu_supports("x86-64-v3");
  static const bool bf16 = v4 && __builtin_cpu_supports("avx512bf16");
  if (dtype == ScalarType::BFloat16 && bf16) return Engine::kBf16;
  if (v4) return Engine::kFp32V4;
  if (v3) return Engine::kFp32V3;
#elif defined(PARALLEL_OPS_ARM_BF16)
  static const bool bf16 = getauxval(AT_HWCAP2) & (1ul << 14);  // HWCAP2_BF16, since Linux 5.7
  if (dtype == ScalarType::BFloat16 && bf16) return Engine::kBf16;
#endif
  return Engine::kFp32;
}

// kRows x kVectors vectors of C from `steps` steps. A's element of row i in step k is a[i * a_row + k * a_step].
template <class E, bool kAdd, int kVectors, int kRows = E::kRows>
PARALLEL_OPS_INLINE void product_tile(const typename E::In* a, int64_t a_row, int64_t a_step, const typename E::In* b,
                                      int64_t steps, typename E::Acc* c, int64_t c_row) {
  using Vector = typename E::Vector;
  using InVector = typename E::InVector;
  Vector sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) sum[i][j] = Vector{};
  }
  for (int64_t k = 0; k < steps; ++k) {
    InVector right[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) right[j] = *reinterpret_cast<const InVector*>(b + k * E::kCols + j * E::kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const typename E::In left = a[i * a_row + k * a_step];
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = E::multiply_add(left, right[j], sum[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      Vector* to = reinterpret_cast<Vector*>(c + i * c_row + j * E::kLanes);
      *to = kAdd ? *to + sum[i][j] : sum[i][j];
    }
  }
}

// The same for a tile that C has whole or, at its right edge, half.
template <class E, bool kAdd, int kRows = E::kRows>
PARALLEL_OPS_INLINE void product(const typename E::In* a, int64_t a_row, int64_t a_step, const typename E::In* b,
                                 int64_t steps, typename E::Acc* c, int64_t c_row, int64_t cols) {
  if (cols >= E::kCols) {
    product_tile<E, kAdd, 2, kRows>(a, a_row, a_step, b, steps, c, c_row);
  } else {
    product_tile<E, kAdd, 1, kRows>(a, a_row, a_step, b, steps, c, c_row);
  }
}

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// B = X^T for rows X [n, width]: panels of kCols rows, zero past the last row.
template <class E>
PARALLEL_OPS_INLINE void pack_transposed(const typename E::Elem* x, int64_t n, int64_t width, int64_t row,
                                         typename E::In* __restrict panels) {
  const auto* words = reinterpret_cast<const typename E::In*>(x);
  const int64_t steps = round_up(width, E::kPerStep) / E::kPerStep, stride = row / E::kPerStep;
  for (int64_t first = 0; first < n; first += E::kCols) {
    const int64_t cols = std::min(E::kCols, n - first);
    for (int64_t k = 0; k < steps; ++k, panels += E::kCols) {
      for (int64_t c = 0; c < cols; ++c) panels[c] = words[(first + c) * stride + k];
      for (int64_t c = cols; c < E::kCols; ++c) panels[c] = 0;
    }
  }
}

// B = X for rows X [n, row], n a multiple of kPerStep and row of kLanes: panels of kCols columns.
template <class E>
PARALLEL_OPS_INLINE void pack_panels(const typename E::Elem* __restrict x, int64_t n, int64_t row,
                                     typename E::In* __restrict panels) {
  for (int64_t first = 0; first < row; first += E::kCols) {
    const int64_t cols = std::min(E::kCols, row - first);
    for (int64_t i = 0; i < n; i += E::kPerStep, panels += E::kCols) {
      const typename E::Elem* one = x + i * row + first;
      const typename E::Elem* two = one + (E::kPerStep - 1) * row;
      for (int64_t c = 0; c < cols; ++c) panels[c] = E::join(one[c], two[c]);
    }
  }
}

}  // namespace parallel_ops::cpu
