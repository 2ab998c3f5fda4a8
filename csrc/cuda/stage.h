// Rows on their way to being multiplied: a block takes a pair of groups of rows, and stages a piece of each of their
// rows in shared memory, converted and centred.
#pragma once
#include "mix.h"

namespace fastagg {
namespace gpu {

constexpr int tensor_core_rows = 64;  // of a group
void multiply_on_tensor_cores(int dtype, const Products&, Stream);

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

// Rows of side a come first, rows of side b from row size_a on; a diagonal pair has side a only. Rows that fill a side
// up to its size are zero.
template <class C> struct Stage {
  C* values;          // [count, stride]
  int64_t* address;   // [there + 1]: of each row that is there, in the tensor at hand; the last is the center's
  uint32_t* largest;  // [there]: bits of the largest magnitude seen
  int stride, size_a, na, there, center;  // center: which row is the center itself, or -1

  static size_t bytes(int count, int stride) {
    return (sizeof(C) * stride + sizeof(int64_t) + sizeof(uint32_t)) * count + sizeof(int64_t);
  }

  __device__ Stage(unsigned char* memory, const Products& p, const Shape& s, const Pair& pair, int row_stride)
      : stride(row_stride), size_a(s.size_a), na(pair.na), there(pair.diagonal ? pair.na : pair.na + pair.nb) {
    const int count = pair.diagonal ? s.size_a : s.size_a + s.size_b;
    values = reinterpret_cast<C*>(memory);
    address = reinterpret_cast<int64_t*>(values + count * stride);
    largest = reinterpret_cast<uint32_t*>(address + count + 1);
    center = !p.centred ? -1 : p.a_first + pair.a == 0 ? 0 : p.b_first + pair.b == 0 ? na : -1;
    for (int r = int(threadIdx.x); r < there; r += int(blockDim.x)) largest[r] = 0;
    for (int row = 0; row < count; ++row)
      if (row < size_a ? row >= na : row >= size_a + pair.nb)
        for (int e = int(threadIdx.x); e < stride; e += int(blockDim.x)) values[row * stride + e] = 0;
  }

  // The addresses of the tensor before were last read ahead of a barrier, so they may be written over at once.
  __device__ __forceinline__ void begin_tensor(const Products& p, const Pair& pair, int tensor) {
    const int64_t* rows = p.rows.address + int64_t(tensor) * p.rows.rows;
    for (int r = int(threadIdx.x); r <= there; r += int(blockDim.x))
      address[r] = r == there ? rows[0] : rows[r < na ? p.a_first + pair.a + r : p.b_first + pair.b + r - na];
    __syncthreads();
  }

  // Elements [at, at + left) of every row, and zeros after them, 2^shift vectors in all. A thread has U rows under way
  // at once: vectors where a piece is whole and aligned, as most are, else eight single elements.
  template <class S, int U>
  __device__ __forceinline__ void load_rows(int shift, int64_t at, int left, bool aligned, bool centred) {
    if (aligned && left >= per_vector<S> << shift)
      load_pieces<S, U, true>(shift, at, left, centred);
    else
      load_pieces<S, 8 / per_vector<S>, false>(shift, at, left, centred);
  }

  // True of a thread that sees no row which float32 cannot be trusted with; to be asked when all is loaded, and a
  // barrier passed since
  __device__ __forceinline__ bool trusted(float least) const {
    for (int r = int(threadIdx.x); r < there; r += int(blockDim.x)) {
      const float size = __uint_as_float(largest[r]);
      if (!(size == 0 || (size >= least && size <= most_trusted))) return false;
    }
    return true;
  }

 private:
  // A thread keeps to one place of the rows, reads the center there once, and then U rows at a time. There is no branch
  // between those loads, so that all are under way at once: where branches meet, nvcc waits for loads.
  template <class S, int U, bool VECTORS>
  __device__ __forceinline__ void load_pieces(int shift, int64_t at, int left, bool centred) {
    constexpr int V = per_vector<S>;
    const int columns = 1 << shift, threads = int(blockDim.x), lanes = threads >> shift ? threads >> shift : 1;
    const int lane = int(threadIdx.x) >> shift;
    if (columns <= threads && lane >= lanes) return;  // some threads may be left over
    const int first = columns <= threads ? int(threadIdx.x) & (columns - 1) : int(threadIdx.x);
    for (int column = first; column < columns; column += columns <= threads ? columns : threads) {
      const int e = column * V;
      auto read = [&](int64_t address) {
        const S* p = reinterpret_cast<const S*>(address) + at + e;
        return VECTORS ? load_vector(p) : load_some(p, left - e);
      };
      const Vector<S> g = centred ? read(address[there]) : Vector<S>();
      for (int base = columns <= threads ? lane : 0; base < there; base += U * lanes) {
        Vector<S> w[U];
#pragma unroll
        for (int u = 0; u < U; ++u) w[u] = read(address[min(base + u * lanes, there - 1)]);
#pragma unroll
        for (int u = 0; u < U; ++u)
          if (base + u * lanes < there) put(base + u * lanes, e, w[u], g);
      }
    }
  }

  template <class S> __device__ __forceinline__ void put(int r, int e, const Vector<S>& w, const Vector<S>& g) {
    constexpr int V = per_vector<S>, P = per_vector<C> < V ? per_vector<C> : V;
    const bool is_center = r == center;
    const int row = r < na ? r : size_a + r - na;
    uint32_t size = 0;
#pragma unroll
    for (int v = 0; v < V; v += P) {
      Vector<C> d;
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const C x = C(widen(w.element[v + i])), c = C(widen(g.element[v + i]));
        d.element[i] = is_center ? x : x - c;
        if (sizeof(C) == 4) {
          const uint32_t magnitude = __float_as_uint(float(d.element[i])) & 0x7fffffffu;
          size = magnitude > size ? magnitude : size;
        }
      }
      *reinterpret_cast<uint4*>(values + row * stride + e + v) = d.raw;
    }
    // asked before it is told: after the first few vectors the answer is nearly always no
    if (sizeof(C) == 4 && size > largest[r]) atomicMax(&largest[r], size);
  }
};

}  // namespace gpu
}  // namespace fastagg
