"""WeiAvg against a transcription of its Eq. 3 and Algorithms 1 and 2 on flattened models, in loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastagg import InputError, weiavg
from fastagg.methods.weiavg import WeiAvg
from helpers.cohort import assert_same_bits, assert_unchanged, clone, degenerate, flat, make, snapshot

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "bn.weight": (6,), "bn.running_var": (6,), "c.weight": (3, 6)}
few = settings(deadline=None, max_examples=25, derandomize=True)


def projections(g, clients):
    parameters = [{k: v for k, v in sd.items() if "running" not in k} for sd in (g, *clients)]
    m, *models = [flat(sd).numpy() for sd in parameters]
    updates = [w - m for w in models]
    mean = sum(updates) / len(updates)
    return [float(d @ mean) / np.linalg.norm(mean) for d in updates]


def by_powers(values, lam):
    """Steps 3.2 to 3.4, with the sheet's shift: the smallest that leaves no value under 1 % of the mean magnitude"""
    least = sum(abs(v) for v in values) / len(values) / 100
    shift = max(0.0, least - min(values))
    z = [(v + shift) ** lam for v in values]
    return [x / sum(z) for x in z]


def close(found, expected, rtol):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=0)


def opposed(K, dtype, seed=0):
    """A cohort with clients on both sides of the mean update"""
    g, clients = make(K, SHAPES, dtype, scale=0.3, seed=seed)
    for key in g:
        clients[0][key] = (g[key] - 0.8 * (clients[2][key] - g[key])).to(dtype)
    return g, clients


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@pytest.mark.parametrize("lam", [0, 1e-4, 0.5, 1, 3])
@pytest.mark.parametrize("cohort", [opposed, lambda K, dtype: make(K, SHAPES, dtype, scale=0.2, seed=5)])
def test_by_projection(dtype, rtol, lam, cohort):
    g, clients = cohort(5, dtype)
    before = snapshot(g, *clients)
    expected = by_powers(projections(g, clients), lam)
    result = weiavg(g, clients, lam=lam)
    close(result.weights, expected, rtol)
    for key in SHAPES:
        mean = sum(w * sd[key].double() for w, sd in zip(expected, clients, strict=True))
        torch.testing.assert_close(result[key].double(), mean, rtol=rtol, atol=rtol)
    assert result.gram.K == 5
    assert_unchanged([g, *clients], before)


def test_the_cohorts_above_need_the_shift_and_do_not():
    assert min(projections(*opposed(5, torch.float64))) < 0
    plain = projections(*make(5, SHAPES, torch.float64, scale=0.2, seed=5))
    assert min(plain) > 0.01 * sum(plain) / 5


@pytest.mark.parametrize("entropies", [[0.0, 1.2, 2.3, 0.7], [1.0, 1.0, 2.0, 4.0], [0.0, 0.0, 0.0, 1e-3]])
@pytest.mark.parametrize("lam", [0, 0.5, 1, 4])
def test_by_entropy(entropies, lam):
    g, clients = make(4, SHAPES, torch.float64)
    expected = by_powers(entropies, lam)
    for given_as in (entropies, torch.tensor(entropies, dtype=torch.float64), np.array(entropies)):
        result = weiavg(g, clients, lam=lam, entropies=given_as)
        close(result.weights, expected, 1e-9)
        assert result.gram is None
    for key in SHAPES:
        mean = sum(w * sd[key] for w, sd in zip(expected, clients, strict=True))
        torch.testing.assert_close(result[key], mean, rtol=1e-9, atol=1e-9)


def test_no_entropy_at_all_is_the_plain_mean():
    g, clients = make(3, SHAPES)
    assert weiavg(g, clients, entropies=[0, 0, 0]).weights.tolist() == [1 / 3] * 3


def test_lambda_zero_is_the_plain_mean_whatever_the_sizes():
    g, clients = make(5, SHAPES)
    close(weiavg(g, clients, [1, 2, 3, 4, 5], lam=0).weights, [0.2] * 5, 1e-12)


def test_default_lambda_weighs_in_proportion():
    g, clients = make(4, SHAPES, torch.float64)
    close(weiavg(g, clients, entropies=[1, 2, 3, 4]).weights, [0.1, 0.2, 0.3, 0.4], 1e-12)


def test_a_large_lambda_neither_overflows_nor_vanishes():
    g, clients = make(3, SHAPES, torch.float64)
    close(weiavg(g, clients, lam=1e6, entropies=[1.0, 2.0, 2.0]).weights, [0.0, 0.5, 0.5], 1e-12)
    close(weiavg(g, clients, lam=1e6, entropies=[0.0, 2.0, 2.0]).weights, [0.0, 0.5, 0.5], 1e-12)
    close(weiavg(g, clients, lam=500, entropies=[1e-3, 1e-3, 1e-3]).weights, [1 / 3] * 3, 1e-12)
    close(weiavg(g, clients, lam=2, entropies=[1e300, 2e300, 1e300]).weights, [1 / 6, 4 / 6, 1 / 6], 1e-12)


@pytest.mark.parametrize(("g", "clients"), [pytest.param(*rest, id=name) for name, *rest in degenerate(SHAPES)])
def test_degenerate_cohorts(g, clients):
    for lam in (0, 1, 10):
        w = weiavg(g, clients, lam=lam).weights
        assert torch.isfinite(w).all()
        assert (w >= 0).all()
        assert w.sum().item() == pytest.approx(1, abs=1e-12)


def test_no_direction_is_the_plain_mean():
    for name, g, clients in degenerate(SHAPES):
        if name in ("no update", "all zero", "updates cancel"):
            assert weiavg(g, clients).weights.tolist() == [1 / len(clients)] * len(clients)


def test_one_client_and_identical_clients():
    g, clients = make(1, SHAPES)
    alone = weiavg(g, clients)
    assert alone.weights.tolist() == [1.0]
    assert_same_bits(dict(alone), clients[0])
    result = weiavg(g, [clone(clients[0]) for _ in range(6)])
    close(result.weights, [1 / 6] * 6, 1e-12)
    for key, value in clients[0].items():
        torch.testing.assert_close(result[key], value)


cohorts = {"K": st.integers(3, 7), "seed": st.integers(0, 10**6), "lam": st.floats(0, 5)}


@few
@given(**cohorts, random=st.randoms())
def test_permuting_clients_permutes_weights(K, seed, lam, random):
    g, clients = opposed(K, torch.float64, seed)
    order = list(range(K))
    random.shuffle(order)
    w = weiavg(g, clients, lam=lam).weights
    assert (w >= 0).all()
    assert w.sum().item() == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(weiavg(g, [clients[k] for k in order], lam=lam).weights, w[order], rtol=1e-7, atol=1e-12)


@few
@given(**cohorts, exponent=st.integers(-20, 20))
def test_the_scale_of_updates_does_not_matter(K, seed, lam, exponent):
    zero = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in SHAPES.items()}
    _, clients = make(K, SHAPES, torch.float64, seed=seed)
    scaled = [{key: 2.0**exponent * value for key, value in sd.items()} for sd in clients]
    torch.testing.assert_close(weiavg(zero, scaled, lam=lam).weights, weiavg(zero, clients, lam=lam).weights)


@few
@given(**cohorts)
def test_more_diverse_clients_never_count_less(K, seed, lam):
    g, clients = opposed(K, torch.float64, seed)
    w = weiavg(g, clients, lam=lam).weights
    order = np.argsort(projections(g, clients))
    assert (w[order].diff() >= -1e-12).all()


def test_out_is_written():
    g, clients = make(3, SHAPES)
    first = weiavg(g, clients)
    for info in ({}, {"entropies": [1, 2, 3]}):
        again = weiavg(g, clients, out=first, **info)
        assert all(again[key] is first[key] for key in first)
        assert_same_bits(dict(again), dict(weiavg(g, clients, **info)))


@pytest.mark.parametrize("lam", [-1, math.nan, math.inf, "1", None])
def test_bad_options(lam):
    with pytest.raises(ValueError, match="weiavg: lam="):
        WeiAvg(lam=lam)


@pytest.mark.parametrize("entropies", [[1.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf], [[1.0, 1.0]]])
def test_bad_entropies(entropies):
    g, clients = make(2, SHAPES)
    with pytest.raises(InputError, match=r"client 1: its entry in entropies is|entropies have shape"):
        WeiAvg().aggregate(g, clients, entropies=entropies)


def test_by_entropy_every_round_needs_entropies():
    g, clients = make(3, SHAPES)
    given = {"entropies": [1.0, 0.2, 0.7]}
    assert_same_bits(weiavg(g, clients, by="entropy", **given), weiavg(g, clients, **given))
    with pytest.raises(InputError, match="weiavg needs entropies: the entropy of each client's labels"):
        weiavg(g, clients, by="entropy")
    assert not WeiAvg.round_inputs[0].required  # the class has not changed
    assert not WeiAvg().round_inputs[0].required
