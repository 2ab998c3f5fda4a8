// Products of the Gram with vectors, without the Gram: <d_k, u> for u = sum_j v_j d_j. Included by kernels-inl.h inside
// the level's namespace.
//
// A piece of all clients is read from memory once, for u, and once more from the cache, for the products with it.
// u is summed in float64 (16-bit tensors: eight clients at a time in float32 before that) and rounded once. Products
// are summed in float32 over 32 vectors, then over lanes, then in float64, whatever the piece; a pair of rows sees the
// same additions in the same order wherever it stands.

constexpr int vectors_in_a_sum = 32;

// scale (v_0 (w_0 - g) + ...) of NK clients from k on, added to float64 sums. C = double: all in float64.
template <class S, class C, int NK>
inline void add_updates(const MixChunk& p, double scale, int64_t k, int64_t at, int64_t n, const C* g, VD* sum) {
  using V = typename Vec<C>::V;
  constexpr int parts = sizeof(double) / sizeof(C);
  const S* src[NK];
  V w[NK];
  unroll<NK>([&](auto i) INLINE_LAMBDA {
    src[i] = (const S*)p.client[k + i] + at;
    w[i] = V{} + C(scale * p.weights[k + i]);
  });
  for (int64_t e = 0; e < n; e += width<C>, sum += parts) {
    const V center = load_raw<V>(g + e);
    V of_some = {};
    unroll<NK>([&](auto i) INLINE_LAMBDA { of_some = fma(load_as(src[i] + e, C()) - center, w[i], of_some); });
    if constexpr (parts == 1) {
      sum[0] += of_some;
    } else {
      HalfVF half[2];
      __builtin_memcpy(half, &of_some, sizeof half);
      sum[0] += widen(half[0]);
      sum[1] += widen(half[1]);
    }
  }
}

template <class S, class C>
void sum_updates(const MixChunk& p, double scale, int64_t at, int64_t n, const C* g, VD* sum) {
  for (int64_t v = 0; v < n / width<double>; ++v) sum[v] = VD{};
  int64_t k = 0;
  for (; k + 8 <= p.clients; k += 8) add_updates<S, C, 8>(p, scale, k, at, n, g, sum);
  for (; k < p.clients; ++k) add_updates<S, C, 1>(p, scale, k, at, n, g, sum);
}

inline void store_rounded(float* p, VD v) { store_raw(p, __builtin_convertvector(v, HalfVF)); }
inline void store_rounded(double* p, VD v) { store_raw(p, v); }

// u = scale sum as compute type C; returns its square before it was rounded
template <class C> double round_sums(const VD* sum, int64_t n, double scale, C* u) {
  VD square = {};
  for (int64_t e = 0; e < n; e += width<double>) {
    const VD v = sum[e / width<double>] * (VD{} + scale);
    store_rounded(u + e, v);
    square += v * v;
  }
  double total = 0;
  for (int i = 0; i < width<double>; ++i) total += square[i];
  return total;
}

// out[i * ld + ..] += <y_i, y_i>, <y_i, g> and <y_i, u> of NK rows y_i = src_i - g (CENTERED) or src_i; with ONLY_U the
// last alone
template <class S, class C, int NK, bool CENTERED, bool ONLY_U>
inline void multiply_rows(const S* const* src, const C* g, const C* u, int64_t n, int64_t ahead, double* out,
                          int64_t ld, int column) {
  using V = typename Vec<C>::V;
  constexpr int w = width<C>;
  for (int64_t at = 0; at < n; at += vectors_in_a_sum * w) {
    const int64_t end = least(n, at + vectors_in_a_sum * w);
    V square[4] = {}, along[4] = {}, product[4] = {};
    for (int64_t e = at; e < end; e += w) {
      const V center = load_raw<V>(g + e), x = load_raw<V>(u + e);
      unroll<NK>([&](auto i) INLINE_LAMBDA {
        if (!ONLY_U && CENTERED && e * int64_t(sizeof(S)) % 64 < w * int64_t(sizeof(S)))
          __builtin_prefetch(src[i] + e + ahead, 0, 2);
        V y = load_as(src[i] + e, C());
        if (CENTERED) y = y - center;
        product[i] = fma(y, x, product[i]);
        if (!ONLY_U) {
          square[i] = fma(y, y, square[i]);
          along[i] = fma(y, center, along[i]);
        }
      });
    }
    const D4 products = sums(product[0], product[1], product[2], product[3]);
    for (int i = 0; i < NK; ++i) out[i * ld + column] += products[i];
    if (ONLY_U) continue;
    const D4 squares = sums(square[0], square[1], square[2], square[3]);
    const D4 alongs = sums(along[0], along[1], along[2], along[3]);
    for (int i = 0; i < NK; ++i) out[i * ld] += squares[i], out[i * ld + 1] += alongs[i];
  }
}

// of the center, row 0, and of all clients
template <class S, class C, bool ONLY_U>
void multiply_all(const MixChunk& p, const S* center, int64_t at, int64_t n, const C* g, const C* u, double* out,
                  int column, int64_t ahead) {
  const int64_t ld = 2 + p.outputs;
  const S* const first = center + at;
  multiply_rows<S, C, 1, false, ONLY_U>(&first, g, u, n, 0, out, ld, column);
  const S* src[4];
  int64_t k = 0;
  for (; k + 4 <= p.clients; k += 4) {
    unroll<4>([&](auto i) INLINE_LAMBDA { src[i] = (const S*)p.client[k + i] + at; });
    multiply_rows<S, C, 4, true, ONLY_U>(src, g, u, n, ahead, out + (k + 1) * ld, ld, column);
  }
  for (; k < p.clients; ++k) {
    src[0] = (const S*)p.client[k] + at;
    multiply_rows<S, C, 1, true, ONLY_U>(src, g, u, n, ahead, out + (k + 1) * ld, ld, column);
  }
}

// n elements from `at`, a multiple of lanes
template <class S, class C> bool times_piece(const TimesPiece& p, int64_t at, int64_t n, bool stream) {
  C* u = (C*)p.scratch;
  C* own = u + n;  // the center as compute type
  const S* center = (const S*)p.center;
  const C* g = own;
  if constexpr (same_type<S, C>)
    g = (const C*)center + at;
  else
    pack<as_it_is>(center + at, center, n, own);
  VD* sum = (VD*)p.mix.sums;
  VU finite = ~VU{};
  for (int64_t m = 0; m < p.mix.outputs; ++m) {
    MixChunk one = p.mix;
    one.weights += m * one.clients;
    if (one.out) {
      sum_clients<S>(one, at, n, (typename Mixing<S>::A*)sum);
      finite &= store_sums((S*)one.out[m * one.out_stride] + at, n, (typename Mixing<S>::A*)sum, stream);
    }
    // In float64 a sum of float32 clients has digits enough to subtract the center from that, if the clients with the
    // largest weights do not stand still while those with tiny ones move. Others have not: float64 clients, which need
    // every digit, and 16-bit ones, whose mix has float32 sums.
    if (same_type<S, float> && !p.uneven[m]) {
      if (!one.out) sum_clients<S>(one, at, n, (typename Mixing<S>::A*)sum);
      const VD total = VD{} + p.total[m];
      for (int64_t e = 0; e < n; e += width<double>)
        sum[e / width<double>] -= total * widen(load_raw<HalfVF>((const char*)center + (at + e) * sizeof(float)));
      p.squares[m] += round_sums(sum, n, p.scale[m], u);
    } else {
      sum_updates<S, C>(one, p.scale[m], at, n, g, sum);
      p.squares[m] += round_sums(sum, n, 1.0, u);
    }
    if (m == 0)
      multiply_all<S, C, false>(p.mix, center, at, n, g, u, p.products, 2, p.ahead);
    else
      multiply_all<S, C, true>(p.mix, center, at, n, g, u, p.products, int(2 + m), p.ahead);
  }
  return all(finite);
}

// The last elements, fewer than a vector's, padded with zeros, which add nothing to any product
template <class S, class C> bool times_tail(const TimesPiece& p, int64_t at, int64_t n) {
  struct alignas(64) Padded {
    S value[lanes];
  };
  const int64_t K = p.mix.clients;
  auto* padded = (Padded*)((char*)p.scratch + 2 * lanes * sizeof(double));
  auto** address = (const void**)(padded + K + 2);
  auto fill = [&](int64_t i, const void* from) {
    padded[i] = Padded{};
    __builtin_memcpy(padded[i].value, (const S*)from + at, sizeof(S) * n);
    return (const void*)padded[i].value;
  };
  for (int64_t k = 0; k < K; ++k) address[k] = fill(k, p.mix.client[k]);
  bool finite = true;
  TimesPiece part = p;
  part.center = fill(K, p.center);
  part.mix.client = address;
  for (int64_t m = 0; m < p.mix.outputs && p.mix.out; ++m) {  // one at a time: each has its own padded place
    MixChunk one = part.mix;
    one.weights += m * K, one.outputs = 1;
    finite &= all(sum_clients<S>(one, 0, lanes, (typename Mixing<S>::A*)one.sums, padded[K + 1].value));
    __builtin_memcpy((S*)p.mix.out[m * p.mix.out_stride] + at, padded[K + 1].value, sizeof(S) * n);
  }
  part.mix.out = nullptr;
  times_piece<S, C>(part, 0, lanes, false);
  return finite;
}

template <class S, class C> bool gram_times(const TimesPiece& p) {
  const int64_t whole = p.mix.count / lanes * lanes;
  bool stream = p.mix.streaming && p.mix.out;
  for (int64_t m = 0; m < p.mix.outputs && stream; ++m)
    stream = (uintptr_t)((S*)p.mix.out[m * p.mix.out_stride] + p.mix.begin) % 16 == 0;
  bool finite = whole == 0 || times_piece<S, C>(p, p.mix.begin, whole, stream);
  if (whole < p.mix.count) finite &= times_tail<S, C>(p, p.mix.begin + whole, p.mix.count - whole);
  if (stream) stream_fence();
  return finite;
}

bool gram_times_any(const TimesPiece& p) {
  switch (p.mix.dtype) {
    case F32:
      return p.wide ? gram_times<float, double>(p) : gram_times<float, float>(p);
    case BF16:
      return p.wide ? gram_times<bf16, double>(p) : gram_times<bf16, float>(p);
    case F16:
      return p.wide ? gram_times<f16, double>(p) : gram_times<f16, float>(p);
    default:
      return gram_times<double, double>(p);
  }
}
