// Rows to lanes: W rows of 4-byte words become steps of W lanes, the layout that tiles multiply with (linear.h).
#pragma once

#include <utility>

#include "simd.h"

namespace quire {

// One round: swaps lanes that differ in bit S between rows whose indices differ in bit S.
template <int S, int... Lane>
QUIRE_INLINE void exchange(vu& a, vu& b, std::integer_sequence<int, Lane...>) {
  const vu low = __builtin_shufflevector(a, b, ((Lane & S) ? Lane - S + W : Lane)...);
  const vu high = __builtin_shufflevector(a, b, ((Lane & S) ? Lane + W : Lane + S)...);
  a = low;
  b = high;
}

template <int S = W / 2>
QUIRE_INLINE void transpose(vu (&rows)[W]) {
#pragma GCC unroll 32
  for (int i = 0; i < W; i++)
    if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, W>());
  if constexpr (S > 1) transpose<S / 2>(rows);
}

#if defined(QUIRE_AVX512)
// The same in shuffles of one source register each way: 64 of them, where the rounds above take 64 permutes with an
// index register (16 x 16 words in L1: 75 cycles instead of 140).
template <>
QUIRE_INLINE void transpose<W / 2>(vu (&rows)[W]) {
  __m512i a[W], b[W];
#pragma GCC unroll 32
  for (int i = 0; i < W; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
  }
#pragma GCC unroll 32
  for (int i = 0; i < W; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 32
  for (int i = 0; i < 4; i++) {
    const __m512i even = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), odd = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    const __m512i even2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    const __m512i odd2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    rows[i] = (vu)_mm512_shuffle_i32x4(even, even2, 0x88);
    rows[i + 4] = (vu)_mm512_shuffle_i32x4(odd, odd2, 0x88);
    rows[i + 8] = (vu)_mm512_shuffle_i32x4(even, even2, 0xdd);
    rows[i + 12] = (vu)_mm512_shuffle_i32x4(odd, odd2, 0xdd);
  }
}
#endif

#if defined(QUIRE_BF16_DOT)
typedef uint16_t Halves __attribute__((vector_size(W * 4)));

// Interleaves values FIRST to FIRST + W of two rows.
template <int FIRST, int... I>
QUIRE_INLINE void put_pairs(Halves row, Halves other, uint32_t* to, std::integer_sequence<int, I...>) {
  const Halves pairs = __builtin_shufflevector(row, other, (FIRST + I / 2 + (I & 1) * 2 * W)...);
  std::memcpy(to, &pairs, sizeof(pairs));
}

// 2 * W values of two rows, as pairs: the first W to `low`, the others to `high`.
QUIRE_INLINE void put_pairs(const bf16* row, const bf16* other, uint32_t* low, uint32_t* high) {
  Halves a, b;
  std::memcpy(&a, row, sizeof(a));
  std::memcpy(&b, other, sizeof(b));
  put_pairs<0>(a, b, low, std::make_integer_sequence<int, 2 * W>());
  put_pairs<W>(a, b, high, std::make_integer_sequence<int, 2 * W>());
}
#endif

// rows: W pointers to row_bytes each. to: [ceil(row_bytes / 4)][W], zero where a last word is not full.
QUIRE_INLINE void transpose_rows(const char* const* rows, int64_t row_bytes, uint32_t* to) {
  int64_t done = 0;
  for (; done + W * 4 <= row_bytes; done += W * 4, to += W * W) {
    vu words[W];
#pragma GCC unroll 32
    for (int i = 0; i < W; i++) std::memcpy(&words[i], rows[i] + done, W * 4);
    transpose(words);
#pragma GCC unroll 32
    for (int i = 0; i < W; i++) std::memcpy(to + i * W, &words[i], W * 4);
  }
  if (done == row_bytes) return;
  vu words[W] = {};
  for (int i = 0; i < W; i++) std::memcpy(&words[i], rows[i] + done, row_bytes - done);
  transpose(words);
  for (int i = 0; i < (row_bytes - done + 3) / 4; i++) std::memcpy(to + i * W, &words[i], W * 4);
}

}  // namespace quire
