// Reads the addresses of the tensors of many state dicts, and checks them against a layout, in about 45 ns a tensor;
// the same through Python attributes (data_ptr, shape, dtype, stride, device) costs twenty times that, which is more
// than the kernels take on a small model. It only ever says "as expected" or "look at this one yourself": Python then
// decides what to do, so every message and every special case lives in table.py.
//
// Tensors are asked by the C functions of torch's stable ABI (aoti_torch_get_..., looked up by Python). They take a
// handle, which is the address of the at::Tensor inside of the Python object. Where that is, Python finds out and
// verifies (scanner.py).
#include "bind_table.h"

#include <vector>

#include "fastagg.h"

namespace fastagg::python {
namespace {

// A tensor's properties by torch's functions; each returns 0, or an error. In the order of FUNCTIONS in scanner.py.
template <class T> using Get = int32_t (*)(void* tensor, T* out);
struct Torch {
  Get<int32_t> device_type, device_index, dtype, layout;
  Get<int64_t> dim;
  Get<int64_t*> sizes, strides;
  Get<int64_t> storage_offset, storage_size;
  Get<const void*> data;
};
constexpr int torch_functions = 10;
static_assert(sizeof(Torch) == torch_functions * sizeof(int64_t), "addresses are read as they are");

constexpr int32_t STRIDED = 0;

// What a key of the model must look like
struct Form {
  PyObject* key;
  int32_t code;
  std::vector<int64_t> shape;
};

std::vector<PyObject*> items_of(PyObject* tuple) {  // borrowed
  const Py_ssize_t size = PyTuple_Size(tuple);
  if (size < 0) throw Raised();
  std::vector<PyObject*> items(size);
  for (Py_ssize_t i = 0; i < size; ++i) items[i] = PyTuple_GetItem(tuple, i);
  return items;
}

class Scanner {
 public:
  Scanner(const Torch& torch, const Array<const int32_t>& code, PyObject* types, int64_t handle, int32_t device_type,
          int32_t device_index)
      : torch_(torch),
        code_(code.data()),
        codes_(code.size()),
        types_(items_of(types)),
        handle_(handle),
        device_type_(device_type),
        device_index_(device_index) {}

  bool as_expected(PyObject* value, const Form& form, int64_t* address) const {
    if (!is_plain(value)) return false;
    void* tensor = reinterpret_cast<char*>(value) + handle_;
    if (!*static_cast<void**>(tensor)) return false;
    int32_t type, index, dtype, layout;
    if (torch_.device_type(tensor, &type) || type != device_type_) return false;
    if (type != 0 && (torch_.device_index(tensor, &index) || index != device_index_)) return false;
    if (torch_.layout(tensor, &layout) || layout != STRIDED) return false;
    if (torch_.dtype(tensor, &dtype)) return false;
    if (dtype < 0 || dtype >= codes_ || code_[dtype] != form.code) return false;
    int64_t dim, offset, bytes, *sizes, *strides;
    if (torch_.dim(tensor, &dim) || dim != int64_t(form.shape.size())) return false;
    if (dim == 0 && is_floating(form.code))
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
    if (dense > 0 && (offset + dense) * dtype_bytes[form.code] > bytes) return false;  // freed, or made smaller
    if (torch_.data(tensor, &data) || (!data && dense > 0)) return false;
    *address = reinterpret_cast<int64_t>(data);
    return true;
  }

 private:
  bool is_plain(PyObject* value) const {
    for (PyObject* type : types_)
      if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == type) return true;
    return false;
  }

  Torch torch_;
  const int32_t* code_;
  int64_t codes_;
  std::vector<PyObject*> types_;
  int64_t handle_;
  int32_t device_type_, device_index_;  // torch's: type 0 is the CPU, 1 CUDA
};

}  // namespace

PyObject* scan(Array<const int64_t> functions, Array<const int32_t> codes_of_torch, PyObject* types, int64_t handle,
               PyObject* models, PyObject* keys, PyObject* shapes, Array<const int32_t> codes, int device_type,
               int device_index, Array<int64_t> out) {
  const std::vector<PyObject*> key = items_of(keys), shape = items_of(shapes);
  const Py_ssize_t T = key.size(), M = PyList_Size(models);
  if (M < 0) throw Raised();
  if (functions.size() != torch_functions || out.ndim() != 2 || out.shape(0) != T || out.shape(1) < M ||
      Py_ssize_t(shape.size()) != T || codes.size() != T)
    throw std::invalid_argument("fastagg._cpu.scan: arrays do not match");
  std::vector<Form> forms(T);
  for (Py_ssize_t t = 0; t < T; ++t) {
    forms[t] = {key[t], codes.data()[t], {}};
    if (forms[t].code < 0 || forms[t].code >= DTYPES) throw std::invalid_argument("fastagg._cpu.scan: bad dtype code");
    for (PyObject* size : items_of(shape[t])) forms[t].shape.push_back(argument<int64_t>(size));
  }
  const Scanner scanner(*reinterpret_cast<const Torch*>(functions.data()), codes_of_torch, types, handle, device_type,
                        device_index);
  Owned result(PyList_New(0));
  for (Py_ssize_t m = 0; m < M; ++m) {
    PyObject* model = PyList_GetItem(models, m);
    if (!PyDict_Check(model)) throw std::invalid_argument("fastagg._cpu.scan: expected dicts");
    const Owned tensors(PyList_New(T)), odd(PyList_New(0));
    int64_t* to = out.data() + m;
    for (Py_ssize_t t = 0; t < T; ++t, to += out.shape(1)) {
      PyObject* value = PyDict_GetItemWithError(model, forms[t].key);
      if (!value && PyErr_Occurred()) throw Raised();
      if (!value || !scanner.as_expected(value, forms[t], to)) {
        append(odd.object, PyLong_FromSsize_t(t));
        value = Py_None;
      }
      Py_INCREF(value);
      PyList_SetItem(tensors.object, t, value);
    }
    append(result.object, PyTuple_Pack(2, tensors.object, odd.object));
  }
  return result.release();
}

}  // namespace fastagg::python
