// Low-rank adapters of a linear layer: y += (x @ down.T) @ up.T with each row's adapter; before that y
// is scaled if the adapter has gains.
//
// Order of every sum: a product with `down` has CHAINS sums over k, one for every CHAINS-th step, which are added in
// pairs; it is then rounded to x's dtype; a product with `up` adds over ranks from 0 up. So a row has the same bits
// alone and in any batch. Several sums in flight hide the latency of a multiply-add where few rows share an adapter.
#include <algorithm>
#include <type_traits>

#include "api.h"
#include "linear.h"
#include "low_rank.h"
#include "parallel.h"
#include "tape.h"

namespace quire {
namespace {

constexpr int CHAINS = 4;
constexpr int TILE_ROWS = REGISTERS == 32 ? 4 : 2;
constexpr int UP_BLOCKS = 4;
// Steps prefetched while one row is multiplied: an adapter's weights are some tens of KB, which end before the
// hardware prefetcher has adapted. (8 rows with 8 adapters: 1.4 ms instead of 1.9.)
constexpr int AHEAD = 128;

// Weights of one adapter in one layer; filled by low_rank.py, as int64.
struct LowRank {
  const void* down;      // pack_weight of [ranks, in_features]; null: the layer is unchanged
  const void* up;        // pack_weight of [out_features, ranks]
  const int64_t* spans;  // [blocks of out_features, 2] first and last + 1 of the nonzero steps of `up`
  const float* gains;    // [2, out_features] factor and addend of y, applied first; or null
  int64_t ranks;
};

struct Call {
  int64_t in_features, out_features;
  const void* x;       // null: one-hot rows given by `ids`
  const int32_t* ids;  // [rows]
  void* y;
  const LowRank* adapters;
  const int32_t* tokens;   // [count] rows with an adapter, sorted by adapter
  const int32_t* numbers;  // [count] their adapters
};

template <class Tile, class T>
class Adder {
  using Weight = typename Tile::Weight;
  using Value = std::conditional_t<Tile::K_PER_STEP == 2, bf16, float>;  // element of a step of x

 public:
  explicit Adder(const Call& call) : call_(call), in_steps_(steps_of(call.in_features)) {}

  // Processes the rows at [begin, end) of `tokens`.
  void run(int64_t begin, int64_t end) const {
    while (begin < end) {
      const int32_t number = call_.numbers[begin];
      int64_t last = begin + 1;
      while (last < end && call_.numbers[last] == number) last++;
      const LowRank& adapter = call_.adapters[number];
      if (adapter.down) {
        for (; begin + TILE_ROWS <= last; begin += TILE_ROWS) rows<TILE_ROWS>(adapter, call_.tokens + begin);
        for (; begin < last; begin++) rows<1>(adapter, call_.tokens + begin);
      }
      begin = last;
    }
  }

 private:
  static int64_t steps_of(int64_t features) { return (features + Tile::K_PER_STEP - 1) / Tile::K_PER_STEP; }

  template <int M>
  void rows(const LowRank& adapter, const int32_t* tokens) const {
    const int64_t blocks = (adapter.ranks + W - 1) / W;
    Value* narrow[M];  // [blocks * W] x @ down.T
    Value* memory = static_cast<Value*>(scratch(3, M * blocks * W * sizeof(Value)));
    for (int m = 0; m < M; m++) narrow[m] = memory + m * blocks * W;
    const Weight* down = static_cast<const Weight*>(adapter.down);
    if constexpr (M == 1) {
      const Weight* up = static_cast<const Weight*>(adapter.up);
      for (int step = 0; step < AHEAD; step++) __builtin_prefetch(up + step * W);
    }
    if (call_.x)
      shrink_all<M>(down, narrow, tokens, blocks);
    else
      for (int m = 0; m < M; m++) pick(down, narrow[m], call_.ids[tokens[m]], blocks);
    expand<M>(adapter, narrow, tokens);
  }

  template <int M>
  void shrink_all(const Weight* down, Value* const (&narrow)[M], const int32_t* tokens, int64_t blocks) const {
    const char* x[M];
    for (int m = 0; m < M; m++) x[m] = placed(tokens[m], m, M);
    int64_t block = 0;
    if constexpr (M == 1) {
      for (; block + 2 <= blocks; block += 2) shrink<M, 2>(x, down + block * in_steps_ * W, narrow, block);
    }
    for (; block < blocks; block++) shrink<M, 1>(x, down + block * in_steps_ * W, narrow, block);
  }

  // Reads a column of `down`.
  void pick(const Weight* down, Value* narrow, int32_t id, int64_t blocks) const {
    constexpr uint32_t ONE = Tile::K_PER_STEP == 2 ? 0x3F80 : 0x3F800000;  // 1, in bfloat16 or float32
    const uint32_t one = id % Tile::K_PER_STEP ? ONE << 16 : ONE;          // the other number of a step is 0
    for (int64_t block = 0; block < blocks; block++) {
      const auto lanes = Tile::load_w(down + (block * in_steps_ + id / Tile::K_PER_STEP) * W);
      const vf sum = Tile::multiply_add(reinterpret_cast<const char*>(&one), lanes, vf{});
      store(narrow + block * W, rounded_to<T>(sum));
    }
  }

  // The row, converted if steps cannot be read from it.
  const char* placed(int64_t token, int m, int count) const {
    const T* row = static_cast<const T*>(call_.x) + token * call_.in_features;
    const int64_t bytes = in_steps_ * 4;
    if (sizeof(T) == sizeof(Value) && bytes == int64_t(call_.in_features * sizeof(T)))
      return reinterpret_cast<const char*>(row);
    char* copy = static_cast<char*>(scratch(0, count * (bytes + 4 * W))) + m * (bytes + 4 * W);
    if constexpr (sizeof(T) == sizeof(Value)) {
      std::memset(copy + bytes - 4, 0, 4);
      std::memcpy(copy, row, call_.in_features * sizeof(T));
    } else {
      for (int64_t k = 0; k < call_.in_features; k += W) {
        const int n = static_cast<int>(std::min<int64_t>(W, call_.in_features - k));
        store_part(reinterpret_cast<float*>(copy) + k, load_part(row + k, n), n);
      }
    }
    return copy;
  }

  template <int M, int NV>
  void shrink(const char* const (&x)[M], const Weight* down, Value* const (&narrow)[M], int64_t block) const {
    vf sums[CHAINS][M][NV] = {};
    const int64_t whole = in_steps_ / CHAINS * CHAINS;
    for (int64_t step = 0; step < whole; step += CHAINS) {
#pragma GCC unroll 8
      for (int chain = 0; chain < CHAINS; chain++) add_step<M, NV>(x, down, step + chain, sums[chain]);
    }
    for (int64_t step = whole; step < in_steps_; step++) add_step<M, NV>(x, down, step, sums[step - whole]);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 8
      for (int n = 0; n < NV; n++) {
        const vf sum = (sums[0][m][n] + sums[1][m][n]) + (sums[2][m][n] + sums[3][m][n]);
        store(narrow[m] + (block + n) * W, rounded_to<T>(sum));
      }
    }
  }

  template <int M, int NV>
  QUIRE_INLINE void add_step(const char* const (&x)[M], const Weight* down, int64_t step, vf (&sums)[M][NV]) const {
#pragma GCC unroll 8
    for (int n = 0; n < NV; n++) {
      if constexpr (M == 1) __builtin_prefetch(down + (n * in_steps_ + step + AHEAD) * W);
      const auto lanes = Tile::load_w(down + (n * in_steps_ + step) * W);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sums[m][n] = Tile::multiply_add(x[m] + step * 4, lanes, sums[m][n]);
    }
  }

  template <int M>
  void expand(const LowRank& adapter, Value* const (&narrow)[M], const int32_t* tokens) const {
    const int64_t blocks = (call_.out_features + W - 1) / W;
    T* y[M];
    for (int m = 0; m < M; m++) y[m] = static_cast<T*>(call_.y) + tokens[m] * call_.out_features;
    const int64_t* spans = adapter.spans;
    for (int64_t block = 0; block < blocks;) {
      bool alike = block + UP_BLOCKS <= call_.out_features / W;
      for (int n = 1; alike && n < UP_BLOCKS; n++)
        alike = spans[2 * block] == spans[2 * (block + n)] && spans[2 * block + 1] == spans[2 * (block + n) + 1];
      if (alike)
        columns<M, UP_BLOCKS>(adapter, narrow, y, block);
      else
        columns<M, 1>(adapter, narrow, y, block);
      block += alike ? UP_BLOCKS : 1;
    }
  }

  template <int M, int NV>
  void columns(const LowRank& adapter, Value* const (&narrow)[M], T* const (&y)[M], int64_t block) const {
    const int64_t begin = adapter.spans[2 * block], end = adapter.spans[2 * block + 1];
    if (begin >= end && !adapter.gains) return;
    const int64_t steps = steps_of(adapter.ranks);
    const Weight* up = static_cast<const Weight*>(adapter.up) + block * steps * W;
    vf sums[M][NV] = {};
    for (int64_t step = begin; step < end; step++) {
#pragma GCC unroll 8
      for (int n = 0; n < NV; n++) {
        if constexpr (M == 1) __builtin_prefetch(up + (n * steps + step + AHEAD) * W);
        const auto lanes = Tile::load_w(up + (n * steps + step) * W);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
          sums[m][n] = Tile::multiply_add(reinterpret_cast<const char*>(narrow[m]) + step * 4, lanes, sums[m][n]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 8
      for (int n = 0; n < NV; n++) {
        const int64_t column = (block + n) * W;
        const int lanes = static_cast<int>(std::min<int64_t>(W, call_.out_features - column));
        vf old = load_part(y[m] + column, lanes);
        if (adapter.gains) {
          const float* gains = adapter.gains + column;
          old = old * load_part(gains, lanes) + load_part(gains + call_.out_features, lanes);
        }
        store_part(y[m] + column, old + sums[m][n], lanes);
      }
    }
  }

  const Call& call_;
  const int64_t in_steps_;
};

template <class Tile, class T>
void run(const Call& call, int64_t count) {
  double bytes = 0;
  for (int64_t i = 0; i < count; i++) {
    const LowRank& adapter = call.adapters[call.numbers[i]];
    const int64_t in_features = call.x ? call.in_features : 1;
    if (adapter.down) bytes += double(adapter.ranks) * (in_features + call.out_features) * sizeof(T);
  }
  if (bytes == 0) return;
  const double nanoseconds = bytes / 60;
  parallel_for(count, grain_for(count, nanoseconds), nanoseconds,
               [&](int64_t begin, int64_t end) { Adder<Tile, T>(call).run(begin, end); });
}

template <class Tile, class T>
void find_spans(int64_t out_features, int64_t ranks, const T* up, int64_t* spans) {
  for (int64_t first = 0; first < out_features; first += W, spans += 2) {
    int64_t begin = ranks, end = 0;
    for (int64_t row = first; row < std::min(first + W, out_features); row++)
      for (int64_t rank = 0; rank < ranks; rank++) {
        if (to_float(up[row * ranks + rank]) == 0) continue;
        begin = std::min(begin, rank);
        end = std::max(end, rank + 1);
      }
    spans[0] = begin / Tile::K_PER_STEP;
    spans[1] = (end + Tile::K_PER_STEP - 1) / Tile::K_PER_STEP;
  }
}

}  // namespace
}  // namespace quire

using namespace quire;

// up: [out_features, ranks], not packed; spans: [out_features / W rounded up, 2]. If several projections are
// concatenated in one layer, each has its own ranks, and the others' are zero.
QUIRE_API void quire_low_rank_spans(int64_t dtype, int64_t out_features, int64_t ranks, const void* up,
                                    int64_t* spans) {
  if (dtype == FLOAT32)
    find_spans<FloatTile>(out_features, ranks, static_cast<const float*>(up), spans);
  else
    find_spans<Bf16Tile>(out_features, ranks, static_cast<const bf16*>(up), spans);
}

// `count` points to one number, so that a tape's replays read the current one; likewise `adapters`, `tokens`, `numbers`.
QUIRE_API void quire_add_low_rank(int64_t dtype, int64_t in_features, int64_t out_features, const void* x,
                                  const void* adapters, const int32_t* count, const int32_t* tokens,
                                  const int32_t* numbers, void* y) {
  if (*count == 0) return;
  const Call call{in_features, out_features, x, nullptr, y, static_cast<const LowRank*>(adapters), tokens, numbers};
  dtype == FLOAT32 ? run<FloatTile, float>(call, *count) : run<Bf16Tile, bf16>(call, *count);
}

QUIRE_RECORDABLE(add_low_rank);

// Embedding: in_features is the number of table rows, and `ids` gives the table row of each row of y.
QUIRE_API void quire_embed_low_rank(int64_t dtype, int64_t in_features, int64_t out_features, const int32_t* ids,
                                    const void* adapters, const int32_t* count, const int32_t* tokens,
                                    const int32_t* numbers, void* y) {
  if (*count == 0) return;
  const Call call{in_features, out_features, nullptr, ids, y, static_cast<const LowRank*>(adapters), tokens, numbers};
  dtype == FLOAT32 ? run<FloatTile, float>(call, *count) : run<Bf16Tile, bf16>(call, *count);
}

QUIRE_RECORDABLE(embed_low_rank);
