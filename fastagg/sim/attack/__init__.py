"""Malicious clients: who they are, what they train on, and what they send instead of the model they have trained.

known      what attackers know in a round, of which an attack is a function
loud       noise, flip, scale: from each attacker's own update; of great length
hiding     alie, ipm, min-max, min-sum: among the updates of the others, which the attackers know
data       labels, backdoor: from the data that the attackers train on

Only floating-point parameters change. Buffers (BatchNorm's statistics) are sent as they were trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fastagg.sim.attack import hiding, loud
from fastagg.sim.attack.known import Known, State

LARGEST = 1e15  # training goes nowhere from there: float32 holds no square of a number beyond 1.8e19

# The update that all attackers send, or a list with one for each of them
Attack = Callable[[Known], State | Sequence[State]]
OF_OWN: dict[str, Attack] = {  # which need to know nothing but their own update
    "noise": loud.noise, "flip": loud.flip, "scale": loud.scale, "labels": loud.scale, "backdoor": loud.scale,
}  # fmt: skip
OF_OTHERS: dict[str, Attack] = {
    "alie": hiding.alie, "ipm": hiding.ipm, "min-max": hiding.min_max, "min-sum": hiding.min_sum,
}  # fmt: skip


class Diverged(Exception):
    """The attackers have won: models are so large, or not numbers at all, that training cannot go on"""


def choose(clients: int, share: float, rng: np.random.Generator) -> list[int]:
    """Who is malicious: this share of the clients, rounded to whole ones"""
    return sorted(rng.choice(clients, round(share * clients), replace=False).tolist())


def sent(
    attack: str | Attack, starts: Sequence[Mapping[str, Tensor]], trained: Sequence[Mapping[str, Tensor]],
    attackers: Sequence[int], params: Iterable[str], **told: Any,
) -> dict[int, State]:  # fmt: skip
    """The state dicts that attackers send, by position: new ones, what they are made of stays as it is.

    attack      a name of OF_OWN or OF_OTHERS, or a function
    starts      of each client of the round, what it began with; trained: what it ended with
    attackers   positions of those who are malicious
    told        the other fields of Known
    """
    names = [name for name in params if trained[0][name].is_floating_point()]
    update = lambda k: {name: trained[k][name] - starts[k][name] for name in names}  # noqa: E731
    alone = isinstance(attack, str) and attack in OF_OWN
    others = [] if alone else [k for k in range(len(trained)) if k not in attackers]
    known = Known(own=[update(k) for k in attackers], honest=[update(k) for k in others], **told)
    moves = ((OF_OWN | OF_OTHERS)[attack] if isinstance(attack, str) else attack)(known)
    if isinstance(moves, Mapping):
        moves = [moves] * len(attackers)
    check_form(attack, moves, known.own)
    models = {}
    for k, move in zip(attackers, moves, strict=True):
        moved = {name: starts[k][name] + move[name].to(starts[k][name]) for name in names}
        models[k] = {key: moved[key] if key in moved else value.clone() for key, value in trained[k].items()}
    return models


def check_form(attack: str | Attack, moves: Any, own: Sequence[State]) -> None:
    """That an attack of a user's own has returned what it is to return"""
    forms = [{name: value.shape for name, value in update.items()} for update in own]
    fits = isinstance(moves, Sequence) and len(moves) == len(own)
    if not fits or any(
        not isinstance(move, Mapping) or {n: getattr(v, "shape", None) for n, v in move.items()} != form
        for move, form in zip(moves, forms, strict=True)
    ):
        raise ValueError(
            f"sim: the attack {getattr(attack, '__name__', attack)} returned something else than an update, tensors by "
            f"name as in known.own[0], or a list of {len(own)}, one for each attacker"
        )


def check_size(states: Iterable[Mapping[str, Tensor]]) -> None:
    """Raises Diverged where a model has a number beyond LARGEST, or what is none"""
    for state in states:
        for key, value in state.items():
            if value.is_floating_point() and not (value.abs() <= LARGEST).all():
                raise Diverged(f"a client's {key!r} has a value beyond {LARGEST:g}, or one that is not finite")
