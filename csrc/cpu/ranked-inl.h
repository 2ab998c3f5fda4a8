// Means by rank: columns of the clients' vectors are sorted, and the rows of the wanted ranks added up in float64, in
// ascending order. Sorting is exact, so every SIMD level gives the same bits. Included by kernels-inl.h inside the
// level's namespace.

// value(k, x) for k in [0, count), added up in order, by their number; x, mean: [P]
template <int P, class Value> FASTAGG_INLINE void mean_in_order(int64_t count, const Value& value, VD* mean) {
  VD x[P], n = VD{} + double(count);
  for (int i = 0; i < P; ++i) mean[i] = VD{};
  for (int64_t k = 0; k < count; ++k) {
    value(k, x);
    for (int i = 0; i < P; ++i) mean[i] += x[i];
  }
  for (int i = 0; i < P; ++i) mean[i] /= n;
  if constexpr (P == 1) {  // float64, whose sums may be too large for it
    auto fits = bits<VD>(bits<VL>(mean[0]) & 0x7fffffffffffffffull) < VD{} + __builtin_inf();
    if (all((VU)fits)) return;
    VD scaled = {};
    for (int64_t k = 0; k < count; ++k) {
      value(k, x);
      scaled += x[0] / n;
    }
    const VD largest = VD{} + 0x1.fffffffffffffp1023;  // which the mean must not pass by a rounding
    mean[0] = fits ? mean[0] : minimum(maximum(scaled, -largest), largest);
  }
}

// Of the K rows of a column, `step` vectors apart
template <class X>
FASTAGG_INLINE void ranked_mean(const RankedMean& m, int64_t K, const typename X::V* rows, int64_t step, VD* mean) {
  constexpr int P = X::parts;
  if (m.high > m.low)  // else: the center's, which is there already
    mean_in_order<P>(m.high - m.low, [&](int64_t k, VD* x) { X::widen_all(rows[(m.low + k) * step], x); }, mean);
  if (!m.nearest) return;
  // The nearest are neighbours: the lowest ones, unless the next above is nearer than the lowest of them, which then
  // moves to its place; and so on.
  VD center[P];
  for (int i = 0; i < P; ++i) center[i] = mean[i];
  auto chosen = [&](int64_t k, VD* x) {
    VD low[P], high[P];
    X::widen_all(rows[k * step], low);
    for (int i = 0; i < P; ++i) x[i] = low[i];
    for (int64_t next = k + m.nearest; next < K; next += m.nearest) {
      X::widen_all(rows[next * step], high);
      for (int i = 0; i < P; ++i) {
        x[i] = low[i] * 0.5 + high[i] * 0.5 < center[i] ? high[i] : x[i];
        low[i] = high[i];
      }
    }
  };
  mean_in_order<P>(m.nearest, chosen, mean);
}

template <class S> void round_lanes(S* out, const double* mean, bool stream) {
  VD x[2] = {load_raw<VD>(mean) + 0.0, load_raw<VD>(mean + lanes / 2) + 0.0};  // -0 becomes +0
  if constexpr (sizeof(S) > 2) {
    Mixing<S>::store(out, x, stream);
  } else {
    HalfVF half[2] = {__builtin_convertvector(x[0], HalfVF), __builtin_convertvector(x[1], HalfVF)};
    VF both;
    __builtin_memcpy(&both, half, sizeof both);
    store_float(out, both);
  }
}

template <class S> void round_all(S* out, const double* means, int64_t n, bool stream) {
  int64_t e = 0;
  for (; e + lanes <= n; e += lanes) round_lanes(out + e, means + e, stream);
  if (e == n) return;
  S last[lanes];
  double padded[lanes] = {};
  __builtin_memcpy(padded, means + e, sizeof(double) * (n - e));
  round_lanes(last, padded, false);
  __builtin_memcpy(out + e, last, sizeof(S) * (n - e));
}

// What is sorted of a tile: vectors of the clients, or of what they were mixed to
template <class S> struct Tile {
  using X = Sorting<S>;
  static constexpr int columns = ranked_tile_bytes / vector_bytes, elements = columns * X::count;
  const void* const* row;  // [K]
  const S* center;         // may be null
};

// Sorts `count` elements from `at` and writes their means, as float64: means [M, elements]. False: not all are finite
template <class S> bool rank_tile(const RankedPiece& p, const Tile<S>& tile, int64_t at, int64_t count, double* means) {
  using T = Tile<S>;
  using X = typename T::X;
  using V = typename X::V;
  V* rows = (V*)p.sorted;
  bool finite = true;
  const int columns = int((count + X::count - 1) / X::count);
  for (int64_t g = 0; g < p.groups; ++g) {
    const int64_t first = p.rows * g / p.groups, end = p.rows * (g + 1) / p.groups;
    const SortGroup sort = group_sorter<S>(int(end - first));
    for (int c = 0; c < columns; ++c)
      finite &= sort(tile.row + first, int(end - first), at + c * X::count, rows + first * T::columns + c, T::columns);
  }
  apply<V, T::columns>(p.steps, p.steps_count, rows);
  for (int64_t m = 0; m < p.outputs; ++m)
    for (int c = 0; c < columns; ++c) {
      VD mean[X::parts] = {};
      if (tile.center) X::widen_all(X::load(tile.center + at + c * X::count), mean);
      ranked_mean<X>(p.means[m], p.rows, rows + c, T::columns, mean);
      for (int i = 0; i < X::parts; ++i) store_raw(means + m * T::elements + c * X::count + i * (lanes / 2), mean[i]);
    }
  return finite;
}

// mixed[r] = sum_k mixing[r][k] client_k + rest[r] center, of `count` elements from `at` (all of a tile, or the last)
template <class S> bool mix_tile(const RankedPiece& p, int64_t at, int64_t count) {
  constexpr int E = Tile<double>::elements, C = Tile<double>::columns;
  double* values = (double*)p.values;  // [K + 1, E]: the clients', and the center's
  double* mixed = values + (p.clients + 1) * E;
  VD sum = {};
  for (int64_t k = 0; k <= p.clients; ++k) {
    const S* from = (const S*)(k < p.clients ? p.client[k] : p.center);
    for (int64_t e = 0; e < E; e += lanes) {
      typename Mixing<S>::A x[Mixing<S>::parts] = {};
      S padded[lanes] = {};
      const int64_t n = from ? least(lanes, count - e) : 0;
      if (n > 0) {
        if (n < lanes) __builtin_memcpy(padded, from + at + e, sizeof(S) * n);
        Mixing<S>::load(n < lanes ? padded : from + at + e, x);
      }
      VD wide[2];
      if constexpr (sizeof(S) > 2) {
        wide[0] = x[0], wide[1] = x[1];
      } else {
        HalfVF half[2];
        __builtin_memcpy(half, x, sizeof half);
        wide[0] = widen(half[0]), wide[1] = widen(half[1]);
      }
      for (int i = 0; i < 2; ++i) {
        store_raw(values + k * E + e + i * (lanes / 2), wide[i]);
        if (k < p.clients) sum = fma(wide[i], VD{}, sum);
      }
    }
  }
  for (int64_t r = 0; r < p.rows; ++r) {
    VD acc[C] = {};
    for (int64_t k = 0; k <= p.clients; ++k) {
      const VD w = VD{} + p.mixing[r * (p.clients + 1) + k];
      unroll<C>([&](auto c) INLINE_LAMBDA { acc[c] = fma(load_raw<VD>(values + k * E + c * (lanes / 2)), w, acc[c]); });
    }
    unroll<C>([&](auto c) INLINE_LAMBDA { store_raw(mixed + r * E + c * (lanes / 2), acc[c]); });
  }
  return all(below(sum, 1));
}

template <class S> bool ranked_mixed(const RankedPiece& p) {
  constexpr int E = Tile<double>::elements;
  double* means = (double*)p.unrounded;
  const double* center = (const double*)p.values + p.clients * E;
  for (int64_t r = 0; r < p.rows; ++r) ((const void**)p.row)[r] = center + (r + 1) * E;
  bool finite = true;
  for (int64_t at = p.begin, end = p.begin + p.count; at < end; at += E) {
    const int64_t n = least(E, end - at);
    finite &= mix_tile<S>(p, at, n);
    rank_tile<double>(p, {(const void* const*)p.row, p.center ? center : nullptr}, 0, n, means);
    for (int64_t m = 0; m < p.outputs; ++m) round_all((S*)p.out[m * p.out_stride] + at, means + m * E, n, false);
  }
  return finite;
}

template <class S> bool ranked(const RankedPiece& p) {
  if (p.mixing) return ranked_mixed<S>(p);
  using T = Tile<S>;
  constexpr int E = T::elements;
  double* means = (double*)p.unrounded;
  const int64_t end = p.begin + p.count;
  bool finite = true, stream = p.streaming;
  for (int64_t m = 0; m < p.outputs && stream; ++m)
    stream = (uintptr_t)((S*)p.out[m * p.out_stride] + p.begin) % 16 == 0;
  int64_t at = p.begin;
  for (; at < end; at += E) {
    Tile<S> tile{p.client, (const S*)p.center};
    const int64_t n = least(E, end - at);
    int64_t from = at;
    if (n < E) {  // the last: copied, for whole vectors
      S* padded = (S*)p.values;
      const void** row = (const void**)p.row;
      for (int64_t k = 0; k <= p.clients; ++k, padded += E) {
        const S* source = (const S*)(k < p.clients ? p.client[k] : p.center);
        __builtin_memset(padded, 0, sizeof(S) * E);
        if (source) __builtin_memcpy(padded, source + at, sizeof(S) * n);
        row[k] = padded;
      }
      tile = {(const void* const*)p.row, p.center ? (const S*)p.row[p.clients] : nullptr};
      from = 0;
    } else {
      for (int64_t k = 0; k < p.clients; ++k)
        for (int b = 0; b < ranked_tile_bytes; b += 64)
          __builtin_prefetch((const char*)((const S*)p.client[k] + at + p.ahead) + b, 0, 2);
    }
    finite &= rank_tile<S>(p, tile, from, n, means);
    for (int64_t m = 0; m < p.outputs; ++m) round_all((S*)p.out[m * p.out_stride] + at, means + m * E, n, stream);
  }
  if (stream) stream_fence();
  return finite;
}

bool ranked_any(const RankedPiece& p) {
  switch (p.dtype) {
    case F32:
      return ranked<float>(p);
    case BF16:
      return ranked<bf16>(p);
    case F16:
      return ranked<f16>(p);
    default:
      return ranked<double>(p);
  }
}
