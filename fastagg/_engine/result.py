"""What an aggregation returns, and where it is written."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from fastagg._engine.gram import Gram


class Result(dict):
    """A state dict (`model.load_state_dict(result)` takes it as it is) that also says how it came about.

    weights   the clients' weights: [K], or [L, K] when they differ by layer
    layers    names of the L layers when weights differ by layer, else None
    gram      the Gram, where the method computed one, else None; row k + 1 is client k's, as in weights
    logits    the state an optimising method carries to its next round, else None
    dropped   clients that were left out, by id, and what was wrong with each (on_bad_client="drop")

    All that has an entry for every client has it for every client given, in the order given. Of a client that was
    dropped, the weight is 0, and so are its row and column of the Gram, which lists it in .absent:
    fastagg.diagnostics(result.gram, result.weights) is that of the others.

    Pickling (torch.save, multiprocessing) keeps the tensors only, as a plain OrderedDict, so that
    `torch.load(..., weights_only=True)` reads the file back without knowing of fastagg.
    """

    weights: torch.Tensor = cast(torch.Tensor, None)  # which everything that is returned has
    layers: tuple[str, ...] | None = None
    gram: Gram | None = None
    logits: torch.Tensor | None = None
    dropped: Mapping[Any, str] = MappingProxyType({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(self.items())

    def __deepcopy__(self, memo: dict) -> Result:
        other = Result((key, copy.deepcopy(value, memo)) for key, value in self.items())
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def copy(self) -> Result:
        other = Result(self)
        other.__dict__.update(self.__dict__)
        return other

    __copy__ = copy

    def __repr__(self) -> str:
        return f"Result({len(self)} tensors, weights={self.weights})"


class Results(list):
    """Several state dicts of one round, each a Result: a model per client, or per cluster.

    mixing     [M, K]: model m is sum_k mixing[m, k] w_k; [L, M, K] when it differs by layer
    layers     names of the L layers when mixing differs by layer, else None
    gram       the Gram, where the method computed one, else None; as in Result
    clusters   for methods that group clients: a list of lists of client ids, model m is that of clusters[m]
    dropped    clients that were left out, by id, and what was wrong with each; where there is a model per client,
               theirs is None
    """

    mixing: torch.Tensor = cast(torch.Tensor, None)  # which everything that is returned has
    layers: tuple[str, ...] | None = None
    gram: Gram | None = None
    clusters: list[list[Any]] | None = None
    dropped: Mapping[Any, str] = MappingProxyType({})
