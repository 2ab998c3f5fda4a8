"""What robust methods share that are told how many of the clients may be bad: fewer than half of them."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, InputError, Range, Weights, nonfinite

LARGEST = 1e300  # squared distance: sums of a few are in the range of float64


class HonestMajority(GlobalAggregator):
    """A method that weighs clients by the distances between them, f of whom may be anything"""

    reads = "pairs"  # distances between clients
    buffers = "median"

    f: Annotated[int, Range(0)] = 1

    @property
    def min_clients(self) -> int:
        return 2 * self.f + 1

    def weigh(self, cohort: Cohort) -> Weights:
        K, f = cohort.K, self.f
        if 2 * f + 1 > K:
            raise InputError(
                f"{self.name}: f={f} needs at least 2 f + 1 = {2 * f + 1} clients, got {K}; the largest f possible is "
                f"{(K - 1) // 2}"
            )
        gram = cohort.distance_gram().host
        D = gram.squared_distances().numpy()
        if not (D <= LARGEST).all():
            far = nonfinite.dominant(gram.norms().numpy())
            raise nonfinite.too_large(cohort.table, far, "sums of the clients' squared distances are beyond float64")
        return self.weights_from(D, cohort)

    def weights_from(self, D: np.ndarray, cohort: Cohort) -> Weights:
        """From the squared distances between clients, [K, K]"""
        raise NotImplementedError


def mean_of(chosen: np.ndarray, K: int) -> np.ndarray:
    """Weights of the plain mean of these of K clients: [K]"""
    weights = np.zeros(K)
    weights[chosen] = 1 / len(chosen)
    return weights


def nearest(D: np.ndarray, client: int, m: int) -> np.ndarray:
    """The m clients that are nearest to one of them, which is the first; of clients at the same distance, the first"""
    from_it = D[client].copy()
    from_it[client] = -1
    return np.argsort(from_it, kind="stable")[:m]


def in_the_middle(D: np.ndarray, m: int) -> int:
    """The client with the smallest ball around it that holds m of the clients, itself among them; the first of several.

    If m - 1 others of an honest client are honest, the ball is no larger than their diameter: a minority of bad clients
    can be this client only by being as near to the honest ones as those are to each other.
    """
    return int(np.sort(D, axis=1)[:, m - 1].argmin())


def centred(D: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """<x_i - mu, x_j - mu>, [K, K], with mu the mean of points x by weights that sum to 1, from squared distances D"""
    to_mean = D @ weights
    return (to_mean[:, None] + to_mean[None, :] - D - weights @ to_mean) / 2
