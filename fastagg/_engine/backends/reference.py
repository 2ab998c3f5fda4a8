"""The definition of every kernel, in plain torch with float64 accumulation. Slow, short, and right on any device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fastagg._engine.dtypes import FLOATING
from fastagg._engine.table import Table

CHUNK = 1 << 18  # elements of one tensor converted to float64 at a time


def why_not(device: torch.device) -> str:
    return ""


def gram(table: Table, layer: np.ndarray, layers: int, per_layer: bool) -> torch.Tensor:
    """Centred Gram of the rows [g, w_1 - g, ..., w_K - g]: [L, K+1, K+1], or [1, K+1, K+1] summed over layers."""
    assert table.center is not None
    out = torch.zeros(layers, table.K + 1, table.K + 1, dtype=torch.float64, device=_device(table))
    for t in np.flatnonzero(layer >= 0):
        for g, w in _chunks(table.center[t], [client[t] for client in table.clients]):
            rows = torch.cat([g[None], w - g])  # [K+1, n]
            out[layer[t]] += rows @ rows.T
    return out if per_layer else out.sum(0, keepdim=True)


def mix(
    table: Table, weights: torch.Tensor, row: np.ndarray, out: list[list[torch.Tensor]],
    not_finite: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """out[m][t] = sum_k weights[row[t], m, k] w_k; the maximum over clients where the dtype is not floating.

    not_finite [T] uint8, if given, is on the table's device and is set to 1 where an output of that tensor has a NaN or
    an infinity. It is not read here: that would be to wait for the device.
    """
    weights = weights.to(_device(table))  # [S, M, K]
    for t in range(table.T):
        clients = [client[t] for client in table.clients]
        if table.layout.dtypes[t] not in FLOATING:
            for target in out:
                target[t].copy_(torch.stack(clients).amax(0))
            continue
        at = 0
        for _, w in _chunks(clients[0], clients):
            for m, target in enumerate(out):
                target[t].view(-1)[at : at + w.shape[1]] = (weights[row[t], m] @ w).to(target[t])
            at += w.shape[1]
        if not_finite is not None:
            for target in out:
                not_finite[t] |= ~torch.isfinite(target[t]).all()


def gram_mix(
    table: Table, layer: np.ndarray, layers: int, per_layer: bool, weights: torch.Tensor, row: np.ndarray,
    out: list[list[torch.Tensor]], not_finite: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    mix(table, weights, row, out, not_finite)
    return gram(table, layer, layers, per_layer)


def gram_times(
    table: Table, layer: np.ndarray, layers: int, per_layer: bool, weights: torch.Tensor, row: np.ndarray,
    out: list[list[torch.Tensor]] | None = None, not_finite: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Products of the Gram with M vectors, without the Gram: for the rows r = [g, w_1 - g, ..., w_K - g] and
    u_m = sum_k weights[row[t], m, k] (w_k - g), the columns <r, r>, <r, g>, <r, u_1>, ..., <r, u_M>. [L, K+1, 2+M], or
    [1, K+1, 2+M] summed over layers. With out, also what mix does with the same weights, in the same read.
    """
    assert table.center is not None
    if out is not None:
        mix(table, weights, row, out, not_finite)
    weights = weights.to(_device(table))  # [S, M, K]
    sums = torch.zeros(layers, table.K + 1, 2 + weights.shape[1], dtype=torch.float64, device=_device(table))
    for t in np.flatnonzero(layer >= 0):
        for g, w in _chunks(table.center[t], [client[t] for client in table.clients]):
            rows = torch.cat([g[None], w - g])  # [K+1, n]
            u = weights[row[t]] @ rows[1:]  # [M, n]
            sums[layer[t], :, 0] += (rows * rows).sum(1)
            sums[layer[t], :, 1:] += rows @ torch.cat([g[None], u]).T
    return sums if per_layer else sums.sum(0, keepdim=True)


def dots(table: Table, left: list[list[torch.Tensor]], row: np.ndarray, rows: int) -> torch.Tensor:
    """out[s, m, k] = sum over tensors t of row s of <left[m][t], w_k>: [S, M, K]"""
    out = torch.zeros(rows, len(left), table.K, dtype=torch.float64, device=_device(table))
    for t in range(table.T):
        if table.layout.dtypes[t] in FLOATING:
            for m, vectors in enumerate(left):
                for v, w in _chunks(vectors[t], [client[t] for client in table.clients]):
                    out[row[t], m] += w @ v
    return out


def _chunks(one: torch.Tensor, many: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """([n], [K, n]) float64 pieces of flattened tensors"""
    for at in range(0, one.numel(), CHUNK):
        pieces = [_f64(x.detach().reshape(-1)[at : at + CHUNK]) for x in (one, *many)]
        yield pieces[0], torch.stack(pieces[1:])


def _f64(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().double() if x.device.type == "mps" else x.double()  # Apple's GPUs have no float64


def _device(table: Table) -> torch.device:
    return torch.device("cpu") if table.device.type == "mps" else table.device
