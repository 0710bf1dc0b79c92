// Masks logits by grammar bitmasks (kernels/reference/sampling/token_mask.py).
#include <algorithm>
#include <limits>

#include "api.h"
#include "parallel.h"
#include "tape.h"

namespace quire {
namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr int64_t BITS = 32;
constexpr double TOKEN_NS = 0.1;  // per logit in L2

void mask_row(float* row, int64_t size, const uint32_t* words) {
  for (int64_t at = 0; at < size; at += BITS, words++) {
    const uint32_t word = *words;
    const int64_t count = std::min(BITS, size - at);
    float* to = row + at;
    if (word == ~0u) continue;
    if (word == 0)
      std::fill(to, to + count, NONE);
    else
      for (int64_t i = 0; i < count; i++) to[i] = word >> i & 1 ? to[i] : NONE;
  }
}

}  // namespace
}  // namespace quire

using namespace quire;

// logits [.., vocab_size]; rows [count] or null: 0, 1, ...; masks [.., words]; places [count] or null: 0, 1, ...
QUIRE_API void quire_mask_logits(int64_t count, int64_t vocab_size, float* logits, const int64_t* rows,
                                 const uint32_t* masks, const int64_t* places) {
  const int64_t words = (vocab_size + BITS - 1) / BITS;
  const double nanoseconds = TOKEN_NS * count * vocab_size;
  parallel_for(count, grain_for(count, nanoseconds), nanoseconds, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      mask_row(logits + (rows ? rows[i] : i) * vocab_size, vocab_size, masks + (places ? places[i] : i) * words);
  });
}

QUIRE_RECORDABLE(mask_logits);
