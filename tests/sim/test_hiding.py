"""Attacks that hide among honest updates, against the papers' equations and algorithms in float64, loop by loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fastagg.sim import attack
from fastagg.sim.attack.hiding import largest_z
from helpers.cohort import assert_unchanged, snapshot

SHAPES = {"a.weight": (7, 5), "a.bias": (7,)}
PARAMS = [*SHAPES, "codes"]
TAU = 1e-12  # of the gamma that is searched for


def cohort(clients, dtype=torch.float64, spread=0.3, seed=0):
    """Models before and after training: a different start each, updates around a common one, a buffer, integers"""
    rng = np.random.default_rng(seed)
    common = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    starts, trained = [], []
    for _ in range(clients):
        start = {name: torch.tensor(rng.normal(size=shape), dtype=dtype) for name, shape in SHAPES.items()}
        start |= {"codes": torch.arange(3), "bn.running_var": torch.ones(2, dtype=dtype)}
        moved = {
            name: start[name] + torch.tensor(0.1 * common[name] + spread * rng.normal(size=shape), dtype=dtype)
            for name, shape in SHAPES.items()
        }
        starts.append(start)
        trained.append(moved | {"codes": torch.arange(3) + 1, "bn.running_var": torch.full((2,), 3.0, dtype=dtype)})
    return starts, trained


def sent(kind, starts, trained, attackers, strength=None, knows="honest", direction="unit"):
    rngs = [np.random.default_rng(k) for k in attackers]
    told = {"strength": strength, "knows": knows, "direction": direction, "rngs": rngs}
    return attack.sent(kind, starts, trained, attackers, PARAMS, **told)


def flat(state):
    return np.concatenate([state[name].double().numpy().ravel() for name in SHAPES])


def updates_of(starts, trained, who):
    return [flat(trained[k]) - flat(starts[k]) for k in who]


def check(models, starts, trained, attackers, expected, dtype, within=0.0):
    """All attackers send this update, each from where it started, and the rest of their model as trained; within: what
    the expected update itself may be wrong by"""
    eps = torch.finfo(dtype).eps
    assert sorted(models) == sorted(attackers)
    for k, model in models.items():
        largest = np.abs(flat(starts[k])).max() + np.abs(expected).max()
        np.testing.assert_allclose(flat(model) - flat(starts[k]), expected, rtol=0, atol=16 * eps * largest + within)
        assert list(model) == list(trained[k])
        for name in ("codes", "bn.running_var"):
            assert torch.equal(model[name], trained[k][name])
            assert model[name].data_ptr() != trained[k][name].data_ptr()
        assert all(model[name].dtype == dtype for name in SHAPES)


# The papers, word for word


def naive_z(n, m):
    """Algorithm 3 of Baruch et al.: s = floor(n/2 + 1) - m, the largest z with phi(z) < (n - m - s) / (n - m)"""
    s = math.floor(n / 2 + 1) - m
    share, low, high = (n - m - s) / (n - m), -10.0, 10.0
    for _ in range(200):
        z = (low + high) / 2
        low, high = (z, high) if 0.5 * (1 + math.erf(z / math.sqrt(2))) < share else (low, z)
    return low


def naive_alie(updates, z):
    result = np.empty_like(updates[0])
    for j in range(len(result)):
        values = [u[j] for u in updates]
        mean = sum(values) / len(values)
        result[j] = mean - z * math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    return result


def naive_direction(updates, direction):
    mean = sum(updates) / len(updates)
    if direction == "unit":
        return -mean / np.linalg.norm(mean)
    return -np.std(updates, axis=0) if direction == "std" else -np.sign(mean)


def naive_oracle(kind, updates, malicious):
    if kind == "min-max":
        between = max(np.linalg.norm(u - v) for u in updates for v in updates)
        return max(np.linalg.norm(malicious - u) for u in updates) <= between
    between = max(sum(np.linalg.norm(u - v) ** 2 for v in updates) for u in updates)
    return sum(np.linalg.norm(malicious - u) ** 2 for u in updates) <= between


def naive_search(kind, updates, direction, first=50.0, tau=TAU):
    """Algorithm 1 of Shejwalkar and Houmansadr; with steps as in their code, which reach every gamma up to 2 first"""
    mean, p = sum(updates) / len(updates), naive_direction(updates, direction)
    step, gamma, found = first, first, 0.0
    while abs(found - gamma) > tau:
        if naive_oracle(kind, updates, mean + gamma * p):
            found, gamma = gamma, gamma + step / 2
        else:
            gamma = gamma - step / 2
        step = step / 2
    return mean + found * p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("knows", ["honest", "own"])
def test_alie_and_ipm(knows, dtype):
    starts, trained = cohort(9, dtype)
    attackers = [1, 4, 6, 8]
    before = snapshot(*starts, *trained)
    seen = updates_of(starts, trained, attackers if knows == "own" else [0, 2, 3, 5, 7])
    check(
        sent("alie", starts, trained, attackers, 1.5, knows), starts, trained, attackers, naive_alie(seen, 1.5), dtype
    )
    expected = naive_alie(seen, naive_z(9, 4))
    check(sent("alie", starts, trained, attackers, None, knows), starts, trained, attackers, expected, dtype)
    expected = -0.7 * sum(seen) / len(seen)
    check(sent("ipm", starts, trained, attackers, 0.7, knows), starts, trained, attackers, expected, dtype)
    assert_unchanged([*starts, *trained], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("direction", ["unit", "std", "sign"])
@pytest.mark.parametrize("kind", ["min-max", "min-sum"])
def test_min_max_and_min_sum(kind, direction, dtype):
    for seed, clients, attackers, knows in (
        (0, 8, [0, 5], "honest"),
        (1, 7, [2, 3, 4], "own"),
        (2, 12, [11], "honest"),
    ):
        starts, trained = cohort(clients, dtype, seed=seed)
        seen = updates_of(starts, trained, [k for k in range(clients) if (k in attackers) == (knows == "own")])
        expected = naive_search(kind, seen, direction)
        models = sent(kind, starts, trained, attackers, None, knows, direction)
        check(models, starts, trained, attackers, expected, dtype, 2 * TAU)  # no p has a coordinate beyond 1


@pytest.mark.parametrize("kind", ["min-max", "min-sum"])
def test_nothing_farther_away_would_do(kind):
    starts, trained = cohort(10)
    honest = updates_of(starts, trained, range(1, 10))
    mean = sum(honest) / 9
    way = flat(sent(kind, starts, trained, [0])[0]) - flat(starts[0]) - mean
    assert np.linalg.norm(way) > 0.1
    assert naive_oracle(kind, honest, mean + (1 - 1e-9) * way)
    assert not naive_oracle(kind, honest, mean + (1 + 1e-9) * way)


def test_z_of_the_paper():
    for n in range(3, 60):
        for m in range(1, (n - 1) // 2 + 1):
            assert largest_z(n, m) == pytest.approx(max(naive_z(n, m), 0), abs=1e-9), (n, m)
    assert largest_z(50, 24) == pytest.approx(1.426, abs=1e-3)  # 24 of 50: phi(z) = 24 / 26
    for n, m in ((1, 1), (2, 1), (4, 3), (10, 9), (10, 10)):  # a majority needs no supporters
        assert 0 <= largest_z(n, m) < 5


@pytest.mark.parametrize("direction", ["unit", "std", "sign"])
@pytest.mark.parametrize("kind", ["alie", "ipm", "min-max", "min-sum"])
def test_odd_cohorts_are_never_nan(kind, direction):
    strength = 0.5 if kind == "ipm" else None

    def send(starts, trained, attackers, knows="honest"):
        models = sent(kind, starts, trained, attackers, strength, knows, direction)
        assert all(np.isfinite(flat(model)).all() for model in models.values())
        return [flat(model) - flat(starts[k]) for k, model in models.items()]

    starts, trained = cohort(6, torch.float32)
    factor = -0.5 if kind == "ipm" else 1  # of the mean, where there is nothing to hide in
    [alone] = send(starts[:2], trained[:2], [1])  # one honest client
    np.testing.assert_allclose(alone, factor * updates_of(starts, trained, [0])[0], atol=1e-6)
    [own] = send(starts, trained, [3], "own")  # one attacker, who knows itself only
    np.testing.assert_allclose(own, factor * updates_of(starts, trained, [3])[0], atol=1e-6)
    assert len(send(starts, trained, list(range(6)))) == 6  # nobody is honest
    same = send([starts[0]] * 4, [trained[0]] * 4, [2])[0]
    np.testing.assert_allclose(same, factor * updates_of(starts, trained, [0])[0], atol=1e-6)
    assert not np.any(send(starts, starts, [0, 1]))  # nobody has moved
    far = {name: value + 1e20 if name in SHAPES else value for name, value in trained[2].items()}
    send(starts, [*trained[:2], far, *trained[3:]], [0, 1])


@pytest.mark.parametrize("kind", ["alie", "ipm", "min-max", "min-sum"])
def test_order_of_clients_does_not_matter(kind):
    starts, trained = cohort(9)
    strength = 0.5 if kind == "ipm" else None
    there = sent(kind, starts, trained, [1, 4], strength)
    order = [4, 8, 0, 3, 1, 7, 2, 6, 5]
    here = sent(kind, [starts[k] for k in order], [trained[k] for k in order], [0, 4], strength)
    for at, k in ((0, 4), (4, 1)):
        np.testing.assert_allclose(flat(here[at]), flat(there[k]), rtol=0, atol=1e-14)


def test_an_attack_of_your_own():
    starts, trained = cohort(5)
    seen = []

    def slow(known):
        seen.append(known)
        return [{name: d[name] / 2 for name in d} for d in known.own]

    models = sent(slow, starts, trained, [1, 3], 7.0)
    assert (len(seen[0].own), len(seen[0].honest), len(seen[0].rngs), seen[0].strength) == (2, 3, 2, 7.0)
    for k in (1, 3):
        np.testing.assert_allclose(flat(models[k]), (flat(starts[k]) + flat(trained[k])) / 2, atol=1e-14)
    for wrong in (None, [], [{}, {}], {"a.weight": torch.zeros(7, 5)}, {"a.weight": 0, "a.bias": 0}):
        with pytest.raises(ValueError, match="attack <lambda> returned something else"):
            sent(lambda known, wrong=wrong: wrong, starts, trained, [1, 3])
