"""The native scan of state dicts (csrc/bind_table.cpp), where this torch and this platform have what it needs.

It asks tensors by the C functions of torch's stable ABI. These take a pointer to an at::Tensor, which is a member of
the Python object. Where in the object it is, torch does not promise: we look for it in a few tensors, whose own
`_cdata` says what must be there, and do without the scan if it is not in the same place in all of them.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import torch

from fastagg._engine.dtypes import DTYPE_CODE, PLAIN

try:
    from fastagg import _cpu
except ImportError:  # no native module on this platform: the reference backend needs none
    _cpu = None

DEVICES = {"cpu": 0, "cuda": 1}  # torch's numbers
FUNCTIONS = ("device_type", "device_index", "dtype", "layout", "dim", "sizes", "strides", "storage_offset",
             "storage_size")  # fmt: skip
Scanned = tuple[list[Any], list[int]]  # tensors of a model; which of them are not as expected, and None


class Scanner:
    """The scan with the functions of a torch (`functions_of`), its numbers of dtypes (`codes_of`), and the place of a
    tensor in its Python object (`handle_offset`)"""

    def __init__(self, functions: dict[str, int], codes: dict[int, int], handle: int) -> None:
        self.functions = np.array([functions[name] for name in (*FUNCTIONS, "data")], dtype=np.int64)
        self.codes = np.full(max(codes) + 1, -1, dtype=np.int32)
        self.codes[list(codes)] = list(codes.values())
        self.handle = handle

    def scan(
        self, models: list[dict], keys: tuple[str, ...], shapes: tuple, codes: np.ndarray, device: tuple[int, int],
        out: np.ndarray,
    ) -> list[Scanned]:  # fmt: skip
        """csrc/bind_table.h"""
        assert _cpu is not None
        return _cpu.scan(self.functions, self.codes, PLAIN, self.handle, models, keys, shapes, codes, *device, out)


def functions_of(library: ctypes.CDLL) -> dict[str, int]:
    """Addresses of the functions that the scan calls. AttributeError if this torch lacks one"""
    found = {name: getattr(library, f"aoti_torch_get_{name}") for name in FUNCTIONS}
    name = "torch_get_const_data_ptr" if hasattr(library, "torch_get_const_data_ptr") else "aoti_torch_get_data_ptr"
    found["data"] = getattr(library, name)
    return {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in found.items()}


def codes_of(library: ctypes.CDLL) -> dict[int, int]:
    """Our numbers of dtypes by torch's"""
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPE_CODE}
    return {getattr(library, f"aoti_torch_dtype_{name}")(): DTYPE_CODE[dtype] for dtype, name in names.items()}


def handle_offset(samples: list[torch.Tensor]) -> int | None:
    """Bytes from a tensor's Python object to the pointer that its at::Tensor consists of"""
    first, step = object.__basicsize__, ctypes.sizeof(ctypes.c_void_p)
    for offset in range(first, min(type(sample).__basicsize__ for sample in samples), step):
        if all(ctypes.c_void_p.from_address(id(sample) + offset).value == sample._cdata for sample in samples):
            return offset
    return None


def _samples() -> list[torch.Tensor]:
    plain = torch.zeros(3, 4, device="cpu")
    return [plain, plain[1], torch.zeros(0, device="cpu"), torch.nn.Parameter(plain), plain.to(torch.int64),
            torch.zeros(2, device="cpu", requires_grad=True) * 2]  # fmt: skip


def make() -> Scanner | None:
    if _cpu is None or not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        library = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # the one that torch has loaded
        functions, codes = functions_of(library), codes_of(library)
    except (OSError, AttributeError):
        return None
    offset = handle_offset(_samples())
    return None if offset is None else Scanner(functions, codes, offset)


NATIVE = make()
