// Sorting, element by element: row i of a column of vectors gets the i-th smallest value of every lane. Included by
// kernels-inl.h inside the level's namespace.
//
// A comparator is one minimum and one maximum of two vectors. Networks of up to 32 rows are Batcher's (Knuth, Algorithm
// 5.2.2M: 97 comparators for 20 rows where 91 are the fewest known), unrolled, so that rows stay in registers; more
// rows are sorted in groups and merged from the list of comparators that ranked.cpp makes.

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
    S values[count];
    store_raw(values, flipped(v));
    for (int i = 0; i < 2; ++i) {
      VF f = load_float(values + i * lanes);
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
  static void widen_all(V v, VD* out) { out[0] = v; }
};

// rows[i * stride] = the i-th smallest of N clients' vectors at `at`; false: one of them is not finite
template <class S, int N> bool sort_group(const void* const* client, int64_t at, void* to, int64_t stride) {
  using X = Sorting<S>;
  using V = typename X::V;
  V* rows = (V*)to;
  V r[N];
  unroll<N>([&](auto i) INLINE_LAMBDA { r[i] = X::load((const S*)client[i] + at); });
  bool finite = true;
  if constexpr (sizeof(S) > 2) {
    V sum = {};  // 0 as long as all are finite
    unroll<N>([&](auto i) INLINE_LAMBDA { sum = fma(r[i], V{}, sum); });
    finite = all(below(sum, 1));
  }
  unroll<Network<N>::size>([&](auto c) INLINE_LAMBDA {
    constexpr int a = Network<N>::list.low[c], b = Network<N>::list.high[c];
    V lower = minimum(r[a], r[b]);
    r[b] = maximum(r[a], r[b]);
    r[a] = lower;
  });
  unroll<N>([&](auto i) INLINE_LAMBDA { rows[i * stride] = r[i]; });
  if constexpr (sizeof(S) == 2) finite = X::is_finite(r[0], r[N - 1]);
  return finite;
}

typedef bool (*SortGroup)(const void* const* client, int64_t at, void* rows, int64_t stride);

template <class S, int N = most_sorted> SortGroup group_sorter(int rows) {
  if constexpr (N > 1)
    if (rows < N) return group_sorter<S, N - 1>(rows);
  return sort_group<S, N>;
}

// Merges groups that are sorted: every comparator on all the columns
template <class V, int W> void apply(const Comparator* comparators, int64_t count, V* rows) {
  for (int64_t c = 0; c < count; ++c) {
    V *a = rows + int64_t(comparators[c].low) * W, *b = rows + int64_t(comparators[c].high) * W;
    unroll<W>([&](auto i) INLINE_LAMBDA {
      V lower = minimum(a[i], b[i]);
      b[i] = maximum(a[i], b[i]);
      a[i] = lower;
    });
  }
}
