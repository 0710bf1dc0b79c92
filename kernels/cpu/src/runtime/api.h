// Common declarations of entry points. Names, argument order and types are repeated in native.py, which binds them.
#pragma once

#include <cstdint>

#define QUIRE_API extern "C" __attribute__((visibility("default")))

namespace quire {

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };

}  // namespace quire

QUIRE_API void quire_prefer_huge_pages(void* memory, int64_t bytes);
