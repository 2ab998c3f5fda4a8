// Kernels with mistakes, to see that the emulator shows them.
#include <pybind11/pybind11.h>

#include "cuda/target.h"

using fastagg::gpu::launch;

// out[i] = i + 1, handed over through shared memory; without the barrier that is a race
template <bool BARRIER> __global__ void neighbour(int* out) {
  SHARED_MEMORY
  int* shared = reinterpret_cast<int*>(shared_memory);
  const int i = int(threadIdx.x), n = int(blockDim.x);
  shared[i] = i;
  if (BARRIER) __syncthreads();
  out[i] = shared[(i + 1) % n];
}

__global__ void barrier_for_some(int* out) {
  if (threadIdx.x < 7) __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void two_barriers(int* out) {
  if (threadIdx.x < 7)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void shuffle_for_some(int* out) {
  if (threadIdx.x != 3) out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, int(threadIdx.x), 1);
}

__global__ void unwritten(float* out) {
  SHARED_MEMORY
  out[threadIdx.x] = reinterpret_cast<float*>(shared_memory)[threadIdx.x];
}

PYBIND11_MODULE(FASTAGG_MODULE, module) {
  module.def("set_order", &emulator::set_order);
  module.def("run", [](const std::string& name, int64_t address, int threads) {
    int* out = reinterpret_cast<int*>(address);
    const size_t shared = 4 * size_t(threads);
    if (name == "neighbour") launch("neighbour", neighbour<true>, 1, threads, shared, {}, out);
    if (name == "race") launch("race", neighbour<false>, 1, threads, shared, {}, out);
    if (name == "barrier_for_some") launch("barrier_for_some", barrier_for_some, 1, threads, 0, {}, out);
    if (name == "two_barriers") launch("two_barriers", two_barriers, 1, threads, 0, {}, out);
    if (name == "shuffle_for_some") launch("shuffle_for_some", shuffle_for_some, 1, threads, 0, {}, out);
    if (name == "unwritten") launch("unwritten", unwritten, 1, threads, shared, {}, reinterpret_cast<float*>(out));
  });
}
