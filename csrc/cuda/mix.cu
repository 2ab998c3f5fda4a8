// out = sum_k weight_k * client_k: a block reads a chunk of every client, 16 bytes a thread and client.
#include "mix.h"

namespace fastagg {
namespace gpu {
namespace {

constexpr int threads = 128;        // a chunk of 16-bit elements is one vector a thread, of float32 two
constexpr int outputs_at_once = 4;  // more would not fit in registers; a chunk is still in L1 for the next four
template <int MB> constexpr int blocks_per_sm = MB == 1 ? 5 : 3;
template <int MB> constexpr int clients_at_once = MB == 1 ? 8 : 4;

template <class S, int V, int MB>
__device__ __forceinline__ void mix_chunk(const Mix& m, int tensor, int64_t begin, int count, int output) {
  const int whole = count / V * V;
  for (int e = int(threadIdx.x) * V; e < whole; e += threads * V)
    mix_elements<S, V, MB, clients_at_once<MB>>(m, tensor, begin + e, output);
  for (int e = whole + int(threadIdx.x); e < count; e += threads)
    mix_elements<S, 1, MB, clients_at_once<MB>>(m, tensor, begin + e, output);
}

// Outputs are formed MB at a time, and what is left of them one by one.
template <class S, int MB> __global__ void __launch_bounds__(threads, blocks_per_sm<MB>) mix_kernel(Work work, Mix m) {
  constexpr int V = per_vector<S>;
  for_each_chunk(work, item_of(work, blockIdx.x), [&](int tensor, int64_t begin, int count) {
    const bool aligned = m.aligned[tensor];
    int output = 0;
    for (; output + MB <= m.outputs; output += MB)
      aligned ? mix_chunk<S, V, MB>(m, tensor, begin, count, output)
              : mix_chunk<S, 1, MB>(m, tensor, begin, count, output);
    if (MB > 1)
      for (; output < m.outputs; ++output) mix_chunk<S, 1, 1>(m, tensor, begin, count, output);
  });
}

template <class S> __global__ void __launch_bounds__(threads) maximum_kernel(Work work, Mix m) {
  for_each_chunk(work, item_of(work, blockIdx.x), [&](int tensor, int64_t begin, int count) {
    for (int64_t e = begin + threadIdx.x; e < begin + count; e += threads) {
      S largest = client_of<S>(m, tensor, 0)[e];
#pragma unroll 1  // counters have few elements
      for (int k = 1; k < m.clients; ++k) {
        const S other = client_of<S>(m, tensor, k)[e];
        largest = other > largest ? other : largest;
      }
      for (int output = 0; output < m.outputs; ++output) output_of<S>(m, tensor, output)[e] = largest;
    }
  });
}

}  // namespace

void mix(int dtype, const Work& work, const Mix& m, Stream stream) {
  auto go = [&](const char* name, void (*kernel)(Work, Mix)) {
    launch(name, kernel, work.count, threads, 0, stream, work, m);
  };
  const bool several = m.outputs >= outputs_at_once;
  switch (dtype) {
    case F32:
      return go("mix_float32", several ? mix_kernel<float, outputs_at_once> : mix_kernel<float, 1>);
    case F64:
      return go("mix_float64", several ? mix_kernel<double, outputs_at_once> : mix_kernel<double, 1>);
    case BF16:
      return go("mix_bfloat16", several ? mix_kernel<__nv_bfloat16, outputs_at_once> : mix_kernel<__nv_bfloat16, 1>);
    case F16:
      return go("mix_float16", several ? mix_kernel<__half, outputs_at_once> : mix_kernel<__half, 1>);
    case I8:
      return go("maximum_int8", maximum_kernel<int8_t>);
    case I16:
      return go("maximum_int16", maximum_kernel<int16_t>);
    case I32:
      return go("maximum_int32", maximum_kernel<int32_t>);
    case I64:
      return go("maximum_int64", maximum_kernel<int64_t>);
    case U8:
      return go("maximum_uint8", maximum_kernel<uint8_t>);
    default:
      throw std::invalid_argument("fastagg._cuda: unknown dtype");
  }
}

}  // namespace gpu
}  // namespace fastagg
