"""Minimum diameter averaging against the diameters of all sets."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg.methods.mda import MDA, smallest_diameter
from helpers import robust
from helpers.cohort import assert_unchanged, snapshot


def diameter(w, some):
    return max((float((w[i] - w[j]).norm()) for i, j in combinations(some, 2)), default=0.0)


def best(w, f):
    """The first of all sets, in the order of their clients, with the smallest diameter"""
    return min(combinations(range(len(w)), len(w) - f), key=lambda some: diameter(w, some))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("K", "f"), [(3, 1), (6, 0), (6, 2), (9, 3), (10, 4), (11, 5)])
def test_equals_the_definition(K, f, seed, dtype):
    g, clients = robust.cohort(K, dtype, seed)
    before = snapshot(g, *clients)
    result = fastagg.mda(g, clients, f=f)
    chosen = best(robust.rows(clients), f)
    weights = torch.tensor([(k in chosen) / (K - f) for k in range(K)], dtype=torch.float64)
    torch.testing.assert_close(result.weights, weights, rtol=1e-15, atol=0)
    assert result.exact is True
    robust.assert_mixed(result, g, clients, weights)
    assert_unchanged([g, *clients], before)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=10), st.data())
def test_points_on_a_grid(points, data):
    """Where distances tie all the time, and pairs that are too far apart form paths and circles of all kinds"""
    f = data.draw(st.integers(0, (len(points) - 1) // 2))
    w = torch.tensor(points, dtype=torch.float64)
    chosen, exact = smallest_diameter(((w[:, None] - w) ** 2).sum(-1).numpy(), f)
    assert exact
    assert tuple(chosen.tolist()) == best(w, f)


@pytest.mark.parametrize(("K", "f"), [(60, 20), (100, 30)])
def test_exact_for_many_clients(K, f):
    """C(100, 30) is 3e25. The set found is a clique of the pairs within its diameter, and within less there is none:
    SciPy's integer programming says so."""
    optimize = pytest.importorskip("scipy.optimize")
    w = np.random.default_rng(0).standard_normal((K, 3))
    D = ((w[:, None] - w) ** 2).sum(-1)
    chosen, exact = smallest_diameter(D, f)
    assert exact
    assert len(set(chosen.tolist())) == K - f
    width = D[np.ix_(chosen, chosen)].max()
    far = [(i, j) for i, j in combinations(range(K), 2) if D[i, j] >= width]
    pairs = np.zeros((len(far), K))
    for row, pair in zip(pairs, far, strict=True):
        row[list(pair)] = 1  # one of the two has to go
    fewest = optimize.milp(
        np.ones(K), constraints=optimize.LinearConstraint(pairs, lb=1), bounds=optimize.Bounds(0, 1),
        integrality=np.ones(K),
    )  # fmt: skip
    assert round(fewest.fun) > f


def test_where_the_search_is_too_long():
    """The limit is on steps, and beyond it the clients are within twice the smallest diameter"""
    w = np.random.default_rng(0).standard_normal((40, 200))
    D = ((w[:, None] - w) ** 2).sum(-1)
    chosen, exact = smallest_diameter(D, 15)
    again, cut_off = smallest_diameter(D, 15, steps=20)
    assert (exact, cut_off) == (True, False)
    assert len(set(again.tolist())) == 25
    smallest, found = (np.sqrt(D[np.ix_(some, some)].max()) for some in (chosen, again))
    assert smallest <= found <= 2 * smallest


def test_the_limit_is_said_in_the_result(monkeypatch):
    monkeypatch.setattr("fastagg.methods.mda.smallest_diameter", lambda D, f: smallest_diameter(D, f, steps=0))
    g, clients = robust.cohort(7)
    result = fastagg.mda(g, clients, f=2)
    assert result.exact is False
    w = robust.rows(clients)
    balls = [sorted(range(7), key=lambda j, k=k: float((w[k] - w[j]).norm()))[:5] for k in range(7)]
    chosen = min(zip(balls, range(7), strict=True), key=lambda ball: float((w[ball[1]] - w[ball[0][-1]]).norm()))[0]
    assert sorted(chosen) == result.weights.nonzero().flatten().tolist()


@pytest.mark.parametrize("magnitude", [1e2, 1e6, 1e20, 1e36])
def test_clients_far_away_are_left_out(magnitude):
    g, clients = robust.cohort(9, torch.float32)
    result = fastagg.mda(g, robust.far_away(clients, 4, magnitude), f=4)
    assert result.weights.tolist() == [0] * 4 + [0.2] * 5


def test_degenerate_cohorts_and_order():
    robust.check_degenerate(fastagg.mda, f=2)
    robust.check_order(fastagg.mda, f=3)
    assert fastagg.mda(*robust.on_a_line(0, 1, 2, 3, 4), f=2).weights.tolist() == [1 / 3] * 3 + [0, 0]  # the first


def test_bad_f():
    robust.check_f(fastagg.mda, MDA)
