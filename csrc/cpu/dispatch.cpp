// Chooses the SIMD level, kernel by kernel. FASTAGG_SIMD (read by the Python side) may lower it, never raise it.
//
// By the CPU's family and not by a measurement: which bits a Gram has must not depend on what else a machine was doing.
// Zen 4 takes vectors of 64 bytes in two halves, so AVX-512 multiplies no faster there than AVX2, and the Gram, whose
// sums wait in twice as much memory, is slower (20 ResNet-18s 1.15 times, 100 clients 1.37 times). Weighted sums and
// products with vectors gain up to 1.2 times by it.
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
#elif defined(__aarch64__)
const Kernels* const levels[] = {&kernels_baseline, &kernels_neon};
int best_level() { return 1; }  // every such CPU has it
#else
const Kernels* const levels[] = {&kernels_baseline};
int best_level() { return 0; }
#endif

constexpr int count = sizeof levels / sizeof *levels;
const int best = best_level();

Kernels fastest() {
  Kernels chosen = *levels[best];
#if defined(__x86_64__)
  if (best == 2 && __builtin_cpu_is("amdfam19h")) {
    chosen.row_products = kernels_avx2.row_products;
    chosen.name = "avx512 (Gram: avx2)";
  }
#endif
  return chosen;
}

const Kernels automatic = fastest();
std::atomic<const Kernels*> current{&automatic};

}  // namespace

const Kernels& kernels() { return *current.load(std::memory_order_relaxed); }
const char* simd_level() { return kernels().name; }
const char* simd_best() { return levels[best]->name; }
const char* simd_name(int i) { return 0 <= i && i < count ? levels[i]->name : nullptr; }

bool set_simd(const char* level) {
  if (std::strcmp(level, "auto") == 0) {
    current = &automatic;
    return true;
  }
  for (int i = 0; i < count; ++i)
    if (std::strcmp(level, levels[i]->name) == 0) {
      current = levels[i < best ? i : best];
      return true;
    }
  return false;
}

}  // namespace fastagg
