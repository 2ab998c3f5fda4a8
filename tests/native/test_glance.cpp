// A little of everything, small enough for valgrind: it is 50 times slower, and has no AVX-512.
#include "plain.h"
#include "tests.h"

namespace test {

void glance() {
#ifdef __aarch64__
  CHECK(std::strcmp(simd_best(), "neon") == 0 && std::strcmp(simd_level(), "neon") == 0, "%s", simd_best());
#endif
  ranking_glance();
  std::vector<Shape> all;
  for (int32_t dtype = 0; dtype < DTYPES; ++dtype)
    for (int64_t n : {0, 1, 7, 33, 300}) all.push_back({dtype, n});
  all.push_back({F32, 16387});
  const Cohort c(6, all, small);
  const int64_t T = c.tensors(), K = 6, R = K + 1;
  const std::vector<double> weights = {1, -2, 0.5, 0.25, 1, 1, 0, 2, -1, 1.5, 1, 0.25};
  const std::vector<double> want = plain_gram(c, T), want_dots = plain_dots(c, c, 1, 3);
  std::vector<const void*> left;
  for (int64_t m = 0; m < 3; ++m)
    for (int64_t t = 0; t < T; ++t) left.push_back(c.address(t, m));
  at_every_level([&] {
    for (int threads : {1, 2})
      for (int64_t M : {1, 2}) {
        const std::vector<double> used(weights.begin(), weights.begin() + M * K);
        std::vector<double> g(T * R * R), h(T * R * R), d(3 * K);
        Outputs out(c, M), both(c, M);
        gram(c.table(), {c.layer.data(), T, true, g.data()}, threads);
        mix(c.table(), out.mix(c, used), threads);
        gram_mix(c.table(), {c.layer.data(), T, true, h.data()}, both.mix(c, used), threads);
        for (int64_t t = 0; t < T; ++t) check_gram(&g[t * R * R], &want[t * R * R], R, 0, "gram", c.numel[t]);
        check_outputs(c, used, out, true);
        CHECK(g == h && out == both, "gram_mix");
        Outputs beside(c, M);
        std::vector<double> columns(T * R * (2 + M));
        gram_times(c.table(), {c.layer.data(), T, true, columns.data()}, beside.mix(c, used), threads);
        CHECK(beside == out, "gram_times");
        for (int64_t t = 0; t < T; ++t)
          for (int64_t r = 0; r < R; ++r)
            CHECK(columns[(t * R + r) * (2 + M)] == g[t * R * R + r * R + r], "squares of tensor %d", int(t));
        dots(c.table(), left.data(), c.row.data(), 1, 3, d.data(), threads);
        CHECK(d == want_dots, "dots");
        read_all(c.table(), 1000, threads);
      }
  });
  Cohort huge(130, {{F32, 40}, {BF16, 3}}, uniform);  // groups of rows, and the wide path
  for (int64_t t = 0; t < 2; ++t) huge.set(t, 3, 2, 1e25);
  const int64_t size = 131 * 131;
  const std::vector<double> plain = plain_gram(huge, 2);
  at_every_level([&] {
    std::vector<double> g(2 * size);
    gram(huge.table(), {huge.layer.data(), 2, true, g.data()}, 2);
    for (int64_t t = 0; t < 2; ++t) check_gram(&g[t * size], &plain[t * size], 131, promised(F32, 40), "wide", 40);
  });
}

}  // namespace test
