"""MNIST and Fashion-MNIST: IDX files, plain or compressed."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from fastagg.sim.datasets import Arrays, DataError, checked


def read_idx(path: Path, dims: tuple[int, ...], most: int) -> np.ndarray:
    """An IDX file of unsigned bytes as [N, *dims], plain or compressed, whatever its name says"""
    start = 8 + 4 * len(dims)
    magic = bytes([0, 0, 8, 1 + len(dims)])  # 8: unsigned bytes
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            head = file.read(start)
            if head[:4] != magic:
                kind = "images" if dims else "labels"
                raise DataError(
                    f"{path}: expected an IDX file of {kind}, which begins {show(magic)}, found {show(head)}"
                )
            if len(head) < start:
                raise DataError(f"{path}: truncated: expected a header of {start} bytes, found {len(head)}")
            number, *shape = struct.unpack(f">{1 + len(dims)}I", head[4:])
            if tuple(shape) != dims:
                raise DataError(f"{path}: expected images of {by(dims)} pixels, its header says {by(shape)}")
            if not 1 <= number <= most:
                raise DataError(f"{path}: expected 1 to {most:,} entries, its header says {number:,}")
            expected = number * int(np.prod(dims, dtype=np.int64))
            body = file.read(expected + 1)  # one more than there should be; a gzip file is checked when it ends
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read, or is damaged: {error or type(error).__name__}") from error
    if len(body) != expected:
        found = f"more than {expected:,}" if len(body) > expected else f"{len(body):,}"
        raise DataError(f"{path}: expected {expected:,} bytes after the header, as it says, found {found}")
    return np.frombuffer(body, np.uint8).reshape(number, *dims).copy()


def read_idx_set(paths: list[Path], balanced: bool) -> tuple[Arrays, Arrays]:
    """MNIST or Fashion-MNIST, whose files have the same names: only the second has 6,000 images of every class"""
    sets = []
    for images, labels, most in ((*paths[:2], 60_000), (*paths[2:], 10_000)):
        y = checked(labels, read_idx(labels, (), most), 10)
        x = read_idx(images, (28, 28), most)
        if len(x) != len(y):
            raise DataError(f"{images} has {len(x):,} images, but {labels} has {len(y):,} labels")
        if len(y) == 60_000 and (np.bincount(y).max() == 6000) != balanced:
            wanted, other = ("Fashion-MNIST", "MNIST") if balanced else ("MNIST", "Fashion-MNIST")
            raise DataError(f"{labels}: expected the labels of {wanted}, found others (of {other}?)")
        sets.append((x[:, None], y))
    return sets[0], sets[1]


def show(head: bytes) -> str:
    return head[:4].hex(" ") or "an empty file"


def by(shape: tuple[int, ...] | list[int]) -> str:
    return " x ".join(map(str, shape))
