// Products of rows: the Gram, and the gradient of mix. Included by kernels-inl.h inside the level's namespace.

template <class C> struct Vec;  // the vector type of a compute type
template <> struct Vec<float> {
  using V = VF;
};
template <> struct Vec<double> {
  using V = VD;
};

template <class A, class B> constexpr bool same_type = false;
template <class A> constexpr bool same_type<A, A> = true;
template <class C> constexpr int width = vector_bytes / sizeof(C);                                 // lanes
template <class C> constexpr int block = int(least(block_bytes / int(sizeof(C)), 32 * width<C>));  // elements
template <class C> constexpr int row_stride = row_bytes / sizeof(C);                               // in elements
constexpr int blocks_in_a_sum = 4;  // whose vectors are added up before they are summed over lanes

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

// Rows are packed as center - row: all have that sign, so their products do not, and the instruction set subtracts from
// a register what it reads from memory, not the reverse. The center itself is then negated.
enum Form { as_it_is, from_center, negated };

// dst = src in the form asked for, as compute type C, padded with zeros to whole vectors
template <Form form, class S, class C> void pack(const S* src, const S* center, int64_t n, C* dst) {
  constexpr int w = width<C>;
  auto row = [](const S* s, const S* c) {
    auto v = load_as(s, C());
    return form == from_center ? load_as(c, C()) - v : form == negated ? -v : v;
  };
  int64_t e = 0;
  for (; e + w <= n; e += w) store_raw(dst + e, row(src + e, center + e));
  if (e < n) {
    S s[w] = {}, c[w] = {};
    __builtin_memcpy(s, src + e, sizeof(S) * (n - e));
    if (form == from_center) __builtin_memcpy(c, center + e, sizeof(S) * (n - e));
    store_raw(dst + e, row(s, c));
  }
}

// Asks memory for rows ahead of time, one a tile: for a row of the next block, to come near; and for one of the next
// few to be packed, to come into the first cache, and as a second chance, for requests beyond what the core can keep in
// flight are dropped. Left to the hardware, which many short streams do not keep going, the Gram of 20 ResNet-18s takes
// 1.5 times as long; with the first kind of request alone, 1.1 times.
struct Ahead {
  const void* const* side[2];  // the clients of rows a, and of rows b if these are others
  const void* center;
  int rows, split, center_row;  // rows from `split` on are of the second side; center_row: -1 if the center is none
  int64_t block_bytes, at;
  int packed, far, near;
  static constexpr int few = 8;  // rows at the same place of their pages: as many as the first cache keeps

  const char* row(int r) const {
    if (r == center_row) return (const char*)center + at;
    const bool second = r >= split;
    const int before = second ? split : 0;
    return (const char*)side[second][r - before - (center_row >= before && center_row < r)] + at;
  }
  void begin_block(int64_t bytes) { at = bytes, packed = far = 0, near = near > rows ? near - rows : 0; }
  const char* next_far(const void* idle) { return far < rows ? row(far++) + block_bytes : (const char*)idle; }
  const char* next_near(const void* idle) {
    if (near >= packed + few || near >= 2 * rows) return (const char*)idle;
    int r = near++;
    return r < rows ? row(r) : row(r - rows) + block_bytes;
  }
};

// What the tiles of one block of elements have in common
template <class C> struct Block {
  int vectors;       // of a row
  bool first, last;  // of the blocks whose vectors are added up
  int64_t ld;
  Ahead* ahead;
  typename Vec<C>::V* kept;  // sums of the blocks so far, tile after tile
};

inline void add4(double* out, D4 v) { *(D4*)out += v; }

// Adds the sums of a tile to those of earlier blocks, and hands them on: to the next block, or over the lanes to out.
template <int NI, int NJ, bool DIAGONAL, class C, class V>
inline void hand_on(V (&acc)[NJ][4], Block<C>& block, double* out) {
  V* kept = block.kept;
  block.kept += NI * NJ;
  auto each = [&](const auto& f) INLINE_LAMBDA {
    unroll<NI * NJ>([&](auto n) INLINE_LAMBDA {
      if (!DIAGONAL || n % NI >= n / NI) f(acc[n / NI][n % NI], kept[n]);
    });
  };
  if (!block.first) each([](V& sum, V& before) INLINE_LAMBDA { sum += before; });
  if (block.last)
    unroll<NJ>([&](auto j)
                   INLINE_LAMBDA { add4(out + j * block.ld, sums(acc[j][0], acc[j][1], acc[j][2], acc[j][3])); });
  else
    each([](V& sum, V& after) INLINE_LAMBDA { after = sum; });
}

// step(v) for every vector of the block, asking memory for a line of two rows every now and then
template <class C, class Step>
FASTAGG_INLINE void for_each_vector(Block<C>& block, const void* idle, const Step& step) {
  const char *far = block.ahead->next_far(idle), *near = block.ahead->next_near(idle);
  const int vectors = block.vectors;
  int v = 0;
  for (; v + 4 <= vectors; v += 4)
    unroll<4>([&](auto u) INLINE_LAMBDA {
      if (u * vector_bytes % 64 == 0) {
        __builtin_prefetch(far + (v + u) * vector_bytes, 0, 2);
        __builtin_prefetch(near + (v + u) * vector_bytes, 0, 3);
      }
      step(v + u);
    });
  for (; v < vectors; ++v) step(v);
}

// out[j * ld + i] += <a_i, b_j> for NI <= 4 rows of a and NJ rows of b; DIAGONAL: a is b, only i >= j.
// Every pair of rows sees the same additions in the same order whatever tile it falls in, so the bits of an entry do
// not depend on where its clients stand, and identical clients have identical entries.
template <int NI, int NJ, bool DIAGONAL, class C> void tile(Block<C>& block, const C* a, const C* b, double* out) {
  using V = typename Vec<C>::V;
  constexpr int w = width<C>, stride = row_stride<C>;
  V acc[NJ][4] = {};
  for_each_vector(block, a, [&](int v) INLINE_LAMBDA {
    V y[NJ];
    unroll<NJ>([&](auto j) INLINE_LAMBDA { y[j] = load_raw<V>(b + j * stride + v * w); });
    unroll<NI>([&](auto i) INLINE_LAMBDA {
      V x = DIAGONAL ? y[i < NJ ? i : 0] : load_raw<V>(a + i * stride + v * w);
      unroll<NJ>([&](auto j) INLINE_LAMBDA {
        if (!DIAGONAL || i >= j) acc[j][i] = fma(x, y[j], acc[j][i]);
      });
    });
  });
  hand_on<NI, NJ, DIAGONAL>(acc, block, out);
}

// Packs four rows and multiplies them with each other on the way: their loads, subtractions and stores hide behind the
// multiply-adds (packing on its own costs a third of the Gram's time at K = 20).
template <class S, class C>
void pack_tile(Block<C>& block, const void* const* rows, const C* center, int64_t at, C* dst, double* out) {
  using V = typename Vec<C>::V;
  constexpr int w = width<C>, stride = row_stride<C>;
  const S* src[4];
  unroll<4>([&](auto i) INLINE_LAMBDA { src[i] = (const S*)rows[i] + at; });
  V acc[4][4] = {};
  for_each_vector(block, dst, [&](int v) INLINE_LAMBDA {
    V g = load_raw<V>(center + v * w), y[4];
    unroll<4>([&](auto i) INLINE_LAMBDA {
      y[i] = g - load_as(src[i] + v * w, C());
      store_raw(dst + i * stride + v * w, y[i]);
      unroll<4>([&](auto j) INLINE_LAMBDA {
        if (i >= j) acc[j][i] = fma(y[i], y[j], acc[j][i]);
      });
    });
  });
  hand_on<4, 4, true>(acc, block, out);
}

template <class C> void tile_on_diagonal(int n, Block<C>& block, const C* a, double* out) {
  switch (n) {
    case 1:
      return tile<1, 1, true>(block, a, a, out);
    case 2:
      return tile<2, 2, true>(block, a, a, out);
    case 3:
      return tile<3, 3, true>(block, a, a, out);
    default:
      return tile<4, 4, true>(block, a, a, out);
  }
}

// NI rows of a against nb rows of b
template <int NI, class C> void strip(Block<C>& block, const C* a, const C* b, int nb, double* out) {
  int j = 0;
  auto at = [&](int j) { return b + int64_t(j) * row_stride<C>; };
  for (; j + 3 <= nb; j += 3) tile<NI, 3, false>(block, a, at(j), out + j * block.ld);
  if (nb - j == 2) tile<NI, 2, false>(block, a, at(j), out + j * block.ld);
  if (nb - j == 1) tile<NI, 1, false>(block, a, at(j), out + j * block.ld);
}

template <class C> void strip_of(int ni, Block<C>& block, const C* a, const C* b, int nb, double* out) {
  switch (ni) {
    case 1:
      return strip<1>(block, a, b, nb, out);
    case 2:
      return strip<2>(block, a, b, nb, out);
    case 3:
      return strip<3>(block, a, b, nb, out);
    default:
      return strip<4>(block, a, b, nb, out);
  }
}

template <class S, class C> void row_products(const RowProducts& p) {
  constexpr int stride = row_stride<C>;
  C* rows_a = (C*)p.scratch;
  C* rows_b = p.b ? rows_a + int64_t(p.na) * stride : rows_a;
  C* wide_center = rows_a + int64_t(p.na + p.nb) * stride;  // of this block, converted once and not for every four rows
  auto* kept = (typename Vec<C>::V*)((char*)p.scratch + packed_bytes(p.na + p.nb));
  const S* center = (const S*)p.center;
  const bool triangle = !p.b, first_a = p.center_is_first && triangle;  // does side a start with the center itself?
  const void* const* clients_a = p.a - first_a;                         // clients_a[r] is row r
  auto pack_rows = [&](const void* const* side, bool first, int begin, int end, C* dst, int64_t at, int64_t len) {
    for (int r = begin; r < end; ++r) {
      const S* src = first && r == 0 ? center : (const S*)side[r - first];
      C* to = dst + int64_t(r) * stride;
      if (!center)
        pack<as_it_is>(src + at, src, len, to);
      else if (first && r == 0)
        pack<negated>(src + at, src, len, to);
      else
        pack<from_center>(src + at, center + at, len, to);
    }
  };
  const int center_row = !p.center_is_first ? -1 : triangle ? 0 : p.na;
  Ahead ahead{
      {p.a, p.b}, center, p.na + p.nb, p.na, center_row, int64_t(sizeof(S)) * ::fastagg::FASTAGG_LEVEL::block<C>,
      0,          0,      0,           0};
  for (int64_t at = p.begin, len; at < p.begin + p.count; at += len) {
    len = least(block<C>, p.begin + p.count - at);
    const int vectors = int((len + width<C> - 1) / width<C>), number = int((at - p.chunk_begin) / block<C>);
    const bool first = number % blocks_in_a_sum == 0;
    const bool last = (number + 1) % blocks_in_a_sum == 0 || at + len == p.chunk_end;
    if (!triangle) {
      pack_rows(p.a, false, 0, p.na, rows_a, at, len);
      pack_rows(p.b, p.center_is_first, 0, p.nb, rows_b, at, len);
      Ahead nothing{};
      Block<C> alone{vectors, true, true, 4, &nothing, kept};
      for (int r = 0, n; r < p.na + p.nb; r += n) {
        alignas(32) double s[16] = {};
        n = int(least(4, p.na + p.nb - r));
        tile_on_diagonal(n, alone, rows_a + int64_t(r) * stride, s);
        for (int i = 0; i < n; ++i) p.squares[r + i] += s[5 * i];
        alone.kept = kept;
      }
    }
    const C* center_here = center && same_type<S, C> ? (const C*)(center + at) : wide_center;
    if (center && !same_type<S, C>) pack<as_it_is>(center + at, center, len, wide_center);
    ahead.begin_block(int64_t(sizeof(S)) * at);
    Block<C> block{vectors, first, last, p.ld, &ahead, kept};
    // the odd rows first, so that every later tile has four rows and enough accumulators in flight
    for (int i = 0, ni = p.na % 4 ? p.na % 4 : 4; i < p.na; i += ni, ni = 4) {
      C* a = rows_a + int64_t(i) * stride;
      double* out = p.out + i;
      if (triangle) {
        if (center && i > 0 && len % width<C> == 0) {
          pack_tile<S>(block, clients_a + i, center_here, at, a, out + i * p.ld);
        } else {
          pack_rows(p.a, first_a, i, i + ni, rows_a, at, len);
          tile_on_diagonal(ni, block, a, out + i * p.ld);
        }
      }
      ahead.packed = triangle ? i + ni : p.na + p.nb;
      strip_of(ni, block, a, rows_b, triangle ? i : p.nb, out);
    }
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
