// Rows on their way to being multiplied: a block takes a pair of groups of rows, and stages a piece of each of their
// rows in shared memory, converted and centred.
#pragma once
#include "mix.h"

namespace fastagg {
namespace gpu {

constexpr int tensor_core_rows = 64;  // of a group
void multiply_on_tensor_cores(int dtype, const Products&, const Mix&, Stream);

// The pair of groups that is this block's: rows [a, a + na) against rows [b, b + nb)
struct Pair {
  int number, a, na, b, nb;
  bool diagonal;  // the two are the same
};

__device__ __forceinline__ Pair pair_of(const Products& p, const Shape& s, int number) {
  int i = 0, j = number;
  if (p.triangle)
    while (j > i) j -= ++i;
  else
    i = number / s.groups_b, j = number % s.groups_b;
  const int a = i * s.size_a, b = j * s.size_b;
  return {number, a, min(s.size_a, p.a_rows - a), b, min(s.size_b, p.b_rows - b), p.triangle && i == j};
}

// What float32 may be trusted with: no product or sum of them overflows, and no product that matters underflows.
constexpr float most_trusted = 0x1p50f;

template <class C> struct Stage {
  C* values;          // [count, stride]
  int64_t* address;   // [count + 1]: of each row in the tensor at hand, 0 for none; the last is the center's
  uint32_t* largest;  // [count]: bits of the largest magnitude seen
  int count, stride;

  static size_t bytes(int count, int stride) {
    return (sizeof(C) * stride + sizeof(int64_t) + sizeof(uint32_t)) * count + sizeof(int64_t);
  }
  __device__ Stage(unsigned char* memory, int rows, int row_stride) : count(rows), stride(row_stride) {
    values = reinterpret_cast<C*>(memory);
    address = reinterpret_cast<int64_t*>(values + count * stride);
    largest = reinterpret_cast<uint32_t*>(address + count + 1);
    for (int r = int(threadIdx.x); r < count; r += int(blockDim.x)) largest[r] = 0;
  }

  // Rows of side a come first, side b from row size_a on; a diagonal pair has side a only. The addresses of the tensor
  // before were last read ahead of a barrier, so they may be written over at once.
  __device__ __forceinline__ void begin_tensor(const Products& p, const Shape& s, const Pair& pair, int tensor) {
    const int64_t* rows = p.rows.address + int64_t(tensor) * p.rows.rows;
    for (int r = int(threadIdx.x); r <= count; r += int(blockDim.x)) {
      const bool in_a = r < s.size_a;
      const int within = in_a ? r : r - s.size_a;
      const bool there = r < count && within < (in_a ? pair.na : pair.nb);
      const int row = in_a ? p.a_first + pair.a + within : p.b_first + pair.b + within;
      // the center itself is marked by an odd address: it is not subtracted from itself
      address[r] = r == count ? (p.centred ? rows[0] : 0) : there ? rows[row] | (p.centred && row == 0) : 0;
    }
    __syncthreads();
  }

  // Elements [at, at + left), at most 2^shift vectors of every row; U loads of a thread are in flight at once.
  template <class S, int U> __device__ __forceinline__ void load_rows(int shift, int64_t at, int left, bool aligned) {
    constexpr int V = per_vector<S>;
    const int total = count << shift;
    for (int base = int(threadIdx.x); base < total; base += U * int(blockDim.x)) {
      Vector<S> w[U], g[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int n = base + u * int(blockDim.x), row = n >> shift, e = (n - (row << shift)) * V;
        if (n >= total) break;
        const int64_t where = address[row], center = where & 1 ? 0 : address[count];
        if (!where || e >= left) continue;
        w[u] = load(reinterpret_cast<const S*>(where & ~int64_t(1)) + at + e, left - e, aligned);
        if (center) g[u] = load(reinterpret_cast<const S*>(center) + at + e, left - e, aligned);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int n = base + u * int(blockDim.x), row = n >> shift, e = (n - (row << shift)) * V;
        if (n < total) put(row, e, w[u], g[u]);
      }
    }
  }

  // True of a thread that sees no row which float32 cannot be trusted with; to be asked when all is loaded, and a
  // barrier passed since
  __device__ __forceinline__ bool trusted(float least) const {
    for (int r = int(threadIdx.x); r < count; r += int(blockDim.x)) {
      const float size = __uint_as_float(largest[r]);
      if (!(size == 0 || (size >= least && size <= most_trusted))) return false;
    }
    return true;
  }

 private:
  template <class S> __device__ __forceinline__ void put(int row, int e, const Vector<S>& w, const Vector<S>& g) {
    constexpr int V = per_vector<S>, P = per_vector<C>;
    uint32_t size = 0;
#pragma unroll
    for (int v = 0; v < V; v += P < V ? P : V) {
      Vector<C> d;
#pragma unroll
      for (int i = 0; i < (P < V ? P : V); ++i) {
        d.element[i] = C(widen(w.element[v + i])) - C(widen(g.element[v + i]));
        if (sizeof(C) == 4) {
          const uint32_t magnitude = __float_as_uint(float(d.element[i])) & 0x7fffffffu;
          size = magnitude > size ? magnitude : size;
        }
      }
      *reinterpret_cast<uint4*>(values + row * stride + e + v) = d.raw;
    }
    // asked before it is told: after the first few vectors the answer is nearly always no
    if (sizeof(C) == 4 && size > largest[row]) atomicMax(&largest[row], size);
  }
};

}  // namespace gpu
}  // namespace fastagg
