"""SMEA, smallest maximum eigenvalue averaging (Allouah et al., ICML 2023): the K - f clients that spread the least.

    S = argmin over sets of K - f clients of the largest eigenvalue of 1/|S| sum_{k in S} (w_k - mean)(w_k - mean)'
    with the mean of S, which is the new model

The eigenvalues are those of the products <w_i - mean, w_j - mean>, a matrix of K - f by K - f. A few steps of the power
method, for all sets at once, bound them from below; only of sets whose bound is no larger than the smallest eigenvalue
found are they computed.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np

from fastagg.extend import Cohort, Weights, ratio, register
from fastagg.methods.honest_majority import HonestMajority, centred, mean_of

MOST = 1_000_000  # C(K, f) K, numbers in a table of all sets: 38,760 sets of 20 clients with f = 6
SAME = 1e-12  # eigenvalues of sets of the same spread differ by rounding
POWER_STEPS = 8


@register
class SMEA(HonestMajority):
    """The plain mean of the K - f client models whose covariance has the smallest largest eigenvalue.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 1

    .weights are 1 / (K - f) for those clients and 0 for the others; sizes are not used. Of several such sets it is the
    one with the first clients. .exact says whether all sets were compared. They are while C(K, f) K is at most a
    million: up to f=6 of 20 clients, f=3 of 50, f=2 of 100. Beyond it clients are removed one by one, each time the one
    without whom the largest eigenvalue is the smallest; with f=1 that is the same.
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
    exact = f <= 1 or math.comb(K, f) * K <= MOST
    kept = np.arange(K)
    for _ in range(1 if exact else f):
        # the first set is that without the last clients
        out = np.array([*combinations(range(len(kept)), f if exact else 1)][::-1], dtype=np.int64).reshape(-1, f if exact else 1)
        sets = np.ones((len(out), len(kept)), dtype=bool)
        np.put_along_axis(sets, out, False, axis=1)
        kept = kept[sets[_first_of_least(D[np.ix_(kept, kept)], sets)]]
    return kept, exact


def _first_of_least(D: np.ndarray, sets: np.ndarray) -> int:
    """Which of the sets, [B, K] bool, has the smallest largest eigenvalue; the first of several"""
    at_least = _bounds(D, sets)
    found: list[tuple[float, int]] = []
    least = math.inf
    for b in np.argsort(at_least, kind="stable").tolist():
        if at_least[b] * (1 - 1e-9) > least or least == 0:
            break
        value = _spread(D, np.flatnonzero(sets[b]))
        found.append((value, b))
        least = min(least, value)
    return min(b for value, b in found if value <= least * (1 + SAME))


def _spread(D: np.ndarray, some: np.ndarray) -> float:
    """The largest eigenvalue of the products of these clients less their mean"""
    m = len(some)
    return max(float(np.linalg.eigvalsh(centred(D[np.ix_(some, some)], np.full(m, 1 / m)))[-1]), 0.0)


def _bounds(D: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """Lower bounds of the sets' largest eigenvalues, [B]: Rayleigh quotients -v'Dv / 2v'v of vectors that sum to 0"""
    start = np.random.default_rng(0).standard_normal(len(D))
    at_least = np.zeros(len(sets))
    rows = max(1, (1 << 18) // len(D))  # of sets at a time
    for begin in range(0, len(sets), rows):
        some = sets[begin : begin + rows]
        v = _deviations(start * some, some)
        for _ in range(POWER_STEPS):
            image = _deviations(v @ D / -2, some)
            quotient = ratio((v * image).sum(1), (v * v).sum(1))
            v = ratio(image, np.abs(image).max(1, keepdims=True))
        at_least[begin : begin + rows] = quotient
    return np.maximum(at_least, 0)


def _deviations(v: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Of the entries of each row from the mean of those that are in the set; 0 for the others"""
    v = np.where(some, v, 0)
    return np.where(some, v - v.sum(1, keepdims=True) / some.sum(1, keepdims=True), 0)
