// Recurrent layers (kernels/reference/recurrent: short_convolution.py, gated_delta_rule.py, state_space_scan.py,
// gated_norm.py).
//
// The columns of a state, one per element of the values, are independent: a piece of
// work is a row of the step, one of its heads and COLUMNS of these. It copies its part of the state from the page,
// processes the row's tokens with that part in the L1 cache, and copies it to the pages where blocks end.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "api.h"
#include "norm.h"
#include "parallel.h"
#include "tape.h"

namespace quire {
namespace {

constexpr int VECTORS = 4;
constexpr int64_t COLUMNS = VECTORS * W;
constexpr int MOST_TAPS = 8;
constexpr double CONVOLVE_NS = 0.15;   // an element of a token
constexpr double RULE_NS = 0.03;       // an element of a state and token
constexpr double COPY_NS = 0.2;        // an element of a state, to or from a page
constexpr double NORM_NS = 0.3;        // an element
constexpr float LENGTH_EPS = 1e-6f;

struct Rows {
  int64_t count;
  const int32_t *tables;
  int64_t table_stride;
  const int32_t *starts, *lens;  // starts: null where each row has one token
  int64_t block_size;

  int64_t begin(int64_t row) const { return starts ? starts[row] : row; }
  int64_t end(int64_t row) const { return starts ? starts[row + 1] : row + 1; }
  int64_t num_tokens() const { return count ? end(count - 1) - begin(0) : 0; }
  int64_t page(int64_t row, int64_t position) const { return tables[row * table_stride + position / block_size]; }
};

struct ConvolveCall {
  Rows rows;
  int64_t channels, taps, x_stride, page_words;
  const void *x, *weight, *bias;
  float* pages;
  void* out;
};

QUIRE_INLINE vf silu(vf x) { return x / (exp(-x) + 1.0f); }

template <class T>
void convolve_piece(const ConvolveCall& call, int64_t row, int64_t first_channel) {
  const Rows& rows = call.rows;
  const int64_t begin = rows.begin(row), count = rows.end(row) - begin, kept = call.taps - 1;
  const int64_t first = rows.lens[row] - count;
  if (count <= 0 || first < 0) return;
  for (int64_t channel = first_channel; channel < std::min(first_channel + COLUMNS, call.channels); channel += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, call.channels - channel));
    vf weights[MOST_TAPS], seen[MOST_TAPS];
    const vf bias = call.bias ? load_part((const T*)call.bias + channel, n) : splat(0.0f);
    for (int64_t tap = 0; tap < call.taps; tap++) {
      float lanes[W] = {};
      for (int lane = 0; lane < n; lane++)
        lanes[lane] = to_float(((const T*)call.weight)[(channel + lane) * call.taps + tap]);
      weights[tap] = load(lanes);
      seen[tap] = splat(0.0f);
    }
    if (first > 0) {
      const float* page = call.pages + rows.page(row, first - 1) * call.page_words;
      for (int64_t i = 0; i < kept; i++) seen[i] = load_part(page + i * call.channels + channel, n);
    }
    for (int64_t token = 0; token < count; token++) {
      seen[kept] = load_part((const T*)call.x + (begin + token) * call.x_stride + channel, n);
      vf sum = bias;
      for (int64_t tap = 0; tap < call.taps; tap++) sum = fma(seen[tap], weights[tap], sum);
      store_part((T*)call.out + (begin + token) * call.channels + channel, silu(sum), n);
      for (int64_t i = 0; i < kept; i++) seen[i] = seen[i + 1];
      const int64_t behind = first + token + 1;
      if (token + 1 == count || behind % rows.block_size == 0) {
        float* page = call.pages + rows.page(row, behind - 1) * call.page_words;
        for (int64_t i = 0; i < kept; i++) store_part(page + i * call.channels + channel, seen[i], n);
      }
    }
  }
}

template <class T>
void convolve(const ConvolveCall& call) {
  const int64_t blocks = (call.channels + COLUMNS - 1) / COLUMNS, pieces = call.rows.count * blocks;
  const double nanoseconds = CONVOLVE_NS * (call.rows.num_tokens() + call.rows.count * call.taps) * call.channels;
  parallel_for(pieces, grain_for(pieces, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; piece++) convolve_piece<T>(call, piece / blocks, piece % blocks * COLUMNS);
  });
}

struct RuleCall {
  Rows rows;
  int64_t heads, key_heads, key_dim, value_dim, num_first, num_inputs, qkv_stride, strength_stride, step_stride;
  int64_t page_words;
  const void *qkv, *strength, *step;
  const float *rate, *bias;
  float *first, *second;
  void* out;

  float* state(int64_t page, int64_t head) const {
    const int64_t words = key_dim * value_dim;
    float* base = head < num_first ? first + num_inputs + head * words : second + (head - num_first) * words;
    return base + page * page_words;
  }
};

// Normalizes to length 1, in float32, times `scale`.
template <class T>
QUIRE_INLINE void normalise(const T* from, int64_t size, float scale, float* to) {
  vf sum = splat(0.0f);
  for (int64_t i = 0; i < size; i += W) {
    const vf v = load_part(from + i, static_cast<int>(std::min<int64_t>(W, size - i)));
    sum = fma(v, v, sum);
  }
  const vf factor = splat(scale / std::sqrt(sum_lanes(sum) + LENGTH_EPS));
  for (int64_t i = 0; i < size; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, size - i));
    store_part(to + i, load_part(from + i, n) * factor, n);
  }
}

// Processes one token: updates the state [key_dim, COLUMNS], and stores q's product with it in `found`. Without
// `is_delta` the prediction is not subtracted from v.
template <bool is_delta>
QUIRE_INLINE void change(float* state, const float* q, const float* k, int64_t key_dim, float decay, float share,
                         const vf (&v)[VECTORS], vf (&found)[VECTORS]) {
  vf known[VECTORS] = {}, u[VECTORS];
  if constexpr (is_delta)
    for (int64_t key = 0; key < key_dim; key++) {
      const vf factor = splat(k[key]);
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; i++) known[i] = fma(load(state + key * COLUMNS + i * W), factor, known[i]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < VECTORS; i++) u[i] = (v[i] - known[i] * decay) * share, found[i] = splat(0.0f);
  for (int64_t key = 0; key < key_dim; key++) {
    const vf of_k = splat(k[key]), of_q = splat(q[key]);
    float* row = state + key * COLUMNS;
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; i++) {
      const vf changed = fma(of_k, u[i], load(row + i * W) * decay);
      store(row + i * W, changed);
      found[i] = fma(of_q, changed, found[i]);
    }
  }
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <class T>
QUIRE_INLINE void widen_all(const T* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, size - i));
    store_part(to + i, load_part(from + i, n), n);
  }
}

template <class T, bool is_delta>
void follow_row(const RuleCall& call, int64_t row, int64_t head, int64_t column) {
  const Rows& rows = call.rows;
  const int64_t begin = rows.begin(row), count = rows.end(row) - begin, first = rows.lens[row] - count;
  if (count <= 0 || first < 0) return;
  const int64_t width = std::min(COLUMNS, call.value_dim - column), keys = call.key_dim;
  const int64_t padded = (keys + W - 1) / W * W;
  float* state = (float*)scratch(0, (keys * COLUMNS + 2 * padded) * sizeof(float));
  float *q = state + keys * COLUMNS, *k = q + padded;
  std::memset(state, 0, keys * COLUMNS * sizeof(float));
  if (first > 0) {
    const float* from = call.state(rows.page(row, first - 1), head) + column;
    for (int64_t key = 0; key < keys; key++)
      std::memcpy(state + key * COLUMNS, from + key * call.value_dim, width * sizeof(float));
  }
  const int64_t key_head = head / (call.heads / call.key_heads);
  const float scale = 1.0f / std::sqrt(static_cast<float>(keys));
  for (int64_t token = 0; token < count; token++) {
    const int64_t at = begin + token;
    const T* qkv = (const T*)call.qkv + at * call.qkv_stride;
    const T *query = qkv + key_head * keys, *key = qkv + (call.key_heads + key_head) * keys;
    is_delta ? normalise(query, keys, scale, q) : widen_all(query, keys, q);
    is_delta ? normalise(key, keys, 1.0f, k) : widen_all(key, keys, k);
    const T* value = qkv + 2 * call.key_heads * keys + head * call.value_dim + column;
    T* out = (T*)call.out + (at * call.heads + head) * call.value_dim + column;
    const float step = softplus(to_float(((const T*)call.step)[at * call.step_stride + head]) + call.bias[head]);
    float share = step;
    if constexpr (is_delta)
      share = 1.0f / (1.0f + std::exp(-to_float(((const T*)call.strength)[at * call.strength_stride + head])));
    vf v[VECTORS], found[VECTORS];
    for (int i = 0; i < VECTORS; i++)
      v[i] = i * W < width ? load_part(value + i * W, static_cast<int>(std::min<int64_t>(W, width - i * W))) : splat(0.0f);
    change<is_delta>(state, q, k, keys, std::exp(call.rate[head] * step), share, v, found);
    for (int i = 0; i * W < width; i++)
      store_part(out + i * W, found[i], static_cast<int>(std::min<int64_t>(W, width - i * W)));
    const int64_t behind = first + token + 1;
    if (token + 1 == count || behind % rows.block_size == 0) {
      float* to = call.state(rows.page(row, behind - 1), head) + column;
      for (int64_t key = 0; key < keys; key++)
        std::memcpy(to + key * call.value_dim, state + key * COLUMNS, width * sizeof(float));
    }
  }
}

template <class T, bool is_delta>
void follow(const RuleCall& call) {
  const int64_t blocks = (call.value_dim + COLUMNS - 1) / COLUMNS, pieces = call.rows.count * call.heads * blocks;
  const double states = static_cast<double>(call.heads) * call.key_dim * call.value_dim;
  const double nanoseconds = states * (RULE_NS * call.rows.num_tokens() + COPY_NS * call.rows.count);
  parallel_for(pieces, grain_for(pieces, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; piece++) {
      const int64_t of_row = call.heads * blocks;
      follow_row<T, is_delta>(call, piece / of_row, piece % of_row / blocks, piece % blocks * COLUMNS);
    }
  });
}

struct GateCall {
  int64_t tokens, heads, size, gate_stride;
  float eps;
  const void *x, *gate, *weight;
  void* out;
};

template <class T>
void gate_norms(const GateCall& call) {
  const int64_t rows = call.tokens * call.heads;
  const double nanoseconds = NORM_NS * rows * call.size;
  parallel_for(rows, grain_for(rows, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T* x = (const T*)call.x + row * call.size;
      const T* gate = (const T*)call.gate + row / call.heads * call.gate_stride + row % call.heads * call.size;
      const vf scale = splat(rms_scale(x, call.size, call.eps));
      for (int64_t i = 0; i < call.size; i += W) {
        const int n = static_cast<int>(std::min<int64_t>(W, call.size - i));
        const vf normed = scaled<T>(load_part(x + i, n), scale, load_part((const T*)call.weight + i, n));
        store_part((T*)call.out + row * call.size + i, rounded_to<T>(normed) * silu(load_part(gate + i, n)), n);
      }
    }
  });
}

}  // namespace
}  // namespace quire

using namespace quire;

// weight: at most 8 taps, in x's dtype; pages: words of the first part.
QUIRE_API void quire_short_convolution(int64_t dtype, int64_t rows, int64_t channels, int64_t taps, int64_t x_stride,
                                       int64_t page_words, int64_t table_stride, int64_t block_size, const void* x,
                                       const void* weight, const void* bias, float* pages, const int32_t* tables, const int32_t* starts,
                                       const int32_t* lens, void* out) {
  const ConvolveCall call{{rows, tables, table_stride, starts, lens, block_size},
                          channels, taps, x_stride, page_words, x, weight, bias, pages, out};
  dtype == FLOAT32 ? convolve<float>(call) : convolve<bf16>(call);
}

QUIRE_API void quire_gated_delta_rule(int64_t dtype, int64_t rows, int64_t heads, int64_t key_heads, int64_t key_dim,
                                      int64_t value_dim, int64_t num_first, int64_t num_inputs, int64_t qkv_stride,
                                      int64_t strength_stride, int64_t step_stride, int64_t page_words,
                                      int64_t table_stride, int64_t block_size, const void* qkv, const void* strength,
                                      const void* step, const float* rate, const float* bias, float* first,
                                      float* second, const int32_t* tables, const int32_t* starts, const int32_t* lens,
                                      void* out) {
  const RuleCall call{{rows, tables, table_stride, starts, lens, block_size},
                      heads, key_heads, key_dim, value_dim, num_first, num_inputs, qkv_stride, strength_stride,
                      step_stride, page_words, qkv, strength, step, rate, bias, first, second, out};
  dtype == FLOAT32 ? follow<float, true>(call) : follow<bf16, true>(call);
}

QUIRE_API void quire_state_space_scan(int64_t dtype, int64_t rows, int64_t heads, int64_t key_heads, int64_t key_dim,
                                      int64_t value_dim, int64_t num_first, int64_t num_inputs, int64_t qkv_stride,
                                      int64_t step_stride, int64_t page_words, int64_t table_stride, int64_t block_size,
                                      const void* qkv, const void* step, const float* rate, const float* bias,
                                      float* first, float* second, const int32_t* tables, const int32_t* starts,
                                      const int32_t* lens, void* out) {
  const RuleCall call{{rows, tables, table_stride, starts, lens, block_size},
                      heads, key_heads, key_dim, value_dim, num_first, num_inputs, qkv_stride, 0,
                      step_stride, page_words, qkv, nullptr, step, rate, bias, first, second, out};
  dtype == FLOAT32 ? follow<float, false>(call) : follow<bf16, false>(call);
}

QUIRE_API void quire_gated_norm(int64_t dtype, int64_t tokens, int64_t heads, int64_t size, int64_t gate_stride,
                                double eps, const void* x, const void* gate, const void* weight, void* out) {
  const GateCall call{tokens, heads, size, gate_stride, float(eps), x, gate, weight, out};
  dtype == FLOAT32 ? gate_norms<float>(call) : gate_norms<bf16>(call);
}

QUIRE_RECORDABLE(short_convolution);
QUIRE_RECORDABLE(gated_delta_rule);
QUIRE_RECORDABLE(gated_norm);
QUIRE_RECORDABLE(state_space_scan);
