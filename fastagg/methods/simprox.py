"""SimProx (El-Niss et al., 2024): clients count by how similar they are to the others and how little they moved.

    S = lam cos(w_i, w_j) + (1 - lam) exp(-||w_i - w_j||^2 / (2 sigma^2)),  sigma the mean distance     (Eq. 7 to 10)
    alpha_i = exp(-g_i) (1 + mean_{j != i} S_ij),  g_i = ||w_i - w_i_previous||                          (Eq. 11, 12)
    weights = softmax(alpha / sum alpha)                                                                 (Eq. 13)

exp(-g) underflows for every client once updates are longer than 104 in float32 (745 in float64), and the paper's form
becomes 0 / 0: alpha / sum alpha is computed here in logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastagg._engine.aggregator import Aggregator, check_number, float64, function_of
from fastagg._engine.gram import Gram
from fastagg._engine.table import InputError


@dataclass(kw_only=True, eq=False)
class SimProx(Aggregator):
    """Weights from the similarity of client models and the length of their updates.

    lam         share of the cosine in the similarity, the rest is Gaussian
    tau         heterogeneity threshold: lam shrinks by mean cos(w_k, g) / tau while that mean is below it, down to 0
                when it is negative. The paper names no value.
    lengths     of one round: ||w_k - previous model of client k||, [K]; default: the length of its update
    """

    name = "simprox"
    paper = "El-Niss et al., IEEE OJ-COMS 2024"
    round_info = ("lengths",)
    per_client = ("lengths",)

    lam: float = 0.7
    tau: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("simprox", "lam", self.lam, 0, 1)
        check_number("simprox", "tau", self.tau, 0, 1, strict=True)

    def weigh(self, gram: Gram, n: np.ndarray, lengths=None) -> np.ndarray:
        K = gram.K
        g = gram.norms().cpu().numpy() if lengths is None else float64(lengths)
        if g.shape != (K,) or not np.isfinite(g).all() or (g < 0).any():
            raise InputError(f"lengths: expected {K} finite numbers >= 0, one per client")
        agreement = gram.cosine("global").mean().item()
        lam = self.lam * max(agreement, 0) / self.tau if agreement < self.tau else self.lam
        S = lam * gram.cosine("models").cpu().numpy() + (1 - lam) * gram.gaussian().cpu().numpy()
        others = (S.sum(1) - np.diag(S)) / (K - 1) if K > 1 else np.ones(1)
        log_alpha = -g + np.log(np.maximum(1 + others, 1e-300))  # 1 + others is 0 when opposite to all
        alpha = np.exp(log_alpha - log_alpha.max())
        e = np.exp(alpha / alpha.sum())
        return e / e.sum()


simprox = function_of(SimProx)
