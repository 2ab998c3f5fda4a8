"""FoolsGold (Fung et al., RAID 2020): clients whose updates are too much alike are taken for one attacker's sybils.

    v_k = max(0, max_{j != k} cos(d_k, d_j))
    cos(d_k, d_j) is multiplied by v_k / v_j where v_j > v_k             (pardons who only resembles one of the sybils)
    alpha_k = 1 - max_{j != k} cos(d_k, d_j), in [0, 1], over the largest alpha
    alpha_k = kappa (ln(alpha_k / (1 - alpha_k)) + 1/2), in [0, 1]
    new model g + 1/K sum_k alpha_k d_k

The paper compares the sums of each client's updates over all rounds so far. Their products are not known from the Grams
of the rounds, only from the sums themselves: a model for every client there ever was. fastagg does not keep these; it
compares the updates of the round, which the paper has as its variant without memory.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, Range, Weights, ratio, register

ALIKE = 1e-6  # 1 - cosine of updates that are the same, as far as a Gram of float32 models tells


@register
class FoolsGold(GlobalAggregator):
    """The mean of the client updates, in which updates that point in the same direction as others count little.

    kappa       confidence: larger values make the difference between clients that count and clients that do not sharper

    The model is g + sum_k weights_k (w_k - g), with weights alpha_k / K: at most 1 / K, less for clients that are like
    others. It is for clients with different data, one of whom appears as many. Honest clients with the same data are
    alike too and lose their weight; attackers that differ from each other keep it. If all updates are the same (to
    1e-6 of their cosine), the parameters do not change.
    Only the updates of this round are compared: the paper's sums of each client's updates are not kept. Sizes are not
    used. An update of zero has no direction, and is like no other.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.
    """

    name = "foolsgold"
    paper = "Fung et al., RAID 2020"
    reads = "pairs"
    buffers = "median"

    kappa: Annotated[float, Range(above=0)] = 1.0

    def weigh(self, cohort: Cohort) -> Weights:
        w = learning_rates(cohort.gram().host.cosine().numpy(), self.kappa) / cohort.K
        return Weights(w, center=1 - w.sum(), only_used=bool(w.any()))


def learning_rates(cosine: np.ndarray, kappa: float) -> np.ndarray:
    """alpha, [K], from the cosines of updates, [K, K]"""
    cosine = cosine.copy()
    np.fill_diagonal(cosine, -np.inf)
    v = np.maximum(cosine.max(1), 0)
    np.fill_diagonal(cosine, 0)
    cosine *= np.where(v[None, :] > v[:, None], ratio(np.minimum(v[:, None], v), v), 1)
    np.fill_diagonal(cosine, -np.inf)
    alpha = np.clip(1 - cosine.max(1), 0, 1)
    alpha[alpha < ALIKE] = 0
    alpha = ratio(alpha, alpha.max())
    with np.errstate(divide="ignore"):  # of 0 the logarithm is -inf, of 1 it is inf, which become 0 and 1
        return np.clip(kappa * (np.log(alpha / (1 - alpha)) + 0.5), 0, 1)
