// The kernels of one SIMD level. A .cpp per level defines FASTAGG_LEVEL and includes this, with flags of its own.
//
// Accumulation policy
//   row products: at most 36 additions to a float32 lane, then the lanes, then float64: an entry's error is about 1e-8
//                 of sqrt(G_ii G_jj) on random data (float16: 1e-7), under 1e-6 on constant data, and 2e-6 on data
//                 made up to defeat it. float64 tensors stay in float64.
//   mix:          float64 for float32 and float64 tensors, float32 for 16-bit ones; one rounding at the end.
// Shaped by: two FMA pipes of latency 4 need 8 accumulators in flight; AVX2 has 16 registers, so a 4 x 3 tile keeps
// 12 accumulators, 3 rows of b and 1 of a. Converting float32 to float64 costs mix nothing: it waits for memory.
#include "kernels.h"
#include "../fastagg.h"
#include "../network.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(FASTAGG_NEON)
#include <arm_neon.h>
#endif

namespace fastagg {
namespace FASTAGG_LEVEL {
namespace {

#include "simd-inl.h"

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#include "rows-inl.h"
#include "mix-inl.h"
#include "times-inl.h"
#include "sort-inl.h"
#include "ranked-inl.h"

uint64_t read(const void* p, size_t bytes) {  // four streams a thread: 10 % more than one, on two Zen 3 cores
  size_t quarter = bytes / 4 / 64 * 64;
  const char* s = (const char*)p;
  VU acc[4] = {};
  for (size_t at = 0; at < quarter; at += vector_bytes)
    for (int i = 0; i < 4; ++i) acc[i] += load_raw<VU>(s + i * quarter + at);
  VU all = acc[0] + acc[1] + acc[2] + acc[3];
  uint64_t sum = 0;
  for (int i = 0; i < lanes; ++i) sum += all[i];
  for (size_t at = 4 * quarter; at < bytes; ++at) sum += (unsigned char)s[at];
  return sum;
}

double fma_peak(int64_t iterations) {
  VF acc[12] = {}, x = VF{} + 1e-9f, y = VF{} + 0.5f;
  for (int64_t n = 0; n < iterations; ++n)
    unroll<12>([&](auto i) INLINE_LAMBDA {
      acc[i] = fma(acc[i], y, x);
      __asm__("" : "+" FASTAGG_VECTOR_REGISTER(acc[i]));  // or the compiler finds the closed form
    });
  float sum = 0;
  unroll<12>([&](auto i) INLINE_LAMBDA { sum += acc[i][0]; });
  return sum >= 0 ? double(iterations) * 12 * lanes * 2 : 0;
}

}  // namespace
}  // namespace FASTAGG_LEVEL

#define FASTAGG_STRING_(x) #x
#define FASTAGG_STRING(x) FASTAGG_STRING_(x)
#define FASTAGG_JOIN_(a, b) a##b
#define FASTAGG_JOIN(a, b) FASTAGG_JOIN_(a, b)
extern const Kernels FASTAGG_JOIN(kernels_, FASTAGG_LEVEL) = {
    FASTAGG_STRING(FASTAGG_LEVEL), FASTAGG_LEVEL::row_products_any, FASTAGG_LEVEL::mix_any,
    FASTAGG_LEVEL::gram_times_any, FASTAGG_LEVEL::ranked_any,       FASTAGG_LEVEL::read,
    FASTAGG_LEVEL::fma_peak};

}  // namespace fastagg
