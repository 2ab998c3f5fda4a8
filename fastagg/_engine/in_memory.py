"""Whole models in the memory of this process: the usual case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastagg._engine import kernels, nonfinite, wide
from fastagg._engine import table as tables
from fastagg._engine.checks import InputError
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result, Results
from fastagg._engine.table import Out, StateDict, Table
from fastagg._engine.unformed import UnformedGram

if TYPE_CHECKING:
    from fastagg._engine.aggregator import Aggregator


class InMemory:
    pass_cost = 1.5

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def why_not(self, method: Aggregator, inputs: Mapping[str, Any]) -> str:
        return ""

    def build(self, global_sd: StateDict | None, client_sds: Sequence[StateDict | InputError], **options: Any) -> Table:
        return tables.build(global_sd, client_sds, **options)

    def any(self, flag: bool) -> bool:
        return flag

    def gram(self, table: Table, layerwise: bool) -> Gram:
        gram = kernels.gram_of(table, layerwise)
        nonfinite.check_gram(table, gram)
        return gram

    def mix(self, table: Table, weights: np.ndarray, row: np.ndarray, out: Out, blame: Table) -> list[Result]:
        return kernels.mix_of(table, weights, row, out, check=True, blame=blame)

    def gram_mix(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out
    ) -> tuple[Gram, list[Result]]:
        gram, results = kernels.gram_mix_of(table, layerwise, weights, row, out, check=True)
        nonfinite.check_gram(table, gram)
        return gram, results

    def gram_times(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out = None, *, mix: bool = False
    ) -> tuple[UnformedGram, list[Result]]:
        columns, results = kernels.gram_times_of(table, layerwise, weights, row, out, check=True, mix=mix)
        gram = kernels.unformed(table, layerwise, columns.numpy(), weights)
        nonfinite.check_gram(table, gram)
        return gram, results

    def ranked_means(
        self, table: Table, means: np.ndarray, row: np.ndarray, out: Out = None, *, into: list[Result] | None = None,
        mixing: np.ndarray | None = None,
    ) -> list[Result]:  # fmt: skip
        return kernels.ranked_means_of(table, means, row, out, into=into, mixing=mixing)

    def wide_updates(
        self, table: Table, weights: np.ndarray, row: np.ndarray, used: np.ndarray
    ) -> dict[int, torch.Tensor]:
        return wide.updates(table, weights, row, used)

    def refuse(self, table: Table, clients: Sequence[int], words: str) -> None:
        if words:
            raise nonfinite.too_large(table, clients, words)

    def deliver(self, result: Result | Results) -> None:
        pass
