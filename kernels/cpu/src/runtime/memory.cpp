#include <cstdint>

#include "api.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
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

// Has the system hand out the pages from here on, as a write to them would; what is there stays. Older systems (before
// Linux 5.14) do it at the first write only.
QUIRE_API void quire_populate(void* memory, int64_t bytes) {
#if defined(__linux__)
  constexpr int POPULATE_WRITE = 23;  // MADV_POPULATE_WRITE, which older headers do not name
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory) & ~(page - 1);
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory) + bytes;
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, POPULATE_WRITE);
#else
  (void)memory, (void)bytes;
#endif
}
