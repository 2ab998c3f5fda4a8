"""Attackers who train on wrong labels, or on images with a trigger; and attacks of a user's own, in whole runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fastagg
from fastagg.sim import data, ranks
from fastagg.sim.attack.data import Backdoor
from fastagg.sim.config import from_dict
from fastagg.sim.library import Runs
from fastagg.sim.outcomes import outcomes
from fastagg.sim.report import read_metrics
from fastagg.sim.run import simulate
from fastagg.sim.simulation import Simulation
from helpers.attacks import idle

SMALL = {"clients": 10, "rounds": 2, "epochs": 1, "alpha": 0.5, "samples": 400}


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def run_of(**options):
    return from_dict(SMALL | options)


def curve(folder):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in read_metrics(folder / "metrics.jsonl")]


def test_only_attackers_have_other_labels(digits):
    before = digits.y.clone()
    sim = Simulation(run_of(attack="labels", attackers=0.3), digits)
    assert len(sim.attackers) == 3
    for k, rows in enumerate(sim.parts.train):
        true = digits.y[rows]
        assert torch.equal(sim.labels[rows], 9 - true if k in sim.attackers else true)
    assert sim.x is digits.x
    assert torch.equal(digits.y, before)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 28, 20), (1, 32, 32)])
def test_the_trigger(shape):
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(6, *shape)), dtype=torch.float32)
    set_of = data.Dataset("some", x, torch.arange(6) % 3, x, torch.arange(6) % 3, 3)
    before = x.clone()
    on = Backdoor(set_of, 1).on(x)
    side = {8: 2, 20: 2, 32: 4}[shape[2]]
    for image, now in zip(x, on, strict=True):
        for c, row, column in np.ndindex(shape):
            inside = row >= shape[1] - side and column >= shape[2] - side
            assert now[c, row, column] == (max(i[c].max() for i in x) if inside else image[c, row, column])
    assert torch.equal(x, before)


@pytest.mark.parametrize(("share", "part"), [(0.25, 0.25), (1.0, 1.0), (1e-9, 0)])
def test_a_share_of_the_attackers_images_has_it(share, part, digits):
    before = digits.x.clone()
    sim = Simulation(run_of(attack="backdoor", attackers=0.3, attack_share=share, attack_target=7), digits)
    marked = sim.backdoor.on(digits.x)
    for k, rows in enumerate(sim.parts.train):
        changed = [i for i in rows if not torch.equal(sim.x[i], digits.x[i]) or sim.labels[i] != digits.y[i]]
        if k not in sim.attackers:
            assert not changed
            continue
        count = max(1, round(part * len(rows)))
        assert count - 5 <= len(changed) <= count  # a target image that has white there already is not changed
        assert all(torch.equal(sim.x[i], marked[i]) and sim.labels[i] == 7 for i in changed)
    assert torch.equal(digits.x, before)
    again = Simulation(run_of(attack="backdoor", attackers=0.3, attack_share=share, attack_target=7), digits)
    assert torch.equal(sim.x, again.x)
    assert torch.equal(sim.labels, again.labels)


def rate_by_hand(sim, model, rows):
    """Of images with a trigger, made here, that are of another class than the target"""
    hits = total = 0
    target = sim.options.attack_target
    for i in rows:
        if sim.data.test_y[i] != target:
            image = sim.data.test_x[i].clone()
            image[:, 6:, 6:] = sim.data.x.max()
            output = outcomes(sim.module, model, image[None], sim.data.test_y[i][None]).outputs
            hits, total = hits + int(output.argmax() == target), total + 1
    return hits / total if total else None


@pytest.mark.parametrize("method", ["fedavg", "fedamp", "cfl"])
def test_success_rate_by_hand(method, digits):
    torch.set_num_threads(1)
    options = {"attack": "backdoor", "attackers": 0.3, "attack_target": 3, "clients": 5, "attack_strength": 3.0}
    sim = Simulation(run_of(method=method, **options), digits)
    sim.next_round()
    seen = sim.evaluated()["attack_success"]
    if len(sim.models) == 1:
        expected = rate_by_hand(sim, sim.models[0], range(len(digits.test_y)))
    else:
        honest = [k for k in range(5) if k not in sim.attackers]
        rates = [rate_by_hand(sim, sim.models[sim.model_of[k]], sim.parts.test[k]) for k in honest]
        expected = np.mean([rate for rate in rates if rate is not None])
    assert seen == pytest.approx(expected, abs=1e-12)


def test_a_backdoor_opens_and_is_recorded(digits, tmp_path):
    options = {
        "attack": "backdoor",
        "attackers": 0.4,
        "rounds": 8,
        "epochs": 3,
        "samples": None,
        "attack_strength": 2.0,
    }
    summary = simulate(run_of(**options), tmp_path / "a", dataset=digits)
    rates = [record["attack_success"] for record in curve(tmp_path / "a")]
    assert summary["attack_success"] == pytest.approx(np.mean(rates[-5:]))
    assert summary["attack_success"] > 0.5
    assert json.loads((tmp_path / "a/summary.json").read_text())["attack_success"] == summary["attack_success"]
    alone = simulate(run_of(**options | {"attackers": 0.0}), tmp_path / "b", dataset=digits)
    assert alone["attack_success"] < 0.2  # nobody opens it
    assert "attack_success" not in simulate(run_of(), tmp_path / "c", dataset=digits)


def test_success_in_tables_and_pages(tmp_path):
    made = fastagg.sim.simulate(attack="backdoor", attackers=0.4, **SMALL)
    text = str(Runs([made]))
    assert "attack success, %" in text
    assert f"{100 * made.summary['attack_success']:.2f}" in text
    assert "takes for the attackers' target" in text
    assert Runs([made]).table()[0]["attack_success"] == made.summary["attack_success"]
    assert np.isfinite(made.curve("attack_success")).all()
    page = made.report(tmp_path / "report.html").read_text()
    assert "Success of the backdoor" in page
    assert "attack success" not in str(Runs([fastagg.sim.simulate(**SMALL)]))


def test_label_flippers_do_harm(digits, tmp_path):
    options = {"rounds": 6, "epochs": 3, "samples": None}
    honest = simulate(run_of(**options), tmp_path / "a", dataset=digits)["accuracy"]
    flipped = simulate(run_of(attack="labels", attackers=0.5, **options), tmp_path / "b", dataset=digits)["accuracy"]
    assert flipped < honest - 0.1


def test_data_that_cannot_be_poisoned():
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    with pytest.raises(ValueError, match="attack=backdoor needs images with classes"):
        fastagg.sim.simulate(linear, (x, y, x, y), attack="backdoor", clients=3, proxy=0)
    values = torch.randn(60)
    with pytest.raises(ValueError, match="attack=labels needs classes"):
        fastagg.sim.simulate(linear, (x, values, x, values), attack="labels", attackers=0.5, clients=3, proxy=0)
    with pytest.raises(ValueError, match="attack_target=10; expected a class, 0 to 9"):
        fastagg.sim.simulate(attack="backdoor", attack_target=10)


def linear(shape, classes):
    return torch.nn.Linear(*shape, classes or 1)


def test_an_attack_by_name_and_as_an_object(digits, tmp_path):
    text = "helpers.attacks:idle"
    simulate(run_of(attack=text, attackers=0.3), tmp_path / "named", dataset=digits)
    made = fastagg.sim.simulate(attack=idle, attackers=0.3, **SMALL)
    assert made.config["attack"] == text
    assert made.label == "fedavg, idle 30 %"
    strip = [{k: v for k, v in record.items() if k != "seconds"} for record in made.records]
    assert strip == curve(tmp_path / "named")
    attackers = Simulation(run_of(attack=text, attackers=0.3), digits).attackers
    for record in made.records[1:]:
        lengths = dict(zip(record["clients"], record["norms"], strict=True))
        assert [k for k, length in lengths.items() if length == 0] == attackers
    with pytest.raises(ValueError, match="there is no module 'nowhere'"):
        fastagg.sim.simulate(attack="nowhere:attack", attackers=0.3, **SMALL)
    unnamed = fastagg.sim.simulate(attack=lambda known: known.own, attackers=0.3, **SMALL)
    assert unnamed.config["attack"].startswith("own:")
    assert unnamed.accuracy.tolist() == fastagg.sim.simulate(**SMALL).accuracy.tolist()


def test_runs_in_processes_are_the_same(digits, tmp_path):
    attacks = ["alie", "min-max", "labels", "backdoor", "helpers.attacks:idle"]
    fastagg.sim.compare(
        ["fedavg"], grid={"attack": attacks}, attackers=0.3, out=tmp_path / "two", jobs=2, progress=False, **SMALL
    )
    for kind in attacks:
        alone = tmp_path / kind.rpartition(":")[2]
        simulate(run_of(attack=kind, attackers=0.3), alone, dataset=digits)
        [there] = (tmp_path / "two").glob(f"attack={kind.replace(':', '-')}/*/seed-0")
        assert curve(there) == curve(alone), kind


@pytest.mark.parametrize("kind", ["alie", "ipm", "min-max", "min-sum", "helpers.attacks:idle"])
def test_attackers_who_see_others_are_in_one_process(kind, digits):
    sim = Simulation(run_of(attack=kind, attackers=0.3), digits)
    with pytest.raises(ValueError, match=f"attack={kind} needs all clients in one process"):
        ranks.check(sim.options, sim.trainer.algorithm, sim.server, {})
    plain = run_of(attack="backdoor", attackers=0.3)
    ranks.check(plain, sim.trainer.algorithm, sim.server, {})
