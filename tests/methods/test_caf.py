"""CAF against its algorithm on flattened models, with covariance matrices of all parameters."""

import pytest
import torch

import fastagg
from fastagg.methods.caf import CAF
from helpers import robust


def caf(x, f):
    """The weights, sum 1, of the mean with the smallest largest eigenvalue; and in which iteration it was met"""
    n = len(x)
    c = torch.ones(n, dtype=torch.float64)
    least, best, met, t = float("inf"), None, 0, 0
    while c.sum() > n - 2 * f:
        mu = (c[:, None] * x).sum(0) / c.sum()
        sigma = sum(c[i] * torch.outer(x[i] - mu, x[i] - mu) for i in range(n)) / c.sum()
        values, vectors = torch.linalg.eigh(sigma)
        if values[-1] < least:
            least, best, met = values[-1], c / c.sum(), t
        tau = ((x - mu) @ vectors[:, -1]) ** 2
        highest = max(float(tau[i]) for i in range(n) if c[i] > 0)
        c = torch.stack([c[i] * max(1 - tau[i] / highest, torch.tensor(0.0)) if c[i] > 0 else c[i] for i in range(n)])
        c[(tau == highest)] = 0
        t += 1
    return best, met


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("K", "f", "moved"), [(3, 1, 0), (6, 1, 1), (9, 3, 2), (9, 4, 4), (12, 2, 2)])
def test_equals_the_algorithm(K, f, moved, seed, dtype):
    g, clients = robust.cohort(K, dtype, seed)
    clients = robust.far_away(clients, moved, 1.0)
    weights, met = caf(robust.rows(clients), f)
    result = fastagg.caf(g, clients, f=f)
    torch.testing.assert_close(result.weights, weights, **robust.tolerance(dtype))
    robust.assert_mixed(result, g, clients, weights)
    assert met > 0 or not moved  # the mean of the first iteration is the plain one


def test_f_0_is_the_mean():
    g, clients = robust.cohort(6)
    assert fastagg.caf(g, clients, f=0).weights.tolist() == [1 / 6] * 6


@pytest.mark.parametrize("magnitude", [1e2, 1e6, 1e20, 1e36])
@pytest.mark.parametrize("together", [False, True])
def test_clients_far_away_lose_their_weight(magnitude, together):
    """Also if they are at the same place, and lose it at once"""
    g, clients = robust.cohort(11, torch.float32)
    clients = robust.far_away(clients, 4, magnitude)
    if together:
        clients[:4] = [dict(clients[0]) for _ in range(4)]
    result = fastagg.caf(g, clients, f=4)
    assert result.weights[:4].tolist() == [0] * 4
    assert (result.weights[4:] > 0).sum() >= 3
    assert result.weights.sum() == pytest.approx(1, rel=1e-14)


def test_degenerate_cohorts_and_order():
    robust.check_degenerate(fastagg.caf, f=2)
    robust.check_order(fastagg.caf, f=3)


def test_bad_f():
    robust.check_f(fastagg.caf, CAF)
