"""Aggregation over several processes: each rank has a part of every model, and the ranks' Grams are added up.

The Gram is a sum over parameters, so each rank computes that of its own part, an all-reduce adds the ranks' matrices,
all solve the same K numbers, and each mixes its own part. The Grams are added layer by layer, and then the layers in
their order, as the kernels do: where every layer is on one rank, and the ranks have them in order, the bits are those
of one process.

A rank's part is made of

    DTensors         their local shards. Along mesh dimensions that replicate, the first copy counts.
    plain tensors    in a model that has DTensors: replicas, of which the first rank's counts. In a model without any:
                     this rank's own, whole tensors or pieces that it has cut itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastagg._engine import kernels, nonfinite, wide
from fastagg._engine import table as tables
from fastagg._engine.checks import BadClientError, InputError
from fastagg._engine.distributed.dtensors import DTensors
from fastagg._engine.distributed.peers import Peers, digest, shown
from fastagg._engine.gram import Gram
from fastagg._engine.inputs import require_global
from fastagg._engine.result import Result, Results
from fastagg._engine.table import Layers, Layout, Out, Params, StateDict, Table
from fastagg._engine.unformed import UnformedGram, in_order

if TYPE_CHECKING:
    from fastagg._engine.aggregator import Aggregator

MOST_BYTES = 64 << 20  # of all layers' Grams together; beyond it a model's Gram is added up before it is sent


def gram(
    global_sd: StateDict, client_sds: Sequence[StateDict], group: Any, *, layerwise: bool = False,
    params: Params = None, layers: Layers = None,
) -> Gram:  # fmt: skip
    """fastagg.gram of models that are spread over the ranks of a group; a client that is not finite raises"""
    access = OverGroup(group, {})
    with access.together():
        table = access.build(
            require_global(global_sd), list(client_sds), params=params, layers=layers, client_ids=None, bad=None
        )
        return access.gram(table, layerwise)


class OverGroup:
    """Parts of models, one on each rank

    facts   what has to be the same on every rank, as far as it can be compared
    """

    pass_cost = 1.5

    def __init__(self, group: Any, facts: Mapping[str, Any]) -> None:
        self.peers = Peers(group)
        self.facts = {name: shown(value) for name, value in facts.items()}
        self.dtensors = DTensors(self.peers.ranks)

    def together(self) -> AbstractContextManager[None]:
        return self.peers.together()

    def why_not(self, method: Aggregator, inputs: Mapping[str, Any]) -> str:
        return method.why_not_over_group(inputs)

    def deliver(self, result: Result | Results) -> None:
        for model in result if isinstance(result, Results) else [result]:
            self.dtensors.restore(model)

    def build(
        self, global_sd: StateDict | None, client_sds: Sequence[StateDict | InputError], *, params: Params,
        layers: Layers, client_ids: Sequence[Any] | None, bad: dict[int, str] | None, partial: bool = False,
    ) -> Table:  # fmt: skip
        if not isinstance(client_sds, list) or not client_sds:
            return tables.build(global_sd, client_sds)  # which says what is wrong
        metadata = getattr(client_sds[0] if global_sd is None else global_sd, "_metadata", None)
        global_sd, client_sds = self.dtensors.local(global_sd, client_sds, client_ids, bad is not None)
        mine = chosen = tables.parameter_names(params)
        reference = global_sd or next((sd for sd in client_sds if isinstance(sd, Mapping)), None)
        if chosen.names is not None and isinstance(reference, Mapping):  # other ranks may have the rest of them
            mine = tables.ParameterNames(chosen.names & set(reference), chosen.tied)
        table = tables.build(global_sd, client_sds, params=mine, layers=layers, client_ids=client_ids, bad=bad)
        if bad is not None:
            table = self._without_bad(table, bad)
        return replace(table, layout=self._whole(table.layout, self._parts(table, chosen)), metadata=metadata)

    def _without_bad(self, table: Table, bad: dict[int, str]) -> Table:
        """The table without the clients that do not fit on some rank, of which all ranks then know"""
        if any(self.peers.agree({"step": "bad clients"}, len(bad))):
            for rank, text in enumerate(self.peers.texts(json.dumps(list(bad.items())))):
                for k, reason in json.loads(text):
                    bad.setdefault(k, f"on rank {rank}, {reason}")
        given = table.given(range(table.K))
        some = [at for at, k in enumerate(given) if k not in bad]
        if not some:
            k, reason = next(iter(bad.items()))
            self.peers.share(BadClientError(f"{tables.client_name(k, table.client_ids)}: {reason}", bad))
        return table if len(some) == table.K else table.part(some)

    def _parts(self, table: Table, chosen: tables.ParameterNames) -> list[list]:
        """What each rank has, a list of [key, layer, ranks of a DTensor, shape]; one list where all have the same"""
        layout, forms = table.layout, self.dtensors.forms
        mine = []
        for key, layer, shape in zip(layout.keys, layout.layer, layout.shapes, strict=True):
            ranks, shape = (forms[key].ranks, forms[key].shape) if key in forms else (None, shape)
            mine.append([key, layout.layers[layer], ranks, list(shape)])
        names = shown(None if chosen.names is None else sorted(chosen.names))
        text = json.dumps(mine)
        seen = self.peers.agree({"step": "build", "clients": str(table.K), "params": names, **self.facts}, digest(text))
        parts = [mine] if len(set(seen)) == 1 else [json.loads(theirs) for theirs in self.peers.texts(text)]
        for key in sorted((chosen.names or set()) - {key for part in parts for key, *_ in part}):
            raise InputError(f"params: {key!r} is not a key of the model")
        return parts

    def _whole(self, layout: Layout, parts: list[list]) -> Layout:
        """The layout with the layers of all ranks, and without what another rank counts. layer_numel is this rank's."""
        spread = any(ranks is not None for part in parts for _, _, ranks, _ in part)  # there are DTensors
        names: dict[str, int] = {}
        first: dict[str, tuple] = {}  # of each key: the rank that has it first, and how
        for rank, part in enumerate(parts):
            for key, layer, *form in part:
                names.setdefault(layer, len(names))
                owner, *known = first.setdefault(key, (rank, *form))
                if spread and known != form:
                    raise InputError(f"key {key!r} is {_form(*known)} on rank {owner}, {_form(*form)} on rank {rank}")
        layer = np.array([names[layout.layers[at]] for at in layout.layer], dtype=np.int32)
        forms, rank = self.dtensors.forms, self.peers.rank
        counts = [forms[k].counts if k in forms else not spread or first[k][0] == rank for k in layout.keys]
        used = (layout.gram_layer >= 0) & np.array(counts, dtype=bool)
        return replace(
            layout, layers=tuple(names), layer=layer, gram_layer=np.where(used, layer, -1).astype(np.int32),
            layer_numel=np.bincount(layer[used], layout.numel[used], len(names)).astype(np.int64),
        )  # fmt: skip

    def any(self, flag: bool) -> bool:
        return any(self.peers.agree({"step": "any"}, int(flag)))

    def gram(self, table: Table, layerwise: bool) -> Gram:
        by_layer = layerwise or self._fits(table, table.K + 1)
        matrix = kernels.gram_of(table, by_layer).matrix
        self.peers.agree({"step": "gram", "clients": _positions(table), "layerwise": str(layerwise)})
        return self._summed(table, layerwise, matrix if by_layer else matrix[None])

    def mix(self, table: Table, weights: np.ndarray, row: np.ndarray, out: Out, blame: Table) -> list[Result]:
        weights = self._agreed(table, weights)
        return self._checked(
            blame, lambda: kernels.mix_of(table, weights, row, self.dtensors.out(out), check=True, blame=blame)
        )

    def gram_mix(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out
    ) -> tuple[Gram, list[Result]]:
        weights = self._agreed(table, weights)
        by_layer = layerwise or self._fits(table, table.K + 1)
        part, results = self._checked(
            table, lambda: kernels.gram_mix_of(table, by_layer, weights, row, self.dtensors.out(out), check=True)
        )
        return self._summed(table, layerwise, part.matrix if by_layer else part.matrix[None]), results

    def gram_times(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out = None, *, mix: bool = False
    ) -> tuple[UnformedGram, list[Result]]:
        weights = self._agreed(table, weights)
        by_layer = layerwise or self._fits(table, 2 + weights.shape[1])
        columns, results = self._checked(
            table, lambda: kernels.gram_times_of(table, by_layer, weights, row, self.dtensors.out(out), check=True,
                                                 mix=mix)
        )  # fmt: skip
        columns, numel = self._added(table, columns if by_layer else columns[:1])
        gram = kernels.unformed(table, layerwise, columns.numpy() if layerwise else in_order(columns.numpy())[None],
                                weights, numel)  # fmt: skip
        self._check(table, gram)
        return gram, results

    def ranked_means(
        self, table: Table, means: np.ndarray, row: np.ndarray, out: Out = None, *, into: list[Result] | None = None,
        mixing: np.ndarray | None = None,
    ) -> list[Result]:  # fmt: skip
        out = self.dtensors.out(out)
        return self._checked(table, lambda: kernels.ranked_means_of(table, means, row, out, into=into, mixing=mixing))

    def wide_updates(
        self, table: Table, weights: np.ndarray, row: np.ndarray, used: np.ndarray
    ) -> dict[int, torch.Tensor]:
        return wide.updates(table, weights, row, used)

    def refuse(self, table: Table, clients: Sequence[int], words: str) -> None:
        """All ranks come here, and each with what it has found in its part"""
        if any(self.peers.agree({"step": "range"}, int(bool(words)))):
            said = [json.loads(text) for text in self.peers.texts(json.dumps([list(map(int, clients)), words]))]
            everywhere = sorted({k for found, _ in said for k in found})
            if everywhere:
                text = next(text for found, text in said if found)
                self.peers.share(nonfinite.too_large(table, everywhere, text))
        if words:
            raise nonfinite.too_large(table, clients, words)

    def _fits(self, table: Table, columns: int) -> bool:
        return len(table.layout.layers) * (table.K + 1) * columns * 8 <= MOST_BYTES

    def _summed(self, table: Table, layerwise: bool, matrix: torch.Tensor) -> Gram:
        """Over the ranks: the Gram, and how many elements there are. Only to be called after they have agreed."""
        matrix, numel = self._added(table, matrix)
        gram = Gram(matrix, numel, table.layout.layers)
        self._check(table, gram)
        return gram if layerwise else Gram(gram.model().matrix, numel.sum())

    def _added(self, table: Table, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Over the ranks: the sums, and how many elements each layer has"""
        numel = torch.from_numpy(table.layout.layer_numel).to(sums.device, torch.float64)
        both = self.peers.add(torch.cat([sums.reshape(-1), numel]))
        return both[: sums.numel()].view(sums.shape), both[sums.numel() :].cpu().long()

    def _check(self, table: Table, gram: Gram) -> None:
        try:  # all ranks see the same numbers here, and so go the same way
            nonfinite.check_gram(table, gram, self._keys)
        except InputError as error:
            self.peers.share(error)

    def _agreed(self, table: Table, weights: np.ndarray) -> np.ndarray:
        """Weights that are the same on all ranks. CPUs of different kinds may differ in the last bits."""
        weights = np.ascontiguousarray(weights)
        facts = {"step": "mix", "clients": _positions(table), "weights": str(weights.shape)}
        if len(set(self.peers.agree(facts, digest(weights.tobytes())))) == 1:
            return weights
        first = self.peers.of_first(weights)
        apart = np.abs(first - weights).max()
        if apart > 1e-6 * np.abs(first).max():
            raise InputError(
                f"the clients' weights differ from those of rank 0 by {apart:.2g}; load the same state on every rank"
            )
        return first

    def _checked(self, table: Table, work: Callable[[], Any]) -> Any:
        """What work gives; clients that are not finite on any rank raise on all"""
        done, bad = None, []
        failed: list[InputError] = []  # emptied before one is raised, see peers
        try:
            done = work()
        except nonfinite.NonFiniteError as error:
            at = list(range(table.K)) if table.positions is None else list(table.positions)
            bad = [at.index(k) for k in error.clients]
            failed.append(error)
        except InputError as error:
            failed.append(error)
        seen = self.peers.agree({"step": "mixed"}, 2 if bad else len(failed))
        if 2 in seen:
            said = [json.loads(text) for text in self.peers.texts(json.dumps([bad, *map(str, failed or [""])]))]
            failed.clear()
            far = next(text for k, text in said if k)
            try:
                nonfinite.check_clients(table, sorted({k for found, _ in said for k in found}), self._keys, far)
            except InputError as error:
                self.peers.share(error)
        if failed:
            self.peers.tell(failed.pop())
        if 1 in seen:
            self.peers.agree({"step": "failed"})  # hears what the others raise
        return done

    def _keys(self, table: Table, model: Sequence[torch.Tensor]) -> list[str]:
        """The keys of a model that are not finite, on whatever rank"""
        mine = nonfinite.keys_not_finite(table, model)
        self.peers.agree({"step": "not finite"})
        return list(dict.fromkeys(key for text in self.peers.texts(json.dumps(mine)) for key in json.loads(text)))


def _form(ranks: list[int] | None, shape: list[int]) -> str:
    return f"{'a plain tensor' if ranks is None else f'a DTensor on ranks {ranks}'} of shape {tuple(shape)}"


def _positions(table: Table) -> str:
    return shown(list(range(table.K)) if table.positions is None else list(table.positions))
