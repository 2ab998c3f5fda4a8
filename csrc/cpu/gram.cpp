// Products of rows: the Gram, alone or together with the mix; and the gradient of mix.
#include <algorithm>
#include <cmath>

#include "driver.h"

namespace fastagg {

namespace {

constexpr int group_rows = 128;             // rows multiplied at once: their packed blocks stay in L2
constexpr int64_t fused_bytes = 256 << 10;  // Gram, then mix, on a piece of every client that stays in L2

int round_up4(int n) { return (n + 3) / 4 * 4; }
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

bool row_trusted(const RowProducts& p, int row, double square) {  // row counts through a, then b
  const bool in_b = row >= p.na, first = p.center_is_first && in_b == (p.b != nullptr);
  const int r = in_b ? row - p.na : row;
  if (first && r == 0) return trusted(square, p.center, nullptr, p.dtype, p.begin, p.count);
  return trusted(square, (in_b ? p.b : p.a)[r - first], p.center, p.dtype, p.begin, p.count);
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
    if (row_trusted(p, r, square)) continue;
    std::memset(p.out, 0, sizeof(double) * size_t(p.ld) * (p.b ? p.nb : p.na));
    p.wide = true;
    kernels().row_products(p);
    return;
  }
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

  const Chunks chunks(t, by_layer(t, g.layer, g.layers, m != nullptr));
  threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, chunks.size() * units)));

  LayerSums sums(g.out, g.layers, g.per_layer, R * R);
  const bool streaming = m && wants_streaming(t, *m);
  const size_t scratch_size = (scratch_bytes(rows.size, rows.groups > 1 ? rows.size : 0) + 63) / 64 * 64;
  std::vector<Buffer<char>> scratch;
  for (int i = 0; i < threads; ++i) scratch.push_back(aligned_buffer<char>(scratch_size + (m ? mix_sums_bytes() : 0)));

  auto compute = [&](int64_t item, double* slot, int worker) {
    const Chunk c = chunks[item / units];
    const int64_t unit = item % units;
    auto mix_piece = [&](int64_t begin, int64_t count) {
      if (m) mix_chunk(t, *m, streaming, c.tensor, begin, count, scratch[worker].get() + scratch_size);
    };
    const bool only_mix = fused ? g.layer[c.tensor] < 0 : unit == int64_t(pairs.size());
    if (only_mix) return mix_piece(c.begin, c.count);
    if (g.layer[c.tensor] < 0) return;
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
    products(p, piece, [&](int64_t begin, int64_t count) {
      if (fused) mix_piece(begin, count);
    });
  };
  auto commit = [&](int64_t item, const double* slot) {
    const Chunk c = chunks[item / units];
    const int64_t unit = item % units, layer = g.layer[c.tensor];
    if (layer < 0 || unit == int64_t(pairs.size())) return;
    const int I = pairs[unit].first, J = pairs[unit].second;
    double* out = sums.of(layer);
    for (int j = 0; j < rows.count(J); ++j)
      for (int i = I == J ? j : 0; i < rows.count(I); ++i)
        out[(rows.first(J) + j) * R + rows.first(I) + i] += slot[j * rows.size + i];
  };
  for_each_in_order(chunks.size() * units, threads, rows.slot(), compute, commit);
  sums.finish();
  for (int64_t l = 0; l < (g.per_layer ? g.layers : 1); ++l)
    for (int64_t i = 0; i < R; ++i)
      for (int64_t j = 0; j < i; ++j) g.out[l * R * R + i * R + j] = g.out[l * R * R + j * R + i];
}

}  // namespace

void gram(const Table& t, const Gram& g, int threads) { gram_with_optional_mix(t, g, nullptr, threads); }
void gram_mix(const Table& t, const Gram& g, const Mix& m, int threads) { gram_with_optional_mix(t, g, &m, threads); }

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

}  // namespace fastagg
