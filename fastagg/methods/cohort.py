"""The clients of one round, as a method sees them: in the order of their ids, those left out that were not finite.

A method never knows in which order the caller gave them, so the same clients in another order give the same bits;
`restore` puts what it found back into the caller's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastagg import core, finite
from fastagg.access import Memory
from fastagg.gram import Gram
from fastagg.result import Result, Results
from fastagg.table import InputError, Table


class Cohort:
    """The clients of one round: their table, data shares and ids. The Gram is computed when first asked for."""

    def __init__(
        self, table: Table, n: np.ndarray, ids: list[Any], access: Memory | None = None, memory: Any = None
    ) -> None:
        self.table, self.n, self.ids, self.access = table, n, ids, access or Memory()
        self.memory = memory  # the method's, from the rounds before; a method assigns what it wants to keep
        self._grams: dict[bool, Gram] = {}

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
        if not with_gram:
            return self.access.mix(table, w, row, out, self.table)
        self._grams[layerwise], results = self.access.gram_mix(table, layerwise, w, row, out)
        return results

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
        return self.access.mix(self.table, weights, row, out, self.table)


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
