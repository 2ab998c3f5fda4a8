"""DnC, divide and conquer (Shejwalkar and Houmansadr, NDSS 2021): leaves out who stands out in the widest direction.

    s_k = <w_k - mean, v>^2 with v the first right singular vector of the rows w_k - mean
    new model: the mean of the K - c f clients of the smallest scores

The paper does this on random subsets of the coordinates, several times, and averages who was never left out: singular
vectors of whole models were too expensive. From the Gram they cost K-by-K arithmetic, so there is one iteration, with
all coordinates; more would be the same.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, InputError, Range, Weights, register
from fastagg.methods.honest_majority import HonestMajority, centred, mean_of


@register
class DnC(HonestMajority):
    """The plain mean of all but the c f client models that are furthest from the mean in the direction of most spread.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 1
    c           filter fraction: c f clients are left out, rounded down; fewer than K

    .weights are equal for the clients that remain and 0 for the others; the first of equal scores remain. Sizes are
    not used.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "dnc"
    paper = "Shejwalkar and Houmansadr, NDSS 2021"

    c: Annotated[float, Range(above=0)] = 1.0

    @property
    def removed(self) -> int:
        """How many clients are left out"""
        return int(self.c * self.f)

    @property
    def min_clients(self) -> int:
        return max(super().min_clients, self.removed + 1)

    def weights_from(self, D: np.ndarray, cohort: Cohort) -> Weights:
        K = cohort.K
        if self.removed >= K:
            raise InputError(
                f"dnc: c={self.c:g} with f={self.f} leaves out {self.removed} of {K} clients; expected at most {K - 1}"
            )
        chosen = np.argsort(outlier_scores(D), kind="stable")[: K - self.removed]
        return Weights(mean_of(chosen, K), only_used=True)


def outlier_scores(D: np.ndarray) -> np.ndarray:
    """<w_k - mean, v>^2 for each client, [K], from squared distances [K, K]: the singular values' left vectors, times
    the first of these"""
    values, vectors = np.linalg.eigh(centred(D, np.full(len(D), 1 / len(D))))
    return max(values[-1], 0.0) * vectors[:, -1] ** 2
