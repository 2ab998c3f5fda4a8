"""What malicious clients send instead of the model they have trained.

With d = w - start, the update that an honest client would send, and s the strength of the attack:

    noise   start + s ||d|| z / ||z||        z: Gaussian noise; norms are of all parameters together
    flip    start - s d
    scale   start + s d

Only floating-point parameters change. Buffers (BatchNorm's statistics) are sent as they were trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

LARGEST = 1e15  # training goes nowhere from there: float32 holds no square of a number beyond 1.8e19


class Diverged(Exception):
    """The attackers have won: models are so large, or not numbers at all, that training cannot go on"""


def choose(clients: int, share: float, rng: np.random.Generator) -> list[int]:
    """Who is malicious: this share of the clients, rounded to whole ones"""
    return sorted(rng.choice(clients, round(share * clients), replace=False).tolist())


def apply(
    kind: str, start: Mapping[str, Tensor], trained: Mapping[str, Tensor], params: Iterable[str], strength: float,
    rng: np.random.Generator,
) -> dict[str, Tensor]:  # fmt: skip
    """The state dict that an attacker sends: a new one, what it is made of stays as it is. rng is for noise."""
    names = [name for name in params if trained[name].is_floating_point()]
    d = {name: trained[name] - start[name] for name in names}
    if kind == "noise":
        noise = {name: torch.from_numpy(rng.standard_normal(tuple(d[name].shape))) for name in names}
        factor = strength * length(d) / (length(noise) or 1.0)
        moved = {name: start[name] + (factor * noise[name]).to(d[name]) for name in names}
    else:
        factor = {"flip": -strength, "scale": strength}[kind]
        moved = {name: start[name] + factor * d[name] for name in names}
    return {key: moved[key] if key in moved else value.clone() for key, value in trained.items()}


def length(tensors: Mapping[str, Tensor]) -> float:
    """The norm of all tensors together"""
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors.values()))


def check_size(states: Iterable[Mapping[str, Tensor]]) -> None:
    """Raises Diverged where a model has a number beyond LARGEST, or what is none"""
    for state in states:
        for key, value in state.items():
            if value.is_floating_point() and not (value.abs() <= LARGEST).all():
                raise Diverged(f"a client's {key!r} has a value beyond {LARGEST:g}, or one that is not finite")
