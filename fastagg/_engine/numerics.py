"""Small float64 arithmetic that methods share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastagg._engine.checks import InputError


def float64(values: Any) -> np.ndarray:
    """A tensor, array or list as a float64 array of its own (torch would read a list as float32)"""
    if isinstance(values, torch.Tensor):
        if values.is_complex():
            raise InputError(f"expected real numbers, got {values.dtype}")
        return values.detach().to("cpu", torch.float64, copy=True).numpy()
    return np.array(values, dtype=np.float64)


def ratio(a: Any, b: Any) -> Any:
    """a / b, and 0 where b is 0"""
    zero = b == 0
    return np.where(zero, 0.0, a / (b + zero))


def shares(x: np.ndarray) -> np.ndarray:
    """Numbers >= 0 over their sum, along the last dimension; over the largest first, or huge ones would overflow"""
    x = ratio(x, x.max(-1, keepdims=True))
    return ratio(x, x.sum(-1, keepdims=True))
