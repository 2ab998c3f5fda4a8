"""CIFAR-10 and CIFAR-100: the binary version."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from fastagg.sim.datasets import Arrays, DataError, checked


def read_cifar(paths: list[Path], classes: int, most: int) -> Arrays:
    """Records of one label byte (CIFAR-100: the coarse and the fine one) and 3 x 32 x 32 bytes of pixels"""
    head = 1 if classes == 10 else 2
    record = head + 3072
    sizes = []
    for path in paths:
        try:
            size = os.path.getsize(path)
            with open(path, "rb") as file:
                pickled = file.read(1) == b"\x80"
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        if size % record or not 1 <= size // record <= most:
            raise DataError(
                f"{path}: expected 1 to {most:,} records of {record} bytes ({most * record:,} bytes in the official"
                f" file), found {size:,} bytes" + (", which begin like a pickle" if pickled else "")
            )
        sizes.append(size // record)
    pixels, labels = np.empty((sum(sizes), 3072), np.uint8), np.empty(sum(sizes), np.uint8)
    end = 0
    for path, number in zip(paths, sizes, strict=True):
        try:
            records = np.fromfile(path, np.uint8, number * record).reshape(number, record)
        except (OSError, ValueError) as error:  # it became shorter meanwhile
            raise DataError(f"{path}: cannot be read: {error}") from error
        if head == 2:
            checked(path, records[:, 0], 20, "coarse label")
        labels[end : end + number] = checked(path, records[:, head - 1], classes)
        pixels[end : end + number] = records[:, head:]
        end += number
    return pixels.reshape(-1, 3, 32, 32), labels
