// Weighted sums: cuts the table into runs, and adds up the clients' run by run.
#include <algorithm>

#include "driver.h"

namespace fastagg {
namespace {

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

std::vector<int64_t> all_tensors(const Table& t) {
  std::vector<int64_t> order(t.tensors);
  for (int64_t i = 0; i < t.tensors; ++i) order[i] = i;
  return order;
}

}  // namespace

void mix_chunk(const Table& t, const Mix& m, bool streaming, int64_t tensor, int64_t begin, int64_t count, void* sums) {
  MixChunk p{t.dtype[tensor], t.client + tensor * t.clients,
             t.clients,       m.weights + m.row[tensor] * m.outputs * t.clients,
             m.outputs,       m.out + tensor,
             t.tensors,       begin,
             count,           streaming,
             mix_run(),       sums};
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

int64_t mix_run() { return std::clamp<int64_t>(cache_bytes() / 4 / 8, 2048, 32768) / 1024 * 1024; }
size_t mix_sums_bytes() { return size_t(mix_run()) * 8; }

void mix(const Table& t, const Mix& m, int threads) {
  // with many outputs a chunk is much work, and Ctrl-C is only looked for between two: smaller ones then
  const int64_t affordable = (1 << 28) / (t.clients * std::max<int64_t>(m.outputs, 1)) / 2048 * 2048;
  const Chunks chunks(t, all_tensors(t), std::max<int64_t>(2048, std::min(affordable, mix_run())));
  const bool streaming = wants_streaming(t, m);
  threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, chunks.size())));
  std::vector<Buffer<char>> sums;
  for (int i = 0; i < threads; ++i) sums.push_back(aligned_buffer<char>(mix_sums_bytes()));
  for_each_item(chunks.size(), threads, [&](int64_t item, int worker) {
    const Chunk c = chunks[item];
    mix_chunk(t, m, streaming, c.tensor, c.begin, c.count, sums[worker].get());
  });
}

}  // namespace fastagg
