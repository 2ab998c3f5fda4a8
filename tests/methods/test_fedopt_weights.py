"""A server optimiser on the weights of another method: its step starts from that method's aggregate."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import fastagg
from helpers.cohort import assert_same_bits
from helpers.every_method import K, cohort, round_inputs, run
from helpers.model_files import write_round

INNER = [
    "fedavg", "fedawa", {"method": "fedawa", "layerwise": True}, {"method": "fedawa", "variant": "released"}, "ldawa",
    "krum", "geometric_median", "centred_clipping", "fednova", "simagg", "fedadp",
]  # fmt: skip
IDS = [f"c{k}" for k in range(K)]


def name_of(inner):
    return inner if isinstance(inner, str) else inner["method"]


def alone(inner):
    return fastagg.aggregator(inner) if isinstance(inner, str) else fastagg.aggregator(
        inner["method"], **{key: value for key, value in inner.items() if key != "method"}
    )  # fmt: skip


def double(sd):
    return {key: value.double() if value.is_floating_point() else value for key, value in sd.items()}


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_adams_step_from_the_methods_aggregate(inner):
    """FedAdam's equations on delta = aggregate - g, over two rounds"""
    server, method = fastagg.aggregator("fedadam", weights=inner, lr=0.1), alone(inner)
    moments = None
    for seed in range(2):
        g, *clients = (double(sd) for sd in (cohort(seed=seed)[0], *cohort(seed=seed)[1]))
        inputs = round_inputs(name_of(inner))
        sizes = range(1, K + 1)
        aggregate = method.aggregate(g, clients, sizes, IDS, **inputs)
        result = server.aggregate(g, clients, sizes, IDS, **inputs)
        assert torch.equal(result.weights, aggregate.weights)
        moments = moments or {key: (0.0, torch.full_like(g[key], 1e-6)) for key in g if g[key].is_floating_point()}
        for key in g:
            if "running" in key or key.endswith("tracked"):
                torch.testing.assert_close(result[key], aggregate[key], rtol=1e-12, atol=1e-12)
                continue
            m, v = moments[key]
            delta = aggregate[key] - g[key]
            m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
            moments[key] = m, v
            torch.testing.assert_close(result[key], g[key] + 0.1 * m / (v.sqrt() + 1e-3), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inner", INNER, ids=str)
def test_a_whole_step_without_momentum_is_the_method(inner, dtype):
    g, clients = cohort()
    g, *clients = ({k: v.to(dtype) if v.is_floating_point() else v for k, v in sd.items()} for sd in (g, *clients))
    inputs = round_inputs(name_of(inner))
    expected = alone(inner).aggregate(g, clients, None, IDS, **inputs)
    result = fastagg.aggregator("fedavgm", weights=inner, lr=1.0, momentum=0.0).aggregate(
        g, clients, None, IDS, **inputs
    )
    assert_same_bits(result, expected)


def test_both_states_are_saved_and_resumed(tmp_path):
    inner = {"method": "fedawa", "variant": "released", "lr": 0.5}
    steady, stopped = (fastagg.aggregator("fedadam", weights=inner) for _ in range(2))
    for seed in range(2):
        for server in (steady, stopped):
            result = run("fedadam", *cohort(seed=seed), ids=IDS, server=server)
    assert result.weights.std() > 1e-3  # the logits were carried
    stopped.save(tmp_path / "state")
    resumed = fastagg.aggregator("fedadam", weights=inner)
    resumed.load(tmp_path / "state")
    a, b = (run("fedadam", *cohort(seed=2), ids=IDS, server=server) for server in (steady, resumed))
    assert_same_bits(a, b)
    assert torch.equal(a.weights, b.weights)
    assert a.logits.shape == (K,)
    with pytest.raises(fastagg.InputError, match="expected what state_dict"):
        fastagg.aggregator("fedadam", weights=inner).load_state_dict(fastagg.aggregator("fedadam").state_dict())
    with pytest.raises(fastagg.InputError, match="remembers clients by their ids"):
        run("fedadam", *cohort(clients=5), server=resumed)


def test_the_methods_own_object_is_not_changed():
    method = fastagg.aggregator("fedadp")
    server = fastagg.aggregator("fedyogi", weights=method)
    before = copy.deepcopy(method.state_dict())
    run("fedyogi", *cohort(), ids=IDS, server=server)
    assert repr(method.state_dict()) == repr(before)
    assert server.state_dict()["weights"]["client_ids"] == IDS


def test_a_bad_client_and_a_failed_round():
    g, clients = cohort()
    clients[3]["fc.weight"][0, 0] = math.nan
    server = fastagg.aggregator("fedadam", weights="fedadp", on_bad_client="drop")
    result = server.aggregate(g, clients, None, IDS)
    assert list(result.dropped) == ["c3"]
    assert result.angles[3].isnan()
    state = repr(server.state_dict())
    with pytest.raises(fastagg.InputError, match="sizes"):
        server.aggregate(g, clients, [1.0], IDS)
    assert repr(server.state_dict()) == state


def test_on_files_and_as_a_function(tmp_path):
    g, clients = cohort()
    center, paths = write_round(tmp_path / "in", g, clients)
    expected = fastagg.fedadam(g, clients, weights="fednova", local_steps=list(range(1, K + 1)))
    found = fastagg.aggregate_files(
        "fedadam", center, paths, tmp_path / "out.safetensors", weights="fednova", local_steps=list(range(1, K + 1))
    )
    assert torch.equal(found.weights, expected.weights)
    with pytest.raises(TypeError, match="no option 'local_step'; did you mean 'local_steps'"):
        fastagg.fedadam(g, clients, weights="fednova", local_step=[1] * K)


@pytest.mark.parametrize("inner", ["fedamp", "cfl", "cwfedavg", "fedadam", 3, {"lr": 1}], ids=str)
def test_methods_that_give_no_weights_are_refused(inner):
    with pytest.raises(ValueError, match="fedadam: weights="):
        fastagg.aggregator("fedadam", weights=inner)
    with pytest.raises(ValueError, match="no method 'fedawaa'"):
        fastagg.aggregator("fedadam", weights="fedawaa")


def test_a_method_that_remembers_its_own_model_is_refused():
    server = fastagg.aggregator("fedadam", weights={"method": "centred_clipping", "center": "previous"})
    with pytest.raises(fastagg.InputError, match="remembers its own model, and gives no weights"):
        run("fedadam", *cohort(), server=server)


def test_a_method_with_other_parameters_is_refused():
    """FedLAW takes the module's parameters; a float buffer would be added to itself"""
    module = torch.nn.Linear(24, 4)
    module.register_buffer("scale", torch.full((3,), 5.0))
    g = {key: value.detach().clone() for key, value in module.state_dict().items()}
    clients = [{key: value + 0.01 * k for key, value in g.items()} for k in range(3)]
    batches = [(torch.randn(8, 24), torch.randint(4, (8,)))]
    inner = {"method": "fedlaw", "model": module, "epochs": 1, "progress": False}
    with pytest.raises(fastagg.InputError, match="takes other tensors for parameters; pass params="):
        fastagg.aggregator("fedavgm", weights=inner).aggregate(g, clients, proxy=batches)
    result = fastagg.aggregator("fedavgm", weights=inner, params=module).aggregate(g, clients, proxy=batches)
    assert (result["scale"] - 5).abs().max() < 0.03


def test_options_that_would_be_ignored_are_refused():
    for options in ({"params": ["fc.weight"]}, {"layers": str}, {"on_bad_client": "drop"}):
        with pytest.raises(ValueError, match=f"fedadam: give {next(iter(options))} to fedadam itself"):
            fastagg.aggregator("fedadam", weights=fastagg.FedAWA(**options))
    with pytest.raises(ValueError, match="fedadam: it trains whole models"):
        fastagg.aggregator("fedadam", weights="fedlaw", group=True)
    state = fastagg.aggregator("fedadam", weights="fedadp").state_dict()
    with pytest.raises(fastagg.InputError, match="the state of a method that gives the weights"):
        fastagg.aggregator("fedadam").load_state_dict(state)


def test_what_the_method_says_of_a_failure():
    g, clients = cohort()
    steps = [1.0] * (K - 1) + [1e-200]
    with pytest.raises(fastagg.InputError, match="local steps, the median client"):
        fastagg.fedavgm(g, clients, weights="fednova", local_steps=steps)
