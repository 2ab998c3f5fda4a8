// Reads the addresses of the tensors of many state dicts, and checks them against a layout, in about 45 ns a tensor;
// the same through Python attributes (data_ptr, shape, dtype, stride, device) costs twenty times that, which is more
// than the kernels take on a small model. It only ever says "as expected" or "look at this one yourself": Python then
// decides what to do, so every message and every special case lives in table.py.
//
// Tensors are asked by the C functions of torch's stable ABI (aoti_torch_get_..., looked up by Python). They take a
// handle, which is the address of the at::Tensor inside of the Python object. Where that is, Python finds out and
// verifies (scanner.py).
#include "bind_table.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "fastagg.h"

namespace py = pybind11;

namespace {

// A tensor's properties by torch's functions; each returns 0, or an error
struct Torch {
  template <class T> using Get = int32_t (*)(void* tensor, T* out);

  Get<int32_t> device_type, device_index, dtype, layout;
  Get<int64_t> dim, storage_offset, storage_size;
  Get<int64_t*> sizes, strides;
  Get<const void*> data;

  explicit Torch(const std::map<std::string, uintptr_t>& functions) {
    auto find = [&](const char* name, auto& to) {
      to = reinterpret_cast<std::decay_t<decltype(to)>>(functions.at(name));
    };
    find("device_type", device_type);
    find("device_index", device_index);
    find("dtype", dtype);
    find("layout", layout);
    find("dim", dim);
    find("storage_offset", storage_offset);
    find("storage_size", storage_size);
    find("sizes", sizes);
    find("strides", strides);
    find("data", data);
  }
};

struct Device {
  int32_t type, index;  // torch's: type 0 is the CPU, 1 CUDA
};

// What a key of the model must look like
struct Form {
  PyObject* key;
  int32_t code;
  std::vector<int64_t> shape;
  int64_t numel;
};

using Codes = py::array_t<int32_t, py::array::c_style>;
constexpr int32_t STRIDED = 0;

class Scanner {
 public:
  // types: the exact types that the fast path may look at (Tensor, Parameter); a subclass may mean anything.
  // codes: from torch's number of a dtype to ours. handle: bytes from a Python object to its at::Tensor
  Scanner(const std::map<std::string, uintptr_t>& functions, const std::map<int32_t, int32_t>& codes, py::tuple types,
          py::ssize_t handle)
      : torch_(functions), types_(std::move(types)), handle_(handle) {
    std::fill(std::begin(code_), std::end(code_), int8_t(-1));
    for (auto [dtype, code] : codes) {
      if (dtype < 0 || dtype >= int32_t(std::size(code_))) throw std::invalid_argument("fastagg._cpu.Scanner: dtype");
      code_[dtype] = int8_t(code);
    }
  }

  // Writes the addresses of the tensors of `models`, dicts, into out [T, columns]: model m into column m. Returns for
  // each model its tensors, and the indices of those that are not as expected (plain, dense, on this device, of this
  // shape and dtype, with all their memory), which are None there.
  py::list scan(const py::list& models, const py::tuple& keys, const py::tuple& shapes, const Codes& codes,
                std::pair<int32_t, int32_t> device, py::array_t<int64_t, py::array::c_style>& out) const {
    const size_t T = keys.size();
    if (out.ndim() != 2 || out.shape(0) != py::ssize_t(T) || out.shape(1) < py::ssize_t(models.size()) ||
        shapes.size() != T || codes.size() != py::ssize_t(T))
      throw std::invalid_argument("fastagg._cpu.Scanner: arrays do not match");
    std::vector<Form> forms(T);
    for (size_t t = 0; t < T; ++t) {
      Form& form = forms[t];
      form = {keys[t].ptr(), codes.data()[t], {}, 1};
      for (py::handle size : py::reinterpret_borrow<py::tuple>(shapes[t])) {
        form.shape.push_back(py::cast<int64_t>(size));
        form.numel *= form.shape.back();
      }
    }
    py::list result;
    for (size_t m = 0; m < models.size(); ++m) {
      py::handle model = models[m];
      if (!PyDict_Check(model.ptr())) throw py::type_error("fastagg._cpu.Scanner: expected dicts");
      py::list tensors(T), odd;
      int64_t* to = out.mutable_data() + m;
      for (size_t t = 0; t < T; ++t, to += out.shape(1)) {
        PyObject* value = PyDict_GetItemWithError(model.ptr(), forms[t].key);
        if (!value && PyErr_Occurred()) throw py::error_already_set();
        if (!value || !as_expected(value, forms[t], {device.first, device.second}, to)) {
          odd.append(t);
          value = Py_None;
        }
        Py_INCREF(value);
        PyList_SET_ITEM(tensors.ptr(), t, value);
      }
      result.append(py::make_tuple(std::move(tensors), std::move(odd)));
    }
    return result;
  }

 private:
  bool is_plain(PyObject* value) const {
    for (py::handle type : types_)
      if ((PyObject*)Py_TYPE(value) == type.ptr()) return true;
    return false;
  }

  void* at_tensor(PyObject* value) const { return reinterpret_cast<char*>(value) + handle_; }

  bool as_expected(PyObject* value, const Form& form, Device device, int64_t* address) const {
    if (!is_plain(value)) return false;
    void* tensor = at_tensor(value);
    if (!*static_cast<void**>(tensor)) return false;
    int32_t type, index, dtype, layout;
    if (torch_.device_type(tensor, &type) || type != device.type) return false;
    if (type != 0 && (torch_.device_index(tensor, &index) || index != device.index)) return false;
    if (torch_.layout(tensor, &layout) || layout != STRIDED) return false;
    if (torch_.dtype(tensor, &dtype)) return false;
    if (dtype < 0 || dtype >= int32_t(std::size(code_)) || code_[dtype] != form.code) return false;
    int64_t dim, offset, bytes, *sizes, *strides;
    if (torch_.dim(tensor, &dim) || dim != int64_t(form.shape.size())) return false;
    if (dim == 0 && fastagg::is_floating(form.code))
      return false;  // may be lazily negated (complex.conj().imag); with dimensions that shows as a stride of 2
    if (torch_.sizes(tensor, &sizes) || torch_.strides(tensor, &strides)) return false;
    int64_t dense = 1;
    for (int64_t d = dim - 1; d >= 0; --d) {
      if (sizes[d] != form.shape[d]) return false;
      if (strides[d] != dense && sizes[d] != 0) return false;
      dense *= sizes[d];
    }
    const void* data = nullptr;
    if (torch_.storage_size(tensor, &bytes) || torch_.storage_offset(tensor, &offset)) return false;
    if (dense > 0 && (offset + dense) * fastagg::dtype_bytes[form.code] > bytes)
      return false;  // freed, or made smaller
    if (torch_.data(tensor, &data) || (!data && dense > 0)) return false;
    *address = reinterpret_cast<int64_t>(data);
    return true;
  }

  Torch torch_;
  int8_t code_[128];  // ours, by torch's number of a dtype
  py::tuple types_;
  py::ssize_t handle_;
};

}  // namespace

void bind_table(py::module_& m) {
  py::class_<Scanner>(m, "Scanner")
      .def(py::init<const std::map<std::string, uintptr_t>&, const std::map<int32_t, int32_t>&, py::tuple,
                    py::ssize_t>())
      .def("scan", &Scanner::scan);
}
