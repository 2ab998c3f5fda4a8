// The kernels of one SIMD level. A two-line .cpp per level defines FASTAGG_LEVEL, sets flags and includes this.
//
// Accumulation policy
//   row products: float32 lanes for at most 256 elements (32 additions a lane with AVX2), then float64; so an entry's
//                 error is below 1e-6 of sqrt(G_ii G_jj) whatever the data. float64 tensors stay in float64.
//   mix:          float64 for float32 and float64 tensors, float32 for 16-bit ones; one rounding at the end.
// Shaped by: two FMA pipes of latency 4 need 8 accumulators in flight; AVX2 has 16 registers, so a 4 x 3 tile keeps
// 12 accumulators, 3 rows of b and 1 of a. Converting float32 to float64 costs mix nothing: it waits for memory.
#include "kernels.h"
#include "../fastagg.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastagg {
namespace FASTAGG_LEVEL {
namespace {

#include "simd-inl.h"

constexpr int64_t page_elements = 1024;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// ---------------------------------------------------------------- row products

template <class C> struct Vec;  // the vector type of a compute type
template <> struct Vec<float> {
  using V = VF;
};
template <> struct Vec<double> {
  using V = VD;
};

template <class C> constexpr int block = block_bytes / sizeof(C);     // elements of a packed row
template <class C> constexpr int row_stride = row_bytes / sizeof(C);  // in elements
template <class C> constexpr int width = vector_bytes / sizeof(C);    // lanes

inline VF load_as(const float* p, float) { return load_float(p); }
inline VF load_as(const bf16* p, float) { return load_float(p); }
inline VF load_as(const f16* p, float) { return load_float(p); }
inline VD load_as(const double* p, double) { return load_raw<VD>(p); }
template <class S> inline VD load_as(const S* p, double) {  // the rare wide path: simple, not fast
  S padded[lanes] = {};
  __builtin_memcpy(padded, p, sizeof(S) * width<double>);
  VF f = load_float(padded);
  VD d;
  for (int i = 0; i < width<double>; ++i) d[i] = f[i];
  return d;
}

// dst = src - center (or src), as compute type C, padded with zeros to whole vectors
template <class S, class C> void pack(const S* src, const S* center, int64_t n, C* dst) {
  constexpr int w = width<C>;
  int64_t e = 0;
  if (center)
    for (; e + w <= n; e += w) store_raw(dst + e, load_as(src + e, C()) - load_as(center + e, C()));
  else
    for (; e + w <= n; e += w) store_raw(dst + e, load_as(src + e, C()));
  if (e < n) {
    S s[w] = {}, c[w] = {};
    __builtin_memcpy(s, src + e, sizeof(S) * (n - e));
    if (center) __builtin_memcpy(c, center + e, sizeof(S) * (n - e));
    auto v = load_as(s, C());
    store_raw(dst + e, center ? v - load_as(c, C()) : v);
  }
}

inline void add4(double* out, D4 v) { *(D4*)out += v; }

// out[j * ld + i] += <a_i, b_j> for NI <= 4 rows of a and NJ rows of b; DIAGONAL: a is b, only i >= j.
// Every pair of rows sees the same additions in the same order whatever tile it falls in, so the bits of an entry do
// not depend on where its clients stand, and identical clients have identical entries.
template <int NI, int NJ, bool DIAGONAL, class C>
inline void tile(const C* a, const C* b, int vectors, double* out, int64_t ld) {
  using V = typename Vec<C>::V;
  constexpr int w = width<C>, stride = row_stride<C>;
  V acc[NJ][4] = {};
  for (int v = 0; v < vectors; ++v) {
    V y[NJ];
    unroll<NJ>([&](auto j) INLINE_LAMBDA { y[j] = load_raw<V>(b + j * stride + v * w); });
    unroll<NI>([&](auto i) INLINE_LAMBDA {
      V x = DIAGONAL ? y[i < NJ ? i : 0] : load_raw<V>(a + i * stride + v * w);
      unroll<NJ>([&](auto j) INLINE_LAMBDA {
        if (!DIAGONAL || i >= j) acc[j][i] = fma(x, y[j], acc[j][i]);
      });
    });
  }
  unroll<NJ>([&](auto j) INLINE_LAMBDA { add4(out + j * ld, sums(acc[j][0], acc[j][1], acc[j][2], acc[j][3])); });
}

template <bool DIAGONAL, class C>
inline void tile_of(int ni, int nj, const C* a, const C* b, int vectors, double* out, int64_t ld) {
#define FASTAGG_CASE(I, J) \
  case I * 4 + J:          \
    return tile<I, J, false>(a, b, vectors, out, ld);
  if (DIAGONAL) switch (ni) {
      case 1:
        return tile<1, 1, true>(a, a, vectors, out, ld);
      case 2:
        return tile<2, 2, true>(a, a, vectors, out, ld);
      case 3:
        return tile<3, 3, true>(a, a, vectors, out, ld);
      default:
        return tile<4, 4, true>(a, a, vectors, out, ld);
    }
  switch (ni * 4 + nj) {
    FASTAGG_CASE(1, 1)
    FASTAGG_CASE(1, 2) FASTAGG_CASE(1, 3) FASTAGG_CASE(2, 1) FASTAGG_CASE(2, 2) FASTAGG_CASE(2, 3) FASTAGG_CASE(3, 1)
        FASTAGG_CASE(3, 2) FASTAGG_CASE(3, 3) FASTAGG_CASE(4, 1) FASTAGG_CASE(4, 2) FASTAGG_CASE(4, 3)
  }
#undef FASTAGG_CASE
}

// Asks for the next block of every row a little at a time, between tiles: many short streams do not keep the
// hardware prefetcher going (measured on ResNet-18 x 20: 78 ms without, 56 with).
struct Prefetcher {
  const void* const* rows;
  int count, row = 0;
  int64_t first, bytes, at = 0;  // of the next block, within each row
  void ask(int lines) {
    for (; lines > 0 && row < count; --lines) {
      __builtin_prefetch((const char*)rows[row] + first + at);
      if ((at += 64) >= bytes) at = 0, ++row;
    }
  }
};

template <class S, class C> void row_products(const RowProducts& p) {
  constexpr int stride = row_stride<C>;
  C* rows_a = (C*)p.scratch;
  C* rows_b = p.b ? rows_a + int64_t(p.na) * stride : rows_a;
  const S* center = (const S*)p.center;
  // row `r` of a side, packed; `first` when the side starts with the center itself
  auto pack_side = [&](const void* const* side, int n, bool first, C* dst, int64_t at, int64_t len) {
    if (first) pack<S, C>(center + at, nullptr, len, dst);
    for (int r = first; r < n; ++r)
      pack<S, C>((const S*)side[r - first] + at, center ? center + at : nullptr, len, dst + int64_t(r) * stride);
  };
  for (int64_t done = 0; done < p.count; done += block<C>) {
    int64_t at = p.begin + done, len = least(block<C>, p.count - done);
    int vectors = int((len + width<C> - 1) / width<C>);
    pack_side(p.a, p.na, p.center_is_first && !p.b, rows_a, at, len);
    if (p.b) {
      pack_side(p.b, p.nb, p.center_is_first, rows_b, at, len);
      double* square = p.squares;
      auto add_squares = [&](const C* row, int n) {
        for (int r = 0; r < n; ++r) {
          alignas(32) double s[4] = {};
          tile<1, 1, true>(row + int64_t(r) * stride, row, vectors, s, 4);
          *square++ += s[0];
        }
      };
      add_squares(rows_a, p.na);
      add_squares(rows_b, p.nb);
    }
    int64_t next = least(block<C>, p.count - done - len);
    bool first = p.center_is_first && !p.b;
    Prefetcher ahead{p.a, p.na - first, 0, int64_t(sizeof(S)) * (at + len), int64_t(sizeof(S)) * next};
    int tiles = p.b ? ((p.na + 3) / 4) * ((p.nb + 2) / 3) : (p.na / 4 + 1) * (p.na / 6 + 2);
    int lines = next ? int((p.na * next * sizeof(S) / 64) / tiles + 1) : 0;
    // the odd rows first, so that every later tile has four rows and enough accumulators in flight
    int ni = p.na % 4 ? p.na % 4 : 4;
    for (int i = 0; i < p.na; i += ni, ni = 4) {
      const C* a = rows_a + int64_t(i) * stride;
      int nb = p.b ? p.nb : i;
      for (int j = 0; j < nb; j += 3) {
        tile_of<false>(ni, int(least(3, nb - j)), a, rows_b + int64_t(j) * stride, vectors, p.out + j * p.ld + i, p.ld);
        ahead.ask(lines);
      }
      if (!p.b) {
        tile_of<true>(ni, ni, a, a, vectors, p.out + i * p.ld + i, p.ld);
        ahead.ask(lines);
      }
    }
    ahead.ask(1 << 30);
  }
}

void row_products_any(const RowProducts& p) {
  switch (p.dtype) {
    case F32:
      return p.wide ? row_products<float, double>(p) : row_products<float, float>(p);
    case BF16:
      return p.wide ? row_products<bf16, double>(p) : row_products<bf16, float>(p);
    case F16:
      return p.wide ? row_products<f16, double>(p) : row_products<f16, float>(p);
    default:
      return row_products<double, double>(p);
  }
}

// ---------------------------------------------------------------- mix

// `lanes` elements of type S as accumulators: one float32 vector, or two float64 ones
template <class S> struct Mixing {  // 16-bit floats
  using A = VF;
  static constexpr int parts = 1;
  static void load(const S* p, A* v) { v[0] = load_float(p); }
  static void store(S* p, const A* v, bool) { store_float(p, v[0]); }
  static A broadcast(double w) { return A{} + float(w); }
};
template <> struct Mixing<float> {
  using A = VD;
  static constexpr int parts = 2;
  static void load(const float* p, A* v) {
    v[0] = widen(load_raw<HalfVF>(p));
    v[1] = widen(load_raw<HalfVF>(p + lanes / 2));
  }
  static void store(float* p, const A* v, bool stream) {
    HalfVF lo = __builtin_convertvector(v[0], HalfVF), hi = __builtin_convertvector(v[1], HalfVF);
    VF both;
    __builtin_memcpy(&both, &lo, sizeof lo);
    __builtin_memcpy((char*)&both + sizeof lo, &hi, sizeof hi);
    stream ? store_stream(p, both) : store_raw(p, both);
  }
  static A broadcast(double w) { return A{} + w; }
};
template <> struct Mixing<double> {
  using A = VD;
  static constexpr int parts = 2;
  static void load(const double* p, A* v) { v[0] = load_raw<VD>(p), v[1] = load_raw<VD>(p + lanes / 2); }
  static void store(double* p, const A* v, bool stream) {
    for (int i = 0; i < 2; ++i) stream ? store_stream(p + i * (lanes / 2), v[i]) : store_raw(p + i * (lanes / 2), v[i]);
  }
  static A broadcast(double w) { return A{} + w; }
};

// MB outputs, EV * lanes elements from `at`: every client is added in order, by fused multiply-add
template <class S, int MB, int EV> inline void mix_step(const MixChunk& p, int64_t m, int64_t at, bool stream) {
  using X = Mixing<S>;
  constexpr int P = X::parts;
  typename X::A acc[MB][EV * P] = {};
  for (int64_t k = 0; k < p.clients; ++k) {
    const S* src = (const S*)p.client[k] + at;
    typename X::A w[MB];
    unroll<MB>([&](auto b) INLINE_LAMBDA { w[b] = X::broadcast(p.weights[(m + b) * p.clients + k]); });
    unroll<EV>([&](auto v) INLINE_LAMBDA {
      typename X::A x[P];
      X::load(src + v * lanes, x);
      unroll<MB * P>([&](auto i) INLINE_LAMBDA {
        constexpr int b = i / P, part = i % P;
        acc[b][v * P + part] = fma(x[part], w[b], acc[b][v * P + part]);
      });
    });
  }
  unroll<MB * EV>([&](auto i) INLINE_LAMBDA {
    constexpr int b = i / EV, v = i % EV;
    X::store((S*)p.out[(m + b) * p.out_stride] + at + v * lanes, acc[b] + v * P, stream);
  });
}

// acc[0..n) += (or =, FIRST) the elements from `at` of NK clients from k on; n is a multiple of lanes
template <class S, int NK, bool FIRST>
inline void mix_rows(const MixChunk& p, int64_t k, int64_t at, int64_t n, typename Mixing<S>::A* acc) {
  using X = Mixing<S>;
  constexpr int P = X::parts;
  const S* src[NK];
  typename X::A w[NK];
  unroll<NK>([&](auto i) INLINE_LAMBDA {
    src[i] = (const S*)p.client[k + i] + at;
    w[i] = X::broadcast(p.weights[k + i]);
  });
  for (int64_t e = 0; e < n; e += lanes, acc += P) {
    typename X::A sum[P] = {};
    if (!FIRST) unroll<P>([&](auto i) INLINE_LAMBDA { sum[i] = acc[i]; });
    unroll<NK>([&](auto i) INLINE_LAMBDA {
      typename X::A x[P];
      X::load(src[i] + e, x);
      unroll<P>([&](auto v) INLINE_LAMBDA { sum[v] = fma(x[v], w[i], sum[v]); });
    });
    unroll<P>([&](auto i) INLINE_LAMBDA { acc[i] = sum[i]; });
  }
}

// One output. Clients are read a page at a time, four at once: as many streams as the hardware prefetcher keeps up
// with. Reading all K side by side instead takes twice as long (K = 20, Zen 3).
template <class S> void mix_one(const MixChunk& p, int64_t at, int64_t n, bool stream) {
  using X = Mixing<S>;
  typename X::A acc[page_elements / lanes * X::parts];
  int64_t k = 0;
  p.clients >= 4 ? mix_rows<S, 4, true>(p, 0, at, n, acc) : mix_rows<S, 1, true>(p, 0, at, n, acc);
  for (k = p.clients >= 4 ? 4 : 1; k + 4 <= p.clients; k += 4) mix_rows<S, 4, false>(p, k, at, n, acc);
  for (; k < p.clients; ++k) mix_rows<S, 1, false>(p, k, at, n, acc);
  S* out = (S*)p.out[0] + at;
  for (int64_t e = 0, v = 0; e < n; e += lanes, v += X::parts) X::store(out + e, acc + v, stream);
}

template <class S> void mix_tail(const MixChunk& p, int64_t at, int64_t n) {  // n < lanes
  using X = Mixing<S>;
  for (int64_t m = 0; m < p.outputs; ++m) {
    typename X::A acc[X::parts] = {}, x[X::parts];
    S padded[lanes] = {};
    for (int64_t k = 0; k < p.clients; ++k) {
      __builtin_memcpy(padded, (const S*)p.client[k] + at, sizeof(S) * n);
      X::load(padded, x);
      for (int v = 0; v < X::parts; ++v) acc[v] = fma(x[v], X::broadcast(p.weights[m * p.clients + k]), acc[v]);
    }
    X::store(padded, acc, false);
    __builtin_memcpy((S*)p.out[m * p.out_stride] + at, padded, sizeof(S) * n);
  }
}

template <class S> void mix(const MixChunk& p) {
  constexpr int EV = Mixing<S>::parts == 1 ? 2 : 1;  // four outputs at a time: 8 accumulators
  int64_t end = p.begin + p.count;
  bool stream = p.streaming;
  for (int64_t m = 0; m < p.outputs && stream; ++m)
    stream = (uintptr_t)((S*)p.out[m * p.out_stride] + p.begin) % 16 == 0;
  int64_t at = p.begin;
  while (at + lanes <= end) {  // several outputs: a page of every client stays in cache for all of them
    int64_t stop = at + least(page_elements, (end - at) / lanes * lanes), m = 0;
    if (p.outputs == 1) mix_one<S>(p, at, stop - at, stream), m = 1;
    for (; m + 4 <= p.outputs; m += 4) {
      int64_t e = at;
      for (; e + EV * lanes <= stop; e += EV * lanes) mix_step<S, 4, EV>(p, m, e, stream);
      for (; e < stop; e += lanes) mix_step<S, 4, 1>(p, m, e, stream);
    }
    for (; m < p.outputs; ++m)
      for (int64_t e = at; e < stop; e += lanes) mix_step<S, 1, 1>(p, m, e, stream);
    at = stop;
  }
  if (at < end) mix_tail<S>(p, at, end - at);
  if (stream) stream_fence();
}

void mix_any(const MixChunk& p) {
  switch (p.dtype) {
    case F32:
      return mix<float>(p);
    case BF16:
      return mix<bf16>(p);
    case F16:
      return mix<f16>(p);
    default:
      return mix<double>(p);
  }
}

// ---------------------------------------------------------------- the floors

uint64_t read(const void* p, size_t bytes) {  // four streams a thread: 10 % more than one, on two Zen 3 cores
  size_t quarter = bytes / 4 / 64 * 64;
  const char* s = (const char*)p;
  VU acc[4] = {};
  for (size_t at = 0; at < quarter; at += vector_bytes)
    for (int i = 0; i < 4; ++i) acc[i] += load_raw<VU>(s + i * quarter + at);
  VU all = acc[0] + acc[1] + acc[2] + acc[3];
  uint64_t sum = 0;
  for (int i = 0; i < lanes; ++i) sum += all[i];
  for (size_t at = 4 * quarter; at < bytes; ++at) sum += (unsigned char)s[at];
  return sum;
}

double fma_peak(int64_t iterations) {
  VF acc[12] = {}, x = VF{} + 1e-9f, y = VF{} + 0.5f;
  for (int64_t n = 0; n < iterations; ++n)
    unroll<12>([&](auto i) INLINE_LAMBDA {
      acc[i] = fma(acc[i], y, x);
      __asm__("" : "+" FASTAGG_VECTOR_REGISTER(acc[i]));  // or the compiler finds the closed form
    });
  float sum = 0;
  unroll<12>([&](auto i) INLINE_LAMBDA { sum += acc[i][0]; });
  return sum >= 0 ? double(iterations) * 12 * lanes * 2 : 0;
}

}  // namespace
}  // namespace FASTAGG_LEVEL

#define FASTAGG_STRING_(x) #x
#define FASTAGG_STRING(x) FASTAGG_STRING_(x)
#define FASTAGG_JOIN_(a, b) a##b
#define FASTAGG_JOIN(a, b) FASTAGG_JOIN_(a, b)
extern const Kernels FASTAGG_JOIN(kernels_, FASTAGG_LEVEL) = {FASTAGG_STRING(FASTAGG_LEVEL),
                                                              FASTAGG_LEVEL::row_products_any, FASTAGG_LEVEL::mix_any,
                                                              FASTAGG_LEVEL::read, FASTAGG_LEVEL::fma_peak};

}  // namespace fastagg
