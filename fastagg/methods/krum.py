"""Krum and Multi-Krum (Blanchard et al., NeurIPS 2017): the clients that lie closest to the others.

    s_k = sum of ||w_k - w_j||^2 over the K - f - 2 clients j nearest to k
    Krum takes the client of the smallest score; Multi-Krum the plain mean of the m of smallest scores.

All distances are computed from the Gram. Data sizes are not used: a malicious client can report any size. Parameters of
clients that are not chosen are not read again. Tensors that are not parameters do not affect the scores. They become
the coordinate-wise median over all clients, because the chosen clients may have any values there.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, Gram, InputError, Range, Weights, register
from fastagg.methods.honest_majority import mean_of


class _Krum(GlobalAggregator):
    """What both share"""

    reads = "pairs"  # distances between clients
    buffers = "median"

    f: Annotated[int, Range(0)] = 1

    @property
    def min_clients(self) -> int:
        return 2 * self.f + 3

    def weigh(self, cohort: Cohort) -> Weights:
        return Weights(self.choose(cohort.distance_gram()), only_used=True)

    def choose(self, gram: Gram) -> np.ndarray:
        """The weights, [K]"""
        raise NotImplementedError

    def scores(self, gram: Gram) -> np.ndarray:
        K, f = gram.K, self.f
        if self.min_clients > K:
            most = f"the largest f possible is {(K - 3) // 2}" if K >= 3 else "at least 3 are needed even with f=0"
            raise InputError(f"{self.name}: f={f} needs at least 2 f + 3 = {2 * f + 3} clients, got {K}; {most}")
        return scores(gram.host.squared_distances().numpy(), K - f - 2)


@register
class Krum(_Krum):
    """The one client model that is closest to its neighbours, so that f clients may be arbitrary.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 3

    .weights are 1 for that client (the first of several with the same score) and 0 for the others; sizes are not used.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "krum"
    paper = "Blanchard et al., NeurIPS 2017"

    def choose(self, gram: Gram) -> np.ndarray:
        return _first(self.scores(gram), 1)


@register
class MultiKrum(_Krum):
    """The plain mean of the m client models that are closest to their neighbours.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 3
    m           number of clients to average, at most K - f, which is the default

    .weights are 1 / m for those clients and 0 for the others; sizes are not used.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "multi_krum"
    paper = "Blanchard et al., NeurIPS 2017"

    m: Annotated[int, Range(1)] | None = None

    def choose(self, gram: Gram) -> np.ndarray:
        s = self.scores(gram)
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
    return mean_of(np.argsort(s, kind="stable")[:m], len(s))
