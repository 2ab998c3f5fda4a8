"""What a method decides: how the clients' models become the new one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(eq=False)
class Weights:
    """The new model is the sum over clients of values_k w_k. A plain array of values stands for Weights(values).

    values        [K], or [L, K] for weights that differ by layer; for methods with M models [M, K] or [L, M, K]
    scale         parameters are multiplied by this, besides
    center        how much of the global model is added: a number, [M], or [L, M]
    others        weights of the tensors that are not parameters (BatchNorm's statistics), in the form of values;
                  "median": their coordinate-wise median over all clients, which no minority can move far
    others_for    which tensors these are, [T] bool; default: those that are not parameters
    only_used     clients of weight 0 are not read for the parameters; the Gram has shown that they are finite
    with_gram     compute the Gram in the same read as the sum: for weights that did not need it
    about         what the result says besides, by name: result.gamma, result.angles, ...
    """

    values: np.ndarray
    scale: float = 1.0
    center: np.ndarray | float | None = None
    others: np.ndarray | str | None = None
    others_for: np.ndarray | None = None
    only_used: bool = False
    with_gram: bool = False
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, decided: Weights | np.ndarray) -> Weights:
        return decided if isinstance(decided, Weights) else cls(np.asarray(decided, dtype=np.float64))
