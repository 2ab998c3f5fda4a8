"""USPS: text files of LIBSVM's collection, plain or .bz2.

A line is a label from 1 (digit 0) to 10 (digit 9), and 16 x 16 pixels as number:value, from -1 to 1; one that is not
there is 0. They become bytes: -1 is 0, 1 is 255, rounded.
"""

from __future__ import annotations

import bz2
import io
from pathlib import Path
from typing import Any, cast

import numpy as np

from fastagg.sim.datasets import Arrays, DataError

LINE = 8192  # bytes of a line, on average, at most: 256 pixels of 14 or fewer characters are half of that


def read_usps(path: Path, most: int) -> Arrays:
    try:
        from sklearn.datasets import load_svmlight_file
    except ImportError as error:
        raise DataError("USPS is read by scikit-learn: pip install '.[sim]' in a clone of fastagg") from error
    try:
        with open(path, "rb") as raw:
            packed = raw.read(3) == b"BZh"
        with bz2.open(path) if packed else open(path, "rb") as file:
            text = file.read(LINE * most + 1)
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read, or is damaged: {error or type(error).__name__}") from error
    if len(text) > LINE * most:
        raise DataError(f"{path}: expected at most {LINE * most:,} bytes of text, found more")
    try:
        loaded = cast(Any, load_svmlight_file)(io.BytesIO(text), n_features=256, zero_based=False)
    except (ValueError, OverflowError) as error:  # UnicodeDecodeError is a ValueError
        raise DataError(f"{path}: expected lines of a label and number:value, number from 1 to 256: {error}") from error
    sparse, y = loaded[0], loaded[1]
    if not 1 <= len(y) <= most:
        raise DataError(f"{path}: expected 1 to {most:,} lines, found {len(y):,}")
    for i in np.flatnonzero(~np.isin(y, np.arange(1, 11)))[:1]:
        raise DataError(f"{path}: expected labels from 1 to 10, found {y[i]:g} in sample {i}")
    x = sparse.toarray()
    for i in np.flatnonzero(~(np.abs(x) <= 1).all(1))[:1]:  # not ~: NaN is not less
        raise DataError(f"{path}: expected pixels from -1 to 1, found others in sample {i}")
    pixels = np.rint((x + 1) * 127.5).astype(np.uint8)
    return pixels.reshape(-1, 1, 16, 16), (y - 1).astype(np.uint8)
