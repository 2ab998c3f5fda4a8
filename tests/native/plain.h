// What the kernels compute, as plain loops in float64; and whether what they gave is near enough.
#pragma once
#include "cohort.h"

namespace test {

// [layers, K + 1, K + 1]
inline std::vector<double> plain_gram(const Cohort& c, int64_t layers) {
  const int64_t R = c.clients + 1;
  std::vector<double> out(layers * R * R, 0.0);
  for (int64_t t = 0; t < c.tensors(); ++t) {
    if (c.layer[t] < 0) continue;
    std::vector<std::vector<double>> rows;
    for (int64_t k = -1; k < c.clients; ++k) rows.push_back(c.values(t, k));
    for (int64_t k = 1; k < R; ++k)
      for (int64_t e = 0; e < c.numel[t]; ++e) rows[k][e] -= rows[0][e];
    double* g = out.data() + c.layer[t] * R * R;
    for (int64_t i = 0; i < R; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        double sum = 0;
        for (int64_t e = 0; e < c.numel[t]; ++e) sum += rows[i][e] * rows[j][e];
        g[i * R + j] += sum;
        if (i != j) g[j * R + i] += sum;
      }
  }
  return out;
}

// [rows, M, K]; the M left models are the first M clients of `left`
inline std::vector<double> plain_dots(const Cohort& c, const Cohort& left, int64_t rows, int64_t M) {
  std::vector<double> out(rows * M * c.clients, 0.0);
  for (int64_t t = 0; t < c.tensors(); ++t) {
    if (!is_floating(c.dtype[t])) continue;
    for (int64_t m = 0; m < M; ++m) {
      const std::vector<double> a = left.values(t, m);
      for (int64_t k = 0; k < c.clients; ++k) {
        const std::vector<double> b = c.values(t, k);
        double sum = 0;
        for (size_t e = 0; e < a.size(); ++e) sum += a[e] * b[e];
        out[(c.row[t] * M + m) * c.clients + k] += sum;
      }
    }
  }
  return out;
}

// The promise for products of rows: an error relative to the rows' norms. 1e-6 of float32 arithmetic; of float64, the
// roundings of n products and sums, on both sides of the comparison.
inline double promised(int32_t dtype, int64_t n, bool wide = false) {
  return dtype == F64 || wide ? 2 * double(n + 4) * 0x1p-53 : 1e-6;
}

// One Gram [R, R] against the plain one. exact: equal, and not near.
inline void check_gram(const double* got, const double* want, int64_t R, double tolerance, const char* what,
                       int64_t n) {
  for (int64_t i = 0; i < R; ++i)
    for (int64_t j = 0; j < R; ++j) {
      const double g = got[i * R + j], w = want[i * R + j];
      CHECK(std::memcmp(&g, &got[j * R + i], sizeof g) == 0, "%s: not symmetric at %d, %d", what, int(i), int(j));
      if (std::isnan(w)) {
        CHECK(!std::isfinite(g), "%s, %lld elements: entry %d, %d is %g", what, (long long)n, int(i), int(j), g);
        continue;
      }
      const double bound = tolerance * std::sqrt(want[i * R + i]) * std::sqrt(want[j * R + j]);
      CHECK(tolerance == 0 || !std::isfinite(bound) ? g == w : std::fabs(g - w) <= bound,
            "%s, %lld elements: entry %d, %d of %d is %.17g, not %.17g", what, (long long)n, int(i), int(j), int(R), g,
            w);
    }
}

template <class T> void check_maximum(const Cohort& c, int64_t t, const char* out) {
  for (int64_t e = 0; e < c.numel[t]; ++e) {
    T largest = copied<T>(c.element(t, 0, e));
    for (int64_t k = 1; k < c.clients; ++k) largest = std::max(largest, copied<T>(c.element(t, k, e)));
    CHECK(copied<T>(out + e * sizeof(T)) == largest, "maximum: dtype %d, element %d", c.dtype[t], int(e));
  }
}

// An output of mix: one rounding of the exact sum, plus what K wide multiply-adds may lose; exact: the former alone.
inline void check_mixed(const Cohort& c, int64_t t, const double* weights, const char* out, bool exact) {
  const int32_t dtype = c.dtype[t];
  const int64_t n = c.numel[t], bytes = dtype_bytes[dtype];
  std::vector<double> sum(n, 0.0), magnitude(n, 0.0);
  for (int64_t k = 0; k < c.clients; ++k) {
    const std::vector<double> x = c.values(t, k);
    for (int64_t e = 0; e < n; ++e) sum[e] += weights[k] * x[e], magnitude[e] += std::fabs(weights[k] * x[e]);
  }
  const double wide = dtype == F32 || dtype == F64 ? 0x1p-53 : 0x1p-24;
  const double half_a_digit = dtype == F32 ? 0x1p-24 : dtype == F64 ? 0x1p-53 : dtype == BF16 ? 0x1p-8 : 0x1p-11;
  const double least = dtype == F32 ? 0x1p-150 : dtype == F64 ? 0 : dtype == BF16 ? 0x1p-134 : 0x1p-25;
  for (int64_t e = 0; e < n; ++e) {
    char want[8];
    encode(dtype, sum[e], want);
    if (std::memcmp(want, out + e * bytes, bytes) == 0) continue;
    const double got = decode(dtype, out + e * bytes), expected = decode(dtype, want);
    if (std::isnan(expected) && std::isnan(got)) continue;
    const double bound =
        std::max(half_a_digit * (1 + 0x1p-10) * std::fabs(sum[e]), least) + double(c.clients + 2) * wide * magnitude[e];
    CHECK(!exact && std::fabs(got - sum[e]) <= bound, "mix: dtype %d, K %d, element %d of %d is %.17g, not %.17g",
          dtype, int(c.clients), int(e), int(n), got, sum[e]);
  }
}

// All outputs of a mix, and the marks of those that are not finite
inline void check_outputs(const Cohort& c, const std::vector<double>& weights, const Outputs& out, bool exact) {
  for (int64_t t = 0; t < c.tensors(); ++t) {
    bool finite = true;
    for (int64_t m = 0; m < out.outputs; ++m) {
      const char* at = out.blocks[m * out.tensors + t].data();
      switch (c.dtype[t]) {
        case I8:
          check_maximum<int8_t>(c, t, at);
          break;
        case I16:
          check_maximum<int16_t>(c, t, at);
          break;
        case I32:
          check_maximum<int32_t>(c, t, at);
          break;
        case I64:
          check_maximum<int64_t>(c, t, at);
          break;
        case U8:
          check_maximum<uint8_t>(c, t, at);
          break;
        default:
          check_mixed(c, t, weights.data() + (c.row[t] * out.outputs + m) * c.clients, at, exact);
          for (int64_t e = 0; e < c.numel[t]; ++e)
            finite = finite && std::isfinite(decode(c.dtype[t], at + e * dtype_bytes[c.dtype[t]]));
      }
    }
    CHECK(out.not_finite[t] == !finite, "not_finite: dtype %d, K %d, M %d, %d elements", c.dtype[t], int(c.clients),
          int(out.outputs), int(c.numel[t]));
  }
}

}  // namespace test
