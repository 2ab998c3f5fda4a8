"""WeiAvg (Dong et al., 2023): clients with more diverse data count more.

Diversity is the entropy of a client's labels or, where the server may not know it, what correlates with it: the length
of the client's update along the mean update u,

    p_k = <d_k, u> / ||u||                                                                                     (Eq. 3)
    weights = z^lam / sum z^lam,  z = p shifted to be positive                                            (Alg. 1 and 2)

The paper does not give the shift. Here it is the smallest one that makes every value at least 1 % of the mean
magnitude; values that are so already are not shifted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastagg._engine.aggregator import Aggregator, Cohort, check_number, describe, float64, function_of
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result
from fastagg._engine.table import InputError

LEAST = 0.01  # of the mean magnitude: the smallest value after the shift


@dataclass(kw_only=True, eq=False)
class WeiAvg(Aggregator):
    """Weights from the diversity of the clients' data, seen in how far each update goes along the mean update.

    lam         emphasis on diverse clients, the power of their diversity: 0 is the plain mean, 10 is much
    entropies   of one round: the entropy of each client's labels, [K], instead of the projection; the round is then a
                single read of the clients

    Sizes have no part in it: the paper's clients have equally much data, and its u is their plain mean.
    """

    name = "weiavg"
    paper = "Dong et al., IEEE WF-IoT 2023"
    round_info = ("entropies",)
    per_client = ("entropies",)

    lam: float = 1.0  # the text's "1e-4" must be the learning rate, which is missing there: it would be the plain mean

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("weiavg", "lam", self.lam, 0, float("inf"))

    def round(self, cohort: Cohort, out, entropies=None) -> Result:
        if entropies is None:
            return super().round(cohort, out)
        entropies = float64(entropies)
        if entropies.shape != (cohort.K,) or not np.isfinite(entropies).all() or (entropies < 0).any():
            raise InputError(f"entropies: expected {cohort.K} finite numbers >= 0, one per client")
        weights = emphasise(entropies, self.lam)
        [result] = cohort.mix(weights[None], out=out)
        return describe(result, cohort, weights)

    def weigh(self, gram: Gram, n: np.ndarray) -> np.ndarray:
        return emphasise(gram.projection().cpu().numpy(), self.lam)


weiavg = function_of(WeiAvg)


def emphasise(diversity: np.ndarray, lam: float) -> np.ndarray:
    """Weights [K] that grow with the lam-th power of diversity [K]; equal when all of it is zero"""
    largest = np.abs(diversity).max()
    if largest == 0:
        return np.full(len(diversity), 1 / len(diversity))
    z = diversity / largest
    z = z + max(LEAST * np.abs(z).mean() - z.min(), 0)
    w = np.exp(lam * np.log(z / z.max()))  # the largest is 1, so that no power overflows or makes all of them 0
    return w / w.sum()
