// One source, two targets: a GPU by nvcc, or the emulator by any C++ compiler (FASTAGG_EMULATED; see emulator/).
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#ifdef FASTAGG_EMULATED
#include "emulator/emulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define SHARED_MEMORY extern __shared__ __align__(16) unsigned char shared_memory[];
#endif

namespace fastagg {
namespace gpu {

struct Stream {
  int device;
  void* handle;  // a cudaStream_t
};

#ifdef FASTAGG_EMULATED
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), int64_t blocks, int threads, size_t shared, Stream, A... args) {
  emulator::run(name, blocks, threads, shared, [&] { kernel(args...); });
}
#else
inline void check(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch would report it again
  throw std::runtime_error(std::string("fastagg._cuda: ") + what + ": " + cudaGetErrorString(error));
}

#ifdef __CUDACC__
// On the caller's stream; nobody waits. An error of the launch itself is raised with the kernel's name.
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), int64_t blocks, int threads, size_t shared, Stream stream,
            A... args) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error(std::string("fastagg._cuda: ") + name + ": too many blocks");
  if (shared > 48 << 10)
    check(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  // clang-format off
  kernel<<<unsigned(blocks), threads, shared, static_cast<cudaStream_t>(stream.handle)>>>(args...);
  // clang-format on
  check(name, cudaGetLastError());
}
#endif
#endif

}  // namespace gpu
}  // namespace fastagg
