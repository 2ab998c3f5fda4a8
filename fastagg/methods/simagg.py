"""SimAgg (Khan et al., 2021): in each layer, clients near the mean of all count more, and so do those with more data.

    sim_k = sum_j ||w_j - mean|| / (||w_k - mean|| + eps)
    weights = (u + n) / sum (u + n),  u = sim / sum sim

The mean is the plain one. Identical clients, where sim is 0 / eps for all, get equal u.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastagg._engine.aggregator import (
    Aggregator,
    Cohort,
    check_flag,
    check_number,
    describe,
    function_of,
)
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result


@dataclass(kw_only=True, eq=False)
class SimAgg(Aggregator):
    """Layer by layer, weights from data shares and from each client's nearness to the mean of the clients.

    eps         what is added to a distance before dividing by it: clients nearer to the mean than that count alike
    layerwise   False: one distance for the whole model

    The paper takes every tensor on its own: layers=lambda key: key does.
    """

    name = "simagg"
    paper = "Khan et al., BrainLes 2021"

    eps: float = 1e-5
    layerwise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("simagg", "eps", self.eps, 0, float("inf"), strict=True)
        check_flag("simagg", "layerwise", self.layerwise)

    def round(self, cohort: Cohort, out) -> Result:
        weights = self.weigh(cohort.distance_gram(self.layerwise), cohort.n)
        [result] = cohort.mix(weights[..., None, :], layerwise=self.layerwise, out=out)
        return describe(result, cohort, weights, cohort.gram(self.layerwise))

    def weigh(self, gram: Gram, n: np.ndarray) -> np.ndarray:
        nearness = 1 / (distances_to_mean(gram) + self.eps)  # the sum over j is the same for all: it cancels in u
        return (nearness / nearness.sum(-1, keepdims=True) + n) / 2


simagg = function_of(SimAgg)


def distances_to_mean(gram: Gram) -> np.ndarray:
    """||w_k - 1/K sum_j w_j||: [K] or [L, K]"""
    G = gram.updates().cpu().numpy()
    along = G.mean(-1)  # <d_k, mean d>
    squares, mean_square = np.diagonal(G, axis1=-2, axis2=-1), along.mean(-1, keepdims=True)
    apart = squares - 2 * along + mean_square
    return np.sqrt(np.where(apart > 1e-14 * (squares + mean_square), apart, 0))  # below it is all rounding
