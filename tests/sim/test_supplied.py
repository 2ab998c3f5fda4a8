"""What the simulator gives to methods that take more than models and sizes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fastagg
from fastagg.sim import data
from fastagg.sim.choices import PROXY_FROM, PROXY_SPLITS
from fastagg.sim.config import from_dict
from fastagg.sim.simulation import Simulation
from fastagg.sim.supplied import SUPPLIES, losses

SMALL = {"clients": 6, "rounds": 2, "epochs": 1, "alpha": 0.3, "samples": 400, "proxy": 20}


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def started(digits, **options):
    return Simulation(from_dict(SMALL | options), digits)


@pytest.mark.parametrize(
    ("method", "options", "given"),
    [
        ("weiavg", {}, set()), ("weiavg", {"by": "entropy"}, {"entropies"}),
        ("cwfedavg", {}, set()), ("cwfedavg", {"by": "labels"}, {"class_dist"}),
        ("fedawa", {}, set()), ("fedawa", {"start": "feddisco"}, {"label_dist"}),
        ("fedavgm", {"weights": {"method": "weiavg", "by": "entropy"}}, {"entropies"}),
        ("feddisco", {}, {"label_dist"}), ("fednova", {}, {"local_steps"}), ("qfedavg", {}, {"start_losses"}),
        ("fedexp", {}, set()),
    ],
)  # fmt: skip
def test_inputs_that_the_options_ask_for(method, options, given, digits, monkeypatch):
    sim = started(digits, method=method, options=options)
    found = []
    real = type(sim.server).aggregate

    def aggregate(*args, client_ids, **inputs):
        found.append(inputs.keys())
        return real(*args, client_ids=client_ids, **inputs)

    monkeypatch.setattr(type(sim.server), "aggregate", aggregate)
    sim.next_round()
    assert found == [given]


def test_entropies_are_those_of_the_clients_labels(digits):
    """WeiAvg's Eq. 2, and Algorithm 1's weights of them"""
    sim = started(digits, method="weiavg", options={"by": "entropy"}, participation=0.5)
    record = sim.next_round()
    entropies = []
    for k in record["clients"]:
        labels = sim.parts.labels[sim.parts.train[k]].tolist()
        shares = [labels.count(c) / len(labels) for c in set(labels)]
        entropies.append(-sum(p * math.log(p) for p in shares))
    assert len(set(entropies)) == 3
    assert SUPPLIES["entropies"](sim, record["clients"], []) == pytest.approx(entropies, rel=1e-12)
    raised = np.array(entropies) + max(0.01 * np.mean(entropies) - min(entropies), 0)
    assert record["weights"] == pytest.approx(raised / raised.sum(), abs=1e-6)


def test_class_shares_from_labels_or_from_norms(digits):
    by = {way: started(digits, method="cwfedavg", options={"by": way}) for way in ("labels", "norms")}
    for sim in by.values():
        sim.next_round()
    assert any(not torch.equal(a, b) for a, b in zip(*(sim.models[0].values() for sim in by.values()), strict=True))
    counts = by["labels"].parts.counts
    assert SUPPLIES["labels"](by["labels"], [0, 2], []).tolist() == counts[[0, 2]].tolist()


def test_fedawa_from_feddisco(digits):
    """Its weights before a step are FedDisco's"""
    sims = [
        started(digits, method="fedawa", options={"start": "feddisco", "steps": 0}), started(digits, method="feddisco"),
        started(digits, method="fedawa", options={"steps": 0}),
    ]  # fmt: skip
    disco, plain, shares = (sim.next_round()["weights"] for sim in sims)
    assert disco == pytest.approx(plain, abs=1e-6)
    assert disco != pytest.approx(shares, abs=1e-3)
    assert fastagg.aggregator("feddisco").metric == "kl"


@pytest.mark.parametrize("split", PROXY_SPLITS)
@pytest.mark.parametrize("source", PROXY_FROM)
def test_proxy_sets(source, split, digits):
    sim = started(digits, method="fedlaw", proxy=60, proxy_from=source, proxy_split=split)
    x, y = sim.proxy
    counts = torch.bincount(y, minlength=10).tolist()
    tail = [max(int(6 * 0.1 ** (c / 9) + 1e-9), 1) for c in range(10)]
    assert counts == {"balanced": [6] * 10, "long-tailed": tail, "resampled": [6] * 10, "random": counts}[split]
    assert sum(counts) == (sum(tail) if split == "long-tailed" else 60)
    different = len(torch.unique(x.flatten(1), dim=0))
    assert different == (sum(tail) if split in ("long-tailed", "resampled") else 60)
    if split == "random":
        assert counts != [6] * 10
    [(batch, labels)] = SUPPLIES["proxy"](sim, [], [])
    assert torch.equal(batch, x)
    assert torch.equal(labels, y)


def test_proxy_from_the_test_set_is_not_tested_on(digits):
    plain, sim = (started(digits, proxy=60, proxy_from=source) for source in PROXY_FROM)
    assert len(sim.data.test_x) == len(digits.test_x) - 60
    rows = {tuple(row.tolist()) for row in sim.proxy[0].flatten(1)}
    assert not rows & {tuple(row.tolist()) for row in sim.data.test_x.flatten(1)}
    assert rows < {tuple(row.tolist()) for row in digits.test_x.flatten(1)}
    assert max(max(share) for share in sim.parts.test) < len(sim.data.test_x)
    assert len(plain.data.test_x) == len(digits.test_x)
    assert {tuple(row.tolist()) for row in plain.proxy[0].flatten(1)} < {tuple(r.tolist()) for r in digits.x.flatten(1)}
    assert 0 <= sim.next_round()["accuracy"] <= 1
    with pytest.raises(ValueError, match=r"proxy=\d+ samples of the test set, which has \d+: none is left"):
        started(digits, proxy=len(digits.test_x), proxy_from="test")


def test_a_large_proxy_set_comes_in_batches(digits):
    sim = started(digits, method="fedlaw", proxy=300)
    batches = SUPPLIES["proxy"](sim, [], [])
    assert [len(x) for x, _ in batches] == [100, 100, 100]
    assert torch.equal(torch.cat([y for _, y in batches]), sim.proxy[1])


def test_the_model_that_the_server_trains(digits):
    """By SGD with momentum on all its samples in one batch, once; from the global model, which does not change"""
    sim = started(digits, method="fltrust", batch_size=20, momentum=0.0, weight_decay=0.0)
    before = copy.deepcopy(sim.models[0])
    found = SUPPLIES["server_model"](sim, [], [])
    module = copy.deepcopy(sim.module)
    module.load_state_dict(before)
    torch.nn.functional.cross_entropy(module(sim.proxy[0]), sim.proxy[1]).backward()
    for name, value in module.named_parameters():
        torch.testing.assert_close(found[name], value.detach() - sim.options.lr * value.grad, rtol=1e-5, atol=1e-7)
        assert torch.equal(sim.models[0][name], before[name])
    assert len(sim.next_round()["weights"]) == 6
    with pytest.raises(ValueError, match="fltrust learns on samples of the server; give it some"):
        started(digits, method="fltrust", proxy=0).next_round()


def mean_loss(sim, state, rows):
    """Of a model on some of the training data"""
    module = copy.deepcopy(sim.module).eval()
    module.load_state_dict(state)
    with torch.no_grad():
        z = module(sim.data.x[rows]).double()
    labels = torch.from_numpy(sim.parts.labels[rows])
    return float((z.exp().sum(1).log() - z[torch.arange(len(rows)), labels]).mean())


@pytest.mark.parametrize("train_share", [1.0, 0.6])
def test_fedfomo_gets_losses_of_all_models_on_all_data(train_share, digits, monkeypatch):
    """On what a client does not train on, if there is such"""
    sim = started(digits, method="fedfomo", participation=0.5, train_share=train_share)
    data = sim.parts.train if train_share == 1 else sim.parts.held_out
    found, real = [], type(sim.server).aggregate

    def aggregate(self, before, states, sizes, client_ids, **inputs):
        starts = [sim.models[sim.model_of[k]] for k in client_ids]
        found.append((starts, states, client_ids, inputs))
        return real(self, before, states, sizes, client_ids, **inputs)

    monkeypatch.setattr(type(sim.server), "aggregate", aggregate)
    for _ in range(3):
        sim.next_round()
    own = [name for name, _ in sim.module.named_parameters()]
    for starts, states, ids, inputs in found:
        assert inputs.keys() == {"losses", "start_losses", "distances"}
        for i, k in enumerate(ids):
            assert inputs["start_losses"][i] == pytest.approx(mean_loss(sim, starts[i], data[k]), rel=1e-5)
            for n, state in enumerate(states):
                assert inputs["losses"][i][n] == pytest.approx(mean_loss(sim, state, data[k]), rel=1e-5)
                apart = sum(float((state[key] - starts[i][key]).double().square().sum()) for key in own)
                assert inputs["distances"][i][n] == pytest.approx(math.sqrt(apart), rel=1e-5)
    assert len(sim.models) == 6
    first, last = found[0][3]["distances"], found[-1][3]["distances"]
    assert np.ptp(first, axis=0).max() < 1e-6  # all started from one model
    assert np.ptp(last, axis=0).max() > 1e-3


def test_a_model_that_is_not_finite_helps_nobody(digits):
    sim = started(digits, method="fedfomo")
    broken = {key: value * math.nan for key, value in sim.models[0].items()}
    assert losses(sim, broken, [0, 1]).tolist() == [np.finfo(np.float64).max] * 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fedfomo_goes_on_without_a_client_that_is_not_finite(bad, digits, monkeypatch):
    sims = [started(digits, method="fedfomo", options={"on_bad_client": way}) for way in ("drop", "raise")]
    for sim in sims:
        real = sim.trained

        def trained(r, jobs, lr, real=real):
            updates = real(r, jobs, lr)
            broken = {key: value * bad if r == 2 else value for key, value in updates[2].model.items()}
            return [replace(u, state=broken) if i == 2 else u for i, u in enumerate(updates)]

        monkeypatch.setattr(sim, "trained", trained)
        sim.next_round()
    before = sims[0].models[2]
    record = sims[0].next_round()
    assert record["clients"] == [0, 1, 3, 4, 5]
    assert sims[0].models[2] is before
    assert all(torch.isfinite(value).all() for model in sims[0].models for value in model.values())
    assert any(not torch.equal(a, b) for a, b in zip(before.values(), sims[0].models[3].values(), strict=True))
    with pytest.raises(fastagg.NonFiniteError, match="client 2: key"):
        sims[1].next_round()


@pytest.mark.parametrize("train_share", [1.0, 0.5])
def test_qfedavg_gets_losses_of_what_is_trained_on(train_share, digits, monkeypatch):
    sim = started(digits, method="qfedavg", options={"q": 2.0}, train_share=train_share, lr=0.02)
    found, real = [], type(sim.server).aggregate

    def aggregate(self, before, states, sizes, client_ids, **inputs):
        found.append((before, states, client_ids, inputs["start_losses"]))
        return real(self, before, states, sizes, client_ids, **inputs)

    monkeypatch.setattr(type(sim.server), "aggregate", aggregate)
    weights = [sim.next_round()["weights"] for _ in range(2)]
    own = [name for name, _ in sim.module.named_parameters()]
    for (before, states, ids, start_losses), w in zip(found, weights, strict=True):
        F = np.array([mean_loss(sim, before, sim.parts.train[k]) for k in ids])
        assert start_losses == pytest.approx(F, rel=1e-5)
        squares = [sum(float((sd[key] - before[key]).double().square().sum()) for key in own) for sd in states]
        p, L = np.array(sim.sizes(ids)) / sum(sim.sizes(ids)), 1 / 0.02  # the clients' learning rate
        h = 2 * F * L**2 * np.array(squares) + L * F**2
        assert w == pytest.approx(p * F**2 * L / (p @ h), rel=1e-4, abs=1e-6)
    assert started(digits, method="qfedavg", options={"lr": 0.3}).server.lr == 0.3


def test_held_out_samples_are_the_rest_of_each_client(digits):
    whole, part = (started(digits, train_share=share, corrupted=0.5).parts for share in (1.0, 0.6))
    assert [len(rows) for rows in whole.held_out] == [0] * 6
    for k in range(6):
        assert len(part.held_out[k]) == len(whole.train[k]) - len(part.train[k]) > 0
        assert sorted([*part.train[k], *part.held_out[k]]) == whole.train[k].tolist()
    true = digits.y.numpy()
    wrong = [k for k in range(6) if (part.labels[part.train[k]] != true[part.train[k]]).any()]
    assert len(wrong) == 3
    for k in wrong:  # what it does not train on has the same two classes swapped
        pairs = [{(a, b) for a, b in zip(true[rows], part.labels[rows], strict=True) if a != b}
                 for rows in (part.train[k], part.held_out[k])]  # fmt: skip
        assert pairs[1] <= pairs[0]
    assert any((part.labels[part.held_out[k]] != true[part.held_out[k]]).any() for k in wrong)


def test_ifca_clients_take_the_model_that_fits_them(digits):
    of_groups = {"participation": 0.5, "rounds": 3, "partition": "groups", "train_share": 0.7}
    sim = started(digits, method="ifca", options={"models": 3}, **of_groups)
    assert len(sim.models) == 3
    assert all(not torch.equal(a, b) for a, b in zip(*(list(m.values())[:1] for m in sim.models[:2]), strict=True))

    def best(k):
        return int(np.argmin([mean_loss(sim, model, sim.parts.train[k]) for model in sim.models]))

    assert sim.model_of == [best(k) for k in range(6)]
    for _ in range(3):
        before, chosen = list(sim.models), list(sim.model_of)
        expected = [best(k) for k in range(6)]
        record = sim.next_round()
        present = record["clients"]
        assert [sim.model_of[k] for k in present] == [expected[k] for k in present]
        assert all(sim.model_of[k] == chosen[k] for k in range(6) if k not in present)
        for number, (old, new) in enumerate(zip(before, sim.models, strict=True)):
            taken = number in [expected[k] for k in present]
            assert any(not torch.equal(old[key], new[key]) for key in old) == taken
        assert record["accuracy"] is None
        assert 0 <= record["personal_accuracy"] <= 1
    other = started(digits, method="ifca", options={"models": 3}, **of_groups | {"rounds": 4})
    other.load_state_dict(sim.state_dict())
    a, b = ({k: v for k, v in s.next_round().items() if k != "seconds"} for s in (sim, other))
    assert a == b
