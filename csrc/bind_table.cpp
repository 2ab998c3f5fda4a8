// Reads the addresses of one state dict's tensors, and checks them against a layout, in about 60 ns a tensor; the
// same through Python attributes (data_ptr, shape, dtype, stride, device) costs ten times that, which is more than
// the kernels take on a small model. It only ever says "as expected" or "look at this one yourself": Python then
// decides what to do, so every message and every special case lives in table.py.
//
// torch publishes this C function table on its tensor type (`__dlpack_c_exchange_api__`, from torch 2.10 on). The
// structs below are that published ABI, major version 1, cut down to what is used.
#include "bind_table.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "fastagg.h"

namespace py = pybind11;

namespace {

struct DLDevice {
  int32_t type, id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLVersion {
  uint32_t major, minor;
};
struct DLExchange {
  DLVersion version;
  void* previous;
  void* unused[3];
  int (*borrow)(void* py_object, DLTensor* out);
};

int dtype_code(DLDataType t) {
  if (t.lanes != 1) return -1;
  switch (t.code << 8 | t.bits) {
    case 2 << 8 | 32:
      return fastagg::F32;
    case 2 << 8 | 64:
      return fastagg::F64;
    case 4 << 8 | 16:
      return fastagg::BF16;
    case 2 << 8 | 16:
      return fastagg::F16;
    case 0 << 8 | 8:
      return fastagg::I8;
    case 0 << 8 | 16:
      return fastagg::I16;
    case 0 << 8 | 32:
      return fastagg::I32;
    case 0 << 8 | 64:
      return fastagg::I64;
    case 1 << 8 | 8:
      return fastagg::U8;
    case 6 << 8 | 8:
      return fastagg::U8;  // bool
    default:
      return -1;
  }
}

class Scanner {
 public:
  // types: the exact types the fast path may look at (Tensor, Parameter); a subclass may mean anything
  Scanner(const py::capsule& exchange, py::tuple types) : types_(std::move(types)) {
    auto* api = static_cast<DLExchange*>(exchange.get_pointer());
    usable_ = api && api->version.major == 1 && api->borrow;
    if (usable_) borrow_ = api->borrow;
  }
  bool usable() const { return usable_; }

  // Writes the addresses of the keys of `dict` into column `column` of out [T, columns] and appends the values to
  // `keep`. What is not as expected (plain, dense, on this device, of this shape and dtype) is None there, and its
  // index returned. device is DLPack's: type (1 CPU, 2 CUDA) and number.
  py::list scan(const py::dict& dict, const py::tuple& keys, const py::tuple& shapes, const py::list& codes,
                std::pair<int32_t, int32_t> device, py::array_t<int64_t, py::array::c_style>& out, py::ssize_t column,
                py::list& keep) const {
    if (out.ndim() != 2 || out.shape(0) != py::ssize_t(keys.size()) || column >= out.shape(1) ||
        shapes.size() != keys.size() || codes.size() != keys.size())
      throw std::invalid_argument("fastagg._cpu.Scanner: arrays do not match");
    int64_t* to = out.mutable_data() + column;
    py::list odd;
    for (size_t t = 0; t < keys.size(); ++t, to += out.shape(1)) {
      PyObject* value = PyDict_GetItemWithError(dict.ptr(), PyTuple_GET_ITEM(keys.ptr(), t));
      if (!value && PyErr_Occurred()) throw py::error_already_set();
      if (!value ||
          !as_expected(value, PyTuple_GET_ITEM(shapes.ptr(), t), PyList_GET_ITEM(codes.ptr(), t), device, to)) {
        odd.append(t);
        value = Py_None;
      }
      if (PyList_Append(keep.ptr(), value)) throw py::error_already_set();
    }
    return odd;
  }

 private:
  bool as_expected(PyObject* value, PyObject* shape, PyObject* code, std::pair<int32_t, int32_t> device,
                   int64_t* address) const {
    bool known = false;
    for (py::handle type : types_) known |= (PyObject*)Py_TYPE(value) == type.ptr();
    if (!known) return false;
    DLTensor t;
    if (borrow_(value, &t)) {  // sparse, meta, quantised, ...: the slow path has the words for it
      PyErr_Clear();
      return false;
    }
    if (t.device.type != device.first || t.device.id != device.second) return false;
    if (dtype_code(t.dtype) != PyLong_AsLong(code) || t.ndim != PyTuple_GET_SIZE(shape)) return false;
    if (t.ndim == 0 && t.dtype.code == 2)
      return false;  // may be lazily negated (complex.conj().imag); with
                     // dimensions that shows as a stride of 2
    int64_t dense = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
      if (t.shape[d] != PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d))) return false;
      if (t.strides && t.strides[d] != dense && t.shape[d] != 0) return false;
      dense *= t.shape[d];
    }
    if (!t.data && dense > 0) return false;  // its storage was freed
    *address = reinterpret_cast<int64_t>(static_cast<char*>(t.data) + t.byte_offset);
    return true;
  }

  py::tuple types_;
  bool usable_ = false;
  int (*borrow_)(void*, DLTensor*) = nullptr;
};

}  // namespace

void bind_table(py::module_& m) {
  py::class_<Scanner>(m, "Scanner")
      .def(py::init<const py::capsule&, py::tuple>())
      .def_property_readonly("usable", &Scanner::usable)
      .def("scan", &Scanner::scan);
}
