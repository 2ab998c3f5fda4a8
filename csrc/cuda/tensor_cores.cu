// Inner products of many rows on tensor cores, for K above 64 where they are the faster way.
//
// tf32 keeps 11 bits of a number, so a row is split in two, x = high + low, and the products high*high, high*low and
// low*high are summed: what is left out is 2^-22 of a product. Tensor cores cut off low bits when they add, so a chain
// of sums is short: 2 instructions (16 elements) of high*high, then a compensated float32 sum. The two mixed products
// are 2^-11 as large and may run for a chunk; each has sums of its own, so that an entry does not depend on which of
// its two clients comes first.
#include "stage.h"

namespace fastagg {
namespace gpu {
namespace {

constexpr int threads = 256, stage_elements = 64, fold_elements = 16;
constexpr int stride = stage_elements + 4;  // lanes of a fragment fall into different banks
constexpr int warp_rows = 16, warp_columns = 32, fragments = warp_columns / 8;
constexpr float least_trusted = 0x1p-30f;  // and no mixed product underflows

#ifndef FASTAGG_EMULATED
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  __trap();  // the host asks code_version() first
#endif
}
#endif

// Half a unit of the last bit that is kept is added, and what is below it cut off: by the mask, or by the tensor core.
// (cvt.rna.tf32 does the same in more instructions. What is not finite may come out as anything: its item is not
// trusted.)
__device__ __forceinline__ void split(float x, uint32_t& high, uint32_t& low) {
  high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high)) + 0x1000u;
}

struct Sums {
  float high[fragments][4] = {}, left[fragments][4] = {}, right[fragments][4] = {};  // of the products
  float total[fragments][4] = {}, rest[fragments][4] = {};                           // their sum, and its rounding

  // 8 elements: a is 16 rows, b 32 rows, each lane at its own place of a fragment
  __device__ __forceinline__ void multiply(const float* a, const float* b) {
    uint32_t a_high[4], a_low[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) split(a[n % 2 * 8 * stride + n / 2 * 4], a_high[n], a_low[n]);
#pragma unroll
    for (int f = 0; f < fragments; ++f) {
      uint32_t b_high[2], b_low[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) split(b[f * 8 * stride + n * 4], b_high[n], b_low[n]);
      mma_m16n8k8(left[f], a_high, b_low);
      mma_m16n8k8(right[f], a_low, b_high);
      mma_m16n8k8(high[f], a_high, b_high);
    }
  }
  // total += high, and what that rounds off goes to rest (Dekker: exact where total is the larger; where it is not,
  // what is lost is 2^-24 of the summand, and of all summands together no more than that of sqrt(G_ii G_jj))
  __device__ __forceinline__ void fold() {
#pragma unroll
    for (int f = 0; f < fragments; ++f)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float sum = total[f][n] + high[f][n];
        rest[f][n] += high[f][n] - (sum - total[f][n]);
        total[f][n] = sum, high[f][n] = 0;
      }
  }
  __device__ __forceinline__ void fold_mixed() {
#pragma unroll
    for (int f = 0; f < fragments; ++f)
#pragma unroll
      for (int n = 0; n < 4; ++n) rest[f][n] += left[f][n] + right[f][n], left[f][n] = right[f][n] = 0;
  }
};

template <class S> __global__ void __launch_bounds__(threads, 2) tensor_core_kernel(Products p, Shape s) {
  SHARED_MEMORY
  const Item item = item_of(p.work, blockIdx.x / s.pairs);
  const Pair pair = pair_of(p, s, int(blockIdx.x % s.pairs));
  Stage<float> stage(shared_memory, p, s, pair, stride);
  constexpr int shift = stage_elements / per_vector<S> == 16 ? 4 : 3;
  static_assert(per_vector<S> << shift == stage_elements, "a row of the stage is 2^shift vectors");

  const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
  const int i = warp % 4 * warp_rows, j = warp / 4 * warp_columns;
  const bool active = i < pair.na && j < pair.nb && !(pair.diagonal && i + warp_rows <= j);
  const int at_lane = lane / 4 * stride + lane % 4;
  const float* a = stage.values + i * stride + at_lane;
  const float* b = stage.values + (pair.diagonal ? j : s.size_a + j) * stride + at_lane;

  Sums sums;
  for_each_chunk(p.work, item, [&](int tensor, int64_t begin, int count) {
    stage.begin_tensor(p, pair, tensor);
    const bool aligned = p.rows.aligned[tensor];
    for (int at = 0; at < count; at += stage_elements) {
      if (at) __syncthreads();  // the last piece is done with
      const int left = min(stage_elements, count - at);
      stage.template load_rows<S, int(sizeof(S))>(shift, begin + at, left, aligned, p.centred);
      __syncthreads();
      if (active)
#pragma unroll 1
        for (int e = 0; e < left; e += fold_elements) {
#pragma unroll
          for (int k = 0; k < fold_elements; k += 8) sums.multiply(a + e + k, b + e + k);
          sums.fold();
        }
    }
    if (active) sums.fold_mixed();
  });

  if (active)
#pragma unroll
    for (int n = 0; n < 4 * fragments; ++n) {
      const int f = n / 4, c = n % 4, row = i + lane / 4 + c / 2 * 8, column = j + f * 8 + lane % 4 * 2 + c % 2;
      if (row < pair.na && column < pair.nb && !(pair.diagonal && row < column))
        p.partial[(int64_t(item.slot) * p.a_rows + pair.a + row) * p.b_rows + pair.b + column] =
            double(sums.total[f][c]) + double(sums.rest[f][c]);
    }
  if (!stage.trusted(least_trusted)) p.flags[item.slot] = 1;
}

template <class S> void go(const Products& p, Stream stream) {
  const Shape s = shape_of(p.a_rows, p.b_rows, p.triangle, true);
  launch("tensor_core_products", tensor_core_kernel<S>, int64_t(p.work.count) * s.pairs, threads,
         Stage<float>::bytes(s.rows(p.triangle), stride), stream, p, s);
}

}  // namespace

int code_version(Stream) {
#ifdef FASTAGG_EMULATED
  return 80;
#else
  cudaFuncAttributes about;
  if (cudaFuncGetAttributes(&about, tensor_core_kernel<float>) == cudaSuccess) return about.ptxVersion;
  cudaGetLastError();
  return 0;
#endif
}

void multiply_on_tensor_cores(int dtype, const Products& p, Stream stream) {
  switch (dtype) {
    case F32:
      return go<float>(p, stream);
    case BF16:
      return go<__nv_bfloat16>(p, stream);
    case F16:
      return go<__half>(p, stream);
    default:
      throw std::invalid_argument("fastagg._cuda: this dtype has no tensor core products");
  }
}

}  // namespace gpu
}  // namespace fastagg
