"""Rounds of the simulator against loops in plain PyTorch: the same clients, batches and steps; see loops.py.

FedAvg, alpha 0.1, one epoch. On scikit-learn's digits in batches of 32 with one thread, and on random images of the
size of Fashion-MNIST's and CIFAR-10's in batches of 50, with one thread and with all cores. All have the same number of
threads. They train, average and evaluate; the simulator also measures the clients' updates. What its files cost, a
line of metrics and a checkpoint every round, is timed as a contestant of its own.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from benchmarks.conftest import ROUNDS
from benchmarks.loops import Elsewhere, LibraryLoop, PlainLoop, Plan
from fastagg._engine.saved import save
from fastagg.sim.config import Config
from fastagg.sim.data import Dataset
from fastagg.sim.simulation import Simulation
from fastagg.sim.stores import append

MOST_ROUNDS = ROUNDS.stop + 1  # with those before the timed ones
SHAPES = {"fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def images(name: str, train: int, test: int = 1000) -> Dataset:
    """Noise of the size of that data set's images"""
    rng = torch.Generator().manual_seed(0)
    x, test_x = (torch.randn(n, *SHAPES[name], generator=rng) for n in (train, test))
    y, test_y = (torch.randint(10, (n,), generator=rng) for n in (train, test))
    return Dataset(name, x, y, test_x, test_y, 10)


@pytest.fixture(params=[1, 0], ids=["1-thread", "all-cores"])
def threads(request):
    """For torch and fastagg; `fastagg sim` has one by default"""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param or before)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("data", list(SHAPES))
@pytest.mark.parametrize("model", ["mlp", "lenet", "cnn"])
def test_images(benchmark, turns, tmp_path, model, data):
    run(benchmark, turns, tmp_path, Config(model=model, **COMMON), images(data, 6000 if model == "mlp" else 1000))


@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("model", "clients"), [("mlp", 20), ("lenet", 20), ("mlp", 100)])
def test_digits(benchmark, turns, tmp_path, model, clients):
    run(benchmark, turns, tmp_path, Config(model=model, **COMMON | {"clients": clients, "batch_size": 32}))


COMMON = {"clients": 20, "alpha": 0.1, "epochs": 1, "batch_size": 50, "rounds": MOST_ROUNDS}


def run(benchmark, turns, tmp_path, options: Config, dataset: Dataset | None = None) -> None:
    sim = Simulation(options, dataset)
    check(options, sim.data)
    plan = Plan.of(sim, MOST_ROUNDS)
    loops = {"plain PyTorch": Elsewhere(PlainLoop, plan), "as PFLlib": Elsewhere(LibraryLoop, plan)}
    last = sim.next_round()
    seconds: dict[str, list[dict[str, float]]] = {"simulator": [], **{name: [] for name in loops}}
    for loop in loops.values():
        loop.next_round()

    def ours() -> None:
        nonlocal last
        last = sim.next_round()
        seconds["simulator"].append(last["seconds"])

    def others(name: str) -> None:
        seconds[name].append(loops[name].next_round()["seconds"])

    def files() -> None:
        append(tmp_path / "metrics.jsonl", last)
        save(tmp_path / "checkpoint.safetensors", sim.state_dict())

    numel = sum(v.numel() for v in sim.models[0].values())
    about = {"model": options.model, "K": options.clients, "dtype": "float32", "numel": numel, "data": sim.data.name}
    jobs = {name: lambda name=name: others(name) for name in loops} | {"files": files}
    turns("simulator", ours, jobs, bytes=4 * options.clients * numel, **about)
    for loop in loops.values():
        loop.close()
    benchmark.extra_info["phases"] = {
        who: {phase: 1e3 * statistics.median(r[phase] for r in rounds) for phase in rounds[0]}
        for who, rounds in seconds.items()
    }


def check(options: Config, data: Dataset) -> None:
    """A round of each, in float64. In float32 the order in which a CPU's BLAS sums turns a ReLU here and there on or
    off, which moves a model by thousandths: too far to tell the same work from other work."""
    torch.set_default_dtype(torch.float64)
    try:
        sim = Simulation(options, replace(data, x=data.x.double(), test_x=data.test_x.double()))
        plan = Plan.of(sim, 1)
        sim.next_round()
        for loop in (PlainLoop(plan), LibraryLoop(plan)):
            loop.next_round()
            torch.testing.assert_close(loop.global_sd, sim.models[0], rtol=1e-9, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)
