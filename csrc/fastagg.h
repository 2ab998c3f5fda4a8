// The whole native API of fastagg on one page.
//
// Nothing here knows of federated learning, of Python or of torch. A caller describes T tensors of K clients by
// address; the functions read them in place and write only to the outputs named. The caller owns all memory.
// Every function is safe to call from several threads at once, and gives the same bits for any thread count.
#pragma once
#include <cstdint>

namespace fastagg {

enum DType : int32_t { F32 = 0, F64 = 1, BF16 = 2, F16 = 3, I8 = 4, I16 = 5, I32 = 6, I64 = 7, U8 = 8, DTYPES = 9 };

constexpr int64_t dtype_bytes[DTYPES] = {4, 8, 2, 2, 1, 2, 4, 8, 1};
inline bool is_floating(int32_t dtype) { return dtype <= F16; }

struct Table {
  int64_t tensors;            // T
  int64_t clients;            // K
  const void* const* center;  // [T]     the global model; null when the call has none
  const void* const* client;  // [T, K]
  const int64_t* numel;       // [T]
  const int32_t* dtype;       // [T]
};

// Centred Gram of the rows [g, w_1 - g, ..., w_K - g], float64, symmetric. layer[t] < 0 leaves tensor t out.
// per_layer: out is [layers, K+1, K+1]; otherwise [K+1, K+1], the sum of the layers' Grams in layer order.
struct Gram {
  const int32_t* layer;  // [T]
  int64_t layers;
  bool per_layer;
  double* out;
};

// out[m][t] = sum_k weights[row[t]][m][k] * client[t][k], accumulated wide and rounded once to the tensor's dtype.
// Integer tensors get the maximum over the clients instead. A client's NaN or infinity shows in the outputs whatever
// its weight (0 * NaN is NaN), so looking at these on their way to memory finds it for a K-th of the work.
struct Mix {
  const double* weights;  // [rows, M, K]
  const int32_t* row;     // [T]
  int64_t outputs;        // M
  void* const* out;       // [M, T]
  uint8_t* not_finite;    // [T] set to 1 where an output of that tensor has a NaN or an infinity; null: not wanted
};

void gram(const Table&, const Gram&, int threads);
void mix(const Table&, const Mix&, int threads);
void gram_mix(const Table&, const Gram&, const Mix&, int threads);  // both in one pass over the clients

// Products of the Gram with the weights, without the Gram: O(K) operations per element instead of O(K^2). With rows
// r = [g, w_1 - g, ..., w_K - g] and u_m = sum_k weights[row[t]][m][k] (w_k - g), gram.out is [layers or 1, K+1, 2 +
// M]: <r, r>, <r, g> and <r, u_1>, ..., <r, u_M>. If mix.out is not null, the weighted sums are written as well.
void gram_times(const Table&, const Gram&, const Mix&, int threads);

// Means of the clients' values by their rank, element by element. With s_0 <= ... <= s_{K-1} the values of an element,
// a RankedMean stands for c, the mean of s_low .. s_{high-1}, or the center's element where low is high; and with
// nearest > 0 for the mean of that many values nearest to c, of two equally near ones the lower. Integers get
// s_((low + high - 1) / 2), or the lower median where low is high. Zeros are +0.
struct RankedMean {
  int64_t low, high, nearest;
};
struct Ranked {
  const RankedMean* means;  // [rows, M]
  int64_t rows;
  const int32_t* row;    // [T]; < 0: the tensor is left alone
  int64_t outputs;       // M
  void* const* out;      // [M, T]
  uint8_t* not_finite;   // [T] set to 1 where a client has a NaN or an infinity in that tensor
  const double* mixing;  // [R, K + 1]: sorted are the sums of the clients, and in the last place the center, with these
                         // factors; null: the clients
  int64_t mixed;         // R
};
void ranked_means(const Table&, const Ranked&, int threads);

// out[row[t]][m][k] = sum over those tensors of <left[m][t], client[t][k]>, float64: the gradient of mix in its
// weights.
void dots(const Table&, const void* const* left, const int32_t* row, int64_t rows, int64_t M, double* out, int threads);

// Reads every byte of the clients once: the floor the kernels are measured against. A thread reads pieces of so many
// elements, each in four streams; which size is fastest differs from machine to machine.
uint64_t read_all(const Table&, int64_t piece, int threads);

// Multiply-adds on registers alone, as fast as this code can: returns the number of float32 flops done.
double fma_peak(int64_t iterations, int threads);

// Called every 0.1 s or so, on the thread that called one of the above; true makes that call stop and throw
// Interrupted, its outputs half written. Null, as it is at first: nobody asks.
extern bool (*interrupted)();
struct Interrupted {};

int64_t cache_bytes();            // of a core's own cache, by which work is cut; results do not depend on it
void set_cache_bytes(int64_t n);  // for tests; 0: what this machine says

const char* simd_level();      // the level in use, or the levels if kernels differ
const char* simd_best();       // the highest level this CPU has
const char* simd_name(int i);  // of the levels there are on such processors, the i-th from below; null after the last
bool set_simd(const char* level);  // for all kernels, never above simd_best(); "auto": what is fastest here; false:
                                   // unknown name

}  // namespace fastagg
