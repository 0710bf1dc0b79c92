// y = x @ weight.T + bias with 8-bit integer weights and activations: x is quantized with a scale per row,
// unless a common scale is given, and products of codes are added in 32 bits.
//
// Such sums are exact, so their order does not matter. vpdpbusd multiplies unsigned by signed: weights are stored with
// 128 added, which is corrected by the sum of x's codes.
#include <algorithm>

#include "api.h"
#include "panels.h"
#include "parallel.h"
#include "simd.h"
#include "tape.h"

#if defined(QUIRE_AVX512) && defined(__AVX512VNNI__)
#define QUIRE_INTEGERS 1

namespace quire {
namespace {

constexpr int64_t ROW_BLOCK = 128;   // rows whose sums stay in the cache while k advances
constexpr int64_t TILE_ROWS = 3;     // with all blocks of a panel: the sums fill the registers
constexpr int64_t FEW_ROWS = 8;      // up to here tiles pass over the panel in turn; it stays in L2
constexpr int64_t CHUNK_UNITS = 32;  // of a panel, 4 k each, for more rows: 16 KB, which stay in L1 meanwhile
constexpr int LINES = 4;             // lines that two tiles prefetch at each unit: all of the next chunk
constexpr float LARGEST = 127;
constexpr float LEAST_SCALE = 1e-12f;  // scale of all-zero rows

struct Integers {
  int64_t rows, in_features, out_features;
  const uint8_t* codes;  // [panels][in_features / 4][blocks of the panel][W][4], 128 added
  const float* scales;   // [blocks * W]
  const bf16* bias;
  bf16* y;
};

struct Row {
  float scale;
  int32_t excess;  // excess of a sum of products, by the weights' offset of 128
};

Row quantize_row(const bf16* x, int64_t size, const float* given, int8_t* codes) {
  float scale = 0;
  if (given) {
    scale = *given;
  } else {
    __m512i most = _mm512_setzero_si512();  // bits of magnitudes have their order, and NaN, which stays, is above all
    for (int64_t k = 0; k < size; k += W) most = _mm512_max_epi32(most, (__m512i)absolute(load(x + k)));
    scale = std::max(bits_as<float>(_mm512_reduce_max_epi32(most)) / LARGEST, LEAST_SCALE);
  }
  __m512i sum = _mm512_setzero_si512();
  for (int64_t k = 0; k < size; k += W) {
    const vf code = min(splat(LARGEST), max(splat(-LARGEST), round_to_integer(load(x + k) / splat(scale))));
    const __m512i whole = _mm512_cvtps_epi32((__m512)code);
    sum = _mm512_add_epi32(sum, whole);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), _mm512_cvtepi32_epi8(whole));
  }
  return {scale, 128 * _mm512_reduce_add_epi32(sum)};
}

class IntegerLayer {
 public:
  IntegerLayer(const Integers& q, const bf16* x, const float* given)
      : q_(q),
        blocks_((q.out_features + W - 1) / W),
        units_(q.in_features / 4),
        x_(static_cast<int8_t*>(scratch(0, q.rows * q.in_features))),
        rows_(static_cast<Row*>(scratch(2, q.rows * sizeof(Row)))) {
    const double nanoseconds = double(q.rows) * q.in_features / 5;
    parallel_for(q.rows, grain_for(q.rows, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; m++)
        rows_[m] = quantize_row(x + m * q.in_features, q.in_features, given, x_ + m * q.in_features);
    });
  }

  void run() const {
    const double bytes = double(blocks_) * units_ * BYTES;
    const double products = double(q_.rows) * blocks_ * W * q_.in_features;
    const double nanoseconds = std::max(bytes / 55, products / 400);
    for_pieces(q_.rows, ROW_BLOCK, blocks_, nanoseconds,
               [&](int64_t row, int64_t rows, const Panel& panel) { run_piece(row, rows, panel); });
  }

 private:
  struct Span {
    int64_t begin, end;    // units
    const uint8_t* ahead;  // codes to prefetch, or null
  };

  void run_piece(int64_t row, int64_t rows, const Panel& panel) const {
    const int64_t chunk = rows <= FEW_ROWS ? units_ : CHUNK_UNITS;
    int32_t* waiting = static_cast<int32_t*>(scratch(1, rows * PANEL * W * sizeof(int32_t)));
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t unit = 0; unit < units_; unit += chunk) {
      const int64_t end = std::min(unit + chunk, units_);
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = rows * tile / tiles, height = rows * (tile + 1) / tiles - first;
        int32_t* place = waiting + first * PANEL * W;
        const bool asks = rows > FEW_ROWS && (tile == 1 || tile == 2);
        const Span span{unit, end, asks ? codes_of(panel, end, 0) + (tile - 1) * LINES * (end - unit) * BYTES : nullptr};
        switch (height) {
          case 1: blocks<1, PANEL>(row + first, panel, 0, span, place); break;
          case 2: blocks<2, PANEL>(row + first, panel, 0, span, place); break;
          default: blocks<TILE_ROWS, PANEL>(row + first, panel, 0, span, place);
        }
      }
    }
  }

  const uint8_t* codes_of(const Panel& panel, int64_t unit, int64_t block) const {
    return q_.codes + (panel.block * units_ + unit * panel.width + block) * BYTES;
  }

  template <int M, int NV>
  void blocks(int64_t row, const Panel& panel, int64_t block, const Span& span, int32_t* waiting) const {
    for (; block + NV <= panel.width; block += NV) tile<M, NV>(row, panel, block, span, waiting + block * W);
    if constexpr (NV > 1) blocks<M, NV / 2>(row, panel, block, span, waiting);
  }

  template <int M, int NV>
  void tile(int64_t row, const Panel& panel, int64_t block, const Span& span, int32_t* waiting) const {
    __m512i sums[M][NV];
#pragma GCC unroll 32
    for (int i = 0; i < M * NV; i++)
      sums[i / NV][i % NV] = span.begin ? _mm512_loadu_si512(waiting + (i / NV * PANEL + i % NV) * W)
                                        : _mm512_setzero_si512();
    span.ahead ? add<LINES, M, NV>(row, panel, block, span, sums) : add<0, M, NV>(row, panel, block, span, sums);
#pragma GCC unroll 32
    for (int i = 0; i < M * NV; i++) {
      if (span.end == units_)
        finish(sums[i / NV][i % NV], row + i / NV, panel.block + block + i % NV);
      else
        _mm512_storeu_si512(waiting + (i / NV * PANEL + i % NV) * W, sums[i / NV][i % NV]);
    }
  }

  template <int P, int M, int NV>
  QUIRE_INLINE void add(int64_t row, const Panel& panel, int64_t block, const Span& span, __m512i (&sums)[M][NV]) const {
    const int8_t* x = x_ + row * q_.in_features + span.begin * 4;
    const uint8_t* codes = codes_of(panel, span.begin, block);
    const uint8_t* ahead = span.ahead;
    for (int64_t unit = span.begin; unit < span.end; unit++) {
#pragma GCC unroll 32
      for (int p = 0; p < P; p++) __builtin_prefetch(ahead + p * BYTES, 0, 2);
      __m512i fours[M];
#pragma GCC unroll 32
      for (int m = 0; m < M; m++) {
        int32_t four;
        std::memcpy(&four, x + m * q_.in_features, 4);
        fours[m] = _mm512_set1_epi32(four);
      }
#pragma GCC unroll 32
      for (int n = 0; n < NV; n++) {
        const __m512i weights = _mm512_loadu_si512(codes + n * BYTES);
#pragma GCC unroll 32
        for (int m = 0; m < M; m++) sums[m][n] = _mm512_dpbusd_epi32(sums[m][n], weights, fours[m]);
      }
      codes += panel.width * BYTES;
      x += 4;
      if constexpr (P > 0) ahead += P * BYTES;
    }
  }

  QUIRE_INLINE void finish(__m512i sum, int64_t row, int64_t block) const {
    const int64_t column = block * W;
    const int lanes = static_cast<int>(std::min<int64_t>(W, q_.out_features - column));
    const vf whole = (vf)_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(rows_[row].excess)));
    vf total = whole * (splat(rows_[row].scale) * load(q_.scales + column));
    if (q_.bias) total = total + load_part(q_.bias + column, lanes);
    store_part(q_.y + row * q_.out_features + column, total, lanes);
  }

  const Integers q_;
  const int64_t blocks_, units_;
  int8_t* x_;
  Row* rows_;
};

}  // namespace
}  // namespace quire
#endif

using namespace quire;

// Returns the lanes if this build multiplies 8-bit integers.
QUIRE_API int64_t quire_has_integers() {
#if defined(QUIRE_INTEGERS)
  return W;
#else
  return 0;
#endif
}

// x [rows, in_features] bfloat16, in_features a multiple of 16 and at most 2^17 (sums fit into 32 bits); x_scale: that of
// all rows, or null. codes, scales: as Integers says, packed by quantized_layers.py.
QUIRE_API void quire_integer_linear(int64_t rows, int64_t in_features, int64_t out_features, const void* x,
                                    const void* x_scale, const void* codes, const void* scales, const void* bias,
                                    void* y) {
#if defined(QUIRE_INTEGERS)
  if (rows == 0) return;
  const Integers q{rows,
                   in_features,
                   out_features,
                   static_cast<const uint8_t*>(codes),
                   static_cast<const float*>(scales),
                   static_cast<const bf16*>(bias),
                   static_cast<bf16*>(y)};
  IntegerLayer(q, static_cast<const bf16*>(x), static_cast<const float*>(x_scale)).run();
#else
  (void)rows, (void)in_features, (void)out_features, (void)x, (void)x_scale, (void)codes, (void)scales, (void)bias, (void)y;
#endif
}

QUIRE_RECORDABLE(integer_linear);
