#include "driver.h"

#include <algorithm>
#include <cmath>

namespace fastagg {

bool (*interrupted)() = nullptr;

bool trusted(double square, const void* row, const void* center, int32_t dtype, int64_t begin, int64_t count) {
  if (!std::isfinite(square)) return false;
  if (square >= double(count) * 0x1p-116) return true;
  const char* at = element(row, dtype, begin);
  const size_t bytes = size_t(count * dtype_bytes[dtype]);
  if (center) return std::memcmp(at, element(center, dtype, begin), bytes) == 0;
  return std::all_of(at, at + bytes, [](char c) { return c == 0; });
}

std::vector<int64_t> by_layer(const Table& t, const int32_t* layer, int64_t layers, bool all) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < t.tensors; ++i)
    if (layer[i] >= 0 || all) order.push_back(i);
  auto layer_of = [&](int64_t i) { return layer[i] >= 0 ? layer[i] : layers; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return layer_of(a) < layer_of(b); });
  return order;
}

LayerSums::LayerSums(double* out, int64_t layers, bool per_layer, int64_t size)
    : out_(out), per_layer_(per_layer), size_(size), of_layer_(per_layer ? 0 : size, 0.0) {
  std::fill_n(out, (per_layer ? layers : 1) * size, 0.0);
}

double* LayerSums::of(int64_t layer) {
  if (per_layer_) return out_ + layer * size_;
  if (layer != current_) finish();
  current_ = layer;
  return of_layer_.data();
}

void LayerSums::finish() {
  for (size_t i = 0; i < of_layer_.size(); ++i) out_[i] += of_layer_[i];
  std::fill(of_layer_.begin(), of_layer_.end(), 0.0);
}

}  // namespace fastagg
