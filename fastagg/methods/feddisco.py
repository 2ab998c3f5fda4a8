"""FedDisco (Ye et al., ICML 2023): clients count by their data, less how far their labels are from the target's.

    weights ~ relu(n_k - a disc_k + b),  disc_k the discrepancy of client k's label distribution and the target's

By default disc is what the authors' code has by default and their scripts use: the KL divergence from the uniform
distribution, divided by its sum over the cohort.

Nothing of it depends on the models: one read of the clients, no Gram.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch

from fastagg.extend import ClientValue, Cohort, GlobalAggregator, Range, RoundInput, Weights, ratio, register, shares

TINY = np.finfo(np.float64).tiny
LABEL_DIST = RoundInput(
    "label_dist", "each client's label distribution, [K, classes]", required=True, entry_dims=1, low=0,
    not_all_zero=True, kind="labels",
)  # fmt: skip


@register
class FedDisco(GlobalAggregator):
    """Weights from data shares and from the discrepancy between each client's labels and the global label distribution.

    a            how much a discrepancy counts
    b            what is added for every client before negative weights are set to 0
    metric       "kl": KL divergence of the client from the target, in nats; "l2": Euclidean distance
    target       "uniform", or "global": the mean of the clients' distributions, weighted by data shares
    normalize    divide the discrepancies by their sum over the cohort, so that they are comparable with data shares;
                 default: as in the authors' code, only with "kl"
    label_dist   per round, required: each client's label distribution, [K, classes], as counts or shares

    If all weights are set to 0, clients get their data shares. The result has .weights and .discrepancy, [K].
    """

    name = "feddisco"
    paper = "Ye et al., ICML 2023"
    reads = "weights"
    needs_global = False  # None is accepted; otherwise its form is checked
    client_values = (ClientValue("discrepancy"),)
    round_inputs = (LABEL_DIST,)

    a: Annotated[float, Range(0)] = 0.5
    b: Annotated[float, Range()] = 0.1
    metric: Literal["l2", "kl"] = "kl"
    target: Literal["uniform", "global"] = "uniform"
    normalize: bool | None = None

    def weigh(self, cohort: Cohort, label_dist: np.ndarray) -> Weights:
        p, n = shares(label_dist), cohort.shares
        target = np.full(p.shape[1], 1 / p.shape[1]) if self.target == "uniform" else n @ p
        disc = discrepancy(p, target, self.metric)
        if self.metric == "kl" if self.normalize is None else self.normalize:
            disc = np.where(disc > 1e-14, disc, 0)  # or equal distributions would be told apart by their rounding
            disc = ratio(disc, disc.sum())
        weights = np.maximum(n - self.a * disc + self.b, 0)
        weights = weights / weights.sum() if weights.any() else n
        return Weights(weights, about={"discrepancy": torch.from_numpy(disc)})


def discrepancy(p: np.ndarray, target: np.ndarray, metric: str) -> np.ndarray:
    """Of each row of p [K, classes] and the target [classes]: [K]"""
    if metric == "l2":
        return np.sqrt(((p - target) ** 2).sum(1))
    # A label only a client without weight has is not in the target: large then, not infinite.
    terms = p * (np.log(np.maximum(p, TINY)) - np.log(np.maximum(target, TINY)))
    return np.maximum(terms.sum(1), 0)
