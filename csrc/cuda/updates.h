// u = sum_k v_k (w_k - g) of a piece of all clients, formed in shared memory; and on the way the weighted sum of them.
#pragma once
#include "mix.h"

namespace fastagg {
namespace gpu {

constexpr int times_threads = 128;
template <class S> constexpr int elements_at_once = sizeof(S) == 2 ? 2 : 1;  // of a thread, when u is formed

template <class C> struct Scratch {
  C *u, *g;                 // [elements]
  double *scale, *inverse;  // [vectors]: a power of two that makes u as large as an update, whatever the weights
  uint32_t* largest;        // [vectors]: bits of u's largest magnitude in the item

  static size_t bytes(int vectors, int elements) {
    return sizeof(C) * 2 * elements + (2 * sizeof(double) + sizeof(uint32_t)) * vectors;
  }
  __device__ Scratch(unsigned char* memory, int vectors, int elements) {
    u = reinterpret_cast<C*>(memory), g = u + elements;  // first: they are read 16 bytes at a time
    scale = reinterpret_cast<double*>(g + elements), inverse = scale + vectors;
    largest = reinterpret_cast<uint32_t*>(inverse + vectors);
  }
};

__device__ __forceinline__ double power_of_two(int exponent) {
  const uint64_t bits = uint64_t(1023 + exponent) << 52;
  double power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

// e of the largest weight, which is in [2^(e - 1), 2^e); not so large that 2^e or 2^-e is not a number. Asked by a
// warp.
__device__ __forceinline__ int exponent_of(const double* weights, int clients) {
  double most = 0;
  for (int k = int(threadIdx.x % 32); k < clients; k += 32) most = fmax(most, fabs(weights[k]));
#pragma unroll
  for (int i = 16; i; i /= 2) most = fmax(most, __shfl_xor_sync(0xffffffffu, most, i));
  uint64_t bits;
  memcpy(&bits, &most, sizeof bits);
  const int exponent = int(bits >> 52) - 1022;
  return exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;
}

// Adds clients [k, k + N) to u, and with MIXED to the weighted sums. All of them are loaded before the first is used.
template <int N, class S, class C, int V, bool MIXED, class A>
__device__ __forceinline__ void add_updates(const Mix& m, int tensor, int64_t at, const double* weights, int k,
                                            const C (&g)[V], double (&u)[V], A (&sum)[V]) {
  Elements<S, V, (V > 1)> x[N];
#pragma unroll
  for (int n = 0; n < N; ++n) x[n].load_from(client_of<S>(m, tensor, k + n) + at, 0);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const double w = weights[k + n];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      u[v] = multiply_add(double(C(widen(x[n].element[v])) - g[v]), w, u[v]);
      if (MIXED) sum[v] = multiply_add(A(widen(x[n].element[v])), A(w), sum[v]);
    }
  }
}

// u of V elements from `at` on, before it is scaled; with MIXED the outputs as well, by the additions of mix_elements
template <class S, class C, int V, bool MIXED>
__device__ __forceinline__ void sum_updates(const Times& t, const Mix& m, int tensor, int64_t at, int vector,
                                            const C (&g)[V], double (&u)[V]) {
  using A = typename Accumulator<S>::type;
  const double* weights = m.weights + (int64_t(m.row[tensor]) * t.vectors + vector) * m.clients;
  A sum[V] = {};
  int k = 0;
#pragma unroll 1
  for (; k + 8 <= m.clients; k += 8) add_updates<8, S, C, V, MIXED>(m, tensor, at, weights, k, g, u, sum);
  if (k + 4 <= m.clients) add_updates<4, S, C, V, MIXED>(m, tensor, at, weights, k, g, u, sum), k += 4;
  if (k + 2 <= m.clients) add_updates<2, S, C, V, MIXED>(m, tensor, at, weights, k, g, u, sum), k += 2;
  if (k < m.clients) add_updates<1, S, C, V, MIXED>(m, tensor, at, weights, k, g, u, sum);
  if (!MIXED) return;
  Elements<S, V, (V > 1)> y;
  bool finite = true;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    y.element[v] = rounded<S>(sum[v]);
    finite &= widen(y.element[v]) - widen(y.element[v]) == 0;
  }
  y.store_to(output_of<S>(m, tensor, vector) + at, 0);
  if (!finite && m.not_finite) m.not_finite[tensor] = 1;
}

// u, and with the first vector g, of elements [begin, begin + count) of a tensor; zeros after them
template <class S, class C, bool MIXED> struct Former {
  const Times& t;
  const Mix& m;
  const Scratch<C>& scratch;
  int tensor, vector;
  int64_t begin;
  uint32_t size = 0;

  template <int V> __device__ __forceinline__ void form(int e, bool inside) {
    C g[V] = {}, u[V] = {};
    if (inside) {
      Elements<S, V, (V > 1)> center;
      center.load_from(reinterpret_cast<const S*>(t.rows.address[int64_t(tensor) * t.rows.rows]) + begin + e, 0);
#pragma unroll
      for (int v = 0; v < V; ++v) g[v] = C(widen(center.element[v]));
      double sum[V] = {};
      sum_updates<S, C, V, MIXED>(t, m, tensor, begin + e, vector, g, sum);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        u[v] = C(sum[v] * scratch.scale[vector]);
        if (sizeof(C) == 8) continue;
        uint32_t magnitude = __float_as_uint(float(u[v])) & 0x7fffffffu;
        if (magnitude == 0 && sum[v] != 0) magnitude = 1;  // what has become zero must not be taken for it
        size = magnitude > size ? magnitude : size;
      }
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      scratch.u[e + v] = u[v];
      if (vector == 0) scratch.g[e + v] = g[v];
    }
  }
  __device__ __forceinline__ void form_all(int count) {
    constexpr int V = elements_at_once<S>;
    int done = 0;
    if (V > 1 && m.aligned[tensor]) {
      done = count / V * V;
      for (int e = int(threadIdx.x) * V; e < done; e += times_threads * V) form<V>(e, true);
    }
    for (int e = done + int(threadIdx.x); e < t.elements; e += times_threads) form<1>(e, e < count);
    if (sizeof(C) == 4 && size > scratch.largest[vector]) atomicMax(&scratch.largest[vector], size);
  }
};

}  // namespace gpu
}  // namespace fastagg
