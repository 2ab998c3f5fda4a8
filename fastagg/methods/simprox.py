"""SimProx (El-Niss et al., 2024): clients count by how similar they are to the others and how little they moved.

    S = lam cos(w_i, w_j) + (1 - lam) exp(-||w_i - w_j||^2 / (2 sigma^2)),  sigma the mean distance     (Eq. 7 to 10)
    alpha_i = exp(-g_i) (1 + mean_{j != i} S_ij),  g_i = ||w_i - w_i_previous||                          (Eq. 11, 12)
    weights = softmax(alpha / sum alpha)                                                                 (Eq. 13)

exp(-g) underflows for every client once updates are longer than 104 in float32 (745 in float64), and the paper's form
becomes 0 / 0: alpha / sum alpha is computed here in logarithms.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, Range, RoundInput, register


@register
class SimProx(GlobalAggregator):
    """Weights from the similarity of the client models and the length of their updates.

    lam         share of the cosine in the similarity; the rest is Gaussian
    tau         heterogeneity threshold: lam is multiplied by mean cos(w_k, g) / tau while that mean is below tau, down
                to 0 if it is negative. The paper gives no value.
    lengths     per round: ||w_k - previous model of client k||, [K]; default: the length of the client update
    """

    name = "simprox"
    paper = "El-Niss et al., IEEE OJ-COMS 2024"
    reads = "pairs"
    round_inputs = (RoundInput("lengths", low=0),)

    lam: Annotated[float, Range(0, 1)] = 0.7
    tau: Annotated[float, Range(above=0, high=1)] = 0.5

    def weigh(self, cohort: Cohort, lengths: np.ndarray | None = None) -> np.ndarray:
        K, gram = cohort.K, cohort.gram()
        g = gram.norms().cpu().numpy() if lengths is None else lengths
        agreement = gram.cosine("global").mean().item()
        lam = self.lam * max(agreement, 0) / self.tau if agreement < self.tau else self.lam
        S = lam * gram.cosine("models").cpu().numpy() + (1 - lam) * gram.gaussian().cpu().numpy()
        others = (S.sum(1) - np.diag(S)) / (K - 1) if K > 1 else np.ones(1)
        log_alpha = -g + np.log(np.maximum(1 + others, 1e-300))  # 1 + others is 0 when opposite to all
        alpha = np.exp(log_alpha - log_alpha.max())
        e = np.exp(alpha / alpha.sum())
        return e / e.sum()
