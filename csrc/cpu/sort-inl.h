// Sorting, element by element: row i of a column of vectors gets the i-th smallest value of every lane. Included by
// kernels-inl.h inside the level's namespace.
//
// A comparator is one minimum and one maximum of two vectors. Networks of up to 32 rows are Batcher's (Knuth, Algorithm
// 5.2.2M: 97 comparators for 20 rows where 91 are the fewest known), unrolled, so that rows stay in registers. More
// rows are sorted in groups and merged by the steps that ranked.cpp lists: two or three layers of comparators on four
// or eight rows where it can be, since a comparator that loads and stores its rows waits for the stores.

// What is sorted: float32 and float64 as they are; 16-bit floats as integers of the same order, twice as many at a
// time.
typedef int16_t VS __attribute__((vector_size(vector_bytes)));

#if defined(__AVX512F__)
inline VF minimum(VF a, VF b) { return (VF)_mm512_min_ps((__m512)a, (__m512)b); }
inline VF maximum(VF a, VF b) { return (VF)_mm512_max_ps((__m512)a, (__m512)b); }
inline VD minimum(VD a, VD b) { return (VD)_mm512_min_pd((__m512d)a, (__m512d)b); }
inline VD maximum(VD a, VD b) { return (VD)_mm512_max_pd((__m512d)a, (__m512d)b); }
inline VS minimum(VS a, VS b) { return (VS)_mm512_min_epi16((__m512i)a, (__m512i)b); }
inline VS maximum(VS a, VS b) { return (VS)_mm512_max_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
inline VF minimum(VF a, VF b) { return (VF)_mm256_min_ps((__m256)a, (__m256)b); }
inline VF maximum(VF a, VF b) { return (VF)_mm256_max_ps((__m256)a, (__m256)b); }
inline VD minimum(VD a, VD b) { return (VD)_mm256_min_pd((__m256d)a, (__m256d)b); }
inline VD maximum(VD a, VD b) { return (VD)_mm256_max_pd((__m256d)a, (__m256d)b); }
inline VS minimum(VS a, VS b) { return (VS)_mm256_min_epi16((__m256i)a, (__m256i)b); }
inline VS maximum(VS a, VS b) { return (VS)_mm256_max_epi16((__m256i)a, (__m256i)b); }
#elif defined(__SSE2__)
inline VF minimum(VF a, VF b) { return (VF)_mm_min_ps((__m128)a, (__m128)b); }
inline VF maximum(VF a, VF b) { return (VF)_mm_max_ps((__m128)a, (__m128)b); }
inline VD minimum(VD a, VD b) { return (VD)_mm_min_pd((__m128d)a, (__m128d)b); }
inline VD maximum(VD a, VD b) { return (VD)_mm_max_pd((__m128d)a, (__m128d)b); }
inline VS minimum(VS a, VS b) { return (VS)_mm_min_epi16((__m128i)a, (__m128i)b); }
inline VS maximum(VS a, VS b) { return (VS)_mm_max_epi16((__m128i)a, (__m128i)b); }
#else
template <class V> inline V minimum(V a, V b) { return a < b ? a : b; }
template <class V> inline V maximum(V a, V b) { return a > b ? a : b; }
#endif

// `count` elements of type S as a vector that can be sorted, and what becomes of it. Zeros of either sign are the same
// number, and which of them ends up where depends on the order of the clients: a result is made +0 at the end.
template <class S> struct Sorting {  // 16-bit floats
  using V = VS;
  static constexpr int count = vector_bytes / 2, parts = 4;
  static V load(const S* p) { return flipped(load_raw<V>(p)); }
  static V highest() { return V{} + int16_t(0x7fff); }
  static V flipped(V v) { return v ^ ((v >> 15) & 0x7fff); }  // its own inverse
  static bool is_finite(V lowest, V highest) {                // of a group that is sorted
    VS low = flipped(lowest) & exponent(S{}), high = flipped(highest) & exponent(S{});
    VS bad = (low == exponent(S{})) | (high == exponent(S{}));
    int16_t any = 0;
    for (int i = 0; i < count; ++i) any |= bad[i];
    return !any;
  }
  static constexpr int16_t exponent(bf16) { return 0x7f80; }
  static constexpr int16_t exponent(f16) { return 0x7c00; }
  static void widen_all(V v, VD* out) {
    HalfVU part[2];
    V plain = flipped(v);
    __builtin_memcpy(part, &plain, sizeof v);
    for (int i = 0; i < 2; ++i) {
      VF f = to_float(S{}, part[i]);
      HalfVF half[2];
      __builtin_memcpy(half, &f, sizeof f);
      out[2 * i] = widen(half[0]), out[2 * i + 1] = widen(half[1]);
    }
  }
};
template <> struct Sorting<float> {
  using V = VF;
  static constexpr int count = lanes, parts = 2;
  static V load(const float* p) { return load_raw<V>(p); }
  static V highest() { return V{} + __builtin_inff(); }
  static void widen_all(V v, VD* out) {
    HalfVF half[2];
    __builtin_memcpy(half, &v, sizeof v);
    out[0] = widen(half[0]), out[1] = widen(half[1]);
  }
};
template <> struct Sorting<double> {
  using V = VD;
  static constexpr int count = lanes / 2, parts = 1;
  static V load(const double* p) { return load_raw<V>(p); }
  static V highest() { return V{} + __builtin_inf(); }
  static void widen_all(V v, VD* out) { out[0] = v; }
};

// rows[i * stride] = the i-th smallest of `count` clients' vectors at `at`, LESS < count <= N; false: one of them is
// not finite
template <class S, int N, int LESS>
bool sort_group(const void* const* client, int count, int64_t at, void* to, int64_t stride) {
  using X = Sorting<S>;
  using V = typename X::V;
  V* rows = (V*)to;
  V r[N];
  unroll<N>([&](auto i)
                INLINE_LAMBDA { r[i] = i <= LESS || i < count ? X::load((const S*)client[i] + at) : X::highest(); });
  bool finite = true;
  if constexpr (sizeof(S) > 2) {
    V sum = {};  // 0 as long as all are finite
    unroll<N>([&](auto i) INLINE_LAMBDA {
      if (i <= LESS || i < count) sum = fma(r[i], V{}, sum);
    });
    finite = all(below(sum, 1));
  }
  unroll<Network<N>::size>([&](auto c) INLINE_LAMBDA {
    const int a = Network<N>::list.low[c], b = Network<N>::list.high[c];
    V lower = minimum(r[a], r[b]);
    r[b] = maximum(r[a], r[b]);
    r[a] = lower;
  });
  unroll<N>([&](auto i) INLINE_LAMBDA {
    if (i <= LESS || i < count) rows[i * stride] = r[i];
  });
  if constexpr (sizeof(S) == 2) finite = X::is_finite(rows[0], rows[(count - 1) * stride]);
  return finite;
}

typedef bool (*SortGroup)(const void* const* client, int count, int64_t at, void* rows, int64_t stride);

// The networks there are: a group of another size is filled up with infinities to the next. All 32 of them would take
// minutes to compile, and a megabyte.
template <class S> SortGroup group_sorter(int rows) {
  static const SortGroup sorters[] = {sort_group<S, 1, 0>,   sort_group<S, 2, 1>,   sort_group<S, 3, 2>,
                                      sort_group<S, 4, 3>,   sort_group<S, 5, 4>,   sort_group<S, 6, 5>,
                                      sort_group<S, 7, 6>,   sort_group<S, 8, 7>,   sort_group<S, 10, 8>,
                                      sort_group<S, 12, 10>, sort_group<S, 14, 12>, sort_group<S, 16, 14>,
                                      sort_group<S, 20, 16>, sort_group<S, 25, 20>, sort_group<S, 32, 25>};
  constexpr int sizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 25, most_sorted};
  int i = 0;
  while (sizes[i] < rows) ++i;
  return sorters[i];
}

template <class V> FASTAGG_INLINE void order(V& a, V& b) {
  V lower = minimum(a, b);
  b = maximum(a, b);
  a = lower;
}

// Merges groups that are sorted: every step on all the columns
template <class V, int W> void apply(const SortStep* steps, int64_t count, V* rows) {
  auto row = [&](const SortStep& s, int i) INLINE_LAMBDA { return rows + int64_t(s.row[i]) * W; };
  for (const SortStep* s = steps; s < steps + count; ++s) {
    V *a = row(*s, 0), *b = row(*s, 1);
    switch (s->kind) {
      case SortStep::lower:
        for (int w = 0; w < W; ++w) a[w] = minimum(a[w], b[w]);
        break;
      case SortStep::higher:
        for (int w = 0; w < W; ++w) b[w] = maximum(a[w], b[w]);
        break;
      case SortStep::both:
        for (int w = 0; w < W; ++w) order(a[w], b[w]);
        break;
      case SortStep::four: {
        V *c = row(*s, 2), *d = row(*s, 3);
        for (int w = 0; w < W; ++w) {
          V r[4] = {a[w], b[w], c[w], d[w]};
          order(r[0], r[2]), order(r[1], r[3]);
          order(r[0], r[1]), order(r[2], r[3]);
          a[w] = r[0], b[w] = r[1], c[w] = r[2], d[w] = r[3];
        }
        break;
      }
      default:
        for (int w = 0; w < W; ++w) {
          V r[8];
          unroll<8>([&](auto i) INLINE_LAMBDA { r[i] = row(*s, i)[w]; });
          unroll<4>([&](auto i) INLINE_LAMBDA { order(r[i], r[i + 4]); });
          order(r[0], r[2]), order(r[1], r[3]), order(r[4], r[6]), order(r[5], r[7]);
          unroll<4>([&](auto i) INLINE_LAMBDA { order(r[2 * i], r[2 * i + 1]); });
          unroll<8>([&](auto i) INLINE_LAMBDA { row(*s, i)[w] = r[i]; });
        }
    }
  }
}
