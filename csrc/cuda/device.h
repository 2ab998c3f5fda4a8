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

// Loads from the tensors of a call. Their addresses come from tables in memory, so the compiler cannot know that they
// are global, and would emit generic loads, which first look up the address space. Kernels never write a tensor that
// they read.
template <int BYTES> struct Bits;
template <> struct Bits<1> {
  using type = unsigned char;
};
template <> struct Bits<2> {
  using type = unsigned short;
};
template <> struct Bits<4> {
  using type = unsigned int;
};
template <> struct Bits<8> {
  using type = unsigned long long;
};
template <class S> __device__ __forceinline__ S load(const S* p) {
  using B = typename Bits<sizeof(S)>::type;
  const B bits = __ldg(reinterpret_cast<const B*>(p));
  S value;
  memcpy(&value, &bits, sizeof(S));
  return value;
}
template <class S> __device__ __forceinline__ Vector<S> load_vector(const S* p) {
  Vector<S> v;
  v.raw = __ldg(reinterpret_cast<const uint4*>(p));
  return v;
}

template <class S> __device__ __forceinline__ void store(S* p, S value) {
  using B = typename Bits<sizeof(S)>::type;
  B bits;
  memcpy(&bits, &value, sizeof(S));
  __stwb(reinterpret_cast<B*>(p), bits);
}
template <class S> __device__ __forceinline__ void store_vector(S* p, const Vector<S>& v) {
  __stwb(reinterpret_cast<uint4*>(p), v.raw);
}

// The value at p, or zero. The load is predicated and not branched around: where branches meet, nvcc waits for the
// loads before.
template <class S> __device__ __forceinline__ S load_if(bool wanted, const S* p) {
  typename Bits<sizeof(S)>::type bits = 0;
#ifdef FASTAGG_EMULATED
  if (wanted) return load(p);
#else
#define LOAD "{.reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.nc."
  if constexpr (sizeof(S) == 2) asm(LOAD "u16 %0, [%1];}" : "+h"(bits) : "l"(p), "r"(int(wanted)));
  if constexpr (sizeof(S) == 4) asm(LOAD "u32 %0, [%1];}" : "+r"(bits) : "l"(p), "r"(int(wanted)));
  if constexpr (sizeof(S) == 8) asm(LOAD "u64 %0, [%1];}" : "+l"(bits) : "l"(p), "r"(int(wanted)));
#undef LOAD
#endif
  S value;
  memcpy(&value, &bits, sizeof(S));
  return value;
}

// `left` elements from p on, one by one, at most a vector's; zeros after them
template <class S> __device__ __forceinline__ Vector<S> load_some(const S* p, int left) {
  Vector<S> v;
#pragma unroll
  for (int i = 0; i < per_vector<S>; ++i) v.element[i] = load_if(i < left, p + i);
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
