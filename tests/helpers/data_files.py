"""Small data sets in the files of MNIST and CIFAR."""

from __future__ import annotations

import gzip
import struct

import numpy as np

TRAIN, TEST = 30, 12


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"{part}-{what}": rng.integers(0, high, shape, np.uint8)
        for part, n in (("train", TRAIN), ("t10k", TEST))
        for what, high, shape in (("images", 256, (n, 28, 28)), ("labels", 10, n))
    }


def write_idx(folder, sep="-", packed=False):
    folder.mkdir(parents=True, exist_ok=True)
    arrays = idx_arrays()
    for what, array in arrays.items():
        raw = idx(array)
        name = f"{what}{sep}idx{array.ndim}-ubyte" + (".gz" if packed else "")
        (folder / name).write_bytes(gzip.compress(raw) if packed else raw)
    return arrays


def write_cifar(folder, classes=10, each=6):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    names = (
        [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
        if classes == 10
        else ["train.bin", "test.bin"]
    )
    records = {}
    for name in names:
        labels = rng.integers(0, classes, (each, 1), np.uint8)
        if classes == 100:
            labels = np.hstack([rng.integers(0, 20, (each, 1), np.uint8), labels])
        records[name] = np.hstack([labels, rng.integers(0, 256, (each, 3072), np.uint8)])
        (folder / name).write_bytes(records[name].tobytes())
    return list(records.values())
