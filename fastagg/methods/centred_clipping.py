"""Centred clipping (Karimireddy et al., ICML 2021): no client moves the model further than a clipped update may.

    v = v + 1/K sum_k (w_k - v) min(1, tau / ||w_k - v||),      from v = g

Every v is g + sum_k c_k d_k, so ||w_k - v|| comes from the Gram, and an iteration is c = (1 - mean s) c + s / K with
s_k = min(1, tau / ||w_k - v||): the c_k are never negative and their sum is never above 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastagg.methods.common import (
    Aggregator,
    Cohort,
    check_flag,
    check_integer,
    check_number,
    describe,
    function_of,
)
from fastagg.result import Result


@dataclass(kw_only=True, eq=False)
class CentredClipping(Aggregator):
    """The mean of the clients' updates, none longer than tau: the model moves at most that far per iteration.

    tau          updates are clipped to this length; choose it near the length of an honest one
    iterations   clip again around the model found so far, this often in all
    weighted     by the data shares. False, as in the paper: every client counts alike, whatever size it claims
    params, layers, out   as in fastagg.gram and fastagg.mix

    The model is g + sum_k weights_k (w_k - g): .weights are never negative and sum to at most 1, less when updates were
    clipped. Buffers have no g to fall back on: they take the same weights scaled to sum to 1, so that who was clipped
    counts little there too.
    """

    name = "centred_clipping"
    paper = "Karimireddy et al., ICML 2021"

    tau: float = 10.0
    iterations: int = 1
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("centred_clipping", "tau", self.tau, 1e-100, float("inf"))
        check_integer("centred_clipping", "iterations", self.iterations, 1)
        check_flag("centred_clipping", "weighted", self.weighted)

    def round(self, cohort: Cohort, out) -> Result:
        gram = cohort.gram()
        masses = cohort.n if self.weighted else np.full(cohort.K, 1 / cohort.K)
        c = clip(gram.updates().cpu().numpy(), masses, self.tau, self.iterations)
        [result] = cohort.mix(c[None], center=1 - c.sum(), buffers=(c / c.sum())[None], out=out)
        return describe(result, cohort, c, gram)


def clip(G: np.ndarray, masses: np.ndarray, tau: float, iterations: int) -> np.ndarray:
    """c [K] after so many iterations, from <d_i, d_j> and masses that sum to 1"""
    squares = np.diag(G)
    c = np.zeros(len(G))
    for _ in range(iterations):
        Gc = G @ c
        distance = np.sqrt(np.maximum(squares - 2 * Gc + c @ Gc, 0))
        s = masses * (tau / np.maximum(distance, tau))
        c = (1 - s.sum()) * c + s
    return c


centred_clipping = function_of(CentredClipping)
