"""SVHN and the SYN digits: MATLAB files of version 5 with X, [32, 32, 3, N] bytes, and y, N labels to 10 (10 is 0).

A file is a header of 128 bytes and elements, each a tag (type, size) and its bytes; an array is an element of elements:
flags with its class, sizes, name, values. It may be compressed as a whole. Column-major: the first index runs fastest.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fastagg.sim.datasets import Arrays, DataError

MATRIX, COMPRESSED, BYTES = 14, 15, 2
DTYPES = {1: "i1", BYTES: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
PIXELS = 32 * 32 * 3
HEADS = 4096  # bytes of an array besides its values: more than there can be


class Element(NamedTuple):
    kind: int
    body: memoryview
    end: int  # where the next one begins


def read_matlab(path: Path, most: int) -> Arrays:
    arrays = {}
    try:
        left = os.path.getsize(path) - 128
        with open(path, "rb") as file:
            order = byte_order(path, file.read(128))
            while left > 0 and len(arrays) < 2:
                tag = file.read(8)
                if len(tag) < 8:
                    raise DataError(f"{path}: truncated: expected 8 bytes of an element, found {len(tag)}")
                kind, size = struct.unpack(f"{order}2I", tag)
                size = size if kind == COMPRESSED else -(-size // 8) * 8  # others are filled up
                left -= 8 + size
                if left < 0:
                    raise DataError(f"{path}: truncated: an element says it has {size:,} bytes, {-left:,} of them lack")
                body = contents(path, file, kind, size, order, PIXELS * most + HEADS)
                if body is not None:
                    name, values = array_of(path, body, order, most)
                    arrays[name] = values
    except (OSError, zlib.error, struct.error) as error:
        raise DataError(f"{path}: cannot be read, or is damaged: {error or type(error).__name__}") from error
    if arrays.keys() != {"X", "y"}:
        found = ", ".join(map(repr, arrays)) or "none"
        raise DataError(f"{path}: expected the arrays 'X' and 'y', as in train_32x32.mat, found {found}")
    x, y = arrays["X"], arrays["y"]
    if len(x) != len(y):
        raise DataError(f"{path}: X has {len(x):,} images, but y has {len(y):,} labels")
    for i in np.flatnonzero(~np.isin(y, np.arange(11)))[:1]:
        raise DataError(f"{path}: expected labels from 0 to 10, found {y[i]} at entry {i}")
    return x, np.where(y == 10, 0, y).astype(np.uint8)


def byte_order(path: Path, head: bytes) -> str:
    order = {b"IM": "<", b"MI": ">"}.get(head[126:128])
    if order is None or not head.startswith(b"MATLAB 5.0") or struct.unpack(f"{order}H", head[124:126]) != (0x0100,):
        raise DataError(
            f"{path}: expected a MATLAB file of version 5, which begins 'MATLAB 5.0 MAT-file', found {head[:20]!r}"
        )
    return order


def contents(path: Path, file: BinaryIO, kind: int, size: int, order: str, most: int) -> memoryview | None:
    """The body of a matrix, unpacked; None of other elements"""
    if kind == MATRIX:
        if size > most:
            raise DataError(f"{path}: an array says it has {size:,} bytes; expected at most {most:,}")
        return memoryview(file.read(size))
    if kind != COMPRESSED:
        file.seek(size, os.SEEK_CUR)
        return None
    unpacked = zlib.decompressobj()
    body = unpacked.decompress(file.read(min(size, most + most // 1000)), most)  # random bytes become more
    if not unpacked.eof:
        raise DataError(f"{path}: a compressed array is damaged, or has more than {most:,} bytes")
    inner = element(path, memoryview(body), 0, order)
    return inner.body if inner.kind == MATRIX else None


def element(path: Path, body: memoryview, at: int, order: str) -> Element:
    """The element that begins at this byte; a small one has kind and size in four bytes, and is in the next four"""
    if at + 8 > len(body):
        raise DataError(f"{path}: damaged: an array ends within its header")
    kind, size = struct.unpack_from(f"{order}2I", body, at)
    start = at + 8
    if kind >> 16:
        kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
    end = start + size
    if end > len(body) or (start == at + 4 and size > 4):
        raise DataError(f"{path}: damaged: an element of an array says it has {size:,} bytes, and there are fewer")
    return Element(kind, body[start:end], at + 8 if start == at + 4 else start + -(-size // 8) * 8)


def array_of(path: Path, body: memoryview, order: str, most: int) -> tuple[str, np.ndarray]:
    """Name and values: images as [N, 3, 32, 32], labels as [N]"""
    flags = element(path, body, 0, order)
    sizes = element(path, body, flags.end, order)
    name = element(path, body, sizes.end, order)
    values = element(path, body, name.end, order)
    called = bytes(name.body[:40]).decode("latin-1")
    if sizes.kind != 5 or len(sizes.body) % 4 or len(sizes.body) > 128 or values.kind not in DTYPES:
        raise DataError(f"{path}: {called!r} is not an array of numbers")
    shape = struct.unpack(f"{order}{len(sizes.body) // 4}i", sizes.body)
    dtype = np.dtype(order + DTYPES[values.kind])
    if called == "X":
        number = shape[-1] if shape[:-1] == (32, 32, 3) else 1 if shape == (32, 32, 3) else 0
        if not 1 <= number <= most or values.kind != BYTES or len(values.body) != PIXELS * number:
            raise DataError(
                f"{path}: expected X of bytes, 32 x 32 x 3 x N with N from 1 to {most:,}; its header says"
                f" {' x '.join(map(str, shape))}, and {len(values.body):,} bytes of {dtype.name}"
            )
        return called, np.frombuffer(values.body, np.uint8).reshape(number, 3, 32, 32).swapaxes(2, 3).copy()
    number = max(shape, default=0)
    if called == "y" and (sorted(shape) != [1, number] or len(values.body) != number * dtype.itemsize):
        raise DataError(
            f"{path}: expected y of N x 1 labels; its header says {' x '.join(map(str, shape))}, and"
            f" {len(values.body):,} bytes"
        )
    return called, np.frombuffer(values.body, dtype) if called == "y" else np.empty(0)
