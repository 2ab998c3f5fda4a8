// fastagg._cpu: integers in, GIL released. Sizes are checked here, so that no call can read past an index array.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "bind_table.h"
#include "fastagg.h"
#include "python.h"

using namespace fastagg;

namespace {

using python::Array;
using python::ArrayOrNone;
using I64 = Array<const int64_t>;
using I32 = Array<const int32_t>;
using F64 = Array<const double>;
using Out = Array<double>;
using Marks = Array<uint8_t>;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("fastagg._cpu: ") + what);
}

Table table_of(const I64& client, const I64& numel, const I32& dtype, const int64_t* center) {
  require(client.ndim() == 2 && client.shape(1) > 0, "client must be [T, K] addresses, K > 0");
  require(numel.size() == client.shape(0) && dtype.size() == client.shape(0), "numel and dtype must be [T]");
  for (int64_t t = 0; t < dtype.size(); ++t)
    require(dtype.data()[t] >= 0 && dtype.data()[t] < DTYPES && numel.data()[t] >= 0, "bad dtype code or size");
  return {client.shape(0),
          client.shape(1),
          reinterpret_cast<const void* const*>(center),
          reinterpret_cast<const void* const*>(client.data()),
          numel.data(),
          dtype.data()};
}

Gram gram_of(const Table& t, const I64& center, const I32& layer, bool per_layer, const Out& out, int64_t columns) {
  require(center.size() == t.tensors && layer.size() == t.tensors, "center and layer must be [T]");
  int64_t layers = 0;
  for (int64_t i = 0; i < t.tensors; ++i) {
    layers = std::max<int64_t>(layers, layer.data()[i] + 1);
    require(layer.data()[i] < 0 || is_floating(t.dtype[i]), "an integer tensor cannot enter the Gram");
  }
  int64_t R = t.clients + 1;
  require(out.ndim() == 3 && out.shape(1) == R && out.shape(2) == columns, "out must be [layers or 1, K+1, columns]");
  require(per_layer ? out.shape(0) >= layers : out.shape(0) == 1, "out has too few layers");
  return {layer.data(), per_layer ? out.shape(0) : layers, per_layer, out.data()};
}

Mix mix_of(const Table& t, const F64& weights, const I32& row, const I64* out, const Marks& not_finite) {
  require(weights.ndim() == 3 && weights.shape(2) == t.clients, "weights must be [rows, M, K]");
  require(row.size() == t.tensors, "row must be [T]");
  for (int64_t i = 0; i < t.tensors; ++i)
    require(row.data()[i] >= 0 && row.data()[i] < weights.shape(0), "row out of range");
  require(!out || (out->ndim() == 2 && out->shape(0) == weights.shape(1) && out->shape(1) == t.tensors),
          "out must be [M, T]");
  require(not_finite.size() == t.tensors, "not_finite must be [T]");
  return {weights.data(), row.data(), weights.shape(1), out ? reinterpret_cast<void* const*>(out->data()) : nullptr,
          not_finite.data()};
}

Ranked ranked_of(const Table& t, const ArrayOrNone<const int64_t>& center, const I64& means, const I32& row,
                 const I64& out, const Marks& not_finite, const ArrayOrNone<const double>& mixing) {
  static_assert(sizeof(RankedMean) == 3 * sizeof(int64_t), "");
  require(!center || center.size() == t.tensors, "center must be [T]");
  require(!mixing || (mixing.ndim() == 2 && mixing.shape(0) > 0 && mixing.shape(1) == t.clients + 1),
          "mixing must be [R, K + 1]");
  require(means.ndim() == 3 && means.shape(2) == 3, "means must be [rows, M, 3]");
  const int64_t rows = mixing ? mixing.shape(0) : t.clients;
  const RankedMean* mean = reinterpret_cast<const RankedMean*>(means.data());
  for (int64_t i = 0; i < means.shape(0) * means.shape(1); ++i) {
    require(0 <= mean[i].low && mean[i].low <= mean[i].high && mean[i].high <= rows, "ranks out of range");
    require(0 <= mean[i].nearest && mean[i].nearest <= rows, "more nearest than there are");
    require(center || mean[i].low < mean[i].high, "a mean around the center needs one");
  }
  require(row.size() == t.tensors, "row must be [T]");
  for (int64_t i = 0; i < t.tensors; ++i) require(row.data()[i] < means.shape(0), "row out of range");
  require(out.ndim() == 2 && out.shape(0) == means.shape(1) && out.shape(1) == t.tensors, "out must be [M, T]");
  require(not_finite.size() == t.tensors, "not_finite must be [T]");
  return {mean,
          means.shape(0),
          row.data(),
          means.shape(1),
          reinterpret_cast<void* const*>(out.data()),
          not_finite.data(),
          mixing ? mixing.data() : nullptr,
          rows};
}

// work() without the GIL. Ctrl-C is noticed while it runs: Python's own handler only takes note of the signal, and on
// the main thread that note is looked at here.
bool signalled() {
  const PyGILState_STATE held = PyGILState_Ensure();
  const bool raised = PyErr_CheckSignals() != 0;  // by a handler: the error stays set on this thread
  PyGILState_Release(held);
  return raised;
}
template <class Work> auto without_gil(const Work& work) {
  struct Released {
    PyThreadState* state = PyEval_SaveThread();
    ~Released() { PyEval_RestoreThread(state); }
  };
  try {
    Released released;
    return work();
  } catch (const Interrupted&) {
    throw python::Raised();
  }
}

// What Python calls: the functions of fastagg.h by the same names
namespace bound {

int at_least_one(int threads) { return std::max(threads, 1); }

void gram(I64 client, I64 numel, I32 dtype, I64 center, I32 layer, bool per_layer, Out out, int threads) {
  Table t = table_of(client, numel, dtype, center.data());
  Gram g = gram_of(t, center, layer, per_layer, out, t.clients + 1);
  without_gil([&] { fastagg::gram(t, g, at_least_one(threads)); });
}

void mix(I64 client, I64 numel, I32 dtype, F64 weights, I32 row, I64 out, Marks not_finite, int threads) {
  Table t = table_of(client, numel, dtype, nullptr);
  Mix x = mix_of(t, weights, row, &out, not_finite);
  without_gil([&] { fastagg::mix(t, x, at_least_one(threads)); });
}

void gram_mix(I64 client, I64 numel, I32 dtype, I64 center, I32 layer, bool per_layer, Out gram_out, F64 weights,
              I32 row, I64 out, Marks not_finite, int threads) {
  Table t = table_of(client, numel, dtype, center.data());
  Gram g = gram_of(t, center, layer, per_layer, gram_out, t.clients + 1);
  Mix x = mix_of(t, weights, row, &out, not_finite);
  without_gil([&] { fastagg::gram_mix(t, g, x, at_least_one(threads)); });
}

void gram_times(I64 client, I64 numel, I32 dtype, I64 center, I32 layer, bool per_layer, Out products, F64 weights,
                I32 row, ArrayOrNone<const int64_t> out, Marks not_finite, int threads) {
  Table t = table_of(client, numel, dtype, center.data());
  require(weights.ndim() == 3, "weights must be [rows, M, K]");
  Gram g = gram_of(t, center, layer, per_layer, products, 2 + weights.shape(1));
  Mix x = mix_of(t, weights, row, out ? &out : nullptr, not_finite);
  without_gil([&] { fastagg::gram_times(t, g, x, at_least_one(threads)); });
}

void ranked_means(I64 client, I64 numel, I32 dtype, ArrayOrNone<const int64_t> center, I64 means, I32 row, I64 out,
                  Marks not_finite, ArrayOrNone<const double> mixing, int threads) {
  Table t = table_of(client, numel, dtype, center ? center.data() : nullptr);
  Ranked r = ranked_of(t, center, means, row, out, not_finite, mixing);
  without_gil([&] { fastagg::ranked_means(t, r, at_least_one(threads)); });
}

void dots(I64 client, I64 numel, I32 dtype, I64 left, I32 row, Out out, int threads) {
  Table t = table_of(client, numel, dtype, nullptr);
  require(left.ndim() == 2 && left.shape(0) > 0 && left.shape(1) == t.tensors, "left must be [M, T]");
  require(out.ndim() == 3 && out.shape(1) == left.shape(0) && out.shape(2) == t.clients, "out must be [rows, M, K]");
  require(row.size() == t.tensors, "row must be [T]");
  for (int64_t i = 0; i < t.tensors; ++i)
    require(row.data()[i] >= 0 && row.data()[i] < out.shape(0), "row out of range");
  const void* const* lefts = reinterpret_cast<const void* const*>(left.data());
  without_gil(
      [&] { fastagg::dots(t, lefts, row.data(), out.shape(0), left.shape(0), out.data(), at_least_one(threads)); });
}

uint64_t read_all(I64 client, I64 numel, I32 dtype, int64_t piece, int threads) {
  Table t = table_of(client, numel, dtype, nullptr);
  require(piece > 0, "piece must be positive");
  return without_gil([&] { return fastagg::read_all(t, piece, at_least_one(threads)); });
}

double fma_peak(int64_t iterations, int threads) {
  return without_gil([&] { return fastagg::fma_peak(iterations, at_least_one(threads)); });
}

int64_t cache_bytes() { return fastagg::cache_bytes(); }
void set_cache_bytes(int64_t n) { fastagg::set_cache_bytes(n); }
const char* simd_level() { return fastagg::simd_level(); }
const char* simd_best() { return fastagg::simd_best(); }
PyObject* simd_levels() {
  python::Owned list(PyList_New(0));
  for (int i = 0; const char* name = simd_name(i); ++i) python::append(list.object, PyUnicode_FromString(name));
  return list.release();
}
bool set_simd(std::string level) { return fastagg::set_simd(level.c_str()); }
using python::scan;

#define TABLE "client, numel, dtype, "
#define GRAM "center, layer, per_layer, "
PyMethodDef functions[] = {
    FASTAGG_FUNCTION(gram, TABLE GRAM "out, threads, /"),
    FASTAGG_FUNCTION(mix, TABLE "weights, row, out, not_finite, threads, /"),
    FASTAGG_FUNCTION(gram_mix, TABLE GRAM "gram_out, weights, row, out, not_finite, threads, /"),
    FASTAGG_FUNCTION(gram_times, TABLE GRAM "products, weights, row, out, not_finite, threads, /"),
    FASTAGG_FUNCTION(ranked_means, TABLE "center, means, row, out, not_finite, mixing, threads, /"),
    FASTAGG_FUNCTION(dots, TABLE "left, row, out, threads, /"),
    FASTAGG_FUNCTION(read_all, TABLE "piece, threads, /"),
    FASTAGG_FUNCTION(fma_peak, "iterations, threads, /"),
    FASTAGG_FUNCTION(cache_bytes, ""),
    FASTAGG_FUNCTION(set_cache_bytes, "n, /"),
    FASTAGG_FUNCTION(simd_level, ""),
    FASTAGG_FUNCTION(simd_best, ""),
    FASTAGG_FUNCTION(simd_levels, ""),
    FASTAGG_FUNCTION(set_simd, "level, /"),
    FASTAGG_FUNCTION(scan,
                     "functions, codes_of_torch, types, handle, models, keys, shapes, codes, device_type, "
                     "device_index, out, /"),
    {},
};

}  // namespace bound

PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "_cpu",
    "Native CPU kernels of fastagg. Internal: use the functions of the fastagg package.",
    0,
    bound::functions,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() {
  interrupted = &signalled;
  return PyModule_Create(&module);
}
