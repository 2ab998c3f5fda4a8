// Products of the Gram with vectors, without the Gram: <d_k, u> for u = sum_j v_j d_j, d_k = w_k - g.
//
// A block takes a piece of a chunk of all clients. It reads the clients to form u, a thread per element, and leaves u
// and g in shared memory; then it reads them again, from a cache, and multiplies: eight lanes to a row. Pieces are so
// small that those of all blocks on the GPU together fit into the L2 cache (see piece_elements).
//
// u is summed in float64, clients in order, and rounded once. Products are summed in float32 over 128 elements of a row
// (16 additions to a sum), then in float64: over the piece, over the lanes, and over the item, in a fixed order.
//
// float32 may be too narrow for the squares of a row, or for u. The item's sums tell, and such items are done again in
// float64, as those of the Gram are.
#include "updates.h"

namespace fastagg {
namespace gpu {
namespace {

constexpr int threads = times_threads, lanes = 8, rows_at_once = threads / lanes;
constexpr int blocks_again = 256;
// What registers allow, with the loads of eight clients under way
template <class S, class C, bool MIXED>
constexpr int blocks_per_sm = sizeof(C) == 8 || (MIXED && elements_at_once<S> > 1) ? 4 : 5;

// A100 and H100 have about 75 KB of L2 cache for every block if five are on an SM; part of it holds what was read
// before. A block's threads need at least so many elements to have one (a word) each.
template <class S> int piece_elements(int clients) {
  constexpr int least = threads * elements_at_once<S>;
  int n = 4 * least;
  while (n > least && clients * sizeof(S) * n > 48 << 10) n /= 2;
  return n;
}

// What float32 may be trusted with, as squares of a row's length in an item, and as the largest element of u
constexpr double least_square = 0x1p-100, most_square = 0x1p100;
constexpr float least_u = 0x1p-50f, most_u = 0x1p60f;

template <class C> struct Sums {
  C square = 0, along = 0, product = 0;
  uint32_t seen = 0;

  // V elements d = x - own g of a row, own being 0 for the center's and else 1, against the g and u of these elements
  template <bool FIRST, class S>
  __device__ __forceinline__ void add(const Vector<S>& x, const C* g, const C* u, C own) {
    constexpr int V = per_vector<S>, P = per_vector<C> < V ? per_vector<C> : V;
#pragma unroll
    for (int v = 0; v < V; v += P) {
      Vector<C> center, other;
      center.raw = *reinterpret_cast<const uint4*>(g + v), other.raw = *reinterpret_cast<const uint4*>(u + v);
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const C c = center.element[i];
        const C d = multiply_add(c, -own, C(widen(x.element[v + i])));  // rounded as x - c is
        product = multiply_add(d, other.element[i], product);
        if (!FIRST) continue;
        square = multiply_add(d, d, square);
        along = multiply_add(d, c, along);
        if (sizeof(C) == 4) seen |= __float_as_uint(float(d));
      }
    }
  }
  // A square that has become zero must not be taken for the square of zeros.
  __device__ __forceinline__ double squared() const {
    return sizeof(C) == 4 && square == 0 && seen & 0x7fffffffu ? 0x1p-1000 : double(square);
  }
};

__device__ __forceinline__ double over_lanes(double x) {
#pragma unroll
  for (int i = 1; i < lanes; i *= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// Adds the products of elements [at, at + count) of every row to sums [rows, 2 + vectors], or BEGINS them. Only the
// first vector comes with <r, r> and <r, g>. A row's sums are always one thread's to write.
template <class S, class C, bool FIRST>
__device__ __forceinline__ void multiply(const Times& t, const Scratch<C>& scratch, int tensor, int64_t at, int count,
                                         int vector, double* sums, bool begins) {
  constexpr int V = per_vector<S>, N = sizeof(S) == 2 ? 2 : 4, together = lanes * V * N;  // elements of a float32 sum
  const int64_t* address = t.rows.address + int64_t(tensor) * t.rows.rows;
  const bool aligned = t.rows.aligned[tensor];
  const int lane = int(threadIdx.x % lanes), column = FIRST ? lane : 2 + vector, columns = 2 + t.vectors;
  for (int base = 0; base < t.rows.rows; base += rows_at_once) {
    const int row = min(base + int(threadIdx.x / lanes), t.rows.rows - 1);
    const S* p = reinterpret_cast<const S*>(address[row]) + at;
    const bool writes = lane < (FIRST ? 3 : 1) && base + int(threadIdx.x / lanes) < t.rows.rows;
    double* to = sums + int64_t(row) * columns + column;
    const double before = writes && !begins ? *to : 0;
    double square = 0, along = 0, product = 0;
#pragma unroll 1
    for (int e = lane * V; e < count + lane * V; e += together) {
      Vector<S> x[N];
      if (aligned && e - lane * V + together <= count) {
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = load_vector(p + e + n * lanes * V);
      } else {
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = load_some(p + e + n * lanes * V, count - e - n * lanes * V);
      }
      Sums<C> some;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int from = e + n * lanes * V;
        some.template add<FIRST>(x[n], scratch.g + from, scratch.u + from, C(row > 0));
      }
      product += double(some.product);
      if (FIRST) square += some.squared(), along += double(some.along);
    }
    product = over_lanes(product) * scratch.inverse[vector];
    if (FIRST) square = over_lanes(square), along = over_lanes(along);
    if (writes) *to = before + (!FIRST || lane == 2 ? product : lane == 1 ? along : square);
  }
}

template <class S, class C, bool MIXED>
__device__ __forceinline__ void times_item(const Times& t, const Mix& m, const Item& item) {
  SHARED_MEMORY
  const Scratch<C> scratch(shared_memory, t.vectors, t.elements);
  double* sums = t.partial + int64_t(item.slot) * t.rows.rows * (2 + t.vectors);
  for (int i = int(threadIdx.x); i < t.vectors; i += threads) scratch.largest[i] = 0;
  int weight_row = -1;
  bool begins = true;
  for_each_chunk(t.work, item, [&](int tensor, int64_t begin, int count) {
    if (m.row[tensor] != weight_row) {
      weight_row = m.row[tensor];
      for (int i = int(threadIdx.x / 32); i < t.vectors; i += threads / 32) {
        const int e = exponent_of(m.weights + (int64_t(weight_row) * t.vectors + i) * m.clients, m.clients);
        if (threadIdx.x % 32 == 0) scratch.scale[i] = power_of_two(-e), scratch.inverse[i] = power_of_two(e);
      }
    }
    __syncthreads();
    for (int at = 0; at < count; at += t.elements) {
      const int left = min(t.elements, count - at);
      for (int i = 0; i < t.vectors; ++i) {
        Former<S, C, MIXED>{t, m, scratch, tensor, i, begin + at}.form_all(left);
        __syncthreads();
        if (i == 0)
          multiply<S, C, true>(t, scratch, tensor, begin + at, left, i, sums, begins);
        else
          multiply<S, C, false>(t, scratch, tensor, begin + at, left, i, sums, begins);
        __syncthreads();
      }
      begins = false;
    }
  });
  if (sizeof(C) == 8) return;
  bool trusted = true;
  for (int row = int(threadIdx.x); row < t.rows.rows; row += threads) {
    const double square = sums[int64_t(row) * (2 + t.vectors)];
    trusted &= square == 0 || (square >= least_square && square <= most_square);
  }
  for (int i = int(threadIdx.x); i < t.vectors; i += threads) {
    const float size = __uint_as_float(scratch.largest[i]);
    trusted &= size == 0 || (size >= least_u && size <= most_u);
  }
  if (!trusted) t.flags[item.slot] = 1;
}

template <class S, class C, bool MIXED>
__global__ void __launch_bounds__(threads, blocks_per_sm<S, C, MIXED>) times_kernel(Times t, Mix m) {
  times_item<S, C, MIXED>(t, m, item_of(t.work, blockIdx.x));
}

// Items that float32 could not be trusted with, in float64. There are hardly ever any, so a few blocks look.
template <class S>
__global__ void __launch_bounds__(threads, blocks_per_sm<S, double, false>) times_again_kernel(Times t, Mix m) {
  for (int64_t n = blockIdx.x; n < t.work.count; n += gridDim.x) {
    const Item item = item_of(t.work, n);
    if (t.flags[item.slot]) times_item<S, double, false>(t, m, item);
  }
}

template <class S, class C> void go(const char* name, Times t, const Mix& m, Stream stream) {
  t.elements = piece_elements<S>(m.clients);
  launch(name, m.outputs ? times_kernel<S, C, true> : times_kernel<S, C, false>, t.work.count, threads,
         Scratch<C>::bytes(t.vectors, t.elements), stream, t, m);
}

template <class S> void of_type(Times t, const Mix& m, Stream stream) {
  go<S, float>(m.outputs ? "times_mix" : "times", t, m, stream);
  t.elements = piece_elements<S>(m.clients);
  launch("times_again", times_again_kernel<S>, min(t.work.count, blocks_again), threads,
         Scratch<double>::bytes(t.vectors, t.elements), stream, t, m);
}

}  // namespace

void times(int dtype, const Times& t, const Mix& m, Stream stream) {
  switch (dtype) {
    case F32:
      return of_type<float>(t, m, stream);
    case BF16:
      return of_type<__nv_bfloat16>(t, m, stream);
    case F16:
      return of_type<__half>(t, m, stream);
    case F64:
      return go<double, double>(m.outputs ? "times_mix_float64" : "times_float64", t, m, stream);
    default:
      throw std::invalid_argument("fastagg._cuda: only floating-point tensors have products");
  }
}

}  // namespace gpu
}  // namespace fastagg
