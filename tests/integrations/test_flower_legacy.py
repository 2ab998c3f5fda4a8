"""The strategy of Flower's former API, on its own types."""

from __future__ import annotations

import copy
import json
import pickle
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flwr: make test-integrations")
from flwr.common import Code, EvaluateRes, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg

import fastagg
from fastagg._engine.examples import ExampleNet
from fastagg._engine.registry import SHARED, own_options, registry
from fastagg.integrations.flower import FastAggLegacy
from helpers import every_method

pytestmark = pytest.mark.integration
SIZES, OK = [10, 20, 5, 40, 7, 3, 15], Status(Code.OK, "")


class Proxy(ClientProxy):
    get_properties = get_parameters = fit = evaluate = reconnect = None


Proxy.__abstractmethods__ = frozenset()


def arrays(sd):
    return [np.asarray(value) for value in sd.values()]


def sent(sd):
    return ndarrays_to_parameters(arrays(sd))


def fits(sds, sizes=SIZES, metrics=None):
    return [
        (Proxy(f"client-{k}"), FitRes(OK, sent(sd), n, metrics[k] if metrics else {}))
        for k, (sd, n) in enumerate(zip(sds, sizes, strict=False))
    ]


def manager(K):
    clients = SimpleClientManager()
    for k in range(K):
        clients.register(Proxy(f"client-{k}"))
    return clients


def started(strategy, g, K):
    strategy.configure_fit(1, sent(g), manager(K))
    return strategy


def same(parameters, sd):
    for mine, (key, value) in zip(parameters_to_ndarrays(parameters), sd.items(), strict=True):
        assert np.array_equal(mine, np.asarray(value)), key
        assert mine.dtype == np.asarray(value).dtype


@pytest.mark.parametrize("name", sorted(registry()))
def test_every_method_gives_what_it_gives_without_flower(name):
    g, sds = every_method.cohort()
    ids = [f"client-{k}" for k in range(len(sds))]
    expected = every_method.run(name, g, sds, SIZES, ids=ids)
    inputs, ours = every_method.round_inputs(name), every_method.from_the_server(name)
    told = [
        {key: json.dumps(np.asarray(value)[k].tolist()) for key, value in inputs.items() if key not in ours}
        for k in range(len(sds))
    ]
    strategy = FastAggLegacy(name, keys=ExampleNet(), round_inputs=ours, **every_method.OPTIONS[name])
    order = list(ExampleNet().state_dict())
    g, sds = {key: g[key] for key in order}, [{key: sd[key] for key in order} for sd in sds]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parameters, metrics = started(strategy, g, 7).aggregate_fit(1, fits(sds, metrics=told), [])
    assert json.loads(metrics["fastagg-clients"]) == ids
    if registry()[name].produces == "global":
        same(parameters, {key: expected[key] for key in order})
    else:
        mean = fastagg.fedavg(g, sds, SIZES, client_ids=ids)
        same(parameters, mean)
        asked = {c.cid: ins.parameters for c, ins in strategy.configure_fit(2, parameters, manager(7))}
        if registry()[name].produces == "personalised":
            for cid, model in zip(ids, expected, strict=True):
                same(asked[cid], {key: model[key] for key in order})


def test_no_method_has_an_option_that_flower_has():
    theirs = set(FedAvg.__init__.__annotations__)
    assert not any(theirs & {*own_options(cls), *SHARED} for cls in registry().values())


def test_parameters_are_read_where_they_are():
    g, _ = every_method.cohort(1)
    parameters = sent(g)
    strategy = FastAggLegacy()
    strategy.configure_fit(1, parameters, manager(2))
    for data, tensor in zip(parameters.tensors, strategy._server.center.values(), strict=True):
        assert np.shares_memory(np.frombuffer(data, np.uint8), tensor.numpy())


def test_without_keys_arrays_have_numbers_for_names():
    g, sds = every_method.cohort(3)
    strategy = started(FastAggLegacy("fedawa", layerwise=True), g, 3)
    strategy.aggregate_fit(1, fits(sds), [])
    assert list(strategy.result) == [str(i) for i in range(len(g))]
    assert strategy.result.layers == ("",)


def test_bad_replies_are_named_or_left_out(caplog):
    g, sds = every_method.cohort(3)
    nan = {**sds[1], "fc.bias": sds[1]["fc.bias"] * float("nan")}
    cut, few, other = (FitRes(OK, sent(sds[1]), 20, {}) for _ in range(3))
    cut.parameters.tensors[0] = cut.parameters.tensors[0][:-3]
    few.parameters.tensors.pop()
    other.parameters = Parameters(other.parameters.tensors, "torch")
    bad = {
        "fc.bias": FitRes(OK, sent(nan), 20, {}), "conv.weight": cut, "7 arrays came": few, "'torch'": other,
        "num_examples is -4": FitRes(OK, sent(sds[1]), -4, {}),
    }  # fmt: skip
    names = list(g)
    for word, reply in bad.items():
        given = fits(sds)
        given[1] = (given[1][0], reply)
        with pytest.raises(fastagg.InputError, match="client-1") as caught:
            started(FastAggLegacy("fedawa", keys=names), g, 3).aggregate_fit(1, given, [])
        assert word in str(caught.value)
        strategy = started(FastAggLegacy("fedawa", keys=names, on_bad_client="drop"), g, 3)
        parameters, metrics = strategy.aggregate_fit(1, given, [])
        [(dropped, reason)] = json.loads(metrics["fastagg-dropped"]).items()
        assert dropped == "client-1"
        assert word in reason
        assert word in caplog.text
        expected = fastagg.fedawa(g, [sds[0], sds[2]], [10, 5], client_ids=["client-0", "client-2"])
        same(parameters, expected)


def test_what_clients_say_of_themselves_is_checked():
    g, sds = every_method.cohort(3)
    for bad in ("[1, 2", "[[1]]", "{}", "[NaN]", "1" * 400, float("nan"), b"1", "0", "true", "null", "[" * 100_000):
        told = [{"local_steps": 3}, {"local_steps": bad}, {"local_steps": 4}]
        strategy = started(FastAggLegacy("fednova", on_bad_client="drop"), g, 3)
        parameters, metrics = strategy.aggregate_fit(1, fits(sds, metrics=told), [])
        assert list(json.loads(metrics["fastagg-dropped"])) == ["client-1"]
        rest = started(FastAggLegacy("fednova"), g, 3).aggregate_fit(1, fits(sds, metrics=told)[::2], [])
        assert parameters == rest[0]
        with pytest.raises(fastagg.InputError, match="client-1"):
            started(FastAggLegacy("fednova"), g, 3).aggregate_fit(1, fits(sds, metrics=told), [])


def test_a_strategy_can_be_copied_and_pickled():
    g, sds = every_method.cohort(3)
    given = fits(sds)
    strategy = started(FastAggLegacy("fedawa", keys=g), g, 3)
    strategy.aggregate_fit(1, given, [])
    others = [copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))]
    expected = strategy.aggregate_fit(2, given, [])
    assert all(other.aggregate_fit(2, given, []) == expected for other in others)


def test_rounds_that_leave_nothing():
    g, sds = every_method.cohort(2)
    nan = {key: value * float("nan") if value.is_floating_point() else value for key, value in sds[0].items()}
    strategy = started(FastAggLegacy(on_bad_client="drop"), g, 2)
    parameters, metrics = strategy.aggregate_fit(1, fits([nan, nan]), [])
    assert parameters is None
    reasons = json.loads(metrics["fastagg-dropped"])
    assert list(reasons) == ["client-0", "client-1"]
    assert all("not finite" in reason for reason in reasons.values())
    assert strategy.aggregate_fit(1, [], []) == (None, {})
    assert FastAggLegacy(accept_failures=False).aggregate_fit(1, fits(sds), [ValueError()]) == (None, {})


def test_metrics():
    g, sds = every_method.cohort(2)
    average = lambda given: {"loss": sum(n * m["loss"] for n, m in given) / sum(n for n, _ in given)}  # noqa: E731
    strategy = FastAggLegacy("fedawa", fit_metrics_aggregation_fn=average, evaluate_metrics_aggregation_fn=average)
    _, metrics = started(strategy, g, 2).aggregate_fit(1, fits(sds, [1, 3], [{"loss": 1.0}, {"loss": 2.0}]), [])
    assert metrics["loss"] == 1.75
    assert isinstance(metrics["fastagg-coherence"], float)
    assert sum(json.loads(metrics["fastagg-weights"])) == pytest.approx(1)
    given = [(Proxy(str(n)), EvaluateRes(OK, float(n), n, {"loss": float(n)})) for n in (1, 3)]
    assert strategy.aggregate_evaluate(1, given, []) == (2.5, {"loss": 2.5})
    empty = [(Proxy("0"), EvaluateRes(OK, 1.0, 0, {}))]
    assert strategy.aggregate_evaluate(1, empty, []) == (None, {})
    numbered = [{str(i): value for i, value in enumerate(sd.values())} for sd in (g, *sds)]  # as no keys were given
    assert torch.equal(strategy.result.weights, fastagg.fedawa(numbered[0], numbered[1:], [1, 3]).weights)
    given = [(Proxy(str(n)), EvaluateRes(OK, float(n), n, {"loss": float(n)})) for n in (1, 3, 2)]
    for bad in (float("nan"), float("inf")):
        given[2][1].loss = bad
        assert strategy.aggregate_evaluate(1, given, []) == (2.5, {"loss": 2.5})
        told = [{"loss": 1.0}, {"loss": bad}]
        assert started(strategy, g, 2).aggregate_fit(1, fits(sds, [1, 3], told), [])[1]["loss"] == 1.0
    assert strategy.aggregate_evaluate(1, given[2:], []) == (None, {})
