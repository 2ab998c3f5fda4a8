// Vectors of one SIMD level, on the compiler's vector extensions: arithmetic is written once, and only what the
// extensions lack (fused multiply-add, half precision, horizontal sums) names an instruction.
// Included by kernels-inl.h inside the level's own namespace; no STL, so that nothing compiled here with wide
// instructions can be merged at link time with a function that older CPUs run.

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif
constexpr int lanes = vector_bytes / 4;  // float32 lanes of a vector; also the elements of one step of mix

typedef float VF __attribute__((vector_size(vector_bytes)));
typedef double VD __attribute__((vector_size(vector_bytes)));
typedef uint32_t VU __attribute__((vector_size(vector_bytes)));
typedef uint64_t VL __attribute__((vector_size(vector_bytes)));
typedef float HalfVF __attribute__((vector_size(vector_bytes / 2)));
typedef uint16_t HalfVU __attribute__((vector_size(vector_bytes / 2)));
typedef float F4 __attribute__((vector_size(16)));
typedef double D4 __attribute__((vector_size(32), aligned(8)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

#define FASTAGG_INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

// f(0), f(1), ... f(N - 1) with compile-time arguments: what a `#pragma unroll` promises too late. GCC turns an array
// of accumulators into registers only if its indices are constants before loops are unrolled (measured: 3 x on the
// Gram).
#ifndef FASTAGG_ROLLED
template <int I> struct Index {
  constexpr operator int() const { return I; }
};
template <int N, class F> FASTAGG_INLINE void unroll(const F& f) {
  if constexpr (N > 0) {
    unroll<N - 1>(f);
    f(Index<N - 1>{});
  }
}
#else  // under sanitizers, which check every access: unrolled, these take GCC four minutes for each SIMD level
template <int N, class F> void unroll(const F& f) {
  for (int i = 0; i < N; ++i) f(i);
}
#endif

template <class V> inline V load_raw(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V> inline void store_raw(void* p, V v) { __builtin_memcpy(p, &v, sizeof v); }
template <class To, class From> inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "");
  To r;
  __builtin_memcpy(&r, &v, sizeof r);
  return r;
}

#if defined(__AVX512F__)
#define FASTAGG_VECTOR_REGISTER "v"
#elif defined(__aarch64__)
#define FASTAGG_VECTOR_REGISTER "w"
#else
#define FASTAGG_VECTOR_REGISTER "x"
#endif

// ---- fused multiply-add: a * b + c ----
#if defined(__AVX512F__)
inline VF fma(VF a, VF b, VF c) { return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline VD fma(VD a, VD b, VD c) { return (VD)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
#elif defined(__AVX2__)
inline VF fma(VF a, VF b, VF c) { return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline VD fma(VD a, VD b, VD c) { return (VD)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
#elif defined(FASTAGG_NEON)
inline VF fma(VF a, VF b, VF c) { return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline VD fma(VD a, VD b, VD c) { return (VD)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
#else
inline VF fma(VF a, VF b, VF c) { return a * b + c; }
inline VD fma(VD a, VD b, VD c) { return a * b + c; }
#endif

// ---- half a vector of float32 to a vector of float64 (GCC 12 splits __builtin_convertvector in two here) ----
#if defined(__AVX512F__)
inline VD widen(HalfVF v) { return (VD)_mm512_cvtps_pd((__m256)v); }
#elif defined(__AVX2__)
inline VD widen(HalfVF v) { return (VD)_mm256_cvtps_pd((__m128)v); }
#else
inline VD widen(HalfVF v) { return __builtin_convertvector(v, VD); }
#endif

// ---- 16-bit floats ----
inline VF load_float(const float* p) { return load_raw<VF>(p); }
inline VF to_float(bf16, HalfVU v) { return bits<VF>(__builtin_convertvector(v, VU) << 16); }
inline void store_float(bf16* p, VF v) {  // to nearest, ties to even; NaN stays NaN
  VU u = bits<VU>(v);
  VU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  VU nan = (u >> 16) | 0x40u;
  store_raw(p, __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded, HalfVU));
}

#if defined(__AVX512F__)
inline VF to_float(f16, HalfVU v) { return (VF)_mm512_cvtph_ps((__m256i)v); }
inline void store_float(f16* p, VF v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0)); }
#elif defined(__AVX2__)
inline VF to_float(f16, HalfVU v) { return (VF)_mm256_cvtph_ps((__m128i)v); }
inline void store_float(f16* p, VF v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0)); }
#elif defined(FASTAGG_NEON)
inline VF to_float(f16, HalfVU v) { return (VF)vcvt_f32_f16(bits<float16x4_t>(v)); }
inline void store_float(f16* p, VF v) { store_raw(p, vcvt_f16_f32((float32x4_t)v)); }
#else
inline VF to_float(f16, HalfVU v) {
  VU h = __builtin_convertvector(v, VU);
  VU magnitude = (h & 0x7fffu) << 13;
  VF scaled = bits<VF>(magnitude) * 0x1p112f;  // rebases the exponent, and makes subnormals exact
  VU special = magnitude | 0x7f800000u;        // infinity and NaN
  VU u = magnitude >= 0x0f800000u ? special : bits<VU>(scaled);
  return bits<VF>(u | (h & 0x8000u) << 16);
}
inline void store_float(f16* p, VF v) {  // to nearest, ties to even
  VU u = bits<VU>(v), sign = u & 0x80000000u, a = u ^ sign;
  VU normal = (a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13;  // exponent rebased by -112, rounded
  VU tiny = bits<VU>(bits<VF>(a) + 0.5f) - 0x3f000000u;    // below 2^-14: the adder rounds to units of 2^-24
  VU huge = a > 0x7f800000u ? (VU)((a >> 13) & 0x3ffu) | 0x7e00u : (VU)(a * 0u + 0x7c00u);
  VU r = a >= 0x477ff000u ? huge : (a < 0x38800000u ? tiny : normal);
  store_raw(p, __builtin_convertvector(r | sign >> 16, HalfVU));
}
#endif

template <class S> inline VF load_float(const S* p) { return to_float(S{}, load_raw<HalfVU>(p)); }

// ---- sums over the lanes of four vectors, as float64 ----
#if defined(__AVX2__)
inline D4 sum4(__m256 a, __m256 b, __m256 c, __m256 d) {
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return (D4)_mm256_cvtps_pd(_mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
inline D4 sum4(__m256d a, __m256d b, __m256d c, __m256d d) {
  __m256d ab = _mm256_hadd_pd(a, b), cd = _mm256_hadd_pd(c, d);
  return (D4)_mm256_add_pd(_mm256_permute2f128_pd(ab, cd, 0x20), _mm256_permute2f128_pd(ab, cd, 0x31));
}
#endif
#if defined(__AVX512F__)
inline __m256 fold(VF v) {
  return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
}
inline __m256d fold(VD v) {
  return _mm256_add_pd(_mm512_castpd512_pd256((__m512d)v), _mm512_extractf64x4_pd((__m512d)v, 1));
}
template <class V> inline D4 sums(V a, V b, V c, V d) { return sum4(fold(a), fold(b), fold(c), fold(d)); }
#elif defined(__AVX2__)
inline D4 sums(VF a, VF b, VF c, VF d) { return sum4((__m256)a, (__m256)b, (__m256)c, (__m256)d); }
inline D4 sums(VD a, VD b, VD c, VD d) { return sum4((__m256d)a, (__m256d)b, (__m256d)c, (__m256d)d); }
#elif defined(FASTAGG_NEON)
inline D4 sums(VF a, VF b, VF c, VF d) {
  const float32x4_t ab = vpaddq_f32((float32x4_t)a, (float32x4_t)b), cd = vpaddq_f32((float32x4_t)c, (float32x4_t)d);
  return __builtin_convertvector((VF)vpaddq_f32(ab, cd), D4);
}
inline D4 sums(VD a, VD b, VD c, VD d) {
  const float64x2_t each[2] = {vpaddq_f64((float64x2_t)a, (float64x2_t)b), vpaddq_f64((float64x2_t)c, (float64x2_t)d)};
  return load_raw<D4>(each);
}
#else
template <class V> inline double sum1(V v) {
  double sum = 0;
  for (unsigned i = 0; i < sizeof(V) / sizeof(v[0]); ++i) sum += double(v[i]);
  return sum;
}
template <class V> inline D4 sums(V a, V b, V c, V d) { return D4{sum1(a), sum1(b), sum1(c), sum1(d)}; }
#endif

// ---- stores that bypass the cache (p is 16-byte aligned) ----
#if defined(__SSE2__)
inline void stream16(void* p, F4 v) { _mm_stream_ps((float*)p, (__m128)v); }
inline void stream_fence() { _mm_sfence(); }
#else
inline void stream16(void* p, F4 v) { store_raw(p, v); }
inline void stream_fence() {}
#endif
template <class V> inline void store_stream(void* p, V v) {
  F4 parts[sizeof(V) / 16];
  __builtin_memcpy(parts, &v, sizeof v);
  for (unsigned i = 0; i < sizeof(V) / 16; ++i) stream16((char*)p + 16 * i, parts[i]);
}
