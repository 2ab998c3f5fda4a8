"""What methods take in a round besides models and data sizes, as far as a simulation has it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import fastagg
from fastagg.sim import partition
from fastagg.sim.train import Job, Trainer, Update

if TYPE_CHECKING:
    from fastagg.sim.simulation import Simulation

Model = dict[str, torch.Tensor]
SERVER_BATCHES = 100  # what random numbers are for, beside those of simulation.py
PROXY_BATCH = 128  # samples of the server at a time, at most; as in FedLAW's code


def needed(sim: Simulation) -> dict[str, str]:
    """The inputs of a round that the method requires, all of which the simulator has to supply, and what each is; and
    distances from where clients started, which a method can only guess"""
    specs = [spec for spec in sim.server.round_inputs if spec.required or spec.kind == "start_distances"]
    for spec in specs:
        if spec.kind not in SUPPLIES:
            raise ValueError(
                f"sim: {sim.options.method} needs {spec.name}, which the simulator does not have: its kind is "
                f"{spec.kind!r}, expected one of {', '.join(map(repr, SUPPLIES))} (see fastagg.extend.RoundInput)"
            )
        if spec.kind in OF_CLASSES and not sim.data.classes:
            raise ValueError(
                f"sim: {sim.options.method} needs {spec.name}, and these data have no classes but values to predict; "
                "choose another method"
            )
        if spec.kind in OF_SERVER:
            _samples_of_server(sim)
    return {spec.name: spec.kind for spec in specs}


def round_inputs(sim: Simulation, present: list[int], updates: list[Update]) -> dict[str, Any]:
    """What the method requires besides models and sizes, for these clients and what they have sent"""
    return {name: SUPPLIES[kind](sim, present, updates) for name, kind in needed(sim).items()}


def losses(sim: Simulation, model: Model, clients: Sequence[int], *, held_out: bool = False) -> np.ndarray:
    """The mean loss of a model on each client's training data, [clients]; the largest number where it is none.

    held_out   on those of its samples that a client does not train on, if there are any (train_share < 1)
    """
    parts = sim.parts
    rows = [parts.held_out[k] if held_out and len(parts.held_out[k]) else parts.train[k] for k in clients]
    every = np.concatenate(rows)
    seen = sim.outcomes(model, sim.x[every], sim.labels[every])
    ends = np.cumsum([0, *map(len, rows)])
    means = np.array([seen.of(np.arange(a, b))[1] for a, b in itertools.pairwise(ends)])
    return np.where(np.isfinite(means), means, np.finfo(np.float64).max)


def _start_losses(sim: Simulation, present: list[int], held_out: bool) -> np.ndarray:
    numbers = np.array([sim.model_of[k] for k in present])
    found = np.empty(len(present))
    for number in np.unique(numbers):
        here = np.flatnonzero(numbers == number)
        found[here] = losses(sim, sim.models[number], [present[i] for i in here], held_out=held_out)
    return found


def _cross_losses(sim: Simulation, present: list[int], updates: list[Update]) -> np.ndarray:
    return np.stack([losses(sim, u.model, present, held_out=True) for u in updates], axis=1)


def _start_distances(sim: Simulation, present: list[int], updates: list[Update]) -> np.ndarray:
    """NaN for a model that is not finite, which is for the round itself to find"""
    finite = [n for n, u in enumerate(updates) if all(bool(torch.isfinite(v).all()) for v in u.model.values())]
    states, found = [updates[n].model for n in finite], np.full((len(present), len(updates)), np.nan)
    for row, k in zip(found, present, strict=True):
        if states:
            row[finite] = fastagg.gram(sim.models[sim.model_of[k]], states, params=sim.module).norms().cpu().numpy()
    return found


def _samples_of_server(sim: Simulation) -> tuple[torch.Tensor, torch.Tensor]:
    if not len(sim.proxy[0]):
        raise ValueError(
            f"sim: {sim.options.method} learns on samples of the server; give it some: proxy=100, proxy_from=test"
        )
    return sim.proxy


def _proxy(sim: Simulation) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = _samples_of_server(sim)
    parts = -(-len(x) // PROXY_BATCH)
    return list(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True))


def server_model(sim: Simulation) -> Model:
    """The global model after a round of plain training on samples of the server, for as many epochs as clients train"""
    (x, y), o, r = _samples_of_server(sim), sim.options, sim.round + 1
    local = replace(o.local, algorithm="sgd", mu=None, wdr=0.0, keep_momentum=False, loss=sim.trainer.loss)
    trainer = Trainer(sim.module, x, y, local, head=sim.head, batched=False)
    seed = int(sim.draw(SERVER_BATCHES, r).integers(2**31))
    job = Job(client=o.clients, start=sim.models[0], indices=np.arange(len(x)), seed=seed, epochs=o.epochs, round=r)
    [update] = trainer.train([job], o.lr * o.lr_decay ** (r - 1))
    return update.model


OF_CLASSES = ("labels", "entropies")  # kinds that data with values to predict do not have
OF_SERVER = ("proxy", "server_model")  # kinds that need samples of the server
# By the kinds of fastagg.extend.RoundInput
SUPPLIES: dict[str | None, Callable[[Simulation, list[int], list[Update]], Any]] = {
    "labels": lambda sim, present, _: sim.parts.counts[present],
    "entropies": lambda sim, present, _: partition.label_entropies(sim.parts.counts[present]),
    "steps": lambda _, __, updates: [u.steps for u in updates],
    "proxy": lambda sim, _, __: _proxy(sim),
    "cross_losses": _cross_losses,
    "start_losses": lambda sim, present, _: _start_losses(sim, present, held_out=True),
    "train_losses": lambda sim, present, _: _start_losses(sim, present, held_out=False),
    "start_distances": _start_distances,
    "server_model": lambda sim, _, __: server_model(sim),
    "versions": lambda sim, present, _: [sim.server.version] * len(present),
    "choices": lambda sim, present, _: [sim.model_of[k] for k in present],
}
