// Weighted sums. Included by kernels-inl.h inside the level's namespace.

// Lanes whose magnitude is below the limit: all ones. Not NaN's.
inline VU below(VF v, float limit) { return (VU)(bits<VF>(bits<VU>(v) & 0x7fffffffu) < VF{} + limit); }
inline VU below(VD v, double limit) { return (VU)(bits<VD>(bits<VL>(v) & 0x7fffffffffffffffull) < VD{} + limit); }
inline bool all(VU mask) {
  uint32_t both = ~0u;
  for (int i = 0; i < lanes; ++i) both &= mask[i];
  return both == ~0u;
}
constexpr float overflow(bf16) { return 0x1.ffp127f; }  // what is this large is rounded to infinity
constexpr float overflow(f16) { return 65520.0f; }

// `lanes` elements of type S as accumulators: one float32 vector, or two float64 ones. store() says what is finite of
// what it wrote, as a mask.
template <class S> struct Mixing {  // 16-bit floats
  using A = VF;
  static constexpr int parts = 1;
  static void load(const S* p, A* v) { v[0] = load_float(p); }
  static VU store(S* p, const A* v, bool) {
    store_float(p, v[0]);
    return below(v[0], overflow(S{}));
  }
  static A broadcast(double w) { return A{} + float(w); }
};
template <> struct Mixing<float> {
  using A = VD;
  static constexpr int parts = 2;
  static void load(const float* p, A* v) {
    v[0] = widen(load_raw<HalfVF>(p));
    v[1] = widen(load_raw<HalfVF>(p + lanes / 2));
  }
  static VU store(float* p, const A* v, bool stream) {
    HalfVF lo = __builtin_convertvector(v[0], HalfVF), hi = __builtin_convertvector(v[1], HalfVF);
    VF both;
    __builtin_memcpy(&both, &lo, sizeof lo);
    __builtin_memcpy((char*)&both + sizeof lo, &hi, sizeof hi);
    stream ? store_stream(p, both) : store_raw(p, both);
    return below(both, __builtin_inff());
  }
  static A broadcast(double w) { return A{} + w; }
};
template <> struct Mixing<double> {
  using A = VD;
  static constexpr int parts = 2;
  static void load(const double* p, A* v) { v[0] = load_raw<VD>(p), v[1] = load_raw<VD>(p + lanes / 2); }
  static VU store(double* p, const A* v, bool stream) {
    for (int i = 0; i < 2; ++i) stream ? store_stream(p + i * (lanes / 2), v[i]) : store_raw(p + i * (lanes / 2), v[i]);
    return below(v[0], __builtin_inf()) & below(v[1], __builtin_inf());
  }
  static A broadcast(double w) { return A{} + w; }
};

// MB outputs, EV * lanes elements from `at`: every client is added in order, by fused multiply-add
template <class S, int MB, int EV> inline VU mix_step(const MixChunk& p, int64_t m, int64_t at, bool stream) {
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
        const int b = i / P, part = i % P;
        acc[b][v * P + part] = fma(x[part], w[b], acc[b][v * P + part]);
      });
    });
  }
  VU finite = ~VU{};
  unroll<MB * EV>([&](auto i) INLINE_LAMBDA {
    const int b = i / EV, v = i % EV;
    finite &= X::store((S*)p.out[(m + b) * p.out_stride] + at + v * lanes, acc[b] + v * P, stream);
  });
  return finite;
}

// sums[0..n) += (or =, FIRST) the elements from `at` of NK clients from k on; n is a multiple of lanes. With `out`,
// what has become of them is stored there instead, and the result says what of it is finite.
template <class S, int NK, bool FIRST>
VU mix_rows(const MixChunk& p, int64_t k, int64_t at, int64_t n, typename Mixing<S>::A* sums, S* out, bool stream) {
  using X = Mixing<S>;
  constexpr int P = X::parts;
  const S* src[NK];
  typename X::A w[NK];
  unroll<NK>([&](auto i) INLINE_LAMBDA {
    src[i] = (const S*)p.client[k + i] + at;
    w[i] = X::broadcast(p.weights[k + i]);
  });
  auto sum_of = [&](int64_t e, typename X::A* sum) INLINE_LAMBDA {
    if (!FIRST) unroll<P>([&](auto i) INLINE_LAMBDA { sum[i] = sums[e / lanes * P + i]; });
    unroll<NK>([&](auto i) INLINE_LAMBDA {
      typename X::A x[P];
      X::load(src[i] + e, x);
      unroll<P>([&](auto v) INLINE_LAMBDA { sum[v] = fma(x[v], w[i], sum[v]); });
    });
  };
  VU finite = ~VU{};
  if (out) {
    for (int64_t e = 0; e < n; e += lanes) {
      typename X::A sum[P] = {};
      sum_of(e, sum);
      finite &= X::store(out + e, sum, stream);
    }
  } else {
    for (int64_t e = 0; e < n; e += lanes) {
      typename X::A sum[P] = {};
      sum_of(e, sum);
      unroll<P>([&](auto i) INLINE_LAMBDA { sums[e / lanes * P + i] = sum[i]; });
    }
  }
  return finite;
}

constexpr int most_streams = 10;

// `count` clients from k on, side by side
template <class S, int NK = most_streams>
VU mix_group(const MixChunk& p, int64_t k, int count, int64_t at, int64_t n, typename Mixing<S>::A* sums, S* out,
             bool stream) {
  if constexpr (NK > 1)
    if (count < NK) return mix_group<S, NK - 1>(p, k, count, at, n, sums, out, stream);
  return k == 0 ? mix_rows<S, NK, true>(p, k, at, n, sums, out, stream)
                : mix_rows<S, NK, false>(p, k, at, n, sums, out, stream);
}

// The weighted sum of all clients, elements from `at`, one output: in sums, or with `out` only there. A run of each
// client is read in groups of at most ten side by side, of equal size: as many streams as hardware prefetchers keep up
// with. On Zen 4, runs of 128 KB in groups of ten take 1.1 reads of memory; groups of five or eight 1.2, of twenty 2.1;
// runs of 8 KB 1.4.
template <class S>
VU sum_clients(const MixChunk& p, int64_t at, int64_t n, typename Mixing<S>::A* sums, S* out = nullptr,
               bool stream = false) {
  const int64_t groups = (p.clients + most_streams - 1) / most_streams;
  VU finite = ~VU{};
  for (int64_t g = 0, k = 0; g < groups; ++g) {
    const int64_t end = p.clients * (g + 1) / groups;
    finite = mix_group<S>(p, k, int(end - k), at, n, sums, g + 1 == groups ? out : nullptr, stream);
    k = end;
  }
  return finite;
}

template <class S> VU store_sums(S* out, int64_t n, const typename Mixing<S>::A* sums, bool stream) {
  using X = Mixing<S>;
  VU finite = ~VU{};
  for (int64_t e = 0, v = 0; e < n; e += lanes, v += X::parts) finite &= X::store(out + e, sums + v, stream);
  return finite;
}

template <class S> VU mix_tail(const MixChunk& p, int64_t at, int64_t n) {  // n < lanes
  using X = Mixing<S>;
  VU finite = ~VU{};
  for (int64_t m = 0; m < p.outputs; ++m) {
    typename X::A acc[X::parts] = {}, x[X::parts];
    S padded[lanes] = {};
    for (int64_t k = 0; k < p.clients; ++k) {
      __builtin_memcpy(padded, (const S*)p.client[k] + at, sizeof(S) * n);
      X::load(padded, x);
      for (int v = 0; v < X::parts; ++v) acc[v] = fma(x[v], X::broadcast(p.weights[m * p.clients + k]), acc[v]);
    }
    finite &= X::store(padded, acc, false);
    __builtin_memcpy((S*)p.out[m * p.out_stride] + at, padded, sizeof(S) * n);
  }
  return finite;
}

template <class S> bool mix(const MixChunk& p) {
  constexpr int EV = Mixing<S>::parts == 1 ? 2 : 1;  // four outputs at a time: 8 accumulators
  int64_t end = p.begin + p.count;
  bool stream = p.streaming;
  for (int64_t m = 0; m < p.outputs && stream; ++m)
    stream = (uintptr_t)((S*)p.out[m * p.out_stride] + p.begin) % 16 == 0;
  int64_t at = p.begin;
  VU finite = ~VU{};
  const int64_t run =
      p.outputs == 1 ? p.run : 8192 / sizeof(S);  // several: the clients' stays in cache for all of them
  while (at + lanes <= end) {
    int64_t stop = at + least(run, (end - at) / lanes * lanes), m = 0;
    if (p.outputs == 1)
      finite &= sum_clients<S>(p, at, stop - at, (typename Mixing<S>::A*)p.sums, (S*)p.out[0] + at, stream), m = 1;
    for (; m + 4 <= p.outputs; m += 4) {
      int64_t e = at;
      for (; e + EV * lanes <= stop; e += EV * lanes) finite &= mix_step<S, 4, EV>(p, m, e, stream);
      for (; e < stop; e += lanes) finite &= mix_step<S, 4, 1>(p, m, e, stream);
    }
    for (; m < p.outputs; ++m)
      for (int64_t e = at; e < stop; e += lanes) finite &= mix_step<S, 1, 1>(p, m, e, stream);
    at = stop;
  }
  if (at < end) finite &= mix_tail<S>(p, at, end - at);
  if (stream) stream_fence();
  return all(finite);
}

bool mix_any(const MixChunk& p) {
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
