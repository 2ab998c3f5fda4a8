// fastagg._cpu: integers in, GIL released. Sizes are checked here, so that no call can read past an index array.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "bind_table.h"
#include "fastagg.h"

namespace py = pybind11;
using namespace fastagg;

namespace {

template <class T> using Array = py::array_t<T, py::array::c_style>;  // no silent conversion: see noconvert() below

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("fastagg._cpu: ") + what);
}

Table table_of(const Array<int64_t>& client, const Array<int64_t>& numel, const Array<int32_t>& dtype,
               const int64_t* center) {
  require(client.ndim() == 2 && client.shape(1) > 0, "client must be [T, K] addresses, K > 0");
  require(numel.size() == client.shape(0) && dtype.size() == client.shape(0), "numel and dtype must be [T]");
  for (py::ssize_t t = 0; t < dtype.size(); ++t)
    require(dtype.data()[t] >= 0 && dtype.data()[t] < DTYPES && numel.data()[t] >= 0, "bad dtype code or size");
  return {client.shape(0),
          client.shape(1),
          reinterpret_cast<const void* const*>(center),
          reinterpret_cast<const void* const*>(client.data()),
          numel.data(),
          dtype.data()};
}

Gram gram_of(const Table& t, const Array<int64_t>& center, const Array<int32_t>& layer, bool per_layer,
             Array<double>& out, int64_t columns) {
  require(center.size() == t.tensors && layer.size() == t.tensors, "center and layer must be [T]");
  int64_t layers = 0;
  for (int64_t i = 0; i < t.tensors; ++i) {
    layers = std::max<int64_t>(layers, layer.data()[i] + 1);
    require(layer.data()[i] < 0 || is_floating(t.dtype[i]), "an integer tensor cannot enter the Gram");
  }
  int64_t R = t.clients + 1;
  require(out.ndim() == 3 && out.shape(1) == R && out.shape(2) == columns, "out must be [layers or 1, K+1, columns]");
  require(per_layer ? out.shape(0) >= layers : out.shape(0) == 1, "out has too few layers");
  return {layer.data(), per_layer ? out.shape(0) : layers, per_layer, out.mutable_data()};
}

Mix mix_of(const Table& t, const Array<double>& weights, const Array<int32_t>& row,
           const std::optional<Array<int64_t>>& out, Array<uint8_t>& not_finite) {
  require(weights.ndim() == 3 && weights.shape(2) == t.clients, "weights must be [rows, M, K]");
  require(row.size() == t.tensors, "row must be [T]");
  for (int64_t i = 0; i < t.tensors; ++i)
    require(row.data()[i] >= 0 && row.data()[i] < weights.shape(0), "row out of range");
  require(!out || (out->ndim() == 2 && out->shape(0) == weights.shape(1) && out->shape(1) == t.tensors),
          "out must be [M, T]");
  require(not_finite.size() == t.tensors, "not_finite must be [T]");
  return {weights.data(), row.data(), weights.shape(1), out ? reinterpret_cast<void* const*>(out->data()) : nullptr,
          not_finite.mutable_data()};
}

Ranked ranked_of(const Table& t, const std::optional<Array<int64_t>>& center, const Array<int64_t>& means,
                 const Array<int32_t>& row, const Array<int64_t>& out, Array<uint8_t>& not_finite,
                 const std::optional<Array<double>>& mixing) {
  static_assert(sizeof(RankedMean) == 3 * sizeof(int64_t), "");
  require(!center || center->size() == t.tensors, "center must be [T]");
  require(!mixing || (mixing->ndim() == 2 && mixing->shape(0) > 0 && mixing->shape(1) == t.clients + 1),
          "mixing must be [R, K + 1]");
  require(means.ndim() == 3 && means.shape(2) == 3, "means must be [rows, M, 3]");
  const int64_t rows = mixing ? mixing->shape(0) : t.clients;
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
          not_finite.mutable_data(),
          mixing ? mixing->data() : nullptr,
          rows};
}

int at_least_one(int threads) { return std::max(threads, 1); }

// work() without the GIL. Ctrl-C is noticed while it runs: Python's own handler only takes note of the signal, and on
// the main thread that note is looked at here.
bool signalled() {
  py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;  // a handler raised: the error stays set on this thread
}
template <class Work> auto without_gil(const Work& work) {
  try {
    py::gil_scoped_release release;
    return work();
  } catch (const Interrupted&) {
    throw py::error_already_set();
  }
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "Native CPU kernels of fastagg. Internal: use the functions of the fastagg package.";
  using A64 = const Array<int64_t>&;
  using A32 = const Array<int32_t>&;
#define ARG(name) py::arg(#name).noconvert()
  interrupted = &signalled;

  m.def(
      "gram",
      [](A64 client, A64 numel, A32 dtype, A64 center, A32 layer, bool per_layer, Array<double> out, int threads) {
        Table t = table_of(client, numel, dtype, center.data());
        Gram g = gram_of(t, center, layer, per_layer, out, t.clients + 1);
        without_gil([&] { gram(t, g, at_least_one(threads)); });
      },
      ARG(client), ARG(numel), ARG(dtype), ARG(center), ARG(layer), ARG(per_layer), ARG(out), ARG(threads));

  m.def(
      "mix",
      [](A64 client, A64 numel, A32 dtype, const Array<double>& weights, A32 row, A64 out, Array<uint8_t> not_finite,
         int threads) {
        Table t = table_of(client, numel, dtype, nullptr);
        Mix x = mix_of(t, weights, row, out, not_finite);
        without_gil([&] { mix(t, x, at_least_one(threads)); });
      },
      ARG(client), ARG(numel), ARG(dtype), ARG(weights), ARG(row), ARG(out), ARG(not_finite), ARG(threads));

  m.def(
      "gram_mix",
      [](A64 client, A64 numel, A32 dtype, A64 center, A32 layer, bool per_layer, Array<double> gram_out,
         const Array<double>& weights, A32 row, A64 out, Array<uint8_t> not_finite, int threads) {
        Table t = table_of(client, numel, dtype, center.data());
        Gram g = gram_of(t, center, layer, per_layer, gram_out, t.clients + 1);
        Mix x = mix_of(t, weights, row, out, not_finite);
        without_gil([&] { gram_mix(t, g, x, at_least_one(threads)); });
      },
      ARG(client), ARG(numel), ARG(dtype), ARG(center), ARG(layer), ARG(per_layer), ARG(gram_out), ARG(weights),
      ARG(row), ARG(out), ARG(not_finite), ARG(threads));

  m.def(
      "gram_times",
      [](A64 client, A64 numel, A32 dtype, A64 center, A32 layer, bool per_layer, Array<double> products,
         const Array<double>& weights, A32 row, std::optional<Array<int64_t>> out, Array<uint8_t> not_finite,
         int threads) {
        Table t = table_of(client, numel, dtype, center.data());
        require(weights.ndim() == 3, "weights must be [rows, M, K]");
        Gram g = gram_of(t, center, layer, per_layer, products, 2 + weights.shape(1));
        Mix x = mix_of(t, weights, row, out, not_finite);
        without_gil([&] { gram_times(t, g, x, at_least_one(threads)); });
      },
      ARG(client), ARG(numel), ARG(dtype), ARG(center), ARG(layer), ARG(per_layer), ARG(products), ARG(weights),
      ARG(row), ARG(out), ARG(not_finite), ARG(threads));

  m.def(
      "ranked_means",
      [](A64 client, A64 numel, A32 dtype, std::optional<Array<int64_t>> center, A64 means, A32 row, A64 out,
         Array<uint8_t> not_finite, std::optional<Array<double>> mixing, int threads) {
        Table t = table_of(client, numel, dtype, center ? center->data() : nullptr);
        Ranked r = ranked_of(t, center, means, row, out, not_finite, mixing);
        without_gil([&] { ranked_means(t, r, at_least_one(threads)); });
      },
      ARG(client), ARG(numel), ARG(dtype), ARG(center), ARG(means), ARG(row), ARG(out), ARG(not_finite), ARG(mixing),
      ARG(threads));

  m.def(
      "dots",
      [](A64 client, A64 numel, A32 dtype, A64 left, A32 row, Array<double> out, int threads) {
        Table t = table_of(client, numel, dtype, nullptr);
        require(left.ndim() == 2 && left.shape(0) > 0 && left.shape(1) == t.tensors, "left must be [M, T]");
        require(out.ndim() == 3 && out.shape(1) == left.shape(0) && out.shape(2) == t.clients,
                "out must be [rows, M, K]");
        require(row.size() == t.tensors, "row must be [T]");
        for (int64_t i = 0; i < t.tensors; ++i)
          require(row.data()[i] >= 0 && row.data()[i] < out.shape(0), "row out of range");
        double* to = out.mutable_data();
        without_gil([&] {
          dots(t, reinterpret_cast<const void* const*>(left.data()), row.data(), out.shape(0), left.shape(0), to,
               at_least_one(threads));
        });
      },
      ARG(client), ARG(numel), ARG(dtype), ARG(left), ARG(row), ARG(out), ARG(threads));

  m.def(
      "read_all",
      [](A64 client, A64 numel, A32 dtype, int64_t piece, int threads) {
        Table t = table_of(client, numel, dtype, nullptr);
        require(piece > 0, "piece must be positive");
        return without_gil([&] { return read_all(t, piece, at_least_one(threads)); });
      },
      ARG(client), ARG(numel), ARG(dtype), ARG(piece), ARG(threads));

  m.def("fma_peak", [](int64_t iterations, int threads) {
    return without_gil([&] { return fma_peak(iterations, at_least_one(threads)); });
  });

  m.def("cache_bytes", &cache_bytes);
  m.def("set_cache_bytes", &set_cache_bytes, py::arg("n"));
  m.def("simd_level", &simd_level);
  m.def("simd_best", &simd_best);
  m.def("set_simd", &set_simd);
  bind_table(m);
}
