// Cuts the table into work, runs the kernels of the SIMD level in use on it, and adds partial sums in order.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "work.h"

namespace fastagg {

bool (*interrupted)() = nullptr;

namespace {

constexpr int group_rows = 128;                 // rows multiplied at once: their packed blocks stay in L2
constexpr int64_t fused_bytes = 256 << 10;      // Gram, then mix, on a piece of every client that stays in L2
constexpr int64_t streaming_bytes = 8ll << 20;  // outputs larger than this are stored past the cache

int round_up4(int n) { return (n + 3) / 4 * 4; }
const char* element(const void* p, int32_t dtype, int64_t i) { return (const char*)p + i * dtype_bytes[dtype]; }

// Rows cut into groups of equal size; a block of products is one pair of groups.
struct Groups {
  int rows, groups, size;
  explicit Groups(int64_t n)
      : rows(int(n)), groups(int((n + group_rows - 1) / group_rows)), size(round_up4(int((n + groups - 1) / groups))) {
    groups = (rows + size - 1) / size;
  }
  int first(int g) const { return g * size; }
  int count(int g) const { return std::min(size, rows - g * size); }
  size_t slot() const { return size_t(size) * size; }
};

bool row_is_zero(const RowProducts& p, int row) {  // row counts through a, then b
  bool in_b = row >= p.na;
  bool first = p.center_is_first && in_b == (p.b != nullptr);
  int r = in_b ? row - p.na : row;
  const void* center = p.center;
  const void* base = first && r == 0 ? center : (in_b ? p.b : p.a)[r - first];
  if (first && r == 0) center = nullptr;
  const char* at = element(base, p.dtype, p.begin);
  size_t bytes = size_t(p.count * dtype_bytes[p.dtype]);
  if (center) return std::memcmp(at, element(center, p.dtype, p.begin), bytes) == 0;
  return std::all_of(at, at + bytes, [](char c) { return c == 0; });
}

// float32 sums of squares of a chunk can be trusted when the row did not overflow, and is not so small that its
// products were lost to underflow: a mean square under 2^-116, unless the row is zero.
bool trusted(const RowProducts& p, int row, double square) {
  if (!std::isfinite(square)) return false;
  return square >= double(p.count) * 0x1p-116 || row_is_zero(p, row);
}

// One block of products over one chunk; `between(begin, count)` runs after each piece when `piece` is given.
template <class Between> void products(RowProducts p, int64_t piece, const Between& between) {
  double squares[2 * group_rows + 8] = {};
  p.squares = squares;
  RowProducts part = p;
  for (int64_t done = 0; done < p.count; done += part.count) {
    part.begin = p.begin + done;
    part.count = std::min(piece, p.count - done);
    kernels().row_products(part);
    between(part.begin, part.count);
  }
  if (p.dtype == F64) return;
  for (int r = 0, n = p.b ? p.na + p.nb : p.na; r < n; ++r) {
    double square = p.b ? squares[r] : p.out[r * p.ld + r];
    if (trusted(p, r, square)) continue;
    std::memset(p.out, 0, sizeof(double) * size_t(p.ld) * (p.b ? p.nb : p.na));
    p.wide = true;
    kernels().row_products(p);
    return;
  }
}

template <class T> void maximum(const MixChunk& p) {
  for (int64_t e = p.begin; e < p.begin + p.count; ++e) {
    T largest, other;  // copied in and out: NumPy's arrays may lie at any address
    std::memcpy(&largest, (const char*)p.client[0] + e * sizeof(T), sizeof(T));
    for (int64_t k = 1; k < p.clients; ++k) {
      std::memcpy(&other, (const char*)p.client[k] + e * sizeof(T), sizeof(T));
      largest = std::max(largest, other);
    }
    for (int64_t m = 0; m < p.outputs; ++m)
      std::memcpy((char*)p.out[m * p.out_stride] + e * sizeof(T), &largest, sizeof(T));
  }
}

void mix_chunk(const Table& t, const Mix& m, bool streaming, int64_t tensor, int64_t begin, int64_t count) {
  MixChunk p{t.dtype[tensor], t.client + tensor * t.clients,
             t.clients,       m.weights + m.row[tensor] * m.outputs * t.clients,
             m.outputs,       m.out + tensor,
             t.tensors,       begin,
             count,           streaming};
  switch (p.dtype) {
    case I8:
      return maximum<int8_t>(p);
    case I16:
      return maximum<int16_t>(p);
    case I32:
      return maximum<int32_t>(p);
    case I64:
      return maximum<int64_t>(p);
    case U8:
      return maximum<uint8_t>(p);
    default:
      if (!kernels().mix(p) && m.not_finite) __atomic_store_n(m.not_finite + tensor, uint8_t(1), __ATOMIC_RELAXED);
  }
}

bool wants_streaming(const Table& t, const Mix& m) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < t.tensors; ++i) bytes += t.numel[i] * dtype_bytes[t.dtype[i]];
  return bytes * m.outputs > streaming_bytes;
}

// The Gram, and in the same pass over the clients the mix, unless m is null.
void gram_with_optional_mix(const Table& t, const Gram& g, const Mix* m, int threads) {
  const DefaultFloatEnvironment environment;
  const int64_t R = t.clients + 1;
  const Groups rows(R);
  std::vector<std::pair<int, int>> pairs;
  for (int i = 0; i < rows.groups; ++i)
    for (int j = 0; j <= i; ++j) pairs.push_back({i, j});
  const bool fused = m && pairs.size() == 1;
  const int64_t units = int64_t(pairs.size()) + (m && !fused);

  std::vector<int64_t> order;  // by layer, so that a layer's Gram is complete before the next begins
  for (int64_t i = 0; i < t.tensors; ++i)
    if (g.layer[i] >= 0 || m) order.push_back(i);
  auto layer_of = [&](int64_t i) { return g.layer[i] >= 0 ? g.layer[i] : g.layers; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return layer_of(a) < layer_of(b); });
  const Chunks chunks(t, order);
  threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, chunks.size() * units)));

  std::fill_n(g.out, (g.per_layer ? g.layers : 1) * R * R, 0.0);
  std::vector<double> of_layer(g.per_layer ? 0 : R * R, 0.0);  // the layer being summed, when only the total is kept
  int64_t current = -1;
  auto finish_layer = [&] {
    for (size_t i = 0; i < of_layer.size(); ++i) g.out[i] += of_layer[i];
    std::fill(of_layer.begin(), of_layer.end(), 0.0);
  };

  const bool streaming = m && wants_streaming(t, *m);
  const size_t scratch_size = scratch_bytes(rows.size, rows.groups > 1 ? rows.size : 0);
  std::vector<Buffer<char>> scratch;
  for (int i = 0; i < threads; ++i) scratch.push_back(aligned_buffer<char>(scratch_size));

  auto compute = [&](int64_t item, double* slot, int worker) {
    const Chunk c = chunks[item / units];
    const int64_t unit = item % units;
    auto mix_piece = [&](int64_t begin, int64_t count) {
      if (fused) mix_chunk(t, *m, streaming, c.tensor, begin, count);
    };
    if (unit == int64_t(pairs.size())) return mix_chunk(t, *m, streaming, c.tensor, c.begin, c.count);
    if (g.layer[c.tensor] < 0) return mix_piece(c.begin, c.count);
    const int32_t dtype = t.dtype[c.tensor];
    const int I = pairs[unit].first, J = pairs[unit].second;
    const void* const* clients = t.client + c.tensor * t.clients;
    auto side = [&](int group) { return group == 0 ? clients : clients + rows.first(group) - 1; };  // row 0: the center
    RowProducts p{dtype,
                  false,
                  t.center[c.tensor],
                  J == 0,
                  side(I),
                  rows.count(I),
                  I == J ? nullptr : side(J),
                  I == J ? 0 : rows.count(J),
                  c.begin,
                  c.count,
                  c.begin,
                  c.begin + c.count,
                  scratch[worker].get(),
                  slot,
                  rows.size,
                  nullptr};
    int64_t piece = c.count;
    if (fused) piece = std::max<int64_t>(fused_bytes / (t.clients * dtype_bytes[dtype]) / 256 * 256, 256);
    products(p, piece, mix_piece);
  };
  auto commit = [&](int64_t item, const double* slot) {
    const Chunk c = chunks[item / units];
    const int64_t unit = item % units, layer = g.layer[c.tensor];
    if (layer < 0 || unit == int64_t(pairs.size())) return;
    if (layer != current && !g.per_layer) finish_layer();
    current = layer;
    const int I = pairs[unit].first, J = pairs[unit].second;
    double* out = g.per_layer ? g.out + layer * R * R : of_layer.data();
    for (int j = 0; j < rows.count(J); ++j)
      for (int i = I == J ? j : 0; i < rows.count(I); ++i)
        out[(rows.first(J) + j) * R + rows.first(I) + i] += slot[j * rows.size + i];
  };
  for_each_in_order(chunks.size() * units, threads, rows.slot(), compute, commit);
  finish_layer();
  for (int64_t l = 0; l < (g.per_layer ? g.layers : 1); ++l)
    for (int64_t i = 0; i < R; ++i)
      for (int64_t j = 0; j < i; ++j) g.out[l * R * R + i * R + j] = g.out[l * R * R + j * R + i];
}

std::vector<int64_t> all_tensors(const Table& t) {
  std::vector<int64_t> order(t.tensors);
  for (int64_t i = 0; i < t.tensors; ++i) order[i] = i;
  return order;
}

}  // namespace

void gram(const Table& t, const Gram& g, int threads) { gram_with_optional_mix(t, g, nullptr, threads); }
void gram_mix(const Table& t, const Gram& g, const Mix& m, int threads) { gram_with_optional_mix(t, g, &m, threads); }

void mix(const Table& t, const Mix& m, int threads) {
  // with many outputs a chunk is much work, and Ctrl-C is only looked for between two: smaller ones then
  const int64_t affordable = (1 << 28) / (t.clients * std::max<int64_t>(m.outputs, 1)) / 2048 * 2048;
  const Chunks chunks(t, all_tensors(t), std::max<int64_t>(2048, std::min(affordable, chunk_elements)));
  const bool streaming = wants_streaming(t, m);
  for_each_item(chunks.size(), threads, [&](int64_t item, int) {
    const Chunk c = chunks[item];
    mix_chunk(t, m, streaming, c.tensor, c.begin, c.count);
  });
}

void dots(const Table& t, const void* const* left, const int32_t* row, int64_t rows, int64_t M, double* out,
          int threads) {
  std::fill_n(out, rows * M * t.clients, 0.0);
  const Groups a(t.clients), b(M);
  const int64_t units = int64_t(a.groups) * b.groups;
  std::vector<int64_t> order;
  for (int64_t i = 0; i < t.tensors; ++i)
    if (is_floating(t.dtype[i])) order.push_back(i);
  const Chunks chunks(t, order);
  std::vector<Buffer<char>> scratch;
  for (int i = 0; i < threads; ++i) scratch.push_back(aligned_buffer<char>(scratch_bytes(a.size, b.size)));
  auto compute = [&](int64_t item, double* slot, int worker) {
    const Chunk c = chunks[item / units];
    const int I = int(item % units / b.groups), J = int(item % units % b.groups);
    const void* lefts[group_rows];
    for (int j = 0; j < b.count(J); ++j) lefts[j] = left[(b.first(J) + j) * t.tensors + c.tensor];
    products(RowProducts{t.dtype[c.tensor], false, nullptr, false, t.client + c.tensor * t.clients + a.first(I),
                         a.count(I), lefts, b.count(J), c.begin, c.count, c.begin, c.begin + c.count,
                         scratch[worker].get(), slot, a.size, nullptr},
             c.count, [](int64_t, int64_t) {});
  };
  auto commit = [&](int64_t item, const double* slot) {
    const Chunk c = chunks[item / units];
    const int I = int(item % units / b.groups), J = int(item % units % b.groups);
    for (int j = 0; j < b.count(J); ++j)
      for (int i = 0; i < a.count(I); ++i)
        out[(row[c.tensor] * M + b.first(J) + j) * t.clients + a.first(I) + i] += slot[j * a.size + i];
  };
  for_each_in_order(chunks.size() * units, threads, size_t(a.size) * b.size, compute, commit);
}

uint64_t read_all(const Table& t, int threads) {
  constexpr int64_t piece = 1 << 20, enough = 1 << 16;  // elements: of one piece; of an item, unless it is the last
  std::vector<Chunk> pieces;
  std::vector<size_t> items{0};  // where each begins among the pieces
  int64_t held = 0;
  for (int64_t i = 0; i < t.tensors; ++i)
    for (int64_t k = 0; k < t.clients; ++k)
      for (int64_t at = 0; at < t.numel[i]; at += piece) {
        pieces.push_back({i * t.clients + k, at, std::min(piece, t.numel[i] - at)});
        if ((held += pieces.back().count) >= enough) items.push_back(pieces.size()), held = 0;
      }
  if (items.back() != pieces.size()) items.push_back(pieces.size());
  std::atomic<uint64_t> total{0};
  for_each_item(int64_t(items.size()) - 1, threads, [&](int64_t item, int) {
    uint64_t sum = 0;
    for (size_t n = items[item]; n < items[item + 1]; ++n) {
      const Chunk& c = pieces[n];
      int32_t dtype = t.dtype[c.tensor / t.clients];
      sum += kernels().read(element(t.client[c.tensor], dtype, c.begin), size_t(c.count * dtype_bytes[dtype]));
    }
    total += sum;
  });
  return total;
}

double fma_peak(int64_t iterations, int threads) {
  std::atomic<int64_t> flops{0};
  for_each_item(threads, threads, [&](int64_t, int) { flops += int64_t(kernels().fma_peak(iterations)); });
  return double(flops);
}

}  // namespace fastagg
