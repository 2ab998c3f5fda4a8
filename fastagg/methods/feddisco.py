"""FedDisco (Ye et al., ICML 2023): clients count by their data, less how far their labels are from the target's.

    weights ~ relu(n_k - a disc_k + b),  disc_k the discrepancy of client k's label distribution and the target's

By default disc is what the authors' code has by default and their scripts use: the KL divergence from the uniform
distribution, divided by its sum over the cohort.

Nothing of it depends on the models: one read of the clients, no Gram.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fastagg._engine.aggregator import (
    Aggregator,
    Cohort,
    check_choice,
    check_flag,
    check_number,
    describe,
    float64,
    function_of,
    ratio,
    shares,
)
from fastagg._engine.result import Result
from fastagg._engine.table import InputError, Table

TINY = np.finfo(np.float64).tiny


@dataclass(kw_only=True, eq=False)
class FedDisco(Aggregator):
    """Weights from data shares and from how far each client's labels are from the global label distribution.

    a            how much a discrepancy counts
    b            what every client is given before negative weights are cut off
    metric       "kl": KL divergence of the client from the target, in nats; "l2": Euclidean distance
    target       "uniform", or "global": the clients' distributions averaged by their data shares
    normalize    divide the discrepancies by their sum over the cohort, so that they compare with data shares; default:
                 as in the authors' code, with "kl" only
    label_dist   of one round, required: each client's label distribution, [K, classes], as counts or shares

    Where every weight is cut off, clients get their data shares. The result has .weights and .discrepancy, [K].
    """

    name = "feddisco"
    paper = "Ye et al., ICML 2023"
    round_info = ("label_dist",)
    per_client = ("label_dist",)
    needs_global = False  # None is accepted; otherwise its form is checked

    a: float = 0.5
    b: float = 0.1
    metric: str = "kl"
    target: str = "uniform"
    normalize: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("feddisco", "a", self.a, 0, float("inf"))
        check_number("feddisco", "b", self.b, -float("inf"), float("inf"))
        check_choice("feddisco", "metric", self.metric, ("l2", "kl"))
        check_choice("feddisco", "target", self.target, ("uniform", "global"))
        if self.normalize is not None:
            check_flag("feddisco", "normalize", self.normalize)

    def round(self, cohort: Cohort, out, label_dist=None) -> Result:
        p = distributions(label_dist, cohort.table)
        target = np.full(p.shape[1], 1 / p.shape[1]) if self.target == "uniform" else cohort.n @ p
        disc = discrepancy(p, target, self.metric)
        if self.metric == "kl" if self.normalize is None else self.normalize:
            disc = np.where(disc > 1e-14, disc, 0)  # or equal distributions would be told apart by their rounding
            disc = ratio(disc, disc.sum())
        weights = np.maximum(cohort.n - self.a * disc + self.b, 0)
        weights = weights / weights.sum() if weights.any() else cohort.n
        [result] = cohort.mix(weights[None], out=out)
        return describe(result, cohort, weights, discrepancy=torch.from_numpy(disc))


feddisco = function_of(FedDisco)


def distributions(label_dist, table: Table) -> np.ndarray:
    """What the caller gave as label_dist, checked, its rows summing to 1: [K, classes]"""
    if label_dist is None:
        raise InputError("label_dist is missing: feddisco needs each client's label distribution, [K, classes]")
    p, K = float64(label_dist), table.K
    if p.ndim != 2 or len(p) != K or not p.shape[1]:
        raise InputError(f"label_dist has shape {p.shape}, expected ({K}, classes): one row per client")
    for k in np.flatnonzero(~(np.isfinite(p) & (p >= 0)).all(1)):
        raise InputError(f"label_dist: the row of {table.name(k)} is not of finite numbers >= 0")
    for k in np.flatnonzero(~p.any(1)):
        raise InputError(f"label_dist: the row of {table.name(k)} is all zero, it has no labels")
    return shares(p)


def discrepancy(p: np.ndarray, target: np.ndarray, metric: str) -> np.ndarray:
    """Of each row of p [K, classes] and the target [classes]: [K]"""
    if metric == "l2":
        return np.sqrt(((p - target) ** 2).sum(1))
    # A label only a client without weight has is not in the target: large then, not infinite.
    terms = p * (np.log(np.maximum(p, TINY)) - np.log(np.maximum(target, TINY)))
    return np.maximum(terms.sum(1), 0)
