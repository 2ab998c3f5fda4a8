"""What a result says of its round, and of each client in the order in which the caller gave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastagg._engine.cohort import Cohort
from fastagg._engine.result import Result, Results
from fastagg._engine.weights import Weights


@dataclass(frozen=True)
class ClientValue:
    """An attribute of a method's result that has an entry for every client

    axis      along which the clients are
    missing   what stands there for a client that was left out

    Integers and booleans stay what they are if missing is an integer (-1). Otherwise they become float64, as with NaN,
    the default: in every round, whether or not a client was left out.
    """

    name: str
    axis: int = -1
    missing: float = float("nan")

    def tensor(self, given: Any) -> torch.Tensor:
        """What a method says, in a dtype that has `missing`"""
        values = given if isinstance(given, torch.Tensor) else torch.as_tensor(given, device="cpu")
        whole = not values.is_floating_point() and not float(self.missing).is_integer()
        return values.to(torch.float64) if whole else values


# What every result may have; a method declares its own besides, in Aggregator.client_values
WEIGHTS = tuple(ClientValue(name, missing=0.0) for name in ("weights", "mixing", "contributions"))


def describe(result: Result, cohort: Cohort, weights: Weights) -> Result:
    """A result that says how it came about"""
    _describe(result, cohort, cohort.of_clients(weights.values))
    result.__dict__.update(weights.about)
    return result


def describe_several(results: list[Result], cohort: Cohort, weights: Weights) -> Results:
    """Several results that say how they came about"""
    mixing = weights.values  # [M, K] or [L, M, K]
    several = Results(_describe(r, cohort, mixing[..., m, :].copy()) for m, r in enumerate(results))
    several.mixing = torch.from_numpy(mixing)
    several.layers = cohort.layers if mixing.ndim == 3 else None
    several.gram = cohort.known_gram(mixing.ndim == 3)
    several.__dict__.update(weights.about)
    return several


def _describe(result: Result, cohort: Cohort, weights: np.ndarray) -> Result:
    layerwise = weights.ndim == 2
    result.weights = torch.from_numpy(weights)
    result.layers = cohort.layers if layerwise else None
    result.gram = cohort.known_gram(layerwise)
    return result


def in_callers_order(
    result: Any, order: Sequence[int], K: int, personal: bool, client_values: Sequence[ClientValue]
) -> Any:
    """A result of some of K clients, in the order of their ids, as the caller knows them"""
    if list(order) == list(range(K)):
        return result
    if isinstance(result, Results):
        models = [_spread_values(model, order, K, client_values) for model in result]
        if personal:
            place = dict(zip(order, models, strict=True))
            models = [place.get(k) for k in range(K)]
        several = Results(models)
        several.__dict__.update(result.__dict__)
        if personal and several.mixing is not None:
            several.mixing = _spread(several.mixing, order, K, several.mixing.dim() - 2, 0.0)
        result = several
    return _spread_values(result, order, K, client_values)


def _spread_values(result: Any, order: Sequence[int], K: int, client_values: Sequence[ClientValue]) -> Any:
    for about in (*WEIGHTS, *client_values):
        value = result.__dict__.get(about.name)
        if value is not None:
            setattr(result, about.name, _spread(value, order, K, about.axis, about.missing))
    if result.gram is not None:
        result.gram = result.gram.among(K, order)
    return result


def _spread(values: torch.Tensor, order: Sequence[int], K: int, axis: int, missing: float) -> torch.Tensor:
    """What belongs to client order[i] moves from i to order[i]"""
    axis %= values.dim()
    shape = (*values.shape[:axis], K, *values.shape[axis + 1 :])
    out = torch.full(shape, missing, dtype=values.dtype, device=values.device)
    return out.index_copy_(axis, torch.tensor(list(order), device=values.device), values)
