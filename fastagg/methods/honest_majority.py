"""What robust methods share that are told how many of the clients may be bad: fewer than half of them."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, Gram, InputError, Range, Weights

LARGEST = 1e280  # square of a length: sums of larger ones may be beyond float64


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
        return self.weights_from(squared_distances(cohort.distance_gram().host), cohort)

    def weights_from(self, D: np.ndarray, cohort: Cohort) -> Weights:
        """From the squared distances between clients, [K, K], which may be multiplied by a number"""
        raise NotImplementedError


def squared_distances(gram: Gram) -> np.ndarray:
    """Between clients, [K, K]; if there are lengths of 1e140 and more, multiplied by 2^-100, so that sums are finite"""
    if gram.on_host.squares.max() > LARGEST:
        gram = Gram(gram.matrix * 2.0**-100, gram.numel)
    return gram.squared_distances().numpy()


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
