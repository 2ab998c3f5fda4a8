#include "../fastagg.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace fastagg {
namespace {

int64_t of_this_machine() {
  int64_t said = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
  said = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
  return said <= 0 ? 512 << 10 : std::clamp<int64_t>(said, 256 << 10, 2 << 20);
}

std::atomic<int64_t> bytes{of_this_machine()};

}  // namespace

int64_t cache_bytes() { return bytes.load(std::memory_order_relaxed); }
void set_cache_bytes(int64_t n) { bytes = n > 0 ? n : of_this_machine(); }

}  // namespace fastagg
