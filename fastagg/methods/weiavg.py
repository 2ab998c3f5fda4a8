"""WeiAvg (Dong et al., 2023): clients with more diverse data count more.

Diversity is the entropy of a client's labels or, where the server may not know it, what correlates with it: the length
of the client's update along the mean update u,

    p_k = <d_k, u> / ||u||                                                                                     (Eq. 3)
    weights = z^lam / sum z^lam,  z = p shifted to be positive                                            (Alg. 1 and 2)

The paper does not give the shift. Here it is the smallest one that makes every value at least 1 % of the mean
magnitude; values that are so already are not shifted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, Layout, Pass, Range, RoundInput, register

LEAST = 0.01  # of the mean magnitude: the smallest value after the shift


@register
class WeiAvg(GlobalAggregator):
    """Weights from the diversity of the clients' data, estimated by how far each update goes along the mean update.

    lam         emphasis on diverse clients, the exponent of their diversity: 0 is the plain mean, 10 is strong
    by          what diversity is measured by: "projection" of the updates (Algorithm 2); "entropy" of the labels
                (Algorithm 1): every round then needs entropies
    entropies   per round: the entropy of each client's labels, [K], which replaces the projection; the round is then a
                single read of the clients

    Sizes are not used: the paper's clients have equal data sizes, and its u is their plain mean.
    """

    name = "weiavg"
    paper = "Dong et al., IEEE WF-IoT 2023"
    reads = "products"
    round_inputs = (RoundInput("entropies", "the entropy of each client's labels", low=0, kind="entropies"),)

    # the text's "1e-4" must be the learning rate, which is missing there: it would be the plain mean
    lam: Annotated[float, Range(0)] = 1.0
    by: Literal["projection", "entropy"] = "projection"

    def check_options(self) -> None:
        if self.by == "entropy":
            self.require("entropies")

    def passes(self, layout: Layout, inputs: Mapping[str, Any]) -> tuple[Pass, ...]:
        return ("gram", "mix") if inputs.get("entropies") is None else ("mix",)

    def weigh(self, cohort: Cohort, entropies: np.ndarray | None = None) -> np.ndarray:
        diversity = cohort.gram().projection().cpu().numpy() if entropies is None else entropies
        return emphasise(diversity, self.lam)


def emphasise(diversity: np.ndarray, lam: float) -> np.ndarray:
    """Weights [K] that grow with the lam-th power of diversity [K]; equal when all of it is zero"""
    largest = np.abs(diversity).max()
    if largest == 0:
        return np.full(len(diversity), 1 / len(diversity))
    z = diversity / largest
    z = z + max(LEAST * np.abs(z).mean() - z.min(), 0)
    w = np.exp(lam * np.log(z / z.max()))  # the largest is 1, so that no power overflows or makes all of them 0
    return w / w.sum()
