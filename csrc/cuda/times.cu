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
#include "mix.h"

namespace fastagg {
namespace gpu {
namespace {

constexpr int threads = 128, lanes = 8, rows_at_once = threads / lanes;
constexpr int most_elements = 512, least_elements = 128;
constexpr int blocks_again = 256;
template <class C> constexpr int blocks_per_sm = sizeof(C) == 4 ? 5 : 4;

// A100 and H100 have about 75 KB of L2 cache for every block if five are on an SM. Part of it holds what was read
// before; from 128 elements on a row's share is two cache lines or more.
int piece_elements(int clients, size_t element_bytes) {
  int n = most_elements;
  while (n > least_elements && clients * element_bytes * n > 48 << 10) n /= 2;
  return n;
}

// What float32 may be trusted with, as squares of a row's length in an item, and as the largest element of u
constexpr double least_square = 0x1p-100, most_square = 0x1p100;
constexpr float least_u = 0x1p-50f, most_u = 0x1p60f;

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

// Adds clients [k, k + N) to u, and with MIXED to the weighted sum. All of them are loaded before the first is used.
template <int N, class S, class C, bool MIXED, class A>
__device__ __forceinline__ void add_updates(const Mix& m, int tensor, int64_t at, const double* weights, int k, C g,
                                            double& u, A& sum) {
  S x[N];
#pragma unroll
  for (int n = 0; n < N; ++n) x[n] = load(client_of<S>(m, tensor, k + n) + at);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const double w = weights[k + n];
    u = multiply_add(double(C(widen(x[n])) - g), w, u);
    if (MIXED) sum = multiply_add(A(widen(x[n])), A(w), sum);
  }
}

// u of one element, before it is scaled; with MIXED the output as well, by the additions of mix_elements
template <class S, class C, bool MIXED>
__device__ __forceinline__ double sum_updates(const Times& t, const Mix& m, int tensor, int64_t at, int vector, C g) {
  using A = typename Accumulator<S>::type;
  const double* weights = m.weights + (int64_t(m.row[tensor]) * t.vectors + vector) * m.clients;
  double u = 0;
  A sum = 0;
  int k = 0;
#pragma unroll 1
  for (; k + 8 <= m.clients; k += 8) add_updates<8, S, C, MIXED>(m, tensor, at, weights, k, g, u, sum);
  if (k + 4 <= m.clients) add_updates<4, S, C, MIXED>(m, tensor, at, weights, k, g, u, sum), k += 4;
  if (k + 2 <= m.clients) add_updates<2, S, C, MIXED>(m, tensor, at, weights, k, g, u, sum), k += 2;
  if (k < m.clients) add_updates<1, S, C, MIXED>(m, tensor, at, weights, k, g, u, sum);
  if (MIXED) {
    const S y = rounded<S>(sum);
    store(output_of<S>(m, tensor, vector) + at, y);
    if (!(widen(y) - widen(y) == 0) && m.not_finite) m.not_finite[tensor] = 1;
  }
  return u;
}

// u, and with the first vector g, of elements [at, at + count); zeros after them
template <class S, class C, bool MIXED>
__device__ __forceinline__ void form(const Times& t, const Mix& m, const Scratch<C>& scratch, int tensor, int64_t at,
                                     int count, int vector) {
  const S* center = reinterpret_cast<const S*>(t.rows.address[int64_t(tensor) * t.rows.rows]) + at;
  uint32_t size = 0;
  for (int e = int(threadIdx.x); e < t.elements; e += threads) {
    C g = 0, u = 0;
    if (e < count) {
      g = C(widen(load(center + e)));
      const double sum = sum_updates<S, C, MIXED>(t, m, tensor, at + e, vector, g);
      u = C(sum * scratch.scale[vector]);
      if (sizeof(C) == 4) {
        uint32_t magnitude = __float_as_uint(float(u)) & 0x7fffffffu;
        if (magnitude == 0 && sum != 0) magnitude = 1;  // what has become zero must not be taken for it
        size = magnitude > size ? magnitude : size;
      }
    }
    scratch.u[e] = u;
    if (vector == 0) scratch.g[e] = g;
  }
  if (sizeof(C) == 4 && size > scratch.largest[vector]) atomicMax(&scratch.largest[vector], size);
}

template <class C> struct Sums {
  C square = 0, along = 0, product = 0;
  uint32_t seen = 0;

  // V elements d = x - g of a row, or x of the center itself, against the g and u of these elements
  template <bool FIRST, class S>
  __device__ __forceinline__ void add(const Vector<S>& x, const C* g, const C* u, bool is_center) {
    constexpr int V = per_vector<S>, P = per_vector<C> < V ? per_vector<C> : V;
#pragma unroll
    for (int v = 0; v < V; v += P) {
      Vector<C> center, other;
      center.raw = *reinterpret_cast<const uint4*>(g + v), other.raw = *reinterpret_cast<const uint4*>(u + v);
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const C c = center.element[i];
        const C d = C(widen(x.element[v + i])) - (is_center ? C(0) : c);
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
        some.template add<FIRST>(x[n], scratch.g + from, scratch.u + from, row == 0);
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
        form<S, C, MIXED>(t, m, scratch, tensor, begin + at, left, i);
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
__global__ void __launch_bounds__(threads, blocks_per_sm<C>) times_kernel(Times t, Mix m) {
  times_item<S, C, MIXED>(t, m, item_of(t.work, blockIdx.x));
}

// Items that float32 could not be trusted with, in float64. There are hardly ever any, so a few blocks look.
template <class S>
__global__ void __launch_bounds__(threads, blocks_per_sm<double>) times_again_kernel(Times t, Mix m) {
  for (int64_t n = blockIdx.x; n < t.work.count; n += gridDim.x) {
    const Item item = item_of(t.work, n);
    if (t.flags[item.slot]) times_item<S, double, false>(t, m, item);
  }
}

template <class S, class C> void go(const char* name, Times t, const Mix& m, Stream stream) {
  t.elements = piece_elements(m.clients, sizeof(S));
  launch(name, m.outputs ? times_kernel<S, C, true> : times_kernel<S, C, false>, t.work.count, threads,
         Scratch<C>::bytes(t.vectors, t.elements), stream, t, m);
}

template <class S> void of_type(Times t, const Mix& m, Stream stream) {
  go<S, float>(m.outputs ? "times_mix" : "times", t, m, stream);
  t.elements = piece_elements(m.clients, sizeof(S));
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
