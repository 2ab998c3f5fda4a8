// The native API of the GPU kernels. All pointers are to device memory, and nothing here waits for the device.
#pragma once
#include "target.h"

namespace fastagg {
namespace gpu {

constexpr int chunk_elements = 1024;  // plan.py's CHUNK

// A run of chunks: from chunk `chunk` of tensor order[place] on, through the tensors that follow in `order`.
struct Item {
  int32_t place, chunk, chunks, slot;
};

struct Work {
  const Item* items;
  int32_t first, count;  // of the items
  const int32_t* order;
  const int64_t* numel;  // [T]
};

// Rows of tensors: row r of tensor t is at address[t * rows + r].
struct Rows {
  const int64_t* address;  // [T, rows]
  const int32_t* aligned;  // [T]: every address of the tensor allows 16-byte loads
  int32_t rows;
};

// out[t, m] = sum_k weights[row[t], m, k] * (row first + k of tensor t)
struct Mix {
  Rows rows;
  int32_t first, clients;
  const double* weights;   // [S, M, K]
  const int32_t* row;      // [T]
  const int64_t* out;      // [T, M] addresses
  const int32_t* aligned;  // [T]: of clients and outputs
  const int32_t* dtype;    // [T]
  uint8_t* not_finite;     // [T], set to 1 where an output of that tensor has a NaN or an infinity; null: not wanted
  int32_t outputs;         // M; 0: no mix
};

// Inner products of rows a_first + i, i < a_rows, with rows b_first + j, j < b_rows, over every item, to
// partial[slot * slices + slice, i, j]. A triangle has a = b and is filled where i >= j only.
// centred: row 0 is subtracted from all others first.
struct Products {
  Work work;
  Rows rows;
  int32_t a_first, a_rows, b_first, b_rows;
  bool triangle, centred;
  double* partial;
  int32_t* flags;  // [slots], zero: set where float32 products are not to be trusted
};

// How rows are cut: into groups of at most `size` rows; pairs of groups are the work of a block. `slices` warps share
// a tile of a block's products, each with sums of its own.
struct Shape {
  int32_t size_a, size_b, groups_a, groups_b, pairs, slices;
  bool diagonal_only(bool triangle) const { return triangle && groups_a == 1; }
  int rows(bool triangle) const { return diagonal_only(triangle) ? size_a : size_a + size_b; }  // of a block
};
Shape shape_of(int a_rows, int b_rows, bool triangle, bool tensor_cores);

// dtype: of the items, F32, F64, BF16 or F16. Items whose float32 products cannot be trusted are done again in float64.
// With mix.outputs the weighted sums are formed of the same tensors while they are in cache; not on tensor cores, where
// that costs more than a read of its own.
void products(int dtype, const Products&, const Mix& mix, bool tensor_cores, Stream);
void mix(const Work&, const Mix&, Stream);  // items of any dtype; integers get the maximum

// For the rows r = [g, w_1 - g, ..., w_K - g] of a table whose row 0 is g, and the u = sum_k v_k (w_k - g) of every
// vector v, which are the weights of a mix: <r, r>, <r, g> and all <r, u> over every item, to partial[slot, r, column].
struct Times {
  Work work;
  Rows rows;
  int32_t vectors;
  double* partial;   // [slots, rows, 2 + vectors]
  int32_t* flags;    // [slots], zero: set where float32 products are not to be trusted
  int32_t elements;  // of a piece; times() chooses it
};
// dtype: as of products. The mix says what the weights are; with mix.outputs (then as many as vectors) the weighted
// sums are formed on the way.
void times(int dtype, const Times&, const Mix& mix, Stream);

// Means of the clients' values by their rank, element by element: what fastagg.h says of its RankedMean, which is here
// three int64. Row 0 of the table is the center, and may be anything if no mean asks for it.
struct Ranked {
  Work work;
  Rows rows;             // `aligned` is not read
  const int64_t* means;  // [S, M, 3]: low, high, nearest
  const int32_t* row;    // [T]
  const int64_t* out;    // [T, M] addresses
  int32_t outputs;       // M
  uint8_t* not_finite;   // [T], set to 1 where a client has a NaN or an infinity in that tensor; null: not wanted
  const double* mixing;  // [K + 1, R]: sorted are R sums of the clients, and of the center, with these factors; null:
                         // the clients. Integers are the clients' own all the same.
  int32_t sorted;        // R, or K
  void* scratch;         // ranked_scratch() bytes
};
int64_t ranked_scratch(int dtype, int sorted, bool mixed);
void ranked_means(int dtype, const Ranked&, Stream);  // dtype: of the items, any

// group[g, i, j] = the partial sums of slots [first_slot[g], first_slot[g + 1]), added in a fixed order; a triangle is
// mirrored. total, unless null: the sum of the groups in their order.
void reduce(const double* partial, const int32_t* first_slot, int groups, int slices, int a_rows, int b_rows,
            bool triangle, double* group, double* total, Stream);

// The architecture (80 for sm_80) that the kernels which serve this device were compiled for; 0: there are none.
int code_version(Stream);

}  // namespace gpu
}  // namespace fastagg
