"""MoNNA against distances of flattened models."""

import pytest
import torch

import fastagg
from fastagg.methods.monna import MoNNA
from helpers import robust


def nearest(w, pivot, m):
    return sorted(range(len(w)), key=lambda k: -1.0 if k == pivot else float((w[k] - w[pivot]).norm()))[:m]


def equal_weights(chosen, K):
    return torch.tensor([(k in chosen) / len(chosen) for k in range(K)], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "f"), [(3, 1), (6, 0), (6, 2), (11, 5)])
def test_every_client_as_the_pivot(K, f, dtype):
    g, clients = robust.cohort(K, dtype)
    w = robust.rows(clients)
    for pivot in range(K):
        result = fastagg.monna(g, clients, f=f, pivot=pivot)
        weights = equal_weights(nearest(w, pivot, K - f), K)
        torch.testing.assert_close(result.weights, weights, rtol=1e-15, atol=0)
        assert result.pivot == pivot
        robust.assert_mixed(result, g, clients, weights)


@pytest.mark.parametrize("seed", range(5))
def test_the_default_pivot_has_the_smallest_ball_with_k_minus_f_clients(seed):
    g, clients = robust.cohort(9, seed=seed)
    w = robust.rows(clients)
    radius = [float((w[k] - w[nearest(w, k, 6)[-1]]).norm()) for k in range(9)]
    result = fastagg.monna(g, clients, f=3)
    assert result.pivot == radius.index(min(radius))
    torch.testing.assert_close(result.weights, fastagg.monna(g, clients, f=3, pivot=result.pivot).weights)


def test_on_a_line():
    """The pivot is first even if others are the same; of clients at the same distance the first is taken"""
    g, clients = robust.on_a_line(0, 0, 0, 1, -1)
    assert fastagg.monna(g, clients, f=2, pivot=3).weights.tolist() == [1 / 3, 1 / 3, 0, 1 / 3, 0]
    assert fastagg.monna(g, clients, f=1, pivot=2).weights.tolist() == [0.25, 0.25, 0.25, 0.25, 0]
    assert fastagg.monna(g, clients, f=1).pivot == 0


@pytest.mark.parametrize("magnitude", [1e2, 1e20, 1e36])
def test_clients_far_away_are_left_out(magnitude):
    g, clients = robust.cohort(9, torch.float32)
    clients = robust.far_away(clients, 4, magnitude)
    for pivot in (None, 4, 8):
        assert fastagg.monna(g, clients, f=4, pivot=pivot).weights.tolist() == [0] * 4 + [0.2] * 5
    assert fastagg.monna(g, clients, f=4, pivot=0).weights[0] > 0  # nothing helps with a pivot that is bad


def test_degenerate_cohorts_and_order():
    robust.check_degenerate(fastagg.monna, f=2)
    robust.check_order(fastagg.monna, f=3)
    robust.check_order(fastagg.monna, f=3, pivot="client 4")


def test_a_pivot_that_is_not_there():
    g, clients = robust.cohort(5)
    ids = list("abcde")
    for pivot in ("f", 0):
        with pytest.raises(fastagg.InputError, match=f"monna: the pivot, client {pivot!r}, does not take part"):
            fastagg.monna(g, clients, client_ids=ids, pivot=pivot)
    clients[2]["fc.bias"] = clients[2]["fc.bias"] * float("nan")
    server = fastagg.aggregator("monna", pivot="c", on_bad_client="drop")
    with pytest.raises(fastagg.InputError, match="the pivot, client 'c', does not take part"):
        server.aggregate(g, clients, client_ids=ids)
    for pivot in (1.5, True, ["a"]):
        with pytest.raises(ValueError, match=r"monna: pivot=.* expected the id of a client"):
            MoNNA(pivot=pivot)


def test_bad_f():
    robust.check_f(fastagg.monna, MoNNA)
