"""IFCA's server against the paper's model averaging, in loops."""

from __future__ import annotations

import pytest
import torch

import fastagg
from helpers.cohort import assert_same_bits, assert_unchanged, make, snapshot

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "bn.running_var": (6,)}
SIZES = [3.0, 1.0, 4.0, 1.0, 5.0]
CHOICES = [2, 0, 2, 2, 0]


@pytest.mark.parametrize("weighted", [True, False])
def test_each_model_is_the_mean_of_those_who_chose_it(weighted):
    g, clients = make(5, SHAPES, torch.float64)
    before = snapshot(g, *clients)
    options = {"models": 3, "weighted": weighted, "choices": CHOICES}
    result = fastagg.ifca(None, clients, SIZES, **options)
    assert_unchanged([g, *clients], before)
    assert result.numbers == [0, 2]
    assert result.clusters == [[1, 4], [0, 2, 3]]
    for number, model, row in zip([0, 2], result, result.mixing, strict=True):
        members = [k for k in range(5) if CHOICES[k] == number]
        share = {k: SIZES[k] if weighted else 1.0 for k in members}
        assert row.tolist() == pytest.approx([share.get(k, 0.0) / sum(share.values()) for k in range(5)], rel=1e-15)
        for key in SHAPES:
            mean = sum(share[k] * clients[k][key] for k in members) / sum(share.values())
            torch.testing.assert_close(model[key], mean, rtol=1e-14, atol=1e-14)
    again = fastagg.ifca(g, clients, SIZES, **options)
    for a, b in zip(result, again, strict=True):
        assert_same_bits(a, b)


def test_the_last_choices_are_remembered():
    g, clients = make(5, SHAPES)
    server = fastagg.aggregator("ifca", models=3)
    ids = ["d", "b", "e", "a", "c"]
    server.aggregate(g, clients, SIZES, ids, choices=CHOICES)
    assert server.clusters == [["b", "c"], ["a", "d", "e"]]
    server.aggregate(g, clients[:2], SIZES[:2], ids[:2], choices={"d": 1, "b": 0})
    assert server.clusters == [["b", "c"], ["d"], ["a", "e"]]
    other = fastagg.aggregator("ifca", models=3)
    other.load_state_dict(server.state_dict())
    assert other.clusters == server.clusters
    assert (server.first_models, fastagg.aggregator("cfl").first_models) == (3, 1)
    with pytest.raises(fastagg.InputError, match="ifca state: clusters are not numbered by integers"):
        other.load_state_dict(server.state_dict() | {"clusters": torch.tensor([0.5, 1, 2, 0, 0])})


def test_one_model_is_fedavg():
    g, clients = make(5, SHAPES)
    [result] = fastagg.ifca(g, clients, SIZES, models=1, choices=[0] * 5)
    assert_same_bits(result, fastagg.fedavg(g, clients, SIZES))


@pytest.mark.parametrize("bad", [2, 0.5, -1, float("nan"), None])
def test_a_choice_that_is_none(bad):
    g, clients = make(5, SHAPES)
    choices, ids = [0, 1, 0, bad, 1], ["e", "d", "c", "b", "a"]
    with pytest.raises(fastagg.BadClientError, match=r"client 3 \(id 'b'\): its entry in choices is") as caught:
        fastagg.ifca(g, clients, SIZES, choices=choices, client_ids=ids)
    assert list(caught.value.reasons) == [3]
    result = fastagg.ifca(g, clients, SIZES, choices=choices, client_ids=ids, on_bad_client="drop")
    assert list(result.dropped) == ["b"]
    assert result.clusters == [["c", "e"], ["a", "d"]]
    with pytest.raises(fastagg.InputError, match="ifca needs choices: the number of the model that each client"):
        fastagg.ifca(g, clients)


def test_clients_without_data():
    g, clients = make(3, SHAPES)
    result = fastagg.ifca(g, clients, [0, 0, 2], choices=[0, 0, 1])
    assert result.mixing.tolist() == [[0.5, 0.5, 0], [0, 0, 1]]
