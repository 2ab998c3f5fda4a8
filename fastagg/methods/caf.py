"""CAF, the covariance bound-agnostic filter (Allouah et al., ICML 2025): clients that widen the cohort lose weight.

From c = 1 for every client, while sum c > K - 2 f,

    mu = sum c_k w_k / sum c,      Sigma = sum_k c_k (w_k - mu)(w_k - mu)' / sum c
    tau_k = <v, w_k - mu>^2 with v the eigenvector of Sigma's largest eigenvalue
    c_k = c_k (1 - tau_k / max tau)                                          (the maximum is over clients with c_k > 0)

and the new model is the mu of the smallest largest eigenvalue that was met. Every w_k - mu is a combination of
differences of clients, and so is v: Sigma's eigenvalues are those of a K-by-K matrix of their products.
"""

from __future__ import annotations

import numpy as np

from fastagg.extend import Cohort, Weights, register
from fastagg.methods.honest_majority import HonestMajority, centred

SAME = 1e-12  # of two taus: equal clients lose weight together, whatever the rounding


@register
class CAF(HonestMajority):
    """A mean of the clients whose largest variance, over all directions, is small: outliers in it lose their weight.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 1

    .weights are not negative and sum to 1; sizes are not used. With f=0 they are equal.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "caf"
    paper = "Allouah et al., ICML 2025"

    def weights_from(self, D: np.ndarray, cohort: Cohort) -> Weights:
        return Weights(filtered(D, self.f), only_used=True)


def filtered(D: np.ndarray, f: int) -> np.ndarray:
    """The weights, [K], from squared distances [K, K]"""
    K = len(D)
    c, least, best = np.ones(K), np.inf, np.full(K, 1 / K)
    while c.sum() > K - 2 * f:  # which takes K rounds at most: each leaves a client without weight
        w = c / c.sum()
        products, root = centred(D, w), np.sqrt(w)
        values, vectors = np.linalg.eigh(root[:, None] * products * root)
        if values[-1] < least:
            least, best = values[-1], w
        along = np.where(c > 0, np.abs(products @ (root * vectors[:, -1])), 0)
        if not along.any():
            break  # all that have weight are the same point
        tau = (along / along.max()) ** 2  # of which the largest is 1
        c = np.where(tau < 1 - SAME, c * (1 - tau), 0)
    return best
