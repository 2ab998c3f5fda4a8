// What the kernels are measured against: one read of memory, and multiply-adds on registers.
#include "driver.h"

namespace fastagg {

uint64_t read_all(const Table& t, int64_t piece, int threads) {
  const int64_t enough = std::min<int64_t>(piece, 1 << 16);  // elements of an item, unless it is the last
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
