"""Clients that train on another device than the CPU, by one that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastagg
from fastagg.sim import data as data_sets
from helpers.elsewhere import Elsewhere

SMALL: dict[str, Any] = {"clients": 4, "rounds": 2, "epochs": 1, "alpha": 1.0, "proxy": 20}


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))


def train(client):
    for x, y in client.batches():
        gradients = torch.autograd.grad(client.loss(client.model(x), y), list(client.model.parameters()))
        with torch.no_grad():
            for p, g in zip(client.model.parameters(), gradients, strict=True):
                p -= client.lr * g


@pytest.fixture(scope="module")
def digits():
    d = data_sets.load("digits")
    return d.x[:200], d.y[:200], d.test_x[:100], d.test_y[:100]


def named(value):
    """The same in every process, which a function's own text is not"""
    if isinstance(value, dict):
        return "-".join(f"{key}={named(option)}" for key, option in value.items()) or "default"
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (net, {}),
        (net, {"method": "fedawa", "local": "scaffold"}),
        (mlp, {"local": "moon", "batched": False, "keep_momentum": True}),
        (mlp, {"local": "feddyn", "batched": True, "wdr": 1.0}),
        (mlp, {"local": train}),
        (with_dropout, {}),
        (mlp, {"method": "fedlaw", "options": {"epochs": 2}}),
        (mlp, {"method": "cwfedavg"}),
        (mlp, {"method": "fedfomo"}),
        (mlp, {"method": "ifca"}),
        (mlp, {"method": "fltrust"}),
        (mlp, {"method": "fedbuff", "speeds": "lognormal:0.5"}),
        (mlp, {"ideal": True}),
        (mlp, {"attack": "alie", "attackers": 0.5}),
        (mlp, {"attack": "min-max", "attackers": 0.5}),
        (mlp, {"attack": "noise", "attackers": 0.5, "attack_strength": 0.1}),
        (mlp, {"attack": "backdoor", "attackers": 0.5}),
    ],
    ids=named,
)
def test_the_same_run_on_another_device(model, options, digits, tmp_path):
    here = fastagg.sim.simulate(model, digits, **SMALL | options)
    with Elsewhere() as device:
        there = fastagg.sim.simulate(model, digits, device="mps", out=tmp_path / "run", **SMALL | options)
        assert there.records[-1]["train_loss"] == pytest.approx(here.records[-1]["train_loss"], rel=1e-3)
        assert device.storages
    for a, b in zip(here.models, there.models, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_run_goes_on_elsewhere(digits, tmp_path):
    whole = fastagg.sim.simulate(mlp, digits, **SMALL)
    with Elsewhere():
        options: dict[str, Any] = SMALL | {"device": "mps"}
        fastagg.sim.simulate(mlp, digits, out=tmp_path / "run", **options | {"rounds": 1})
        resumed = fastagg.sim.simulate(mlp, digits, out=tmp_path / "run", resume=True, **options)
    assert whole.model is not None
    assert resumed.model is not None
    torch.testing.assert_close(resumed.model, whole.model, rtol=1e-3, atol=1e-4)
