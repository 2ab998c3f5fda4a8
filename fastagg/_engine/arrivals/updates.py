"""Clients that sent updates, d_k = w_k - g, in the place of models: aggregated as they are, without a copy of g + d_k.

The table's clients are the updates, and its global model is the model. The kernels subtract a centre from what they
read, so they get zeros for one, and g as one more client, the last. A Gram of these rows is that of a round of models,
with more digits than w_k - g has. A mix is sum_k a_k d_k + (sum_k a_k) g, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastagg._engine import kernels, ranks
from fastagg._engine.access import Access
from fastagg._engine.arrivals.forms import zero_bytes
from fastagg._engine.backends.reference import integer_rank
from fastagg._engine.checks import InputError
from fastagg._engine.cohort import SERVER
from fastagg._engine.forked import one_thread
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result, Results
from fastagg._engine.table import Out, StateDict, Table
from fastagg._engine.unformed import UnformedGram

if TYPE_CHECKING:
    from fastagg._engine.aggregator import Aggregator

WRAPPING = (torch.uint8, torch.int8, torch.int16, torch.int32)  # a difference may be too large: another order than w's
RANKED = 1 << 18  # elements of all clients at a time of which models are made to rank them


class OfUpdates:
    """Updates wherever another access reads models"""

    def __init__(self, inner: Access) -> None:
        self.inner, self.pass_cost = inner, inner.pass_cost

    def together(self) -> AbstractContextManager[None]:
        return self.inner.together()

    def why_not(self, method: Aggregator, inputs: Mapping[str, Any]) -> str:
        return self.inner.why_not(method, inputs)

    def build(self, global_sd: StateDict | None, client_sds: Sequence[StateDict | InputError], **options: Any) -> Table:
        table = replace(self.inner.build(global_sd, client_sds, **options), updates=True)
        self._base, self._base_address = table.global_model, table.center_address
        sizes = [t.nbytes for t in self._base]
        zeros = zero_bytes(max(sizes, default=0), table.device)
        self._zeros = [zeros[:n].view(t.dtype).view(t.shape) for n, t in zip(sizes, self._base, strict=True)]
        self._zeros_address = np.array([t.data_ptr() for t in self._zeros], dtype=np.int64)
        return table

    def any(self, flag: bool) -> bool:
        return self.inner.any(flag)

    def refuse(self, table: Table, clients: Sequence[int], words: str) -> None:
        self.inner.refuse(table, clients, words)

    def deliver(self, result: Result | Results) -> None:
        self.inner.deliver(result)

    def gram(self, table: Table, layerwise: bool) -> Gram:
        rows = self._rows(table)
        return self._of_models(rows, self.inner.gram(rows, layerwise), layerwise)

    def mix(self, table: Table, weights: np.ndarray, row: np.ndarray, out: Out, blame: Table) -> list[Result]:
        rows = self._rows(table)
        results = self.inner.mix(rows, self._with_base(table, weights), row, out, self._clients_of(blame))
        return self._with_integers(table, results)

    def gram_mix(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out
    ) -> tuple[Gram, list[Result]]:
        rows = self._rows(table)
        gram, results = self.inner.gram_mix(rows, layerwise, self._with_base(table, weights), row, out)
        return self._of_models(rows, gram, layerwise), self._with_integers(table, results)

    def gram_times(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out = None, *, mix: bool = False
    ) -> tuple[UnformedGram, list[Result]]:
        """A second read for the models: products with g as well as with the updates would not tell them apart"""
        rows = self._rows(table)
        K, base = table.K, np.zeros((*weights.shape[:-2], 1, table.K + 1))
        base[..., -1] = 1  # the product with g alone
        weights = np.concatenate([np.concatenate([weights, np.zeros((*weights.shape[:-1], 1))], -1), base], -2)
        found, _ = self.inner.gram_times(rows, layerwise, np.ascontiguousarray(weights), row)
        *products, (_, along) = found.products
        squares = found.on_host.squares
        gram = UnformedGram(
            squares[..., :K].copy(), along[..., :K].copy(), squares[..., K].copy(),
            [(v[..., :K].copy(), product[..., :K].copy()) for v, product in products], found.numel, found.layers,
        )  # fmt: skip
        return gram, self.mix(table, weights[..., :-1, :K], row, out, table) if mix else []

    def ranked_means(
        self, table: Table, means: np.ndarray, row: np.ndarray, out: Out = None, *, into: list[Result] | None = None,
        mixing: np.ndarray | None = None,
    ) -> list[Result]:  # fmt: skip
        """Means by rank of models are those of updates, and g. Except where updates wrap around"""
        wrap = np.array([dtype in WRAPPING for dtype in table.layout.dtypes], dtype=bool)
        kept = np.where(wrap, ranks.SKIPPED, row).astype(np.int32)
        results = self.inner.ranked_means(self._ranked(table), means, kept, out, into=into, mixing=mixing)
        for m, model in enumerate(kernels.tensors_of(table, results)):
            for t in np.flatnonzero(kept >= 0):
                _add(model[t], self._base[t])
            for t in np.flatnonzero(wrap & (row >= 0)):
                low, high, _ = means[row[t], min(m, means.shape[1] - 1)].tolist()
                self._rank_models(table, int(t), integer_rank(low, high, table.K), model[t].view(-1))
        return results

    @one_thread()
    def _rank_models(self, table: Table, t: int, rank: int, out: torch.Tensor) -> None:
        """Values of models made of updates, piece by piece"""
        tensors = [client[t] for client in table.clients]
        are_updates = [client is not table.center and id(client[t]) not in table.bases for client in table.clients]
        mask, base = torch.tensor(are_updates, device=table.device)[:, None], self._base[t].detach().reshape(-1)
        step = max(1, RANKED // table.K)
        for at in range(0, len(base), step):
            values = torch.stack([w.detach().reshape(-1)[at : at + step] for w in tensors])
            values += base[at : at + step] * mask
            out[at : at + step] = values.sort(0).values[rank]

    def wide_updates(
        self, table: Table, weights: np.ndarray, row: np.ndarray, used: np.ndarray
    ) -> dict[int, torch.Tensor]:
        weights = self._with_base(table, weights)
        weights[..., -1] -= 1
        return self.inner.wide_updates(self._rows(table), weights, row, used)

    def _clients_of(self, table: Table) -> Table:
        """The updates alone, compared with zeros, or with the client that is in g's place"""
        last = table.clients[-1] is table.center  # as one more client: see Table.with_center_as_client
        if last:
            table = replace(table, clients=table.clients[:-1], client_address=table.client_address[:, :-1].copy())
        of_client = table.center_address != self._base_address
        center = [c if other else z for c, z, other in zip(table.global_model, self._zeros, of_client, strict=True)]
        address = np.where(of_client, table.center_address, self._zeros_address)
        return replace(table, center=center, center_address=address)

    def _ranked(self, table: Table) -> Table:
        """The updates, and where g is one more client, what is its update: zeros, and its bools as they are"""
        clients = self._clients_of(table)
        if clients.K == table.K:
            return clients
        own = [g if g.dtype == torch.bool else z for g, z in zip(self._base, self._zeros, strict=True)]
        address = np.array([t.data_ptr() for t in own], dtype=np.int64)
        address = np.concatenate([clients.client_address, address[:, None]], axis=1)
        return replace(clients, clients=[*clients.clients, own], client_address=address)

    def _rows(self, table: Table) -> Table:
        """The updates, and g as the last of them"""
        table = self._clients_of(table)
        positions = range(table.K) if table.positions is None else table.positions[: table.K]
        address = np.concatenate([table.client_address, self._base_address[:, None]], axis=1)
        return replace(
            table, clients=[*table.clients, self._base], client_address=address, positions=[*positions, SERVER]
        )

    def _with_base(self, table: Table, weights: np.ndarray) -> np.ndarray:
        """Weights of the updates and of g, from those of models, of which the last may be g"""
        K = table.K - (table.clients[-1] is table.center)
        return np.ascontiguousarray(np.concatenate([weights[..., :K], weights.sum(-1, keepdims=True)], -1))

    def _of_models(self, rows: Table, gram: Gram, layerwise: bool) -> Gram:
        """The Gram of g and the updates, from that of zeros, the updates and g"""
        order = [rows.K, *range(1, rows.K)]
        return kernels.formed(rows, layerwise, gram.matrix[..., order, :][..., order].reshape(-1, rows.K, rows.K))

    def _with_integers(self, table: Table, results: list[Result]) -> list[Result]:
        """Integers as a mix has them, the largest of the clients'"""
        integers = ranks.integers(table.layout)
        if integers.any():
            self.ranked_means(table, ranks.means(ranks.maximum(table.K)), ranks.only(integers), into=results)
        return results


def update_of(model: Sequence[torch.Tensor], base: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """w - g, of the model's own dtypes; bools as they are"""
    return [w.clone() if w.dtype == torch.bool else w.detach() - g.detach() for w, g in zip(model, base, strict=True)]


def model_of(update: Sequence[torch.Tensor], base: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """g + d, of the global model's dtypes; bools as they are"""
    return [_add(d.detach().to(g.dtype, copy=True), g) for d, g in zip(update, base, strict=True)]


@one_thread()
def _add(tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.bool else tensor.add_(base.detach())
