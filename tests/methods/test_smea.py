"""SMEA against the covariance matrices of all sets."""

from itertools import combinations

import pytest
import torch

import fastagg
from fastagg.methods import smea as module
from fastagg.methods.smea import SMEA
from helpers import robust


def largest_eigenvalue(w):
    """Of the covariance of the rows, [D, D]"""
    apart = w - w.mean(0)
    return float(torch.linalg.eigvalsh(apart.T @ apart / len(w))[-1])


def best(w, f):
    return min(combinations(range(len(w)), len(w) - f), key=lambda some: largest_eigenvalue(w[list(some)]))


def one_by_one(w, f):
    kept = list(range(len(w)))
    for _ in range(f):
        kept.remove(min(kept, key=lambda k: largest_eigenvalue(w[[i for i in kept if i != k]])))
    return kept


def chosen_by(result):
    return result.weights.nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("K", "f"), [(3, 1), (6, 0), (6, 2), (9, 3), (9, 4)])
def test_equals_the_definition(K, f, seed, dtype, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 200)  # several pieces
    g, clients = robust.cohort(K, dtype, seed)
    result = fastagg.smea(g, clients, f=f)
    chosen = best(robust.rows(clients), f)
    weights = torch.tensor([(k in chosen) / (K - f) for k in range(K)], dtype=torch.float64)
    torch.testing.assert_close(result.weights, weights, rtol=1e-15, atol=0)
    assert result.exact is True
    robust.assert_mixed(result, g, clients, weights)


@pytest.mark.parametrize("seed", range(5))
def test_beyond_the_limit_clients_are_removed_one_by_one(seed, monkeypatch):
    g, clients = robust.cohort(9, seed=seed)
    w = robust.rows(clients)
    monkeypatch.setattr(module, "MOST", 126 * 81)  # C(9, 4) 9^2
    result = fastagg.smea(g, clients, f=4)
    assert result.exact is True
    assert chosen_by(result) == list(best(w, 4))
    monkeypatch.setattr(module, "MOST", 126 * 81 - 1)
    result = fastagg.smea(g, clients, f=4)
    assert result.exact is False
    assert chosen_by(result) == one_by_one(w, 4)


def test_a_set_of_little_spread_that_removing_one_by_one_misses():
    """Why all sets are compared while there are not too many"""
    differ = 0
    for seed in range(20):
        w = torch.randn(9, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        g = {"w": torch.zeros(4, dtype=torch.float64)}
        chosen = chosen_by(fastagg.smea(g, [{"w": row} for row in w], f=4))
        assert chosen == list(best(w, 4))
        differ += chosen != one_by_one(w, 4)
    assert differ


@pytest.mark.parametrize("most", [20_000_000, 0])
@pytest.mark.parametrize("magnitude", [1e2, 1e6, 1e20, 1e36])
def test_clients_far_away_are_left_out(magnitude, most, monkeypatch):
    monkeypatch.setattr(module, "MOST", most)
    g, clients = robust.cohort(9, torch.float32)
    assert chosen_by(fastagg.smea(g, robust.far_away(clients, 4, magnitude), f=4)) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("most", [20_000_000, 0])
def test_degenerate_cohorts_and_order(most, monkeypatch):
    monkeypatch.setattr(module, "MOST", most)
    robust.check_degenerate(fastagg.smea, f=2)
    robust.check_order(fastagg.smea, f=3)
    g, clients = robust.cohort(5)
    assert chosen_by(fastagg.smea(g, [dict(clients[0]) for _ in range(5)], f=2)) == [0, 1, 2]  # the first


def test_bad_f():
    robust.check_f(fastagg.smea, SMEA)
