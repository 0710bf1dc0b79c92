#include <cstdint>

#include "api.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

// Requests huge pages for fewer TLB misses; affects pages that have not been touched yet.
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

// Pre-faults pages as a write would, keeping their contents. Older systems (before
// Linux 5.14) fault them at the first write only.
QUIRE_API void quire_populate(void* memory, int64_t bytes) {
#if defined(__linux__)
  constexpr int POPULATE_WRITE = 23;  // MADV_POPULATE_WRITE, missing in older headers
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory) & ~(page - 1);
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory) + bytes;
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, POPULATE_WRITE);
#else
  (void)memory, (void)bytes;
#endif
}
