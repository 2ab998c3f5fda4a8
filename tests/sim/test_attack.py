"""Malicious clients of the simulator: what they send, who they are, and what is recorded of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine import saved
from fastagg.cli import main
from fastagg.sim import attack, comparison, config, data
from fastagg.sim.config import from_dict
from fastagg.sim.report import read_metrics
from fastagg.sim.run import simulate
from fastagg.sim.simulation import Simulation
from fastagg.sim.stores import check_same
from fastagg.sim.train import Trainer
from helpers.cohort import assert_unchanged, snapshot

SMALL = {"clients": 10, "rounds": 2, "epochs": 1, "alpha": 0.5, "samples": 400}


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def run_of(**options):
    return from_dict(SMALL | options)


def curve(folder):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture
def models():
    """start and trained: two parameters, a buffer, a counter, and an integer parameter"""
    generator = torch.Generator().manual_seed(0)
    start = {
        "a": torch.randn(4, 3, generator=generator), "b": torch.randn(5, generator=generator, dtype=torch.float64),
        "codes": torch.arange(3), "bn.running_mean": torch.zeros(3), "bn.num_batches_tracked": torch.tensor(5),
    }  # fmt: skip
    trained = {key: value + 1 for key, value in start.items()}
    trained["a"] = start["a"] + 0.1 * torch.randn(4, 3, generator=generator)
    return start, trained


PARAMS = ["a", "b", "codes"]


def sent_by(kind, start, trained, strength, rng):
    """By a single client, who is malicious"""
    told = {"strength": strength, "knows": "honest", "direction": "unit", "rngs": [rng]}
    return attack.sent(kind, [start], [trained], [0], PARAMS, **told)[0]


@pytest.mark.parametrize(("kind", "sign"), [("flip", -1), ("scale", 1)])
def test_flip_and_scale_by_hand(kind, sign, models):
    start, trained = models
    before = snapshot(start, trained)
    sent = sent_by(kind, start, trained, 3.0, np.random.default_rng(0))
    for key in ("a", "b"):
        torch.testing.assert_close(sent[key], start[key] + sign * 3 * (trained[key] - start[key]))
    for key in ("codes", "bn.running_mean", "bn.num_batches_tracked"):
        assert torch.equal(sent[key], trained[key])
    assert list(sent) == list(trained)
    assert not any(sent[key].data_ptr() == trained[key].data_ptr() for key in sent)
    assert_unchanged([start, trained], before)


def test_noise_by_hand(models):
    start, trained = models
    sent = sent_by("noise", start, trained, 7.0, np.random.default_rng(3))
    rng = np.random.default_rng(3)
    z = {"a": rng.standard_normal((4, 3)), "b": rng.standard_normal(5)}
    d = np.concatenate([(trained[k] - start[k]).double().numpy().ravel() for k in z])
    factor = 7 * np.linalg.norm(d) / np.linalg.norm(np.concatenate([v.ravel() for v in z.values()]))
    for key, value in z.items():
        np.testing.assert_allclose(sent[key].numpy(), start[key].numpy() + factor * value, rtol=1e-5)
        assert sent[key].dtype == trained[key].dtype
    moved = np.concatenate([(sent[k] - start[k]).double().numpy().ravel() for k in z])
    assert np.linalg.norm(moved) == pytest.approx(7 * np.linalg.norm(d), rel=1e-5)
    assert torch.equal(sent["bn.running_mean"], trained["bn.running_mean"])


def test_noise_of_a_client_that_did_not_move(models):
    start, _ = models
    sent = sent_by("noise", start, start, 7.0, np.random.default_rng(3))
    assert all(torch.equal(sent[key], start[key]) for key in start)


@pytest.mark.parametrize("kind", ["noise", "flip", "scale", "alie", "ipm", "min-max", "min-sum"])
@pytest.mark.parametrize("model", ["mlp", "resnet8"])
def test_only_attackers_change_and_only_their_parameters(kind, model, digits, monkeypatch):
    torch.set_num_threads(1)
    sim = Simulation(run_of(attack=kind, attackers=0.3, model=model, clients=4, samples=80), digits)
    trained = sim.trainer.train([sim.job(1, k) for k in range(4)], sim.options.lr)
    got, aggregate = [], sim.aggregate

    def watched(present, updates):
        got.extend(updates)
        return aggregate(present, updates)

    monkeypatch.setattr(sim, "aggregate", watched)
    sim.next_round()
    assert len(sim.attackers) == 1
    params = {name for name, _ in sim.module.named_parameters()}
    for k, (honest, update) in enumerate(zip(trained, got, strict=True)):
        for key, value in honest.state.items():
            same = torch.equal(update.state[key], value)
            assert same != (k in sim.attackers and key in params), (k, key)


def test_who_is_malicious_comes_from_the_seed(digits):
    chosen = [Simulation(run_of(attack="flip", attackers=0.3, seed=s, clients=20), digits).attackers for s in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert all(len(set(who)) == 6 and who == sorted(who) for who in chosen)
    assert len(Simulation(run_of(attack="flip", attackers=0.26), digits).attackers) == 3  # of 10, rounded
    assert Simulation(run_of(attack="flip", attackers=0.0), digits).attackers == []


def test_without_attackers_nothing_changes(digits, tmp_path):
    simulate(run_of(method="fedawa"), tmp_path / "none", dataset=digits)
    simulate(run_of(method="fedawa", attack="noise"), tmp_path / "noise", dataset=digits)
    assert curve(tmp_path / "none") == curve(tmp_path / "noise")


@pytest.mark.parametrize("kind", ["noise", "scale", "alie", "ipm", "min-max", "min-sum", "labels", "backdoor"])
def test_an_attacked_run_is_repeated_and_resumed_to_the_same_curve(kind, digits, tmp_path):
    options = {"attack": kind, "attackers": 0.3, "participation": 0.5, "rounds": 4}
    options |= {} if kind.startswith("min") else {"attack_strength": 2.0}
    simulate(run_of(**options), tmp_path / "a", dataset=digits)
    simulate(run_of(**options | {"rounds": 2}), tmp_path / "b", dataset=digits)
    simulate(run_of(**options), tmp_path / "b", dataset=digits, resume=True)
    a, b = (saved.load(tmp_path / x / "checkpoint.safetensors")["models"][0] for x in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a)
    left, right = (
        [{k: v for k, v in r.items() if "cosine" not in k} for r in curve(tmp_path / x)] for x in "ab"
    )  # cosines are recorded in the middle and at the end, which were others for the short run
    assert left == right
    facts = json.loads((tmp_path / "a/partition.json").read_text())
    assert facts["attackers"] == Simulation(run_of(**options), digits).attackers
    assert len(facts["attackers"]) == 3


def test_a_run_that_attackers_end_is_a_result(digits, tmp_path):
    options = run_of(attack="flip", attackers=0.5, attack_strength=1e4, rounds=40)
    summary = simulate(options, tmp_path / "run", dataset=digits)
    assert summary["diverged"]
    assert summary["finished"]
    assert summary["accuracy"] is None
    assert summary["rounds"] < 40
    assert comparison.is_done(options, tmp_path / "run")
    assert simulate(options, tmp_path / "run", dataset=digits, resume=True)["diverged"]


def test_a_run_from_before_there_were_attacks_goes_on(digits, tmp_path):
    simulate(run_of(), tmp_path, dataset=digits)
    old = json.loads((tmp_path / "config.json").read_text())
    for name in [name for name in old if name.startswith("attack")]:
        del old[name]
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert config.read_json(tmp_path / "config.json") == run_of()
    check_same(run_of(), config.read_json(tmp_path / "config.json"), tmp_path)
    assert comparison.is_done(run_of(), tmp_path)
    assert simulate(run_of(rounds=3), tmp_path, dataset=digits, resume=True)["rounds"] == 3
    with pytest.raises(ValueError, match="was begun with attack='none', not 'flip'"):
        comparison.is_done(run_of(attack="flip", attackers=0.3), tmp_path)


def test_attacks_have_labels_and_folders_of_their_own(tmp_path):
    attacked = [
        run_of(attack="flip", attackers=x, attack_strength=s) for x, s in ((0.1, None), (0.3, None), (0.3, 5.0))
    ]
    attacked += [run_of(attack="min-max", attackers=0.3, attack_direction="std", attack_knows="own")]
    assert [o.label for o in attacked] == [
        "fedavg, flip 10 %", "fedavg, flip 30 %", "fedavg, flip 30 % x 5",
        "fedavg, min-max 30 % (direction=std, knows=own)",
    ]  # fmt: skip
    assert len({comparison.place(tmp_path, o) for o in [run_of(), *attacked]}) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attack", "flipp"], "attack='flipp'; expected one of 'none', 'noise', 'flip', 'scale'"),
        (["--attack", "flip", "--attackers", "1.5"], "attackers=1.5; expected a number >= 0 and <= 1"),
        (["--attack", "flip", "--attackers", "some"], "attackers='some'"),
        (["--attackers", "0.2"], "attackers=0.2 without an attack; choose one: noise, flip, scale, alie, ipm, min-max"),
        (["--attack", "min-max", "--attack-strength", "2"], "attack_strength=2 with min-max, which finds its own"),
        (["--attack", "alie", "--attack-knows", "all"], "attack_knows='all'; expected one of 'honest', 'own'"),
        (["--attack", "min-sum", "--attack-direction", "up"], "expected one of 'unit', 'std', 'sign'"),
        (["--attack", "backdoor", "--attack-target", "-1"], "attack_target=-1; expected an integer >= 0"),
        (["--attack", "backdoor", "--attack-share", "0"], "attack_share=0; expected a number > 0"),
        (["--attack", "flip", "--attack-strength", "-1"], "attack_strength=-1; expected a number >= 0"),
    ],
)
def test_bad_options_on_the_command_line(arguments, message, tmp_path, capsys):
    assert main(["sim", *arguments, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["fedavg", "fedawa", "fedamp", "cfl", "cwfedavg"])
def test_a_client_that_is_not_finite_can_be_dropped(method, monkeypatch, tmp_path):
    train = Trainer.train

    def spoiled(self, jobs, lr):
        updates = train(self, jobs, lr)
        bad = next(update for job, update in zip(jobs, updates, strict=True) if job.client == 2)
        next(iter(bad.state.values())).view(-1)[0] = float("nan")
        return updates

    monkeypatch.setattr(Trainer, "train", spoiled)
    options = {"method": method, "rounds": 2, "epochs": 1, "clients": 6, "alpha": 1.0}
    with pytest.raises(fastagg.NonFiniteError, match="client 2"):
        simulate(from_dict(options), tmp_path / "raise")
    summary = simulate(from_dict(options | {"options": {"on_bad_client": "drop"}}), tmp_path / "drop")
    assert summary["finished"]
    for record in read_metrics(tmp_path / "drop" / "metrics.jsonl")[1:]:
        assert record["clients"] == [0, 1, 3, 4, 5]
        assert record["lost"] == [2]
        assert record["weights"] is None or len(record["weights"]) == 5
        assert record["norms"] is None or len(record["norms"]) == 5
