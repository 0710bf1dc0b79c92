// Quantized weights in registers: codes of 4 or 8 bits become pairs of bfloat16 by looking them up, exactly.
//
// Packed like other weights (linear.h), in blocks of W output columns and steps of two k, 64 bytes at a time:
// - 4 bits: a 16-bit lane of the pair (column, k & 1) holds four steps, the first in its lowest bits. A permutation of
//   32 lanes reads five bits of its index, so a table of 16 values is stored twice and nothing is masked.
// - 8 bits: two steps; in each 128-bit lane four columns' pairs of the first, then of the second. The upper bit is the
//   sign, the others say which of 128 magnitudes: of an 8-bit float its own, of an integer c that of c + 0.5 (so that
//   -128 has one; the excess is subtracted with the zero point).
#pragma once

#include "panels.h"
#include "simd.h"

#if defined(QUIRE_BF16_DOT) && defined(__AVX512VBMI__)
#define QUIRE_CODES 1

namespace quire {

struct FourBits {
  static constexpr int STEPS = 4;  // of 64 bytes
  __m512i table;

  explicit FourBits(const uint16_t* values) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    table = _mm512_broadcast_i64x4(half);
  }
  QUIRE_INLINE void widen(__m512i codes, __m512i (&pairs)[STEPS]) const {
    pairs[0] = _mm512_permutexvar_epi16(codes, table);
    pairs[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    pairs[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
    pairs[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
  }
};

struct EightBits {
  static constexpr int STEPS = 2;
  __m512i low[2], high[2];  // halves of 128 magnitudes

  explicit EightBits(const uint16_t* values) {
    alignas(64) uint8_t bytes[2][128];
    for (int i = 0; i < 128; i++) {
      bytes[0][i] = static_cast<uint8_t>(values[i]);
      bytes[1][i] = static_cast<uint8_t>(values[i] >> 8);
    }
    for (int i = 0; i < 2; i++) {
      low[i] = _mm512_load_si512(bytes[0] + 64 * i);
      high[i] = _mm512_load_si512(bytes[1] + 64 * i);
    }
  }
  QUIRE_INLINE void widen(__m512i codes, __m512i (&pairs)[STEPS]) const {
    const __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    const __m512i upper = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i signed_upper = _mm512_ternarylogic_epi32(upper, codes, sign, 0xf8);  // upper | (codes & sign)
    pairs[0] = _mm512_unpacklo_epi8(lower, signed_upper);
    pairs[1] = _mm512_unpackhi_epi8(lower, signed_upper);
  }
};

}  // namespace quire
#endif
