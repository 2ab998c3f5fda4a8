// Means of the clients' values by their rank. A thread takes an element: it sorts the values of all clients and leaves
// them in a column of its own, in shared memory (the lanes of a warp in neighbouring banks), from which it adds up the
// ranks that are wanted, in ascending order, in float64. Threads never wait for each other.
//
// Up to 32 values are sorted in registers by an unrolled network, filled up with infinities. More are sorted in groups
// of 32, whose columns a thread merges two by two: one value read and one written for every value and doubling of the
// groups. Where two columns for each thread of a block are too much for shared memory, they are in device memory.
//
// Sorting is exact and sums are those of the definition, in its order: the same bits as the CPU's kernel. Values that
// are not finite are marked, and what then becomes of a result is of no interest.
#include <limits>
#include <utility>

#include "../network.h"
#include "device.h"

namespace fastagg {
namespace gpu {
namespace {

constexpr int threads = 128, merging_threads = 64, most_sorted = 32, most_mixed = 16;
constexpr int64_t most_shared = 64 << 10;  // of a block, on any GPU
constexpr int scratch_blocks = 512;        // with columns in device memory: four or five on every SM of an A100
template <class C> constexpr C infinity = std::numeric_limits<C>::infinity();

// What is sorted: 16-bit floats as float32, and what was mixed as float64
template <class S, bool MIXED> struct Key {
  using type = float;
};
template <class S> struct Key<S, true> {
  using type = double;
};
template <> struct Key<double, false> {
  using type = double;
};

__device__ __forceinline__ void compare(double& a, double& b) {
  const bool swap = b < a;
  const double lower = swap ? b : a, higher = swap ? a : b;
  a = lower, b = higher;
}
__device__ __forceinline__ void compare(float& a, float& b) {
#ifdef FASTAGG_EMULATED
  const bool swap = b < a;
  const float lower = swap ? b : a, higher = swap ? a : b;
#else
  const float lower = fminf(a, b), higher = fmaxf(a, b);
#endif
  a = lower, b = higher;
}

template <class C, int N, int... I> __device__ __forceinline__ void sort(C (&v)[N], std::integer_sequence<int, I...>) {
  (compare(v[Network<N>::list.low[I]], v[Network<N>::list.high[I]]), ...);
}
template <class C, int N> __device__ __forceinline__ void sort(C (&v)[N]) {
  sort(v, std::make_integer_sequence<int, Network<N>::size>());
}

template <class S> __device__ __forceinline__ const S* row_of(const Ranked& r, int tensor, int row) {
  return reinterpret_cast<const S*>(r.rows.address[int64_t(tensor) * r.rows.rows + row]);
}

// An element's values of clients [first, first + n), and infinities after them. False: one of them is not finite. The
// last client is read in the place of those that are not there: a predicate for each would keep loads from being under
// way together.
template <class S, class C, int N>
__device__ __forceinline__ bool read(const Ranked& r, int tensor, int64_t at, int first, int n, C (&v)[N]) {
  S x[N];
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = load(row_of<S>(r, tensor, 1 + first + min(i, n - 1)) + at);
  C seen = 0;  // NaN as soon as one is not finite
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v[i] = C(widen(x[i]));
    seen = multiply_add(v[i], C(0), seen);
    if (i >= n) v[i] = infinity<C>;
  }
  return seen == 0;
}

// The same of sums [first, first + n): clients are added in order, by fused multiply-add, and the center last
template <class S, int N>
__device__ __forceinline__ bool mix(const Ranked& r, int tensor, int64_t at, int first, int n, double (&v)[N]) {
  const int clients = r.rows.rows - 1;
  double seen = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = 0;
#pragma unroll 1
  for (int k = 0; k <= clients; ++k) {
    const double x = double(widen(load(row_of<S>(r, tensor, k < clients ? 1 + k : 0) + at)));
    if (k < clients) seen = multiply_add(x, 0.0, seen);
    const double* factor = r.mixing + int64_t(k) * r.sorted + first;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const double f = factor[min(i, n - 1)];
      if (k < clients || f != 0) v[i] = multiply_add(x, f, v[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i >= n) v[i] = infinity<double>;
  return seen == 0;
}

// Values of a thread, each `stride` after the last
template <class C> struct Column {
  C* first;
  int stride;
  __device__ __forceinline__ C& operator[](int i) const { return first[int64_t(i) * stride]; }
};

// `count` values from `from` on, and around from `end` to `begin`, added in this order, by their number
template <class C>
__device__ __forceinline__ double mean_in_order(Column<C> s, int begin, int from, int end, int count) {
  double total = 0;
  for (int i = 0, at = from; i < count; ++i, at = at + 1 < end ? at + 1 : begin) total += double(s[at]);
  const double mean = total / count;
  if (sizeof(C) == 4 || mean - mean == 0) return mean;
  double scaled = 0;  // values near the end of float64, which their mean must not pass by a rounding
  for (int i = 0, at = from; i < count; ++i, at = at + 1 < end ? at + 1 : begin) scaled += double(s[at]) / count;
  return fmin(fmax(scaled, -0x1.fffffffffffffp1023), 0x1.fffffffffffffp1023);
}

template <class C>
__device__ __forceinline__ double ranked_mean(Column<C> s, int sorted, int low, int high, int nearest, double center) {
  if (high > low) center = mean_in_order(s, low, low, high, high - low);
  if (!nearest) return center;
  // The nearest are neighbours: the lowest ones, moved up as long as the next above is nearer than the lowest of them.
  int begin = 0, end = sorted - nearest;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (double(s[middle]) * 0.5 + double(s[middle + nearest]) * 0.5 < center)
      begin = middle + 1;
    else
      end = middle;
  }
  // One that moves takes the place of another in the definition's sum, which begins at a multiple of their number.
  const int from = (begin + nearest - 1) / nearest * nearest;
  return mean_in_order(s, begin, from < begin + nearest ? from : begin, begin + nearest, nearest);
}

// Results are rounded by way of float32 if they have 16 bits
template <class S> __device__ __forceinline__ S rounded_once(double x) { return rounded<S>(float(x)); }
template <> __device__ __forceinline__ float rounded_once(double x) { return float(x); }
template <> __device__ __forceinline__ double rounded_once(double x) { return x; }

template <class S, class C>
__device__ __forceinline__ void write_means(const Ranked& r, int tensor, int64_t at, Column<C> s) {
  const int64_t* means = r.means + int64_t(r.row[tensor]) * r.outputs * 3;
#pragma unroll 1
  for (int m = 0; m < r.outputs; ++m) {
    const int low = int(means[3 * m]), high = int(means[3 * m + 1]), nearest = int(means[3 * m + 2]);
    const double center = high > low ? 0 : double(widen(load(row_of<S>(r, tensor, 0) + at)));
    const double mean = ranked_mean(s, r.sorted, low, high, nearest, center);
    store(reinterpret_cast<S*>(r.out[int64_t(tensor) * r.outputs + m]) + at, rounded_once<S>(mean == 0 ? 0 : mean));
  }
}

// At most N clients
template <class S, int N>
__global__ void __launch_bounds__(threads, sizeof(S) == 8 && N > 16 ? 4
                                           : N > 24                 ? 5
                                                                    : 6) ranked_kernel(Ranked r) {
  using C = typename Key<S, false>::type;
  SHARED_MEMORY
  const Column<C> column{reinterpret_cast<C*>(shared_memory) + threadIdx.x, threads};
  for_each_chunk(r.work, item_of(r.work, blockIdx.x), [&](int tensor, int64_t begin, int count) {
#pragma unroll 1
    for (int e = int(threadIdx.x); e < count; e += threads) {
      C v[N];
      if (!read<S>(r, tensor, begin + e, 0, r.sorted, v) && r.not_finite) r.not_finite[tensor] = 1;
      sort(v);
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (i < r.sorted) column[i] = v[i];
      write_means<S>(r, tensor, begin + e, column);
    }
  });
}

// Merges the sorted values [begin, middle) and [middle, end)
template <class C> __device__ __forceinline__ void merge(Column<C> from, Column<C> to, int begin, int middle, int end) {
  int a = begin, b = middle;
  C x = from[a], y = b < end ? from[b] : infinity<C>;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const bool other = y < x;
    to[i] = other ? y : x;
    const int next = other ? ++b : ++a;
    const C value = next < (other ? end : middle) ? from[next] : infinity<C>;
    if (other)
      y = value;
    else
      x = value;
  }
}

// Any number of clients, or of sums of them
template <class S, bool MIXED, bool SHARED>
__global__ void __launch_bounds__(merging_threads, 6) ranked_merging_kernel(Ranked r) {
  using C = typename Key<S, MIXED>::type;
  constexpr int N = MIXED ? most_mixed : most_sorted;
  SHARED_MEMORY
  const int stride = int(blockDim.x);
  const int64_t values = int64_t(r.sorted) * stride;
  C* memory = SHARED ? reinterpret_cast<C*>(shared_memory) : static_cast<C*>(r.scratch) + 2 * values * blockIdx.x;
  auto column = [&](bool second) {  // one of two
    return Column<C>{memory + (second ? values : 0) + threadIdx.x, stride};
  };
  const int groups = (r.sorted + N - 1) / N;
  auto first = [&](int group) { return int(int64_t(r.sorted) * (group < groups ? group : groups) / groups); };
  for (int64_t n = blockIdx.x; n < r.work.count; n += gridDim.x)
    for_each_chunk(r.work, item_of(r.work, n), [&](int tensor, int64_t begin, int count) {
#pragma unroll 1
      for (int e = int(threadIdx.x); e < count; e += stride) {
        bool finite = true;
#pragma unroll 1
        for (int g = 0; g < groups; ++g) {
          const int from = first(g), some = first(g + 1) - from;
          C v[N];
          if constexpr (MIXED)
            finite &= mix<S>(r, tensor, begin + e, from, some, v);
          else
            finite &= read<S>(r, tensor, begin + e, from, some, v);
          sort(v);
#pragma unroll
          for (int i = 0; i < N; ++i)
            if (i < some) column(false)[from + i] = v[i];
        }
        if (!finite && r.not_finite) r.not_finite[tensor] = 1;
        bool second = false;
#pragma unroll 1
        for (int width = 1; width < groups; width *= 2, second = !second)
#pragma unroll 1
          for (int g = 0; g < groups; g += 2 * width)
            merge(column(second), column(!second), first(g), first(g + width), first(g + 2 * width));
        write_means<S>(r, tensor, begin + e, column(second));
      }
    });
}

// Of integers the value of a rank is sought between the lowest and the highest, by halves: counters agree nearly.
template <class S> __global__ void __launch_bounds__(threads, 6) ranked_integers_kernel(Ranked r) {
  const int clients = r.rows.rows - 1;
  for_each_chunk(r.work, item_of(r.work, blockIdx.x), [&](int tensor, int64_t begin, int count) {
    const int64_t* means = r.means + int64_t(r.row[tensor]) * r.outputs * 3;
    for (int64_t e = begin + threadIdx.x; e < begin + count; e += threads) {
      int64_t lowest = load(row_of<S>(r, tensor, 1) + e), highest = lowest;
#pragma unroll 1
      for (int k = 2; k <= clients; ++k) {
        const int64_t x = load(row_of<S>(r, tensor, k) + e);
        lowest = x < lowest ? x : lowest, highest = x > highest ? x : highest;
      }
#pragma unroll 1
      for (int m = 0; m < r.outputs; ++m) {
        const int64_t low = means[3 * m], high = means[3 * m + 1];
        const int64_t rank = high > low ? (low + high - 1) / 2 : (clients - 1) / 2;
        int64_t from = lowest, to = highest;
        while (from < to) {
          const int64_t middle = int64_t(uint64_t(from) + (uint64_t(to) - uint64_t(from)) / 2);
          int64_t below = 0;
#pragma unroll 1
          for (int k = 1; k <= clients; ++k) below += int64_t(load(row_of<S>(r, tensor, k) + e)) <= middle;
          if (below > rank)
            to = middle;
          else
            from = middle + 1;
        }
        store(reinterpret_cast<S*>(r.out[int64_t(tensor) * r.outputs + m]) + e, S(from));
      }
    }
  });
}

template <class S, bool MIXED> int64_t columns_bytes(int sorted, int block) {  // of a block that merges
  return int64_t(sorted) * 2 * block * sizeof(typename Key<S, MIXED>::type);
}
template <class S> int64_t scratch_of(int sorted, bool mixed) {
  auto bytes = mixed ? columns_bytes<S, true> : columns_bytes<S, false>;
  if ((!mixed && sorted <= most_sorted) || bytes(sorted, 32) <= most_shared) return 0;
  return bytes(sorted, merging_threads) * scratch_blocks;
}

template <class S, bool MIXED> void merged(const Ranked& r, Stream stream) {
  for (int block = merging_threads; block >= 32; block /= 2) {
    const int64_t bytes = columns_bytes<S, MIXED>(r.sorted, block);
    if (bytes <= most_shared)
      return launch(MIXED ? "ranked_mixed" : "ranked_merged", ranked_merging_kernel<S, MIXED, true>, r.work.count,
                    block, size_t(bytes), stream, r);
  }
  launch(MIXED ? "ranked_mixed_many" : "ranked_merged_many", ranked_merging_kernel<S, MIXED, false>,
         min(r.work.count, scratch_blocks), merging_threads, 0, stream, r);
}

template <class S, int N = 4> void of_floats(const Ranked& r, Stream stream) {
  if (r.mixing) return merged<S, true>(r, stream);
  if constexpr (N > most_sorted) {
    merged<S, false>(r, stream);
  } else {
    if (r.sorted > N) return of_floats < S, N == 16 || N == 24 ? N + 8 : 2 * N > (r, stream);
    launch("ranked_in_registers", ranked_kernel<S, N>, r.work.count, threads,
           sizeof(typename Key<S, false>::type) * threads * N, stream, r);
  }
}
template <class S> void of_integers(const Ranked& r, Stream stream) {
  launch("ranked_integers", ranked_integers_kernel<S>, r.work.count, threads, 0, stream, r);
}

}  // namespace

int64_t ranked_scratch(int dtype, int sorted, bool mixed) {
  if (!is_floating(dtype)) return 0;
  return dtype == F64 ? scratch_of<double>(sorted, mixed) : scratch_of<float>(sorted, mixed);
}

void ranked_means(int dtype, const Ranked& r, Stream stream) {
  switch (dtype) {
    case F32:
      return of_floats<float>(r, stream);
    case F64:
      return of_floats<double>(r, stream);
    case BF16:
      return of_floats<__nv_bfloat16>(r, stream);
    case F16:
      return of_floats<__half>(r, stream);
    case I8:
      return of_integers<int8_t>(r, stream);
    case I16:
      return of_integers<int16_t>(r, stream);
    case I32:
      return of_integers<int32_t>(r, stream);
    case I64:
      return of_integers<int64_t>(r, stream);
    case U8:
      return of_integers<uint8_t>(r, stream);
  }
}

}  // namespace gpu
}  // namespace fastagg
