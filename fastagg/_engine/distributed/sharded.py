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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastagg._engine import core, finite
from fastagg._engine import table as tables
from fastagg._engine.access import Memory
from fastagg._engine.core import Out
from fastagg._engine.distributed.dtensors import DTensors
from fastagg._engine.distributed.peers import Peers, digest, shown
from fastagg._engine.finite import NonFiniteError, OutOfRangeError
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result, Results
from fastagg._engine.table import InputError, Layout, StateDict, Table

if TYPE_CHECKING:
    from fastagg._engine.aggregator import Aggregator

MOST_BYTES = 64 << 20  # of all layers' Grams together; beyond it a model's Gram is added up before it is sent


def aggregate(
    server: Aggregator, global_sd: StateDict, client_sds: Sequence[StateDict], sizes, client_ids, out, round_info
) -> Result:
    """A round of a server whose models are spread over the ranks of its group"""
    from fastagg._engine.aggregator import check_sizes

    peers = Peers(server.group)
    with peers.together():
        if isinstance(client_sds, Iterable) and not isinstance(client_sds, Mapping):
            client_sds = list(client_sds)
            check_sizes(sizes, len(client_sds))  # now: what is wrong says more than that the ranks differ
        access = Sharded(peers, _facts(server, sizes, client_ids, round_info))
        result, kept = server.aggregate_from(access, global_sd, client_sds, sizes, client_ids, out, round_info)
        for model in result if isinstance(result, Results) else [result]:
            access.dtensors.restore(model)
    server.commit(kept)  # only now: another rank may have failed
    return result


def gram(
    global_sd: StateDict, client_sds: Sequence[StateDict], group: Any, *, layerwise: bool = False, params=None,
    layers=None,
) -> Gram:  # fmt: skip
    """fastagg._engine.gram of models that are spread over the ranks of a group; a client that is not finite raises"""
    peers = Peers(group)
    with peers.together():
        access = Sharded(peers, {})
        table = access.build(core.need_global(global_sd), list(client_sds), params=params, layers=layers)
        return access.gram(table, layerwise)


def _facts(server: Aggregator, sizes, client_ids, round_info: dict[str, Any]) -> dict[str, str]:
    """What has to be the same on every rank, as far as it can be compared"""
    options = {f.name: getattr(server, f.name) for f in fields(server) if f.init}
    options = {name: value for name, value in options.items() if name not in ("group", "params", "layers")}
    given = {"sizes": sizes, "client_ids": client_ids, **options, **round_info}
    return {"method": server.name} | {name: shown(value) for name, value in given.items()}


class Sharded(Memory):
    """Parts of models, one on each rank"""

    def __init__(self, peers: Peers, facts: dict[str, str]) -> None:
        self.peers, self.facts = peers, facts
        self.dtensors = DTensors(peers.ranks)

    def build(self, global_sd: StateDict | None, client_sds: Sequence[StateDict], **options: Any) -> Table:
        if not isinstance(client_sds, list) or not client_sds:
            return tables.build(global_sd, client_sds)  # which says what is wrong
        metadata = getattr(client_sds[0] if global_sd is None else global_sd, "_metadata", None)
        global_sd, client_sds = self.dtensors.local(global_sd, client_sds, options.get("client_ids"))
        mine = chosen = tables.choose(options.pop("params", None))
        reference = client_sds[0] if global_sd is None else global_sd
        if chosen.names is not None and isinstance(reference, Mapping):  # other ranks may have the rest of them
            mine = tables.Chosen(chosen.names & set(reference), chosen.tied)
        table = tables.build(global_sd, client_sds, params=mine, **options)
        return replace(table, layout=self._whole(table.layout, self._parts(table, chosen)), metadata=metadata)

    def _parts(self, table: Table, chosen: tables.Chosen) -> list[list]:
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
        by_layer = layerwise or self._fits(table)
        matrix = core.gram_of(table, by_layer).matrix
        self.peers.agree({"step": "gram", "clients": _positions(table), "layerwise": str(layerwise)})
        return self._summed(table, layerwise, matrix if by_layer else matrix[None])

    def mix(self, table: Table, weights: np.ndarray, row: np.ndarray, out: Out, asked: Table) -> list[Result]:
        weights = self._agreed(table, weights)
        return self._checked(
            asked, lambda: core.mix_of(table, weights, row, self.dtensors.out(out), check=True, asked=asked)
        )

    def gram_mix(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out
    ) -> tuple[Gram, list[Result]]:
        weights = self._agreed(table, weights)
        by_layer = layerwise or self._fits(table)
        part, results = self._checked(
            table, lambda: core.gram_mix_of(table, by_layer, weights, row, self.dtensors.out(out), check=True)
        )
        return self._summed(table, layerwise, part.matrix if by_layer else part.matrix[None]), results

    def combine(self, table: Table, rule: str, results: list[Result]) -> None:
        self._checked(table, lambda: super(Sharded, self).combine(table, rule, results))

    def refuse(self, table: Table, clients: Sequence[int], words: str) -> None:
        """All ranks come here, and each with what it has found in its part"""
        if any(self.peers.agree({"step": "range"}, int(bool(words)))):
            said = [json.loads(text) for text in self.peers.texts(json.dumps([list(map(int, clients)), words]))]
            everywhere = sorted({k for found, _ in said for k in found})
            if everywhere:
                text = next(text for found, text in said if found)
                self.peers.share(finite.too_large(table, everywhere, text))
        super().refuse(table, clients, words)

    def _fits(self, table: Table) -> bool:
        return len(table.layout.layers) * (table.K + 1) ** 2 * 8 <= MOST_BYTES

    def _summed(self, table: Table, layerwise: bool, matrix: torch.Tensor) -> Gram:
        """Over the ranks: the Gram, and how many elements there are. Only to be called after they have agreed."""
        numel = torch.from_numpy(table.layout.layer_numel).to(matrix.device, torch.float64)
        both = self.peers.add(torch.cat([matrix.reshape(-1), numel]))
        matrix, numel = both[: matrix.numel()].view(matrix.shape), both[matrix.numel() :].cpu().long()
        gram = Gram(matrix, numel, table.layout.layers)
        self._check_gram(table, gram)
        return gram if layerwise else Gram(gram.model().matrix, numel.sum())

    def _check_gram(self, table: Table, gram: Gram) -> None:
        """All ranks see the same numbers here, and so go the same way"""
        diagonal = np.einsum("lkk->lk", gram.matrix.cpu().numpy())
        bad = np.flatnonzero(~np.isfinite(diagonal).all(0)) - 1  # row 0 is the global model
        if not len(bad):
            return
        if bad[0] >= 0:
            self._name(table, bad.tolist())
        keys = self._keys(table, table.center)
        words = finite.in_words("the global model", keys) if keys else "the global model is too large for float64"
        self.peers.share(InputError(words))

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
        done, failed, bad = None, None, []
        try:
            done = work()
        except NonFiniteError as error:
            at = list(range(table.K)) if table.positions is None else list(table.positions)
            failed, bad = error, [at.index(k) for k in error.clients]
        except InputError as error:
            failed = error
        seen = self.peers.agree({"step": "mixed"}, 2 if bad else int(failed is not None))
        if 2 in seen:
            said = [json.loads(text) for text in self.peers.texts(json.dumps([bad, str(failed or "")]))]
            self._name(table, sorted({k for found, _ in said for k in found}), next(text for k, text in said if k))
        if failed is not None:
            self.peers.tell(failed)
        if 1 in seen:
            self.peers.agree({"step": "failed"})  # hears what the others raise
        return done

    def _name(self, table: Table, clients: list[int], far: str = "") -> None:
        """Raises, on all ranks, what one process would say of clients that are not finite, or too far off"""
        keys = self._keys(table, table.clients[clients[0]])
        name = table.name(clients[0])
        kind = OutOfRangeError if far and not keys else NonFiniteError
        far = far or f"{name}: its distance to the global model is too large for float64"
        message = finite.in_words(name, keys) or far
        if len(clients) > 1:
            message += f"; so have {finite.listed([table.name(k) for k in clients[1:]])}"
        self.peers.share(kind(message, table.given(clients)))

    def _keys(self, table: Table, model: list[torch.Tensor]) -> list[str]:
        """The keys of a model that are not finite, on whatever rank"""
        mine = [table.layout.keys[t] for t in finite.not_finite_in(model, range(table.T))]
        self.peers.agree({"step": "not finite"})
        return list(dict.fromkeys(key for text in self.peers.texts(json.dumps(mine)) for key in json.loads(text)))


def _form(ranks: list[int] | None, shape: list[int]) -> str:
    return f"{'a plain tensor' if ranks is None else f'a DTensor on ranks {ranks}'} of shape {tuple(shape)}"


def _positions(table: Table) -> str:
    return shown(list(range(table.K)) if table.positions is None else list(table.positions))
