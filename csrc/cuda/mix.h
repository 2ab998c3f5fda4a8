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

// V elements that a thread has of a tensor: neighbours that are one aligned vector (V = per_vector) or word, or single
// ones, `stride` apart so that the lanes of a warp read neighbours.
template <class S, int V, bool VECTOR> struct Elements {
  static constexpr bool is_word = VECTOR && V < per_vector<S>;
  S element[V];

  __device__ __forceinline__ void load_from(const S* p, int stride) {
    if constexpr (is_word) {
      const auto word = load(reinterpret_cast<const typename Bits<V * sizeof(S)>::type*>(p));
      memcpy(element, &word, sizeof element);
    } else if (VECTOR) {
      const Vector<S> v = load_vector(p);
#pragma unroll
      for (int i = 0; i < V; ++i) element[i] = v.element[i];
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) element[i] = load(p + i * stride);
    }
  }
  __device__ __forceinline__ void store_to(S* p, int stride) const {
    if constexpr (is_word) {
      typename Bits<V * sizeof(S)>::type word;
      memcpy(&word, element, sizeof element);
      store(reinterpret_cast<decltype(word)*>(p), word);
    } else if (VECTOR) {
      Vector<S> v;
#pragma unroll
      for (int i = 0; i < V; ++i) v.element[i] = element[i];
      store_vector(p, v);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) store(p + i * stride, element[i]);
    }
  }
};

// Adds clients [k, k + N) to the sums. All of them are loaded before the first is used.
template <int N, class S, int V, bool VECTOR, int MB, class A>
__device__ __forceinline__ void add_clients(const Mix& m, int tensor, int64_t at, int stride, const double* weights,
                                            int k, A (&sum)[MB][V]) {
  Elements<S, V, VECTOR> x[N];
#pragma unroll
  for (int n = 0; n < N; ++n) x[n].load_from(client_of<S>(m, tensor, k + n) + at, stride);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int b = 0; b < MB; ++b) {
      const A w = A(weights[b * m.clients + k + n]);
#pragma unroll
      for (int v = 0; v < V; ++v) sum[b][v] = multiply_add(A(widen(x[n].element[v])), w, sum[b][v]);
    }
}

// Outputs [output, output + MB) of the V elements from `at` on. AHEAD clients (1, 2, 4 or 8) are read at once, and what
// is left of them by 4, 2 and 1.
template <class S, int V, bool VECTOR, int MB, int AHEAD>
__device__ __forceinline__ void mix_elements(const Mix& m, int tensor, int64_t at, int stride, int output) {
  using A = typename Accumulator<S>::type;
  A sum[MB][V] = {};
  const double* weights = m.weights + (int64_t(m.row[tensor]) * m.outputs + output) * m.clients;
  int k = 0;
#pragma unroll 1
  for (; k + AHEAD <= m.clients; k += AHEAD)
    add_clients<AHEAD, S, V, VECTOR, MB>(m, tensor, at, stride, weights, k, sum);
  if (AHEAD > 4 && k + 4 <= m.clients) add_clients<4, S, V, VECTOR, MB>(m, tensor, at, stride, weights, k, sum), k += 4;
  if (AHEAD > 2 && k + 2 <= m.clients) add_clients<2, S, V, VECTOR, MB>(m, tensor, at, stride, weights, k, sum), k += 2;
  if (AHEAD > 1 && k < m.clients) add_clients<1, S, V, VECTOR, MB>(m, tensor, at, stride, weights, k, sum);

  decltype(widen(S{})) seen = 0;  // NaN as soon as an output is not finite
#pragma unroll
  for (int b = 0; b < MB; ++b) {
    Elements<S, V, VECTOR> y;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      y.element[v] = rounded<S>(sum[b][v]);
      seen = multiply_add(widen(y.element[v]), decltype(seen)(0), seen);
    }
    y.store_to(output_of<S>(m, tensor, output + b) + at, stride);
  }
  if (seen != 0 && m.not_finite) m.not_finite[tensor] = 1;
}

// Elements [begin, begin + count) of a tensor, one at a time: for a block that has just read them
template <class S> __device__ __forceinline__ void mix_piece(const Mix& m, int tensor, int64_t begin, int count) {
  for (int e = int(threadIdx.x); e < count; e += int(blockDim.x))
    for (int output = 0; output < m.outputs; ++output) mix_elements<S, 1, false, 1, 4>(m, tensor, begin + e, 0, output);
}

}  // namespace gpu
}  // namespace fastagg
