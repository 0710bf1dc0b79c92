// Gumbel noise as a function of (seed, position, token): as defined in kernels/reference/sampling/noise.py.
#pragma once

#include "simd.h"

namespace quire {

template <class Word>
QUIRE_INLINE Word mix(Word h) {
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

struct NoiseKeys {
  uint32_t key0, key1;
  NoiseKeys(int64_t seed, int32_t position) {
    const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
    const uint32_t at = static_cast<uint32_t>(position);
    key0 = mix(mix(mix(low ^ 0x9E3779B9u) ^ high) ^ at);
    key1 = mix(mix(mix(high ^ 0x7F4A7C15u) ^ low) ^ at);
  }
};

// In (0, 1).
QUIRE_INLINE vf uniform_of(const NoiseKeys& keys, vu tokens) {
  const vu words = mix<vu>(mix<vu>(tokens * 0x9E3779B1u + keys.key0) ^ keys.key1);
  return min(__builtin_convertvector(words, vf) * 0x1p-32f + 0x1p-33f, splat(1.0f - 0x1p-24f));
}

// -log(-log1p(-v)). It never exceeds -log(v).
QUIRE_INLINE vf gumbel_of(vf v) {
  // -log1p(-v): up to 1 - sqrt(1/2) the reduced form takes -v as it is and loses no bits; above, 1 - v keeps enough.
  const vf small = log1p_reduced(min(v, splat(0.2928932f)) * -1.0f);
  const vf exponential = -(v <= splat(0.2928932f) ? small : log(1.0f - v));
  return -log(exponential);
}

}  // namespace quire
