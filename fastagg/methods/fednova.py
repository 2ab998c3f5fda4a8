"""FedNova (Wang et al., NeurIPS 2020): updates are divided by how much each client trained before they are averaged.

    new = g + tau_eff sum_k n_k d_k / a_k,      tau_eff = sum_k n_k a_k

with a_k = ||a_k||_1 of the paper: the number of local steps of plain SGD, and with client momentum rho
(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) for tau steps. Equal a_k give FedAvg. The weights
tau_eff n_k / a_k need not sum to 1 (what is missing, or too much, is made up with g), so buffers take the data shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from fastagg.extend import Cohort, GlobalAggregator, InputError, Range, RoundInput, Weights, nonfinite, register


@register
class FedNova(GlobalAggregator):
    """The mean of the client updates, each divided by its number of local steps. One read, no Gram.

    momentum      of the clients' SGD; 0 for plain SGD
    local_steps   per round, required: the number of steps that each client took, [K], positive. For another local
                  solver, pass the paper's ||a_k||_1, with momentum 0.

    .weights are tau_eff n_k / a_k, which need not sum to 1: the model is g + sum_k weights_k (w_k - g). Buffers are
    averaged by the data shares.
    """

    name = "fednova"
    paper = "Wang et al., NeurIPS 2020"
    reads = "weights"
    round_inputs = (RoundInput("local_steps", "how many steps each client took", required=True, above=0, kind="steps"),)

    momentum: Annotated[float, Range(0, 0.9999)] = 0.0  # the formula cancels as momentum comes near 1

    def weigh(self, cohort: Cohort, local_steps: np.ndarray) -> Weights:
        with np.errstate(over="ignore", invalid="ignore"):
            a = effective_steps(local_steps, self.momentum)
            weights = cohort.shares / a * (cohort.shares @ a)
        return Weights(weights, center=1 - weights.sum(), others=cohort.shares)

    def parts_of_mean(self, size: float, inputs: Mapping[str, Any]) -> tuple[float, float]:
        return size / float(effective_steps(inputs.get("local_steps", 1.0), self.momentum)), size

    def step_of_mean(self, parts: np.ndarray) -> float:
        by_steps, n = parts[parts[:, 0] > 0].T  # n / a, n
        return float((n * n / by_steps).sum() / n.sum() * by_steps.sum() / n.sum())  # the sum of .weights

    def explain(self, cohort: Cohort, error: InputError, *, local_steps: np.ndarray, **_: Any) -> InputError:
        """A result out of range, put down to clients whose numbers of steps are far from all others, if any are"""
        if isinstance(error, nonfinite.NonFiniteError) and not isinstance(error, nonfinite.OutOfRangeError):
            return error
        with np.errstate(over="ignore", divide="ignore"):
            apart = local_steps / np.median(local_steps)
            apart = np.maximum(apart, 1 / apart)
        odd = nonfinite.dominant(apart)
        if not odd:
            return error
        words = f"it took {local_steps[odd[0]]:g} local steps, the median client {np.median(local_steps):g}"
        return nonfinite.too_large(cohort.table, odd, f"fednova: the new model is too large for its dtype ({words})")


def effective_steps(steps: np.ndarray | float, momentum: float) -> np.ndarray | float:
    """||a_k||_1: what a step of constant gradient adds up to over `steps` steps, in units of the learning rate"""
    if momentum == 0:
        return steps
    rest = 1 - momentum
    return (steps + momentum * np.expm1(steps * np.log(momentum)) / rest) / rest
