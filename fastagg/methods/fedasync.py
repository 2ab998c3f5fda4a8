"""FedAsync (Xie et al., 2019): each client's model is mixed into the global one as it comes.

    new = (1 - alpha_k) g + alpha_k w_k,      alpha_k = alpha s(t_k)

t_k is the number of versions made since the client got its model; s is polynomial, hinge or constant. Of several
clients at a time the new model is the mean of what each alone would make of g, so their order does not matter.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, Range, Weights, register
from fastagg.methods.asynchronous import Asynchronous, Versions


@register
class FedAsync(Asynchronous):
    """Asynchronous: each client's model is mixed into the global one as it comes; the staler, the less of it.

    alpha     how much of a client's model the new one has, if it is not stale
    decay     how that falls with the staleness t, the number of versions made since the client got its model:
              "polynomial", (1 + t)^-a; "hinge", 1 up to t = b, then 1 / (a (t - b) + 1); "constant", 1
    a, b      of decay; a is 0.5 (polynomial) or 10 (hinge) by default
    version   per round, required: [K], the number of the version that each client started from. The first one is 0,
              each round makes the next, and the aggregator's .version is the current one

    With weights alpha s(t), times the data shares of several clients, the new model is g + sum_k weights_k (w_k - g);
    .staleness has t. Buffers are mixed likewise. A client that started from an older version has to send its model, not
    an update.
    """

    name = "fedasync"
    paper = "Xie et al., OPT 2020"
    stale_as = "models"

    alpha: Annotated[float, Range(above=0, high=1)] = 0.6

    @property
    def waits_for(self) -> int:
        return 1

    def weigh(self, cohort: Cohort, version: np.ndarray) -> Weights:
        t = self.stalenesses(cohort, version)
        weights = self.alpha * cohort.shares * self.discounts(t)
        return Weights(weights, center=1 - weights.sum(), about={"staleness": t})

    def _why_not_stale(self, state: Versions, version: int) -> str:
        return (
            f"it sent an update of version {version} of the global model, and the current one is {state.now}: "
            "send the model itself"
        )
