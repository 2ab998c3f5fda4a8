"""Fresh memory in large pages: the kernel hands it out 2 MB at a time, not 4 KB, and a new model is there sooner.

Ten ResNet-18s averaged into fresh memory took 27 ms with them and 33 without, 20 into memory used before.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch

LEAST = 4 << 20  # bytes of a tensor: smaller ones hold no whole large page, or hardly one

_advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
_libc = ctypes.CDLL(None, use_errno=True) if _advice is not None else None
if _libc is not None:
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def ask_for(tensors: Iterable[torch.Tensor]) -> None:
    """For tensors whose memory nobody has touched yet. A system that knows no large pages ignores it."""
    if _libc is None:
        return
    for tensor in tensors:
        if tensor.nbytes >= LEAST and tensor.device.type == "cpu":
            start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            _libc.madvise(start, stop - start, _advice)
