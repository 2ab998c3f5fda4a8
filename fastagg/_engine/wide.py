"""The weighted mean of the client updates, in more digits than 16-bit models have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastagg._engine.forked import one_thread
from fastagg._engine.table import Table

CHUNK = 1 << 18  # elements that are summed up in float64 at a time: 2 MB; a quarter of that takes 1.3 times as long


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a server keeps about tensors of this dtype: float64 for float64, else float32"""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_update(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=wide_dtype(like.dtype), device=like.device)


def updates(table: Table, weights: np.ndarray, row: np.ndarray, used: np.ndarray) -> dict[int, Tensor]:
    """sum_k weights[row[t], k] w_k - g of the tensors used [T], by tensor: weights are [S, K]"""
    found = {t: empty_update(table.global_model[t]) for t in np.flatnonzero(used).tolist()}
    for t, update in found.items():
        g, *clients = (model[t].detach().reshape(-1) for model in (table.global_model, *table.clients))
        weighted_update(g, clients, weights[row[t]], update.view(-1))
    return found


@one_thread()
def weighted_update(g: Tensor, clients: Sequence[Tensor], weights: np.ndarray, out: Tensor) -> None:
    """out = sum_k weights_k w_k - g of flat tensors, in float64 and rounded once to out's dtype.

    The kernels round to the models' dtype, so bfloat16 would be left with 8 bits of an update. Clients are added one by
    one: the temporary memory does not grow with their number, and the bits do not depend on threads.
    """
    for at in range(0, g.numel(), CHUNK):
        piece = slice(at, at + CHUNK)
        total = _float64(g[piece]).neg_()
        for w, weight in zip(clients, weights.tolist(), strict=True):
            total.add_(_float64(w[piece]), alpha=weight)
        out[piece] = total


@one_thread()
def largest_update(g: Tensor, w: Tensor) -> float:
    """The largest element of |w - g|"""
    g, w = g.detach().reshape(-1), w.detach().reshape(-1)
    parts = range(0, g.numel(), CHUNK)
    return max((float((_float64(w[at : at + CHUNK]) - _float64(g[at : at + CHUNK])).abs().max()) for at in parts),
               default=0.0)  # fmt: skip


def _float64(x: Tensor) -> Tensor:
    """A copy. Apple's GPUs have no float64."""
    return x.to("cpu" if x.device.type == "mps" else x.device, torch.float64, copy=True)
