#pragma once
#include "python.h"

namespace fastagg::python {

// Reads the addresses of the tensors of `models`, a list of dicts, into out [T, columns]: model m into column m.
// Returns for each model its tensors, and the indices of those that are not as expected (plain, dense, on this device,
// of this shape and dtype, with all their memory), which are None there.
//   functions       addresses of torch's, in the order of struct Torch
//   codes_of_torch  ours by torch's number of a dtype; < 0: not one of ours
//   types           the exact types that may be looked at (Tensor, Parameter); a subclass may mean anything
//   handle          bytes from a Python object to its at::Tensor
//   shapes, codes   what the tensor of each of `keys` must look like
PyObject* scan(Array<const int64_t> functions, Array<const int32_t> codes_of_torch, PyObject* types, int64_t handle,
               PyObject* models, PyObject* keys, PyObject* shapes, Array<const int32_t> codes, int device_type,
               int device_index, Array<int64_t> out);

}  // namespace fastagg::python
