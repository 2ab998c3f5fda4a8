// out = sum_k weight_k * client_k: a block reads a chunk of every client, 16 bytes a thread and client.
//
// One kernel serves every dtype, so that a model of several is one launch. An item has one dtype, so a block never
// diverges; registers are those of the widest dtype, which the launch bounds limit in any case.
#include "mix.h"

namespace fastagg {
namespace gpu {
namespace {

constexpr int threads = 128;        // a chunk of 16-bit elements is one vector a thread, of float32 two
constexpr int outputs_at_once = 4;  // more would not fit in registers; a chunk is still in L1 for the next four
template <int MB> constexpr int blocks_per_sm = MB == 1 ? 4 : 3;
template <int MB> constexpr int clients_at_once = MB == 1 ? 8 : 4;

// Outputs [output, output + MB) of a chunk
template <class S, int MB>
__device__ __forceinline__ void mix_chunk(const Mix& m, int tensor, int64_t begin, int count, int output) {
  constexpr int V = per_vector<S>, strided = 4;
  int done = 0;
  if (m.aligned[tensor]) {
    done = count / V * V;
    for (int e = int(threadIdx.x) * V; e < done; e += threads * V)
      mix_elements<S, V, true, MB, clients_at_once<MB>>(m, tensor, begin + e, 0, output);
  } else {  // as many bytes in flight in single elements
    for (; done + threads * strided <= count; done += threads * strided)
      mix_elements<S, strided, false, MB, 4>(m, tensor, begin + done + int(threadIdx.x), threads, output);
  }
  for (int e = done + int(threadIdx.x); e < count; e += threads)
    mix_elements<S, 1, false, MB, clients_at_once<MB>>(m, tensor, begin + e, 0, output);
}

template <class S, int MB> __device__ __forceinline__ void mix_item(const Work& work, const Mix& m, const Item& item) {
  for_each_chunk(work, item, [&](int tensor, int64_t begin, int count) {
    int output = 0;
    for (; output + MB <= m.outputs; output += MB) mix_chunk<S, MB>(m, tensor, begin, count, output);
    if (MB > 2 && output + 2 <= m.outputs) mix_chunk<S, 2>(m, tensor, begin, count, output), output += 2;
    if (MB > 1 && output < m.outputs) mix_chunk<S, 1>(m, tensor, begin, count, output);
  });
}

template <class S> __device__ __forceinline__ void maximum_item(const Work& work, const Mix& m, const Item& item) {
  for_each_chunk(work, item, [&](int tensor, int64_t begin, int count) {
    for (int64_t e = begin + threadIdx.x; e < begin + count; e += threads) {
      S largest = load(client_of<S>(m, tensor, 0) + e);
#pragma unroll 1  // counters have few elements
      for (int k = 1; k < m.clients; ++k) {
        const S other = load(client_of<S>(m, tensor, k) + e);
        largest = other > largest ? other : largest;
      }
      for (int output = 0; output < m.outputs; ++output) store(output_of<S>(m, tensor, output) + e, largest);
    }
  });
}

// Outputs are formed MB at a time, and what is left of them by 2 and 1.
template <int MB> __global__ void __launch_bounds__(threads, blocks_per_sm<MB>) mix_kernel(Work work, Mix m) {
  const Item item = item_of(work, blockIdx.x);
  switch (m.dtype[work.order[item.place]]) {
    case F32:
      return mix_item<float, MB>(work, m, item);
    case F64:
      return mix_item<double, MB>(work, m, item);
    case BF16:
      return mix_item<__nv_bfloat16, MB>(work, m, item);
    case F16:
      return mix_item<__half, MB>(work, m, item);
    case I8:
      return maximum_item<int8_t>(work, m, item);
    case I16:
      return maximum_item<int16_t>(work, m, item);
    case I32:
      return maximum_item<int32_t>(work, m, item);
    case I64:
      return maximum_item<int64_t>(work, m, item);
    case U8:
      return maximum_item<uint8_t>(work, m, item);
  }
}

}  // namespace

void mix(const Work& work, const Mix& m, Stream stream) {
  const bool several = m.outputs > 1;
  launch(several ? "mix_several" : "mix", several ? mix_kernel<outputs_at_once> : mix_kernel<1>, work.count, threads, 0,
         stream, work, m);
}

}  // namespace gpu
}  // namespace fastagg
