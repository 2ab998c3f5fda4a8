"""Flower's arrays and state dicts: read where they lie, and bfloat16 too, which NumPy has no dtype for.

Flower sends an array as the bytes of an npy file. np.load copies them, which takes longer than to aggregate them; here
a tensor looks into the bytes. A client whose model has bfloat16 tensors uses `pack` and `unpack` instead of Flower's
`ArrayRecord(state_dict)` and `record.to_torch_state_dict()`; for all other models they do the same.
"""

from __future__ import annotations

import ctypes
import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch

from fastagg._engine.dtypes import DTYPE_CODE
from fastagg._engine.table import InputError, StateDict, as_tensor

try:
    from flwr.app import Array, ArrayRecord
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "fastagg.integrations.flower needs Flower: pip install '.[flower]' in a clone of fastagg"
    ) from error

NUMPY = "numpy.ndarray"  # Flower's name for an npy file
BFLOAT16 = "fastagg.bfloat16"  # an npy file of the 16 bits. Flower's own code refuses it: better than misreading it

_TORCH = {
    np.dtype(t).str: torch.from_numpy(np.empty(0, t)).dtype
    for t in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "?")
}
_SIZE_OF_LENGTH = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}  # of the header's length, by version
_LONGEST_HEADER = 4096
_HEADER = re.compile(r"\{'descr':'([<>=|][a-z][0-9]{1,2})','fortran_order':(True|False),'shape':(\([0-9,]*\)),?\}\n?")


def pack(state_dict: StateDict) -> ArrayRecord:
    """A state dict as Flower sends it: ArrayRecord(state_dict), but with bfloat16 too"""
    model = {key: as_tensor(value, "the model", key).detach().cpu() for key, value in state_dict.items()}
    record = blank(model)
    for key, target in view(record).items():
        np.copyto(_bits(target), _bits(model[key].resolve_neg()))
    return record


def blank(like: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """A record for a model of this form, whose numbers the caller writes (through view) before anyone reads them"""
    record = ArrayRecord()
    for key, tensor in like.items():
        if tensor.dtype not in DTYPE_CODE:
            raise InputError(f"the model: key {key!r} has dtype {tensor.dtype}, which cannot be aggregated")
        stype = BFLOAT16 if tensor.dtype == torch.bfloat16 else NUMPY
        name = str(tensor.dtype).removeprefix("torch.")
        record[key] = Array(name, tuple(tensor.shape), stype, blank_npy(tensor.dtype, tuple(tensor.shape)))
    return record


def unpack(record: ArrayRecord) -> OrderedDict[str, torch.Tensor]:
    """The state dict in a record of pack(), or of Flower's own making: tensors of their own, to be changed at will"""
    return OrderedDict((key, _copy(tensor)) for key, tensor in view(record).items())


def view(record: Mapping[str, Array], who: str = "the record") -> dict[str, torch.Tensor]:
    """The same without a copy. Nobody may write to these tensors: they look into the record's bytes."""
    return {key: _tensor(array.data, array.stype, who, key) for key, array in record.items()}


def view_npy(data: bytes, who: str, key: str) -> torch.Tensor:
    """The bytes of an npy file as a tensor over the same memory"""
    return _tensor(data, NUMPY, who, key)


def _tensor(data: bytes, stype: str, who: str, key: str) -> torch.Tensor:
    if stype not in (NUMPY, BFLOAT16):
        raise InputError(f"{who}: key {key!r} has serialisation type {stype!r}, expected {NUMPY!r} or {BFLOAT16!r}")
    try:
        start, form = _read_header(data)
        if form.torch is not None and form.shape_is_plain:  # a third of the time of what follows
            tensor = torch.frombuffer(data, dtype=form.torch, offset=start).view(form.shape)
        else:
            tensor = as_tensor(_array(data, start, form), who, key)
        return tensor if stype == NUMPY else _bfloat16(tensor)
    except InputError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{who}: key {key!r} is not an array as NumPy saves them: {error}") from None


with warnings.catch_warnings():  # torch says once in a process that such memory must not be written: nobody does here
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """By NumPy: torch would start threads, which a machine with several clients on it has no cores for"""
    return torch.from_numpy(_bits(tensor).copy()).view(tensor.dtype)


def _bfloat16(bits: torch.Tensor) -> torch.Tensor:
    if bits.dtype != torch.int16:
        raise ValueError(f"the bits of bfloat16 numbers are given as {bits.dtype}")
    return bits.view(torch.bfloat16)


class Form(NamedTuple):
    """What the header of an npy file says"""

    dtype: np.dtype
    order: Literal["C", "F"]
    shape: tuple[int, ...]
    bytes: int
    torch: torch.dtype | None  # None where torch has no such dtype
    shape_is_plain: bool  # in C order, and not empty


def npy_array(data: bytes) -> np.ndarray:
    """An array over the memory of an npy file's bytes; ValueError, and nothing worse, where they are damaged"""
    return _array(data, *_read_header(data))


def _array(data: bytes, start: int, form: Form) -> np.ndarray:
    return np.frombuffer(data, form.dtype, math.prod(form.shape), start).reshape(form.shape, order=form.order)


def _read_header(data: bytes) -> tuple[int, Form]:
    """Where the numbers begin, and their form"""
    if not isinstance(data, bytes):
        raise ValueError(f"it is a {type(data).__name__}, expected bytes")
    if data[:10] == b"\x93NUMPY\x01\x00v\x00" and len(data) > 127:  # what nearly all arrays begin with
        start, form = 128, _header(data[10:128])
    else:
        start, form = _other_header(data)
    if form.bytes != len(data) - start:
        raise ValueError(f"{form.shape} of {form.dtype} are {form.bytes} bytes, but {len(data) - start} came")
    return start, form


def _other_header(data: bytes) -> tuple[int, Form]:
    size = _SIZE_OF_LENGTH.get(data[:8])
    if size is None:
        raise ValueError("it does not begin as an npy file of version 1 or 2")
    start = 8 + size + int.from_bytes(data[8 : 8 + size], "little")
    if start > min(len(data), _LONGEST_HEADER):
        raise ValueError("its header is cut off, or too long")
    return start, _header(data[8 + size : start])


@lru_cache(maxsize=4096)  # all clients send the same headers, and to read one takes longer than to average a bias
def _header(text: bytes) -> Form:
    found = _HEADER.fullmatch(text.decode("latin1").replace(" ", ""))
    if found is None:
        raise ValueError("its header cannot be read")
    descr, fortran, dims = found.groups()
    dtype, shape = np.dtype(descr), tuple(int(n) for n in dims[1:-1].split(",") if n)
    if dtype.kind not in "fiub" or str(shape).replace(" ", "") != dims:
        raise ValueError(f"its header says {dtype} and {dims}")
    count = math.prod(shape)
    plain = bool(count) and (fortran == "False" or len(shape) < 2)
    order = "F" if fortran == "True" else "C"
    return Form(dtype, order, shape, count * dtype.itemsize, _TORCH.get(dtype.str), plain)


def blank_npy(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """An npy file, as np.save writes it, whose numbers are yet to be written"""
    head = _head(dtype, shape)
    data = _new_bytes(None, len(head) + math.prod(shape) * dtype.itemsize)
    ctypes.memmove(ctypes.cast(data, ctypes.c_void_p), head, len(head))
    return data


@lru_cache(maxsize=4096)
def _head(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    numbers = np.dtype(np.int16) if dtype == torch.bfloat16 else torch.empty(0, dtype=dtype).numpy().dtype
    text = f"{{'descr': {numbers.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"  # so that numbers begin at a multiple of 64
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize  # with None: bytes to be filled before they are handed out
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
