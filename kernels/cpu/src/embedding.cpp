#include <cstring>

#include "api.h"
#include "tape.h"
#include "parallel.h"

using namespace quire;

// table [.., row_bytes] at ids [rows] -> out [rows, row_bytes]
QUIRE_API void quire_embed(int64_t rows, int64_t row_bytes, const int32_t* ids, const void* table, void* out) {
  const double nanoseconds = rows * (50 + row_bytes / 20.0);  // a cache miss per row, then memory bandwidth
  parallel_for(rows, grain_for(rows, nanoseconds), nanoseconds, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      std::memcpy((char*)out + i * row_bytes, (const char*)table + ids[i] * row_bytes, row_bytes);
  });
}

QUIRE_RECORDABLE(embed);
