// y = x @ weight.T + bias on packed weights, for one kind of tile and one dtype of x and y.
#pragma once

#include <algorithm>

#include "experts.h"
#include "linear.h"
#include "parallel.h"

namespace quire {

struct LinearCall {
  int64_t rows, in_features, out_features;
  const void* x;       // [rows, in_features]
  const void* packed;  // from pack_weight
  const void* bias;    // [out_features] in x's dtype, or null
  void* y;             // [rows, out_features]
  int64_t x_stride = 0, y_stride = 0;  // elements from row to row; 0: they follow each other
};

// Cold weights, one thread of a Zen 5, 1024 x 1024 to 32768 x 1024, bfloat16 (tools.bench.kernels.cpu linear --cold):
// prefetching in tall panels takes M = 16 from 250 to 420 GFLOP/s and M = 32 from 320 to 460 (530 is the peak). In one
// tile the hardware prefetcher suffices up to 4 rows (38 GB/s; prefetching as well costs 10 %); at 8 rows prefetching 32
// steps ahead gains 12 %, 16 and 64 steps less.
constexpr int64_t ROW_BLOCK = 128;       // rows whose sums stay in the cache while k advances
constexpr int64_t WEIGHT_CHUNK = 24576;  // bytes of a panel that stay in L1 while row tiles pass over them

template <class Tile, class T>
class LinearLayer {
  using Weight = typename Tile::Weight;
  static constexpr bool WIDENS = is_bf16<T> && Tile::K_PER_STEP == 1;

 public:
  explicit LinearLayer(const LinearCall& call)
      : rows_(call.rows),
        out_features_(call.out_features),
        y_stride_(call.y_stride ? call.y_stride : call.out_features),
        blocks_((call.out_features + W - 1) / W),
        steps_((call.in_features + Tile::K_PER_STEP - 1) / Tile::K_PER_STEP),
        weights_(static_cast<const Weight*>(call.packed)),
        bias_(static_cast<const T*>(call.bias)),
        y_(static_cast<T*>(call.y)) {
    place_rows(static_cast<const T*>(call.x), call.in_features, call.x_stride ? call.x_stride : call.in_features);
  }

  // Multiplies each group of rows with its own weight; weights have one shape and are concatenated in memory.
  void run_groups(const RowGroup* groups, int64_t count) const {
    int64_t* starts = static_cast<int64_t*>(scratch(3, (count + 1) * sizeof(int64_t)));  // first piece of each group
    starts[0] = 0;
    for (int64_t i = 0; i < count; i++)
      starts[i + 1] = starts[i] + panels_for(groups[i].rows) * row_blocks_for(groups[i].rows);
    const double bytes = double(count) * blocks_ * W * steps_ * sizeof(Weight);
    const double nanoseconds = std::max(bytes / 90, products() / PRODUCTS_PER_NS);
    parallel_for(starts[count], grain_for(starts[count], nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t i = std::upper_bound(starts, starts + count, begin) - starts - 1; i < count && starts[i] < end; i++)
        run_pieces_of(groups[i], std::max(begin, starts[i]) - starts[i], std::min(end, starts[i + 1]) - starts[i]);
    });
  }

  void run() const {
    const int64_t pieces = panels_for(rows_) * row_blocks_for(rows_);
    const double nanoseconds = estimate();
    parallel_for(pieces, grain_for(pieces, nanoseconds), nanoseconds,
                 [&](int64_t begin, int64_t end) { run_pieces(0, rows_, begin, end); });
  }

 private:
  // Rows in the tiles' format: float32 for tiles that multiply floats, an even number of values for pairs.
  void place_rows(const T* x, int64_t in_features, int64_t stride) {
    x_ = reinterpret_cast<const char*>(x);
    x_stride_ = stride * sizeof(T);
    if (!WIDENS && steps_ * 4 == int64_t(in_features * sizeof(T))) return;
    x_stride_ = steps_ * 4;
    char* copy = static_cast<char*>(scratch(0, rows_ * x_stride_ + 64));
    for (int64_t m = 0; m < rows_; m++) {
      const T* from = x + m * stride;
      if constexpr (WIDENS) {
        float* to = reinterpret_cast<float*>(copy + m * x_stride_);
        for (int64_t k = 0; k < in_features; k += W) {
          const int n = static_cast<int>(std::min<int64_t>(W, in_features - k));
          store_part(to + k, load_part(from + k, n), n);
        }
      } else {
        std::memcpy(copy + m * x_stride_, from, in_features * sizeof(T));
        std::memset(copy + m * x_stride_ + in_features * sizeof(T), 0, x_stride_ - in_features * sizeof(T));
      }
    }
    x_ = copy;
  }

  static constexpr double PRODUCTS_PER_NS = Tile::K_PER_STEP == 2 ? 225 : 115;

  double estimate() const {
    const double bytes = double(blocks_) * W * steps_ * sizeof(Weight);
    return std::max(bytes / 90, products() / PRODUCTS_PER_NS);
  }

  double products() const { return double(rows_) * blocks_ * W * steps_ * Tile::K_PER_STEP; }

  static int64_t panel_blocks(int64_t rows) {
    return tile_blocks(static_cast<int>(std::min<int64_t>(rows, MAX_TILE_ROWS)));
  }

  int64_t panels_for(int64_t rows) const { return (blocks_ + panel_blocks(rows) - 1) / panel_blocks(rows); }

  static int64_t row_blocks_for(int64_t rows) { return (rows + ROW_BLOCK - 1) / ROW_BLOCK; }

  void run_pieces_of(const RowGroup& group, int64_t begin, int64_t end) const {
    LinearLayer layer(*this);
    layer.weights_ += group.weight * blocks_ * steps_ * W;
    if (bias_) layer.bias_ += group.weight * out_features_;
    layer.run_pieces(group.row, group.rows, begin, end);
  }

  // Pieces [begin, end) of `rows` rows from `first_row` on: block of rows by block of rows, a panel each.
  void run_pieces(int64_t first_row, int64_t rows, int64_t begin, int64_t end) const {
    const int64_t panels = panels_for(rows), width = panel_blocks(rows);
    for (int64_t piece = begin; piece < end;) {
      const int64_t first = piece % panels, count = std::min(end - piece, panels - first);
      const int64_t row = piece / panels * ROW_BLOCK;
      run_rows(first_row + row, std::min(ROW_BLOCK, rows - row), first * width,
               std::min((first + count) * width, blocks_));
      piece += count;
    }
  }

  void run_rows(int64_t row, int64_t rows, int64_t block, int64_t end) const {
    switch (rows) {
      case 1: return panels<1, tile_blocks(1)>(row, rows, block, end);
      case 2: return panels<2, tile_blocks(2)>(row, rows, block, end);
      case 3: return panels<3, tile_blocks(3)>(row, rows, block, end);
      case 4: return panels<4, tile_blocks(4)>(row, rows, block, end);
      case 5: return panels<5, tile_blocks(5)>(row, rows, block, end);
      case 6: return panels<6, tile_blocks(6)>(row, rows, block, end);
    }
    if constexpr (MAX_TILE_ROWS == 8) {
      if (rows == 7) return panels<7, tile_blocks(7)>(row, rows, block, end);
    }
    panels<MAX_TILE_ROWS, tile_blocks(MAX_TILE_ROWS)>(row, rows, block, end);
  }

  // Blocks [block, end), NV at a time and the rest in smaller steps.
  template <int M, int NV>
  void panels(int64_t row, int64_t rows, int64_t block, int64_t end) const {
    for (; block + NV <= end; block += NV) {
      if (rows <= M)
        whole_tile<M, NV>(row, block);
      else
        tall_panel<NV>(row, rows, block);
    }
    if constexpr (NV > 1) panels<M, NV / 2>(row, rows, block, end);
  }

  template <int M, int NV>
  void whole_tile(int64_t row, int64_t block) const {
    vf sums[M][NV] = {};
    const Weight* w = weights_ + block * steps_ * W;
    accumulate<Tile, M, NV, (M > 4 ? NV : 0)>({x_ + row * x_stride_, x_stride_, steps_}, w, steps_ * W, sums,
                                              w + 32 * W);
    finish<M, NV>(row, block, sums);
  }

  // Many rows: k advances in chunks, in which all row tiles pass over the same weights while they are in L1.
  template <int NV>
  void tall_panel(int64_t row, int64_t rows, int64_t block) const {
    const int64_t tiles = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    const int64_t chunk = WEIGHT_CHUNK / (NV * W * sizeof(Weight));
    float* waiting = static_cast<float*>(scratch(1, rows * NV * W * sizeof(float)));
    for (int64_t step = 0; step < steps_; step += chunk) {
      const Span span{step, std::min(step + chunk, steps_)};
      // Prefetches the next chunk block by block while the tiles of this one are computed.
      const bool last = span.end == steps_;
      const Weight* next = weights_ + (last ? (block + NV) * steps_ : block * steps_ + span.end) * W;
      const int64_t each = (NV + tiles - 1) / tiles;
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
        const int64_t wanted = std::min(each, NV - tile * each);
        chunk_of<NV>(count, row + first, block, span, waiting + first * NV * W, next + tile * each * steps_ * W,
                     wanted);
      }
    }
  }

  struct Span {
    int64_t begin, end;  // steps
  };

  template <int NV>
  void chunk_of(int64_t count, int64_t row, int64_t block, Span span, float* waiting, const Weight* ahead,
                int64_t wanted) const {
    switch (count) {  // an even split of more than MAX_TILE_ROWS rows leaves no smaller tile
      case 4: return chunk_tile<4, NV>(row, block, span, waiting, ahead, wanted);
      case 5: return chunk_tile<5, NV>(row, block, span, waiting, ahead, wanted);
      case 6: return chunk_tile<6, NV>(row, block, span, waiting, ahead, wanted);
    }
    if constexpr (MAX_TILE_ROWS == 8) {
      if (count == 7) return chunk_tile<7, NV>(row, block, span, waiting, ahead, wanted);
      return chunk_tile<8, NV>(row, block, span, waiting, ahead, wanted);
    }
    if constexpr (MAX_TILE_ROWS == 6) return chunk_tile<3, NV>(row, block, span, waiting, ahead, wanted);
  }

  template <int M, int NV>
  void chunk_tile(int64_t row, int64_t block, Span span, float* waiting, const Weight* ahead, int64_t wanted) const {
    vf sums[M][NV] = {};
    if (span.begin > 0) {
#pragma GCC unroll 32
      for (int i = 0; i < M * NV; i++) sums[i / NV][i % NV] = load(waiting + i * W);
    }
    const Weight* w = weights_ + (block * steps_ + span.begin) * W;
    const TileInput in{x_ + row * x_stride_ + span.begin * 4, x_stride_, span.end - span.begin};
    if (wanted <= 0)
      accumulate<Tile, M, NV>(in, w, steps_ * W, sums);
    else if (wanted == 1)
      accumulate<Tile, M, NV, 1>(in, w, steps_ * W, sums, ahead);
    else
      accumulate<Tile, M, NV, 2>(in, w, steps_ * W, sums, ahead);
    if (span.end == steps_) return finish<M, NV>(row, block, sums);
#pragma GCC unroll 32
    for (int i = 0; i < M * NV; i++) store(waiting + i * W, sums[i / NV][i % NV]);
  }

  template <int M, int NV>
  QUIRE_INLINE void finish(int64_t row, int64_t block, vf (&sums)[M][NV]) const {
#pragma GCC unroll 32
    for (int n = 0; n < NV; n++) {
      const int64_t column = (block + n) * W;
      const int lanes = static_cast<int>(std::min<int64_t>(W, out_features_ - column));
      const vf bias = bias_ ? load_part(bias_ + column, lanes) : vf{};
#pragma GCC unroll 32
      for (int m = 0; m < M; m++) store_part(y_ + (row + m) * y_stride_ + column, sums[m][n] + bias, lanes);
    }
  }

  const int64_t rows_, out_features_, y_stride_, blocks_, steps_;
  const Weight* weights_;
  const T* bias_;
  T* y_;
  const char* x_ = nullptr;
  int64_t x_stride_ = 0;  // bytes
};

}  // namespace quire
