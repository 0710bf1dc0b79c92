#include <cstdint>

#include "api.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

// Fewer TLB misses where memory is big enough to hold whole huge pages. Works on what has not been touched yet.
QUIRE_API void quire_prefer_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t HUGE = 1 << 21;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(memory) + HUGE - 1) & ~(HUGE - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) & ~(HUGE - 1);
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}
