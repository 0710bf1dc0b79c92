// Matrix products in tiles of registers. Linear layers and attention's scores share this.
//
// Order of every sum, for any tile: out[m][n] adds its products over k from 0 up, one accumulator from beginning
// to end (one step is a pair of k for QUIRE_BF16_DOT). So a row has the same bits alone and in any batch.
#pragma once

#include "simd.h"

namespace quire {

// A tile walks over k in steps. One step of x is 4 bytes of a row; one step of w is W lanes, one for each output
// column.
struct FloatTile {  // x float32, w float32
  using Weight = float;
  static constexpr int K_PER_STEP = 1;
  using Lanes = vf;
  static QUIRE_INLINE Lanes load_w(const Weight* w) { return load(w); }
  static QUIRE_INLINE vf multiply_add(const char* x, Lanes w, vf sum) {
    float value;
    std::memcpy(&value, x, 4);
    return fma(splat(value), w, sum);
  }
};

struct WideTile : FloatTile {  // x float32 (widened beforehand), w bfloat16
  using Weight = bf16;
  static QUIRE_INLINE Lanes load_w(const Weight* w) { return load(w); }
};

#if defined(QUIRE_BF16_DOT)
struct DotTile {  // x bfloat16, w bfloat16 in pairs
  using Weight = uint32_t;
  static constexpr int K_PER_STEP = 2;
  using Lanes = __m512i;
  static QUIRE_INLINE Lanes load_w(const Weight* w) { return _mm512_loadu_si512(w); }
  static QUIRE_INLINE vf multiply_add(const char* x, Lanes w, vf sum) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
  }
};
using Bf16Tile = DotTile;
#else
using Bf16Tile = WideTile;
#endif

// Packed weights are blocks of W columns, one after the other; a block is [steps][W] of Weight. Columns past the last
// one and the second half of a last odd k are zero.

struct TileInput {
  const char* x;     // first row, first step
  int64_t x_stride;  // bytes from row to row
  int64_t steps;
};

// Adds `steps` steps to the sums of M rows and NV blocks, in place. Meanwhile it prefetches
// P blocks of the next weights, from `ahead` on.
template <class Tile, int M, int NV, int P = 0>
QUIRE_INLINE void accumulate(const TileInput& in, const typename Tile::Weight* w, int64_t block_stride,
                             vf (&sums)[M][NV], const typename Tile::Weight* ahead = nullptr) {
  const char* x = in.x;
  for (int64_t step = 0; step < in.steps; step++) {
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) __builtin_prefetch(ahead + p * block_stride + step * W, 0, 2);
    typename Tile::Lanes lanes[NV];
#pragma GCC unroll 32
    for (int n = 0; n < NV; n++) lanes[n] = Tile::load_w(w + n * block_stride);
#pragma GCC unroll 32
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 32
      for (int n = 0; n < NV; n++) sums[m][n] = Tile::multiply_add(x + m * in.x_stride, lanes[n], sums[m][n]);
    }
    w += W;
    x += 4;
  }
}

// Blocks that a tile of M rows covers: enough sums in flight to hide the latency of a multiply-add, few enough to leave
// registers for the operands.
constexpr int MAX_TILE_ROWS = REGISTERS == 32 ? 8 : 6;
constexpr int tile_blocks(int rows) {
  const int sums = REGISTERS == 32 ? 24 : 12;
  return sums / rows > 8 ? 8 : sums / rows;
}

}  // namespace quire
