// Element types: conversion to the arithmetic type and back, and dispatch on a tensor's dtype.
//
// Arithmetic is fp32 for fp32, fp16 and bf16, and fp64 for fp64. Conversions are written on bits so that
// the compiler vectorises them for every target without intrinsics.
#pragma once

#include <cstdint>
#include <cstring>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../error.h"

#define PARALLEL_OPS_INLINE inline __attribute__((always_inline))

namespace parallel_ops::cpu {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class To, class From>
PARALLEL_OPS_INLINE To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &value, sizeof(out));
  return out;
}

PARALLEL_OPS_INLINE float to_acc(float v) { return v; }
PARALLEL_OPS_INLINE double to_acc(double v) { return v; }
PARALLEL_OPS_INLINE float to_acc(BFloat16 v) { return bits_as<float>(static_cast<uint32_t>(v.x) << 16); }
PARALLEL_OPS_INLINE float to_acc(Half v) {
#if defined(__aarch64__) && defined(__linux__)
  return static_cast<float>(bits_as<__fp16>(v.x));  // NEON has the instruction
#else
  const uint32_t sign = static_cast<uint32_t>(v.x & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(v.x & 0x7fffu) << 13;
  // The exponent is biased by 112 less than fp32's. A subnormal borrows a leading one and gives it back; read as
  // an fp32 subnormal it could cost x86 a microcode trap, and half the values of a softmax row can be subnormal.
  const float subnormal = bits_as<float>(magnitude + 0x38800000u) - bits_as<float>(0x38800000u);
  const uint32_t finite = magnitude < 0x00800000u ? bits_as<uint32_t>(subnormal) : magnitude + 0x38000000u;
  const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
  return bits_as<float>(sign | bits);
#endif
}

// Round to nearest, ties to even; NaN stays NaN.
template <class T>
PARALLEL_OPS_INLINE T from_acc(float v);
template <class T>
PARALLEL_OPS_INLINE T from_acc(double v);

template <>
PARALLEL_OPS_INLINE float from_acc<float>(float v) {
  return v;
}
template <>
PARALLEL_OPS_INLINE double from_acc<double>(double v) {
  return v;
}
template <>
PARALLEL_OPS_INLINE BFloat16 from_acc<BFloat16>(float v) {
  const uint32_t bits = bits_as<uint32_t>(v);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t out = v != v ? 0x7fc0u : rounded;
  return BFloat16(static_cast<uint16_t>(out), BFloat16::from_bits());
}
template <>
PARALLEL_OPS_INLINE Half from_acc<Half>(float v) {
  const uint32_t bits = bits_as<uint32_t>(v);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  // Adding 0.5 aligns a subnormal result's last bit with fp32's and lets the addition do the rounding.
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t out = magnitude < 0x38800000u ? subnormal : normal;
  out = magnitude >= 0x477ff000u ? 0x7c00u : out;
  out = magnitude > 0x7f800000u ? 0x7e00u : out;
  return Half(static_cast<uint16_t>(sign | out), Half::from_bits());
}

template <class T>
struct acc_type {
  using type = float;
};
template <>
struct acc_type<double> {
  using type = double;
};
template <class T>
using acc_t = typename acc_type<T>::type;

// Calls f with a value of the element type of `dtype`: dispatch("op", t.scalar_type(), [&](auto tag) {...}).
template <class F>
void dispatch(const char* op, ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Double:
      return f(double{});
    case ScalarType::Half:
      return f(Half{});
    case ScalarType::BFloat16:
      return f(BFloat16{});
    default:
      PARALLEL_OPS_CHECK(false, op, ": expected float32, float64, float16 or bfloat16, got ",
                         torch::headeronly::toString(dtype));
  }
}

}  // namespace parallel_ops::cpu

// Compiles the function for several instruction sets; the loader picks one when the library is loaded.
// A body that calls only PARALLEL_OPS_INLINE functions is compiled whole for each of them.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define PARALLEL_OPS_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// The same by hand, for code that is written for the width of the registers.
#define PARALLEL_OPS_X86_TARGETS
#define PARALLEL_OPS_X86_64_V4 __attribute__((target("arch=x86-64-v4")))
#define PARALLEL_OPS_X86_64_V3 __attribute__((target("arch=x86-64-v3")))
#else
#define PARALLEL_OPS_MULTIVERSION
#endif
// NEON is in every aarch64; Neoverse V1, N2 and later (Grace among them) have products of bf16 too.
#if defined(__aarch64__) && defined(__linux__) && defined(__GNUC__)
#if defined(__clang__)
#define PARALLEL_OPS_ARM_BF16 __attribute__((target("bf16")))
#else
#define PARALLEL_OPS_ARM_BF16 __attribute__((target("+bf16")))
#endif
#endif

// M(T) for every element type: multiversioned functions cannot be templates, so each op lists its own.
#define PARALLEL_OPS_FOR_EACH_DTYPE(M) \
  M(float)                             \
  M(double)                            \
  M(Half)                              \
  M(BFloat16)
