// Divides attention into pieces of work (attention.h) for the threads.
#include <vector>

#include "api.h"
#include "attention.h"
#include "tape.h"

namespace quire {
namespace {

// Prefetching costs a tenth if one call repeats on the same 2 to 4 MB. In a model other layers run in
// between: a decode step of 32 x 128 gains 17 % with 2 MB a layer (8 layers, 4 heads of 32), and a fifth with 17 MB.
constexpr double FAR_BYTES = 1 << 20;

// QUERIES for latent attention, with longer keys: a prompt of 1,024 tokens and 16 heads takes 95 to 96 ms
// on one thread of a Zen 5, 101 with 64, 93 to 97 with 256.
constexpr int LATENT_QUERIES = 128;

// Least heads of latent attention per tile of keys and values: loading a tile takes as long as 10 of them.
constexpr int64_t LEAST_GROUP = 8;

// Fits to one thread of a Zen 5, bfloat16, heads of 32 and 128: a query and a key take 0.22 ns + 0.009 ns an element
// (the exponential, and two products), loading a key and its value 0.095 ns an element.
double nanoseconds_of(const AttentionCall& call, const AttentionPiece& piece) {
  const double last = piece.position + piece.rows, size = call.head_dim;
  const double seen = (call.window ? std::min<double>(last, call.window + piece.rows) : last) + TILE / 2;
  const double products = 0.5 * (size + call.key_dim());  // average of a key and a value
  return 100 + seen * piece.heads * (piece.rows * call.group() * (0.22 + 0.009 * products) + 0.095 * products);
}

// Chunks are divided by rows and heads, single rows only by heads, and only if there are too few of them for the
// threads: the heads of a token are contiguous in memory.
void cut(const AttentionCall& call, std::vector<AttentionPiece>& pieces) {
  const int32_t kv_heads = static_cast<int32_t>(call.kv_heads);
  const int32_t tall = static_cast<int32_t>(std::max<int64_t>(1, (call.tail_dim ? LATENT_QUERIES : QUERIES) / call.group()));
  const int64_t wanted = 4 * num_threads();
  const int32_t shares =
      static_cast<int32_t>(std::min<int64_t>(kv_heads, (wanted + call.num_seqs - 1) / call.num_seqs));
  for (int32_t seq = 0; seq < call.num_seqs; seq++) {
    const int32_t rows = call.query_start[seq + 1] - call.query_start[seq], len = call.seq_lens[seq];
    const int32_t heads = rows == 1 ? (kv_heads + shares - 1) / shares : 1;
    for (int32_t end = rows; end > 0; end -= tall) {  // longest first: short pieces balance the end
      const int32_t count = std::min(end, tall);
      for (int32_t head = 0; head < kv_heads; head += heads)
        pieces.push_back({seq, end - count, count, len - rows + end - count, head, std::min(heads, kv_heads - head)});
    }
  }
}

template <class T>
void attend(AttentionCall& call) {
  static thread_local std::vector<AttentionPiece> pieces;
  pieces.clear();
  cut(call, pieces);
  double nanoseconds = 0, positions = 0;
  for (const AttentionPiece& piece : pieces) nanoseconds += nanoseconds_of(call, piece);
  for (int64_t seq = 0; seq < call.num_seqs; seq++) positions += call.seq_lens[seq];
  call.far = positions * call.token_stride * (call.k_cache == call.v_cache ? 1 : 2) * sizeof(T) > FAR_BYTES;
  const AttentionPiece* all = pieces.data();
  const int64_t count = pieces.size();
  parallel_for(count, grain_for(count, nanoseconds), nanoseconds, [&call, all](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      Attention<T>(call, all[i]).run(i + 1 < end && all[i + 1].rows == 1 ? &all[i + 1] : nullptr);
  });
}

}  // namespace
}  // namespace quire

using namespace quire;

// Shapes as in kernels/reference/attention/paged_attention.py; the caches have q's dtype.
QUIRE_API void quire_paged_attention(int64_t dtype, int64_t num_seqs, int64_t q_heads, int64_t kv_heads,
                                     int64_t head_dim, int64_t block_size, int64_t table_width, int64_t window, int64_t chunked,
                                     double scale, double softcap, const void* q, const void* k_cache, const void* v_cache,
                                     const int32_t* block_tables, const int32_t* query_start, const int32_t* seq_lens,
                                     const float* sinks, const int64_t* tree_mask, const int32_t* seen_ends, void* out) {
  AttentionCall call{num_seqs,   q_heads,  kv_heads, head_dim,     block_size,  table_width,    window,
                     chunked != 0,
                     kv_heads * head_dim,  head_dim, float(scale), float(softcap),
                     q,          k_cache,  v_cache,  block_tables, query_start, seq_lens,       out,
                     sinks,      false};
  call.tree_mask = tree_mask;
  call.seen_ends = seen_ends;
  dtype == FLOAT32 ? attend<float>(call) : attend<bf16>(call);
}

QUIRE_RECORDABLE(paged_attention);

// Shapes as in kernels/reference/attention/latent_attention.py; the cache has q's dtype. In a piece of work some
// heads use one key: as many as leave no thread idle, because each piece loads the tile's keys and values
// once.
QUIRE_API void quire_latent_attention(int64_t dtype, int64_t num_seqs, int64_t heads, int64_t rank, int64_t rope,
                                      int64_t block_size, int64_t table_width, double scale, const void* q,
                                      const void* q_rotated, int64_t token_stride, int64_t head_stride,
                                      const void* cache, const int32_t* block_tables, const int32_t* query_start,
                                      const int32_t* seq_lens, void* out) {
  int64_t shares = 1;
  while (query_start[num_seqs] * shares < 4 * num_threads() && heads % (2 * shares) == 0 &&
         heads / (2 * shares) >= LEAST_GROUP)
    shares *= 2;
  AttentionCall call{num_seqs, heads,  shares, rank,         block_size,  table_width,    0,
                     false,
                     rank + rope,      0,      float(scale), 0.0f,
                     q,        cache,  cache,  block_tables, query_start, seq_lens,       out,
                     nullptr,  false,  q_rotated, rope,      token_stride, head_stride};
  dtype == FLOAT32 ? attend<float>(call) : attend<bf16>(call);
}

QUIRE_RECORDABLE(latent_attention);
