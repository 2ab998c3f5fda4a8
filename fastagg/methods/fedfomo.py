"""FedFomo (Zhang et al., ICLR 2021): every client takes from the others what helps on its own data.

    u_in = max(0, L_i(s_i) - L_i(w_n)) / ||w_n - s_i||
    new model of client i = s_i + sum_n u_in / sum_m u_im (w_n - s_i)

L_i is the loss on data of client i, best on such as it does not train on, s_i the model that it started the round from,
w_n the model that client n has trained (its own is one of them). A gain per distance is what a step in that direction
is worth to first order. The weights of a client sum to 1, so that s_i cancels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastagg.extend import Cohort, Layout, Pass, PersonalisedAggregator, RoundInput, ratio, register


@register
class FedFomo(PersonalisedAggregator):
    """One model per client: the models that do better on its data than the one it started from, by how much better.

    losses         per round, required: [K, K], the loss of client n's model on data of client i in row i, column n; NaN
                   or infinite where the model has none
    start_losses   per round, required: [K], the loss on its data of the model that each client started from
    distances      per round: [K, K], how far client n's model is from the one that client i started from; default: from
                   the global model, which is right where all clients started from it

    A model whose loss is not finite is taken by nobody; a client for which no model does better keeps the one it has
    trained. Sizes are checked but not used.

    The result is a list of K state dicts in the order of the clients, with .mixing ([K, K], rows sum to 1).
    """

    name = "fedfomo"
    paper = "Zhang et al., ICLR 2021"
    reads = "products"
    round_inputs = (
        RoundInput(
            "losses", "the loss of every client's model on every client's data, [K, K]", required=True, entry_dims=1,
            pairwise=True, finite=False, from_clients=False, kind="cross_losses",
        ),
        RoundInput(
            "start_losses", "the loss of the model that each client started from, on its data", required=True,
            kind="start_losses",
        ),
        RoundInput(
            "distances", entry_dims=1, pairwise=True, low=0, finite=False, from_clients=False, kind="start_distances"
        ),
    )  # fmt: skip

    def passes(self, layout: Layout, inputs: Mapping[str, Any]) -> tuple[Pass, ...]:
        return ("gram", "mix") if inputs.get("distances") is None else ("mix",)

    def weigh(
        self, cohort: Cohort, losses: np.ndarray, start_losses: np.ndarray, distances: np.ndarray | None = None
    ) -> np.ndarray:
        if distances is None:
            lengths = np.sqrt(np.maximum(cohort.gram().on_host.squares, 0))
            distances = np.broadcast_to(lengths, losses.shape)
        return first_order(losses, start_losses, distances)


def first_order(losses: np.ndarray, start_losses: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """The weights, [K, K]: rows sum to 1. What is infinitely near has gained nothing, nor has what is not finite."""
    known = np.isfinite(losses) & np.isfinite(distances) & (distances > 0)
    with np.errstate(over="ignore"):
        gains = np.maximum(start_losses[:, None] - np.where(known, losses, 0), 0)
    gains = np.minimum(np.where(known, gains, 0), np.finfo(np.float64).max)
    # over the largest gain and times the least distance: no ratio leaves float64
    least = np.where(gains > 0, distances, np.inf).min(1, keepdims=True)
    with np.errstate(invalid="ignore"):
        near = np.where(gains > 0, least / np.where(known, distances, 1), 0)
    u = ratio(gains, gains.max(1, keepdims=True)) * near
    total = u.sum(1, keepdims=True)
    return np.where(total > 0, ratio(u, total), np.eye(len(losses)))
