"""The clients of one round, as a method sees them: in the order of their ids, those left out that were not finite.

A method never knows in which order the caller gave them, so the same clients in another order give the same bits;
`restore` puts what it found back into the caller's order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastagg._engine import core, finite
from fastagg._engine.access import Memory
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result, Results
from fastagg._engine.table import InputError, Table


class Cohort:
    """The clients of one round: their table, data shares and ids. The Gram is computed when first asked for."""

    def __init__(
        self, table: Table, n: np.ndarray, ids: list[Any], access: Memory | None = None, memory: Any = None
    ) -> None:
        self.table, self.n, self.ids, self.access = table, n, ids, access or Memory()
        self.memory = memory  # the method's, from the rounds before; a method assigns what it wants to keep
        self._grams: dict[bool, Gram] = {}
        self._distance_grams: dict[bool, Gram] = {}

    @property
    def K(self) -> int:
        return self.table.K

    def part(self, order: Sequence[int]) -> Cohort:
        """Some of the clients, with the shares they have here"""
        return Cohort(self.table.part(order), self.n[order], [self.ids[k] for k in order], self.access)

    def gram(self, layerwise: bool = False) -> Gram:
        """One read of the clients, the first time"""
        if layerwise not in self._grams:
            self._grams[layerwise] = self.access.gram(self.table, layerwise)
        return self._grams[layerwise]

    def distance_gram(self, layerwise: bool = False) -> Gram:
        """The Gram to read distances between clients from: the same, or where clients are so much nearer to each other
        than to the global model that these have no digits left in it, one that is centred on a client.

        Costs no read in the first case and one in the second; two if the first client was chosen badly, as attackers
        near the others can bring about.
        """
        if layerwise not in self._distance_grams:
            gram, table = self.gram(layerwise), self.table
            epsilon = 2.0**-23 if self.access.any(not _all_float64(table)) else 2.0**-52
            for _ in range(2):
                client = gram.clients_in_the_middle(epsilon)  # [1] or [L]
                lost = client >= 0
                if not lost.any():
                    break
                table = _centred(table, client[core.rows(table, layerwise)])
                again = self.access.gram(_only(table, lost) if layerwise else table, layerwise)
                gram = _with_layers(gram, again, lost) if layerwise else again
            self._distance_grams[layerwise] = gram
        return self._distance_grams[layerwise]

    def mix(
        self, weights: np.ndarray, *, layerwise: bool = False, buffers: np.ndarray | None = None,
        center: np.ndarray | float | None = None, out=None, with_gram: bool = False,
    ) -> list[Result]:  # fmt: skip
        """sum_k weights_k w_k + center g, in one read: M models for weights [M, K], or [L, M, K] with layerwise.

        buffers    other weights for what is not a parameter (BatchNorm's statistics), in the same form
        center     how much of the global model is added to each, [M] or [L, M]: zero for a mean of the clients
        with_gram  the Gram in the same read, for weights that did not need it
        """
        table = self.table
        w = np.atleast_2d(np.asarray(weights, dtype=np.float64))  # [.., M, K]
        b = w if buffers is None else np.broadcast_to(np.asarray(buffers, dtype=np.float64), w.shape)
        if center is not None:
            table = table.with_center_as_client()
            w = np.concatenate([w, np.broadcast_to(center, w.shape[:-1])[..., None]], axis=-1)
            b = np.concatenate([b, np.zeros(b.shape[:-1])[..., None]], axis=-1)
            b = w if buffers is None else b
        self._check_weights(w, b)
        w, b = (np.ascontiguousarray(x if layerwise else x[None]) for x in (w, b))  # [L or 1, M, K]
        row = core.rows(table, layerwise)
        if b is not w and not np.array_equal(b, w):
            is_buffer = (~table.layout.is_param).astype(np.int32)
            w, row = np.concatenate([w, b]), row + is_buffer * np.int32(len(w))
        if with_gram:
            self._grams[layerwise], results = self.access.gram_mix(table, layerwise, w, row, out)
        else:
            results = self.access.mix(table, w, row, out, self.table)
        return self._without_data(table, results)

    def _check_weights(self, *weights: np.ndarray) -> None:
        if all(np.isfinite(w).all() for w in weights):
            return
        lengths = [gram.model().norms().cpu().numpy() for gram in self._grams.values()]
        far = finite.dominant(lengths[0]) if lengths else []
        words = "the clients' weights are not finite: products of the models' squares are beyond float64"
        raise finite.too_large(self.table, far, words)

    def mix_rows(self, weights: np.ndarray, row: np.ndarray, out=None) -> list[Result]:
        """Models for weights [S, M, K], of which tensor t takes weights[row[t]]"""
        self._check_weights(weights)
        return self._without_data(self.table, self.access.mix(self.table, weights, row, out, self.table))

    def take_medians(self, result: Result) -> None:
        """Replaces what is not a parameter, in place, by its coordinate-wise median over all clients.

        Fewer than half of them cannot move it out of the range of the others. All of it is looked at: a client with a
        value that is not finite is named.
        """
        self.access.combine(self.table, "median", [result])

    def _without_data(self, table: Table, results: list[Result]) -> list[Result]:
        """Integers, of which a mix takes the maximum, as if the clients without data had not been there"""
        have = np.flatnonzero(self.n > 0)
        if 0 < len(have) < self.K:
            rest = range(self.K, table.K)  # the global model, where it was mixed in
            table = dataclasses.replace(table, positions=None)  # it has none for the global model
            self.access.combine(table.part([*have, *rest]), "maximum", results)
        return results


def _centred(table: Table, client: np.ndarray) -> Table:
    """The table with a client's tensors in the place of the global model's, client[t] of tensor t; -1: as it is"""
    address = np.concatenate([table.client_address, table.center_address[:, None]], axis=1)  # [T, K + 1]
    models = [*table.clients, table.center]
    return dataclasses.replace(
        table,
        center=[models[k][t] for t, k in enumerate(client)],
        center_address=np.ascontiguousarray(address[np.arange(table.T), client]),
    )


def _only(table: Table, layers: np.ndarray) -> Table:
    """The table with a Gram of some of its layers only, [L] bool; the others are not read"""
    layout = table.layout
    gram_layer = np.where((layout.gram_layer >= 0) & layers[layout.layer], layout.gram_layer, -1).astype(np.int32)
    return dataclasses.replace(table, layout=dataclasses.replace(layout, gram_layer=gram_layer))


def _with_layers(gram: Gram, other: Gram, layers: np.ndarray) -> Gram:
    """A layer-wise Gram with some layers, [L] bool, of another"""
    chosen = torch.from_numpy(layers).to(gram.matrix.device)[:, None, None]
    return Gram(torch.where(chosen, other.matrix, gram.matrix), gram.numel, gram.layers)


def _all_float64(table: Table) -> bool:
    """The Gram's products are computed in float64, not in float32"""
    return all(table.layout.dtypes[t] == torch.float64 for t in np.flatnonzero(table.layout.gram_layer >= 0))


def by_id(ids: list[Any]) -> list[int]:
    """Positions in the order of the ids: numbers, then strings"""
    return sorted(range(len(ids)), key=lambda k: (isinstance(ids[k], str), ids[k]))


def pick(name: str, values: Any, order: Sequence[int], K: int, axis: int) -> Any:
    """Round info about the clients (an entry along `axis` for each of the K given) for some, in this order"""
    if values is None or (len(order) == K and list(order) == list(range(K))):
        return values
    values = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if values.ndim == 0 or values.shape[axis] != K:
        raise InputError(f"{name} have shape {values.shape}, expected one for each of the {K} clients")
    return np.take(values, order, axis)


# What a result says of its clients: the axis they are along, and what stands there for one that was left out
ABOUT_CLIENTS = {
    "weights": (-1, 0.0), "mixing": (-1, 0.0), "logits": (-1, np.nan), "angles": (-1, np.nan),
    "discrepancy": (-1, np.nan), "class_dist": (0, np.nan),
}  # fmt: skip


def restore(result: Result | Results, order: Sequence[int], K: int, personal: bool) -> Result | Results:
    """A result of some of K clients, in the order of their ids, as the caller knows them"""
    if list(order) == list(range(K)):
        return result
    if isinstance(result, Results):
        models = [_restore_about(model, order, K) for model in result]
        if personal:
            place = dict(zip(order, models, strict=True))
            models = [place.get(k) for k in range(K)]
        several = Results(models)
        several.__dict__.update(result.__dict__)
        if personal and several.mixing is not None:
            several.mixing = _spread(several.mixing, order, K, several.mixing.dim() - 2, 0.0)
        result = several
    return _restore_about(result, order, K)


def _restore_about(result: Result | Results, order: Sequence[int], K: int) -> Result | Results:
    for name, (axis, missing) in ABOUT_CLIENTS.items():
        value = result.__dict__.get(name)
        if value is not None:
            setattr(result, name, _spread(value, order, K, axis, missing))
    if result.gram is not None:
        result.gram = result.gram.among(K, order)
    return result


def _spread(values: torch.Tensor, order: Sequence[int], K: int, axis: int, missing: float) -> torch.Tensor:
    """What belongs to client order[i] moves from i to order[i]"""
    axis %= values.dim()
    shape = (*values.shape[:axis], K, *values.shape[axis + 1 :])
    out = torch.full(shape, missing, dtype=values.dtype)
    return out.index_copy_(axis, torch.tensor(list(order)), values)
