"""Whole runs of the simulator: determinism, going on after a stop, every method, and what is recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine import atomic, saved
from fastagg.sim import config, data
from fastagg.sim.config import Config, from_dict
from fastagg.sim.report import read_metrics
from fastagg.sim.run import simulate
from fastagg.sim.simulation import Simulation
from fastagg.sim.stores import check_same
from helpers.every_method import TRAINERS


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


SMALL = {"clients": 6, "rounds": 2, "epochs": 1, "alpha": 0.5, "samples": 400, "lr": 0.05}


def run_of(**options):
    return from_dict(SMALL | options)


def curve(folder):
    """What a run recorded, but for the time it took"""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in read_metrics(folder / "metrics.jsonl")]


def model(folder):
    return saved.load(folder / "checkpoint.safetensors")["models"][0]


METHODS = [m.name for m in fastagg.list_methods()] + list(config.ALIASES)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_for_two_rounds(method, digits, tmp_path):
    few = {name: {"epochs": 3} for name in TRAINERS}
    options = (few | {"cwfedavg": {"scope": "output"}, "bulyan": {"f": 0}}).get(method, {})
    summary = simulate(run_of(method=method, options=options), tmp_path, dataset=digits)
    assert summary["finished"]
    first, *rounds = curve(tmp_path)
    assert first["round"] == 0
    assert [r["round"] for r in rounds] == [1, 2]
    assert all(0 <= r["personal_accuracy"] <= 1 for r in rounds)
    if summary["personal"]:
        assert rounds[-1]["accuracy"] is None
    else:
        assert rounds[-1]["accuracy"] > first["accuracy"] or method in ("krum", "fedadagrad", "fedadam", "fedyogi")
        assert method in ("cfl", "ifca") or len(rounds[-1]["weights"]) == 6
    if method == "fedlaw":
        assert rounds[-1]["gamma"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "partition.json", "metrics.jsonl", "summary.json", "checkpoint.safetensors",
    }  # fmt: skip


def test_same_seed_same_curve_another_seed_another(digits, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        simulate(run_of(method="fedawa", seed=seed, participation=0.5, dropout=0.3), tmp_path / name, dataset=digits)
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    assert curve(tmp_path / "a") != curve(tmp_path / "c")
    for key, value in model(tmp_path / "a").items():
        assert torch.equal(value, model(tmp_path / "b")[key])


@pytest.mark.parametrize(
    "options",
    [
        {"method": "fedawa", "participation": 0.5}, {"method": "fedadam"}, {"method": "feddyn", "stragglers": 0.5},
        {"method": "fedamp"}, {"method": "cfl", "options": {"eps1": 100.0, "eps2": 0.0}}, {"method": "fedadp"},
        {"method": "fedavg", "model": "resnet8", "samples": 120}, {"method": "fedavg", "selection": "window"},
        {"method": "median", "options": {"pre": ["bucketing", {"stage": "nnm", "f": 1}]}},
    ],
    ids=lambda o: o["method"] + o.get("model", "") + o.get("selection", ""),
)  # fmt: skip
def test_a_run_that_goes_on_ends_like_an_undisturbed_one(options, digits, tmp_path):
    long, short = (run_of(**options, rounds=n) for n in (4, 2))
    simulate(long, tmp_path / "whole", dataset=digits)
    simulate(short, tmp_path / "parts", dataset=digits)
    simulate(long, tmp_path / "parts", dataset=digits, resume=True)
    same = [
        [{k: v for k, v in r.items() if "cosine" not in k} for r in curve(tmp_path / x)] for x in ("whole", "parts")
    ]
    assert same[0] == same[1]  # cosines are recorded at the middle and the end, which were others for the short one
    a, b = (saved.load(tmp_path / x / "checkpoint.safetensors") for x in ("whole", "parts"))
    for left, right in zip(a["models"], b["models"], strict=True):
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_a_killed_run_goes_on_to_the_same_end(digits, tmp_path):
    command = [sys.executable, "-m", "fastagg", "sim", "--method", "fedawa", "--rounds", "12", "--quiet"]
    command += [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items() if k != "rounds"]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "run")], stdout=subprocess.DEVNULL)
    folder = tmp_path / "run/fedawa/seed-0"
    while process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len(read_metrics(folder / "metrics.jsonl")) > 3:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"round": 99, "accur')  # as a crash in the middle of a line leaves it
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run"), "--resume"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    simulate(run_of(method="fedawa", rounds=12), tmp_path / "whole", dataset=digits)
    assert curve(folder) == curve(tmp_path / "whole")
    assert json.loads((folder / "summary.json").read_text())["finished"]


def test_a_folder_is_never_overwritten_or_mixed(digits, tmp_path):
    simulate(run_of(), tmp_path, dataset=digits)
    with pytest.raises(ValueError, match="holds a run already; resume it"):
        simulate(run_of(), tmp_path, dataset=digits)
    with pytest.raises(ValueError, match=r"was begun with alpha=0\.5, not 0\.1"):
        simulate(run_of(alpha=0.1), tmp_path, dataset=digits, resume=True)
    check_same(run_of(rounds=100), run_of(), tmp_path)
    damaged = tmp_path / "checkpoint.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ValueError, match="is not a file that fastagg saved, or is damaged"):
        simulate(run_of(rounds=5), tmp_path, dataset=digits, resume=True)


def test_batched_and_one_by_one_have_the_same_curve(digits, tmp_path):
    for batched in (True, False):
        simulate(run_of(batched=batched, rounds=3), tmp_path / str(batched), dataset=digits)
    a, b = ([r["loss"] for r in curve(tmp_path / str(x))] for x in (True, False))
    np.testing.assert_allclose(a, b, rtol=1e-3)
    summaries = [json.loads((tmp_path / str(x) / "summary.json").read_text()) for x in (True, False)]
    assert [s["training"] for s in summaries] == ["batched", "one by one"]


def test_weights_and_cosines_are_those_of_the_method(digits):
    sim = Simulation(run_of(method="fedawa"), digits)
    before = {k: v.clone() for k, v in sim.models[0].items()}
    updates = sim.trainer.train([sim.job(1, k) for k in range(6)], sim.options.lr)
    record = sim.next_round()
    result = fastagg.fedawa(before, [u.state for u in updates], sim.sizes(range(6)), params=sim.module)
    np.testing.assert_allclose(record["weights"], result.weights, atol=1e-6)
    np.testing.assert_allclose(record["cosine"], result.gram.cosine(), atol=1e-4)
    np.testing.assert_allclose(record["norms"], result.gram.norms(), atol=1e-5)
    for key, value in result.items():
        assert torch.equal(sim.models[0][key], value)


def test_window_lets_everyone_take_part_before_anyone_does_twice(digits):
    sim = Simulation(run_of(clients=10, participation=0.3, selection="window", rounds=40), digits)
    for begin in (1, 5, 9):  # four rounds of 3, 3, 3 and 1
        seen = [k for r in range(begin, begin + 4) for k in sim.chosen(r)]
        assert sorted(seen) == list(range(10))
    assert [sim.chosen(r) for r in range(1, 5)] != [sim.chosen(r) for r in range(5, 9)]


def test_dropouts_and_stragglers(digits):
    sim = Simulation(run_of(dropout=0.5, stragglers=0.5, epochs=4, clients=20, samples=None), digits)
    epochs = {sim.job(r, k).epochs for r in range(5) for k in range(20)}
    assert epochs == {1, 2, 3, 4}
    record = sim.next_round()
    assert sorted(record["clients"] + record["lost"]) == list(range(20))
    assert 2 <= len(record["lost"]) <= 18
    alone = Simulation(run_of(dropout=0.999), digits)
    assert len(alone.next_round()["clients"]) == 1  # somebody is always left


def test_feddyn_server_by_hand(digits):
    sim = Simulation(run_of(method="feddyn", mu=0.1, participation=0.5), digits)
    before = {k: v.clone() for k, v in sim.models[0].items()}
    present = sim.chosen(1)
    updates = sim.trainer.train([sim.job(1, k) for k in present], sim.options.lr)
    sim.next_round()
    for key in before:
        mean = torch.stack([u.state[key] for u in updates]).mean(0)
        h = -0.1 * len(present) / 6 * (mean - before[key])
        torch.testing.assert_close(sim.models[0][key], mean - h / 0.1, rtol=1e-5, atol=1e-6)
        for k, u in zip(present, updates, strict=True):
            torch.testing.assert_close(sim.memory[k][key], -0.1 * (u.state[key] - before[key]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["fedawa", "fedadam", "simprox"])
def test_feddyn_corrects_what_the_method_gives(method, digits):
    """Two rounds by hand: the method's own aggregate - h / mu, h from the plain mean of those who took part"""
    sim = Simulation(run_of(method=method, algorithm="feddyn", mu=0.1, participation=0.5), digits)
    assert sim.options.label == f"{method}+feddyn"
    server = fastagg.aggregator(method, params=sim.module)
    h = {key: torch.zeros_like(value) for key, value in sim.models[0].items()}
    for r in (1, 2):
        before, present = dict(sim.models[0]), sim.chosen(r)
        lr = sim.options.lr * sim.options.lr_decay ** (r - 1)
        states = [u.state for u in sim.trainer.train([sim.job(r, k) for k in present], lr)]
        expected = server.aggregate(before, states, sim.sizes(present), client_ids=present)
        sim.next_round()
        for key, value in expected.items():
            h[key] = h[key] - 0.1 * sum(state[key] - before[key] for state in states) / 6
            torch.testing.assert_close(sim.models[0][key], value - h[key] / 0.1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["fedamp", "cwfedavg", "cfl"])
def test_feddyn_needs_one_global_model(method):
    with pytest.raises(ValueError, match=f"algorithm=feddyn corrects one global model, and {method} has several"):
        run_of(method=method, algorithm="feddyn")


def test_clusters_get_models_of_their_own(digits):
    sim = Simulation(run_of(method="cfl", options={"eps1": 100.0, "eps2": 0.0, "min_size": 2}, clients=6), digits)
    sim.next_round()
    assert len(sim.models) == 2
    assert set(sim.model_of) == {0, 1}
    record = sim.next_round()
    assert record["accuracy"] is None
    assert len(sim.models) >= 2
    assert sorted(set(sim.model_of)) == list(range(len(sim.models)))


def test_a_model_that_diverges_is_said(digits, tmp_path):
    with pytest.raises(fastagg.InputError, match="not finite"):
        simulate(run_of(method="fedawa", lr=1e6, rounds=30), tmp_path, dataset=digits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fedavgg"}, r"no method 'fedavgg'; did you mean 'fedavg.*'\?"),
        ({"method": "fedawa", "options": {"stepps": 3}}, "no option 'stepps'; did you mean 'steps'"),
        ({"method": "fedawa", "options": {"steps": -1}}, "steps=-1"),
        ({"options": {"params": []}}, "the simulator sets params itself"),
        ({"alfa": 1}, "no option 'alfa'; did you mean 'alpha'"),
        ({"data": "imagenet"}, "data='imagenet'; expected one of 'digits'"),
        ({"participation": 0}, "participation=0"), ({"dropout": 1}, "dropout"), ({"rounds": 0}, "rounds=0"),
        ({"model": "gpt"}, "model='gpt'"), ({"lr": -1}, "lr"), ({"selection": "all"}, "selection='all'"),
    ],
)  # fmt: skip
def test_bad_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        run_of(**options)


def test_methods_that_learn_on_proxy_data_need_some(digits):
    with pytest.raises(ValueError, match="give it some: proxy=100"):
        Simulation(run_of(method="fedlaw", proxy=0), digits)


def test_labels_tell_methods_apart():
    assert run_of(method="fedawa").label == "fedawa"
    assert run_of(method="fedawa-l").label == run_of(method="fedawa", options={"layerwise": True}).label == "fedawa-l"
    assert run_of(method="fedawa-l", options={"steps": 5}).label == "fedawa-l (steps=5)"
    assert run_of(method="fedprox").label == "fedprox"
    assert run_of(method="fedawa", algorithm="fedprox").label == "fedawa+fedprox"
    assert run_of(method="fedavg").label == "fedavg"


def test_configuration_survives_its_file(tmp_path):
    options = run_of(method="fedawa-l", options={"steps": 5}, batched=False)
    atomic.write_json(tmp_path / "config.json", options.to_json())
    assert config.read_json(tmp_path / "config.json") == options
    assert Config() == from_dict({})


def test_a_checkpoint_of_something_else(tmp_path):
    options = from_dict(SMALL | {"rounds": 1})
    simulate(options, tmp_path)
    saved.save(tmp_path / "checkpoint.safetensors", {"round": 1})
    with pytest.raises(ValueError, match="it is not one of a run"):
        simulate(options, tmp_path, resume=True)


def test_checkpoint_holds_trees(tmp_path):
    shared = torch.arange(6).reshape(2, 3)
    tree = {"a": [1, None, "x", 2.5, True], "b": {"t": shared, "u": shared.T, "empty": {}}, "c": torch.tensor(1.5)}
    saved.save(tmp_path / "x.safetensors", tree)
    got = saved.load(tmp_path / "x.safetensors")
    assert got["a"] == tree["a"]
    assert torch.equal(got["b"]["u"], shared.T)
    assert got["b"]["empty"] == {}
    assert got["c"].item() == 1.5


@pytest.mark.parametrize("algorithm", ["moon", "own:train"])
def test_a_method_with_an_algorithm_of_its_own_takes_no_other(algorithm):
    """It would run one and be labelled by the other"""
    with pytest.raises(ValueError, match=f"fedprox is fedavg with algorithm=fedprox, and algorithm={algorithm} was"):
        from_dict({"method": "fedprox", "algorithm": algorithm})
    for same in ("sgd", "fedprox"):
        assert from_dict({"method": "fedprox", "algorithm": same}).label == "fedprox"
    assert from_dict({"method": "fedawa-l", "algorithm": "moon"}).label == "fedawa+moon (layerwise=True)"


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "mps:7"])
def test_a_device_that_is_not_there(device, tmp_path, monkeypatch):
    """Said before data are read"""
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("data were read"))
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used here .*; choose cpu"):
        simulate(from_dict(SMALL | {"device": device}), tmp_path)
