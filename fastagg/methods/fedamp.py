"""FedAMP (Huang et al., AAAI 2021): every client gets a model of its own, made of the models near it.

    xi_ij = alpha A'(||w_i - w_j||^2) for j != i,  A'(x) = exp(-x / sigma) / sigma,  xi_ii = 1 - sum_{j != i} xi_ij
    u_i = sum_j xi_ij w_j

That is a gradient step of length alpha on the attention sum_{i<j} 1 - exp(-||w_i - w_j||^2 / sigma). All distances are
read off one Gram and all K models come out of one mix.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fastagg.extend import Cohort, Gram, PersonalisedAggregator, Range, ratio, register


@register
class FedAMP(PersonalisedAggregator):
    """One model per client: its own model mixed with the others, the closer the more (attentive message passing).

    alpha   step length; default sigma / K, so that identical clients are averaged evenly and no client keeps less than
            1 / K of itself
    sigma   squared distance at which attention falls to 1 / e; default: the mean squared distance between two clients
            of the round, so that attention does not depend on the scale of the models

    If alpha is so large that the others would get more than everything, their attention is scaled down to a sum of 1:
    xi stays convex and no model is extrapolated. Sizes are checked but not used.

    The result is a list of K state dicts in the order of the clients, with .mixing ([K, K], rows sum to 1) and .gram.
    """

    name = "fedamp"
    paper = "Huang et al., AAAI 2021"
    reads = "pairs"

    alpha: Annotated[float, Range(above=0)] | None = None
    sigma: Annotated[float, Range(above=0)] | None = None

    def weigh(self, cohort: Cohort) -> np.ndarray:
        return attention(cohort.distance_gram(), self.alpha, self.sigma)


def attention(gram: Gram, alpha: float | None, sigma: float | None) -> np.ndarray:
    """xi, [K, K]: non-negative, rows sum to 1"""
    K = gram.K
    squares = gram.squared_distances().cpu().numpy()
    if sigma is None:
        sigma = squares.sum() / max(K * (K - 1), 1)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # an infinite step is a capped one
        step = 1 / K if alpha is None else np.float64(alpha) / np.float64(sigma)
        near = np.exp(-ratio(squares, np.float64(sigma)))  # [K, K], 1 where sigma is 0: all clients at one point
        np.fill_diagonal(near, 0)
        reach = near.sum(1, keepdims=True)
        xi = ratio(near, reach) * np.where(reach > 0, np.minimum(step * reach, 1), 0)
    np.fill_diagonal(xi, np.maximum(1 - xi.sum(1), 0))
    return xi
