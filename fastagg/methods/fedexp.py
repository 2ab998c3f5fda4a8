"""FedExP (Jhunjhunwala et al., ICLR 2023): a server step that grows where clients disagree.

    step = max(1, sum_k n_k ||d_k||^2 / (2 (||sum_k n_k d_k||^2 + eps)))
    new = g + step sum_k n_k d_k

FedAvg is the projection of g onto each client's solutions, averaged; where these point in different directions the
average is far too short, and the step makes up for that. The paper's algorithm has equal clients, n_k = 1/K; its code
weighs by data shares, as here. A step of 1 is FedAvg.
"""

from __future__ import annotations

from typing import Annotated

from fastagg.extend import Cohort, GlobalAggregator, Range, Weights, register

# The squared length of the mean over the mean of squared lengths: below this the updates cancel but for rounding
CANCEL = 1e-12


@register
class FedExP(GlobalAggregator):
    """FedAvg with a longer server step: how much longer follows from the lengths of the updates and of their mean.

    eps   added to the squared length of the mean update: keeps steps short where updates nearly cancel, or have become
          small. It is in the units of squared updates, so tune it

    The new model is g + server_lr sum_k weights_k (w_k - g): .weights are the data shares, .server_lr is the step, at
    least 1. Buffers are the mean. Updates that cancel have no direction to go further in: their step is 1.
    """

    name = "fedexp"
    paper = "Jhunjhunwala et al., ICLR 2023"
    reads = "products"

    eps: Annotated[float, Range(0)] = 1e-3

    def weigh(self, cohort: Cohort) -> Weights:
        n = cohort.shares
        gram = cohort.gram(times=n)
        step = extrapolation(float(n @ gram.on_host.squares), float(n @ (gram @ n)), self.eps)
        rest = None if step == 1 else 1 - step
        return Weights(n, scale=step, center=rest, others=n, about={"server_lr": step})


def extrapolation(mean_of_squares: float, square_of_mean: float, eps: float) -> float:
    """The step, from sum_k n_k ||d_k||^2 and ||sum_k n_k d_k||^2"""
    if square_of_mean <= CANCEL * mean_of_squares:
        return 1.0
    return max(1.0, mean_of_squares / (square_of_mean + eps) / 2)
