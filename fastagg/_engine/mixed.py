"""The clients of a round after stages have mixed them (stages.py): what a method with the option `pre` sees.

It has a row for each client, or for each bucket of clients. None of them is a model that exists: their Gram follows
from the clients', and what the method decides about rows is carried out on the clients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from fastagg._engine import stages
from fastagg._engine.cohort import Cohort
from fastagg._engine.describe import ClientValue
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result
from fastagg._engine.stages import Stage
from fastagg._engine.weights import Weights


class MixedCohort(Cohort):
    """R rows that stages have made of K clients. A row has its client's id and share of the data; a bucket the number
    of the bucket, and the sum of its clients' shares.

    turn   rounds before this one: buckets are others in each
    """

    def __init__(self, clients: Cohort, chain: Sequence[Stage], turn: int) -> None:
        self._clients, self._chain, self._turn = clients, chain, turn
        self._row_of = stages.rows_of(chain, clients.K, turn)
        ids = list(range(self.K)) if stages.make_buckets(chain) else clients.ids
        shares = np.bincount(self._row_of, clients.shares)
        super().__init__(clients.table, shares, ids, clients.access, clients.state, clients.out)
        self._made: np.ndarray | None = None

    @property
    def K(self) -> int:
        return int(self._row_of.max()) + 1

    def gram(self, layerwise: bool = False, *, times: np.ndarray | None = None) -> Gram:
        if layerwise not in self._grams:
            gram = self._clients.gram(layerwise)
            self._grams[layerwise] = stages.transformed(gram, self._matrix(gram.K))
        return self._grams[layerwise]

    def distance_gram(self, layerwise: bool = False, *, times: np.ndarray | None = None) -> Gram:
        gram = self.gram(layerwise)
        if not stages.sums_to_one(self._matrix(self.table.K)):
            return gram  # lengths count, not only distances
        near = self._clients.distance_gram(layerwise)
        if near is self._clients.gram(layerwise):
            return gram
        if layerwise not in self._distance_grams:
            self._distance_grams[layerwise] = stages.transformed(near, self._matrix(near.K))
        return self._distance_grams[layerwise]

    def known_gram(self, layerwise: bool) -> Gram | None:
        return self._clients.known_gram(layerwise)

    def add_model(self, tensors: Sequence[torch.Tensor], not_finite: str) -> None:
        self._clients.add_model(tensors, not_finite)
        self._grams.clear()

    def mix(self, weights: Weights, *, several: bool = False, fresh: bool = False) -> list[Result]:
        return self._clients.mix(self._of_clients(weights), several=several, fresh=fresh)

    def wide_updates(self, weights: Weights) -> dict[int, torch.Tensor]:
        return self._clients.wide_updates(self._of_clients(weights))

    def of_clients(self, values: np.ndarray) -> np.ndarray:
        return values[..., : self.K] @ self._matrix(self.table.K)

    def spread(self, result: Result, client_values: Sequence[ClientValue]) -> None:
        """What a result says of each row, for each client: that of its row"""
        for about in client_values:
            value = getattr(result, about.name, None)
            if value is not None and stages.make_buckets(self._chain):
                given = about.tensor(value)
                setattr(result, about.name, given.index_select(about.axis, torch.from_numpy(self._row_of)))

    def close(self) -> None:
        self._clients.close()

    def _of_clients(self, weights: Weights) -> Weights:
        more = weights.values.shape[-1] - self.K  # models of the server's own
        if more < 0:
            raise ValueError(
                f"the method's weights have shape {weights.values.shape}, expected {self.K} in the last dimension"
            )
        weights = weights.mixed(self._matrix(self.table.K + more))
        known = self._clients.known_gram(weights.values.ndim == 2) is not None
        return dataclasses.replace(weights, with_gram=weights.with_gram and not known)

    def _matrix(self, columns: int) -> np.ndarray:
        """[R, K]; models of the server's own, behind the clients, stay as they are, in further rows and columns"""
        if self._made is None:
            self._made = stages.matrix_of(self._chain, self.table.K, self._turn, *self._grams_of_clients())
        more = columns - self.table.K
        if not more:
            return self._made
        return np.block([[self._made, np.zeros((self.K, more))], [np.zeros((more, self.table.K)), np.eye(more)]])

    def _grams_of_clients(self) -> tuple[Gram | None, Gram | None]:
        """The whole model's, for stages: as it is, and to read distances from"""
        if not stages.read_gram(self._chain):
            return None, None
        # whose sum it is, without another read; but of clients that hold only a part
        layerwise = self._clients.known_gram(True) is not None and self.table.has is None
        gram = self._clients.gram(layerwise)
        near = self._clients.distance_gram(layerwise) if stages.compare_pairs(self._chain) else gram
        return gram.model().part(range(self.table.K)), near.model().part(range(self.table.K))
