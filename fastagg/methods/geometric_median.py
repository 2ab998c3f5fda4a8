"""Geometric median (RFA, Pillutla et al., IEEE TSP 2022): the model with the least sum of distances to the clients.

    v = argmin sum_k n_k ||v - w_k||

by the smoothed Weiszfeld algorithm: from v = sum_k n_k w_k, again and again

    beta_k = n_k / max(nu, ||v - w_k||),      v = sum_k beta_k w_k / sum_k beta_k

Every v is a mean of the clients, sum_k l_k w_k, so ||v - w_k||^2 = sum_j l_j D_kj - l'D l / 2 with D the squared
distances of the clients, and an iteration is one K-by-K product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastagg.gram import Gram
from fastagg.methods.common import (
    Aggregator,
    check_integer,
    check_number,
    function_of,
)


@dataclass(kw_only=True, eq=False)
class GeometricMedian(Aggregator):
    """The model with the least sum of distances to the clients: bad clients of less than half the data move it little.

    iterations   of Weiszfeld's algorithm, at most
    tolerance    it stops once no weight changes by more than this fraction of itself
    nu           a distance shorter than this counts as this; default: a millionth of the shortest between two clients
    params, layers, out   as in fastagg.gram and fastagg.mix

    .weights are positive (0 for a client without data) and sum to 1. It converges slowly, but to no harm, where the
    median comes to lie on a client, as it does on one with near half of the data.
    """

    name = "geometric_median"
    paper = "Pillutla et al., IEEE TSP 2022"

    iterations: int = 100
    tolerance: float = 1e-6
    nu: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("geometric_median", "iterations", self.iterations, 0)
        check_number("geometric_median", "tolerance", self.tolerance, 0, 1)
        if self.nu is not None:
            check_number("geometric_median", "nu", self.nu, 1e-100, float("inf"))

    def weigh(self, gram: Gram, n: np.ndarray) -> np.ndarray:
        return weiszfeld(gram.squared_distances().cpu().numpy(), n, self.iterations, self.tolerance, self.nu)


def weiszfeld(D: np.ndarray, n: np.ndarray, iterations: int, tolerance: float, nu: float | None) -> np.ndarray:
    """Weights of the geometric median of points with squared distances D [K, K] and masses n [K]"""
    apart = D[D > 0]
    if not apart.size:
        return n  # all are the same point
    if nu is None:
        nu = 1e-6 * np.sqrt(apart.min())  # not of a mean distance: one client at 1e6 would have a say in that
    l = n  # noqa: E741
    for _ in range(iterations):
        Dl = D @ l
        distance = np.sqrt(np.maximum(Dl - 0.5 * (l @ Dl), 0))
        new = n / np.maximum(distance, nu)
        new /= new.sum()
        done = (np.abs(new - l) <= tolerance * l).all()  # of itself: a weight of 1e-8 matters at a distance of 1e8
        l = new  # noqa: E741
        if done:
            break
    return l


geometric_median = function_of(GeometricMedian)
