// Means by rank: cuts the table into pieces, and says how sorted groups of rows are merged.
#include <algorithm>

#include "driver.h"

namespace fastagg {
namespace {

constexpr int64_t most_together = 4096;  // elements of a client: a piece

// Batcher's odd-even merge of two sorted runs, rows [begin, begin + a) and [begin + a, begin + a + b). As if they were
// the ends of runs of 2^n rows that face each other, of which the rest is infinite: what would touch it is left out.
void merge(int64_t begin, int64_t a, int64_t b, std::vector<Comparator>& found) {
  int64_t half = 1;
  while (half < std::max(a, b)) half *= 2;
  const int64_t first = half - a, last = half + b;
  auto compare = [&](int64_t i, int64_t j) {
    if (i >= first && j < last) found.push_back({int32_t(begin + i - first), int32_t(begin + j - first)});
  };
  for (int64_t i = 0; i < half; ++i) compare(i, i + half);
  for (int64_t d = half / 2; d > 0; d /= 2)
    for (int64_t block = d; block + 2 * d < 2 * half + d; block += 2 * d)
      for (int64_t i = block; i < block + d; ++i) compare(i, i + d);
}

// Runs, by their first rows, are merged two by two until there is one
void merge_all(std::vector<int64_t> first, int64_t rows, std::vector<Comparator>& found) {
  first.push_back(rows);
  while (first.size() > 2) {
    std::vector<int64_t> left;
    for (size_t i = 0; i + 1 < first.size(); i += 2) {
      left.push_back(first[i]);
      if (i + 2 < first.size()) merge(first[i], first[i + 1] - first[i], first[i + 2] - first[i + 1], found);
    }
    left.push_back(rows);
    first = left;
  }
}

// Without comparators that no wanted row depends on
void prune(std::vector<Comparator>& comparators, std::vector<char> wanted) {
  std::vector<Comparator> kept;
  for (auto c = comparators.rbegin(); c != comparators.rend(); ++c)
    if (wanted[c->low] || wanted[c->high]) {
      wanted[c->low] = wanted[c->high] = 1;
      kept.push_back(*c);
    }
  comparators.assign(kept.rbegin(), kept.rend());
}

template <class T> void of_integers(const Table& t, const Ranked& r, const Chunk& c) {
  std::vector<T> values(t.clients);
  for (int64_t e = c.begin; e < c.begin + c.count; ++e) {
    for (int64_t k = 0; k < t.clients; ++k)  // copied: NumPy's arrays may lie at any address
      std::memcpy(&values[k], (const char*)t.client[c.tensor * t.clients + k] + e * sizeof(T), sizeof(T));
    std::sort(values.begin(), values.end());
    for (int64_t m = 0; m < r.outputs; ++m) {
      const RankedMean& mean = r.means[r.row[c.tensor] * r.outputs + m];
      const int64_t rank = mean.high > mean.low ? (mean.low + mean.high - 1) / 2 : (t.clients - 1) / 2;
      std::memcpy((char*)r.out[m * t.tensors + c.tensor] + e * sizeof(T), &values[rank], sizeof(T));
    }
  }
}

struct Scratch {
  Buffer<char> sorted, values, unrounded;
  std::vector<const void*> row;
};

}  // namespace

void ranked_means(const Table& t, const Ranked& r, int threads) {
  const int64_t rows = r.mixing ? r.mixed : t.clients, groups = (rows + most_sorted - 1) / most_sorted;
  std::vector<int64_t> first;
  for (int64_t g = 0; g < groups; ++g) first.push_back(rows * g / groups);
  std::vector<Comparator> comparators;
  merge_all(first, rows, comparators);
  std::vector<char> wanted(rows, 0);
  bool center = r.mixing != nullptr;
  int64_t bytes = 0;
  for (int64_t i = 0; i < r.rows * r.outputs; ++i) {
    const RankedMean& m = r.means[i];
    std::fill(wanted.begin() + (m.nearest ? 0 : m.low), wanted.begin() + (m.nearest ? rows : m.high), 1);
    center |= m.low == m.high;
  }
  prune(comparators, wanted);
  std::vector<int64_t> order;
  for (int64_t i = 0; i < t.tensors; ++i)
    if (r.row[i] >= 0) {
      order.push_back(i);
      bytes += t.numel[i] * dtype_bytes[t.dtype[i]] * r.outputs;
    }
  const Chunks chunks(t, order, most_together);
  threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, chunks.size())));
  std::vector<Scratch> scratch;
  for (int i = 0; i < threads; ++i)
    scratch.push_back({aligned_buffer<char>(rows * ranked_tile_bytes),
                       aligned_buffer<char>((t.clients + 1 + rows) * ranked_tile_bytes),
                       aligned_buffer<char>(r.outputs * 4 * ranked_tile_bytes),
                       std::vector<const void*>(std::max(rows, t.clients + 1))});
  for_each_item(chunks.size(), threads, [&](int64_t item, int worker) {
    const Chunk c = chunks[item];
    switch (t.dtype[c.tensor]) {
      case I8:
        return of_integers<int8_t>(t, r, c);
      case I16:
        return of_integers<int16_t>(t, r, c);
      case I32:
        return of_integers<int32_t>(t, r, c);
      case I64:
        return of_integers<int64_t>(t, r, c);
      case U8:
        return of_integers<uint8_t>(t, r, c);
      default:
        break;
    }
    Scratch& s = scratch[worker];
    RankedPiece p;
    p.dtype = t.dtype[c.tensor];
    p.client = t.client + c.tensor * t.clients;
    p.clients = t.clients;
    p.center = center && t.center ? t.center[c.tensor] : nullptr;
    p.mixing = r.mixing;
    p.rows = rows;
    p.groups = groups;
    p.comparators = comparators.data();
    p.comparators_count = int64_t(comparators.size());
    p.means = r.means + r.row[c.tensor] * r.outputs;
    p.outputs = r.outputs;
    p.out = r.out + c.tensor;
    p.out_stride = t.tensors;
    p.begin = c.begin;
    p.count = c.count;
    p.streaming = bytes > streaming_bytes;
    p.ahead = ranked_tile_bytes / dtype_bytes[p.dtype];
    p.sorted = s.sorted.get();
    p.values = s.values.get();
    p.unrounded = s.unrounded.get();
    p.row = s.row.data();
    if (!kernels().ranked_means(p)) __atomic_store_n(r.not_finite + c.tensor, uint8_t(1), __ATOMIC_RELAXED);
  });
}

}  // namespace fastagg
