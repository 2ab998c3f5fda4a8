"""SimAgg (Khan et al., 2021): in each layer, clients near the mean of all count more, and so do those with more data.

    sim_k = sum_j ||w_j - mean|| / (||w_k - mean|| + eps)
    weights = (u + n) / sum (u + n),  u = sim / sum sim

The mean is the plain one. Identical clients, where sim is 0 / eps for all, get equal u.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, Gram, Range, register


@register
class SimAgg(GlobalAggregator):
    """Layer by layer, weights from data shares and from the closeness of each client to the mean of the clients.

    eps         added to a distance before dividing by it: clients closer to the mean than this count equally
    layerwise   False: one distance for the whole model

    The paper treats every tensor separately; layers=lambda key: key does the same.
    """

    name = "simagg"
    paper = "Khan et al., BrainLes 2021"
    reads = "products"

    eps: Annotated[float, Range(above=0)] = 1e-5
    layerwise: bool = True

    def weigh(self, cohort: Cohort) -> np.ndarray:
        distance = distances_to_mean(cohort.distance_gram(self.layerwise))
        nearness = 1 / (distance + self.eps)  # the sum over j is the same for all: it cancels in u
        return (nearness / nearness.sum(-1, keepdims=True) + cohort.shares) / 2


def distances_to_mean(gram: Gram) -> np.ndarray:
    """||w_k - 1/K sum_j w_j||: [K] or [L, K]"""
    along = gram.along_mean.numpy()
    squares, mean_square = gram.on_host.squares, along.mean(-1, keepdims=True)
    apart = squares - 2 * along + mean_square
    return np.sqrt(np.where(apart > 1e-14 * (squares + mean_square), apart, 0))  # below it is all rounding
