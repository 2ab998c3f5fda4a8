// Partial sums of items -> sums of groups (layers) -> their total, always in the same order.
#include "device.h"

namespace fastagg {
namespace gpu {
namespace {

constexpr int columns = 32, segments = 8;  // a block: 32 entries, the slots of a group dealt to 8 threads each

struct Reduction {
  const double* partial;      // [slots * slices, A, B]
  const int32_t* first_slot;  // [groups + 1]
  int32_t slices, a_rows, b_rows;
  bool triangle;
  double* group;  // [groups, A, B]
};

__global__ void __launch_bounds__(columns* segments) reduce_slots(Reduction r) {
  SHARED_MEMORY
  double* sums = reinterpret_cast<double*>(shared_memory);  // [segments, columns]
  const int64_t entries = int64_t(r.a_rows) * r.b_rows, blocks = (entries + columns - 1) / columns;
  const int64_t g = blockIdx.x / blocks;
  const int column = int(threadIdx.x % columns), segment = int(threadIdx.x / columns);
  const int64_t entry = blockIdx.x % blocks * columns + column, i = entry / r.b_rows, j = entry % r.b_rows;
  const bool wanted = entry < entries && (!r.triangle || i >= j);
  double sum = 0;
  if (wanted)
#pragma unroll 4
    for (int64_t n = int64_t(r.first_slot[g]) * r.slices + segment; n < int64_t(r.first_slot[g + 1]) * r.slices;
         n += segments)
      sum += r.partial[n * entries + entry];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (segment == 0 && wanted) {
    for (int s = 1; s < segments; ++s) sum += sums[s * columns + column];
    r.group[g * entries + entry] = sum;
    if (r.triangle) r.group[g * entries + j * r.b_rows + i] = sum;
  }
}

__global__ void __launch_bounds__(128) reduce_groups(const double* group, int groups, int64_t entries, double* total) {
  const int64_t entry = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (entry >= entries) return;
  double sum = 0;
#pragma unroll 8
  for (int g = 0; g < groups; ++g) sum += group[g * entries + entry];
  total[entry] = sum;
}

}  // namespace

void reduce(const double* partial, const int32_t* first_slot, int groups, int slices, int a_rows, int b_rows,
            bool triangle, double* group, double* total, Stream stream) {
  const int64_t entries = int64_t(a_rows) * b_rows;
  launch("reduce_slots", reduce_slots, groups * ((entries + columns - 1) / columns), columns * segments,
         sizeof(double) * columns * segments, stream,
         Reduction{partial, first_slot, slices, a_rows, b_rows, triangle, group});
  if (total)
    launch("reduce_groups", reduce_groups, (entries + 127) / 128, 128, 0, stream, group, groups, entries, total);
}

}  // namespace gpu
}  // namespace fastagg
