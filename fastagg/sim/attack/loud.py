"""Attacks that shout. With d an attacker's update and s the strength:

noise   s ||d|| z / ||z||        z: Gaussian noise; norms are of all parameters together
flip    - s d
scale   s d
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fastagg.sim.attack.known import Known, State
from fastagg.sim.devices import float64


def noise(known: Known) -> list[State]:
    moves = []
    for d, rng in zip(known.own, known.rngs, strict=True):
        z = {name: torch.from_numpy(rng.standard_normal(tuple(value.shape))) for name, value in d.items()}
        factor = strength_of(known) * length(d) / (length(z) or 1.0)
        moves.append({name: (factor * z[name]).to(value) for name, value in d.items()})
    return moves


def flip(known: Known) -> list[State]:
    return [{name: -strength_of(known) * value for name, value in d.items()} for d in known.own]


def scale(known: Known) -> list[State]:
    return [{name: strength_of(known) * value for name, value in d.items()} for d in known.own]


def strength_of(known: Known) -> float:
    assert known.strength is not None  # the configuration has a default for these attacks
    return known.strength


def length(tensors: Mapping[str, Tensor]) -> float:
    """The norm of all tensors together"""
    return math.sqrt(sum(float64(t).square().sum().item() for t in tensors.values()))
