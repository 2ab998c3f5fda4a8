"""SMEA, smallest maximum eigenvalue averaging (Allouah et al., ICML 2023): the K - f clients that spread the least.

    S = argmin over sets of K - f clients of the largest eigenvalue of 1/|S| sum_{k in S} (w_k - mean)(w_k - mean)'
    with the mean of S, which is the new model

The eigenvalues are those of the products <w_i - mean, w_j - mean>, a matrix of K - f by K - f.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np

from fastagg.extend import Cohort, Weights, register
from fastagg.methods.honest_majority import HonestMajority, centred, mean_of

MOST = 20_000_000  # C(K, f) K^2, numbers in the matrices of all sets: about a second
AT_ONCE = 1 << 20  # of these numbers
SAME = 1e-12  # eigenvalues of sets of the same spread differ by rounding


@register
class SMEA(HonestMajority):
    """The plain mean of the K - f client models whose covariance has the smallest largest eigenvalue.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 1

    .weights are 1 / (K - f) for those clients and 0 for the others; sizes are not used. Of several such sets it is the
    one with the first clients. .exact says whether all sets were compared. They are while C(K, f) K^2 is at most 20
    million: any f of 18 clients, up to f=6 of 20, f=4 of 25, f=2 of 50, f=1 of 250. Beyond it clients are removed one
    by one, each time the one without whom the largest eigenvalue is the smallest.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "smea"
    paper = "Allouah et al., ICML 2023"

    def weights_from(self, D: np.ndarray, cohort: Cohort) -> Weights:
        chosen, exact = least_spread(D, self.f)
        return Weights(mean_of(chosen, cohort.K), only_used=True, about={"exact": exact})


def least_spread(D: np.ndarray, f: int) -> tuple[np.ndarray, bool]:
    """The set of K - f clients, from squared distances [K, K]; and whether all sets were compared"""
    K = len(D)
    if math.comb(K, f) * K**2 <= MOST:
        return _of_all_sets(D, K - f), True
    kept = np.arange(K)
    for _ in range(f):
        kept = np.delete(kept, _widest(D[np.ix_(kept, kept)]))
    return kept, False


def _of_all_sets(D: np.ndarray, m: int) -> np.ndarray:
    """The set of m clients with the smallest largest eigenvalue; the first of several"""
    sets = np.array([*combinations(range(len(D)), m)])
    rows = max(1, AT_ONCE // m**2)
    largest = np.concatenate([_largest(D, sets[begin : begin + rows]) for begin in range(0, len(sets), rows)])
    return sets[np.flatnonzero(largest <= largest.min() * (1 + SAME))[0]]


def _largest(D: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """The largest eigenvalue of the products of the clients of each set, [B, m], less their mean: [B]"""
    between = D[sets[:, :, None], sets[:, None, :]]
    to_mean = between.mean(2)
    products = (to_mean[:, :, None] + to_mean[:, None, :] - between - to_mean.mean(1)[:, None, None]) / 2
    return np.maximum(np.linalg.eigvalsh(products)[:, -1], 0)


def _widest(D: np.ndarray) -> int:
    """The client without whom the largest eigenvalue is the smallest; the last of several.

    Without client k, sum_i (w_i - mean)(w_i - mean)' is less by K/(K-1) zz' with z = w_k - mean, and its largest
    eigenvalue x is between the two largest from before, where sum_j K/(K-1) z_j^2 / (d_j - x) = 1. It is found by
    bisection, for all clients at once, from one set of eigenvectors.
    """
    K = len(D)
    d, vectors = np.linalg.eigh(centred(D, np.full(K, 1 / K)))
    d = np.maximum(d, 0)
    z = K / (K - 1) * d * vectors**2  # [K, K], a row for each client
    low, high = np.full(K, d[-2]), np.full(K, d[-1])
    with np.errstate(divide="ignore", invalid="ignore"):  # where the two largest are the same
        for _ in range(60):
            x = (low + high) / 2
            above = (z / (d - x[:, None])).sum(1) < 1
            low, high = np.where(above, x, low), np.where(above, high, x)
    return int(np.flatnonzero(high <= high.min() + SAME * d[-1])[-1])
