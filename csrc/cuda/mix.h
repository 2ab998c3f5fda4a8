// Weighted sums, for the mix kernel and for kernels that form them on the way.
//
// Accumulation: float64 for float32 and float64 tensors, float32 for 16-bit ones, clients in order by fused
// multiply-add, one rounding at the end: the same bits as the CPU's kernel.
#pragma once
#include "device.h"

namespace fastagg {
namespace gpu {

template <class S> struct Accumulator {
  using type = float;
};
template <> struct Accumulator<float> {
  using type = double;
};
template <> struct Accumulator<double> {
  using type = double;
};

template <class S> __device__ __forceinline__ const S* client_of(const Mix& m, int tensor, int k) {
  return reinterpret_cast<const S*>(m.rows.address[int64_t(tensor) * m.rows.rows + m.first + k]);
}
template <class S> __device__ __forceinline__ S* output_of(const Mix& m, int tensor, int output) {
  return reinterpret_cast<S*>(m.out[int64_t(tensor) * m.outputs + output]);
}

// Outputs [output, output + MB), elements [at, at + V). V is 1, or a vector of aligned tensors. AHEAD clients are read
// at once.
template <class S, int V, int MB, int AHEAD>
__device__ __forceinline__ void mix_elements(const Mix& m, int tensor, int64_t at, int output) {
  using A = typename Accumulator<S>::type;
  A sum[MB][V] = {};
  const double* weights = m.weights + (int64_t(m.row[tensor]) * m.outputs + output) * m.clients;
#pragma unroll AHEAD
  for (int k = 0; k < m.clients; ++k) {
    const S* p = client_of<S>(m, tensor, k) + at;
    Vector<S> x;
    if (V == 1)
      x.element[0] = *p;
    else
      x.raw = *reinterpret_cast<const uint4*>(p);
#pragma unroll
    for (int b = 0; b < MB; ++b) {
      const A w = A(weights[b * m.clients + k]);
#pragma unroll
      for (int v = 0; v < V; ++v) sum[b][v] = multiply_add(A(widen(x.element[v])), w, sum[b][v]);
    }
  }
#pragma unroll
  for (int b = 0; b < MB; ++b) {
    Vector<S> y;
#pragma unroll
    for (int v = 0; v < V; ++v) y.element[v] = rounded<S>(sum[b][v]);
    S* p = output_of<S>(m, tensor, output + b) + at;
    if (V == 1)
      *p = y.element[0];
    else
      *reinterpret_cast<uint4*>(p) = y.raw;
  }
}

// Elements [begin, begin + count) of a tensor, one at a time: for a block that has just read them
template <class S> __device__ __forceinline__ void mix_piece(const Mix& m, int tensor, int64_t begin, int count) {
  for (int e = int(threadIdx.x); e < count; e += int(blockDim.x))
    for (int output = 0; output < m.outputs; ++output) mix_elements<S, 1, 1, 4>(m, tensor, begin + e, output);
}

}  // namespace gpu
}  // namespace fastagg
