// Attention over blocks (kernels/reference/paged_attention.py), one pass with a running softmax (arXiv 2112.05682,
// 2205.14135).
//
// A row's keys come in tiles of TILE positions that begin at multiples of TILE, whatever the chunk, the block size and
// the rows beside it; within a tile keys are summed from the first to the last. Keys that a row does not see add exact
// zeros. So a row's bits depend on its query, its position and what it sees.
#include <algorithm>
#include <limits>
#include <vector>

#include "api.h"
#include "tape.h"
#include "linear.h"
#include "parallel.h"
#include "transpose.h"

namespace quire {
namespace {

constexpr int TILE = 64;     // positions; scores of a row are 4 registers of AVX512
constexpr int QUERIES = 64;  // queries (rows x heads of a group) that share a pass over keys and values, about
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504088896f;

struct Call {
  int64_t num_seqs, q_heads, kv_heads, head_dim, block_size, table_width, window;
  float scale;
  const void *q, *k_cache, *v_cache;
  const int32_t *block_tables, *query_start, *seq_lens;
  void* out;
  int64_t group() const { return q_heads / kv_heads; }
};

// Rows [row, row + rows) of sequence seq, the first at `position`.
struct Piece {
  int32_t seq, row, rows, position;
};

// Keys as weights of scores: words of a row, W keys side by side. Values are read as they lie.
template <class T>
struct Scores {
  using Tile = FloatTile;
  static constexpr bool WIDENS = false;
};
template <>
struct Scores<bf16> {
#if defined(QUIRE_BF16_DOT)
  using Tile = DotTile;
  static constexpr bool WIDENS = false;
#else
  using Tile = FloatTile;
  static constexpr bool WIDENS = true;
#endif
};

template <class T>
class Attention {
  using Tile = typename Scores<T>::Tile;
  static constexpr bool WIDENS = Scores<T>::WIDENS;

 public:
  Attention(const Call& call, const Piece& piece, int64_t kv_head)
      : c_(call),
        p_(piece),
        kv_head_(kv_head),
        group_(call.group()),
        queries_(piece.rows * group_),
        steps_((call.head_dim + Tile::K_PER_STEP - 1) / Tile::K_PER_STEP),
        padded_((call.head_dim + W - 1) / W * W) {
    words_ = steps_ * 4;
    const int64_t bytes = queries_ * words_ + TILE * words_ + queries_ * (TILE + padded_ + 3) * 4 + 6 * 64;
    char* memory = static_cast<char*>(scratch(0, bytes));
    const auto take = [&](int64_t size) {
      char* taken = memory;
      memory += (size + 63) / 64 * 64;
      return taken;
    };
    q_ = take(queries_ * words_);
    keys_ = reinterpret_cast<uint32_t*>(take(TILE * words_));
    scores_ = reinterpret_cast<float*>(take(queries_ * TILE * 4));
    sums_ = reinterpret_cast<float*>(take(queries_ * padded_ * 4));
    largest_ = reinterpret_cast<float*>(take(queries_ * 4));
    total_ = reinterpret_cast<float*>(take(queries_ * 4));
    shrink_ = reinterpret_cast<float*>(take(queries_ * 4));
  }

  void run() {
    gather_queries();
    std::fill(largest_, largest_ + queries_, NONE);
    std::fill(total_, total_ + queries_, 0.0f);
    std::fill(sums_, sums_ + queries_ * padded_, 0.0f);
    const int64_t end = p_.position + p_.rows;
    const int64_t begin = c_.window ? std::max<int64_t>(0, p_.position - c_.window + 1) : 0;
    for (int64_t start = begin / TILE * TILE; start < end; start += TILE) {
      first_ = static_cast<int>(std::max(begin, start) - start);
      count_ = static_cast<int>(std::min<int64_t>(end - start, TILE));
      locate(start);
      gather_keys();
      score();
      soften(start);
      add_values();
    }
    write();
  }

 private:
  int64_t query_row(int64_t query) const { return c_.query_start[p_.seq] + p_.row + query / group_; }
  int64_t query_offset(int64_t query) const {
    return (query_row(query) * c_.q_heads + kv_head_ * group_ + query % group_) * c_.head_dim;
  }

  void gather_queries() {
    for (int64_t i = 0; i < queries_; i++) {
      const T* from = static_cast<const T*>(c_.q) + query_offset(i);
      char* to = q_ + i * words_;
      if constexpr (WIDENS) {
        widen_row(from, reinterpret_cast<float*>(to));
      } else {
        std::memcpy(to, from, c_.head_dim * sizeof(T));
        std::memset(to + c_.head_dim * sizeof(T), 0, words_ - c_.head_dim * sizeof(T));
      }
    }
  }

  void widen_row(const T* from, float* to) const {
    for (int64_t i = 0; i < c_.head_dim; i++) to[i] = to_float(from[i]);
  }

  // Where the keys and values of this tile lie, as offsets of elements.
  void locate(int64_t start) {
    const int32_t* table = c_.block_tables + p_.seq * c_.table_width;
    int64_t block = (start + first_) / c_.block_size, within = (start + first_) % c_.block_size;
    for (int i = first_; i < count_; i++) {
      places_[i] = ((table[block] * c_.block_size + within) * c_.kv_heads + kv_head_) * c_.head_dim;
      if (++within == c_.block_size) within = 0, block++;
    }
  }

  void gather_keys() {
    for (int lane = 0; lane < count_; lane += W) {
      const char* rows[W];
      for (int i = 0; i < W; i++) {
        const int key = lane + i;
        const bool seen = key >= first_ && key < count_;
        rows[i] = seen ? reinterpret_cast<const char*>(static_cast<const T*>(c_.k_cache) + places_[key]) : nullptr;
      }
      uint32_t* to = keys_ + lane * steps_;
      if constexpr (WIDENS) {
        float* lanes = reinterpret_cast<float*>(to);
        for (int i = 0; i < W; i++)
          for (int64_t d = 0; d < c_.head_dim; d++)
            lanes[d * W + i] = rows[i] ? to_float(reinterpret_cast<const T*>(rows[i])[d]) : 0.0f;
      } else {
        transpose_rows(rows, c_.head_dim * sizeof(T), to);
      }
    }
  }

  // scores_[query][key]: plain products.
  void score() {
    const int blocks = (count_ + W - 1) / W;
    for (int64_t query = 0; query < queries_;) {
      const int64_t rows = std::min<int64_t>(queries_ - query, 4);
      switch (rows) {
        case 1: score_blocks<1>(query, blocks); break;
        case 2: score_blocks<2>(query, blocks); break;
        case 3: score_blocks<3>(query, blocks); break;
        default: score_blocks<4>(query, blocks);
      }
      query += rows;
    }
  }

  template <int M, int NV = REGISTERS == 32 ? 4 : 2>
  void score_blocks(int64_t query, int blocks, int block = 0) {
    for (; block + NV <= blocks; block += NV) {
      vf sums[M][NV] = {};
      accumulate<Tile, M, NV>({q_ + query * words_, words_, steps_}, key_block(block), steps_ * W, sums);
      for (int m = 0; m < M; m++)
        for (int n = 0; n < NV; n++) store(scores_ + (query + m) * TILE + (block + n) * W, sums[m][n]);
    }
    if constexpr (NV > 1) score_blocks<M, NV / 2>(query, blocks, block);
  }

  const typename Tile::Weight* key_block(int block) const {
    return reinterpret_cast<const typename Tile::Weight*>(keys_ + block * W * steps_);
  }

  // Scores to weights 2^(score - largest so far), by row; and by what the sums so far must shrink.
  void soften(int64_t start) {
    for (int64_t query = 0; query < queries_; query++) {
      const int64_t position = p_.position + query / group_;
      const int64_t oldest = c_.window ? position - c_.window + 1 : 0;
      const int low = static_cast<int>(std::max<int64_t>(oldest - start, first_));
      const int high = static_cast<int>(std::min<int64_t>(position - start + 1, count_));
      soften_row(query, low, high);
    }
  }

  // Keys [low, high) are seen.
  void soften_row(int64_t query, int low, int high) {
    float* row = scores_ + query * TILE;
    const vf scale = splat(c_.scale * LOG2E);
    vf top = splat(NONE);
    for (int i = 0; i < count_; i += W) {
      vf x = load(row + i) * scale;
      if (low > i || high < i + W) {
        const vi key = lane_ids() + i;
        x = ((key >= low) & (key < high)) ? x : splat(NONE);
      }
      store(row + i, x);
      top = max(top, x);
    }
    const float before = largest_[query];
    const float now = std::max(before, max_lanes(top));
    shrink_[query] = 1.0f;
    if (now == NONE) {  // nothing seen yet
      for (int i = 0; i < count_; i += W) store(row + i, vf{});
      return;
    }
    vf added = {};
    for (int i = 0; i < count_; i += W) {
      const vf weight = exp2(load(row + i) - splat(now));
      store(row + i, weight);
      added = added + weight;
    }
    if (now != before) shrink_[query] = exp2(splat(before - now))[0];
    total_[query] = total_[query] * shrink_[query] + sum_lanes(added);
    largest_[query] = now;
  }

  void add_values() {
    for (int64_t query = 0; query < queries_;) {
      const int64_t rows = std::min<int64_t>(queries_ - query, 4);
      switch (rows) {
        case 1: add_to_rows<1>(query); break;
        case 2: add_to_rows<2>(query); break;
        case 3: add_to_rows<3>(query); break;
        default: add_to_rows<4>(query);
      }
      query += rows;
    }
  }

  template <int M, int NV = REGISTERS == 32 ? (M == 1 ? 8 : 4) : 2>
  void add_to_rows(int64_t query, int64_t d = 0) {
    for (; d + NV * W <= c_.head_dim; d += NV * W) add_columns<M, NV>(query, d, W);
    if constexpr (NV > 1)
      add_to_rows<M, NV / 2>(query, d);
    else if (d < c_.head_dim)
      add_columns<M, 1>(query, d, static_cast<int>(c_.head_dim - d));
  }

  // sums_ of M queries and NV * W columns from d on (the last `lanes` wide) += weights x values.
  template <int M, int NV>
  void add_columns(int64_t query, int64_t d, int lanes) {
    vf sums[M][NV];
    for (int m = 0; m < M; m++)
      for (int n = 0; n < NV; n++)
        sums[m][n] = load(sums_ + (query + m) * padded_ + d + n * W) * splat(shrink_[query + m]);
    const float* weights = scores_ + query * TILE;
    const T* values = static_cast<const T*>(c_.v_cache) + d;
    for (int key = first_; key < count_; key++) {
      vf v[NV];
#pragma GCC unroll 8
      for (int n = 0; n < NV; n++)
        v[n] = NV == 1 ? load_part(values + places_[key], lanes) : load(values + places_[key] + n * W);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const vf weight = splat(weights[m * TILE + key]);
#pragma GCC unroll 8
        for (int n = 0; n < NV; n++) sums[m][n] = fma(weight, v[n], sums[m][n]);
      }
    }
    for (int m = 0; m < M; m++)
      for (int n = 0; n < NV; n++) store(sums_ + (query + m) * padded_ + d + n * W, sums[m][n]);
  }

  void write() const {
    for (int64_t query = 0; query < queries_; query++) {
      T* to = static_cast<T*>(c_.out) + query_offset(query);
      const vf total = splat(total_[query]);
      for (int64_t d = 0; d < c_.head_dim; d += W)
        store_part(to + d, load(sums_ + query * padded_ + d) / total,
                   static_cast<int>(std::min<int64_t>(W, c_.head_dim - d)));
    }
  }

  const Call& c_;
  const Piece p_;
  const int64_t kv_head_, group_, queries_, steps_, padded_;
  int64_t words_;          // bytes of a query or key in q_ and keys_
  int first_ = 0, count_;  // keys of the tile that some row may see: [first_, count_)
  int64_t places_[TILE];
  char* q_;
  uint32_t* keys_;
  float *scores_, *sums_, *largest_, *total_, *shrink_;
};

template <class T>
void attend(const Call& call) {
  static thread_local std::vector<Piece> pieces;
  pieces.clear();
  const int64_t tall = std::max<int64_t>(1, QUERIES / call.group());
  double products = 0;  // query-key pairs
  for (int64_t seq = 0; seq < call.num_seqs; seq++) {
    const int32_t rows = call.query_start[seq + 1] - call.query_start[seq], len = call.seq_lens[seq];
    for (int32_t end = rows; end > 0;) {  // the longest first: short pieces fill up the end
      const int32_t count = static_cast<int32_t>(std::min<int64_t>(end, tall));
      const int32_t position = len - rows + end - count;
      pieces.push_back({static_cast<int32_t>(seq), end - count, count, position});
      const double seen = call.window ? std::min<double>(position + count, call.window + count) : position + count;
      products += (seen + TILE / 2) * (count + 2);  // 2: keys and values are read once for all
      end -= count;
    }
  }
  const int64_t total = pieces.size() * call.kv_heads;
  const double nanoseconds = products * call.q_heads * call.head_dim * 0.006 + total * 100;
  const Piece* all = pieces.data();
  parallel_for(total, grain_for(total, nanoseconds), nanoseconds, [&call, all](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) Attention<T>(call, all[i / call.kv_heads], i % call.kv_heads).run();
  });
}

}  // namespace
}  // namespace quire

using namespace quire;

// Shapes as in kernels/reference/paged_attention.py; the caches have q's dtype.
QUIRE_API void quire_paged_attention(int64_t dtype, int64_t num_seqs, int64_t q_heads, int64_t kv_heads,
                                     int64_t head_dim, int64_t block_size, int64_t table_width, int64_t window,
                                     double scale, const void* q, const void* k_cache, const void* v_cache,
                                     const int32_t* block_tables, const int32_t* query_start, const int32_t* seq_lens,
                                     void* out) {
  const Call call{num_seqs, q_heads, kv_heads, head_dim,     block_size,  table_width, window, float(scale),
                  q,        k_cache, v_cache,  block_tables, query_start, seq_lens,    out};
  dtype == FLOAT32 ? attend<float>(call) : attend<bf16>(call);
}

QUIRE_RECORDABLE(paged_attention);
