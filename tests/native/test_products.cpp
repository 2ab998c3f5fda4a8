// Products of rows: gram, and dots.
#include "plain.h"
#include "tests.h"

namespace test {
namespace {

std::vector<double> run_gram(const Cohort& c, int64_t layers, bool per_layer, int threads = 1) {
  std::vector<double> out((per_layer ? layers : 1) * (c.clients + 1) * (c.clients + 1), -1.0);
  gram(c.table(), {c.layer.data(), layers, per_layer, out.data()}, threads);
  return out;
}

// Every tensor's Gram at every level; near by what is promised for its size, or equal when the numbers allow it
void check_layers(const Cohort& c, bool exact, bool wide = false, double known = 0) {
  const int64_t R = c.clients + 1, T = c.tensors();
  const std::vector<double> want = plain_gram(c, T);
  at_every_level([&] {
    const std::vector<double> got = run_gram(c, T, true);
    for (int64_t t = 0; t < T; ++t) {
      const double tolerance = exact ? 0 : known ? known : promised(c.dtype[t], c.numel[t], wide);
      check_gram(&got[t * R * R], &want[t * R * R], R, tolerance, "gram", c.numel[t]);
    }
  });
}

void sizes() {
  for (int32_t dtype : floating) {
    for (int64_t K : {1, 2, 3, 4, 7, 8}) check_layers(Cohort(K, shapes(dtype, odd_sizes), small), true);
    for (int64_t K : {1, 4, 6}) check_layers(Cohort(K, shapes(dtype, around_a_chunk), small), true);
  }
}

// Rows are cut into groups of at most 128, tiles of 4 x 3 and what is left of them
void numbers_of_clients() {
  for (int32_t dtype : floating)
    for (int64_t K : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 20, 33, 64, 126, 127, 128, 130, 257})
      check_layers(
          Cohort(K, shapes(dtype, K > 100 ? std::vector<int64_t>{19, 520} : std::vector<int64_t>{19, 1300}), small),
          true);
}

void addresses() {
  for (int32_t dtype : floating)
    for (int offset = 0; offset <= 65; ++offset)
      check_layers(Cohort(6, shapes(dtype, {1, 17, 256, 300}), small, offset), true);
}

void accuracy() {
  for (int32_t dtype : floating) {
    check_layers(Cohort(9, shapes(dtype, odd_sizes), uniform), false);
    // Typically 1e-8; but the squares of 11-bit numbers have low bits that are rounded down more often than up
    const double typical[] = {5e-8, 0, 1e-7, 2e-7};
    check_layers(Cohort(9, shapes(dtype, {17000, 40000}), uniform), false, false, typical[dtype]);
    Cohort constant(5, shapes(dtype, {256, 1024, 20000}), small);
    for (int64_t t = 0; t < constant.tensors(); ++t)
      for (int64_t k = -1; k < 5; ++k)
        for (int64_t e = 0; e < constant.numel[t]; ++e) constant.set(t, k, e, 0.1 * double(k + 2));
    check_layers(constant, false);
  }
}

// What float32 cannot hold, squared: such chunks are computed again in float64
void wide_path() {
  for (int32_t dtype : {F32, F64, BF16, F16})
    for (double scale : {1e25, 1e-25, 1e-40}) {
      if (dtype == F16) scale = scale > 1 ? 3e4 : 0x1p-22;
      for (int64_t K : {1, 6, 130}) {
        Cohort c(K, shapes(dtype, K > 100 ? std::vector<int64_t>{1, 40} : std::vector<int64_t>{1, 15, 256, 700, 17000}),
                 uniform);
        for (int64_t t = 0; t < c.tensors(); ++t)
          for (int64_t k = -1; k < K; k += 3)  // row 0 is among them, so they all are
            for (int64_t e = 0; e < c.numel[t]; ++e) c.set(t, k, e, (double(e % 5) - 2.25) * scale);
        check_layers(c, false, dtype != F16 && K < 128);  // beyond, only the groups of rows that need it
      }
    }
}

// A NaN or an infinity stays in the rows that have it
void not_finite_rows() {
  for (int32_t dtype : floating)
    for (double bad : {std::nan(""), HUGE_VAL}) {
      Cohort c(6, shapes(dtype, {1, 33, 300, 17000}), small);
      for (int64_t t = 0; t < c.tensors(); ++t) c.set(t, 2, c.numel[t] - 1, bad);
      check_layers(c, true);
    }
}

// Layers of several tensors, out of order, one of them empty; integers and others left out; the total
void layers() {
  std::vector<Shape> mixed;
  for (int32_t dtype : {F32, I64, F16, F64, BF16, U8, F32, F64}) mixed.push_back({dtype, 100 + 37 * dtype});
  mixed.push_back({F32, 20000});
  for (int64_t K : {3, 129}) {
    Cohort c(K, mixed, small);
    c.layer = {2, -1, 0, 2, 0, -1, -1, 4, 2};
    const int64_t L = 5, R = K + 1;
    const std::vector<double> want = plain_gram(c, L);
    std::vector<double> total(R * R, 0.0);
    for (int64_t i = 0; i < L * R * R; ++i) total[i % (R * R)] += want[i];
    at_every_level([&] {
      for (int threads : {1, 3}) {
        const std::vector<double> each = run_gram(c, L, true, threads), all = run_gram(c, L, false, threads);
        for (int64_t l = 0; l < L; ++l) check_gram(&each[l * R * R], &want[l * R * R], R, 0, "layers", l);
        check_gram(all.data(), total.data(), R, 0, "total", 0);
      }
    });
    c.layer.assign(c.tensors(), -1);
    const std::vector<double> none = run_gram(c, L, false);
    CHECK(std::all_of(none.begin(), none.end(), [](double v) { return v == 0; }), "the Gram of nothing");
  }
}

void check_dots(Cohort& c, const Cohort& left, int64_t M, bool exact) {
  const int64_t rows = 3, K = c.clients;
  for (int64_t t = 0; t < c.tensors(); ++t) c.row[t] = int32_t(t % rows);
  std::vector<const void*> address;  // [M, T]
  for (int64_t m = 0; m < M; ++m)
    for (int64_t t = 0; t < c.tensors(); ++t) address.push_back(left.address(t, m));
  const std::vector<double> want = plain_dots(c, left, rows, M);
  std::vector<double> square_left(rows * M, 0.0), square(rows * K, 0.0);
  for (int64_t t = 0; t < c.tensors() && !exact; ++t) {
    for (int64_t m = 0; m < M; ++m)
      for (double v : left.values(t, m)) square_left[c.row[t] * M + m] += v * v;
    for (int64_t k = 0; k < K; ++k)
      for (double v : c.values(t, k)) square[c.row[t] * K + k] += v * v;
  }
  at_every_level([&] {
    std::vector<double> got(rows * M * K, -1.0);
    dots(c.table(), address.data(), c.row.data(), rows, M, got.data(), 2);
    for (int64_t i = 0; i < rows * M * K; ++i) {
      const int64_t r = i / K / M;
      const double bound = exact ? 0 : 1e-6 * std::sqrt(square_left[i / K] * square[r * K + i % K]);
      CHECK(std::fabs(got[i] - want[i]) <= bound, "dots: dtype %d, K %d, M %d: %.17g, not %.17g", c.dtype[0], int(K),
            int(M), got[i], want[i]);
    }
  });
}

void products_of_two_sides() {
  for (int32_t dtype : floating) {
    for (int64_t K : {1, 2, 3, 5, 8})
      for (int64_t M : {1, 2, 3, 4, 5, 6}) {
        std::vector<Shape> s = shapes(dtype, {0, 1, 17, 33, 257, 700});
        s.push_back({I32, 9});
        Cohort c(K, s, small), left(M, s, small, Cohort::rotating, 2);
        check_dots(c, left, M, true);
      }
    for (int offset = 0; offset <= 65; ++offset) {
      Cohort c(3, shapes(dtype, {5, 300}), small, offset), left(2, shapes(dtype, {5, 300}), small, 65 - offset, 2);
      check_dots(c, left, 2, true);
    }
    for (int64_t K : {3, 130, 260}) {
      const int64_t M = K == 3 ? 131 : 2;
      Cohort c(K, shapes(dtype, {9, 1030}), small), left(M, shapes(dtype, {9, 1030}), small, Cohort::rotating, 2);
      check_dots(c, left, M, true);
    }
    Cohort c(4, shapes(dtype, {33, 40000, 16385}), uniform), left(3, shapes(dtype, {33, 40000, 16385}), uniform, 3, 2);
    check_dots(c, left, 3, false);
    for (int64_t e = 0; dtype != F16 && e < 33; ++e) left.set(0, 1, e, 1e25), c.set(0, 1, e, 1e20);  // the wide path
    check_dots(c, left, 3, false);
  }
}

}  // namespace

void products() {
  sizes();
  numbers_of_clients();
  addresses();
  accuracy();
  wide_path();
  not_finite_rows();
  layers();
  products_of_two_sides();
}

}  // namespace test
