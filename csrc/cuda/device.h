// What kernels share: types, loads of 16 bytes, and the walk through an item's chunks.
#pragma once
#include "../fastagg.h"
#include "gpu.h"

namespace fastagg {
namespace gpu {

template <class S> constexpr int per_vector = 16 / int(sizeof(S));

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

template <class S, class A> __device__ __forceinline__ S rounded(A x) { return S(x); }  // float and double, from double
template <> __device__ __forceinline__ __nv_bfloat16 rounded(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half rounded(float x) { return __float2half_rn(x); }

__device__ __forceinline__ float multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
__device__ __forceinline__ double multiply_add(double x, double y, double z) { return fma(x, y, z); }

// Sixteen bytes of a tensor
template <class S> union Vector {
  uint4 raw;
  S element[per_vector<S>];
  __device__ Vector() : raw{0, 0, 0, 0} {}
};

// `left` elements from p on, one by one, at most a vector's; zeros after them
template <class S> __device__ __forceinline__ Vector<S> load_some(const S* p, int left) {
  Vector<S> v;
#pragma unroll
  for (int i = 0; i < per_vector<S>; ++i)
    if (i < left) v.element[i] = p[i];
  return v;
}

// f(tensor, first element, number of elements) for every chunk of an item
template <class F> __device__ __forceinline__ void for_each_chunk(const Work& work, const Item& item, const F& f) {
  int place = item.place;
  int64_t begin = int64_t(item.chunk) * chunk_elements;
  for (int n = 0; n < item.chunks; ++n) {
    const int tensor = work.order[place];
    const int64_t left = work.numel[tensor] - begin;
    f(tensor, begin, int(left < chunk_elements ? left : chunk_elements));
    begin += chunk_elements;
    if (left <= chunk_elements) begin = 0, ++place;
  }
}

__device__ __forceinline__ Item item_of(const Work& work, int64_t n) { return work.items[work.first + n]; }

}  // namespace gpu
}  // namespace fastagg
