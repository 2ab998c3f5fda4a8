// Products of the Gram with vectors, without the Gram: gram_times.
#include "plain.h"
#include "tests.h"

namespace test {
namespace {

// Numbers of which sums with small integers are exact, or any
std::vector<double> some_vectors(int64_t count, Fill fill) {
  std::minstd_rand random(5);
  std::vector<double> v(count);
  for (double& x : v) x = fill == small ? (int(random() % 9) - 4) * 0.5 : int32_t(random()) * 0x1p-31;
  return v;
}

// [layers, K + 1, 2 + M], and what its entries' errors are relative to
struct Plain {
  std::vector<double> columns, scale;
  Plain(const Cohort& c, int64_t layers, const std::vector<double>& v, int64_t M) {
    const int64_t R = c.clients + 1, C = 2 + M;
    columns.assign(layers * R * C, 0.0), scale.assign(layers * R * C, 0.0);
    std::vector<double> of_u(layers * M, 0.0), of_row(layers * R, 0.0), of_g(layers, 0.0);
    for (int64_t t = 0; t < c.tensors(); ++t) {
      if (c.layer[t] < 0) continue;
      const int64_t n = c.numel[t], l = c.layer[t];
      std::vector<std::vector<double>> rows;
      for (int64_t k = -1; k < c.clients; ++k) rows.push_back(c.values(t, k));
      for (int64_t k = 1; k < R; ++k)
        for (int64_t e = 0; e < n; ++e) rows[k][e] -= rows[0][e];
      std::vector<std::vector<double>> second = {{}, rows[0]};
      for (int64_t m = 0; m < M; ++m) {
        std::vector<double> u(n, 0.0);
        for (int64_t k = 0; k < c.clients; ++k)
          for (int64_t e = 0; e < n; ++e) u[e] += v[(c.row[t] * M + m) * c.clients + k] * rows[k + 1][e];
        for (double x : u) of_u[l * M + m] += x * x;
        second.push_back(u);
      }
      for (int64_t r = 0; r < R; ++r)
        for (int64_t e = 0; e < n; ++e) {
          of_row[l * R + r] += rows[r][e] * rows[r][e];
          for (int64_t i = 0; i < C; ++i)
            columns[(l * R + r) * C + i] += rows[r][e] * (i == 0 ? rows[r][e] : second[i][e]);
        }
    }
    for (int64_t l = 0; l < layers; ++l)
      for (int64_t r = 0; r < R; ++r)
        for (int64_t i = 0; i < C; ++i)
          scale[(l * R + r) * C + i] = std::sqrt(of_row[l * R + r]) * std::sqrt(i == 0   ? of_row[l * R + r]
                                                                                : i == 1 ? of_row[l * R]
                                                                                         : of_u[l * M + i - 2]);
  }
};

std::vector<double> run_times(const Cohort& c, int64_t layers, bool per_layer, const std::vector<double>& v, int64_t M,
                              Outputs* out, int threads) {
  std::vector<double> columns((per_layer ? layers : 1) * (c.clients + 1) * (2 + M), -1.0);
  Mix mix{v.data(), c.row.data(), M, nullptr, nullptr};
  if (out) mix = out->mix(c, v);
  gram_times(c.table(), {c.layer.data(), layers, per_layer, columns.data()}, mix, threads);
  return columns;
}

// Every tensor a layer of its own; at every level, with and without the mix, and with caches of several sizes
void check_times(const Cohort& c, int64_t M, Fill fill, double tolerance = 1e-6) {
  const int64_t L = c.tensors(), rows = 1 + *std::max_element(c.row.begin(), c.row.end());
  const std::vector<double> v = some_vectors(rows * M * c.clients, fill);
  const Plain want(c, L, v, M);
  at_every_level([&] {
    Outputs mixed(c, M), alone(c, M);
    const std::vector<double> got = run_times(c, L, true, v, M, nullptr, 1);
    for (size_t i = 0; i < got.size(); ++i) {
      const double g = got[i], w = want.columns[i];
      const int64_t t = int64_t(i) / ((c.clients + 1) * (2 + M));
      const double bound = c.dtype[t] == F64 ? 4 * double(c.numel[t] + c.clients + 4) * 0x1p-53 * want.scale[i]
                                             : tolerance * want.scale[i];
      CHECK(std::isnan(w) || std::isinf(w) ? !std::isfinite(g)
            : fill == small                ? g == w
                                           : std::fabs(g - w) <= bound,
            "dtype %d, K %d, M %d, %d elements: entry %d is %.17g, not %.17g", c.dtype[t], int(c.clients), int(M),
            int(c.numel[t]), int(i), g, w);
    }
    mix(c.table(), alone.mix(c, v), 1);
    for (int64_t cache : {1 << 12, 1 << 18, 1 << 21}) {
      Outputs again(c, M);
      set_cache_bytes(cache);
      const std::vector<double> same = run_times(c, L, true, v, M, &again, 2);
      set_cache_bytes(0);
      CHECK(std::memcmp(same.data(), got.data(), got.size() * sizeof got[0]) == 0, "a cache of %d", int(cache));
      CHECK(again == alone, "the mix beside it: dtype %d, K %d, M %d", c.dtype[0], int(c.clients), int(M));
    }
  });
}

}  // namespace

void times() {
  for (int32_t dtype : floating) {
    for (int64_t M : {1, 3}) check_times(Cohort(5, shapes(dtype, odd_sizes), small), M, small);
    check_times(Cohort(3, shapes(dtype, around_a_chunk), small), 1, small);
    check_times(Cohort(9, shapes(dtype, {1, 40, 777, 17000}), uniform), 2, uniform);
    for (int64_t K : {1, 2, 4, 7, 8, 10, 11, 21, 130})
      check_times(Cohort(K, shapes(dtype, {3, 37, 1100}), uniform), 1, uniform);
    for (int offset : {0, 1, 2, 4, 17, 64})
      check_times(Cohort(6, shapes(dtype, {1, 17, 600}), small, offset), 1, small);
    for (double bad : {std::nan(""), HUGE_VAL}) {  // in its own row's square, and in all products with the sum
      Cohort c(3, shapes(dtype, {1, 33, 1030}), uniform);
      for (int64_t t = 0; t < c.tensors(); ++t) c.set(t, 1, c.numel[t] - 1, bad);
      check_times(c, 1, uniform);
    }
    for (double scale : {1e25, 1e-25, 1e-40}) {  // what float32 cannot hold, squared
      if (dtype == F16) scale = scale > 1 ? 3e4 : 0x1p-22;
      Cohort c(5, shapes(dtype, {1, 15, 700}), uniform);
      for (int64_t t = 0; t < c.tensors(); ++t)
        for (int64_t k = -1; k < 5; ++k)
          for (int64_t e = 0; e < c.numel[t]; ++e)
            c.set(t, k, e, (double((e + 3 * k * k) % 7) - 2.25) * scale * (1 + 0.1 * double(k)));
      check_times(c, 1, uniform);
    }
  }
  // rows of vectors, tensors that are left out, integers that are only mixed
  std::vector<Shape> mixed;
  for (int32_t dtype = 0; dtype < DTYPES; ++dtype) mixed.push_back({dtype, 40 + dtype}), mixed.push_back({dtype, 0});
  Cohort c(5, mixed, small);
  for (int64_t t = 0; t < c.tensors(); ++t) c.row[t] = int32_t(t % 4);
  c.layer[2] = -1;
  check_times(c, 2, small);
  // layers of several tensors, and their sum
  Cohort d(4, shapes(F32, {300, 17000, 5, 64}), uniform);
  d.layer = {1, 0, 1, -1};
  const std::vector<double> v = some_vectors(4, uniform);
  at_every_level([&] {
    const std::vector<double> each = run_times(d, 2, true, v, 1, nullptr, 1),
                              total = run_times(d, 2, false, v, 1, nullptr, 3);
    for (size_t i = 0; i < total.size(); ++i)
      CHECK(total[i] == each[i] + each[total.size() + i], "the sum over layers: entry %d", int(i));
  });
}

}  // namespace test
