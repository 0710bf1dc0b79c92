// Small matrix products inside attention: any number of rows against a few blocks of packed weights (linear.h).
#pragma once

#include "linear.h"

namespace quire {

struct Product {
  const char* x;  // rows of steps, as in TileInput
  int64_t x_stride, rows, steps;
  int64_t block_stride;  // stride of weight blocks, in Weight
  float* out;            // [rows][out_stride], out_stride >= blocks * W
  int64_t out_stride;
  const float* shrink;  // null: out = product; else out[row] = out[row] * shrink[row] + product
};

constexpr int PRODUCT_ROWS = 6;

template <class Tile, int M, int NV>
QUIRE_INLINE void product_tile(const Product& p, const typename Tile::Weight* w, int64_t row, int64_t block) {
  vf sums[M][NV] = {};
  float* out = p.out + row * p.out_stride + block * W;
  if (p.shrink) {
#pragma GCC unroll 32
    for (int i = 0; i < M * NV; i++)
      sums[i / NV][i % NV] = load(out + i / NV * p.out_stride + i % NV * W) * splat(p.shrink[row + i / NV]);
  }
  accumulate<Tile, M, NV>({p.x + row * p.x_stride, p.x_stride, p.steps}, w + block * p.block_stride, p.block_stride,
                          sums);
#pragma GCC unroll 32
  for (int i = 0; i < M * NV; i++) store(out + i / NV * p.out_stride + i % NV * W, sums[i / NV][i % NV]);
}

template <class Tile, int M, int NV = REGISTERS == 32 ? 4 : 2>
void product_rows(const Product& p, const typename Tile::Weight* w, int64_t row, int64_t blocks, int64_t block = 0) {
  for (; block + NV <= blocks; block += NV) product_tile<Tile, M, NV>(p, w, row, block);
  if constexpr (NV > 1) product_rows<Tile, M, NV / 2>(p, w, row, blocks, block);
}

template <class Tile>
void multiply(const Product& p, const typename Tile::Weight* w, int64_t blocks) {
  for (int64_t row = 0; row < p.rows;) {
    const int64_t rows = p.rows - row < PRODUCT_ROWS ? p.rows - row : PRODUCT_ROWS;
    switch (rows) {
      case 1: product_rows<Tile, 1>(p, w, row, blocks); break;
      case 2: product_rows<Tile, 2>(p, w, row, blocks); break;
      case 3: product_rows<Tile, 3>(p, w, row, blocks); break;
      case 4: product_rows<Tile, 4>(p, w, row, blocks); break;
      case 5: product_rows<Tile, 5>(p, w, row, blocks); break;
      default: product_rows<Tile, PRODUCT_ROWS>(p, w, row, blocks);
    }
    row += rows;
  }
}

}  // namespace quire
