"""What every method promises, checked on every method there is."""

from __future__ import annotations

import copy
import inspect
import pydoc
import re
import textwrap

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine.registry import registry
from helpers.cohort import assert_same_bits, assert_unchanged, snapshot
from helpers.every_method import (
    METHODS,
    NEEDS_MANY,
    OPTIONS,
    ROBUST,
    TRAINERS,
    K,
    cohort,
    models,
    round_inputs,
    run,
    some_of,
)


@pytest.mark.parametrize("name", METHODS)
def test_a_round(name):
    g, clients = cohort()
    before = snapshot(g, *clients)
    result = run(name, g, clients, sizes=range(1, K + 1))
    assert_unchanged([g, *clients], before)
    for sd in models(result):
        assert isinstance(sd, fastagg.Result)
        assert list(sd) == list(g)
        for key, value in sd.items():
            assert value.dtype == g[key].dtype
            assert value.shape == g[key].shape
            assert torch.isfinite(value).all()
            assert not value.requires_grad
        assert (sd["bn.running_var"] > 0).all(), "a running variance must stay positive"
        assert sd.weights.shape[-1] == K
        counters = torch.stack([client["bn.num_batches_tracked"] for client in clients])
        assert sd["bn.num_batches_tracked"] == (counters.median() if name in ROBUST else counters.max())
    gives = registry()[name].produces
    assert isinstance(result, list) == (gives != "global")
    if gives == "personalised":
        assert len(result) == K
    if gives != "global":
        assert result.mixing.shape[-2:] == (len(result), K)


@pytest.mark.parametrize("name", METHODS)
def test_clients_in_another_order_give_the_same_bits(name):
    g, clients = cohort()
    sizes = torch.arange(1.0, K + 1)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    moved = some_of(name, round_inputs(name), order.tolist())
    there = run(name, g, clients, sizes, ids=list("abcdefg"))
    back = run(name, g, [clients[k] for k in order], sizes[order], ids=["abcdefg"[k] for k in order], inputs=moved)
    gives = registry()[name].produces
    if gives == "global":
        assert torch.equal(back.weights, there.weights[..., order])
        assert_same_bits(back, there)
    else:
        rows = there.mixing[..., order, :] if gives == "personalised" else there.mixing
        assert torch.equal(back.mixing, rows[..., order])
        for m, model in enumerate(back):
            assert_same_bits(model, there[order[m]] if gives == "personalised" else there[m])
    if gives == "clusters":
        assert back.clusters == there.clusters
    if there.gram is not None:
        rows = torch.cat([torch.tensor([0]), order + 1])
        assert torch.equal(back.gram.matrix, there.gram.matrix[..., rows, :][..., rows])
    for extra in ("logits", "angles", "discrepancy"):
        if getattr(there, extra, None) is not None:
            assert torch.equal(getattr(back, extra), getattr(there, extra)[..., order])
    if hasattr(there, "class_dist"):
        assert torch.equal(back.class_dist, there.class_dist[order])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("case", ["one client", "identical", "all zero", "one zero", "huge", "tiny", "opposed"])
def test_degenerate_cohorts_give_no_nan(name, case):
    clients_wanted = 1 if case == "one client" and name not in NEEDS_MANY else K
    g, clients = cohort(clients_wanted)
    floats = [key for key in g if g[key].is_floating_point()]
    if case == "identical":
        clients = [copy.deepcopy(clients[2]) for _ in range(K)]
    elif case == "all zero":
        clients = [copy.deepcopy(g) for _ in range(K)]
    elif case == "one zero":
        clients[3] = copy.deepcopy(g)
    elif case in ("huge", "tiny"):
        scale = 1e6 if case == "huge" else 1e-20
        g = {key: g[key] * 0 if key in floats and "running" not in key else g[key] for key in g}
        for sd in clients:
            for key in floats:
                if "running" not in key:
                    sd[key] = sd[key] * scale
    elif case == "opposed":
        for k, sd in enumerate(clients):
            for key in floats:
                if "running" not in key:
                    sd[key] = g[key] + (1 if k % 2 else -1) * (clients[0][key] - g[key]) * (1 + 0.1 * k)
    result = run(name, g, clients)
    for sd in models(result):
        assert torch.isfinite(sd.weights).all()
        for key in floats:
            assert torch.isfinite(sd[key]).all(), key


@pytest.mark.parametrize("name", METHODS)
def test_a_server_resumes_where_it_stopped(name):
    ids = [f"c{k}" for k in range(K)]
    rounds = [cohort(seed=seed) for seed in range(3)]
    steady, stopped = (fastagg.aggregator(name, **OPTIONS[name]) for _ in range(2))
    for g, clients in rounds[:2]:
        run(name, g, clients, ids=ids, server=steady)
        run(name, g, clients, ids=ids, server=stopped)
    resumed = fastagg.aggregator(name, **OPTIONS[name])
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    g, clients = rounds[2]
    expected, got = (run(name, g, clients, ids=ids, server=server) for server in (steady, resumed))
    for a, b in zip(models(expected), models(got), strict=True):
        assert_same_bits(a, b)
    with pytest.raises(fastagg.InputError):
        resumed.load_state_dict({**stopped.state_dict(), "method": "another"})
    with pytest.raises(fastagg.InputError):
        resumed.load_state_dict({})


@pytest.mark.parametrize("name", METHODS)
def test_a_bad_round_changes_nothing(name):
    g, clients = cohort()
    server = fastagg.aggregator(name, **OPTIONS[name])
    run(name, g, clients, server=server)
    state = repr(server.state_dict())
    bad = copy.deepcopy(clients)
    bad[4]["fc.weight"] = torch.ones(4, 1)
    with pytest.raises(fastagg.InputError, match=r"client 4: key 'fc.weight' has shape \(4, 1\)"):
        run(name, g, bad, server=server)
    with pytest.raises(fastagg.InputError, match="sizes"):
        run(name, g, clients, sizes=[1.0], server=server)
    assert repr(server.state_dict()) == state


@pytest.mark.parametrize("name", METHODS)
def test_out_and_numpy(name):
    g, clients = cohort()
    fresh = run(name, g, clients)
    outs = [{key: torch.full_like(v, 77) for key, v in g.items()} for _ in models(fresh)]
    again = run(name, g, clients, out=outs if isinstance(fresh, list) else outs[0])
    for a, b, out in zip(models(fresh), models(again), outs, strict=True):
        assert_same_bits(a, b)
        assert all(b[key] is out[key] for key in g)
    if name in TRAINERS:
        return  # trains a torch model
    arrays = [{key: value.numpy() for key, value in sd.items()} for sd in (g, *clients)]
    for a, b in zip(models(fresh), models(run(name, arrays[0], arrays[1:])), strict=True):
        for key in g:
            assert isinstance(b[key], np.ndarray)
            np.testing.assert_array_equal(a[key].numpy(), b[key])


def test_the_list():
    listed = {m.name: m for m in fastagg.list_methods()}
    assert listed.keys() == registry().keys()
    for m in listed.values():
        assert m.description.endswith(".")
        assert m.paper
        assert m.produces in ("global", "personalised", "clusters")
        assert m.name in str(m)
        assert callable(getattr(fastagg, m.name))
        assert m.help == getattr(fastagg, m.name).__doc__


@pytest.mark.parametrize("name", METHODS)
def test_help_explains_every_argument(name):
    function = getattr(fastagg, name)
    words = function.__doc__
    for argument in inspect.signature(function).parameters:
        found = re.search(rf"^(\w+, )*{argument}(, \w+)*   *\S", words, re.MULTILINE)
        assert found, f"{name}: {argument} is not explained"
    assert "Returns " in words
    assert max(map(len, words.splitlines())) <= 120
    assert "client_ids" in pydoc.render_doc(function)


def test_help_of_the_package_is_a_page():
    words = fastagg.__doc__
    assert 30 <= len(words.splitlines()) <= 60
    for name in re.findall(r"fastagg\.(\w+)\(", words):
        assert name in fastagg.__all__
    example = words[words.index("gram = fastagg.gram") : words.index("Other names")]
    g, clients = cohort()
    code = textwrap.dedent("    " + example)
    exec(code, {"fastagg": fastagg, "global_sd": g, "client_sds": clients, "weights": [1 / K] * K})


def test_unknown_names_suggest_the_nearest():
    g, clients = cohort()
    with pytest.raises(ValueError, match="no method 'simprx'; did you mean 'simprox'"):
        fastagg.aggregator("simprx")
    with pytest.raises(TypeError, match="no option 'lamb'; did you mean 'lam'"):
        fastagg.aggregator("simprox", lamb=0.3)
    with pytest.raises(TypeError, match="no option 'lengts'; did you mean 'lengths'"):
        fastagg.simprox(g, clients, lengts=[1] * K)
    with pytest.raises(TypeError, match="takes no 'lengts'; did you mean 'lengths'"):
        fastagg.aggregator("simprox").aggregate(g, clients, lengts=[1] * K)
