"""FoolsGold against its algorithm, loop by loop, on flattened updates."""

import math

import pytest
import torch

import fastagg
from fastagg.methods.foolsgold import FoolsGold
from helpers import robust


def learning_rates(d, kappa=1.0):
    """Algorithm 1 of the paper with the updates in the place of their sums over rounds, and v at least 0"""
    n = len(d)
    cs = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(n):
            lengths = float(d[i].norm() * d[j].norm())
            cs[i][j] = float(d[i] @ d[j]) / lengths if lengths else 0.0
    v = [max([0.0, *(cs[i][j] for j in range(n) if j != i)]) for i in range(n)]
    pardoned = [[cs[i][j] * v[i] / v[j] if v[j] > v[i] else cs[i][j] for j in range(n)] for i in range(n)]
    alpha = [1 - max([-1.0, *(pardoned[i][j] for j in range(n) if j != i)]) for i in range(n)]
    alpha = [min(max(a, 0.0), 1.0) for a in alpha]
    top = max(alpha)
    found = []
    for a in alpha:
        a = a / top if top else 0.0
        logit = -math.inf if a == 0 else math.inf if a == 1 else math.log(a / (1 - a))
        found.append(min(max(kappa * (logit + 0.5), 0.0), 1.0))
    return torch.tensor(found, dtype=torch.float64)


def with_sybils(K, sybils, noise, dtype=torch.float64, seed=0):
    """Honest clients that differ, and at the end sybils that go one way, up to some noise"""
    generator = torch.Generator().manual_seed(seed)
    g, clients = robust.cohort(K, dtype, seed)
    way = {key: torch.randn(g[key].shape, generator=generator, dtype=torch.float64) for key in robust.PARAMS}
    for k in range(K):
        own = {key: torch.randn(g[key].shape, generator=generator, dtype=torch.float64) for key in robust.PARAMS}
        moves = {key: way[key] + noise * own[key] for key in own} if k >= K - sybils else own
        clients[k] = clients[k] | {key: (g[key].double() + 0.1 * moves[key]).to(dtype) for key in moves}
    return g, clients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kappa", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("K", "sybils", "noise"), [(2, 0, 0), (8, 0, 0), (9, 3, 0.1), (9, 4, 0.5), (12, 5, 1.0)])
def test_equals_the_algorithm(K, sybils, noise, kappa, dtype):
    seen = set()
    for seed in range(3):
        g, clients = with_sybils(K, sybils, noise, dtype, seed)
        result = fastagg.foolsgold(g, clients, kappa=kappa)
        weights = learning_rates(robust.rows(clients, g), kappa) / K
        torch.testing.assert_close(result.weights, weights, **robust.tolerance(dtype))
        robust.assert_mixed(result, g, clients, weights)
        seen |= set((K * weights).tolist())
    if (K, sybils, kappa) == (12, 5, 0.5):
        assert any(0 < alpha < 1 for alpha in seen)


def test_sybils_lose_their_weight_and_others_keep_it():
    g, clients = with_sybils(9, 4, 0.1)
    weights = fastagg.foolsgold(g, clients).weights
    assert weights[5:].tolist() == [0] * 4
    assert weights[:5].tolist() == [1 / 9] * 5


def test_what_it_is_not_for():
    """Clients with the same update are one, honest or not: the parameters stay those of the global model"""
    g, clients = robust.cohort(4)
    result = fastagg.foolsgold(g, [dict(clients[0]) for _ in range(4)])
    assert result.weights.tolist() == [0] * 4
    for key in robust.PARAMS:
        assert torch.equal(result[key], g[key])


def test_nothing_is_remembered():
    g, clients = with_sybils(6, 2, 0.1)
    server = fastagg.aggregator("foolsgold")
    first = server.aggregate(g, clients)
    assert torch.equal(server.aggregate(g, clients).weights, first.weights)
    assert server.state_dict() == {"method": "foolsgold"}


def test_degenerate_cohorts_and_order():
    robust.check_degenerate(fastagg.foolsgold)
    robust.check_order(fastagg.foolsgold)


@pytest.mark.parametrize("kappa", [0, -1, math.nan, "1", None])
def test_bad_kappa(kappa):
    with pytest.raises(ValueError, match="foolsgold: kappa="):
        FoolsGold(kappa=kappa)
