// Means by rank: cuts the table into pieces, and says how sorted groups of rows are merged.
#include <algorithm>

#include "driver.h"

namespace fastagg {
namespace {

constexpr int64_t most_together = 4096;  // elements of a client: a piece

// Comparators, in groups that one step can do
struct Merging {
  struct Pair {
    int32_t low, high;
    bool lower_used, higher_used;
  };
  struct Group {
    SortStep whole;  // if all of its pairs are there and used
    size_t pairs, first;
  };
  std::vector<Pair> pairs;
  std::vector<Group> groups;

  // Two sorted runs, rows [begin, begin + a) and [begin + a, begin + a + b), by a bitonic merge. As if they were the
  // ends of runs of 2^n rows that face each other, of which the rest is infinite: what would touch it is left out.
  void merge(int64_t begin, int64_t a, int64_t b) {
    int64_t half = 1;
    while (half < std::max(a, b)) half *= 2;
    const int64_t first = half - a, last = half + b;
    auto compare = [&](int64_t i, int64_t j) {
      if (i >= first && j < last) pairs.push_back({int32_t(begin + i - first), int32_t(begin + j - first), true, true});
    };
    for (int64_t j = 0; j < half; ++j) {
      groups.push_back({{SortStep::both, {}}, 1, pairs.size()});
      compare(half - 1 - j, half + j);
    }
    for (int64_t size = half; size > 1;) {  // of blocks that are bitonic
      const int n = size >= 8 ? 8 : int(size);
      const int64_t apart = size / n;
      for (int64_t block = 0; block < 2 * half; block += size)
        for (int64_t i = block; i < block + apart; ++i) {
          Group g{{n == 8 ? SortStep::eight : n == 4 ? SortStep::four : SortStep::both, {}}, 0, pairs.size()};
          for (int j = 0; j < n; ++j) g.whole.row[j] = int32_t(begin + i + j * apart - first);
          for (int d = n / 2; d > 0; d /= 2)
            for (int j = 0; j < n; ++j)
              if (!(j & d)) compare(i + j * apart, i + (j + d) * apart), ++g.pairs;
          groups.push_back(g);
        }
      size = apart;
    }
  }

  // Runs, by their first rows, are merged two by two until there is one
  void merge_all(std::vector<int64_t> first, int64_t rows) {
    first.push_back(rows);
    while (first.size() > 2) {
      std::vector<int64_t> left;
      for (size_t i = 0; i + 1 < first.size(); i += 2) {
        left.push_back(first[i]);
        if (i + 2 < first.size()) merge(first[i], first[i + 1] - first[i], first[i + 2] - first[i + 1]);
      }
      left.push_back(rows);
      first = left;
    }
  }

  // What has to be done for the wanted rows
  std::vector<SortStep> steps(std::vector<char> wanted) {
    for (auto p = pairs.rbegin(); p != pairs.rend(); ++p) {
      p->lower_used = wanted[p->low], p->higher_used = wanted[p->high];
      if (p->lower_used || p->higher_used) wanted[p->low] = wanted[p->high] = 1;
    }
    std::vector<SortStep> found;
    for (size_t g = 0; g < groups.size(); ++g) {
      const size_t end = g + 1 < groups.size() ? groups[g + 1].first : pairs.size();
      const auto from = pairs.begin() + groups[g].first, to = pairs.begin() + end;
      const bool whole = groups[g].whole.kind != SortStep::both && end - groups[g].first == groups[g].pairs &&
                         std::all_of(from, to, [](const Pair& p) { return p.lower_used && p.higher_used; });
      if (whole) {
        found.push_back(groups[g].whole);
        continue;
      }
      for (auto p = from; p != to; ++p)
        if (p->lower_used || p->higher_used)
          found.push_back({!p->higher_used  ? SortStep::lower
                           : !p->lower_used ? SortStep::higher
                                            : SortStep::both,
                           {p->low, p->high}});
    }
    return found;
  }
};

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
  std::vector<char> wanted(rows, 0);
  bool center = r.mixing != nullptr;
  int64_t bytes = 0;
  for (int64_t i = 0; i < r.rows * r.outputs; ++i) {
    const RankedMean& m = r.means[i];
    std::fill(wanted.begin() + (m.nearest ? 0 : m.low), wanted.begin() + (m.nearest ? rows : m.high), 1);
    center |= m.low == m.high;
  }
  Merging merging;
  merging.merge_all(first, rows);
  const std::vector<SortStep> steps = merging.steps(wanted);
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
    p.steps = steps.data();
    p.steps_count = int64_t(steps.size());
    p.means = r.means + r.row[c.tensor] * r.outputs;
    p.outputs = r.outputs;
    p.out = r.out + c.tensor;
    p.out_stride = t.tensors;
    p.begin = c.begin;
    p.count = c.count;
    p.streaming = bytes > streaming_bytes;
    p.ahead = 1 * ranked_tile_bytes / dtype_bytes[p.dtype];
    p.sorted = s.sorted.get();
    p.values = s.values.get();
    p.unrounded = s.unrounded.get();
    p.row = s.row.data();
    if (!kernels().ranked_means(p)) __atomic_store_n(r.not_finite + c.tensor, uint8_t(1), __ATOMIC_RELAXED);
  });
}

}  // namespace fastagg
