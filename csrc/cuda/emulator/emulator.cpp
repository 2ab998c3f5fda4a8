#include "emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {

Index thread, block, threads, blocks;
unsigned char* shared_memory;

namespace {

enum State { runnable, at_barrier, at_exchange, finished };

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  State state;
  const char* where;  // file of the barrier, or name of the instruction
  int line;
  bool begun;
};

constexpr size_t stack_bytes = 128 << 10;
std::vector<Fiber> fibers;
std::vector<char>
    given[2];           // what lanes hand to their warp, [threads][64]; two, for a lane may be one ahead in writing
std::vector<int> turn;  // which of the two each thread uses next
jmp_buf scheduler;
int current;
const std::function<void()>* body;
std::mt19937_64 random_bits;
uint64_t order_seed = 0;

void wait(State state, const char* where, int line) {
  Fiber& f = fibers[current];
  f.state = state, f.where = where, f.line = line;
  if (!_setjmp(f.at)) _longjmp(scheduler, 1);
}

void enter() {
  (*body)();
  fibers[current].state = finished;
  _longjmp(scheduler, 1);
}

void resume(int i) {
  current = i;
  thread.x = unsigned(i);
  Fiber& f = fibers[i];
  if (_setjmp(scheduler)) return;
  if (f.begun) _longjmp(f.at, 1);
  f.begun = true;
  setcontext(&f.start);
}

std::vector<int64_t> in_order(int64_t n) {
  std::vector<int64_t> order(n);
  for (int64_t i = 0; i < n; ++i) order[i] = order_seed == 1 ? n - 1 - i : i;
  if (order_seed > 1) std::shuffle(order.begin(), order.end(), random_bits);
  return order;
}

std::string place(const Fiber& f, size_t i) {
  std::string who = "thread " + std::to_string(i);
  if (f.state == finished) return who + " has ended";
  return who + " is at " + f.where + (f.line ? ":" + std::to_string(f.line) : "");
}

// All fibers [first, last) wait for the same thing: they may go on.
bool release(size_t first, size_t last, State state) {
  for (size_t i = first; i < last; ++i) {
    const Fiber &f = fibers[i], &g = fibers[first];
    if (f.state != state || f.line != g.line || std::strcmp(f.where, g.where)) return false;
  }
  for (size_t i = first; i < last; ++i) fibers[i].state = runnable;
  return true;
}

void run_block(const char* name, size_t shared, size_t n) {
  std::memset(shared_memory, 0xff, shared);
  for (size_t i = 0; i < n; ++i) {
    Fiber& f = fibers[i];
    f.state = runnable, f.begun = false, turn[i] = 0;
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.get();
    f.start.uc_stack.ss_size = stack_bytes;
    f.start.uc_link = nullptr;
    makecontext(&f.start, enter, 0);
  }
  for (;;) {
    for (int64_t i : in_order(int64_t(n)))
      if (fibers[i].state == runnable) resume(int(i));
    bool moved = false;
    for (size_t warp = 0; warp < n; warp += 32) moved |= release(warp, std::min(warp + 32, n), at_exchange);
    if (moved || release(0, n, at_barrier)) continue;
    size_t ended = 0;
    for (size_t i = 0; i < n; ++i) ended += fibers[i].state == finished;
    if (ended == n) return;
    size_t other = 1;
    while (other < n && fibers[other].state == fibers[0].state && fibers[other].line == fibers[0].line) ++other;
    throw std::runtime_error(std::string(name) + ": a barrier is not reached by all: " + place(fibers[0], 0) +
                             (other < n ? ", " + place(fibers[other], other) : ""));
  }
}

}  // namespace

void set_order(uint64_t seed) {
  order_seed = seed;
  random_bits.seed(seed);
}

std::map<std::string, std::pair<int, size_t>>& launched() {
  static std::map<std::string, std::pair<int, size_t>> all;
  return all;
}

void run(const char* name, int64_t count, int n, size_t shared, const std::function<void()>& kernel) {
  auto& most = launched()[name];
  most = {std::max(most.first, n), std::max(most.second, shared)};
  std::vector<unsigned char> memory(shared + 16);
  shared_memory = memory.data() + (16 - uintptr_t(memory.data()) % 16) % 16;
  while (fibers.size() < size_t(n)) {
    fibers.emplace_back();
    fibers.back().stack.reset(new char[stack_bytes]);
  }
  for (auto& g : given) g.resize(size_t(n) * 64);
  turn.resize(n);
  body = &kernel;
  threads.x = unsigned(n), blocks.x = unsigned(count);
  for (int64_t b : in_order(count)) {
    block.x = unsigned(b);
    run_block(name, shared, size_t(n));
  }
}

void barrier(const char* file, int line) { wait(at_barrier, file, line); }

const char* exchange(const void* value, size_t bytes, const char* what) {
  const int i = current, side = turn[i];
  turn[i] ^= 1;
  std::memcpy(given[side].data() + 64 * i, value, bytes);
  wait(at_exchange, what, 0);
  return given[side].data() + 64 * (i - i % 32);
}

}  // namespace emulator

float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

__nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t u = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {uint16_t((u + 0x7fffu + (u >> 16 & 1)) >> 16)};
}

float __half2float(__half h) {
  const uint32_t sign = uint32_t(h.bits & 0x8000) << 16, exponent = h.bits >> 10 & 31, mantissa = h.bits & 0x3ff;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  const float size =
      exponent ? std::ldexp(float(1024 + mantissa), int(exponent) - 25) : std::ldexp(float(mantissa), -24);
  return __uint_as_float(sign | __float_as_uint(size));
}

__half __float2half_rn(float x) {
  const uint16_t sign = uint16_t(__float_as_uint(x) >> 16 & 0x8000);
  if (x != x) return {0x7fff};
  const float size = std::fabs(x);
  if (size == 0) return {sign};
  if (size >= 65520.0f) return {uint16_t(sign | 0x7c00)};
  int exponent;
  std::frexp(size, &exponent);                                 // size = m 2^exponent, m in [1/2, 1)
  const int unit = std::max(exponent - 11, -24);               // the last bit kept is worth 2^unit
  const float kept = std::nearbyint(std::ldexp(size, -unit));  // at most 2048, ties to even
  if (unit == -24) return {uint16_t(sign | uint16_t(kept))};   // subnormal, or the first normal numbers: same bits
  return {uint16_t(sign | uint16_t((unit + 24) * 1024 + int(kept)))};
}

// The sum as the least exact tensor core forms it: every term is cut off, towards zero, 24 bits below the highest bit
// of the largest, and so is the result.
static float sum_of_terms(const double* terms, int n) {
  uint64_t highest = 0;
  for (int i = 0; i < n; ++i) {
    uint64_t bits;
    std::memcpy(&bits, terms + i, 8);
    highest = std::max(highest, bits >> 52 & 0x7ff);
  }
  double sum = 0;
  if (highest == 0 || highest > 2000) {  // all zero, or not finite
    for (int i = 0; i < n; ++i) sum += terms[i];
    return float(sum);
  }
  const double unit = std::ldexp(1.0, int(highest) - 1023 - 23), inverse = 1 / unit;
  for (int i = 0; i < n; ++i) sum += std::trunc(terms[i] * inverse) * unit;
  float rounded = float(sum);
  if (std::isfinite(sum) && std::fabs(double(rounded)) > std::fabs(sum))
    rounded = __uint_as_float(__float_as_uint(rounded) - 1);
  return rounded;
}

void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  float mine[6];  // tensor cores do not see the low bits
  for (int n = 0; n < 6; ++n) mine[n] = __uint_as_float((n < 4 ? a[n] : b[n - 4]) & ~0x1fffu);
  const int lane = int(emulator::thread.x % 32);
  const char* all = emulator::exchange(mine, sizeof mine, "mma");
  auto lane_values = [&](int from) { return reinterpret_cast<const float*>(all + 64 * from); };
  for (int c = 0; c < 4; ++c) {
    const int row = lane / 4 + 8 * (c / 2), column = 2 * (lane % 4) + c % 2;
    double terms[9] = {d[c]};
    for (int k = 0; k < 4; ++k) {
      const float *x = lane_values(row % 8 * 4 + k) + (row >= 8), *y = lane_values(column * 4 + k) + 4;
      terms[1 + k] = double(x[0]) * y[0], terms[5 + k] = double(x[2]) * y[1];  // elements k and k + 4
    }
    d[c] = sum_of_terms(terms, 9);
  }
}
