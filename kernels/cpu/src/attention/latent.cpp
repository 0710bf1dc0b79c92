// Inputs of latent attention (kernels/reference/attention/latent_attention.py): products per head
// and the store of compressed vectors in the cache.
#include <algorithm>

#include "api.h"
#include "linear_layer.h"
#include "norm.h"
#include "parallel.h"
#include "tape.h"

namespace quire {

void linear_f32(const LinearCall& call);
void linear_bf16(const LinearCall& call);

namespace {

constexpr double STORE_NS = 0.15;       // an element: norm, rotation and store
constexpr double PRODUCT_NS = 0.009;    // per element of a single row and its weight
constexpr int64_t ROWS_AT_ONCE = 128;   // rows of a head per piece

struct StoreCall {
  int64_t rows, heads, head_dim, rank, rope;
  float eps;
  void* q;
  const void *latent, *weight;
  const float* cos_sin;
  const int32_t *positions, *slots;
  void* cache;
};

// Rotates both halves in float32, rounded once; `to` may be `from`.
template <class T>
QUIRE_INLINE void rotate(const T* from, const float* cos, int64_t half, T* to) {
  const float* sin = cos + half;
  for (int64_t i = 0; i < half; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, half - i));
    const vf left = load_part(from + i, n), right = load_part(from + half + i, n);
    const vf c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(to + i, left * c - right * s, n);
    store_part(to + half + i, right * c + left * s, n);
  }
}

template <class T>
void store_token(const StoreCall& call, int64_t row) {
  const int64_t size = call.rank + call.rope, half = call.rope / 2;
  const float* cos_sin = call.cos_sin + call.positions[row] * call.rope;
  const T *from = (const T*)call.latent + row * size, *weight = (const T*)call.weight;
  T* to = (T*)call.cache + call.slots[row] * size;
  const vf scale = splat(rms_scale(from, call.rank, call.eps));
  for (int64_t i = 0; i < call.rank; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, call.rank - i));
    store_part(to + i, scaled<T>(load_part(from + i, n), scale, load_part(weight + i, n)), n);
  }
  rotate(from + call.rank, cos_sin, half, to + call.rank);
  T* tail = (T*)call.q + row * call.heads * call.head_dim + call.head_dim - call.rope;
  for (int64_t head = 0; head < call.heads; head++, tail += call.head_dim) rotate(tail, cos_sin, half, tail);
}

template <class T>
void store_tokens(const StoreCall& call) {
  const double nanoseconds = STORE_NS * call.rows * (call.rank + call.rope * (call.heads + 1));
  parallel_for(call.rows, grain_for(call.rows, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) store_token<T>(call, row);
  });
}

struct HeadsCall {
  int64_t rows, heads, in_features, out_features, token_stride, head_stride, packed_bytes;
  const void *x, *packed;
  void* y;
};

// A piece is at most ROWS_AT_ONCE rows of a head.
template <class T>
void multiply_heads(const HeadsCall& call) {
  const int64_t blocks = (call.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  const double nanoseconds = PRODUCT_NS * call.rows * call.heads * call.in_features * call.out_features;
  const int64_t pieces = call.heads * blocks;
  parallel_for(pieces, grain_for(pieces, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; piece++) {
      const int64_t head = piece / blocks, row = piece % blocks * ROWS_AT_ONCE;
      const T* x = (const T*)call.x + row * call.token_stride + head * call.head_stride;
      T* y = (T*)call.y + (row * call.heads + head) * call.out_features;
      const LinearCall one{std::min(ROWS_AT_ONCE, call.rows - row), call.in_features, call.out_features, x,
                           (const char*)call.packed + head * call.packed_bytes, nullptr, y, call.token_stride,
                           call.heads * call.out_features};
      is_bf16<T> ? linear_bf16(one) : linear_f32(one);
    }
  });
}

}  // namespace
}  // namespace quire

using namespace quire;

QUIRE_API int64_t quire_packed_bytes(int64_t dtype, int64_t out_features, int64_t in_features);

// The cache has q's dtype.
QUIRE_API void quire_latent_store(int64_t dtype, int64_t rows, int64_t heads, int64_t head_dim, int64_t rank,
                                  int64_t rope, double eps, void* q, const void* latent, const void* weight,
                                  const float* cos_sin, const int32_t* positions, const int32_t* slots, void* cache) {
  const StoreCall call{rows, heads, head_dim, rank, rope, float(eps), q, latent, weight, cos_sin, positions, slots, cache};
  dtype == FLOAT32 ? store_tokens<float>(call) : store_tokens<bf16>(call);
}

// packed: concatenated weights of the heads, each from pack_weight; y [rows, heads, out_features].
QUIRE_API void quire_head_linear(int64_t dtype, int64_t rows, int64_t heads, int64_t in_features, int64_t out_features,
                                 int64_t token_stride, int64_t head_stride, const void* x, const void* packed, void* y) {
  const HeadsCall call{rows, heads, in_features, out_features, token_stride, head_stride,
                       quire_packed_bytes(dtype, out_features, in_features), x, packed, y};
  dtype == FLOAT32 ? multiply_heads<float>(call) : multiply_heads<bf16>(call);
}

QUIRE_RECORDABLE(latent_store);
QUIRE_RECORDABLE(head_linear);
