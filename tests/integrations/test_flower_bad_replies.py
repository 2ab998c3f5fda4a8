"""Replies that cannot be used: named in an error, or left out while the server goes on."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flwr: make test-integrations")
from flwr.app import ArrayRecord, MetricRecord, RecordDict

import fastagg
from fastagg.integrations.flower import FastAgg, pack, unpack
from fastagg.integrations.flower_round import check_booleans
from helpers import every_method
from helpers.flower_nodes import NODES, Nodes, content, replies, same, started

pytestmark = pytest.mark.integration


def spoiled(sd):
    """Replies that cannot be used, and a word of the message that says so"""
    changed = {**sd, "fc.bias": sd["fc.bias"] * float("nan")}
    less, more, other = dict(sd), {**sd, "x": torch.ones(1)}, {**sd, "fc.bias": torch.ones(5)}
    del less["fc.bias"]
    cut, pickled, alien = content(sd), content(sd), content(sd)
    cut["arrays"]["fc.bias"].data = cut["arrays"]["fc.bias"].data[:-1]
    file = io.BytesIO()
    np.save(file, np.array([{}] * 4), allow_pickle=True)
    pickled["arrays"]["fc.bias"].data = file.getvalue()
    alien["arrays"]["fc.bias"].stype = "jax"
    nothing, two = RecordDict({"metrics": MetricRecord({"num-examples": 1})}), content(sd)
    two["more"] = ArrayRecord()
    unweighted = RecordDict({"arrays": pack(sd), "metrics": MetricRecord({"loss": 1.0})})
    return {
        "nan": (content(changed), "fc.bias"), "missing": (content(less), "fc.bias"), "extra": (content(more), "'x'"),
        "shape": (content(other), "fc.bias"), "cut": (cut, "15 came"), "pickled": (pickled, "header"),
        "stype": (alien, "jax"), "no arrays": (nothing, "0 ArrayRecords"), "two records": (two, "2 ArrayRecords"),
        "no metrics": (RecordDict({"arrays": pack(sd)}), "MetricRecord"), "no size": (unweighted, "num-examples"),
        "negative": (content(sd, -1), "-1"), "endless": (content(sd, float("inf")), "inf"),
        "list": (content(sd, [1, 2]), "expected a number"), "other metrics": (content(sd, loss=1.0), "loss"),
    }  # fmt: skip


@pytest.mark.parametrize("kind", spoiled(every_method.cohort(1)[1][0]))
def test_a_bad_reply_is_named_or_left_out(kind, caplog):
    g, sds = every_method.cohort(4)
    nodes = NODES[:4]
    bad, word = spoiled(sds[1])[kind]
    contents = [content(sds[0]), bad, content(sds[2]), content(sds[3])]
    with pytest.raises(fastagg.InputError, match=str(nodes[1])) as caught:
        started(FastAgg("fedawa"), g, nodes).aggregate_train(1, replies(nodes, contents))
    assert word in str(caught.value)
    strategy = started(FastAgg("fedawa", on_bad_client="drop"), g, nodes)
    with caplog.at_level(logging.WARNING, "fastagg"):
        arrays, metrics = strategy.aggregate_train(1, replies(nodes, contents))
    assert str(nodes[1]) in caplog.text
    assert word in caplog.text
    assert metrics["fastagg-dropped"] == [nodes[1]]
    assert metrics["fastagg-clients"] == [nodes[0], nodes[2], nodes[3]]
    rest = [sds[0], sds[2], sds[3]]
    same(unpack(arrays), fastagg.fedawa(g, rest, [10] * 3, client_ids=metrics["fastagg-clients"]))
    assert len(metrics["fastagg-weights"]) == 3


@pytest.mark.parametrize("method", ["fednova", "cwfedavg", "fedamp", "cfl"])
def test_the_reason_is_the_first_that_is_wrong_whatever_the_method_takes_of_clients(method, caplog):
    g, sds = every_method.cohort(4)
    nodes = NODES[:4]
    told = {"fednova": {"local_steps": 3}, "cwfedavg": {"class_dist": [1, 2]}}.get(method, {})
    contents = [content(sd, **told) for sd in sds]
    contents[1]["arrays"]["fc.bias"].data = b"no array"
    with pytest.raises(fastagg.InputError, match=rf"\(id {nodes[1]}\): key 'fc.bias' is not an array"):
        started(FastAgg(method), g, nodes).aggregate_train(1, replies(nodes, contents))
    strategy = started(FastAgg(method, on_bad_client="drop"), g, nodes)
    arrays, metrics = strategy.aggregate_train(1, replies(nodes, contents))
    assert list(strategy.result.dropped) == metrics["fastagg-dropped"] == [nodes[1]]
    assert "key 'fc.bias' is not an array" in strategy.result.dropped[nodes[1]]
    assert str(nodes[1]) in caplog.text
    rest = [0, 2, 3]
    other = started(FastAgg(method), g, [nodes[k] for k in rest])
    expected, _ = other.aggregate_train(1, replies([nodes[k] for k in rest], [contents[k] for k in rest]))
    assert arrays == expected
    for node in (nodes[k] for k in rest):
        assert strategy._server.start_of(node) == other._server.start_of(node)
    if method != "cfl":  # whose new clients start from the first cluster
        assert strategy._server.start_of(nodes[1]) is None


@pytest.mark.parametrize("method", ["fedavg", "fedawa", "fedamp", "cfl"])
def test_of_two_replies_of_a_node_the_first_counts(method):
    g, sds = every_method.cohort(4)
    nodes = [NODES[0], NODES[1], NODES[1], NODES[2]]
    given = replies(nodes, [content(sd) for sd in sds])
    with pytest.raises(fastagg.InputError, match=f"node {NODES[1]}.*second reply"):
        started(FastAgg(method), g).aggregate_train(1, given)
    arrays, metrics = started(FastAgg(method, on_bad_client="drop"), g).aggregate_train(1, given)
    once, _ = started(FastAgg(method), g).aggregate_train(1, [given[0], given[1], given[3]])
    assert arrays == once
    assert metrics["fastagg-clients"] == NODES[:3]
    assert metrics["fastagg-dropped"] == []


def test_rounds_that_leave_nothing_keep_the_model():
    g, sds = every_method.cohort(3)
    nan = {key: value * float("nan") if value.is_floating_point() else value for key, value in sds[0].items()}
    seen = []

    def train(message):
        r = message.content["config"]["server-round"]
        seen.append(message.content["arrays"])
        if r == 3:
            raise ArithmeticError("no luck")
        return content({1: sds[0], 2: nan, 4: sds[0], 5: sds[0]}[r], 0 if r == 4 else 10)

    evaluate = lambda message: RecordDict({"m": MetricRecord({"num-examples": 0, "acc": 1.0})})  # noqa: E731
    strategy = FastAgg("fedavg", on_bad_client="drop")
    result = strategy.start(Nodes(NODES[:2], train, evaluate), pack(g), num_rounds=5)
    same(unpack(result.arrays), sds[0])
    dropped = {r: metrics["fastagg-dropped"] for r, metrics in result.train_metrics_clientapp.items()}
    assert {r: sorted(ids) for r, ids in dropped.items()} == {
        1: [], 2: sorted(NODES[:2]), 4: sorted(NODES[:2]), 5: []
    }  # fmt: skip
    assert all(record == seen[2] for record in seen[2:])  # the model of round 1 is sent until there is a better one
    assert result.evaluate_metrics_clientapp == {}  # nobody has data to evaluate on


def test_bad_evaluations_are_left_out_too():
    good = RecordDict({"m": MetricRecord({"num-examples": 2, "acc": 0.5})})
    more = RecordDict({"m": MetricRecord({"num-examples": 6, "acc": 0.9})})
    for bad in ({"acc": 1.0}, {"num-examples": 1, "acc": [1.0, 2.0]}, {"num-examples": -1, "acc": 1.0}):
        given = [good, RecordDict({"m": MetricRecord(bad)}), more]
        metrics = FastAgg(on_bad_client="drop").aggregate_evaluate(1, replies(NODES[:3], given))
        assert metrics["acc"] == pytest.approx(0.8)
        with pytest.raises(fastagg.InputError, match=f"node {NODES[1]}"):
            FastAgg().aggregate_evaluate(1, replies(NODES[:3], given))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_metrics_that_are_not_finite_are_left_out_of_averages(bad, caplog):
    g, sds = every_method.cohort(3)
    told = [
        {"loss": 1.0, "acc": 0.5, "per": [1.0, 2.0]}, {"loss": bad, "acc": 0.7, "per": [1.0, bad]},
        {"loss": 2.0, "acc": 0.9, "per": [3.0, 4.0]},
    ]  # fmt: skip
    contents = [content(sd, n, **metrics) for sd, n, metrics in zip(sds, (2, 6, 2), told, strict=True)]
    for on_bad_client in ("raise", "drop"):
        strategy = started(FastAgg(on_bad_client=on_bad_client), g, NODES[:3])
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fastagg"):
            _, metrics = strategy.aggregate_train(1, replies(NODES[:3], contents))
        assert f"node {NODES[1]}: loss = {bad}" in caplog.text
        assert len(metrics["fastagg-clients"]) == 3  # its model counts
        for averages in (metrics, strategy.aggregate_evaluate(1, replies(NODES[:3], contents))):
            assert averages["loss"] == pytest.approx(1.5)
            assert averages["acc"] == pytest.approx(0.7)
            assert averages["per"] == pytest.approx([2.0, 3.0])
    nobody = [content(sd, 2, loss=bad) for sd in sds]
    assert "loss" not in started(FastAgg(), g, NODES[:3]).aggregate_train(1, replies(NODES[:3], nobody))[1]


def test_a_function_of_the_user_gets_replies_with_finite_metrics():
    seen = []

    def average(contents, key):
        seen.append([content["metrics"] for content in contents])
        return MetricRecord({"n": sum(m[key] for m in seen[-1])})

    strategy = FastAgg(evaluate_metrics_aggr_fn=average)
    given = [RecordDict({"metrics": MetricRecord({"num-examples": n, "loss": loss, "acc": 0.5})})
             for n, loss in ((1, 1.0), (2, float("nan")), (4, 2.0))]  # fmt: skip
    assert strategy.aggregate_evaluate(1, replies(NODES[:3], given))["n"] == 5
    assert seen == [[given[0]["metrics"], given[2]["metrics"]]]
    assert strategy.aggregate_evaluate(1, replies(NODES[:1], given[1:2])) is None


def test_a_client_cannot_choose_its_logits():
    g, sds = every_method.cohort(3)
    plain, with_logits = (
        started(FastAgg("fedawa"), g, NODES[:3]).aggregate_train(
            1, replies(NODES[:3], [content(sd, **m) for sd in sds])
        )
        for m in ({}, {"logits": 50.0})
    )
    assert plain[0] == with_logits[0]


def test_booleans_are_zero_or_one():
    good, bad = ({"mask": torch.tensor([n, 0], dtype=torch.uint8).view(torch.bool)} for n in (1, 7))
    assert check_booleans(good) is good
    contents = [content(good), content(bad), content(good)]
    with pytest.raises(fastagg.InputError, match=rf"\(id {NODES[1]}\): key 'mask' has booleans that are neither"):
        started(FastAgg(), good, NODES[:3]).aggregate_train(1, replies(NODES[:3], contents))
    _, metrics = started(FastAgg(on_bad_client="drop"), good, NODES[:3]).aggregate_train(
        1, replies(NODES[:3], contents)
    )
    assert metrics["fastagg-dropped"] == [NODES[1]]
