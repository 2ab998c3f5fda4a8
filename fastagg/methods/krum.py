"""Krum and Multi-Krum (Blanchard et al., NeurIPS 2017): the clients that lie closest to the others.

    s_k = sum of ||w_k - w_j||^2 over the K - f - 2 clients j nearest to k
    Krum takes the client of the smallest score; Multi-Krum the plain mean of the m of smallest scores.

All distances are read off the Gram. Data shares play no part: a client's word about its size cannot be trusted either.
Parameters of clients that are not taken are not read again. Whatever is not a parameter plays no part in the scores, so
it is not taken from the clients chosen either: it becomes the coordinate-wise median over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastagg._engine.aggregator import (
    Aggregator,
    Cohort,
    check_integer,
    describe,
    function_of,
)
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result
from fastagg._engine.table import InputError


@dataclass(kw_only=True, eq=False)
class Krum(Aggregator):
    """The one client model that is closest to its neighbours, so that f clients may be anything.

    f           how many clients may be faulty or malicious; K >= 2 f + 3 is needed
    params, layers, out   as in fastagg.gram and fastagg.mix

    .weights are 1 for that client (the first of several with the same score) and 0 for the others; sizes are not used.
    Whatever is not a parameter (buffers, integers) is the coordinate-wise median over all clients.
    """

    name = "krum"
    paper = "Blanchard et al., NeurIPS 2017"

    f: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self.name, "f", self.f, 0)

    def round(self, cohort: Cohort, out) -> Result:
        weights = self.weigh(cohort.distance_gram(), cohort.n)
        taken = np.flatnonzero(weights)
        [result] = cohort.part(taken).mix(weights[None, taken], out=out)
        cohort.take_medians(result)
        return describe(result, cohort, weights, cohort.gram())

    def weigh(self, gram: Gram, n: np.ndarray) -> np.ndarray:
        return _first(self._scores(gram), 1)

    def _scores(self, gram: Gram) -> np.ndarray:
        K, f = gram.K, self.f
        if 2 * f + 3 > K:
            most = f"the largest f possible is {(K - 3) // 2}" if K >= 3 else "at least 3 are needed even with f=0"
            raise InputError(f"{self.name}: f={f} needs at least 2 f + 3 = {2 * f + 3} clients, got {K}; {most}")
        return scores(gram.squared_distances().cpu().numpy(), K - f - 2)


@dataclass(kw_only=True, eq=False)
class MultiKrum(Krum):
    """The plain mean of the m client models that are closest to their neighbours.

    f           how many clients may be faulty or malicious; K >= 2 f + 3 is needed
    m           how many clients are averaged, at most K - f, which is the default
    params, layers, out   as in fastagg.gram and fastagg.mix

    .weights are 1 / m for those clients and 0 for the others; sizes are not used. Whatever is not a parameter (buffers,
    integers) is the coordinate-wise median over all clients.
    """

    name = "multi_krum"

    m: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m is not None:
            check_integer(self.name, "m", self.m, 1)

    def weigh(self, gram: Gram, n: np.ndarray) -> np.ndarray:
        s = self._scores(gram)
        most = gram.K - self.f
        if self.m is not None and self.m > most:
            raise InputError(f"multi_krum: m={self.m} of {gram.K} clients; expected at most K - f = {most}")
        return _first(s, most if self.m is None else self.m)


def scores(squares: np.ndarray, neighbours: int) -> np.ndarray:
    """Sum of the squared distances to the nearest others: [K], from all of them, [K, K]"""
    squares = squares.copy()
    np.fill_diagonal(squares, np.inf)
    # not partitioned: summed in ascending order, clients at the same distances tie to the last bit
    return np.sort(squares, axis=1)[:, :neighbours].sum(1)


def _first(s: np.ndarray, m: int) -> np.ndarray:
    weights = np.zeros(len(s))
    weights[np.argsort(s, kind="stable")[:m]] = 1 / m
    return weights


krum = function_of(Krum)
multi_krum = function_of(MultiKrum)
