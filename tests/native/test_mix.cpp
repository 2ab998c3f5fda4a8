// Weighted sums: mix, alone and together with the Gram.
#include "plain.h"
#include "tests.h"

namespace test {
namespace {

// Quarters in [-2, 2]: with small integers every sum is exact; otherwise uniform in (-1, 1)
std::vector<double> some_weights(int64_t count, Fill fill) {
  std::minstd_rand random(7);
  std::vector<double> weights(count);
  for (double& w : weights) w = fill == small ? (int(random() % 17) - 8) * 0.25 : int32_t(random()) * 0x1p-31;
  return weights;
}

// mix of M models at every level, and the same again by gram_mix: the same bits
void check_mix(const Cohort& c, int64_t M, Fill fill, int offset = Cohort::rotating) {
  const int64_t rows = 1 + *std::max_element(c.row.begin(), c.row.end()), R = c.clients + 1;
  const std::vector<double> weights = some_weights(rows * M * c.clients, fill);
  at_every_level([&] {
    Outputs out(c, M, offset);
    mix(c.table(), out.mix(c, weights), 1);
    check_outputs(c, weights, out, fill == small);

    Outputs both(c, M, offset);
    std::vector<double> with(R * R), alone(R * R);
    const Gram g{c.layer.data(), c.tensors(), false, with.data()}, h{c.layer.data(), c.tensors(), false, alone.data()};
    gram_mix(c.table(), g, both.mix(c, weights), 2);
    gram(c.table(), h, 1);
    CHECK(both == out, "gram_mix, then mix: K %d, M %d, dtype %d", int(c.clients), int(M), c.dtype[0]);
    CHECK(with == alone, "gram_mix, then gram: K %d, M %d, dtype %d", int(c.clients), int(M), c.dtype[0]);
  });
}

void sizes() {
  for (int32_t dtype = 0; dtype < DTYPES; ++dtype) {
    for (int64_t M : {1, 2, 3, 4, 5, 6}) check_mix(Cohort(5, shapes(dtype, odd_sizes), small), M, small);
    for (int64_t M : {1, 5}) check_mix(Cohort(3, shapes(dtype, around_a_chunk), small), M, small);
    check_mix(Cohort(5, shapes(dtype, odd_sizes), uniform), 5, uniform);
  }
}

// One output: clients eight, four and one at a time
void numbers_of_clients() {
  for (int32_t dtype = 0; dtype < DTYPES; ++dtype)
    for (int64_t K : {1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 17, 20, 130, 260})
      for (int64_t M : {1, 5}) check_mix(Cohort(K, shapes(dtype, {3, 37, K < 100 ? 2100 : 300}), uniform), M, uniform);
}

void addresses() {
  for (int32_t dtype = 0; dtype < DTYPES; ++dtype)
    for (int offset = 0; offset <= 65; ++offset)
      for (int64_t M : {1, 5})
        check_mix(Cohort(5, shapes(dtype, {1, 7, 17, 64, 100}), small, offset), M, small, 65 - offset);
}

// Several rows of weights, all dtypes in one call
void rows_of_weights() {
  std::vector<Shape> mixed;
  for (int32_t dtype = 0; dtype < DTYPES; ++dtype) mixed.push_back({dtype, 40 + dtype}), mixed.push_back({dtype, 0});
  Cohort c(5, mixed, small);
  for (int64_t t = 0; t < c.tensors(); ++t) c.row[t] = int32_t(t % 4);
  for (int64_t M : {1, 2, 6}) check_mix(c, M, small);
}

// NaN and infinity in the first, a middle, and the last element, whatever the weight
void marks() {
  for (int32_t dtype : floating)
    for (int64_t n : {1, 7, 16, 300, 16389})
      for (double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL})
        for (int64_t at : {int64_t(0), n / 2, n - 1}) {
          Cohort c(3, {{dtype, 5}, {dtype, n}, {I32, 3}, {dtype, n}}, small);
          c.set(1, 2, at, bad);
          for (int64_t M : {1, 5}) {
            std::vector<double> weights(M * 3, 1.0);
            weights[M * 3 - 1] = 0;  // 0 * NaN is NaN
            at_every_level([&] {
              Outputs out(c, M);
              mix(c.table(), out.mix(c, weights), 2);
              CHECK(out.not_finite == std::vector<uint8_t>({0, 1, 0, 0}), "dtype %d, %d elements", dtype, int(n));
              if (n <= 300) check_outputs(c, weights, out, true);
              Mix unmarked = out.mix(c, weights);
              unmarked.not_finite = nullptr;
              mix(c.table(), unmarked, 1);
            });
          }
        }
}

// The largest number plus a little: what is rounded to infinity must be marked, what is just not, must not
void limits() {
  const double largest[] = {0x1.fffffep127, 0x1.fffffffffffffp1023, 0x1.fep127, 65504};
  const double half_a_step[] = {0x1p103, 0x1p970, 0x1p119, 16};
  for (int32_t dtype : floating)
    for (double sign : {1.0, -1.0})
      for (bool over : {false, true})
        for (int64_t n : {1, 64, 100}) {
          Cohort c(2, {{dtype, n}}, small);
          for (int64_t e = 0; e < n; ++e) c.set(0, 0, e, 1), c.set(0, 1, e, 0);
          c.set(0, 0, n - 1, sign * largest[dtype]), c.set(0, 1, n - 1, sign * half_a_step[dtype]);
          // half a step is a tie, and rounds away from the largest number, which is odd
          const double just_under = dtype == F16 || dtype == BF16 ? 1 - 0x1p-8 : 1 - 0x1p-20;
          const std::vector<double> weights = {1, over ? 1 : just_under};
          at_every_level([&] {
            Outputs out(c, 1);
            mix(c.table(), out.mix(c, weights), 1);
            CHECK(out.not_finite[0] == over, "dtype %d, %d elements", dtype, int(n));
            CHECK(std::isinf(decode(dtype, out.blocks[0].data() + (n - 1) * dtype_bytes[dtype])) == over, "dtype %d",
                  dtype);
          });
        }
}

}  // namespace

void mixing() {
  sizes();
  numbers_of_clients();
  addresses();
  rows_of_weights();
  marks();
  limits();
}

}  // namespace test
