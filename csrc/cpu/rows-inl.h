// Products of rows: the Gram, and the gradient of mix. Included by kernels-inl.h inside the level's namespace.

template <class C> struct Vec;  // the vector type of a compute type
template <> struct Vec<float> {
  using V = VF;
};
template <> struct Vec<double> {
  using V = VD;
};

template <class C> constexpr int width = vector_bytes / sizeof(C);  // lanes
// elements of a packed row; at most 32 additions a lane
template <class C> constexpr int block = int(least(block_bytes / int(sizeof(C)), 32 * width<C>));
template <class C> constexpr int row_stride = row_bytes / sizeof(C);  // in elements

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

template <int NI, class C>
inline void tile_of_columns(int nj, const C* a, const C* b, int vectors, double* out, int64_t ld) {
  switch (nj) {
    case 1:
      return tile<NI, 1, false>(a, b, vectors, out, ld);
    case 2:
      return tile<NI, 2, false>(a, b, vectors, out, ld);
    default:
      return tile<NI, 3, false>(a, b, vectors, out, ld);
  }
}

template <class C> inline void tile_of(int ni, int nj, const C* a, const C* b, int vectors, double* out, int64_t ld) {
  switch (ni) {
    case 1:
      return tile_of_columns<1>(nj, a, b, vectors, out, ld);
    case 2:
      return tile_of_columns<2>(nj, a, b, vectors, out, ld);
    case 3:
      return tile_of_columns<3>(nj, a, b, vectors, out, ld);
    default:
      return tile_of_columns<4>(nj, a, b, vectors, out, ld);
  }
}

template <class C> inline void tile_on_diagonal(int n, const C* a, int vectors, double* out, int64_t ld) {
  switch (n) {
    case 1:
      return tile<1, 1, true>(a, a, vectors, out, ld);
    case 2:
      return tile<2, 2, true>(a, a, vectors, out, ld);
    case 3:
      return tile<3, 3, true>(a, a, vectors, out, ld);
    default:
      return tile<4, 4, true>(a, a, vectors, out, ld);
  }
}

// Packs four rows less the center and multiplies them with each other on the way: their loads, subtractions and stores
// hide behind the multiply-adds (packing on its own costs a third of the Gram's time at K = 20).
template <class S, class C>
inline void pack_tile(const void* const* rows, const S* center, int64_t at, C* dst, int vectors, double* out,
                      int64_t ld) {
  using V = typename Vec<C>::V;
  constexpr int w = width<C>, stride = row_stride<C>;
  const S* src[4];
  unroll<4>([&](auto i) INLINE_LAMBDA { src[i] = (const S*)rows[i] + at; });
  center += at;
  V acc[4][4] = {};
  for (int v = 0; v < vectors; ++v) {
    V g = load_as(center + v * w, C()), y[4];
    unroll<4>([&](auto i) INLINE_LAMBDA {
      y[i] = load_as(src[i] + v * w, C()) - g;
      store_raw(dst + i * stride + v * w, y[i]);
      unroll<4>([&](auto j) INLINE_LAMBDA {
        if (i >= j) acc[j][i] = fma(y[i], y[j], acc[j][i]);
      });
    });
  }
  unroll<4>([&](auto j) INLINE_LAMBDA { add4(out + j * ld, sums(acc[j][0], acc[j][1], acc[j][2], acc[j][3])); });
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
  const bool triangle = !p.b, first_a = p.center_is_first && triangle;  // does side a start with the center itself?
  const void* const* clients_a = p.a - first_a;                         // clients_a[r] is row r
  auto pack_rows = [&](const void* const* side, bool first, int begin, int end, C* dst, int64_t at, int64_t len) {
    for (int r = begin; r < end; ++r) {
      bool plain = !center || (first && r == 0);
      const S* src = first && r == 0 ? center : (const S*)side[r - first];
      pack<S, C>(src + at, plain ? nullptr : center + at, len, dst + int64_t(r) * stride);
    }
  };
  for (int64_t done = 0; done < p.count; done += block<C>) {
    int64_t at = p.begin + done, len = least(block<C>, p.count - done);
    int vectors = int((len + width<C> - 1) / width<C>);
    if (!triangle) {
      pack_rows(p.a, false, 0, p.na, rows_a, at, len);
      pack_rows(p.b, p.center_is_first, 0, p.nb, rows_b, at, len);
      for (int r = 0; r < p.na + p.nb; ++r) {
        alignas(32) double s[4] = {};
        tile<1, 1, true>(rows_a + int64_t(r) * stride, rows_a, vectors, s, 4);
        p.squares[r] += s[0];
      }
    }
    int64_t next = least(block<C>, p.count - done - len);
    Prefetcher ahead{p.a, p.na - first_a, 0, int64_t(sizeof(S)) * (at + len), int64_t(sizeof(S)) * next};
    int tiles = triangle ? (p.na / 4 + 1) * (p.na / 6 + 2) : ((p.na + 3) / 4) * ((p.nb + 2) / 3);
    int lines = next ? int((p.na * next * sizeof(S) / 64) / tiles + 1) : 0;
    // the odd rows first, so that every later tile has four rows and enough accumulators in flight
    int ni = p.na % 4 ? p.na % 4 : 4;
    for (int i = 0; i < p.na; i += ni, ni = 4) {
      C* a = rows_a + int64_t(i) * stride;
      if (triangle) {
        double* out = p.out + i * p.ld + i;
        if (center && i > 0 && len % width<C> == 0) {
          pack_tile<S, C>(clients_a + i, center, at, a, vectors, out, p.ld);
        } else {
          pack_rows(p.a, first_a, i, i + ni, rows_a, at, len);
          tile_on_diagonal(ni, a, vectors, out, p.ld);
        }
        ahead.ask(lines);
      }
      int nb = triangle ? i : p.nb;
      for (int j = 0; j < nb; j += 3) {
        tile_of(ni, int(least(3, nb - j)), a, rows_b + int64_t(j) * stride, vectors, p.out + j * p.ld + i, p.ld);
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
