"""FedAMP against its equations on flattened models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg import fedamp
from fastagg.methods.fedamp import FedAMP
from helpers.cohort import assert_unchanged, flat, make, snapshot

SHAPES = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (3, 7)}
quick = settings(deadline=None, max_examples=25, derandomize=True)


def naive(clients, alpha, sigma):
    """xi and the personalised models, one pair of clients at a time"""
    w = [flat(sd) for sd in clients]
    K = len(w)
    square = [[float(((w[i] - w[j]) ** 2).sum()) for j in range(K)] for i in range(K)]
    if sigma is None:
        sigma = sum(square[i][j] for i in range(K) for j in range(K) if i != j) / (K * (K - 1))
    if alpha is None:
        alpha = sigma / K
    xi = torch.zeros(K, K, dtype=torch.float64)
    for i in range(K):
        for j in range(K):
            if i != j:
                xi[i, j] = alpha * math.exp(-square[i][j] / sigma) / sigma
        rest = float(xi[i].sum())
        if rest > 1:
            xi[i] /= rest
        xi[i, i] = 1 - xi[i].sum()
    return xi, [sum(xi[i, j] * w[j] for j in range(K)) for i in range(K)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("alpha", "sigma"), [(None, None), (0.3, 2.0), (50.0, 2.0), (None, 1.5), (0.5, None)])
def test_the_equations(dtype, tolerance, alpha, sigma):
    g, clients = make(6, SHAPES, dtype, scale=0.1)
    before = snapshot(g, *clients)
    results = fedamp(g, clients, alpha=alpha, sigma=sigma)
    xi, models = naive(clients, alpha, sigma)
    assert xi.diagonal().min() < 0.9  # the clients do mix
    torch.testing.assert_close(results.mixing, xi, rtol=tolerance, atol=tolerance)
    assert len(results) == 6
    for i, model in enumerate(models):
        torch.testing.assert_close(flat(results[i]), model, rtol=tolerance, atol=tolerance)
        assert torch.equal(results[i].weights, results.mixing[i])
    assert results.gram.K == 6
    assert_unchanged([g, *clients], before)


@pytest.mark.parametrize("magnitude", [0.0, 1e6, 1e12, 1e20, 1e36])
@pytest.mark.parametrize("apart", [1.0, 1e-4])
def test_distances_keep_their_digits(apart, magnitude):
    """Where clients agree with each other far better than with g, and where one is far away"""
    g, clients = make(6, {"w": (300,)}, scale=1.0)
    clients = [{"w": 2 * g["w"] + 1 + apart * sd["w"]} for sd in clients]
    clients[1]["w"][:5] += magnitude
    for sigma in (None, 300 * apart**2):
        xi, _ = naive(clients, None, sigma)
        torch.testing.assert_close(fedamp(g, clients, sigma=sigma).mixing, xi, rtol=2e-5, atol=1e-9)


def test_attention_beyond_everything_is_scaled_down():
    g, clients = make(5, SHAPES, torch.float64, scale=0.1)
    xi = fedamp(g, clients, alpha=1e9, sigma=2.0).mixing
    torch.testing.assert_close(xi.diagonal(), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(xi.sum(1), torch.ones(5, dtype=torch.float64))
    free = fedamp(g, clients, alpha=0.4, sigma=2.0).mixing  # sums to under 1: left alone
    ratio = (xi / free)[0, 1:]
    torch.testing.assert_close(ratio, ratio[:1].expand(4))


@quick
@given(K=st.integers(1, 7), seed=st.integers(0, 999), scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e6]),
       alpha=st.sampled_from([None, 0.1, 1e4]), sigma=st.sampled_from([None, 1.0, 1e-300]))  # fmt: skip
def test_convex_and_permuted_with_the_clients(K, seed, scale, alpha, sigma):
    g, clients = make(K, {"w": (40,)}, torch.float64, scale=scale, seed=seed)
    xi = fedamp(g, clients, alpha=alpha, sigma=sigma).mixing
    assert (xi >= 0).all()
    torch.testing.assert_close(xi.sum(1), torch.ones(K, dtype=torch.float64))
    order = np.random.default_rng(seed).permutation(K)
    shuffled = fedamp(g, [clients[k] for k in order], alpha=alpha, sigma=sigma).mixing
    torch.testing.assert_close(shuffled, xi[order][:, order], rtol=1e-9, atol=1e-12)


@quick
@given(seed=st.integers(0, 999), factor=st.floats(1e-3, 1e3))
def test_defaults_do_not_depend_on_the_scale_of_models(seed, factor):
    g, clients = make(4, {"w": (40,)}, torch.float64, scale=0.1, seed=seed)
    larger = [{"w": factor * sd["w"]} for sd in (g, *clients)]
    torch.testing.assert_close(fedamp(larger[0], larger[1:]).mixing, fedamp(g, clients).mixing, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"alpha": 3.0}, {"sigma": 1e-3}, {"alpha": 5.0, "sigma": 7.0}], ids=str)
def test_cohorts_that_degenerate(options):
    g, clients = make(4, SHAPES)
    same = [{key: value.clone() for key, value in clients[0].items()} for _ in range(4)]
    for result in fedamp(g, same, **options):
        torch.testing.assert_close(flat(result), flat(clients[0]), rtol=1e-6, atol=1e-6)
    assert fedamp(g, clients[:1], **options).mixing.tolist() == [[1.0]]
    still = fedamp(g, [g] * 3, **options)  # no client moved
    torch.testing.assert_close(flat(still[1]), flat(g), rtol=1e-6, atol=1e-6)
    far = [{key: value + 1e6 * k for key, value in sd.items()} for k, sd in enumerate([g, g, *clients])]
    xi = fedamp(g, far, **options).mixing
    assert torch.isfinite(xi).all()
    torch.testing.assert_close(xi.sum(1), torch.ones(6, dtype=torch.float64))


def test_identical_clients_are_averaged_evenly_by_default():
    g, clients = make(1, SHAPES)
    xi = fedamp(g, clients * 5).mixing
    torch.testing.assert_close(xi, torch.full((5, 5), 0.2, dtype=torch.float64))


def test_far_clients_keep_to_themselves():
    g, clients = make(4, {"w": (20,)}, torch.float64, scale=1e-3)
    for sd in clients[2:]:
        sd["w"] += 100
    xi = fedamp(g, clients, sigma=1.0, alpha=0.3).mixing
    assert (xi[:2, 2:] == 0).all()
    assert (xi[2:, :2] == 0).all()
    assert xi[0, 1] > 0.29


def test_buffers_out_and_round_trip():
    g, clients = make(3, {"bn.weight": (4,), "bn.running_var": (4,)})
    for k, sd in enumerate(clients):
        sd["bn.running_var"] = torch.full((4,), float(k + 1))
        sd["bn.num_batches_tracked"] = torch.tensor(k)
    g["bn.num_batches_tracked"] = torch.tensor(0)
    server = FedAMP(alpha=1e9)
    first = server.aggregate(g, clients, [1, 2, 3], client_ids=["x", "y", "z"])
    assert first[0]["bn.running_var"].min() >= 1
    assert first[0]["bn.num_batches_tracked"] == 2
    again = server.aggregate(g, clients, out=first)
    for a, b in zip(first, again, strict=True):
        assert all(a[key] is b[key] for key in a)
    with pytest.raises(fastagg.InputError, match="2 state dicts given, 3 needed"):
        fedamp(g, clients, out=first[:2])
    server.load_state_dict(server.state_dict())


@pytest.mark.parametrize("option", ["alpha", "sigma"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "much", True], ids=str)
def test_bad_options(option, value):
    with pytest.raises(ValueError, match=f"fedamp: {option}="):
        FedAMP(**{option: value})


def test_models_that_are_not_finite_are_named():
    g, clients = make(3, SHAPES)
    clients[1]["a.bias"][2] = float("nan")
    with pytest.raises(fastagg.InputError, match=r"client 1: key 'a.bias'"):
        fedamp(g, clients)
