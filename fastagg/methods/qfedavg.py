"""q-FedAvg (Li et al., ICLR 2020): clients with a large loss count more, so that all end up with a similar one.

    minimise sum_k p_k F_k^(q+1) / (q+1)                                                               (Eq. 2: q-FFL)
    Delta_k = F_k^q L d_k,      h_k = q F_k^(q-1) L^2 ||d_k||^2 + L F_k^q                              (Algorithm 2)
    new = g + sum_k p_k Delta_k / sum_k p_k h_k

F_k is the loss of g on the data of client k, L = 1 / lr stands for the Lipschitz constant of the losses, and h_k bounds
that of F_k^(q+1) / (q+1): the server's step follows from it, for every q. In Algorithm 2 clients are drawn with
probability p_k, and its sums have no p_k. With q = 0, h_k = L: FedAvg.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, Range, RoundInput, SetBy, Weights, register

LARGEST = np.finfo(np.float64).max
ABOVE_ZERO = 1e-10  # added to losses, as in the authors' code: F^(q-1) of a loss of 0 would be infinite


@register
class QFedAvg(GlobalAggregator):
    """Weights that grow with a power of each client's loss, and a server step that follows from them.

    q              how much fairness counts: the power of the loss. 0 is FedAvg; large values approach the minimax of
                   the clients' losses
    lr             1 / L of the paper: the learning rate of the clients, as tuned for q = 0. The simulator sets it
    weighted       True: by data shares, the p_k of Eq. 2. False: as in Algorithm 2, where p_k is the probability that a
                   client is drawn
    start_losses   per round, required: [K], the loss of the global model on the data that each client trains on, >= 0

    .weights are p_k F_k^q L / sum_j p_j h_j, which sum to 1 at most: the model is g + sum_k weights_k (w_k - g).
    Buffers are averaged by the data shares, or equally.
    """

    name = "qfedavg"
    paper = "Li et al., ICLR 2020"
    reads = "products"
    round_inputs = (
        RoundInput(
            "start_losses", "the loss of the global model on the data that each client trains on", required=True, low=0,
            kind="train_losses",
        ),
    )  # fmt: skip

    q: Annotated[float, Range(0, 1e6)] = 0.2
    lr: Annotated[float, Range(1e-30, 1e30), SetBy("lr")] = 0.1
    weighted: bool = True

    def weigh(self, cohort: Cohort, start_losses: np.ndarray) -> Weights:
        p = cohort.shares if self.weighted else np.full(cohort.K, 1 / cohort.K)
        weights = fair_weights(p, start_losses, cohort.gram().on_host.squares, self.q, 1 / self.lr)
        return Weights(weights, center=1 - weights.sum(), others=p)


def fair_weights(p: np.ndarray, losses: np.ndarray, squares: np.ndarray, q: float, L: float) -> np.ndarray:
    """The clients' weights, [K]. Losses are taken over the largest: F^q is in no range of numbers."""
    losses = np.minimum(losses, LARGEST) + ABOVE_ZERO
    with np.errstate(over="ignore"):
        power = p * np.minimum(losses / losses[p > 0].max(), 1) ** q  # p_k F_k^q, but for a factor
        bend = np.minimum(q * L * squares / losses, LARGEST)  # the rest of h_k over L F_k^q, less 1
        return power / (power + power * bend).sum()
