// How C++ functions become Python's: arguments by position, arrays as they are, errors as Python's.
//
// By CPython's stable ABI, so that one binary serves 3.10 and all later versions (docs/packaging.md). The buffer
// protocol is the exception: it is part of that ABI from 3.11 on, as it had been since 3.3.
#pragma once
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

extern "C" {
struct FastaggBuffer {  // Py_buffer
  void* buf;
  PyObject* obj;
  Py_ssize_t len, itemsize;
  int readonly, ndim;
  char* format;
  Py_ssize_t *shape, *strides, *suboffsets;
  void* internal;
};
PyAPI_FUNC(int) PyObject_GetBuffer(PyObject*, FastaggBuffer*, int flags);
PyAPI_FUNC(void) PyBuffer_Release(FastaggBuffer*);
}

namespace fastagg::python {

struct Raised {};  // a Python error is set

inline PyObject* or_raise(PyObject* object) {
  if (!object) throw Raised();
  return object;
}

struct Owned {
  PyObject* object;
  explicit Owned(PyObject* o) : object(or_raise(o)) {}
  ~Owned() { Py_XDECREF(object); }
  Owned(const Owned&) = delete;
  PyObject* release() { return std::exchange(object, nullptr); }
};

inline void append(PyObject* list, PyObject* item) {
  const Owned owned(item);
  if (PyList_Append(list, owned.object)) throw Raised();
}

// A C-contiguous array of T where it is: nothing is converted or copied. T is const if it is only read.
template <class T> class Array {
 public:
  explicit Array(PyObject* from, bool or_none = false) {
    if (or_none && from == Py_None) return;
    constexpr int writable = 0x1, format = 0x4, c_contiguous = 0x38;  // PyBUF_WRITABLE, ...
    if (PyObject_GetBuffer(from, &view_, c_contiguous | format | (std::is_const_v<T> ? 0 : writable))) throw Raised();
    if (is_of_type()) return;
    PyErr_Format(PyExc_TypeError, "fastagg: an array of '%s', expected one of %d bytes of '%s'", view_.format, size_of,
                 formats);
    PyBuffer_Release(&view_);
    throw Raised();
  }
  ~Array() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  int64_t ndim() const { return view_.ndim; }
  int64_t shape(int i) const { return view_.shape[i]; }
  int64_t size() const { return view_.len / size_of; }
  T* data() const { return static_cast<T*>(view_.buf); }

 protected:
  bool given() const { return view_.obj; }

 private:
  static constexpr int size_of = sizeof(T);
  // Of Python's struct. Which of them has how many bytes depends on the platform
  static constexpr const char* formats = std::is_floating_point_v<T> ? "fd" : std::is_signed_v<T> ? "bhilq" : "BHILQ";
  bool is_of_type() const {
    const char* is = view_.format;
    return view_.itemsize == size_of && is[0] && !is[1] && std::strchr(formats, is[0]);
  }

  FastaggBuffer view_ = {};
};

template <class T> struct ArrayOrNone : Array<T> {
  explicit ArrayOrNone(PyObject* from) : Array<T>(from, true) {}
  explicit operator bool() const { return this->given(); }
};

template <class A> A argument(PyObject* from) {
  if constexpr (std::is_same_v<A, PyObject*>) {
    return from;  // borrowed
  } else if constexpr (std::is_same_v<A, bool>) {
    if (from != Py_True && from != Py_False) {
      PyErr_SetString(PyExc_TypeError, "fastagg: expected a bool");
      throw Raised();
    }
    return from == Py_True;
  } else if constexpr (std::is_same_v<A, std::string>) {
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(from, &size);
    if (!text) throw Raised();
    return std::string(text, size);
  } else if constexpr (std::is_integral_v<A>) {
    const long long value = PyLong_AsLongLong(from);
    if (value == -1 && PyErr_Occurred()) throw Raised();
    if (value < std::numeric_limits<A>::min() || value > std::numeric_limits<A>::max())
      throw std::invalid_argument("fastagg: a number out of range");
    return A(value);
  } else {
    return A(from);
  }
}

inline PyObject* object(bool value) { return PyBool_FromLong(value); }
inline PyObject* object(int64_t value) { return PyLong_FromLongLong(value); }
inline PyObject* object(uint64_t value) { return PyLong_FromUnsignedLongLong(value); }
inline PyObject* object(double value) { return PyFloat_FromDouble(value); }
inline PyObject* object(const char* value) { return PyUnicode_FromString(value); }
inline PyObject* object(PyObject* owned) { return owned; }

// The function that CPython calls (METH_FASTCALL) for one of ours
template <auto function> struct Call;
template <class R, class... A, R (*function)(A...)> struct Call<function> {
  static constexpr size_t arguments = sizeof...(A);

  static PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != Py_ssize_t(arguments)) {
      PyErr_Format(PyExc_TypeError, "fastagg: %zd arguments, expected %zu", count, arguments);
      return nullptr;
    }
    try {
      return apply(given, std::make_index_sequence<arguments>());
    } catch (const Raised&) {
    } catch (const std::invalid_argument& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
  }

 private:
  template <size_t... I> static PyObject* apply([[maybe_unused]] PyObject* const* given, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) {
      function(argument<A>(given[I])...);
      Py_INCREF(Py_None);
      return Py_None;
    } else {
      return object(function(argument<A>(given[I])...));
    }
  }
};

constexpr size_t names_in(const char* list) {  // "client, numel, /" has two
  size_t commas = 0;
  for (; *list; ++list) commas += *list == ',';
  return commas;
}

template <auto function, size_t names> PyMethodDef entry(const char* name, const char* doc) {
  static_assert(names == Call<function>::arguments, "a name for every argument, and \", /\" after the last");
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Call<function>::call)), METH_FASTCALL, doc};
}
// An entry of a module's table. inspect.signature reads the names of the arguments from the docstring
#define FASTAGG_FUNCTION(function, names) \
  fastagg::python::entry<&function, fastagg::python::names_in(names)>(#function, #function "(" names ")\n--\n\n")

}  // namespace fastagg::python
