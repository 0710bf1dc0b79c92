// Packing of weights, and the entry points of linear layers.
#include "linear.h"

#include <algorithm>
#include <vector>

#include "api.h"
#include "tape.h"
#include "linear_layer.h"
#include "parallel.h"
#include "transpose.h"

namespace quire {

void linear_f32(const LinearCall& call);
void linear_bf16(const LinearCall& call);

namespace {

// One block: [steps][W] from rows `first` on of weight [out_features, in_features]; rows past the last are `zeros`.
template <class Tile, class T>
void pack_block(int64_t first, int64_t out_features, int64_t in_features, const T* weight, const T* zeros,
                typename Tile::Weight* block) {
  const T* rows[W];
  for (int lane = 0; lane < W; lane++)
    rows[lane] = first + lane < out_features ? weight + (first + lane) * in_features : zeros;
  if constexpr (sizeof(typename Tile::Weight) == 4) {
    transpose_rows(reinterpret_cast<const char* const*>(rows), in_features * sizeof(T),
                   reinterpret_cast<uint32_t*>(block));
  } else {
    for (int64_t k = 0; k < in_features; k++)
      for (int lane = 0; lane < W; lane++) block[k * W + lane] = rows[lane][k];
  }
}

template <class Tile, class T>
void pack(int64_t out_features, int64_t in_features, const T* weight, typename Tile::Weight* packed) {
  const int64_t blocks = (out_features + W - 1) / W;
  const int64_t steps = (in_features + Tile::K_PER_STEP - 1) / Tile::K_PER_STEP;
  const std::vector<T> zeros(in_features);
  const double nanoseconds = double(out_features) * in_features;
  parallel_for(blocks, grain_for(blocks, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++)
      pack_block<Tile>(block * W, out_features, in_features, weight, zeros.data(), packed + block * steps * W);
  });
}

}  // namespace
}  // namespace quire

using namespace quire;

// Bytes of a packed weight.
QUIRE_API int64_t quire_packed_bytes(int64_t dtype, int64_t out_features, int64_t in_features) {
  const int64_t columns = (out_features + W - 1) / W * W;
  if (dtype == FLOAT32) return columns * in_features * sizeof(float);
  return columns * ((in_features + Bf16Tile::K_PER_STEP - 1) / Bf16Tile::K_PER_STEP) * sizeof(Bf16Tile::Weight);
}

// weight: [out_features, in_features]; packed: quire_packed_bytes long, 64-byte aligned.
QUIRE_API void quire_pack_weight(int64_t dtype, int64_t out_features, int64_t in_features, const void* weight,
                                 void* packed) {
  quire_prefer_huge_pages(packed, quire_packed_bytes(dtype, out_features, in_features));
  if (dtype == FLOAT32)
    pack<FloatTile>(out_features, in_features, static_cast<const float*>(weight), static_cast<float*>(packed));
  else
    pack<Bf16Tile>(out_features, in_features, static_cast<const bf16*>(weight), static_cast<Bf16Tile::Weight*>(packed));
}

QUIRE_API void quire_linear(int64_t dtype, int64_t rows, int64_t in_features, int64_t out_features, const void* x,
                            const void* packed, const void* bias, void* y) {
  if (rows == 0) return;
  const LinearCall call{rows, in_features, out_features, x, packed, bias, y};
  dtype == FLOAT32 ? linear_f32(call) : linear_bf16(call);
}

QUIRE_RECORDABLE(linear);
