// What a SIMD level provides: one table of function pointers, filled by kernels-inl.h once per level.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../fastagg.h"

namespace fastagg {

// Products of rows over elements [begin, begin + count) of one tensor, *added* to out[j * ld + i].
// Rows a (index i) against rows b (index j); with b == null, a against itself and only i >= j is meaningful.
struct RowProducts {
  int32_t dtype;
  bool wide;             // convert to float64 before multiplying (float64 tensors always do)
  const void* center;    // subtracted from each row first; null: rows are taken as they are
  bool center_is_first;  // row 0 of the triangle's side (b, or a when b is null) is `center` itself
  const void* const* a;  // addresses of the tensors the rows lie in, without the center
  int na;                // number of rows, with the center
  const void* const* b;
  int nb;
  int64_t begin, count;
  int64_t chunk_begin, chunk_end;  // a chunk is covered by calls one after the other with the same scratch: sums stay
                                   // in it, and are sure to have reached `out` only at the chunk's end
  void* scratch;                   // scratch_bytes(na, nb), 64-byte aligned
  double* out;
  int64_t ld;       // at least na rounded up to a multiple of 4
  double* squares;  // [na + nb] sums of squares of the rows, added to; only when b != null
};

struct MixChunk {
  int32_t dtype;
  const void* const* client;  // [K]
  int64_t clients;
  const double* weights;  // [M, K]
  int64_t outputs;        // M
  void* const* out;       // out[m * out_stride]
  int64_t out_stride;
  int64_t begin, count;
  bool streaming;  // bypass the cache when storing: the outputs do not fit in it
  int64_t run;     // elements of a client read in one go, a multiple of 64
  void* sums;      // 8 bytes for each of them, 64-byte aligned
};

// Products with u_m = sum_k weights[m][k] (client[k] - center), over elements [begin, begin + count) of one tensor. Of
// the rows r = [center, client[0] - center, ...], *added* to products[r * (2 + M) + ..]: <r, r>, <r, center>, and
// scale[m] <r, u_m>. mix says what u is the sum of, and where the weighted sums go, if anywhere (mix.out not null).
struct TimesPiece {
  MixChunk mix;  // mix.run is at least mix.count
  bool wide;     // convert to float64 before multiplying
  const void* center;
  const double* total;  // [M] sums of the weights
  const double* scale;  // [M] powers of two
  const bool* uneven;   // [M] whether some weights are so small beside others that their clients' sum must be centred
  void* scratch;        // times_scratch_bytes(count, clients), 64-byte aligned
  int64_t ahead;        // elements from here to what is asked of memory meanwhile: the next piece, or 0 for nothing
  double* products;     // [K + 1, 2 + M]
  double* squares;      // [M] of scale[m] u_m, added to
};

// A step of merging: the smaller value of each lane goes to the row named first. Of two rows both, or only one of the
// results; or two layers of four rows (distances 2, 1), or three of eight (4, 2, 1).
struct SortStep {
  enum Kind : int32_t { both, lower, higher, four, eight } kind;
  int32_t row[8];
};
constexpr int most_sorted = 32;         // rows that one network sorts
constexpr int ranked_tile_bytes = 256;  // of a row, sorted before the next are looked at: 100 rows fit into 32 KB

// Means by rank over elements [begin, begin + count) of one tensor of floats. The rows that are sorted are the clients'
// or, with mixing, R sums of them.
struct RankedPiece {
  int32_t dtype;
  const void* const* client;  // [K]
  int64_t clients;
  const void* center;     // null: nobody asks for it
  const double* mixing;   // [R, K + 1], the last for the center; null: the clients are sorted themselves
  int64_t rows;           // R, or K
  int64_t groups;         // of at most most_sorted rows, row 0 to R in equal parts
  const SortStep* steps;  // that merge them
  int64_t steps_count;
  const RankedMean* means;  // [M]
  int64_t outputs;          // M
  void* const* out;         // out[m * out_stride]
  int64_t out_stride;
  int64_t begin, count;
  bool streaming;    // bypass the cache when storing
  int64_t ahead;     // elements from here to what is asked of memory meanwhile
  void* sorted;      // rows x ranked_tile_bytes; these four are 64-byte aligned
  void* values;      // (clients + 1 + rows) x ranked_tile_bytes
  void* unrounded;   // M x 4 x ranked_tile_bytes
  const void** row;  // [max(R, K + 1)]
};

struct Kernels {
  const char* name;
  void (*row_products)(const RowProducts&);
  bool (*mix)(const MixChunk&);              // whether all that was stored is finite
  bool (*gram_times)(const TimesPiece&);     // the same
  bool (*ranked_means)(const RankedPiece&);  // whether all clients are finite
  uint64_t (*read)(const void* p, size_t bytes);
  double (*fma_peak)(int64_t iterations);
};

extern const Kernels kernels_baseline, kernels_avx2, kernels_avx512, kernels_neon;  // those of this processor
const Kernels& kernels();                                                           // the level in use

constexpr int block_bytes = 1024;            // one packed row of a block: 256 float32 or 128 float64
constexpr int row_bytes = block_bytes + 64;  // a stride of 1024 would put every fourth row in one cache set
inline size_t packed_bytes(int rows) { return size_t(rows + 4) * row_bytes; }
inline size_t scratch_bytes(int na, int nb) {  // packed rows, and a vector of at most 64 bytes for every product
  size_t products = nb ? size_t(na + 4) * (nb + 4) : size_t(na + 8) * (na + 8) / 2;
  return packed_bytes(na + nb) + products * 64;
}

// u and the center, of 8 bytes an element at most; and the last elements of all clients, padded to whole vectors
inline size_t times_scratch_bytes(int64_t count, int64_t clients) {
  return size_t(count + 64) * 16 + size_t(clients + 2) * (128 + sizeof(void*));
}

}  // namespace fastagg
