// Attention over blocks (kernels/reference/attention/paged_attention.py), one pass with a running softmax
// (arXiv 2112.05682, 2205.14135).
//
// A row's keys are processed in tiles of TILE positions that start at multiples of TILE, for any chunk, block size and
// batch; within a tile keys are summed from first to last. Keys that are not visible to a row add exact
// zeros. So a row's bits depend only on its query, its position and its visible keys.
#pragma once

#include <algorithm>
#include <limits>

#include "parallel.h"
#include "product.h"
#include "transpose.h"

namespace quire {

constexpr int TILE = 64;     // positions; scores of a row are 4 registers of AVX512
constexpr int LANES = 16;    // keys between two prefetches of following rows
constexpr int QUERIES = 64;  // approximate queries (rows x heads of a group) per pass over keys and values
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504088896f;

struct AttentionCall {
  int64_t num_seqs, q_heads, kv_heads, head_dim, block_size, table_width, window;
  bool chunked;  // windows start at multiples of their length instead of sliding
  int64_t token_stride, head_stride;  // elements of the caches from token to token, and from head to head
  float scale, softcap;  // softcap: of the scaled scores; 0: none
  const void *q, *k_cache, *v_cache;
  const int32_t *block_tables, *query_start, *seq_lens;
  void* out;
  const float* sinks;  // [q_heads], or null
  bool far;  // keys and values exceed the caches near the core
  // Latent attention: elements of queries and keys after head_dim, which values do not have.
  const void* tail = nullptr;
  int64_t tail_dim = 0, tail_token_stride = 0, tail_head_stride = 0;
  const int64_t* tree_mask = nullptr;  // [num_tokens] visible positions among the last 64, its own first; -1: all
  const int32_t* seen_ends = nullptr;  // [num_tokens] position after the last visible one, where it is later; or null
  int64_t group() const { return q_heads / kv_heads; }
  int64_t key_dim() const { return head_dim + tail_dim; }
  // First position visible to the row at `position`.
  int64_t first_seen(int64_t position) const {
    if (!window) return 0;
    return chunked ? position / window * window : std::max<int64_t>(0, position - window + 1);
  }
  // Position after the last one visible to row `token` of the step, at `position`.
  int64_t seen_end(int64_t token, int64_t position) const {
    return seen_ends ? std::max<int64_t>(position + 1, seen_ends[token]) : position + 1;
  }
};

// Rows [row, row + rows) of sequence seq, the first at `position`, for heads [head, head + heads) of keys and values.
struct AttentionPiece {
  int32_t seq, row, rows, position, head, heads;
};

// Operand type of tiles: bfloat16 where there are instructions for it (softmax weights are then rounded
// to bfloat16 before they are summed and used), float32 elsewhere.
template <class T>
struct Operands {
  using Tile = FloatTile;
  using Word = float;  // operand of queries and softmax weights
};
#if defined(QUIRE_BF16_DOT)
template <>
struct Operands<bf16> {
  using Tile = DotTile;
  using Word = bf16;
};
#endif

template <class T>
class Attention {
  using Tile = typename Operands<T>::Tile;
  using Word = typename Operands<T>::Word;
  using Weight = typename Tile::Weight;
  static constexpr int STEP = Tile::K_PER_STEP;
  static constexpr int TILE_STEPS = TILE / STEP;
  static constexpr bool WIDENS = sizeof(Word) != sizeof(T);

 public:
  Attention(const AttentionCall& call, const AttentionPiece& piece)
      : c_(call),
        p_(piece),
        group_(call.group()),
        queries_(piece.rows * group_),
        steps_((call.key_dim() + STEP - 1) / STEP),
        columns_((call.head_dim + W - 1) / W),
        q_stride_(steps_ * STEP) {
    const int64_t all = queries_ * piece.heads;
    Carver carve(scratch(0, 1024 + all * (q_stride_ * sizeof(Word) + columns_ * W * 4 + 3 * 4) +
                                queries_ * TILE * (4 + sizeof(Word)) +
                                TILE * (steps_ * STEP + columns_ * W) * sizeof(Weight) / STEP));
    carve.take(q_, all * q_stride_);
    carve.take(sums_, all * columns_ * W);
    carve.take(largest_, all);
    carve.take(total_, all);
    carve.take(shrink_, queries_);
    carve.take(scores_, queries_ * TILE);
    carve.take(weights_, queries_ * TILE);
    carve.take(keys_, TILE * steps_);
    carve.take(values_, TILE_STEPS * columns_ * W);
  }

  // `after`: this thread's next piece, or null; its first rows are prefetched.
  void run(const AttentionPiece* after) {
    gather_queries();
    const int64_t all = queries_ * p_.heads;
    begin_softmax();
    std::fill(sums_, sums_ + all * columns_ * W, 0.0f);
    Span next = first_span(p_);
    locate(p_, next);
    while (next.count > 0) {
      const Span span = next;
      std::swap(places_, next_);
      next = span_at(p_, span.start + TILE);
      more_ = c_.far && (next.count > 0 || after);
      if (next.count > 0)
        locate(p_, next);
      else if (more_)
        locate(*after, first_span(*after));
      for (int64_t head = 0; head < p_.heads; head++) add_tile(span, head);
    }
    write();
  }

 private:
  // Allocates scratch memory, aligned to cache lines.
  struct Carver {
    char* memory;
    explicit Carver(void* memory) : memory(static_cast<char*>(memory)) {}
    template <class V>
    void take(V*& pointer, int64_t count) {
      pointer = reinterpret_cast<V*>(memory);
      memory += (count * sizeof(V) + 63) / 64 * 64;
    }
  };

  // Keys [first, count) of the tile at position `start`: those visible to some row.
  struct Span {
    int64_t start;
    int first, count;
  };

  Span span_at(const AttentionPiece& piece, int64_t start) const {
    const int64_t begin = c_.first_seen(piece.position);
    const int64_t count = std::clamp<int64_t>(end_of(piece) - start, 0, TILE);
    return {start, static_cast<int>(std::max(begin, start) - start), static_cast<int>(count)};
  }
  // Position after the last one visible to some row.
  int64_t end_of(const AttentionPiece& piece) const {
    int64_t end = piece.position + piece.rows;
    if (c_.seen_ends) {
      const int32_t* ends = c_.seen_ends + c_.query_start[piece.seq] + piece.row;
      for (int64_t row = 0; row < piece.rows; row++) end = std::max<int64_t>(end, ends[row]);
    }
    return end;
  }
  Span first_span(const AttentionPiece& piece) const {
    return span_at(piece, c_.first_seen(piece.position) / TILE * TILE);
  }

  void add_tile(const Span& span, int64_t head) {
    gather(span, head, &Attention::gather_keys<32>, &Attention::gather_keys<64>, &Attention::gather_keys<128>,
           &Attention::gather_keys<0>);
    const Word* queries = q_ + head * queries_ * q_stride_;
    multiply<Tile>({reinterpret_cast<const char*>(queries), q_stride_ * int64_t(sizeof(Word)), queries_, steps_,
                    steps_ * W, scores_, TILE, nullptr},
                   keys_, (span.count + W - 1) / W);
    if (c_.softcap) cap_scores(span.count);
    if (c_.tree_mask) hide_other_paths(span);
    soften(span, head);
    gather(span, head, &Attention::gather_values<32>, &Attention::gather_values<64>, &Attention::gather_values<128>,
           &Attention::gather_values<0>);
    const int64_t first = span.first / STEP, steps = (span.count + STEP - 1) / STEP - first;
    multiply<Tile>({reinterpret_cast<const char*>(weights_ + first * STEP), TILE * int64_t(sizeof(Word)), queries_,
                    steps, TILE_STEPS * W, sums_ + head * queries_ * columns_ * W, columns_ * W, shrink_},
                   values_ + first * W, columns_);
  }

  int64_t row_of(int64_t query) const { return c_.query_start[p_.seq] + p_.row + query / group_; }
  int64_t head_of(int64_t head, int64_t query) const { return (p_.head + head) * group_ + query % group_; }

  T* query_at(void* tensor, int64_t head, int64_t query) const {
    return static_cast<T*>(tensor) + (row_of(query) * c_.q_heads + head_of(head, query)) * c_.head_dim;
  }
  const T* tail_at(int64_t head, int64_t query) const {
    return static_cast<const T*>(c_.tail) + row_of(query) * c_.tail_token_stride +
           head_of(head, query) * c_.tail_head_stride;
  }

  static void copy_row(const T* from, int64_t size, Word* to) {
    if constexpr (WIDENS)
      for (int64_t i = 0; i < size; i++) to[i] = to_float(from[i]);
    else
      std::memcpy(to, from, size * sizeof(T));
  }

  void gather_queries() {
    Word* to = q_;
    for (int64_t head = 0; head < p_.heads; head++)
      for (int64_t query = 0; query < queries_; query++, to += q_stride_) {
        copy_row(query_at(const_cast<void*>(c_.q), head, query), c_.head_dim, to);
        if (c_.tail_dim) copy_row(tail_at(head, query), c_.tail_dim, to + c_.head_dim);
        std::memset(to + c_.key_dim(), 0, (q_stride_ - c_.key_dim()) * sizeof(Word));
      }
  }

  // Initial state: no keys, or the sinks with weight 1 relative to themselves.
  void begin_softmax() {
    std::fill(total_, total_ + queries_ * p_.heads, c_.sinks ? 1.0f : 0.0f);
    for (int64_t head = 0; head < p_.heads; head++)
      for (int64_t query = 0; query < queries_; query++)
        largest_[head * queries_ + query] =
            c_.sinks ? c_.sinks[(p_.head + head) * group_ + query % group_] * LOG2E : NONE;
  }

  // Element offsets of the tile's keys and values for the piece's first head. Keys that are not visible
  // are replaced by a visible one: their scores are masked, and their values have no weight.
  void locate(const AttentionPiece& piece, const Span& span) {
    const int32_t* table = c_.block_tables + piece.seq * c_.table_width;
    const int64_t token = c_.token_stride, block_size = c_.block_size;
    int64_t block = (span.start + span.first) / block_size, within = (span.start + span.first) % block_size;
    for (int i = span.first; i < span.count; block++, within = 0) {
      int64_t place = (table[block] * block_size + within) * token + piece.head * c_.head_stride;
      const int until = static_cast<int>(std::min<int64_t>(span.count, i + block_size - within));
      for (; i < until; i++, place += token) next_[i] = place;
    }
    std::fill(next_, next_ + span.first, next_[span.first]);
    std::fill(next_ + span.count, next_ + TILE, next_[span.first]);
  }

  // Prefetches rows of the next tile: while the keys [lane, lane + LANES) of a head are processed, that part of the
  // head's share. Each head has a share of all rows, so that rows are read whole, in the order of memory.
  // (Force-inlined: GCC treats a function that only prefetches as free of effects and drops the call.)
  QUIRE_INLINE void fetch_next(const void* cache, int64_t head, int lane) const {
    if (!more_) return;
    const int64_t bytes = (c_.tail_dim ? c_.key_dim() : p_.heads * c_.head_dim) * sizeof(T);
    const int64_t begin = (head * TILE + lane) / p_.heads, end = (head * TILE + lane + LANES) / p_.heads;
    for (int64_t key = begin; key < end; key++) {
      const char* row = reinterpret_cast<const char*>(static_cast<const T*>(cache) + next_[key]);
      for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte);
    }
  }

  // Loops over a head are short: those of common sizes are compiled for them (a fifth of decode's time at 32).
  using Gather = void (Attention::*)(const Span&, int64_t);
  QUIRE_INLINE void gather(const Span& span, int64_t head, Gather with32, Gather with64, Gather with128, Gather any) {
    const int64_t size = c_.tail_dim ? 0 : c_.head_dim;
    (this->*(size == 32 ? with32 : size == 64 ? with64 : size == 128 ? with128 : any))(span, head);
  }

  // Packed as weights of the scores: W keys interleaved.
  template <int HEAD_DIM>
  __attribute__((noinline)) void gather_keys(const Span& span, int64_t head) {
    const int64_t head_dim = HEAD_DIM ? HEAD_DIM : c_.key_dim();
    const T* keys = static_cast<const T*>(c_.k_cache) + head * c_.head_stride;
    for (int lane = 0; lane < span.count; lane += W) {
      if (lane % LANES == 0) fetch_next(c_.k_cache, head, lane);
      const T* rows[W];
      for (int i = 0; i < W; i++) rows[i] = keys + places_[lane + i];
      Weight* to = keys_ + lane * steps_;
      if constexpr (WIDENS) {
        for (int i = 0; i < W; i++)
          for (int64_t d = 0; d < head_dim; d++) to[d * W + i] = to_float(rows[i][d]);
      } else {
        transpose_rows(reinterpret_cast<const char* const*>(rows), head_dim * sizeof(T),
                       reinterpret_cast<uint32_t*>(to));
      }
    }
  }

  // Packed as weights of the results: [columns][key or pair of keys][W].
  template <int HEAD_DIM>
  __attribute__((noinline)) void gather_values(const Span& span, int64_t head) {
    const int64_t head_dim = HEAD_DIM ? HEAD_DIM : c_.head_dim;
    const T* values = static_cast<const T*>(c_.v_cache) + head * c_.head_stride;
    const int64_t* places = places_;
    Weight* const all = values_;
    for (int lane = 0; lane < span.count; lane += LANES) {
      if (c_.v_cache != c_.k_cache) fetch_next(c_.v_cache, head, lane);
      const int end = std::min(lane + LANES, span.count);
      for (int key = std::max(lane, span.first / STEP * STEP); key < end; key += STEP)
        put_row(values + places[key], values + places[key + STEP - 1], head_dim, all + key / STEP * W);
    }
  }

  static QUIRE_INLINE void put_row(const T* row, const T* other, int64_t head_dim, Weight* to) {
    int64_t d = 0;
    if constexpr (STEP == 2)
      for (; d + 2 * W <= head_dim; d += 2 * W, to += 2 * TILE_STEPS * W)
        put_pairs(row + d, other + d, to, to + TILE_STEPS * W);
    for (; d + W <= head_dim; d += W, to += TILE_STEPS * W) put_values(row + d, other + d, W, to);
    if (d < head_dim) put_values(row + d, other + d, static_cast<int>(head_dim - d), to);
  }

  static QUIRE_INLINE void put_values(const T* row, const T* other, int lanes, Weight* to) {
    if constexpr (STEP == 2) {
      const vu pairs = widen_bits(row, lanes) | widen_bits(other, lanes) << 16;
      std::memcpy(to, &pairs, sizeof(pairs));
    } else {
      store(to, load_part(row, lanes));
    }
  }

  // Caps scaled scores s to softcap * tanh(s / softcap), then undoes the later scale. tanh(x) = 1 - 2 / (e^2x + 1).
  __attribute__((noinline)) void cap_scores(int count) {
    const vf inner = splat(2 * LOG2E * c_.scale / c_.softcap), outer = splat(c_.softcap / c_.scale);
    const vf one = splat(1.0f), two = splat(2.0f);
    for (int64_t query = 0; query < queries_; query++)
      for (int key = 0; key < count; key += W) {
        float* scores = scores_ + query * TILE + key;
        store(scores, (one - two / (exp2(load(scores) * inner) + one)) * outer);
      }
  }

  // Masks drafts outside a row's path in a tree.
  __attribute__((noinline)) void hide_other_paths(const Span& span) {
    for (int64_t row = 0; row < p_.rows; row++) {
      uint64_t hidden = ~static_cast<uint64_t>(c_.tree_mask[c_.query_start[p_.seq] + p_.row + row]);
      for (; hidden; hidden &= hidden - 1) {
        const int64_t key = p_.position + row - __builtin_ctzll(hidden) - span.start;
        if (key < span.first || key >= span.count) continue;
        for (int64_t i = 0; i < group_; i++) scores_[(row * group_ + i) * TILE + key] = NONE;
      }
    }
  }

  // Converts scores to softmax weights relative to the largest so far, by row, and computes the factor of earlier sums.
  __attribute__((noinline)) void soften(const Span& span, int64_t head) {
    int64_t query = 0;
    for (int64_t position = p_.position; position < p_.position + p_.rows; position++) {
      const int low = static_cast<int>(std::max<int64_t>(c_.first_seen(position) - span.start, span.first));
      const int64_t token = c_.query_start[p_.seq] + p_.row + position - p_.position;
      const int high = static_cast<int>(std::min<int64_t>(c_.seen_end(token, position) - span.start, span.count));
      for (int64_t i = 0; i < group_; i++, query++) {
        const int64_t state = head * queries_ + query;
        if (low <= 0 && high == TILE)
          soften_row<true>(query, 0, TILE, TILE, largest_[state], total_[state]);
        else
          soften_row<false>(query, low, high, span.count, largest_[state], total_[state]);
      }
    }
  }

  // Keys [low, high) of `count` are visible.
  template <bool WHOLE>
  QUIRE_INLINE void soften_row(int64_t query, int low, int high, int count, float& largest, float& total) {
    constexpr int VECTORS = TILE / W;
    const float* scores = scores_ + query * TILE;
    const vf scale = splat(c_.scale * LOG2E);
    vf x[VECTORS];
    vf top = splat(NONE);
#pragma GCC unroll 32
    for (int i = 0; i < VECTORS; i++) {
      x[i] = splat(NONE);
      if (WHOLE || i * W < count) {
        x[i] = load(scores + i * W) * scale;
        if (!WHOLE) {
          const vi key = lane_ids() + i * W;
          x[i] = ((key >= low) & (key < high)) ? x[i] : splat(NONE);
        }
        top = max(top, x[i]);
      }
    }
    const float before = largest, now = std::max(before, max_lanes(top));
    const vf base = splat(now == NONE ? 0.0f : now);  // no visible key yet: all weights are zero
    vf added = {};
#pragma GCC unroll 32
    for (int i = 0; i < VECTORS; i += STEP)
      if (WHOLE || i * W < count) added = put_weights(x + i, base, weights_ + query * TILE + i * W, added);
    const float shrink = now == before ? 1.0f : exp2(splat(before - now))[0];
    shrink_[query] = shrink;
    total = total * shrink + sum_lanes(added);
    largest = now;
  }

  // Weights of STEP vectors of scores, and `added` plus their sum as they will be used.
  static QUIRE_INLINE vf put_weights(const vf* x, vf base, Word* to, vf added) {
#if defined(QUIRE_BF16_DOT)
    if constexpr (STEP == 2) {
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)exp2_coarse(x[1] - base), (__m512)exp2_coarse(x[0] - base));
      std::memcpy(to, &both, sizeof(both));
      return (vf)_mm512_dpbf16_ps((__m512)added, both, (__m512bh)_mm512_set1_epi32(0x3f803f80));  // times 1.0
    }
#endif
    const vf weight = exp2(x[0] - base);
    store(reinterpret_cast<float*>(to), weight);
    return added + weight;
  }

  void write() const {
    const float* sums = sums_;
    const float* total = total_;
    for (int64_t head = 0; head < p_.heads; head++)
      for (int64_t query = 0; query < queries_; query++, sums += columns_ * W, total++) {
        T* to = query_at(c_.out, head, query);
        for (int64_t d = 0; d < c_.head_dim; d += W)
          store_part(to + d, load(sums + d) / *total, static_cast<int>(std::min<int64_t>(W, c_.head_dim - d)));
      }
  }

  const AttentionCall& c_;
  const AttentionPiece& p_;
  const int64_t group_, queries_;  // of one head of keys
  const int64_t steps_, columns_;  // of a score; blocks of a result
  const int64_t q_stride_;         // words
  bool more_;                      // rows to prefetch, at next_
  int64_t place_memory_[2][TILE];
  int64_t *places_ = place_memory_[0], *next_ = place_memory_[1];
  Word *q_, *weights_;
  float *sums_, *largest_, *total_;  // of all heads
  float *shrink_, *scores_;
  Weight *keys_, *values_;
};

}  // namespace quire
