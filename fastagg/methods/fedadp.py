"""FedAdp (Wu and Wang, 2021): clients whose updates point along the global one count exponentially more.

    theta_k = angle between d_k and sum_j n_j d_j, averaged over the rounds client k took part in
    f(theta) = alpha (1 - exp(-exp(-alpha (theta - 1))))                          (a Gompertz function, from alpha to 0)
    weights ~ n_k exp(f(theta_k))

Gradients of the paper are updates here: with one step length for all clients, their angles are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any

import numpy as np
import torch

from fastagg.extend import ClientValue, Cohort, GlobalAggregator, Gram, InputError, Range, Weights, ratio, register


@register
class FedAdp(GlobalAggregator):
    """Weights from data shares and from the angle of each client update to the global update, averaged over rounds.

    alpha   steepness: how much more than its data share a client can count (exp(alpha) times), and how suddenly

    An update of zero has no direction; its angle is pi / 2. The result has .weights, .gram and .angles, the averages
    used. The aggregator remembers, for each client id, the average and its number of rounds; state_dict() and
    load_state_dict() let a server resume after a crash. A round that raises does not change this memory.
    """

    name = "fedadp"
    paper = "Wu and Wang, IEEE TCCN 2021"
    reads = "products"
    client_values = (ClientValue("angles"),)

    alpha: Annotated[float, Range(above=0)] = 5.0
    state: dict[Any, tuple[float, int]] = field(init=False, default_factory=dict, repr=False)  # id -> mean, rounds

    def weigh(self, cohort: Cohort) -> Weights:
        now = angles(cohort.gram(times=cohort.shares), cohort.shares)
        past, rounds = np.array([cohort.state.get(name, (0.0, 0)) for name in cohort.ids]).T
        mean = past + (now - past) / (rounds + 1)
        cohort.state = cohort.state | {
            name: (float(angle), int(t) + 1) for name, angle, t in zip(cohort.ids, mean, rounds, strict=True)
        }
        return Weights(gompertz_weights(mean, cohort.shares, self.alpha), about={"angles": torch.from_numpy(mean)})

    def known_clients(self) -> Iterable[Any]:
        return self.state

    def state_dict(self) -> dict[str, Any]:
        """Plain data: client ids, and tensors of their average angles (float64) and numbers of rounds (int64)"""
        return {
            **super().state_dict(),
            "client_ids": list(self.state),
            "angles": torch.tensor([angle for angle, _ in self.state.values()], dtype=torch.float64, device="cpu"),
            "rounds": torch.tensor([t for _, t in self.state.values()], dtype=torch.int64, device="cpu"),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state, ("client_ids", "angles", "rounds"))
        ids, [mean, rounds] = self.read_clients(state, "angles", "rounds")
        for what, values in (("angles", mean), ("rounds", rounds)):
            if values.shape != (len(ids),):
                raise InputError(f"fedadp state: {what} have shape {values.shape}, expected ({len(ids)},)")
        if not ((mean >= 0) & (mean <= np.pi)).all():
            raise InputError("fedadp state: angles are not all between 0 and pi")
        if not (np.isfinite(rounds) & (rounds >= 1) & (rounds == np.floor(rounds))).all():
            raise InputError("fedadp state: rounds are not all integers >= 1")
        super().load_state_dict(state)
        self.state = {name: (float(m), int(t)) for name, m, t in zip(ids, mean, rounds, strict=True)}


def angles(gram: Gram, n: np.ndarray) -> np.ndarray:
    """The angle of each d_k to sum_j n_j d_j, in [0, pi]: [K]"""
    along = gram @ n
    lengths = np.sqrt(gram.on_host.squares) * np.sqrt(max(along @ n, 0))
    return np.arccos(np.clip(ratio(along, lengths), -1, 1))


def gompertz_weights(theta: np.ndarray, n: np.ndarray, alpha: float) -> np.ndarray:
    """n_k exp(f(theta_k)), normalised: [K]"""
    f = -alpha * np.expm1(-np.exp(np.minimum(alpha * (1 - theta), 700)))
    best = f[n > 0].max()  # without it a large alpha would overflow
    w = np.where(n > 0, n * np.exp(np.minimum(f - best, 0)), 0)
    return w / w.sum()
