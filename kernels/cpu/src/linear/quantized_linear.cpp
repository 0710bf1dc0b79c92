// y = x @ weight.T + bias, x bfloat16, the weight in codes of 4 or 8 bits (codes.h) with a scale, and a zero point where
// there are any, for each group of a row.
//
// Order of every sum, whatever the tile: a group adds its products over k from 0 up, in one accumulator; groups add up
// from the first to the last, each times its scale. So a row has the same bits alone and in any batch.
#include "codes.h"

#include <algorithm>

#include "api.h"
#include "linear.h"
#include "parallel.h"
#include "tape.h"

#if defined(QUIRE_CODES)
namespace quire {
namespace {

constexpr int64_t ROW_BLOCK = 128;    // rows whose sums wait in the cache while k advances
constexpr int64_t CHUNK_STEPS = 128;  // of a panel that is widened for many rows: 24 KB of it stay in L1
constexpr int TALL_BLOCKS = 3;        // of such a panel: with eight rows, as many sums as registers hold

// What is asked for while few rows are multiplied, into L1: codes so many times 64 bytes ahead, scales so many groups;
// at a tile's end those of the next one. Cold weights, 4096 x 1024, one row, one busy thread of a Zen 5
// (kernels.bench.cpu quantized), with codes asked into L2, nothing across tiles and no scales -> with all of it: 8 bits
// 169 -> 142 us, groups of 32 226 -> 167; 4 bits, groups of 128 95 -> 76, of 32 129 -> 88. 12 to 24 units and 8 groups
// give the same or less.
constexpr int64_t AHEAD = 32;
constexpr int64_t GROUPS_AHEAD = 4;

struct Quantized {
  int64_t rows, in_features, out_features, group;  // group: columns that share a scale
  const bf16* x;
  const uint8_t* codes;   // [blocks][in_features / 2 / STEPS][BYTES]
  const float* scales;    // [blocks][groups][W]
  const float* zeros;     // the same, or null: all of them are `zero`
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
    const int64_t panel = panel_blocks(q_.rows);
    const int64_t panels = (blocks_ + panel - 1) / panel, row_blocks = (q_.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const double bytes = double(blocks_) * units_ * BYTES;
    const double products = double(q_.rows) * blocks_ * W * q_.in_features;
    const double nanoseconds = std::max(bytes / 45, products / 200);
    parallel_for(panels * row_blocks, grain_for(panels * row_blocks, nanoseconds), nanoseconds,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t piece = begin; piece < end; piece++) {
                     const int64_t row = piece / panels * ROW_BLOCK, block = piece % panels * panel;
                     run_piece(row, std::min(q_.rows - row, ROW_BLOCK), block, std::min(block + panel, blocks_));
                   }
                 });
  }

 private:
  static int64_t panel_blocks(int64_t rows) { return rows == 1 ? 8 : rows == 2 ? 6 : rows <= 4 ? 4 : rows <= 8 ? 2 : 3; }

  void run_piece(int64_t row, int64_t rows, int64_t block, int64_t end) const {
    switch (rows) {
      case 1: return panels<1, 8>(row, block, end);
      case 2: return panels<2, 6>(row, block, end);
      case 3: return panels<3, 4>(row, block, end);
      case 4: return panels<4, 4>(row, block, end);
      case 5: return panels<5, 2>(row, block, end);
      case 6: return panels<6, 2>(row, block, end);
      case 7: return panels<7, 2>(row, block, end);
      case 8: return panels<8, 2>(row, block, end);
    }
    for (; block + TALL_BLOCKS <= end; block += TALL_BLOCKS) tall_panel<TALL_BLOCKS>(row, rows, block);
    for (; block < end; block++) tall_panel<1>(row, rows, block);
  }

  template <int M, int NV>
  void panels(int64_t row, int64_t block, int64_t end) const {
    for (; block + NV <= end; block += NV) tile<M, NV>(row, block);
    if constexpr (NV > 1) panels<M, NV / 2>(row, block, end);
  }

  // Few rows: codes are widened where they are multiplied.
  template <int M, int NV>
  void tile(int64_t row, int64_t block) const {
    vf totals[M][NV] = {};
    const char* x = reinterpret_cast<const char*>(q_.x + row * q_.in_features);
    const int64_t stride = q_.in_features * sizeof(bf16);
    const uint8_t* codes = q_.codes + block * units_ * BYTES;
    int64_t left = units_;
    for (int64_t group = 0; group < groups_; group++) {
      vf sums[M][NV] = {};
      for (int64_t step = 0; step < steps_; step += Codes::STEPS, left--) {
        const int64_t ahead = (left > AHEAD ? AHEAD : AHEAD + (NV - 1) * units_) * BYTES;
#pragma GCC unroll 32
        for (int n = 0; n < NV; n++) {
          __m512i pairs[Codes::STEPS];
          const uint8_t* from = codes + n * units_ * BYTES;
          __builtin_prefetch(from + ahead, 0, 3);
          codes_.widen(_mm512_loadu_si512(from), pairs);
#pragma GCC unroll 32
          for (int s = 0; s < Codes::STEPS; s++) {
#pragma GCC unroll 32
            for (int m = 0; m < M; m++)
              sums[m][n] = DotTile::multiply_add(x + m * stride + s * 4, pairs[s], sums[m][n]);
          }
        }
        codes += BYTES;
        x += Codes::STEPS * 4;
      }
      const int64_t next = group + GROUPS_AHEAD < groups_ ? block : block + NV - 1;
#pragma GCC unroll 32
      for (int n = 0; n < NV; n++) ask_for_group(next + n, group + GROUPS_AHEAD);
#pragma GCC unroll 32
      for (int m = 0; m < M; m++) {
#pragma GCC unroll 32
        for (int n = 0; n < NV; n++) totals[m][n] = with_group(totals[m][n], sums[m][n], row + m, block + n, group);
      }
    }
#pragma GCC unroll 32
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 32
      for (int n = 0; n < NV; n++) finish(totals[m][n], row + m, block + n);
    }
  }

  // Many rows: some of a group is widened once, and all rows pass over it while it is in L1.
  template <int NV>
  void tall_panel(int64_t row, int64_t rows, int64_t block) const {
    float* waiting = static_cast<float*>(scratch(1, 2 * rows * NV * W * sizeof(float)));
    float* totals = waiting + rows * NV * W;
    uint32_t* wide = static_cast<uint32_t*>(scratch(4, NV * CHUNK_STEPS * W * sizeof(uint32_t)));
    std::memset(totals, 0, rows * NV * W * sizeof(float));
    for (int64_t group = 0; group < groups_; group++) {
      for (int64_t step = 0; step < steps_; step += CHUNK_STEPS) {
        const int64_t count = std::min(CHUNK_STEPS, steps_ - step);
        widen_chunk<NV>(block, group * steps_ + step, count, wide);
        const Piece piece{group * steps_ + step, count, step == 0, step + count == steps_};
        const int64_t tiles = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
        for (int64_t tile = 0; tile < tiles; tile++) {
          const int64_t first = rows * tile / tiles, height = rows * (tile + 1) / tiles - first;
          const int64_t place = first * NV * W;
          chunk_of<NV>(height, row + first, block, group, piece, wide, waiting + place, totals + place);
        }
      }
    }
    for (int64_t m = 0; m < rows; m++)
      for (int n = 0; n < NV; n++) finish(load(totals + (m * NV + n) * W), row + m, block + n);
  }

  struct Piece {
    int64_t step, count;  // of the row's steps
    bool first, last;     // of its group
  };

  template <int NV>
  void widen_chunk(int64_t block, int64_t step, int64_t count, uint32_t* wide) const {
    for (int n = 0; n < NV; n++) {
      const uint8_t* codes = q_.codes + ((block + n) * units_ + step / Codes::STEPS) * BYTES;
      uint32_t* to = wide + n * CHUNK_STEPS * W;
      for (int64_t i = 0; i < count; i += Codes::STEPS, codes += BYTES) {
        __m512i pairs[Codes::STEPS];
        __builtin_prefetch(codes + CHUNK_STEPS / Codes::STEPS * BYTES, 0, 2);
        codes_.widen(_mm512_loadu_si512(codes), pairs);
#pragma GCC unroll 32
        for (int s = 0; s < Codes::STEPS; s++) _mm512_storeu_si512(to + (i + s) * W, pairs[s]);
      }
    }
  }

  template <int NV>
  void chunk_of(int64_t height, int64_t row, int64_t block, int64_t group, const Piece& piece, const uint32_t* wide,
                float* waiting, float* totals) const {
    switch (height) {  // an even split of more than eight rows leaves no smaller tile
      case 5: return chunk_tile<5, NV>(row, block, group, piece, wide, waiting, totals);
      case 6: return chunk_tile<6, NV>(row, block, group, piece, wide, waiting, totals);
      case 7: return chunk_tile<7, NV>(row, block, group, piece, wide, waiting, totals);
      case 8: return chunk_tile<8, NV>(row, block, group, piece, wide, waiting, totals);
      default: return chunk_tile<4, NV>(row, block, group, piece, wide, waiting, totals);
    }
  }

  template <int M, int NV>
  void chunk_tile(int64_t row, int64_t block, int64_t group, const Piece& piece, const uint32_t* wide, float* waiting,
                  float* totals) const {
    vf sums[M][NV] = {};
    if (!piece.first) {
#pragma GCC unroll 32
      for (int i = 0; i < M * NV; i++) sums[i / NV][i % NV] = load(waiting + i * W);
    }
    const char* x = reinterpret_cast<const char*>(q_.x + row * q_.in_features + 2 * piece.step);
    accumulate<DotTile, M, NV>({x, int64_t(q_.in_features * sizeof(bf16)), piece.count}, wide, CHUNK_STEPS * W, sums);
    if (!piece.last) {
#pragma GCC unroll 32
      for (int i = 0; i < M * NV; i++) store(waiting + i * W, sums[i / NV][i % NV]);
      return;
    }
#pragma GCC unroll 32
    for (int i = 0; i < M * NV; i++) {
      const vf total = with_group(load(totals + i * W), sums[i / NV][i % NV], row + i / NV, block + i % NV, group);
      store(totals + i * W, total);
    }
  }

  QUIRE_INLINE void ask_for_group(int64_t block, int64_t group) const {
    const int64_t place = (block * groups_ + group) * W;
    __builtin_prefetch(q_.scales + place, 0, 3);
    if (q_.zeros) __builtin_prefetch(q_.zeros + place, 0, 3);
  }

  QUIRE_INLINE vf with_group(vf total, vf sum, int64_t row, int64_t block, int64_t group) const {
    const int64_t place = (block * groups_ + group) * W;
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
  const float* x_sums_;  // [rows][groups], or null: nothing is subtracted
  int64_t blocks_, units_, groups_, steps_;
};

// What each group's elements of x add up to.
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

// If this build has what codes are widened with.
QUIRE_API int64_t quire_has_codes() {
#if defined(QUIRE_CODES)
  return W;
#else
  return 0;
#endif
}

// x [rows, in_features]; order: which of x's elements each column meets, or null. in_features and group: multiples of
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
