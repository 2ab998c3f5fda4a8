"""The definition of every kernel, in plain torch with float64 accumulation. Slow, short, and right on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def ranked_means(
    table: Table, means: np.ndarray, row: np.ndarray, out: list[list[torch.Tensor]],
    not_finite: torch.Tensor | None = None, mixing: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Means of the clients' values by their rank, element by element. With s_0 <= ... <= s_{K-1} the values of an
    element, means[row[t], m] = (low, high, nearest) stands for

        c = mean of s_low .. s_{high-1}, or the global model's element where low is high
        nearest > 0: the mean of that many values nearest to c, of two equally near ones the lower

    rounded once; a zero is +0. Of integers it is s_((low + high - 1) // 2), with the global model's element as c the
    lower median. Tensors with row[t] < 0 are left alone.

    mixing [R, K], if given: the values of an element are those of R models sum_k mixing[r, k] w_k + (1 - sum_k
    mixing[r, k]) g, in float64; integers are the clients' own all the same.

    not_finite [T] uint8, if given, is set to 1 where a client has a NaN or an infinity in that tensor.
    """
    for t in np.flatnonzero(row >= 0):
        clients = [client[t] for client in table.clients]
        stats = means[row[t]].tolist()  # [M][3]
        if table.layout.dtypes[t] not in FLOATING:
            values = torch.stack([x.view(torch.uint8) if x.dtype == torch.bool else x for x in clients]).sort(0).values
            for target, (low, high, _) in zip(out, stats, strict=True):
                target[t].copy_(values[integer_rank(low, high, table.K)])
            continue
        center = clients[0] if table.center is None else table.center[t]
        at = 0
        for g, w in _chunks(center, clients):
            if not_finite is not None and not bool(torch.isfinite(w).all()):
                not_finite[t] = 1
            values = (w if mixing is None else _mixed(mixing, g, w)).sort(0).values  # [R, n]
            for target, (low, high, nearest) in zip(out, stats, strict=True):
                target[t].view(-1)[at : at + w.shape[1]] = _ranked_mean(values, g, low, high, nearest).to(target[t])
            at += w.shape[1]


def integer_rank(low: int, high: int, K: int) -> int:
    return (low + high - 1) // 2 if high > low else (K - 1) // 2


def _mixed(mixing: np.ndarray, g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[R, n], each added up client by client, the global model last where it has a part"""
    rows = []
    for weights in mixing.tolist():
        total = torch.zeros_like(w[0])
        for weight, values in zip(weights, w, strict=True):
            total = total + weight * values
        rest = 1 - float(np.sum(weights))
        rows.append(total + rest * g if rest else total)
    return torch.stack(rows)


def _ranked_mean(s: torch.Tensor, g: torch.Tensor, low: int, high: int, nearest: int) -> torch.Tensor:
    center = _mean_in_order(s[low:high]) if high > low else g
    if nearest:
        # The nearest are neighbours in s. The lowest `nearest` are it, unless the next above is nearer than the lowest
        # of them, which then moves to that one's place; and so on.
        chosen = list(s[:nearest])
        for a in range(len(s) - nearest):
            moves = s[a] / 2 + s[a + nearest] / 2 < center
            chosen[a % nearest] = torch.where(moves, s[a + nearest], chosen[a % nearest])
        center = _mean_in_order(chosen)
    return center + 0.0


def _mean_in_order(values: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    total, scaled = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for value in values:
        total, scaled = total + value, scaled + value / len(values)
    mean = total / len(values)
    largest = torch.finfo(torch.float64).max  # which the mean must not pass by a rounding
    return torch.where(torch.isfinite(mean), mean, scaled.clamp(-largest, largest))  # values near the end of float64
