"""Clients that do not wait for each other: each trains from the newest model, and another begins when one arrives.

As many clients train at any time as take part in a synchronous round. What arrives goes into the method's buffer; when
that is full, it makes a new version of the global model. A round of the records is as many arrivals as a synchronous
round has, however many versions they make, so that rounds of all methods are equally much work.

Clients are trained when the first result that is not there yet is needed, all of them that train at that time: several
are then one computation, as in a synchronous round.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastagg.sim.stopwatch import Stopwatch
from fastagg.sim.train import Update

if TYPE_CHECKING:
    from fastagg.sim.simulation import Simulation

NEXT = 200  # what random numbers are for, beside those of simulation.py


@dataclass
class Training:
    """A client that trains, or has sent what it trained"""

    number: int  # in the order in which they began
    client: int
    version: int  # of the model that it started from
    round: int
    until: float  # in simulated time
    update: Update | None = None  # once it has been computed


def is_wanted(sim: Simulation) -> bool:
    """Whether clients are not to wait for each other. ValueError where that cannot be had"""
    o, waits_for = sim.options, sim.server.waits_for
    if o.clock == "sync" or (o.clock is None and (o.speeds is None or waits_for is None)):
        return False
    why = {
        f"{o.method} is not made for clients that start from different models; fedbuff and fedasync are": not waits_for,
        f"algorithm={sim.trainer.algorithm.name} corrects the model after each round": sim.trainer.algorithm.corrects,
        "ideal=true compares the updates of a round": o.ideal,
        f"attack={o.attack} is of the clients of a round": o.attack != "none",
        "selection=window is of rounds": o.selection != "random",
        "torchrun shares out the clients of a round": sim.peers is not None,
    }
    for words in (words for words, holds in why.items() if holds):
        raise ValueError(f"sim: clock=async: {words}; choose --clock sync")
    return True


class Events:
    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.count = max(1, round(sim.options.participation * sim.options.clients))  # that train at any time
        self.begun = 0
        self.training: list[Training] = []
        self.buffer: list[Training] = []
        self.starts = {0: sim.models[0]}  # the versions that these have started from

    def next_round(self) -> dict[str, Any]:
        sim, watch = self.sim, Stopwatch()
        r = sim.round + 1
        if not self.begun:
            first = sim.draw(NEXT, 0).choice(sim.options.clients, self.count, replace=False)
            for client in sorted(first.tolist()):
                self.begin(client, r)
        arrived: list[Training] = []
        staleness, lost = [], []
        for _ in range(self.count):
            one = min(self.training, key=lambda t: (t.until, t.number))
            self.training.remove(one)
            sim.pace.time = one.until
            if sim.lost(one.number, one.client):
                lost.append(one.client)
            else:
                with watch("train"):
                    self.train(one)
                assert one.update is not None
                sim.remember([(one.client, one.update)])  # at once: it may begin again before the buffer is full
                arrived.append(one)
                staleness.append(sim.server.version - one.version)
                self.buffer.append(one)
                with watch("aggregate"):
                    self.aggregate()
            busy = {t.client for t in self.training}
            idle = [k for k in range(sim.options.clients) if k not in busy]
            self.begin(int(sim.draw(NEXT, self.begun).choice(idle)), r)
        sim.round = r
        losses, sizes = [t.update.loss for t in arrived if t.update], sim.sizes([t.client for t in arrived])
        record = {
            "round": r, "lr": sim.lr(r), "time": sim.pace.time, "clients": [t.client for t in arrived], "lost": lost,
            "version": sim.server.version, "staleness": staleness,
            "train_loss": float(np.average(losses, weights=sizes)) if losses else None,
        }  # fmt: skip
        with watch("evaluate"):
            record |= sim.evaluated()
        return record | {"seconds": watch.seconds}

    def begin(self, client: int, r: int) -> None:
        """A client gets the newest model"""
        sim, number = self.sim, self.begun
        until = sim.pace.time + sim.pace.duration(client, sim.job(number, client).epochs)
        self.training.append(Training(number, client, sim.server.version, r, until))
        self.begun += 1

    def train(self, one: Training) -> None:
        if one.update is not None:
            return
        waiting = [one, *(t for t in self.training if t.update is None)]
        for r in sorted({t.round for t in waiting}):
            some = [t for t in waiting if t.round == r]
            jobs = [replace(self.sim.job(t.number, t.client), start=self.starts[t.version], round=r) for t in some]
            for t, update in zip(some, self.sim.trainer.train(jobs, self.sim.lr(r)), strict=True):
                t.update = update

    def aggregate(self) -> None:
        """A new version, if the buffer is full"""
        sim = self.sim
        if len(self.buffer) < sim.server.waits_for:
            return
        with sim.server.round(sim.models[0]) as round:
            for t in self.buffer:
                round.add(t.number, **self.sent(t), size=len(sim.parts.train[t.client]), version=t.version)
            result = round.finish() if round.clients else None
            refused = round.dropped if result is None else result.dropped
        for t in self.buffer:
            if t.number in refused:  # perhaps for what it remembers
                sim.forget(t.client)
        self.buffer = []
        if result is None:
            return
        sim.models = [dict(result)]
        self.starts[sim.server.version] = sim.models[0]
        needed = {t.version for t in self.training} | {sim.server.version}
        self.starts = {version: model for version, model in self.starts.items() if version in needed}

    def sent(self, t: Training) -> dict[str, dict[str, torch.Tensor]]:
        """A model, or the update of its parameters since it began; of buffers there is no older one that would count"""
        sim, trained = self.sim, t.update
        assert trained is not None
        if sim.server.stale_as == "models":
            return {"model": trained.model}
        base = sim.models[0] | {name: self.starts[t.version][name] for name in sim.parameters}
        return {"update": {key: value - base[key] for key, value in trained.model.items()}}

    def state_dict(self) -> dict[str, Any]:
        return {
            "begun": self.begun, "starts": {str(version): model for version, model in self.starts.items()},
            "training": [_plain(t) for t in self.training], "buffer": [_plain(t) for t in self.buffer],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        here = lambda sd: {key: value.to(self.sim.options.device) for key, value in sd.items()}  # noqa: E731
        self.begun = state["begun"]
        self.starts = {int(version): here(model) for version, model in state["starts"].items()}
        self.training, self.buffer = ([_training(t) for t in state[name]] for name in ("training", "buffer"))
        for t in (*self.training, *self.buffer):
            if t.update is not None:
                tensors = {name: here(part) for name, part in vars(t.update).items() if isinstance(part, dict)}
                t.update = replace(t.update, **tensors)
        missing = {t.version for t in (*self.training, *self.buffer)} - self.starts.keys()
        if missing or len(self.training) != self.count:
            raise ValueError("what it says of clients that train does not fit the run")


def _plain(t: Training) -> dict[str, Any]:
    update = None if t.update is None else vars(t.update)
    return asdict(replace(t, update=None)) | {"update": update}


def _training(plain: dict[str, Any]) -> Training:
    update = plain["update"]
    return Training(**{**plain, "update": None if update is None else Update(**update)})
