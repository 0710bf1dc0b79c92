// y = x @ weight.T + bias with x in bfloat16 and the weight in 4-bit or 8-bit codes (codes.h) with a scale and an
// optional zero point per group of a row.
//
// Order of every sum, for any tile: a group adds its products over k from 0 up, in one accumulator; groups are added
// from the first to the last, each times its scale. So a row has the same bits alone and in any batch.
#include "codes.h"

#include <algorithm>

#include "api.h"
#include "linear.h"
#include "panels.h"
#include "parallel.h"
#include "tape.h"

#if defined(QUIRE_CODES)
namespace quire {
namespace {

constexpr int64_t ROW_BLOCK = 128;   // rows whose sums stay in the cache while k advances
constexpr int64_t TILE_ROWS = 3;     // with all blocks of a panel: the sums fill the registers
constexpr int64_t FEW_ROWS = 8;      // up to here tiles pass over the panel in turn; it stays in L2
constexpr int64_t CHUNK_STEPS = 32;  // steps of a panel dequantized at once for more rows: 16 KB stay in L1
constexpr int TALL_BLOCKS = 4;       // blocks of those at a time
constexpr int64_t TALL_ROWS = 6;     // with them: the sums fill the registers

struct Quantized {
  int64_t rows, in_features, out_features, group;  // group: columns that share a scale
  const bf16* x;
  const uint8_t* codes;   // [panels][in_features / 2 / STEPS][blocks of the panel][BYTES]
  const float* scales;    // [panels][groups][blocks of the panel][W]
  const float* zeros;     // of the same shape, or null: all are `zero`
  float zero;
  const uint16_t* table;  // bfloat16: 16 values, or 128 magnitudes
  const bf16* bias;
  bf16* y;
};

template <class Codes>
class QuantizedLayer {
 public:
  QuantizedLayer(const Quantized& q, const float* sums_of_x)
      : q_(q), codes_(q.table), x_sums_(sums_of_x), groups_(q.in_features / q.group), steps_(q.group / 2) {
    units_ = q.in_features / 2 / Codes::STEPS;
    blocks_ = (q.out_features + W - 1) / W;
  }

  void run() const {
    const double bytes = double(blocks_) * units_ * BYTES;
    const double products = double(q_.rows) * blocks_ * W * q_.in_features;
    const double nanoseconds = std::max(bytes / 55, products / 200);
    for_pieces(q_.rows, ROW_BLOCK, blocks_, nanoseconds,
               [&](int64_t row, int64_t rows, const Panel& panel) { run_piece(row, rows, panel); });
  }

 private:
  const uint8_t* codes_of(const Panel& panel, int64_t unit, int64_t block) const {
    return q_.codes + (panel.block * units_ + unit * panel.width + block) * BYTES;
  }

  void run_piece(int64_t row, int64_t rows, const Panel& panel) const {
    if (rows > FEW_ROWS) return tall_panel(row, rows, panel);
    const int64_t count = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t tile = 0; tile < count; tile++) {
      const int64_t first = rows * tile / count, height = rows * (tile + 1) / count - first;
      switch (height) {
        case 1: tiles<1, PANEL>(row + first, panel); break;
        case 2: tiles<2, PANEL>(row + first, panel); break;
        default: tiles<TILE_ROWS, PANEL>(row + first, panel);
      }
    }
  }

  template <int M, int NV>
  void tiles(int64_t row, const Panel& panel, int64_t block = 0) const {  // from `block` on
    for (; block + NV <= panel.width; block += NV) tile<M, NV>(row, panel, block);
    if constexpr (NV > 1) tiles<M, NV / 2>(row, panel, block);
  }

  // Few rows: codes are dequantized where they are multiplied.
  template <int M, int NV>
  void tile(int64_t row, const Panel& panel, int64_t block) const {
    vf totals[M][NV] = {};
    const char* x = reinterpret_cast<const char*>(q_.x + row * q_.in_features);
    const int64_t stride = q_.in_features * sizeof(bf16);
    const uint8_t* codes = codes_of(panel, 0, block);
    for (int64_t group = 0; group < groups_; group++) {
      vf sums[M][NV] = {};
      for (int64_t step = 0; step < steps_; step += Codes::STEPS) {
#pragma GCC unroll 32
        for (int n = 0; n < NV; n++) {
          __m512i pairs[Codes::STEPS];
          codes_.widen(_mm512_loadu_si512(codes + n * BYTES), pairs);
#pragma GCC unroll 32
          for (int s = 0; s < Codes::STEPS; s++) {
#pragma GCC unroll 32
            for (int m = 0; m < M; m++)
              sums[m][n] = DotTile::multiply_add(x + m * stride + s * 4, pairs[s], sums[m][n]);
          }
        }
        codes += panel.width * BYTES;
        x += Codes::STEPS * 4;
      }
#pragma GCC unroll 32
      for (int m = 0; m < M; m++) {
#pragma GCC unroll 32
        for (int n = 0; n < NV; n++) totals[m][n] = with_group(totals[m][n], sums[m][n], row + m, panel, block + n, group);
      }
    }
#pragma GCC unroll 32
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 32
      for (int n = 0; n < NV; n++) finish(totals[m][n], row + m, panel.block + block + n);
    }
  }

  // More rows: a part of a group is dequantized once, and all rows pass over it while it is in L1 and the next part is
  // prefetched.
  void tall_panel(int64_t row, int64_t rows, const Panel& panel) const {
    float* waiting = static_cast<float*>(scratch(1, 2 * rows * PANEL * W * sizeof(float)));
    float* totals = waiting + rows * PANEL * W;
    uint32_t* wide = static_cast<uint32_t*>(scratch(4, PANEL * CHUNK_STEPS * W * sizeof(uint32_t)));
    std::memset(totals, 0, rows * PANEL * W * sizeof(float));
    for (int64_t group = 0; group < groups_; group++) {
      for (int64_t step = 0; step < steps_; step += CHUNK_STEPS) {
        const int64_t count = std::min(CHUNK_STEPS, steps_ - step);
        Piece piece{panel, group, group * steps_ + step, count, step == 0, step + count == steps_, nullptr, 0};
        piece.ahead = widen_chunk(piece, wide);
        piece.lines_ahead = count / Codes::STEPS * panel.width;
        int64_t block = 0;
        for (; block + TALL_BLOCKS <= panel.width; block += TALL_BLOCKS)
          chunk_tiles<TALL_BLOCKS>(row, rows, piece, block, wide, waiting, totals);
        for (; block < panel.width; block++) chunk_tiles<1>(row, rows, piece, block, wide, waiting, totals);
      }
    }
    for (int64_t m = 0; m < rows; m++)
      for (int64_t n = 0; n < panel.width; n++) finish(load(totals + (m * PANEL + n) * W), row + m, panel.block + n);
  }

  struct Piece {
    Panel panel;
    int64_t group;
    int64_t step, count;  // steps of the row
    bool first, last;     // first or last part of its group
    const uint8_t* ahead;  // next codes
    int64_t lines_ahead;   // cache lines of them that are not prefetched yet
  };

  // Returns the address of the next part's codes.
  const uint8_t* widen_chunk(const Piece& piece, uint32_t* wide) const {
    const uint8_t* codes = codes_of(piece.panel, piece.step / Codes::STEPS, 0);
    for (int64_t i = 0; i < piece.count; i += Codes::STEPS) {
      for (int64_t n = 0; n < piece.panel.width; n++, codes += BYTES) {
        __m512i pairs[Codes::STEPS];
        codes_.widen(_mm512_loadu_si512(codes), pairs);
#pragma GCC unroll 32
        for (int s = 0; s < Codes::STEPS; s++) _mm512_storeu_si512(wide + (n * CHUNK_STEPS + i + s) * W, pairs[s]);
      }
    }
    return codes;
  }

  template <int NV>
  void chunk_tiles(int64_t row, int64_t rows, Piece& piece, int64_t block, const uint32_t* wide, float* waiting,
                   float* totals) const {
    const int64_t tiles = (rows + TALL_ROWS - 1) / TALL_ROWS;
    wide += block * CHUNK_STEPS * W;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t first = rows * tile / tiles, height = rows * (tile + 1) / tiles - first;
      const int64_t place = (first * PANEL + block) * W;
      switch (height) {  // an even split leaves no smaller tile
        case 3: chunk_tile<3, NV>(row + first, piece, block, wide, waiting + place, totals + place); break;
        case 5: chunk_tile<5, NV>(row + first, piece, block, wide, waiting + place, totals + place); break;
        case 6: chunk_tile<6, NV>(row + first, piece, block, wide, waiting + place, totals + place); break;
        default: chunk_tile<4, NV>(row + first, piece, block, wide, waiting + place, totals + place);
      }
    }
  }

  template <int M, int NV>
  void chunk_tile(int64_t row, Piece& piece, int64_t block, const uint32_t* wide, float* waiting,
                  float* totals) const {
    constexpr int64_t ROW = PANEL * W;
    vf sums[M][NV] = {};
    if (!piece.first) {
#pragma GCC unroll 32
      for (int i = 0; i < M * NV; i++) sums[i / NV][i % NV] = load(waiting + i / NV * ROW + i % NV * W);
    }
    const char* x = reinterpret_cast<const char*>(q_.x + row * q_.in_features + 2 * piece.step);
    const TileInput in{x, int64_t(q_.in_features * sizeof(bf16)), piece.count};
    if (piece.lines_ahead > 0) {
      accumulate<DotTile, M, NV, 1>(in, wide, CHUNK_STEPS * W, sums, reinterpret_cast<const uint32_t*>(piece.ahead));
      piece.ahead += piece.count * BYTES, piece.lines_ahead -= piece.count;
    } else {
      accumulate<DotTile, M, NV>(in, wide, CHUNK_STEPS * W, sums);
    }
    if (!piece.last) {
#pragma GCC unroll 32
      for (int i = 0; i < M * NV; i++) store(waiting + i / NV * ROW + i % NV * W, sums[i / NV][i % NV]);
      return;
    }
#pragma GCC unroll 32
    for (int i = 0; i < M * NV; i++) {
      float* total = totals + i / NV * ROW + i % NV * W;
      store(total, with_group(load(total), sums[i / NV][i % NV], row + i / NV, piece.panel, block + i % NV, piece.group));
    }
  }

  QUIRE_INLINE vf with_group(vf total, vf sum, int64_t row, const Panel& panel, int64_t block, int64_t group) const {
    const int64_t place = (panel.block * groups_ + group * panel.width + block) * W;
    if (x_sums_) {
      const vf zeros = q_.zeros ? load(q_.zeros + place) : splat(q_.zero);
      sum = fma(splat(-x_sums_[row * groups_ + group]), zeros, sum);
    }
    return fma(load(q_.scales + place), sum, total);
  }

  QUIRE_INLINE void finish(vf total, int64_t row, int64_t block) const {
    const int64_t column = block * W;
    const int lanes = static_cast<int>(std::min<int64_t>(W, q_.out_features - column));
    if (q_.bias) total = total + load_part(q_.bias + column, lanes);
    store_part(q_.y + row * q_.out_features + column, total, lanes);
  }

  const Quantized q_;
  const Codes codes_;
  const float* x_sums_;  // [rows][groups], or null: no zero points
  int64_t blocks_, units_, groups_, steps_;
};

// Sums of x's elements by group.
const float* sums_of(const Quantized& q) {
  const int64_t groups = q.in_features / q.group;
  float* sums = static_cast<float*>(scratch(2, q.rows * groups * sizeof(float)));
  for (int64_t i = 0; i < q.rows * groups; i++) {
    vf sum = {};
    for (int64_t k = 0; k < q.group; k += W) sum = sum + load(q.x + i * q.group + k);
    sums[i] = sum_lanes(sum);
  }
  return sums;
}

const bf16* in_order(int64_t rows, int64_t in_features, const bf16* x, const int32_t* order) {
  if (!order) return x;
  bf16* copy = static_cast<bf16*>(scratch(0, rows * in_features * sizeof(bf16)));
  for (int64_t m = 0; m < rows; m++)
    for (int64_t k = 0; k < in_features; k++) copy[m * in_features + k] = x[m * in_features + order[k]];
  return copy;
}

}  // namespace
}  // namespace quire
#endif

using namespace quire;

// Returns whether this build supports the conversion of codes.
QUIRE_API int64_t quire_has_codes() {
#if defined(QUIRE_CODES)
  return W;
#else
  return 0;
#endif
}

// x [rows, in_features]; order: element of x for each column, or null. in_features and group: multiples of
// 32. codes, scales, zeros, zero, table: as Quantized says, packed by quantized_layers.py.
QUIRE_API void quire_quantized_linear(int64_t bits, int64_t rows, int64_t in_features, int64_t out_features,
                                      int64_t group, double zero, const void* x, const void* order, const void* codes,
                                      const void* scales, const void* zeros, const void* table, const void* bias,
                                      void* y) {
#if defined(QUIRE_CODES)
  if (rows == 0) return;
  const Quantized q{rows,
                    in_features,
                    out_features,
                    group,
                    in_order(rows, in_features, static_cast<const bf16*>(x), static_cast<const int32_t*>(order)),
                    static_cast<const uint8_t*>(codes),
                    static_cast<const float*>(scales),
                    static_cast<const float*>(zeros),
                    static_cast<float>(zero),
                    static_cast<const uint16_t*>(table),
                    static_cast<const bf16*>(bias),
                    static_cast<bf16*>(y)};
  const float* sums = zeros || zero != 0 ? sums_of(q) : nullptr;
  bits == 4 ? QuantizedLayer<FourBits>(q, sums).run() : QuantizedLayer<EightBits>(q, sums).run();
#else
  (void)bits, (void)rows, (void)in_features, (void)out_features, (void)group, (void)zero, (void)x, (void)order, (void)codes;
  (void)scales, (void)zeros, (void)table, (void)bias, (void)y;
#endif
}

QUIRE_RECORDABLE(quantized_linear);
