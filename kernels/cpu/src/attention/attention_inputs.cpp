#include <algorithm>

#include "api.h"
#include "tape.h"
#include "norm.h"
#include "parallel.h"

namespace quire {
namespace {

constexpr double ROPE_NS = 0.15;  // an element: norm, rotation and store

struct Inputs {
  int64_t rows, q_heads, kv_heads, head_dim;
  float eps;
  const void *qkv, *q_weight, *k_weight;
  const float* cos_sin;
  const int32_t *positions, *slots;
  void *k_cache, *v_cache, *q_out;
};

// Elements [i, i + n) of both halves of a head: norm (where there is a weight) to T, rotation in float32, rounded once.
template <class T>
QUIRE_INLINE void rotate(const T* from, const T* weight, vf scale, const float* cos, int64_t half, int64_t i, int n,
                         T* to) {
  const float* sin = cos + half;
  vf left = load_part(from + i, n), right = load_part(from + half + i, n);
  if (weight) {
    left = rounded_to<T>(scaled<T>(left, scale, load_part(weight + i, n)));
    right = rounded_to<T>(scaled<T>(right, scale, load_part(weight + half + i, n)));
  }
  const vf c = load_part(cos + i, n), s = load_part(sin + i, n);
  store_part(to + i, left * c - right * s, n);
  store_part(to + half + i, right * c + left * s, n);
}

template <class T>
QUIRE_INLINE void norm_and_rotate(const T* from, const T* weight, const float* cos, int64_t head_dim, float eps,
                                  T* to) {
  const int64_t half = head_dim / 2;
  const vf scale = weight ? splat(rms_scale(from, head_dim, eps)) : vf{};
  int64_t i = 0;
  for (; i + W <= half; i += W) rotate(from, weight, scale, cos, half, i, W, to);
  if (i < half) rotate(from, weight, scale, cos, half, i, static_cast<int>(half - i), to);
}

template <class T>
void token(const Inputs& in, int64_t row) {
  const int64_t d = in.head_dim;
  const T* from = (const T*)in.qkv + row * (in.q_heads + 2 * in.kv_heads) * d;
  const float* cos_sin = in.cos_sin + in.positions[row] * d;
  T* q = (T*)in.q_out + row * in.q_heads * d;
  for (int64_t h = 0; h < in.q_heads; h++, from += d)
    norm_and_rotate(from, (const T*)in.q_weight, cos_sin, d, in.eps, q + h * d);
  const int64_t place = in.slots[row] * in.kv_heads * d;
  for (int64_t h = 0; h < in.kv_heads; h++, from += d)
    norm_and_rotate(from, (const T*)in.k_weight, cos_sin, d, in.eps, (T*)in.k_cache + place + h * d);
  std::memcpy((T*)in.v_cache + place, from, in.kv_heads * d * sizeof(T));
}

template <class T>
void tokens(const Inputs& in) {
  const double nanoseconds = ROPE_NS * in.rows * (in.q_heads + 2 * in.kv_heads) * in.head_dim;
  parallel_for(in.rows, grain_for(in.rows, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) token<T>(in, row);
  });
}

}  // namespace
}  // namespace quire

using namespace quire;

// Shapes as in kernels/reference/attention/attention_inputs.py; the weights may be null, the caches have qkv's dtype.
QUIRE_API void quire_qk_norm_rope_store(int64_t dtype, int64_t rows, int64_t q_heads, int64_t kv_heads,
                                        int64_t head_dim, double eps, const void* qkv, const void* q_weight,
                                        const void* k_weight, const float* cos_sin, const int32_t* positions,
                                        const int32_t* slots, void* k_cache, void* v_cache, void* q_out) {
  const Inputs in{rows,     q_heads, kv_heads,  head_dim, float(eps), qkv,     q_weight,
                  k_weight, cos_sin, positions, slots,    k_cache,    v_cache, q_out};
  dtype == FLOAT32 ? tokens<float>(in) : tokens<bf16>(in);
}

QUIRE_RECORDABLE(qk_norm_rope_store);
