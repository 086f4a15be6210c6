// Philox4x32-10 (Salmon et al., SC 2011, doi:10.1145/2063384.2063405), the generator behind every dropout.
//
// The key is the seed; the counter is the global index of an element divided by 4, and the element takes output
// word (index & 3). So whether an element is dropped depends on the seed and its place in the whole tensor,
// and not on threads, tiles, shards or device.
#pragma once

#include <cstdint>

#include "rows.h"

namespace parallel_ops::cpu {

struct Philox {
  uint32_t c0, c1, c2, c3;
};

// 32 by 32 to 64 bit products, which compilers vectorise (GCC 12: vpmuludq for AVX2, vpmullq for AVX-512; both near
// 1 ns an element on one 2 GHz Xeon core, 2026-11).
PARALLEL_OPS_INLINE Philox philox_round(Philox c, uint32_t k0, uint32_t k1) {
  const uint64_t a = static_cast<uint64_t>(c.c0) * 0xD2511F53u;
  const uint64_t b = static_cast<uint64_t>(c.c2) * 0xCD9E8D57u;
  return {static_cast<uint32_t>(b >> 32) ^ c.c1 ^ k0, static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ c.c3 ^ k1, static_cast<uint32_t>(a)};
}

template <int kRounds>
PARALLEL_OPS_INLINE Philox philox_rounds(Philox c, uint32_t k0, uint32_t k1) {
  if constexpr (kRounds == 0) {
    return c;
  } else {
    return philox_rounds<kRounds - 1>(philox_round(c, k0, k1), k0 + 0x9E3779B9u, k1 + 0xBB67AE85u);
  }
}

// The words of a tile: up to three before its first element, and whole vectors of 16 counters.
constexpr int64_t kPhiloxLanes = 16;
struct PhiloxWords {
  alignas(64) uint32_t data[kTileCols + 2 * 4 * kPhiloxLanes];
};

// Fills `words` and gives the words of elements index, index + 1, ..., index + n - 1.
PARALLEL_OPS_INLINE const uint32_t* philox_words(uint64_t seed, uint64_t index, int64_t n, PhiloxWords& words) {
  const uint64_t first = index >> 2;
  const auto lead = static_cast<int64_t>(index & 3);
  const auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  const auto lo = static_cast<uint32_t>(first), hi = static_cast<uint32_t>(first >> 32);
  const int64_t blocks = ceil_div(lead + n, 4 * kPhiloxLanes);
  uint32_t* __restrict out = words.data;
  for (int64_t i = 0; i < blocks * kPhiloxLanes; ++i) {
    const uint32_t c0 = lo + static_cast<uint32_t>(i);
    const uint32_t c1 = hi + (c0 < lo ? 1u : 0u);
    const Philox r = philox_rounds<10>({c0, c1, 0, 0}, k0, k1);
    out[4 * i] = r.c0;
    out[4 * i + 1] = r.c1;
    out[4 * i + 2] = r.c2;
    out[4 * i + 3] = r.c3;
  }
  return out + lead;
}

}  // namespace parallel_ops::cpu
