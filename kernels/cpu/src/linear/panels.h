// Memory layout of weights in codes: panels of eight blocks of W columns, as a single row reads them. That is one
// stream, which the hardware prefetches in time.
//
// Cold weights, 4096 x 1024, one row, GB/s of codes for each of two busy threads of a Zen 4: blocks one after the other
// (eight streams of 4 to 8 KB each), prefetched 32 times 64 bytes ahead: 8 bits 16, 4 bits 15; without prefetch 25 and
// 19; panels of four blocks 29 and 23, of eight 31 and 30. Prefetching in panels, into L1 or L2, costs 5 to 30 %.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"

namespace quire {

constexpr int PANEL = 8;
constexpr int BYTES = 64;  // of a block at a time

struct Panel {
  int64_t block;  // its first
  int64_t width;  // blocks; fewer than PANEL in a last one
};

inline int64_t num_panels(int64_t blocks) { return (blocks + PANEL - 1) / PANEL; }

inline Panel panel_of(int64_t number, int64_t blocks) {
  return {number * PANEL, std::min<int64_t>(PANEL, blocks - number * PANEL)};
}

// piece(first row, rows, panel) of all panels and `row_block` rows at a time, which take `nanoseconds` together.
template <class Piece>
void for_pieces(int64_t rows, int64_t row_block, int64_t blocks, double nanoseconds, Piece piece) {
  const int64_t panels = num_panels(blocks), pieces = panels * ((rows + row_block - 1) / row_block);
  parallel_for(pieces, grain_for(pieces, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; number++) {
      const int64_t row = number / panels * row_block;
      piece(row, std::min(rows - row, row_block), panel_of(number % panels, blocks));
    }
  });
}

}  // namespace quire
