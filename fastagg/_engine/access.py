"""Where the models of a round are, for the methods, which do not want to know.

Memory is the plain case: whole models in the memory of this process. Others do the same in another way, and give
methods the same five calls: models in files are read piece by piece, shards of models have their Grams added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastagg._engine import core, elementwise, finite, wide
from fastagg._engine import table as tables
from fastagg._engine.core import Out
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result
from fastagg._engine.table import StateDict, Table, as_tensor


class Memory:
    in_memory = True  # whole tensors, or this process's part of them, are at hand

    def build(self, global_sd: StateDict | None, client_sds: Sequence[StateDict], **options: Any) -> Table:
        """The table of the models, once they are checked"""
        return tables.build(global_sd, client_sds, **options)

    def any(self, flag: bool) -> bool:
        """True where it is true of any part of the models; of whole ones there is but one"""
        return flag

    def gram(self, table: Table, layerwise: bool) -> Gram:
        """Raises NonFiniteError where a client is not finite, as all of these do"""
        gram = core.gram_of(table, layerwise)
        finite.check_gram(table, gram)
        return gram

    def mix(self, table: Table, weights: np.ndarray, row: np.ndarray, out: Out, asked: Table) -> list[Result]:
        """weights [S, M, K]; row [T] says which of the S each tensor takes; asked has the clients to look at when a
        result is not finite"""
        return core.mix_of(table, weights, row, out, check=True, asked=asked)

    def gram_mix(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out
    ) -> tuple[Gram, list[Result]]:
        gram, results = core.gram_mix_of(table, layerwise, weights, row, out, check=True)
        finite.check_gram(table, gram)
        return gram, results

    def combine(self, table: Table, rule: str, results: list[Result]) -> None:
        """Replaces tensors of the results by what a rule of elementwise.py gives for the table's clients"""
        not_finite = torch.zeros(table.T, dtype=torch.uint8, device="cpu")  # the rules look on the host
        keys = table.layout.keys
        for group in elementwise.groups(elementwise.used_by(rule, table.layout), table.layout, table.K):
            outs = [[as_tensor(result[keys[t]], "the result", keys[t]) for t in group] for result in results]
            clients = [[client[t] for t in group] for client in table.clients]
            not_finite.numpy()[group] = elementwise.combine_several(rule, clients, outs)
        finite.check_outputs(table, not_finite)

    def mean_updates(self, table: Table, n: np.ndarray, used: np.ndarray) -> dict[int, torch.Tensor]:
        """sum_k n_k w_k - g of the tensors used [T], in float32 or wider: one more read of the clients"""
        updates = {t: wide.empty_update(table.center[t]) for t in np.flatnonzero(used).tolist()}
        for t, update in updates.items():
            g, *clients = (model[t].detach().reshape(-1) for model in (table.center, *table.clients))
            wide.mean_update(g, clients, n, update.view(-1))
        return updates

    def refuse(self, table: Table, clients: Sequence[int], words: str) -> None:
        """Raises what finite.too_large says of the clients, if there are words. All parts of the models are asked."""
        if words:
            raise finite.too_large(table, clients, words)
