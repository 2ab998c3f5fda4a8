"""Readers of official files, each for one format; fastagg.sim.data names the data sets.

files.py     where the files of a data set are, and what they are called
idx.py       MNIST, Fashion-MNIST
cifar.py     CIFAR-10, CIFAR-100
matlab.py    SVHN, SYN digits
libsvm.py    USPS
folders.py   Tiny-ImageNet
news.py      AG News and other text in CSV files

A header is believed only after the size of the file agreed with it, and no file may hold more than the official one: a
wrong, truncated or malicious file costs an error message, not memory. Nothing is ever unpickled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np


class DataError(ValueError):
    """A data set that cannot be found or read; the message says which file, and what to do."""


Arrays = tuple[np.ndarray, np.ndarray]  # pixels [N, C, H, W] uint8 or words [N, length] int64; labels [N]


def checked(path: Path, labels: np.ndarray, classes: int, what: str = "label") -> np.ndarray:
    for i in np.flatnonzero(labels >= classes)[:1]:
        raise DataError(f"{path}: expected {what}s from 0 to {classes - 1}, found {labels[i]} at entry {i}")
    return labels
