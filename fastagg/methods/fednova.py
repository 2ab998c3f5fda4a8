"""FedNova (Wang et al., NeurIPS 2020): updates are divided by how much each client trained before they are averaged.

    new = g + tau_eff sum_k n_k d_k / a_k,      tau_eff = sum_k n_k a_k

with a_k = ||a_k||_1 of the paper: the number of local steps of plain SGD, and with client momentum rho
(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) for tau steps. Equal a_k give FedAvg. The weights
tau_eff n_k / a_k need not sum to 1 (what is missing, or too much, is made up with g), so buffers take the data shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastagg._engine import finite
from fastagg._engine.aggregator import Aggregator, Cohort, check_number, describe, function_of, one_per_client
from fastagg._engine.result import Result
from fastagg._engine.table import InputError, Table


@dataclass(kw_only=True, eq=False)
class FedNova(Aggregator):
    """The mean of the clients' updates, each divided by its number of local steps. One read, no Gram.

    momentum      of the clients' SGD; 0 for plain SGD
    local_steps   of one round, required: how many steps each client took, [K], positive. For another local solver
                  give the paper's ||a_k||_1, with momentum 0.

    .weights are tau_eff n_k / a_k, which need not sum to 1: the model is g + sum_k weights_k (w_k - g). Buffers are
    averaged by the data shares.
    """

    name = "fednova"
    paper = "Wang et al., NeurIPS 2020"
    round_info = ("local_steps",)
    per_client = ("local_steps",)

    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("fednova", "momentum", self.momentum, 0, 0.9999)  # the formula cancels as momentum comes near 1

    def round(self, cohort: Cohort, out, local_steps=None) -> Result:
        steps = _check_steps(local_steps, cohort.table)
        with np.errstate(over="ignore", invalid="ignore"):
            a = effective_steps(steps, self.momentum)
            weights = cohort.n / a * (cohort.n @ a)
        try:
            [result] = cohort.mix(weights[None], center=1 - weights.sum(), buffers=cohort.n[None], out=out)
        except InputError as error:
            if isinstance(error, finite.NonFiniteError) and not isinstance(error, finite.OutOfRangeError):
                raise
            raise _blaming_steps(cohort, steps, error) from error
        return describe(result, cohort, weights)


def _blaming_steps(cohort: Cohort, steps: np.ndarray, error: InputError) -> InputError:
    """A result out of range, put down to clients whose numbers of steps are far from everybody else's, if any are"""
    with np.errstate(over="ignore", divide="ignore"):
        apart = steps / np.median(steps)
        apart = np.maximum(apart, 1 / apart)
    odd = finite.dominant(apart)
    if not odd:
        return error
    words = f"it took {steps[odd[0]]:g} local steps, the median client {np.median(steps):g}"
    return finite.too_large(cohort.table, odd, f"fednova: the new model is too large for its dtype ({words})")


def _check_steps(local_steps, table: Table) -> np.ndarray:
    if local_steps is None:
        raise InputError("fednova needs local_steps: how many steps each client took")
    steps = one_per_client("local_steps", local_steps, table.K)
    for k in np.flatnonzero(~np.isfinite(steps) | (steps <= 0)):
        words = f"local_steps: {table.name(k)} took {steps[k]} steps, expected a number above 0"
        raise finite.NonFiniteError(words, table.given([k]))
    return steps


def effective_steps(steps: np.ndarray, momentum: float) -> np.ndarray:
    """||a_k||_1: what a step of constant gradient adds up to over `steps` steps, in units of the learning rate"""
    if momentum == 0:
        return steps
    rest = 1 - momentum
    return (steps + momentum * np.expm1(steps * np.log(momentum)) / rest) / rest


fednova = function_of(FedNova)
