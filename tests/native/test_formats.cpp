// Every 16-bit float through mix; and outputs so large that they are stored past the cache.
#include <sys/mman.h>
#include <unistd.h>

#include "plain.h"
#include "tests.h"

namespace test {
namespace {

constexpr int64_t patterns = 65536;

// client k holds the bit pattern e + k at element e
Cohort all_patterns(int32_t dtype, int64_t clients) {
  Cohort c(clients, {{dtype, patterns}}, small);
  for (int64_t k = 0; k < clients; ++k)
    for (int64_t e = 0; e < patterns; ++e) {
      const uint16_t bits = uint16_t(e + k);
      std::memcpy(c.element(0, k, e), &bits, sizeof bits);
    }
  return c;
}

std::vector<uint16_t> mixed(const Cohort& c, const std::vector<double>& weights) {
  Outputs out(c, 1);
  mix(c.table(), out.mix(c, weights), 1);
  std::vector<uint16_t> bits(patterns);
  std::memcpy(bits.data(), out.blocks[0].data(), patterns * sizeof bits[0]);
  return bits;
}

// Weight 1 gives back what came in; but a NaN comes out quiet, and -0 as 0, for sums begin with 0
void unchanged(int32_t dtype) {
  const int quiet = dtype == BF16 ? 0x40 : 0x200;
  const Cohort c = all_patterns(dtype, 1);
  at_every_level([&] {
    const std::vector<uint16_t> got = mixed(c, {1});
    for (int e = 0; e < patterns; ++e) {
      const bool nan = std::isnan(dtype == BF16 ? bfloat_value(uint16_t(e)) : half_value(uint16_t(e)));
      const int want = nan ? e | quiet : e == 0x8000 ? 0 : e;
      CHECK(got[e] == want, "dtype %d: %04x became %04x", dtype, e, got[e]);
    }
  });
}

// Halfway between two neighbours, and a little above and below: one rounding, ties to even
void rounding(int32_t dtype) {
  const Cohort c = all_patterns(dtype, 2);
  const std::vector<double> a = c.values(0, 0), b = c.values(0, 1);
  for (double shift : {0.0, 0x1p-12, -0x1p-12}) {
    const std::vector<double> weights = {0.5, 0.5 + shift};
    at_every_level([&] {
      const std::vector<uint16_t> got = mixed(c, weights);
      for (int e = 0; e < patterns; ++e) {
        const double product = weights[1] * b[e], sum = 0.5 * a[e] + product;
        if (!std::isfinite(sum) || product != float(product) || sum != float(sum)) continue;  // rounded on the way
        const uint16_t want = dtype == BF16 ? bfloat_bits(sum) : half_bits(sum);
        CHECK(got[e] == want, "dtype %d: %a and %a gave %04x, not %04x", dtype, a[e], b[e], got[e], want);
      }
    });
  }
}

// Memory that ends where a page begins that nobody may touch. Sanitizers do not look at streaming stores; this does.
class Fenced {
 public:
  Fenced(size_t bytes, size_t before_the_end) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    const size_t inside = (bytes + before_the_end + page - 1) / page * page;
    size_ = inside + 2 * page;
    base_ = (char*)mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(base_ != MAP_FAILED && mprotect(base_ + page, inside, PROT_READ | PROT_WRITE) == 0, "no memory");
    data_ = base_ + page + inside - before_the_end - bytes;
  }
  Fenced(const Fenced&) = delete;
  ~Fenced() { munmap(base_, size_); }
  char* data() const { return data_; }

 private:
  char *base_, *data_;
  size_t size_;
};

// M outputs of n elements, together above 8 MB, that end `before_the_end` bytes before such a page
void stream(int32_t dtype, int64_t M, int64_t n, size_t before_the_end) {
  const Cohort c(2, {{dtype, n}}, small, 0);
  std::vector<double> weights(2 * M);
  for (int64_t m = 0; m < M; ++m) weights[2 * m] = 0.5 * double(m + 1), weights[2 * m + 1] = -0.25;
  CHECK(M * n * dtype_bytes[dtype] > (8 << 20), "%d elements are too few", int(n));
  at_every_level([&] {
    std::vector<std::unique_ptr<Fenced>> out;
    std::vector<void*> address;
    for (int64_t m = 0; m < M; ++m) {
      out.push_back(std::make_unique<Fenced>(n * dtype_bytes[dtype], before_the_end));
      address.push_back(out.back()->data());
    }
    uint8_t not_finite = 0;
    mix(c.table(), {weights.data(), c.row.data(), M, address.data(), &not_finite}, 3);
    for (int64_t m = 0; m < M; ++m) check_mixed(c, 0, &weights[2 * m], out[m]->data(), true);
    CHECK(!not_finite, "dtype %d", dtype);
  });
}

}  // namespace

void conversions() {
  for (int32_t dtype : {BF16, F16}) {
    unchanged(dtype);
    rounding(dtype);
  }
}

void streaming() {
  stream(F32, 1, (8 << 20) / 4 + 16, 0);  // ends on 16 bytes, as streaming needs
  stream(F32, 1, (8 << 20) / 4 + 7, 4);   // likewise, with a tail
  stream(F32, 1, (8 << 20) / 4 + 7, 1);   // an odd address: not streamed
  stream(F32, 5, (8 << 20) / 20 + 11, 4);
  stream(F64, 1, (8 << 20) / 8 + 5, 8);
  stream(F64, 4, (8 << 20) / 32 + 4, 0);
  stream(F16, 1, (8 << 20) / 2 + 9, 14);
}

}  // namespace test
