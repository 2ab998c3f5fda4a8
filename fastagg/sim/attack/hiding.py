"""Attacks that stay among the updates of others: all attackers send the same, which is made from the updates d_i,
i = 1 ... n, that they see (known.seen). With b the mean of these, and sigma their standard deviation, per coordinate:

    alie      b - z sigma                           "A little is enough" (Baruch et al., NeurIPS 2019)
    ipm       - epsilon b                           inner product manipulation (Xie et al., UAI 2019)
    min-max   b + gamma p,  the largest gamma with  max_i ||b + gamma p - d_i|| <= max_ij ||d_i - d_j||
    min-sum   b + gamma p,  the largest gamma with  sum_i ||b + gamma p - d_i||^2 <= max_i sum_j ||d_i - d_j||^2
              both: Shejwalkar and Houmansadr, NDSS 2021; p is - sigma (std), - b / ||b|| (unit) or - sign(b) (sign)

The strength is z, or epsilon. The paper's z is the largest at which, if updates are normal, so many honest clients are
farther from b than the attackers that these and the attackers are a majority.

The paper of the last two searches for gamma by halving its steps. Both conditions are quadratic in gamma, and their
coefficients are products of the vectors d_i - b and p: one Gram gives the gamma that the search approaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch

import fastagg
from fastagg.sim.attack.known import Known, State
from fastagg.sim.devices import float64


def alie(known: Known) -> State:
    mean, deviation = moments(known.seen)
    z = largest_z(len(known.own) + len(known.honest), len(known.own)) if known.strength is None else known.strength
    return {name: mean[name] - z * deviation[name] for name in mean}


def ipm(known: Known) -> State:
    assert known.strength is not None  # the configuration has a default
    mean, _ = moments(known.seen)
    return {name: -known.strength * value for name, value in mean.items()}


def min_max(known: Known) -> State:
    mean, p = mean_and_direction(known)
    far, towards, square = products(known.seen, mean, p)
    own = far.diagonal()
    most = (own[:, None] + own - 2 * far).max()  # the squared distance of the two that are farthest apart
    # square gamma^2 - 2 towards_i gamma + own_i <= most, for all i
    root = np.sqrt(np.maximum(towards**2 + square * (most - own), 0))
    return moved(mean, p, float(((towards + root) / square).min()) if square else 0.0)


def min_sum(known: Known) -> State:
    mean, p = mean_and_direction(known)
    far, towards, square = products(known.seen, mean, p)
    own, n = far.diagonal(), len(far)
    most = (n * own + own.sum() - 2 * far.sum(1)).max()  # the sum of squared distances of the one farthest from all
    half = towards.sum()  # 0 up to rounding: p is the same for all, and they are around their mean
    root = np.sqrt(max(half**2 + n * square * (most - own.sum()), 0))
    return moved(mean, p, float((half + root) / (n * square)) if square else 0.0)


def largest_z(clients: int, attackers: int) -> float:
    """Of the paper, with at least one supporter; 0 where even the mean has too few"""
    supporters = max(clients // 2 + 1 - attackers, 1)
    honest = clients - attackers
    share = (honest - supporters) / honest if honest else 0.0
    return NormalDist().inv_cdf(share) if share > 0.5 else 0.0


def moments(updates: Sequence[State]) -> tuple[State, State]:
    """Mean and standard deviation (of the population) of each coordinate, float64"""
    mean, deviation = {}, {}
    for name in updates[0]:
        values = float64(torch.stack([u[name] for u in updates]))
        mean[name], deviation[name] = values.mean(0), values.std(0, correction=0)
    return mean, deviation


def mean_and_direction(known: Known) -> tuple[State, State]:
    """b and p"""
    mean, deviation = moments(known.seen)
    if known.direction == "std":
        return mean, {name: -value for name, value in deviation.items()}
    if known.direction == "sign":
        return mean, {name: -value.sign() for name, value in mean.items()}
    length = float(np.sqrt(sum(value.square().sum().item() for value in mean.values()))) or 1.0
    return mean, {name: -value / length for name, value in mean.items()}


def products(updates: Sequence[State], mean: State, p: State) -> tuple[np.ndarray, np.ndarray, float]:
    """<e_i, e_j>, <e_i, p> and <p, p>, where e_i = d_i - b"""
    rows = [{name: float64(value) - mean[name] for name, value in u.items()} for u in updates]
    zero = {name: torch.zeros_like(value) for name, value in mean.items()}
    gram = fastagg.gram(zero, [*rows, p], params=list(zero)).host.updates().numpy()
    return gram[:-1, :-1], gram[:-1, -1], float(gram[-1, -1])


def moved(mean: State, p: State, gamma: float) -> State:
    return {name: mean[name] + gamma * p[name] for name in mean}
