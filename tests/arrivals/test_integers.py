"""Integers of clients that send updates: the values that models would have given, whatever the differences are."""

from __future__ import annotations

import pytest
import torch

import fastagg
from helpers.cohort import assert_same_bits

METHODS = [
    ("fedavg", {}), ("fedavg", {"server_lr": 0.5}), ("fedawa", {}), ("median", {}), ("krum", {"f": 0}), ("fednova", {}),
    ("fedadam", {}), ("fedadam", {"weights": "fedbuff"}), ("fedbuff", {}), ("fedasync", {}),
]  # fmt: skip
# (the global model's, the clients'), of one that counts steps and of one that is quantised
NUMBERS = {
    "all above": ((3, 1), [(9, 5), (8, 25), (20, 16), (11, 14)]),
    "some below, which unsigned numbers wrap around": ((7, 15), [(9, 5), (8, 25), (20, 16), (11, 14)]),
    "all below": ((90, 250), [(9, 5), (8, 25), (20, 16), (11, 14)]),
}


def model(steps, byte, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(20, 3, generator=generator), "steps": torch.tensor(steps),
        "byte": torch.full((70_000,), byte, dtype=torch.uint8),
        "short": torch.tensor([300 * byte - 30_000] * 2).short(),
        "flag": torch.tensor([steps % 2 == 0, byte % 2 == 0]),
    }  # fmt: skip


def update(sd, g):
    return {key: value if value.dtype == torch.bool else value - g[key] for key, value in sd.items()}


def integers(sd):
    return {key: value for key, value in sd.items() if not value.is_floating_point()}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("sizes", [None, [3, 0, 1, 2]])
@pytest.mark.parametrize(("name", "options"), METHODS, ids=str)
def test_integers_of_updates_are_those_of_models(name, options, sizes, numbers):
    of_global, of_clients = NUMBERS[numbers]
    g, clients = model(*of_global, 99), [model(*values, k) for k, values in enumerate(of_clients)]
    server = fastagg.aggregator(name, **options)
    known = {"local_steps": [3, 4, 5, 2], "version": [0] * 4}
    inputs = {spec.name: known[spec.name] for spec in server.round_inputs if spec.required}
    expected = server.aggregate(g, clients, sizes, range(4), **inputs)
    for memory, updates in ((None, {0, 1, 2, 3}), (1, {0, 1, 2, 3}), (None, {1, 3}), (1, {1, 3})):
        with fastagg.aggregator(name, **options).round(g, memory=memory) as round:
            for k, sd in enumerate(clients):
                sent = {"update": update(sd, g)} if k in updates else {"model": sd}
                more = {what: values[k] for what, values in inputs.items()}
                round.add(k, **sent, **more, size=None if sizes is None else sizes[k])
            found = round.finish()
        assert_same_bits(integers(found), integers(expected))


@pytest.mark.parametrize("weights", [{"method": "fedavg", "server_lr": 0.5}, "fedbuff"], ids=str)
@pytest.mark.parametrize("memory", [None, 1])
def test_updates_of_16_bit_models_before_a_server_optimiser(weights, memory):
    """Whose mean update is summed up in more digits, of rows of which the global model is one"""
    g, *updates = [{"w": model(k, k, k)["w"].bfloat16()} for k in range(5)]
    version = {"version": 0} if weights == "fedbuff" else {}
    server = fastagg.aggregator("fedadam", weights=weights)
    with server.round(g, memory=memory) as round:
        for k, sd in enumerate(updates):
            round.add(k, update=sd, **version)
        round.finish()
    step = 1.0 if weights == "fedbuff" else 0.5
    mean = step * torch.stack([sd["w"].double() for sd in updates]).mean(0).float()
    torch.testing.assert_close(server.state.moments["m"]["w"], (1 - server.beta1) * mean, rtol=1e-6, atol=1e-8)
