// Finds earlier occurrences of the last tokens (services/worker/spec_decode/methods/ngram.py).
#include <algorithm>

#include "api.h"

namespace quire {
namespace {

// End of the earliest of the longest earlier occurrences of the last `shortest` to `longest` tokens; 0: none.
int32_t end_of_match(const int32_t* tokens, int64_t length, int64_t shortest, int64_t longest) {
  const int64_t last = length - 1;
  int64_t best = shortest - 1;
  int32_t found = 0;
  for (int64_t end = 0; end < last && best < longest; end++) {
    if (tokens[end] != tokens[last]) continue;
    const int64_t most = std::min(longest, end + 1);
    int64_t same = 1;
    while (same < most && tokens[end - same] == tokens[last - same]) same++;
    if (same > best) {
      best = same;
      found = static_cast<int32_t>(end + 1);
    }
  }
  return found;
}

}  // namespace
}  // namespace quire

// tokens [.., stride]; slots, lengths, ends [count]
QUIRE_API void quire_ends_of_matches(int64_t count, int64_t shortest, int64_t longest, const int32_t* tokens,
                                     int64_t stride, const int64_t* slots, const int32_t* lengths, int32_t* ends) {
  for (int64_t i = 0; i < count; i++)
    ends[i] = quire::end_of_match(tokens + slots[i] * stride, lengths[i], shortest, longest);
}
