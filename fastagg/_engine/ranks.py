"""Means of the clients' values by their rank, element by element: what to ask of the kernel ranked_means."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastagg._engine.dtypes import FLOATING
from fastagg._engine.table import Layout

SKIPPED = -1  # the row of tensors that are left alone


class RankedMean(NamedTuple):
    """Of an element's values s_0 <= ... <= s_{K-1}: c, the mean of s_low .. s_{high-1}, or the global model's where low
    is high; with nearest > 0, the mean of that many values nearest to c"""

    low: int
    high: int
    nearest: int = 0

    def around(self, nearest: int) -> RankedMean:
        """The mean of that many values nearest to this one"""
        return self._replace(nearest=nearest)


def median(K: int) -> RankedMean:
    """The middle value, or the mean of the middle two"""
    return RankedMean((K - 1) // 2, K // 2 + 1)


def trimmed(K: int, f: int) -> RankedMean:
    """The mean without the f lowest and the f highest values"""
    return RankedMean(f, K - f)


def maximum(K: int) -> RankedMean:
    return RankedMean(K - 1, K)


def means(*rows: RankedMean) -> np.ndarray:
    """[S, 1, 3], for the kernel"""
    return np.array(rows, dtype=np.int64)[:, None]


def integers(layout: Layout) -> np.ndarray:
    """Which tensors are not of floating-point numbers: [T] bool"""
    return np.array([dtype not in FLOATING for dtype in layout.dtypes], dtype=bool)


def only(used: np.ndarray) -> np.ndarray:
    """Row 0 for the tensors used, [T] bool: [T]"""
    return np.where(used, 0, SKIPPED).astype(np.int32)
