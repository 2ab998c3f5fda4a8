"""Federated training as one writes it in PyTorch: what the simulator is timed against.

Both loops do the simulator's work with its clients, batches and steps: FedAvg, torch.optim.SGD, one client after the
other, samples through a DataLoader without workers. The networks have the ReLU before the pooling, as usual.

PlainLoop     one model that all clients use in turn; the global model is tested on batches of the test set
LibraryLoop   as PFLlib and libraries like it are built: a model and an optimiser for every client, a loader over a list
              of (x, y) made anew whenever it is needed, models sent and averaged parameter by parameter, and after
              training every client tested on its share of the test set and on its training data. PFLlib itself is in
              no package index; it also reads the samples from disk every time and computes AUC, which this does not.

They run in a process of their own (Elsewhere), because the simulator changes how memory is allocated in its process.
"""

from __future__ import annotations

import copy
import multiprocessing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastagg.sim.config import Config
from fastagg.sim.data import Dataset
from fastagg.sim.partition import Partition
from fastagg.sim.simulation import Simulation
from fastagg.sim.stopwatch import Stopwatch


@dataclass
class Plan:
    """What a loop has to do: the simulator's work"""

    options: Config
    data: Dataset
    parts: Partition
    module: nn.Module
    start: dict[str, Tensor]
    seeds: list[list[int]]  # of the batches, by round and client

    @classmethod
    def of(cls, sim: Simulation, rounds: int) -> Plan:
        clients = range(sim.options.clients)
        seeds = [[sim.job(r, k).seed for k in clients] for r in range(1, rounds + 1)]
        return cls(sim.options, sim.data, sim.parts, usual_network(sim.module), copy.deepcopy(sim.models[0]), seeds)


class Elsewhere:
    """A loop in another process, which rests while others have their turn"""

    def __init__(self, loop: type[PlainLoop], plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, loop, plan, torch.get_num_threads()), daemon=True)
        self._process.start()

    def next_round(self) -> dict[str, Any]:
        self._pipe.send(True)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


def serve(pipe: Any, kind: type[PlainLoop], plan: Plan, threads: int) -> None:
    torch.set_num_threads(threads)
    loop = kind(plan)
    while pipe.recv():  # whether there is another round
        pipe.send(loop.next_round())


def usual_network(module: nn.Module) -> nn.Module:
    """With the ReLU before the pooling; keys, values and gradients are the same"""
    module = copy.deepcopy(module)
    body = getattr(module, "body", None)
    if isinstance(body, nn.Sequential):
        for i in range(len(body) - 1):
            if isinstance(body[i], nn.MaxPool2d) and isinstance(body[i + 1], nn.ReLU):
                body[i], body[i + 1] = body[i + 1], body[i]
    return module


class PlainLoop:
    def __init__(self, plan: Plan) -> None:
        self.options, self.data, self.parts, self.seeds = plan.options, plan.data, plan.parts, plan.seeds
        # copies: torch gives processes tensors in shared memory, and what one loop trains would be another's start
        self.model, self.global_sd = copy.deepcopy(plan.module), copy.deepcopy(plan.start)
        self.samples = TensorDataset(self.data.x, self.data.y)
        self.round = 0
        self.sizes = [len(rows) for rows in self.parts.train]

    def next_round(self) -> dict:
        clock = Stopwatch()
        with clock("train"):
            client_sds = [self.train(k) for k in range(self.options.clients)]
        with clock("aggregate"):
            self.aggregate(client_sds)
        with clock("evaluate"):
            accuracy = self.evaluate()
        self.round += 1
        return {"accuracy": accuracy, "seconds": clock.seconds}

    def order(self, rng: np.random.Generator, k: int) -> list[int]:
        return rng.permutation(self.parts.train[k]).tolist()

    def train(self, k: int) -> dict[str, Tensor]:
        o, model = self.options, self.model
        model.load_state_dict(self.global_sd)
        model.train()
        lr = o.lr * o.lr_decay**self.round
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=o.momentum, weight_decay=o.weight_decay)
        rng = np.random.default_rng(self.seeds[self.round][k])
        for _ in range(o.epochs):
            for x, y in DataLoader(self.samples, batch_size=o.batch_size, sampler=self.order(rng, k)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return copy.deepcopy(model.state_dict())

    def aggregate(self, client_sds: list[dict[str, Tensor]]) -> None:
        total = sum(self.sizes)
        for key in self.global_sd:
            parts = (n / total * sd[key] for n, sd in zip(self.sizes, client_sds, strict=True))
            self.global_sd[key] = torch.stack(list(parts)).sum(0)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.load_state_dict(self.global_sd)
        self.model.eval()
        pairs = zip(self.data.test_x.split(200), self.data.test_y.split(200), strict=True)
        return sum((self.model(x).argmax(1) == y).sum().item() for x, y in pairs) / len(self.data.test_y)


class LibraryLoop(PlainLoop):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        o = self.options
        self.clients = [copy.deepcopy(self.model) for _ in range(o.clients)]
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay)
            for model in self.clients
        ]

    def next_round(self) -> dict:
        clock, clients = Stopwatch(), range(self.options.clients)
        with clock("train"):
            for model in self.clients:
                for new, old in zip(self.model.parameters(), model.parameters(), strict=True):
                    old.data = new.data.clone()
            for k in clients:
                self.train(k)
        with clock("aggregate"):
            self.average()
        with clock("evaluate"):
            right = [self.tested(k)[0] for k in clients]
            _ = [self.train_loss(k) for k in clients]
        self.round += 1
        return {"accuracy": sum(right) / sum(map(len, self.parts.test)), "seconds": clock.seconds}

    def loader(self, x: Tensor, y: Tensor, rows: list[int]) -> DataLoader:
        """The samples in this order, as a list of pairs"""
        return DataLoader([(x[i], y[i]) for i in rows], batch_size=self.options.batch_size)  # type: ignore[arg-type]

    def train(self, k: int) -> dict[str, Tensor]:
        o, model, optimizer = self.options, self.clients[k], self.optimizers[k]
        model.train()
        optimizer.state.clear()
        optimizer.param_groups[0]["lr"] = o.lr * o.lr_decay**self.round
        rng = np.random.default_rng(self.seeds[self.round][k])
        for _ in range(o.epochs):
            for x, y in self.loader(self.data.x, self.data.y, self.order(rng, k)):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return {}

    def average(self) -> None:
        self.model = copy.deepcopy(self.clients[0])
        for parameter in self.model.parameters():
            parameter.data.zero_()
        for n, client in zip(self.sizes, self.clients, strict=True):
            for mine, theirs in zip(self.model.parameters(), client.parameters(), strict=True):
                mine.data += theirs.data.clone() * (n / sum(self.sizes))
        self.global_sd = self.model.state_dict()

    @torch.no_grad()
    def tested(self, k: int) -> tuple[int, int]:
        model = self.clients[k].eval()
        right = count = 0
        for x, y in self.loader(self.data.test_x, self.data.test_y, self.parts.test[k].tolist()):
            right, count = right + int((model(x).argmax(1) == y).sum()), count + len(y)
        return right, count

    @torch.no_grad()
    def train_loss(self, k: int) -> float:
        model, total = self.clients[k].eval(), 0.0
        for x, y in self.loader(self.data.x, self.data.y, self.parts.train[k].tolist()):
            total += nn.functional.cross_entropy(model(x), y).item() * len(y)
        return total / self.sizes[k]
