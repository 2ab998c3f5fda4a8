// Inner products of rows by fused multiply-add: the Gram, and the gradient of mix.
//
// A warp owns 8 x 8 products. Its lanes see different elements, so each keeps 64 sums; after a chunk (at most 32
// additions to a sum) the lanes' sums are added by a tree of shuffles, in float32, and then to a float64 that lasts for
// the item. Every pair of rows sees the same additions in the same order whatever tile it falls in: an entry's bits do
// not depend on where its clients stand.
//
// Shaped by: up to 24 rows are one block, which reads every client once; its 6 tiles take 300 multiply-adds an element,
// 4.7 cycles of an A100's SM, where its share of memory bandwidth takes 6.3. More rows are cut into groups of 16, which
// leaves four blocks room on an SM: some load while others multiply.
#include "stage.h"

namespace fastagg {
namespace gpu {
namespace {

constexpr int tile = 8, most_rows_alone = 24, group_rows = 16, steps = 4;  // steps of a warp in a stage
constexpr int threads_alone = 6 * 32, threads_in_pairs = 4 * 32;
constexpr int blocks_again = 256;
constexpr float least_trusted = 0x1p-50f;

template <class C> struct alignas(8) Pack {  // what a lane reads of a row at once
  static constexpr int size = 8 / int(sizeof(C));
  C element[size];
};
template <class C> constexpr int slice_elements = steps * 32 * Pack<C>::size;  // of a stage, that one warp multiplies

template <bool DIAGONAL, class C>
__device__ __forceinline__ void multiply(const C* a, const C* b, int stride, C (&sum)[64]) {
  Pack<C> x[tile];
#pragma unroll
  for (int i = 0; i < tile; ++i) x[i] = *reinterpret_cast<const Pack<C>*>(a + i * stride);
#pragma unroll
  for (int j = 0; j < tile; ++j) {
    const Pack<C> y = DIAGONAL ? x[j] : *reinterpret_cast<const Pack<C>*>(b + j * stride);
#pragma unroll
    for (int i = DIAGONAL ? j : 0; i < tile; ++i)
#pragma unroll
      for (int e = 0; e < Pack<C>::size; ++e)
        sum[i * tile + j] = multiply_add(x[i].element[e], y.element[e], sum[i * tile + j]);
  }
}

// Adds 2 * HALF sums over lanes that differ in bit HALF / 2, each lane keeping one half of the sums
template <int HALF, class C> __device__ __forceinline__ void add_over_lanes(C (&sum)[64]) {
  const bool upper = threadIdx.x & (HALF / 2);
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const C keep = upper ? sum[i + HALF] : sum[i], give = upper ? sum[i] : sum[i + HALF];
    sum[i] = keep + __shfl_xor_sync(0xffffffffu, give, HALF / 2);
  }
}

// Adds 64 sums over 32 lanes: lane l is left with entries 2 l and 2 l + 1, which are added to total. The sums are zero
// afterwards.
template <class C> __device__ __forceinline__ void fold(C (&sum)[64], double (&total)[2]) {
  add_over_lanes<32>(sum);
  add_over_lanes<16>(sum);
  add_over_lanes<8>(sum);
  add_over_lanes<4>(sum);
  add_over_lanes<2>(sum);
  total[0] += double(sum[0]), total[1] += double(sum[1]);
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = 0;
}

// Blocks that an SM must have room for; 65,536 registers are shared out accordingly.
template <class C, int THREADS, bool FUSED>
constexpr int blocks_per_sm = sizeof(C) == 8             ? 1
                              : THREADS == threads_alone ? 2
                              : FUSED                    ? 3
                                                         : 4;

template <class S, class C, bool FUSED, int U>
__device__ __forceinline__ void multiply_item(const Products& p, const Shape& s, int tiles, const Mix& m,
                                              const Item& item, int pair_number) {
  SHARED_MEMORY
  const Pair pair = pair_of(p, s, pair_number);
  const int elements = s.slices * slice_elements<C>;  // of a stage
  Stage<C> stage(shared_memory, p, s, pair, elements);
  int shift = 0;
  while (per_vector<S> << shift < elements) ++shift;

  const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), slice = warp / tiles;
  int i = 0, j = warp % tiles;
  if (pair.diagonal)
    while (j > i) j -= ++i;
  else
    i = j / (s.size_b / tile), j %= s.size_b / tile;
  i *= tile, j *= tile;
  const bool active = i < pair.na && j < pair.nb, on_diagonal = pair.diagonal && i == j;
  const int begin_of_slice = slice * slice_elements<C>;
  const C* a = stage.values + i * stage.stride + begin_of_slice + lane * Pack<C>::size;
  const C* b = stage.values + (pair.diagonal ? j : s.size_a + j) * stage.stride + begin_of_slice + lane * Pack<C>::size;

  C sum[64] = {};
  double total[2] = {};
  for_each_chunk(p.work, item, [&](int tensor, int64_t begin, int count) {
    stage.begin_tensor(p, pair, tensor);
    const bool aligned = p.rows.aligned[tensor];
    for (int at = 0; at < count; at += elements) {
      if (at) __syncthreads();  // the last piece is done with
      const int left = min(elements, count - at);
      stage.template load_rows<S, U>(shift, begin + at, left, aligned, p.centred);
      __syncthreads();
      if (active)
#pragma unroll 1
        for (int e = 0; e < slice_elements<C> && begin_of_slice + e < left; e += 32 * Pack<C>::size)
          on_diagonal ? multiply<true>(a + e, b + e, stage.stride, sum)
                      : multiply<false>(a + e, b + e, stage.stride, sum);
      if (FUSED && pair.number == 0) mix_piece<S>(m, tensor, begin + at, left);
    }
    if (active) fold(sum, total);
  });

  if (active)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = i + (2 * lane + n) / tile, column = j + (2 * lane + n) % tile;
      if (row < pair.na && column < pair.nb && !(pair.diagonal && row < column))
        p.partial[((int64_t(item.slot) * s.slices + slice) * p.a_rows + pair.a + row) * p.b_rows + pair.b + column] =
            total[n];
    }
  if (sizeof(C) == 4 && !stage.trusted(least_trusted)) p.flags[item.slot] = 1;
}

template <class S, class C, int THREADS, bool FUSED>
__global__ void __launch_bounds__(THREADS, blocks_per_sm<C, THREADS, FUSED>)
    products_kernel(Products p, Shape s, int tiles, Mix m) {
  const Item item = item_of(p.work, blockIdx.x / s.pairs);
  constexpr int U = blocks_per_sm<C, THREADS, FUSED> == 4 ? 2 : 4;  // rows loaded at once: what registers allow
  multiply_item<S, C, FUSED, U>(p, s, tiles, m, item, int(blockIdx.x % s.pairs));
}

// Items whose float32 products were not to be trusted, in float64. There are hardly ever any, so a few blocks look.
template <class S, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) products_again_kernel(Products p, Shape s, int tiles) {
  for (int64_t n = blockIdx.x; n < int64_t(p.work.count) * s.pairs; n += gridDim.x) {
    const Item item = item_of(p.work, n / s.pairs);
    if (!p.flags[item.slot]) continue;
    multiply_item<S, double, false, 4>(p, s, tiles, Mix{}, item, int(n % s.pairs));
    __syncthreads();  // before shared memory is used again
  }
}

int tiles_of(const Shape& s, bool triangle) {  // of a block, at most
  const int a = s.size_a / tile, b = s.size_b / tile;
  return s.diagonal_only(triangle) ? a * (a + 1) / 2 : a * b;
}

// How a launch is cut, for compute type C
template <class C> struct Cut {
  Shape shape;
  int tiles, threads;
  size_t shared;
  bool alone;
  Cut(const Products& p, bool beside_tensor_cores) : shape(shape_of(p.a_rows, p.b_rows, p.triangle, false)) {
    if (beside_tensor_cores) shape.slices = 1;  // as theirs is, for sums in the same workspace
    alone = shape.diagonal_only(p.triangle);
    tiles = tiles_of(shape, p.triangle), threads = tiles * shape.slices * 32;
    shared = Stage<C>::bytes(shape.rows(p.triangle), shape.slices * slice_elements<C>);
  }
};

template <class S, class C, bool FUSED>
void go(const char* name, const Products& p, const Mix& m, Stream stream, bool beside_tensor_cores = false) {
  const Cut<C> c(p, beside_tensor_cores);
  launch(name, c.alone ? products_kernel<S, C, threads_alone, FUSED> : products_kernel<S, C, threads_in_pairs, FUSED>,
         int64_t(p.work.count) * c.shape.pairs, c.threads, c.shared, stream, p, c.shape, c.tiles, m);
}

template <class S> void of_type(const Products& p, const Mix& m, bool tensor_cores, Stream stream) {
  if (!tensor_cores)
    m.outputs ? go<S, float, true>("products_mix", p, m, stream) : go<S, float, false>("products", p, m, stream);
  const Cut<double> c(p, tensor_cores);
  const int64_t most = int64_t(p.work.count) * c.shape.pairs;
  launch("products_again",
         c.alone ? products_again_kernel<S, threads_alone> : products_again_kernel<S, threads_in_pairs>,
         most < blocks_again ? most : blocks_again, c.threads, c.shared, stream, p, c.shape, c.tiles);
}

}  // namespace

Shape shape_of(int a_rows, int b_rows, bool triangle, bool tensor_cores) {
  auto groups = [](int rows, int most) { return (rows + most - 1) / most; };
  auto size = [](int rows, int groups) { return ((rows + groups - 1) / groups + tile - 1) / tile * tile; };
  Shape s{};
  const int most = tensor_cores                            ? tensor_core_rows
                   : triangle && a_rows <= most_rows_alone ? most_rows_alone
                                                           : group_rows;
  s.size_a = tensor_cores ? most : size(a_rows, groups(a_rows, most));
  s.size_b = triangle ? s.size_a : size(b_rows, groups(b_rows, most));
  s.groups_a = groups(a_rows, s.size_a), s.groups_b = groups(b_rows, s.size_b);
  s.pairs = triangle ? s.groups_a * (s.groups_a + 1) / 2 : s.groups_a * s.groups_b;
  // Few rows: several warps share a tile, on different elements, so that a block still has enough loads in flight.
  const int warps = (s.diagonal_only(triangle) ? threads_alone : threads_in_pairs) / 32;
  const size_t room = 40 << 10;  // of shared memory: four blocks on an SM of 164 KB
  s.slices = 4;
  while (s.slices > 1 && (s.slices * tiles_of(s, triangle) > warps ||
                          s.rows(triangle) * s.slices * slice_elements<float> * sizeof(float) > room))
    s.slices /= 2;
  return s;
}

void products(int dtype, const Products& p, const Mix& m, bool tensor_cores, Stream stream) {
  if (dtype != F64 && tensor_cores) multiply_on_tensor_cores(dtype, p, stream);
  switch (dtype) {
    case F32:
      return of_type<float>(p, m, tensor_cores, stream);
    case BF16:
      return of_type<__nv_bfloat16>(p, m, tensor_cores, stream);
    case F16:
      return of_type<__half>(p, m, tensor_cores, stream);
    case F64:
      return m.outputs ? go<double, double, true>("products_mix_float64", p, m, stream, tensor_cores)
                       : go<double, double, false>("products_float64", p, m, stream, tensor_cores);
    default:
      throw std::invalid_argument("fastagg._cuda: only floating-point tensors have products");
  }
}

}  // namespace gpu
}  // namespace fastagg
