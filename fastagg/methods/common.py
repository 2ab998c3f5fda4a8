"""What methods share: data shares, and the last step from weights to a state dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastagg.table import InputError, Table


def float64(values: Any) -> np.ndarray:
    """A tensor, array or list as a float64 array of its own (torch would read a list as float32)"""
    if isinstance(values, torch.Tensor):
        if values.is_complex():
            raise InputError(f"expected real numbers, got {values.dtype}")
        return values.detach().to("cpu", torch.float64, copy=True).numpy()
    return np.array(values, dtype=np.float64)


def data_shares(sizes: Sequence[float] | torch.Tensor | None, K: int) -> np.ndarray:
    """n_k, the clients' shares of the data, summing to 1: [K]. None: equal shares."""
    if sizes is None:
        return np.full(K, 1 / K)
    n = float64(sizes)
    if n.shape != (K,):
        raise InputError(f"sizes have shape {n.shape}, expected ({K},): one number per client")
    for k in np.flatnonzero(~np.isfinite(n) | (n < 0)):
        raise InputError(f"sizes: client {k} has size {n[k]}, expected a number >= 0")
    if not n.any():
        raise InputError("sizes sum to zero: no client has data")
    n = n / n.max()  # the sum of huge sizes would overflow
    return n / n.sum()


def check_client_ids(client_ids: Sequence[Any] | None, K: int) -> list[Any]:
    """The clients' identities over rounds; their positions when none are given."""
    if client_ids is None:
        return list(range(K))
    ids = [x.item() if isinstance(x, np.generic | torch.Tensor) else x for x in client_ids]
    if len(ids) != K:
        raise InputError(f"client_ids has {len(ids)} entries for {K} clients")
    seen: dict[Any, int] = {}
    for k, name in enumerate(ids):
        if not isinstance(name, str | int):
            raise InputError(
                f"client_ids: the id of client {k} is a {type(name).__name__}, expected a string or integer"
            )
        if seen.setdefault(name, k) != k:
            raise InputError(f"client_ids: clients {seen[name]} and {k} have the same id {name!r}")
    return ids


def scaled_rows(table: Table, weights: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """weights [K] or [L, K] as mix takes them, [S, 1, K] with each tensor's row [T]: parameters are scaled by gamma,
    buffers are not (a running variance is not a parameter to shrink)."""
    w = weights.reshape(-1, 1, weights.shape[-1])
    row = table.layout.layer if weights.ndim == 2 else np.zeros(table.T, dtype=np.int32)
    if gamma == 1:
        return w, row
    is_buffer = (table.layout.gram_layer < 0).astype(np.int32)
    return np.concatenate([gamma * w, w]), row + is_buffer * np.int32(len(w))
