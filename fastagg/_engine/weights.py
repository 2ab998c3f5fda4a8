"""What a method decides: how the clients' models become the new one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fastagg._engine.numerics import float64
from fastagg._engine.ranks import RankedMean


@dataclass(eq=False)
class Weights:
    """The new model is the sum over clients of values_k w_k. A plain array of values stands for Weights(values).

    Tensors and lists are converted to float64 arrays.

    values        [K], or [L, K] for weights that differ by layer; for methods with M models [M, K] or [L, M, K]
    scale         parameters are multiplied by this, besides
    center        how much of the global model is added: a number, [M], or [L, M]
    others        weights of the tensors that are not parameters (BatchNorm's statistics), in the form of values;
                  "median": their coordinate-wise median over all clients, which no minority can move far
    others_center how much of the global model is added to them, where others are given and center is
    others_for    which tensors these are, [T] bool; default: those that are not parameters
    only_used     clients of weight 0 are not read for the parameters; the Gram has shown that they are finite
    with_gram     compute the Gram in the same read as the sum: for weights that did not need it
    ranked        the parameters are, element by element, this mean by rank of the clients with a positive weight, in
                  place of the sum. Such clients must have equal weights
    mixing        [R, K]: of these mixtures of the clients instead, completed with the global model where a row does not
                  sum to 1
    about         what the result says besides, by name: result.gamma, result.angles, ... Of methods with a model per
                  cluster, "clusters" must be among them: the client ids of each model
    """

    values: np.ndarray
    scale: float = 1.0
    center: np.ndarray | float | None = None
    others: np.ndarray | str | None = None
    others_center: np.ndarray | float = 0.0
    others_for: np.ndarray | None = None
    only_used: bool = False
    with_gram: bool = False
    ranked: RankedMean | None = None
    mixing: np.ndarray | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = _array(self.values)
        if self.others is not None and not isinstance(self.others, str):
            self.others = _array(self.others)
        if self.center is not None and not isinstance(self.center, float):
            self.center = _array(self.center)
        if self.others_for is not None:
            self.others_for = np.asarray(self.others_for, dtype=bool)

    @classmethod
    def of(cls, method: str, decided: Any) -> Weights:
        """What weigh() returned"""
        try:
            weights = decided if isinstance(decided, Weights) else None if decided is None else cls(decided)
        except (TypeError, ValueError):
            weights = None
        if weights is None or not weights.values.ndim:
            what = type(decided).__name__ if decided is not None else None
            raise TypeError(f"{method}: weigh() returned {what}, expected an array of weights, or Weights")
        return weights

    def mixed(self, rows: np.ndarray) -> Weights:
        """The same for K clients, of which the models weighted here, for one new model, are rows [R, K]: model r is g +
        sum_k rows[r, k] (w_k - g), so what its row lacks to 1 is the global model's"""
        rest = 1 - rows.sum(1)
        values, others = self.values @ rows, self.others
        center, others_center = self.center, self.others_center
        if np.abs(rest).max() > 1e-12:
            if others is None and center is None:
                others = self.values
            if isinstance(others, np.ndarray):
                others_center = others_center + (others @ rest)[..., None]
            center = (0.0 if center is None else center) + self.scale * (self.values @ rest)[..., None]
        return replace(
            self, values=values, center=center, others_center=others_center,
            others=others @ rows if isinstance(others, np.ndarray) else others,
            mixing=None if self.ranked is None else np.ascontiguousarray(rows[self.values > 0]),
        )  # fmt: skip

    def check_form(self, method: str, produces: str, K: int) -> None:
        """That there are as many models as the method has to give"""
        shape = self.values.shape
        if produces == "personalised" and shape[-2:] != (K, K):
            raise ValueError(f"{method}: its weights have shape {shape}, expected a row per client")
        if produces == "clusters":
            clusters = self.about.get("clusters")
            if not isinstance(clusters, list | tuple) or shape[-2:-1] != (len(clusters),):
                said = f"{len(clusters)} clusters" if isinstance(clusters, list | tuple) else repr(clusters)
                raise ValueError(
                    f"{method}: its weights have shape {shape}, and about['clusters'] is {said}; expected a row, and a "
                    "list of client ids, for each cluster"
                )


def _array(values: Any) -> np.ndarray:
    return float64(values) if isinstance(values, torch.Tensor) else np.asarray(values, dtype=np.float64)
