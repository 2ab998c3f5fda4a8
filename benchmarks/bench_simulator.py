"""Rounds of the simulator against a plain PyTorch loop: the same clients, batches and steps, trained one by one.

FedAvg on scikit-learn's digits, alpha 0.1, one epoch in batches of 32, one thread: with more, steps as small as these
depend on whoever else wants the cores. Both train, average and evaluate. The plain loop indexes a tensor for its
batches, which is faster than a DataLoader. The simulator also measures the clients' updates. What its files cost, a
line of metrics and a checkpoint every round, is timed as a contestant of its own.
"""

from __future__ import annotations

import copy
import statistics

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.conftest import ROUNDS
from fastagg._engine.saved import save
from fastagg.sim.config import Config
from fastagg.sim.simulation import Clock, Simulation
from fastagg.sim.stores import append

MOST_ROUNDS = ROUNDS.stop + 1  # with those before the timed ones


class PlainLoop:
    """What one writes for an experiment: load the global model, train with torch.optim, copy the state, average"""

    def __init__(self, sim: Simulation) -> None:
        self.options, self.data, self.parts = sim.options, sim.data, sim.parts
        self.model = copy.deepcopy(sim.module)
        self.global_sd = copy.deepcopy(sim.models[0])
        self.round = 0
        clients = range(sim.options.clients)
        self.seeds = [[sim.job(r, k).seed for k in clients] for r in range(1, MOST_ROUNDS + 1)]  # of the batches

    def next_round(self) -> dict:
        clock, sizes = Clock(), [len(rows) for rows in self.parts.train]
        with clock("train"):
            client_sds = [self.train(k) for k in range(self.options.clients)]
        with clock("aggregate"):
            for key in self.global_sd:
                self.global_sd[key] = sum(n / sum(sizes) * sd[key] for n, sd in zip(sizes, client_sds, strict=True))
        with clock("evaluate"):
            accuracy = self.evaluate()
        self.round += 1
        return {"accuracy": accuracy, "seconds": clock.seconds}

    def train(self, k: int) -> dict[str, torch.Tensor]:
        o, model = self.options, self.model
        model.load_state_dict(self.global_sd)
        model.train()
        lr = o.lr * o.lr_decay**self.round
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=o.momentum, weight_decay=o.weight_decay)
        rng = np.random.default_rng(self.seeds[self.round][k])
        for _ in range(o.epochs):
            for batch in torch.from_numpy(rng.permutation(self.parts.train[k])).split(o.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(self.data.x[batch]), self.data.y[batch]).backward()
                optimizer.step()
        return copy.deepcopy(model.state_dict())

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.load_state_dict(self.global_sd)
        self.model.eval()
        return (self.model(self.data.test_x).argmax(1) == self.data.test_y).float().mean().item()


@pytest.fixture
def one_thread():
    """For torch and fastagg, as `fastagg sim` has it by default"""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("model", "clients"), [("mlp", 20), ("lenet", 20), ("mlp", 100)])
def test_simulator(benchmark, turns, tmp_path, model, clients):
    sim = Simulation(Config(model=model, clients=clients, alpha=0.1, epochs=1, batch_size=32, rounds=MOST_ROUNDS))
    loop = PlainLoop(sim)
    last, other = sim.next_round(), loop.next_round()
    torch.testing.assert_close(loop.global_sd, sim.models[0], rtol=1e-4, atol=1e-5)
    assert other["accuracy"] == pytest.approx(last["accuracy"], abs=0.01)
    seconds: dict[str, list[dict[str, float]]] = {"simulator": [], "plain PyTorch": []}

    def ours() -> None:
        nonlocal last
        last = sim.next_round()
        seconds["simulator"].append(last["seconds"])

    def plain() -> None:
        seconds["plain PyTorch"].append(loop.next_round()["seconds"])

    def files() -> None:
        append(tmp_path / "metrics.jsonl", last)
        save(tmp_path / "checkpoint.safetensors", sim.state_dict())

    numel = sum(v.numel() for v in sim.models[0].values())
    about = {"model": model, "K": clients, "dtype": "float32", "numel": numel, "bytes": 4 * clients * numel}
    turns("simulator", ours, {"plain PyTorch": plain, "files": files}, **about)
    benchmark.extra_info["phases"] = {
        who: {phase: 1e3 * statistics.median(r[phase] for r in rounds) for phase in rounds[0]}
        for who, rounds in seconds.items()
    }
