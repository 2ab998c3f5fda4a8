"""SimAgg against its equations, layer by layer, in loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg import simagg
from fastagg.methods.simagg import SimAgg
from helpers.cohort import assert_same_bits, assert_unchanged, clone, degenerate, make, snapshot

SHAPES = {
    "a.weight": (6, 5), "a.bias": (6,), "bn.weight": (6,), "bn.running_mean": (6,), "plain.running_var": (4,),
    "c.weight": (3, 6), "scale": (3,),
}  # fmt: skip
few = settings(deadline=None, max_examples=25, derandomize=True)


def is_buffer(key):
    return "running" in key


def module(key):
    return key.rpartition(".")[0]


def naive(clients, sizes, eps=1e-5, layer_of=module):
    """(state dict, weights by layer). sum_j ||w_j - mean|| = 0 is 0/0: all clients are alike then."""
    K = len(clients)
    v = [s / sum(sizes) for s in sizes]
    new, weights = {}, {}
    for layer in dict.fromkeys(map(layer_of, clients[0])):
        keys = [key for key in clients[0] if layer_of(key) == layer]
        used = [key for key in keys if not is_buffer(key)]
        rows = [np.concatenate([np.zeros(0), *(sd[k].double().reshape(-1).numpy() for k in used)]) for sd in clients]
        mean = sum(rows) / K
        distance = [float(np.linalg.norm(row - mean)) for row in rows]
        sim = [sum(distance) / (d + eps) for d in distance]
        u = [s / sum(sim) for s in sim] if sum(sim) > 0 else [1 / K] * K
        both = [x + y for x, y in zip(u, v, strict=True)]
        weights[layer] = [x / sum(both) for x in both]
        for key in keys:
            new[key] = sum(w * sd[key].double() for w, sd in zip(weights[layer], clients, strict=True))
    return new, weights


def assert_agrees(result, expected, rtol):
    new, weights = expected
    if result.layers is None:
        [only] = weights.values()
        torch.testing.assert_close(result.weights, torch.tensor(only, dtype=torch.float64), rtol=rtol, atol=0)
    else:
        assert result.layers == tuple(weights)
        rows = torch.tensor(list(weights.values()), dtype=torch.float64)
        torch.testing.assert_close(result.weights, rows, rtol=rtol, atol=0)
    for key, value in new.items():
        torch.testing.assert_close(result[key].double(), value, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@pytest.mark.parametrize("scale", [0.01, 1.0, 1e6])
@pytest.mark.parametrize(("layers", "layerwise"), [(None, True), (lambda key: key, True), (lambda key: "", False)])
def test_against_the_equations(dtype, rtol, scale, layers, layerwise):
    g, clients = make(5, SHAPES, dtype, scale=scale, seed=2)
    before = snapshot(g, *clients)
    sizes = [5, 1, 30, 12, 2]
    result = simagg(g, clients, sizes, layers=layers, layerwise=layerwise)
    assert_agrees(result, naive(clients, sizes, layer_of=layers or module), rtol)
    assert result.gram.layerwise is layerwise
    assert_unchanged([g, *clients], before)


@pytest.mark.parametrize("magnitude", [0.0, 1e6, 1e12, 1e20, 1e36])
@pytest.mark.parametrize("apart", [1.0, 1e-4])
def test_distances_keep_their_digits(apart, magnitude):
    """Where clients agree with each other far better than with g, and where one is far away"""
    g, clients = make(6, {"a.w": (300,), "b.w": (200,)}, scale=1.0)
    clients = [{key: 2 * g[key] + 1 + apart * sd[key] for key in g} for sd in clients]
    clients[1]["a.w"][:5] += magnitude
    _, weights = naive(clients, [1] * 6)
    found = simagg(g, clients)
    rows = torch.tensor(list(weights.values()), dtype=torch.float64)
    torch.testing.assert_close(found.weights, rows, rtol=2e-5, atol=0)


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.1, 10.0])
def test_eps(eps):
    g, clients = make(4, SHAPES, torch.float64, scale=0.1)
    assert_agrees(simagg(g, clients, eps=eps), naive(clients, [1] * 4, eps), 1e-9)


def test_defaults():
    g, clients = make(4, SHAPES, torch.float64, scale=1e-5)  # eps is of the size of a distance
    assert_agrees(simagg(g, clients), naive(clients, [1] * 4, 1e-5), 1e-9)
    assert SimAgg().layerwise is True


def test_an_outlier_counts_less():
    g, clients = make(5, SHAPES, torch.float64, scale=0.01)
    clients[3] = {key: value + 100 for key, value in clients[3].items()}
    w = simagg(g, clients, layerwise=False).weights
    assert w.argmin() == 3
    assert w[3] < 0.15  # half of it is its share of the data, 0.1


@pytest.mark.parametrize("scale", [1e-20, 0.3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("K", [2, 3, 7, 100])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_identical_clients(scale, dtype, K, backend):
    """Their distances are rounding, which with updates of 1e6 is far above eps"""
    fastagg.set_backend(backend)
    g, [client] = make(1, SHAPES, dtype, scale=scale)
    sizes = range(1, K + 1)
    result = simagg(g, [clone(client) for _ in range(K)], sizes)
    n = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    torch.testing.assert_close(result.weights, ((n + 1 / K) / 2).expand(5, K), rtol=1e-9, atol=0)
    for key, value in client.items():
        torch.testing.assert_close(result[key], value)


def test_clients_that_nearly_agree_are_told_apart():
    g, [far] = make(1, SHAPES, torch.float64, scale=100.0)
    _, small = make(4, SHAPES, torch.float64, scale=1.0)
    clients = [{key: far[key] + 1e-3 * k * sd[key] for key in g} for k, sd in enumerate(small, 1)]
    _, expected = naive(clients, [1] * 4)
    found = simagg(g, clients).weights
    torch.testing.assert_close(found, torch.tensor(list(expected.values()), dtype=torch.float64), rtol=1e-5, atol=0)
    assert found.max() - found.min() > 0.1


def test_one_client():
    g, clients = make(1, SHAPES)
    result = simagg(g, clients)
    assert (result.weights == 1).all()
    assert_same_bits(dict(result), clients[0])


@pytest.mark.parametrize(("g", "clients"), [pytest.param(*rest, id=name) for name, *rest in degenerate(SHAPES)])
def test_degenerate_cohorts(g, clients):
    for eps in (1e-300, 1e-5):
        for layerwise in (False, True):
            w = simagg(g, clients, eps=eps, layerwise=layerwise).weights
            assert torch.isfinite(w).all()
            assert (w >= 0).all()
            torch.testing.assert_close(w.sum(-1), torch.ones_like(w.sum(-1)))


def test_the_client_at_the_mean_gets_nearly_all_of_the_similarity():
    _, g, clients = next(case for case in degenerate(SHAPES) if case[0] == "one is the mean")
    w = simagg(g, clients, layerwise=False).weights
    torch.testing.assert_close(w, torch.tensor([1 / 6, 1 / 6, 4 / 6], dtype=torch.float64), rtol=1e-4, atol=0)


cohorts = {"K": st.integers(1, 7), "seed": st.integers(0, 10**6), "exponent": st.floats(-4, 3)}


@few
@given(**cohorts, random=st.randoms())
def test_permuting_clients_permutes_weights(K, seed, exponent, random):
    g, clients = make(K, SHAPES, torch.float64, scale=10**exponent, seed=seed)
    order = list(range(K))
    random.shuffle(order)
    w = simagg(g, clients, range(1, K + 1)).weights
    found = simagg(g, [clients[k] for k in order], [k + 1 for k in order]).weights
    torch.testing.assert_close(found, w[:, order], rtol=1e-7, atol=0)
    assert (w >= 0).all()
    torch.testing.assert_close(w.sum(-1), torch.ones(5, dtype=torch.float64), rtol=1e-12, atol=0)


@few
@given(**cohorts)
def test_where_the_global_model_is_does_not_matter(K, seed, exponent):
    g, clients = make(K, SHAPES, torch.float64, scale=10**exponent, seed=seed)
    moved = {key: value + 10**exponent for key, value in g.items()}
    torch.testing.assert_close(simagg(moved, clients).weights, simagg(g, clients).weights, rtol=1e-7, atol=1e-9)


@few
@given(**cohorts)
def test_a_client_keeps_half_of_its_data_share(K, seed, exponent):
    g, clients = make(K, SHAPES, torch.float64, scale=10**exponent, seed=seed)
    n = torch.arange(1, K + 1, dtype=torch.float64) / (K * (K + 1) / 2)
    assert (simagg(g, clients, range(1, K + 1)).weights >= n / 2).all()


def test_out_is_written():
    g, clients = make(3, SHAPES)
    first = simagg(g, clients)
    again = simagg(g, clients, [1, 2, 3], out=first)
    assert all(again[key] is first[key] for key in first)
    assert_same_bits(dict(again), dict(simagg(g, clients, [1, 2, 3])))


@pytest.mark.parametrize("option", [{"eps": 0}, {"eps": -1}, {"eps": math.nan}, {"eps": "x"}, {"layerwise": "no"}])
def test_bad_options(option):
    with pytest.raises(ValueError, match=f"simagg: {next(iter(option))}="):
        SimAgg(**option)
