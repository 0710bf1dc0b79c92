// Rows to lanes: W rows of 4-byte words become steps of W lanes, the layout that tiles multiply with (linear.h).
#pragma once

#include <utility>

#include "simd.h"

namespace quire {

// One round: exchanges, between rows whose numbers differ in bit S, the lanes that differ from them in bit S.
template <int S, int... Lane>
QUIRE_INLINE void exchange(vu& a, vu& b, std::integer_sequence<int, Lane...>) {
  const vu low = __builtin_shufflevector(a, b, ((Lane & S) ? Lane - S + W : Lane)...);
  const vu high = __builtin_shufflevector(a, b, ((Lane & S) ? Lane + W : Lane + S)...);
  a = low;
  b = high;
}

template <int S = W / 2>
QUIRE_INLINE void transpose(vu (&rows)[W]) {
#pragma GCC unroll 16
  for (int i = 0; i < W; i++)
    if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, W>());
  if constexpr (S > 1) transpose<S / 2>(rows);
}

// rows: W pointers to row_bytes each; null reads as zeros. to: [ceil(row_bytes / 4)][W], zero where a last word is not
// full.
inline void transpose_rows(const char* const* rows, int64_t row_bytes, uint32_t* to) {
  for (int64_t done = 0; done < row_bytes; done += W * 4) {
    const int64_t bytes = row_bytes - done < W * 4 ? row_bytes - done : W * 4;
    vu words[W];
    if (bytes == W * 4) {
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        words[i] = vu{};
        if (rows[i]) std::memcpy(&words[i], rows[i] + done, W * 4);
      }
    } else {
      for (int i = 0; i < W; i++) {
        words[i] = vu{};
        if (rows[i]) std::memcpy(&words[i], rows[i] + done, bytes);
      }
    }
    transpose(words);
    const int steps = static_cast<int>((bytes + 3) / 4);
    if (steps == W) {
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) std::memcpy(to + i * W, &words[i], W * 4);
    } else {
      for (int i = 0; i < steps; i++) std::memcpy(to + i * W, &words[i], W * 4);
    }
    to += W * W;
  }
}

}  // namespace quire
