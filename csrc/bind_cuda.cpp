// fastagg._cuda: addresses of device memory and a stream in, kernels launched, nothing awaited. Python has built and
// uploaded every table that is pointed to here (fastagg/_engine/backends/plan.py).
//
// The same file, compiled with FASTAGG_EMULATED, is the module that the tests run on machines without a GPU.
#include <pybind11/pybind11.h>

#include "cuda/gpu.h"

namespace py = pybind11;
using namespace fastagg::gpu;

namespace {

template <class T> T* pointer(int64_t address) { return reinterpret_cast<T*>(address); }

Stream stream_of(int device, int64_t handle) {
#ifndef FASTAGG_EMULATED
  check("cudaSetDevice", cudaSetDevice(device));  // of this library's runtime, which is not torch's
#endif
  return {device, pointer<void>(handle)};
}

// Empty when the CUDA driver is there and sees a device
std::string why_no_device() {
#ifdef FASTAGG_EMULATED
  return "";
#else
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return std::string("no device: ") + cudaGetErrorString(error);
  return devices ? "" : "no device";
#endif
}

}  // namespace

PYBIND11_MODULE(FASTAGG_MODULE, module) {
  module.doc() = "Native CUDA kernels of fastagg. Internal: use the functions of the fastagg package.";
  module.def("why_no_device", &why_no_device);
  module.attr("chunk_elements") = chunk_elements;

  py::class_<Work>(module, "Work", py::module_local())
      .def(py::init([](int64_t items, int first, int count, int64_t order, int64_t numel) {
             return Work{pointer<const Item>(items), first, count, pointer<const int32_t>(order),
                         pointer<const int64_t>(numel)};
           }),
           py::kw_only(), py::arg("items"), py::arg("first"), py::arg("count"), py::arg("order"), py::arg("numel"));
  py::class_<Rows>(module, "Rows", py::module_local())
      .def(py::init([](int64_t address, int64_t aligned, int rows) {
             return Rows{pointer<const int64_t>(address), pointer<const int32_t>(aligned), rows};
           }),
           py::kw_only(), py::arg("address"), py::arg("aligned"), py::arg("rows"));
  py::class_<Mix>(module, "Mix", py::module_local())
      .def(py::init<>())  // no outputs: no mix
      .def(py::init([](const Rows& rows, int first, int clients, int64_t weights, int64_t row, int64_t out,
                       int64_t aligned, int64_t dtype, int64_t not_finite, int outputs) {
             return Mix{rows,
                        first,
                        clients,
                        pointer<const double>(weights),
                        pointer<const int32_t>(row),
                        pointer<const int64_t>(out),
                        pointer<const int32_t>(aligned),
                        pointer<const int32_t>(dtype),
                        pointer<uint8_t>(not_finite),
                        outputs};
           }),
           py::kw_only(), py::arg("rows"), py::arg("first"), py::arg("clients"), py::arg("weights"), py::arg("row"),
           py::arg("out"), py::arg("aligned"), py::arg("dtype"), py::arg("not_finite"), py::arg("outputs"));

  module.def("mix", [](const Work& work, const Mix& m, int device, int64_t stream) {
    const Stream on = stream_of(device, stream);
    py::gil_scoped_release release;
    mix(work, m, on);
  });
  module.def("code_version", [](int device) { return code_version(stream_of(device, 0)); });
  module.def("shape", [](int a_rows, int b_rows, bool triangle, bool tensor_cores) {
    const Shape s = shape_of(a_rows, b_rows, triangle, tensor_cores);
    return py::make_tuple(s.pairs, s.slices);
  });
  module.def(
      "products",
      [](int dtype, const Work& work, const Rows& rows, int a_first, int a_rows, int b_first, int b_rows, bool triangle,
         bool centred, int64_t partial, int64_t flags, const Mix& m, bool tensor_cores, int device, int64_t stream) {
        const Products p{work,
                         rows,
                         a_first,
                         a_rows,
                         b_first,
                         b_rows,
                         triangle,
                         centred,
                         pointer<double>(partial),
                         pointer<int32_t>(flags)};
        const Stream on = stream_of(device, stream);
        py::gil_scoped_release release;
        products(dtype, p, m, tensor_cores, on);
      },
      py::arg("dtype"), py::arg("work"), py::arg("rows"), py::kw_only(), py::arg("a_first"), py::arg("a_rows"),
      py::arg("b_first"), py::arg("b_rows"), py::arg("triangle"), py::arg("centred"), py::arg("partial"),
      py::arg("flags"), py::arg("mix"), py::arg("tensor_cores"), py::arg("device"), py::arg("stream"));
  module.def(
      "times",
      [](int dtype, const Work& work, const Rows& rows, int vectors, int64_t partial, int64_t flags, const Mix& m,
         int device, int64_t stream) {
        const Times t{work, rows, vectors, pointer<double>(partial), pointer<int32_t>(flags), 0};
        const Stream on = stream_of(device, stream);
        py::gil_scoped_release release;
        times(dtype, t, m, on);
      },
      py::arg("dtype"), py::arg("work"), py::arg("rows"), py::kw_only(), py::arg("vectors"), py::arg("partial"),
      py::arg("flags"), py::arg("mix"), py::arg("device"), py::arg("stream"));
  module.def("ranked_scratch", &ranked_scratch, py::arg("dtype"), py::arg("sorted"), py::arg("mixed"));
  module.def(
      "ranked_means",
      [](int dtype, const Work& work, const Rows& rows, int64_t means, int64_t row, int64_t out, int outputs,
         int64_t not_finite, int64_t mixing, int sorted, int64_t scratch, int device, int64_t stream) {
        const Ranked r{work,
                       rows,
                       pointer<const int64_t>(means),
                       pointer<const int32_t>(row),
                       pointer<const int64_t>(out),
                       outputs,
                       pointer<uint8_t>(not_finite),
                       pointer<const double>(mixing),
                       sorted,
                       pointer<void>(scratch)};
        const Stream on = stream_of(device, stream);
        py::gil_scoped_release release;
        ranked_means(dtype, r, on);
      },
      py::arg("dtype"), py::arg("work"), py::arg("rows"), py::kw_only(), py::arg("means"), py::arg("row"),
      py::arg("out"), py::arg("outputs"), py::arg("not_finite"), py::arg("mixing"), py::arg("sorted"),
      py::arg("scratch"), py::arg("device"), py::arg("stream"));
  module.def(
      "reduce",
      [](int64_t partial, int64_t first_slot, int groups, int slices, int a_rows, int b_rows, bool triangle,
         int64_t group, int64_t total, int device, int64_t stream) {
        const Stream on = stream_of(device, stream);
        py::gil_scoped_release release;
        reduce(pointer<const double>(partial), pointer<const int32_t>(first_slot), groups, slices, a_rows, b_rows,
               triangle, pointer<double>(group), pointer<double>(total), on);
      },
      py::kw_only(), py::arg("partial"), py::arg("first_slot"), py::arg("groups"), py::arg("slices"), py::arg("a_rows"),
      py::arg("b_rows"), py::arg("triangle"), py::arg("group"), py::arg("total"), py::arg("device"), py::arg("stream"));
#ifdef FASTAGG_EMULATED
  module.def("set_order", &emulator::set_order, "0: threads in order, 1: reversed, else: shuffled by this seed");
  module.def("launched", [] {
    py::dict all;  // kernel -> (most threads, most bytes of shared memory)
    for (const auto& [name, most] : emulator::launched()) all[name.c_str()] = py::make_tuple(most.first, most.second);
    return all;
  });
#endif
}
