"""Bulyan (El Mhamdi et al., ICML 2018): clients chosen by Krum one after the other, then a mean around their median.

    while fewer than K - 2 f are chosen: choose the client whose Krum score among those left is least, and remove it
    each element: the mean of the K - 4 f chosen values that are nearest to the median of the chosen ones

All distances are from one Gram, and removing a client removes a row and a column. With n clients left, Krum's score is
the sum of the squared distances to the n - f - 2 nearest others (at least one). Data sizes are not used.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import (
    Cohort,
    ExampleRound,
    GlobalAggregator,
    InputError,
    Layout,
    Pass,
    Range,
    Weights,
    ranks,
    register,
)
from fastagg.methods.honest_majority import mean_of
from fastagg.methods.krum import scores


@register
class Bulyan(GlobalAggregator):
    """Krum's choice of K - 2 f clients, then the mean of the K - 4 f values of each element nearest to their median.

    f           number of clients that may be faulty or malicious; requires K >= 4 f + 3

    .weights are 1 / (K - 2 f) for the clients chosen and 0 for the others; sizes are not used. Tensors that are not
    parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "bulyan"
    paper = "El Mhamdi et al., ICML 2018"
    reads = "pairs"  # distances between clients
    buffers = "median"

    f: Annotated[int, Range(0)] = 1

    @property
    def min_clients(self) -> int:
        return 4 * self.f + 3

    @classmethod
    def example_round(cls, K: int) -> ExampleRound:
        return ExampleRound({"f": max((K - 4) // 4, 0)}, {})  # one of them may be left out

    def passes(self, layout: Layout, inputs: object) -> tuple[Pass, ...]:
        return ("gram", "ranks")

    def why_not_partial(self) -> str:
        return "it takes means of the values of each element, of clients that must all have it"

    def why_not_on_adapters(self) -> str:
        return "it takes means of the values of each element, and those of an adapter's update B A are never formed"

    def weigh(self, cohort: Cohort) -> Weights:
        K, f = cohort.K, self.f
        if self.min_clients > K:
            most = f"the largest f possible is {(K - 3) // 4}" if K >= 3 else "at least 3 are needed even with f=0"
            raise InputError(f"bulyan: f={f} needs at least 4 f + 3 = {4 * f + 3} clients, got {K}; {most}")
        chosen = choose(cohort.distance_gram().host.squared_distances().numpy(), f)
        return Weights(mean_of(chosen, K), ranked=ranks.median(len(chosen)).around(K - 4 * f))


def choose(squares: np.ndarray, f: int) -> np.ndarray:
    """K - 2 f clients, from squared distances [K, K]"""
    left = np.arange(len(squares))
    chosen = []
    while len(chosen) < len(squares) - 2 * f:
        n = len(left)
        s = scores(squares[np.ix_(left, left)], max(n - f - 2, 1)) if n > 1 else np.zeros(1)
        at = int(np.argmin(s))  # the first of several with the same score
        chosen.append(int(left[at]))
        left = np.delete(left, at)
    return np.array(chosen)
