"""What an aggregation returns."""

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
    """A state dict (pass it to model.load_state_dict) with attributes that describe how it was computed.

    weights   weights of the clients: [K], or [L, K] if they differ by layer
    layers    names of the L layers if weights differ by layer, else None
    gram      the Gram if the method computed one, else None; row k + 1 belongs to client k, as in weights
    contributions  with partial=True, where some client does not have all tensors: the part from 0 to 1 that each client
              has in each tensor, [T, K], in the order of the keys. Rows sum to 1; of a tensor that stays the global
              model's they are 0. Else None
    logits    the state that an optimising method carries to its next round, else None
    dropped   the clients that were left out: a dict from client id to reason (on_bad_client="drop")

    Attributes with one entry per client have an entry for every client given, in the order given. A dropped client has
    weight 0, and its row and column of the Gram are 0; the Gram lists it in .absent. So
    fastagg.diagnostics(result.gram, result.weights) describes the other clients.

    Pickling (torch.save, multiprocessing) keeps only the tensors, as a plain OrderedDict, so that
    `torch.load(..., weights_only=True)` can read the file without fastagg.
    """

    weights: torch.Tensor = cast(torch.Tensor, None)  # which everything that is returned has
    layers: tuple[str, ...] | None = None
    gram: Gram | None = None
    contributions: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    dropped: Mapping[Any, str] = MappingProxyType({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(self.items())

    def __deepcopy__(self, memo: dict) -> Result:
        other = type(self)((key, copy.deepcopy(value, memo)) for key, value in self.items())
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def copy(self) -> Result:
        other = type(self)(self)
        other.__dict__.update(self.__dict__)
        return other

    __copy__ = copy

    def __repr__(self) -> str:
        return f"Result({len(self)} tensors, weights={self.weights})"


class Results(list):
    """Several state dicts of one round, each a Result: one model per client or per cluster.

    mixing     [M, K]: model m is sum_k mixing[m, k] w_k; [L, M, K] if it differs by layer
    layers     names of the L layers if mixing differs by layer, else None
    gram       the Gram if the method computed one, else None; as in Result
    clusters   for methods that cluster clients: lists of client ids; model m belongs to clusters[m]
    dropped    the clients that were left out: a dict from client id to reason. If there is one model per client, the
               model of a dropped client is None
    """

    mixing: torch.Tensor = cast(torch.Tensor, None)  # which everything that is returned has
    layers: tuple[str, ...] | None = None
    gram: Gram | None = None
    clusters: list[list[Any]] | None = None
    dropped: Mapping[Any, str] = MappingProxyType({})
