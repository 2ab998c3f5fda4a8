// Means by rank.
#include <algorithm>

#include "plain.h"
#include "tests.h"

namespace test {
namespace {

double mean_of(const std::vector<double>& values) {
  double total = 0, scaled = 0;
  for (double v : values) total += v, scaled += v / double(values.size());
  const double mean = total / double(values.size()), largest = 0x1.fffffffffffffp1023;
  return std::isfinite(mean) ? mean : std::min(std::max(scaled, -largest), largest);
}

// Of the values of one element, sorted, as fastagg.h says
double plain_mean(const std::vector<double>& s, double center, const RankedMean& m) {
  if (m.high > m.low) center = mean_of({s.begin() + m.low, s.begin() + m.high});
  if (!m.nearest) return center;
  std::vector<double> near(s.begin(), s.begin() + m.nearest);
  for (size_t next = near.size(); next < s.size(); ++next) {
    double& lowest = near[(next - near.size()) % near.size()];
    if (s[next - near.size()] / 2 + s[next] / 2 < center) lowest = s[next];
  }
  return mean_of(near);
}

std::vector<RankedMean> some_means(int64_t K) {
  const int64_t f = (K - 1) / 3;
  return {{(K - 1) / 2, K / 2 + 1, 0},
          {f, K - f, 0},
          {(K - 1) / 2, K / 2 + 1, K - f},
          {f, K - f, std::max<int64_t>(K / 3, 1)},
          {0, 0, K - f},
          {0, 0, 0},
          {K - 1, K, 0},
          {0, K, 1}};
}

template <class T> void check_integers(const Cohort& c, int64_t t, const RankedMean& m, const char* out) {
  const int64_t rank = m.high > m.low ? (m.low + m.high - 1) / 2 : (c.clients - 1) / 2;
  for (int64_t e = 0; e < c.numel[t]; ++e) {
    std::vector<T> values;
    for (int64_t k = 0; k < c.clients; ++k) values.push_back(copied<T>(c.element(t, k, e)));
    std::sort(values.begin(), values.end());
    CHECK(copied<T>(out + e * sizeof(T)) == values[rank], "integers: dtype %d, element %d", c.dtype[t], int(e));
  }
}

// Bit by bit what plain loops give; with mixing, whose multiply-adds round differently, nearly
void check_floats(const Cohort& c, int64_t t, const RankedMean& m, const std::vector<double>& mixing, int64_t rows,
                  const char* out) {
  const int32_t dtype = c.dtype[t];
  const int64_t n = c.numel[t], bytes = dtype_bytes[dtype], K = c.clients;
  const std::vector<double> center = c.values(t, -1);
  std::vector<std::vector<double>> clients;
  for (int64_t k = 0; k < K; ++k) clients.push_back(c.values(t, k));
  const double digit = dtype == F32 ? 0x1p-23 : dtype == F64 ? 0x1p-48 : dtype == BF16 ? 0x1p-7 : 0x1p-10;
  for (int64_t e = 0; e < n; ++e) {
    std::vector<double> s;
    for (int64_t r = 0; r < rows; ++r) {
      double value = mixing.empty() ? clients[r][e] : mixing[r * (K + 1) + K] * center[e];
      for (int64_t k = 0; k < K && !mixing.empty(); ++k) value += mixing[r * (K + 1) + k] * clients[k][e];
      s.push_back(value);
    }
    std::sort(s.begin(), s.end());
    char want[8];
    const double mean = plain_mean(s, center[e], m) + 0.0;
    encode(dtype, dtype == F64 ? mean : double(float(mean)), want);
    if (std::memcmp(want, out + e * bytes, bytes) == 0) continue;
    const double got = decode(dtype, out + e * bytes);
    CHECK(!mixing.empty() && std::fabs(got - mean) <= digit * std::max(std::fabs(mean), 0x1p-4),
          "means by rank: dtype %d, K %d, (%d, %d, %d), element %d of %d is %.17g, not %.17g", dtype, int(K),
          int(m.low), int(m.high), int(m.nearest), int(e), int(n), got, mean);
  }
}

void check_ranked(const Cohort& c, int offset = Cohort::rotating, int64_t mixed = 0, int threads = 1) {
  const int64_t K = c.clients, rows = mixed ? mixed : K;
  std::vector<double> mixing;
  std::minstd_rand random(7);
  for (int64_t i = 0; i < mixed * (K + 1); ++i) mixing.push_back(double(random() % 1024) / 1024 / double(K));
  const std::vector<RankedMean> means = some_means(rows);
  const int64_t M = int64_t(means.size());
  at_every_level([&] {
    Outputs out(c, M, offset);
    ranked_means(c.table(),
                 {means.data(), 1, c.row.data(), M, out.address.data(), out.not_finite.data(),
                  mixed ? mixing.data() : nullptr, mixed},
                 threads);
    for (int64_t t = 0; t < c.tensors(); ++t)
      for (int64_t m = 0; m < M; ++m) {
        const char* at = out.blocks[m * out.tensors + t].data();
        const size_t bytes = out.blocks[m * out.tensors + t].bytes();
        if (c.row[t] < 0) {
          CHECK(std::all_of(at, at + bytes, [](char b) { return b == char(0xa5); }), "a tensor that was left alone");
          continue;
        }
        switch (c.dtype[t]) {
          case I8:
            check_integers<int8_t>(c, t, means[m], at);
            break;
          case I16:
            check_integers<int16_t>(c, t, means[m], at);
            break;
          case I32:
            check_integers<int32_t>(c, t, means[m], at);
            break;
          case I64:
            check_integers<int64_t>(c, t, means[m], at);
            break;
          case U8:
            check_integers<uint8_t>(c, t, means[m], at);
            break;
          default:
            check_floats(c, t, means[m], mixing, rows, at);
        }
        CHECK(!out.not_finite[t], "marked, and all are finite");
      }
  });
}

}  // namespace

void ranking_glance() {
  for (int64_t K : {3, 40}) {
    Cohort c(K, {{F32, 70}, {BF16, 33}, {F16, 5}, {F64, 40}, {I32, 3}, {F32, 0}}, uniform);
    c.row[2] = -1;
    check_ranked(c, Cohort::rotating, 0, 2);
    for (int64_t t = 4; t < 6; ++t) c.row[t] = -1;
    check_ranked(c, Cohort::rotating, K - 1);
  }
}

// With AddressSanitizer, which takes minutes for all: a fifth for each dtype, another one for the next
#ifdef __SANITIZE_ADDRESS__
constexpr int STEP = 5;
#else
constexpr int STEP = 1;
#endif

void ranking() {
  for (int32_t dtype = 0; dtype < DTYPES; ++dtype) {
    check_ranked(Cohort(5, shapes(dtype, odd_sizes), uniform));
    check_ranked(Cohort(4, shapes(dtype, {4096, 9001}), small), Cohort::rotating, 0, 2);
    for (int64_t K = 1 + dtype % STEP; K <= 70; K += STEP)
      check_ranked(Cohort(K, shapes(dtype, {3, 67}), K % 2 ? uniform : small));
    for (int64_t K : {100, 129, 260}) check_ranked(Cohort(K, shapes(dtype, {5, 40}), uniform));
    for (int offset = dtype % STEP; offset <= 65; offset += STEP)
      check_ranked(Cohort(3, shapes(dtype, {1, 17, 130}), uniform, offset), 65 - offset);
  }
  for (int32_t dtype : floating)
    for (int64_t K : {1, 5, 20, 40})
      for (int64_t mixed : {K, (K + 1) / 2})
        check_ranked(Cohort(K, shapes(dtype, {1, 31, 200}), uniform), Cohort::rotating, mixed);
  // NaN and infinity in the first, a middle, and the last element of any client
  for (int32_t dtype : floating)
    for (int64_t n : {1, 7, 300})
      for (double bad : {std::nan(""), -std::nan(""), HUGE_VAL, -HUGE_VAL})
        for (int64_t at : {int64_t(0), n / 2, n - 1})
          for (int64_t K : {3, 40}) {
            Cohort c(K, {{dtype, 5}, {dtype, n}}, small);
            c.set(1, K - 2, at, bad);
            const RankedMean median{(K - 1) / 2, K / 2 + 1, 0};
            const std::vector<double> mixing(K + 1, 0.5);
            at_every_level([&] {
              for (const double* m : {(const double*)nullptr, mixing.data()}) {
                Outputs out(c, 1);
                const RankedMean one{0, 1, 0};
                ranked_means(c.table(),
                             {m ? &one : &median, 1, c.row.data(), 1, out.address.data(), out.not_finite.data(), m, 1},
                             1);
                CHECK(out.not_finite == std::vector<uint8_t>({0, 1}), "dtype %d, K %d, %d elements", dtype, int(K),
                      int(n));
              }
            });
          }
  ranking_glance();
}

}  // namespace test
