"""Geometric median (RFA, Pillutla et al., IEEE TSP 2022): the model with the least sum of distances to the clients.

    v = argmin sum_k n_k ||v - w_k||

by the smoothed Weiszfeld algorithm: from a start near the medoid, again and again

    beta_k = n_k / max(nu, ||v - w_k||),      v = sum_k beta_k w_k / sum_k beta_k

Every v is a mean of the clients, sum_k l_k w_k, so ||v - w_k||^2 = G_kk - 2 (G l)_k + l'G l with G the inner products
of the updates, and an iteration is one K-by-K product. The terms are ||w_k - g||^2, ||v - g||^2 and the like, so a
client far away takes no digits from the distances of the others, once its l_k is small.

The medoid is the client with the least sum of distances. From there attackers who are far away, but fewer than half,
are far away in the first iteration already. From the mean, which they can place anywhere, every iteration would make up
for a factor of (1 - q) / q only, q being their share.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, Gram, Range, register


@register
class GeometricMedian(GlobalAggregator):
    """The model with the least sum of distances to the clients; bad clients of less than half the data move it little.

    iterations   of Weiszfeld's algorithm, at most
    tolerance    stop when no weight changes by more than this fraction of itself
    nu           lower bound of a distance; default: a millionth of the smallest distance between two clients
    weighted     True, as in the paper: weight clients by their data shares. False: all clients count equally, whatever
                 data size they claim; choose this if clients may be hostile

    .weights are positive (0 for a client without data, if weighted) and sum to 1. If the median comes to lie on a
    client, as it does on one with nearly half of the data, it converges slowly, which does no harm. Tensors that are
    not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "geometric_median"
    paper = "Pillutla et al., IEEE TSP 2022"
    reads = "pairs"  # for its start, near the medoid; the iterations need products only
    buffers = "median"

    iterations: Annotated[int, Range(0)] = 100
    tolerance: Annotated[float, Range(0, 1)] = 1e-6
    nu: Annotated[float, Range(1e-100)] | None = None
    weighted: bool = True

    def weigh(self, cohort: Cohort) -> np.ndarray:
        return self.weights_from(cohort.distance_gram(), cohort.shares)

    def weights_from(self, gram: Gram, n: np.ndarray) -> np.ndarray:
        masses = n if self.weighted else np.full(gram.K, 1 / gram.K)
        D = gram.host.squared_distances().numpy()
        apart = D[D > 0]
        if not apart.size:
            return masses  # all are the same point
        # the default is not of a mean distance: one client at 1e6 would have a say in that
        nu = 1e-6 * math.sqrt(apart.min()) if self.nu is None else self.nu
        return weiszfeld(gram, masses, start(D, masses), self.iterations, self.tolerance, nu)


def weiszfeld(
    gram: Gram, n: np.ndarray, l: np.ndarray, iterations: int, tolerance: float, nu: float  # noqa: E741
) -> np.ndarray:  # fmt: skip
    """Weights of the geometric median of points with these inner products and masses n [K], from weights l [K]"""
    squares = gram.on_host.squares
    for _ in range(iterations):
        Gl = gram @ l
        distance = np.sqrt(np.maximum(squares - 2 * Gl + l @ Gl, 0))
        new = n / np.maximum(distance, nu)
        new /= new.sum()
        done = (np.abs(new - l) <= tolerance * l).all()  # of itself: a weight of 1e-8 matters at a distance of 1e8
        l = new  # noqa: E741
        if done:
            break
    return l


def start(D: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Weights of a point near the medoid, [K], from squared distances D [K, K] of which not all are 0: one iteration
    from the medoid, in which it counts no more than its nearest neighbour. At the medoid itself Weiszfeld's algorithm
    would stay. Of several medoids the mean is taken: which of them comes first must not matter."""
    distance = np.sqrt(D)
    reach = np.median(distance, axis=1).min() * 1e6
    # beyond it digits are lost that decide between the others
    near = np.minimum(distance, reach) if reach > 0 else distance
    sums = np.array([math.fsum(row) for row in (near * n).tolist()])  # exact: the same on every machine
    sums[n == 0] = np.inf
    starts = []
    for m in np.flatnonzero(sums <= sums.min() * (1 + 1e-12)):
        others = distance[m][distance[m] > 0]
        weights = n / np.maximum(distance[m], others.min() if others.size else 1.0)
        starts.append(weights / weights.sum())
    return np.mean(starts, axis=0)
