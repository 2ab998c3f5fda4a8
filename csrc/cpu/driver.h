// What the drivers (gram.cpp, mix.cpp, times.cpp, floors.cpp) share. A driver cuts the table into work, runs the
// kernels of the SIMD level in use on it, and adds partial sums in order.
#pragma once
#include "kernels.h"
#include "work.h"

namespace fastagg {

inline const char* element(const void* p, int32_t dtype, int64_t i) { return (const char*)p + i * dtype_bytes[dtype]; }

// float32 sums of squares of a chunk can be trusted when the row did not overflow, and is not so small that its
// products were lost to underflow: a mean square under 2^-116, unless the row is zero. The row is `row`, or `row` minus
// `center` if there is one.
bool trusted(double square, const void* row, const void* center, int32_t dtype, int64_t begin, int64_t count);

// Tensors in the order of their layers, so that a layer's sums are complete before the next begin: those with a layer,
// or all of them.
std::vector<int64_t> by_layer(const Table&, const int32_t* layer, int64_t layers, bool all);

// Sums of layers from those of chunks, which come in order: [layers, size], or their total [size] in layer order
class LayerSums {
 public:
  LayerSums(double* out, int64_t layers, bool per_layer, int64_t size);
  double* of(int64_t layer);  // to add to
  void finish();

 private:
  double* out_;
  bool per_layer_;
  int64_t size_, current_ = -1;
  std::vector<double> of_layer_;  // the layer being summed, when only the total is kept
};

constexpr int64_t streaming_bytes = 8ll << 20;  // outputs larger than this are stored past the cache

// Mixes a piece of a tensor of any dtype. sums: mix_sums_bytes(), 64-byte aligned.
void mix_chunk(const Table&, const Mix&, bool streaming, int64_t tensor, int64_t begin, int64_t count, void* sums);
bool wants_streaming(const Table&, const Mix&);
int64_t mix_run();        // elements of a client that are read in one go: their sums stay in the second cache
size_t mix_sums_bytes();  // of the sums of one run

}  // namespace fastagg
