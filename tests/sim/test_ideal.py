"""Distances to the update of training on all data together: FedAWA's Figure 3."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastagg.sim import data
from fastagg.sim.config import from_dict
from fastagg.sim.report import read_run
from fastagg.sim.run import simulate
from fastagg.sim.simulation import Simulation

# One step with all samples: the clients' mean by data size then is the step with everybody's samples
ONE_STEP = {"clients": 5, "epochs": 1, "batch_size": 10_000, "momentum": 0.0, "weight_decay": 0.0, "samples": 400,
            "alpha": 0.3, "proxy": 0, "ideal": True}  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def gradient(sim, rows):
    """Of the mean loss of these samples, float64"""
    module = copy.deepcopy(sim.module).double()
    F.cross_entropy(module(sim.x[rows].double()), sim.labels[rows]).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()]).numpy()


def test_the_definition(digits):
    sim = Simulation(from_dict(ONE_STEP | {"method": "uniform"}), digits)
    gradients = np.stack([gradient(sim, rows) for rows in sim.parts.train])
    everybody = gradient(sim, np.concatenate(sim.parts.train))
    record = sim.next_round()

    def far(vector):
        return 1 - vector @ everybody / np.linalg.norm(vector) / np.linalg.norm(everybody)

    np.testing.assert_allclose(record["ideal_clients"], [far(g) for g in gradients], atol=2e-5)
    assert record["ideal_method"] == pytest.approx(far(gradients.mean(0)), abs=2e-5)
    assert record["ideal_merged"] == pytest.approx(0, abs=2e-5)  # a step by data size is one on all data
    assert record["ideal_method"] > 1e-3
    assert min(record["ideal_clients"]) > 1e-3


def test_the_run_itself_is_the_same(digits):
    options = ONE_STEP | {"method": "fedawa", "batch_size": 20, "epochs": 2, "momentum": 0.9, "keep_momentum": True,
                          "algorithm": "fedprox", "participation": 0.6}  # fmt: skip
    with_it, without = (Simulation(from_dict(options | {"ideal": ideal}), digits) for ideal in (True, False))
    for _ in range(2):
        a, b = with_it.next_round(), without.next_round()
        assert len(a.pop("ideal_clients")) == len(a["clients"]) == 3
        assert a.pop("ideal_merged") != a.pop("ideal_method")
        a.pop("seconds"), b.pop("seconds")
        assert a == b


def test_in_the_folder_of_a_run(digits, tmp_path):
    options = from_dict(ONE_STEP | {"rounds": 3})
    simulate(options, tmp_path / "a", dataset=digits)
    kept = [m["ideal_merged"] for m in read_run(tmp_path / "a").metrics if m["round"]]
    assert len(kept) == 3
    assert max(kept) < 2e-5


@pytest.mark.parametrize("method", ["fedamp", "cfl"])
def test_methods_with_several_models_have_none(method, digits):
    with pytest.raises(ValueError, match=r"ideal=true cannot be had here: .* one global model"):
        Simulation(from_dict(ONE_STEP | {"method": method}), digits)
