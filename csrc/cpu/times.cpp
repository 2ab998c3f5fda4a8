// Products of the Gram with vectors, without the Gram.
#include <algorithm>
#include <cmath>

#include "driver.h"

namespace fastagg {
namespace {

constexpr int64_t granule = 512;  // elements; pieces are multiples of it, so that sums do not depend on their size

// A piece of every client stays in the second cache from the sum to the products
int64_t piece_elements(const Table& t, int32_t dtype) {
  const int64_t bytes = t.clients * dtype_bytes[dtype] + 24;  // of an element: the clients', the sum, u and the center
  return std::clamp<int64_t>(cache_bytes() / 2 / bytes / granule * granule, granule, 16384);
}

// Whether float32 products of a chunk can be trusted: neither rows nor u nor a product of them overflowed, and none is
// so small that its products were lost to underflow.
bool in_float32_range(const TimesPiece& p, const double* products, const double* squares, const Chunk& c) {
  const int64_t R = p.mix.clients + 1, columns = 2 + p.mix.outputs;
  for (int64_t i = 0; i < R * columns; ++i)
    if (!std::isfinite(products[i])) return false;
  for (int64_t m = 0; m < p.mix.outputs; ++m)
    if (squares[m] != 0 && !(squares[m] >= double(c.count) * 0x1p-116)) return false;
  for (int64_t r = 0; r < R; ++r) {
    const void* at = r == 0 ? p.center : p.mix.client[r - 1];
    if (!trusted(products[r * columns], at, r == 0 ? nullptr : p.center, p.mix.dtype, c.begin, c.count)) return false;
  }
  return true;
}

}  // namespace

void gram_times(const Table& t, const Gram& g, const Mix& m, int threads) {
  const DefaultFloatEnvironment environment;
  const int64_t R = t.clients + 1, columns = 2 + m.outputs, size = R * columns;
  const Chunks chunks(t, by_layer(t, g.layer, g.layers, m.out != nullptr));
  threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, chunks.size())));

  int64_t rows = 0;  // of weights
  for (int64_t i = 0; i < t.tensors; ++i) rows = std::max<int64_t>(rows, m.row[i] + 1);
  std::vector<double> total(rows * m.outputs), scale(rows * m.outputs);
  const auto uneven = std::make_unique<bool[]>(rows * m.outputs);
  for (int64_t i = 0; i < rows * m.outputs; ++i) {
    const double* v = m.weights + i * t.clients;
    double largest = 0, smallest = HUGE_VAL;
    for (int64_t k = 0; k < t.clients; ++k) {
      total[i] += v[k], largest = std::max(largest, std::fabs(v[k]));
      if (v[k] != 0) smallest = std::min(smallest, std::fabs(v[k]));
    }
    uneven[i] = smallest < 0x1p-10 * largest;
    int exponent = 0;
    std::frexp(largest, &exponent);
    scale[i] = std::ldexp(1.0, -std::clamp(exponent, -1000, 1000));  // so that u is of the size of a client's update
  }

  const bool streaming = m.out && wants_streaming(t, m);
  int64_t largest = granule;
  for (int64_t i = 0; i < t.tensors; ++i)
    if (g.layer[i] >= 0) largest = std::max(largest, piece_elements(t, t.dtype[i]));
  const size_t sums_size = std::max(mix_sums_bytes(), size_t(largest + 64) * 8);
  const size_t scratch_size = (times_scratch_bytes(largest, t.clients) + 63) / 64 * 64;
  std::vector<Buffer<char>> scratch;
  for (int i = 0; i < threads; ++i)
    scratch.push_back(aligned_buffer<char>(sums_size + scratch_size + m.outputs * sizeof(double)));

  LayerSums sums(g.out, g.layers, g.per_layer, size);
  auto compute = [&](int64_t item, double* slot, int worker) {
    const Chunk c = chunks[item];
    char* buffer = scratch[worker].get();
    double* squares = reinterpret_cast<double*>(buffer + sums_size + scratch_size);
    if (g.layer[c.tensor] < 0) return mix_chunk(t, m, streaming, c.tensor, c.begin, c.count, buffer);
    const int32_t dtype = t.dtype[c.tensor];
    const int64_t row = m.row[c.tensor] * m.outputs, piece = piece_elements(t, dtype);
    TimesPiece p{{dtype, t.client + c.tensor * t.clients, t.clients, m.weights + row * t.clients, m.outputs,
                  m.out ? m.out + c.tensor : nullptr, t.tensors, c.begin, c.count, streaming, piece, buffer},
                 false,
                 t.center[c.tensor],
                 total.data() + row,
                 scale.data() + row,
                 uneven.get() + row,
                 buffer + sums_size,
                 0,
                 slot,
                 squares};
    auto all_pieces = [&] {
      bool finite = true;
      std::fill_n(squares, m.outputs, 0.0);
      for (int64_t done = 0; done < c.count; done += p.mix.count) {
        p.mix.begin = c.begin + done;
        p.mix.count = std::min(piece, c.count - done);
        p.ahead = done + p.mix.count < c.count ? p.mix.count : 0;
        finite &= kernels().gram_times(p);
      }
      return finite;
    };
    if (!all_pieces() && m.not_finite) __atomic_store_n(m.not_finite + c.tensor, uint8_t(1), __ATOMIC_RELAXED);
    if (dtype == F64 || in_float32_range(p, slot, squares, c)) return;
    std::memset(slot, 0, sizeof(double) * size);
    p.wide = true, p.mix.out = nullptr;
    all_pieces();
  };
  auto commit = [&](int64_t item, const double* slot) {
    const Chunk c = chunks[item];
    if (g.layer[c.tensor] < 0) return;
    const double* unit = scale.data() + m.row[c.tensor] * m.outputs;
    double* out = sums.of(g.layer[c.tensor]);
    for (int64_t r = 0; r < R; ++r)
      for (int64_t i = 0; i < columns; ++i) out[r * columns + i] += slot[r * columns + i] / (i < 2 ? 1.0 : unit[i - 2]);
  };
  for_each_in_order(chunks.size(), threads, size, compute, commit);
  sums.finish();
}

}  // namespace fastagg
