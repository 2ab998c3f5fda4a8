// Chooses the SIMD level. FASTAGG_SIMD (read by the Python side) may lower it, never raise it.
#include <atomic>
#include <cstring>

#include "../fastagg.h"
#include "kernels.h"

namespace fastagg {
namespace {

#if defined(__x86_64__)
const Kernels* const levels[] = {&kernels_baseline, &kernels_avx2, &kernels_avx512};
int best_level() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? 2 : 1;
}
#else
const Kernels* const levels[] = {&kernels_baseline};
int best_level() { return 0; }
#endif

const int best = best_level();
std::atomic<const Kernels*> current{levels[best]};

}  // namespace

const Kernels& kernels() { return *current.load(std::memory_order_relaxed); }
const char* simd_level() { return kernels().name; }
const char* simd_best() { return levels[best]->name; }

bool set_simd(const char* level) {
  const char* const names[] = {"baseline", "avx2", "avx512"};
  for (int i = 0; i < 3; ++i)
    if (std::strcmp(level, names[i]) == 0) {
      current = levels[i < best ? i : best];
      return true;
    }
  return false;
}

}  // namespace fastagg
