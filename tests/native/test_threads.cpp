// Several threads: the same bits, whoever computes what; callers side by side, within each other, after a fork.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "../../csrc/cpu/pool.h"
#include "../../csrc/cpu/work.h"
#include "plain.h"
#include "tests.h"

namespace test {
namespace {

// What every kernel makes of a cohort
struct Results {
  std::vector<double> each, total, with_mix, products, times;
  Outputs mixed, mixed_with_gram;
  uint64_t read = 0;

  Results(const Cohort& c, const std::vector<double>& weights, int threads)
      : mixed(c, int64_t(weights.size()) / c.clients), mixed_with_gram(c, int64_t(weights.size()) / c.clients) {
    const int64_t R = c.clients + 1, T = c.tensors();
    each.resize(T * R * R), total.resize(R * R), with_mix.resize(R * R);
    gram(c.table(), {c.layer.data(), T, true, each.data()}, threads);
    gram(c.table(), {c.layer.data(), T, false, total.data()}, threads);
    mix(c.table(), mixed.mix(c, weights), threads);
    gram_mix(c.table(), {c.layer.data(), T, false, with_mix.data()}, mixed_with_gram.mix(c, weights), threads);
    times.resize(R * (2 + mixed.outputs));
    gram_times(c.table(), {c.layer.data(), T, false, times.data()}, mixed_with_gram.mix(c, weights), threads);
    products.resize(mixed.outputs * c.clients);
    const std::vector<const void*> left(mixed.address.begin(), mixed.address.end());
    dots(c.table(), left.data(), c.row.data(), 1, mixed.outputs, products.data(), threads);
    read = read_all(c.table(), 1000, threads);
  }
  static bool same(const std::vector<double>& a, const std::vector<double>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
  }
  bool operator==(const Results& o) const {
    return same(each, o.each) && same(total, o.total) && same(with_mix, o.with_mix) && same(products, o.products) &&
           same(times, o.times) && mixed == o.mixed && mixed_with_gram == o.mixed_with_gram && read == o.read;
  }
};

const std::vector<double> two_outputs_of(int64_t K) {
  std::vector<double> weights(2 * K);
  for (int64_t i = 0; i < 2 * K; ++i) weights[i] = 0.1 + 0.3 / double(i + 1);
  return weights;
}

std::vector<Shape> all_dtypes(int64_t numel) {
  std::vector<Shape> all;
  for (int32_t dtype = 0; dtype < DTYPES; ++dtype)
    all.push_back({dtype, numel + dtype}), all.push_back({dtype, 17}), all.push_back({dtype, 3});
  return all;
}

void same_bits() {
  for (int64_t K : {5, 130}) {
    const Cohort c(K, all_dtypes(K == 5 ? 40000 : 700), uniform);
    at_every_level([&] {
      const Results one(c, two_outputs_of(K), 1);
      for (int threads : {2, 3, 7}) CHECK(Results(c, two_outputs_of(K), threads) == one, "%d threads", threads);
    });
  }
}

void many_callers() {
  const Cohort c(6, all_dtypes(1000), uniform), many(3, shapes(F32, {70000, 5, 33000}), uniform);
  const Results want(c, two_outputs_of(6), 1), want_many(many, two_outputs_of(3), 1);
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; ++i)
    callers.emplace_back([&, i] {
      for (int n = 0; n < 15; ++n) {
        CHECK(Results(c, two_outputs_of(6), 1 + (i + n) % 4) == want, "caller %d", i);
        CHECK(Results(many, two_outputs_of(3), 1 + (i + n) % 4) == want_many, "caller %d", i);
      }
    });
  for (std::thread& t : callers) t.join();
}

void calls_within_calls() {
  const Cohort c(4, all_dtypes(1000), uniform);
  const Results want(c, two_outputs_of(4), 1);
  for (int n = 0; n < 10; ++n)
    parallel(4, [&] { parallel(2, [&] { CHECK(Results(c, two_outputs_of(4), 3) == want, "nested"); }); });
}

// A tensor that several threads mark at the same time
void marks() {
  Cohort c(2, shapes(F32, {7, 100000}), small);
  for (int64_t e = 0; e < 100000; e += 1000) c.set(1, 0, e, std::nan(""));
  for (int n = 0; n < 10; ++n) {
    Outputs out(c, 1);
    const std::vector<double> weights = {1, 2};
    mix(c.table(), out.mix(c, weights), 4);
    CHECK(out.not_finite == std::vector<uint8_t>({0, 1}), "marks");
  }
}

// Slots are zeroed, committed in order, once each, one at a time; with items of very different lengths
void order() {
  for (int threads : {1, 2, 3, 7})
    for (int64_t items : {0, 1, 5, 400}) {
      int64_t next = 0;  // guarded by for_each_in_order, or ThreadSanitizer complains
      std::vector<int> computed(items, 0);
      auto compute = [&](int64_t item, double* slot, int worker) {
        CHECK(worker >= 0 && worker < threads, "worker %d of %d", worker, threads);
        CHECK(slot[0] == 0 && slot[2] == 0, "a slot that is not zeroed");
        if (item % 17 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
        slot[0] = double(item), slot[2] = 1, computed[item] += 1;
      };
      auto commit = [&](int64_t item, const double* slot) {
        CHECK(item == next && slot[0] == double(item) && slot[2] == 1, "item %d came before %d", int(item), int(next));
        ++next;
      };
      for_each_in_order(items, threads, 3, compute, commit);
      CHECK(next == items, "%d of %d committed", int(next), int(items));
      for (int n : computed) CHECK(n == 1, "computed %d times", n);
    }
}

// Words of four bytes and what is left of them: read_all adds them up. Small ones, so that no sum wraps around.
void reading() {
  for (int offset : {0, 1, 6}) {
    std::vector<int64_t> sizes = {0, 1, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 257, 1000, 66000};
    if (offset == 0) sizes.push_back((1 << 20) + 77);
    const Cohort c(2, shapes(I32, sizes), small, offset);
    uint64_t want = 0;
    for (int64_t t = 0; t < c.tensors(); ++t)
      for (int64_t k = 0; k < 2; ++k)
        for (int64_t e = 0; e < c.numel[t]; ++e) {
          const int32_t value = int32_t((e * 7 + k) % 200);
          std::memcpy(c.element(t, k, e), &value, sizeof value);
          want += value;
        }
    at_every_level([&] {
      for (int threads : {1, 3}) CHECK(read_all(c.table(), 1000, threads) == want, "offset %d", offset);
    });
  }
}

#if defined(__SSE2__)
unsigned environment_of_caller() { return _mm_getcsr() & ~0x3fu; }  // the low six bits only tell what has happened
void set_environment(unsigned to) { _mm_setcsr(to); }
constexpr unsigned flushing = 0x9fc0;
#elif defined(__aarch64__)
uint64_t environment_of_caller() {
  uint64_t now;
  __asm__ volatile("mrs %0, fpcr" : "=r"(now));
  return now;
}
void set_environment(uint64_t to) { __asm__ volatile("msr fpcr, %0" : : "r"(to) : "memory"); }
constexpr uint64_t flushing = 1 << 24;
#endif

#if defined(__SSE2__) || defined(__aarch64__)
// A caller that flushes denormal numbers to zero gets the same bits, and its setting back
void environment() {
  const double tiny[] = {0x1p-147, 0x1p-532, 0x1p-131, 0x1p-22};  // so are float64's squares
  for (int32_t dtype : floating) {
    Cohort c(3, shapes(dtype, {50}), small);
    for (int64_t k = -1; k < 3; ++k)
      for (int64_t e = 0; e < 50; ++e) c.set(0, k, e, double((e + 3 * k) % 7) * tiny[dtype]);
    at_every_level([&] {
      for (int threads : {1, 3}) {
        const Results want(c, two_outputs_of(3), threads);
        const auto saved = environment_of_caller();
        set_environment(flushing);
        const Results got(c, two_outputs_of(3), threads);
        const auto after = environment_of_caller();
        set_environment(saved);
        CHECK(got == want, "denormal numbers");
        CHECK(after == flushing, "the caller's floating-point environment");
      }
    });
  }
}
#else
void environment() {}
#endif

// Somebody comes to help: two are inside at once
void check_helpers() {
  std::atomic<int> inside{0};
  const auto begin = std::chrono::steady_clock::now();
  parallel(2, [&] {
    ++inside;
    while (inside < 2 && std::chrono::steady_clock::now() - begin < std::chrono::minutes(10)) std::this_thread::yield();
  });
  CHECK(inside == 2, "no helper came");
}

}  // namespace

void threads() {
  CHECK(!set_simd("avx3"), "a level that does not exist");
  same_bits();
  many_callers();
  calls_within_calls();
  marks();
  order();
  reading();
  environment();
  CHECK(fma_peak(1000, 3) > 0, "fma_peak");
}

// A child has no threads but the one that forked: it starts its own, and so does a child of the child
void forking() {
  const Cohort c(6, all_dtypes(20000), uniform);
  const Results want(c, two_outputs_of(6), 3);
  auto fork_and_compute = [&](const auto& then) {
    const pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
      alarm(600);  // if it hangs
      CHECK(Results(c, two_outputs_of(6), 4) == want, "in the child");
      check_helpers();
      then();
      _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with %x", unsigned(status));
    CHECK(Results(c, two_outputs_of(6), 3) == want, "in the parent");
  };
  for (int n = 0; n < 3; ++n) fork_and_compute([] {});
  fork_and_compute([&] { fork_and_compute([] {}); });
}

}  // namespace test
