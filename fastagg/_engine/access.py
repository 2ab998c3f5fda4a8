"""How a round reads and writes models, wherever they are. Methods know nothing of it.

There are three of these, which know nothing of each other: InMemory (in_memory.py), InFiles (files/streamed.py), which
reads mapped files piece by piece, and OverGroup (distributed/sharded.py), whose ranks have a part of every model each.
InAdapters (adapters/access.py) is for models of which there are only low-rank factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from fastagg._engine.checks import InputError
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result, Results
from fastagg._engine.table import Layers, Out, Params, StateDict, Table
from fastagg._engine.unformed import UnformedGram

if TYPE_CHECKING:
    from fastagg._engine.aggregator import Aggregator


class Access(Protocol):
    """Every one of these raises BadClientError where a client is not finite, and names it

    pass_cost   what one pass over the clients costs, in reads of memory
    """

    pass_cost: float

    def together(self) -> AbstractContextManager[None]:
        """A round is computed in here: whatever fails, fails for all who take part in the computation"""
        ...

    def why_not(self, method: Aggregator, inputs: Mapping[str, Any]) -> str:
        """Why a method cannot work on models here; empty if it can"""
        ...

    def build(
        self, global_sd: StateDict | None, client_sds: Sequence[StateDict | InputError], *, params: Params,
        layers: Layers, client_ids: Sequence[Any] | None, bad: dict[int, str] | None, partial: bool = False,
    ) -> Table:  # fmt: skip
        """The table of the models, once they are checked; as table.build"""
        ...

    def any(self, flag: bool) -> bool:
        """True where it is true of any part of the models; of whole ones there is but one"""
        ...

    def gram(self, table: Table, layerwise: bool) -> Gram: ...

    def mix(self, table: Table, weights: np.ndarray, row: np.ndarray, out: Out, blame: Table) -> list[Result]:
        """weights [S, M, K]; row [T] says which of the S each tensor takes; blame has the clients to look at when a
        result is not finite"""
        ...

    def gram_mix(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out
    ) -> tuple[Gram, list[Result]]: ...

    def gram_times(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out = None, *, mix: bool = False
    ) -> tuple[UnformedGram, list[Result]]:
        """Products of the Gram with the weights [S, M, K], in one read, without forming it. Tensors of one layer, or
        all if not layerwise, must have the same row. With mix, also the M models."""
        ...

    def ranked_means(
        self, table: Table, means: np.ndarray, row: np.ndarray, out: Out = None, *, into: list[Result] | None = None,
        mixing: np.ndarray | None = None,
    ) -> list[Result]:  # fmt: skip
        """What kernels.ranked_means_of says: new models, or tensors of those in `into` replaced"""
        ...

    def wide_updates(
        self, table: Table, weights: np.ndarray, row: np.ndarray, used: np.ndarray
    ) -> dict[int, torch.Tensor]:
        """sum_k weights[row[t], k] w_k - g of the tensors used [T], in float32 or wider: another read"""
        ...

    def refuse(self, table: Table, clients: Sequence[int], words: str) -> None:
        """Raises what nonfinite.too_large says of the clients, if there are words, for all parts of the models."""
        ...

    def deliver(self, result: Result | Results) -> None:
        """Gives the result the form in which the caller has its models"""
        ...
