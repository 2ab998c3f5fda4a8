"""The clients of one round, as a method sees them: in the order of their ids, without those that were left out.

A method never knows in which order the caller gave them, so the same clients in another order give the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fastagg._engine import kernels, nonfinite, partial, ranks
from fastagg._engine import table as tables
from fastagg._engine.access import Access
from fastagg._engine.checks import InputError
from fastagg._engine.gram import Gram
from fastagg._engine.in_memory import InMemory
from fastagg._engine.inputs import bad_clients, data_shares, read_sizes
from fastagg._engine.outputs import check_out
from fastagg._engine.ranks import RankedMean
from fastagg._engine.remembered import check_form
from fastagg._engine.result import Result
from fastagg._engine.table import Out, StateDict, Table, as_tensor
from fastagg._engine.unformed import UnformedGram
from fastagg._engine.weights import Weights

SERVER = -1  # the position of a model among the clients that nobody sent
SQUARES_FIT = 1e70  # norms: a product of two squares of shorter ones is in the range of float64


class Cohort:
    """The clients of one round. The Gram is computed when first asked for.

    ids      of the K clients
    shares   of the data, summing to 1: [K]
    state    what the method remembers of the rounds before. A method assigns a new value, and must not modify the old
             one; the new one is kept once the round is complete.
    table    the models, for methods that look at tensors themselves
    """

    def __init__(
        self, table: Table, shares: np.ndarray, ids: list[Any], access: Access, state: Any = None, out: Out = None,
        *, forms_gram: bool = True,
    ) -> None:  # fmt: skip
        self.table, self.shares, self.ids, self.access, self.state, self.out = table, shares, ids, access, state, out
        self.forms_gram = forms_gram
        self._rows = table  # the clients, and a model of the server's own behind them
        self._not_finite = ""
        self._grams: dict[bool, Gram] = {}
        self._distance_grams: dict[bool, Gram] = {}
        self._opened_grams: list[UnformedGram] = []

    @classmethod
    def of(cls, global_sd: StateDict | None, client_sds: Sequence[StateDict], sizes: Any, out: Out = None) -> Cohort:
        """Clients outside of a round, for functions that methods offer besides"""
        table = tables.build(global_sd, client_sds)
        ids = list(range(table.K))
        amounts, faults = read_sizes(sizes, ids)
        if faults:
            raise bad_clients(faults, ids)
        return cls(table, data_shares(amounts), ids, InMemory(), out=out)

    @property
    def K(self) -> int:
        return self.table.K

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the model's layers"""
        return self.table.layout.layers

    @property
    def positions(self) -> list[int]:
        """Where the clients are among those that the caller gave"""
        return self.table.given(range(self.K))

    def gram(self, layerwise: bool = False, *, times: np.ndarray | None = None) -> Gram:
        """The Gram of the clients: one read, the first time.

        times   the vector that the method multiplies it with first, [K] or [L, K]. A Gram that is not formed computes
                that product in the same read; default: 1/K for each client
        """
        if layerwise not in self._grams:
            self._grams[layerwise] = self._gram_of_rows(layerwise, times)
        return self._grams[layerwise]

    def _gram_of_rows(self, layerwise: bool, times: np.ndarray | None) -> Gram:
        try:
            return self._gram_of(self._rows, layerwise, times)
        except nonfinite.NonFiniteError as error:
            if SERVER not in error.clients:
                raise
            raise InputError(self._not_finite) from error

    def _gram_of(self, table: Table, layerwise: bool, times: np.ndarray | None) -> Gram:
        if table.has is not None:
            return partial.gram(table, layerwise, self.access.gram)
        if self.forms_gram:
            return self.access.gram(table, layerwise)
        gram = self._times(table, layerwise, np.full(table.K, 1 / table.K) if times is None else times)
        return self._opened(gram, table, layerwise)

    def _times(self, table: Table, layerwise: bool, v: np.ndarray) -> UnformedGram:
        """What one read tells of the Gram and its product with v, [K] or [L, K]"""
        weights = np.array(np.atleast_2d(v)[:, None], dtype=np.float64)  # [S, 1, K]
        gram, _ = self.access.gram_times(table, layerwise, weights, kernels.rows(table, len(weights) > 1))
        return gram.unscaled(v, 1.0)  # v itself, which on other ranks may be another in the last bits

    def _opened(self, gram: UnformedGram, table: Table, layerwise: bool) -> UnformedGram:
        """The same Gram, which reads the clients again for products with other vectors"""
        gram.multiply = lambda v: self._times(table, layerwise, v).last_product
        self._opened_grams.append(gram)
        return gram

    def close(self) -> None:
        """Lets go of the clients, which Grams that multiply hold"""
        for gram in self._opened_grams:
            gram.multiply = None

    def known_gram(self, layerwise: bool) -> Gram | None:
        """The Gram of the clients if it has been computed; for the result"""
        gram = self._grams.get(layerwise)
        if isinstance(gram, UnformedGram):
            gram = gram.closed()
        return gram if gram is None or self._rows is self.table else gram.part(range(self.K))

    def distance_gram(self, layerwise: bool = False, *, times: np.ndarray | None = None) -> Gram:
        """The Gram to read distances between clients from: the same, or where clients are so much nearer to each other
        than to the global model that these have no digits left in it, one that is centred on a client.

        Costs no read in the first case and one in the second; two if the first client was chosen badly, as attackers
        near the others can bring about.

        Clients that hold only a part have no such client: lengths from one of them are not of the same tensors.
        """
        if self.table.has is not None:
            return self.gram(layerwise)
        if layerwise not in self._distance_grams:
            gram, table = self.gram(layerwise, times=times), self.table
            epsilon = 2.0**-23 if self.access.any(table.layout.gram_dtypes != {torch.float64}) else 2.0**-52
            for _ in range(2):
                client = gram.clients_in_the_middle(epsilon)  # [1] or [L]
                lost = client >= 0
                if not lost.any():
                    break
                table = _centred(table, client[kernels.rows(table, layerwise)])
                some = _only(table, lost) if layerwise and gram.formed else table
                again = self._gram_of(some, layerwise, times)
                gram = _with_layers(gram, again, lost) if layerwise and gram.formed else again
            self._distance_grams[layerwise] = gram
        return self._distance_grams[layerwise]

    def of_clients(self, values: np.ndarray) -> np.ndarray:
        """Weights of what the method sees, as those of the clients: [.., K]"""
        return values if values.shape[-1] == self.K else values[..., : self.K].copy()

    def add_model(self, tensors: Sequence[torch.Tensor], not_finite: str) -> None:
        """A model of the server's own as one more row, behind the clients, of the Gram and of the weights' values

        not_finite   what to say if it is not finite, or too far away
        """
        self._not_finite = not_finite
        positions = range(self.K) if self.table.positions is None else self.table.positions
        address = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        self._rows = dataclasses.replace(
            self._rows,
            clients=[*self._rows.clients, list(tensors)],
            client_address=np.concatenate([self._rows.client_address, address[:, None]], axis=1),
            positions=[*positions, SERVER],
            has=self._rows.has_and_whole(),
        )
        self._grams.clear()

    def tensors_of(self, model: StateDict, name: str) -> list[torch.Tensor]:
        """A model that the server was given, as the table has it: [T]. InputError where it is of another form."""
        if not isinstance(model, Mapping):
            raise InputError(f"{name} is a {type(model).__name__}, expected a state dict (name -> tensor)")
        like = dict(zip(self.table.layout.keys, self.table.global_model, strict=True))
        try:
            [tensors] = tables.build(like, [model]).clients
        except InputError as error:
            raise InputError(str(error).replace("client 0", name, 1)) from error
        return tensors

    def global_plus(self, update: Mapping[str, torch.Tensor], method: str) -> list[torch.Tensor]:
        """The global model plus an update that was remembered: [T]"""
        return self._sum(self.table.global_model, self.with_parameters(update, method), 1.0, check=False)

    def with_parameters(self, remembered: Mapping[str, torch.Tensor], method: str) -> list[torch.Tensor]:
        """The global model with other parameters, which were remembered: [T]"""
        layout = self.table.layout
        check_form(method, layout, remembered)
        tensors = list(self.table.global_model)
        for t in np.flatnonzero(layout.is_param):
            tensors[t] = remembered[layout.keys[t]].to(self.table.device, layout.dtypes[t])
        return tensors

    def update_of(self, result: Result) -> dict[str, torch.Tensor]:
        """What a result adds to the parameters of the global model, by key"""
        layout = self.table.layout
        new = [as_tensor(result[key], "the result", key) for key in layout.keys]
        update = self._sum(new, self.table.global_model, -1.0, check=True)
        return {layout.keys[t]: update[t] for t in np.flatnonzero(layout.is_param)}

    def _sum(self, a: list[torch.Tensor], b: list[torch.Tensor], factor: float, *, check: bool) -> list[torch.Tensor]:
        """a + factor b, by the kernels: torch's own threads do not survive a fork"""
        address = np.array([[t.data_ptr() for t in model] for model in (a, b)], dtype=np.int64).T
        pair = dataclasses.replace(
            self.table, clients=[a, b], client_address=np.ascontiguousarray(address), center=None,
            as_numpy=(False,) * self.table.T, positions=None, client_ids=None, has=None,
        )  # fmt: skip
        weights = np.array([[[1.0, factor]]])
        [result] = kernels.mix_of(pair, weights, kernels.rows(pair, False), check=check)
        return [result[key] for key in self.table.layout.keys]

    def check_out(self) -> None:
        """Raises where the caller's `out` cannot be written; for methods that compute long before they do"""
        if self.out is not None:
            check_out(self.table, self.out, 1)

    def mix(self, weights: Weights, *, several: bool = False, fresh: bool = False) -> list[Result]:
        """The models that the weights stand for, in one read: one, or M if several.

        fresh   into memory of its own, for a model that is not the round's result
        """
        if self.table.has is not None:
            return self._mix_parts(weights, several, fresh)
        if weights.ranked is not None:
            return [self._rank(weights.ranked, np.flatnonzero(weights.values > 0).tolist(), weights.mixing)]
        if weights.only_used:
            return self._mix_used(weights, several)
        table, w, row, layerwise = self._rows_of(weights, several)
        out = None if fresh else self.out
        if weights.with_gram and (self.forms_gram or several or table is not self.table):
            self._grams[layerwise], results = self.access.gram_mix(table, layerwise, w, row, out)
        elif weights.with_gram:
            gram, results = self.access.gram_times(table, layerwise, w, row, out, mix=True)
            self._grams[layerwise] = self._opened(gram.unscaled(weights.values, weights.scale), table, layerwise)
        else:
            results = self.access.mix(table, w, row, out, self.table)
        self._without_data(table, results)
        if isinstance(weights.others, str):
            self._median_of_others(results)
        return results

    def _mix_parts(self, weights: Weights, several: bool, fresh: bool) -> list[Result]:
        """Where clients hold only some of the tensors: each is mixed over those that have it"""
        assert self.table.has is not None
        if weights.ranked is not None:
            raise InputError("partial=True: means by rank are of clients that all have a tensor")
        layout, has = self.table.layout, self.table.has
        table, w, row, layerwise = self._rows_of(weights, several)
        if weights.with_gram:  # which is of pieces, and not computed along with a sum
            self.gram(layerwise)
        results = self.access.mix(table, w, row, None if fresh else self.out, self.table)
        found = partial.parts(w[..., : self.K])[row]  # [T, M, K]
        for clients, these in partial.groups(has, ranks.integers(layout)):
            have = [k for k in clients if self.shares[k] > 0] or clients.tolist()
            self._rank_into(results, have, ranks.maximum(len(have)), these, found)
        if isinstance(weights.others, str):
            for clients, these in partial.groups(has, ~layout.is_param):
                self._rank_into(results, clients.tolist(), ranks.median(len(clients)), these, found)
        for m, result in enumerate(results):
            result.contributions = torch.from_numpy(found[:, m].copy())
        return results

    def _rank_into(
        self, results: list[Result], clients: list[int], mean: RankedMean, these: np.ndarray, parts: np.ndarray
    ) -> None:
        """Such a mean of these clients' values in some tensors [T] of results; parts [T, M, K] say so"""
        if clients:
            self.access.ranked_means(self.table.part(clients), ranks.means(mean), ranks.only(these), into=results)
            parts[these] = np.isin(np.arange(self.K), clients) / len(clients)

    def wide_updates(self, weights: Weights) -> dict[int, torch.Tensor]:
        """The parameters' part of mix(weights) less the global model, in float32 or wider, by tensor: another read"""
        table, w, row, _ = self._rows_of(weights, several=False)
        return self.access.wide_updates(table, w[:, 0], row, self.table.layout.is_param)

    def _mix_used(self, weights: Weights, several: bool) -> list[Result]:
        used = np.flatnonzero(weights.values.reshape(-1, self.K).any(0)).tolist()
        part = Cohort(self.table.part(used), self.shares[used], [self.ids[k] for k in used], self.access, out=self.out)
        others = weights.others[..., used] if isinstance(weights.others, np.ndarray) else None  # medians are of all
        results = part.mix(
            dataclasses.replace(weights, values=weights.values[..., used], others=others, only_used=False),
            several=several,
        )
        if isinstance(weights.others, str):
            self._median_of_others(results)
        return results

    def _rows_of(self, weights: Weights, several: bool) -> tuple[Table, np.ndarray, np.ndarray, bool]:
        """The table to mix; its weights [S, M, K]; which of S each tensor takes, [T]; whether S are the layers"""
        table = self._rows
        values = np.asarray(weights.values, dtype=np.float64)
        values = values if several else values[..., None, :]  # [.., M, K]
        layerwise = values.ndim == 3
        if values.shape[-1] != table.K or values.ndim not in (2, 3):
            raise ValueError(
                f"the method's weights have shape {values.shape}, expected {table.K} in the last dimension"
            )
        if layerwise and len(values) != len(self.layers):
            raise ValueError(f"the method's weights are for {len(values)} layers, the model has {len(self.layers)}")
        w, others = weights.scale * values, values
        if isinstance(weights.others, np.ndarray):
            others = np.broadcast_to(weights.others if several else weights.others[..., None, :], w.shape)
        if weights.center is not None:
            table = table.with_center_as_client()
            w = np.concatenate([w, np.broadcast_to(weights.center, w.shape[:-1])[..., None]], axis=-1)
            rest = np.broadcast_to(weights.others_center, others.shape[:-1])[..., None]
            others = np.concatenate([others, rest], axis=-1)
            others = others if isinstance(weights.others, np.ndarray) else w
        if table.has is not None and weights.center is None:
            table = table.with_center_as_client()
            w, others = (np.concatenate([x, np.zeros((*x.shape[:-1], 1))], axis=-1) for x in (w, others))
        self._check_weights(w, others)
        w, others = (np.ascontiguousarray(x if layerwise else x[None]) for x in (w, others))  # [L or 1, M, K]
        row = kernels.rows(table, layerwise)
        if not np.array_equal(others, w):
            others_for = ~table.layout.is_param if weights.others_for is None else weights.others_for
            row = row + others_for.astype(np.int32) * np.int32(len(w))
            w = np.concatenate([w, others])
        if table.has is not None:
            w, row = partial.weights(w, row, table.has[:, :-1])
        return table, w, row, layerwise

    def _check_weights(self, *weights: np.ndarray) -> None:
        if all(np.isfinite(w).all() for w in weights):
            return
        lengths = [gram.model().host.norms().numpy()[: self.K] for gram in self._grams.values()]
        far = nonfinite.dominant(lengths[0]) if lengths else []
        words = "the clients' weights are not finite: products of the models' squares are beyond float64"
        if not lengths or lengths[0].max() < SQUARES_FIT:
            bad = {int(k) for w in weights for k in np.argwhere(~np.isfinite(w))[:, -1]}
            names = nonfinite.listed([self.table.name(k) for k in sorted(bad) if k < self.K])
            raise InputError(f"the method's weights are not finite: those of {names or 'the global model'}")
        raise nonfinite.too_large(self.table, far, words)

    def _median_of_others(self, results: list[Result]) -> None:
        """What is not a parameter becomes the median over all clients"""
        row = ranks.only(~self.table.layout.is_param)
        self.access.ranked_means(self.table, ranks.means(ranks.median(self.K)), row, into=results)

    def _rank(self, mean: RankedMean, clients: list[int], mixing: np.ndarray | None) -> Result:
        """The model whose parameters are such a mean of these clients' values, or of mixtures of them, [R, K], element
        by element. What is not a parameter becomes the median over all clients. One read."""
        is_param, K = self.table.layout.is_param, self.K
        if mixing is not None:
            clients = np.flatnonzero(mixing.any(0)).tolist() or [0]  # where all of them are the global model
            mixing = np.ascontiguousarray(mixing[:, clients])
        elif len(clients) == K:
            both, row = ranks.means(mean, ranks.median(K)), np.where(is_param, 0, 1).astype(np.int32)
            return self.access.ranked_means(self.table, both, row, self.out)[0]
        part = self.table.part(clients)
        results = self.access.ranked_means(part, ranks.means(mean), ranks.only(is_param), self.out, mixing=mixing)
        self._median_of_others(results)
        return results[0]

    def _without_data(self, table: Table, results: list[Result]) -> None:
        """Integers, of which a mix takes the maximum, as if the clients without data had not been there"""
        have = np.flatnonzero(self.shares > 0).tolist()
        if 0 < len(have) < self.K:
            rest = range(self.K, table.K)  # the global model, where it was mixed in
            table = dataclasses.replace(table, positions=None)  # it has none for the global model
            part = table.part([*have, *rest])
            row = ranks.only(ranks.integers(part.layout))
            self.access.ranked_means(part, ranks.means(ranks.maximum(part.K)), row, into=results)


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
