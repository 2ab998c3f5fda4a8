// A small stand-in for CUDA, for tests on machines without a GPU: kernels compiled by the host's C++ compiler run as
// they are, every thread of a block a fiber that goes on until it reaches a barrier or a warp-wide instruction.
//
// It is strict where hardware is lenient, so that mistakes show:
// - threads of a block run in an order that a seed shuffles anew between barriers: a race changes the result;
// - a barrier must be reached by all threads of the block at the same line, and a warp-wide instruction by all lanes;
// - shared memory is full of NaN when a block begins.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __syncthreads() ::emulator::barrier(__FILE__, __LINE__)
#define SHARED_MEMORY unsigned char* const shared_memory = ::emulator::shared_memory;

namespace emulator {

struct Index {
  unsigned x;
};
extern Index thread, block, threads, blocks;
extern unsigned char* shared_memory;

void set_order(uint64_t seed);  // 0: threads and blocks as they are numbered, 1: the other way round, else shuffled
std::map<std::string, std::pair<int, size_t>>& launched();  // kernel -> most threads and bytes of shared memory so far
void run(const char* name, int64_t blocks, int threads, size_t shared, const std::function<void()>& kernel);
void barrier(const char* file, int line);

// Hands `bytes` (at most 64) to the warp and waits for the other lanes; what lane i gave is at the result + 64 i.
const char* exchange(const void* given, size_t bytes, const char* what);

template <class T> T shuffle_xor(T value, int lane_mask) {
  const int lane = int(thread.x % 32);
  const char* all = exchange(&value, sizeof value, "__shfl_xor_sync");
  T other;
  std::memcpy(&other, all + 64 * (lane ^ lane_mask), sizeof other);
  return other;
}

}  // namespace emulator

#define threadIdx ::emulator::thread
#define blockIdx ::emulator::block
#define blockDim ::emulator::threads
#define gridDim ::emulator::blocks
#define __shfl_xor_sync(mask, value, lane_mask) ::emulator::shuffle_xor(value, lane_mask)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};
float __bfloat162float(__nv_bfloat16);
__nv_bfloat16 __float2bfloat16_rn(float);
float __half2float(__half);
__half __float2half_rn(float);
inline float __uint_as_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t __float_as_uint(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline void atomicMax(uint32_t* p, uint32_t value) { *p = std::max(*p, value); }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> void __stwb(T* p, T value) { *p = value; }
using std::memcpy;
using std::min;

// Tensor cores: what the instructions compute, with the truncation of sums that hardware was found to have.
void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
