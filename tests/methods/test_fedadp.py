"""FedAdp against a transcription of its equations on flattened models, over several rounds, in loops."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastagg import InputError, fedadp
from fastagg.methods.fedadp import FedAdp
from helpers.cohort import assert_same_bits, assert_unchanged, clone, degenerate, flat, make, snapshot

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "bn.weight": (6,), "bn.running_mean": (6,), "c.weight": (3, 6)}
few = settings(deadline=None, max_examples=25, derandomize=True)


class Naive:
    """One server: the angles of every client it has seen, in the order seen"""

    def __init__(self, alpha=5.0):
        self.alpha, self.seen = alpha, {}

    def weights(self, g, clients, sizes, ids):
        n = [s / sum(sizes) for s in sizes]
        parameters = [{k: v for k, v in sd.items() if "running" not in k} for sd in (g, *clients)]
        m, *models = [flat(sd).numpy() for sd in parameters]
        updates = [w - m for w in models]
        mean = sum(share * d for share, d in zip(n, updates, strict=True))
        raw = []
        for name, share, d in zip(ids, n, updates, strict=True):
            cosine = float(d @ mean) / float(np.linalg.norm(d) * np.linalg.norm(mean))
            history = self.seen.setdefault(name, [])
            history.append(math.acos(max(-1.0, min(1.0, cosine))))
            theta = sum(history) / len(history)
            f = self.alpha * (1 - math.exp(-math.exp(-self.alpha * (theta - 1))))
            raw.append(share * math.exp(f))
        return [x / sum(raw) for x in raw]


def close(found, expected, rtol):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=0)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@pytest.mark.parametrize("alpha", [1.0, 5.0])
def test_over_rounds_with_partial_participation(dtype, rtol, alpha):
    server, paper = FedAdp(alpha=alpha), Naive(alpha)
    for t, ids in enumerate([["a", "b", "c", "d"], ["b", "d"], ["d", "a", "e"], ["a", "b", "c", "d", "e"]]):
        g, clients = make(len(ids), SHAPES, dtype, scale=0.3, seed=t)
        before = snapshot(g, *clients)
        sizes = [10 + 7 * k for k in range(len(ids))]
        expected = paper.weights(g, clients, sizes, ids)
        result = server.aggregate(g, clients, sizes, ids)
        close(result.weights, expected, rtol)
        close(result.angles, [sum(paper.seen[name]) / len(paper.seen[name]) for name in ids], rtol)
        for key in SHAPES:
            mean = sum(w * sd[key].double() for w, sd in zip(expected, clients, strict=True))
            torch.testing.assert_close(result[key].double(), mean, rtol=rtol, atol=rtol)
        assert_unchanged([g, *clients], before)
    assert server.state_dict()["rounds"].tolist() == [len(paper.seen[x]) for x in server.state_dict()["client_ids"]]


def test_alpha_is_five_and_the_function_has_no_memory():
    g, clients = make(4, SHAPES, torch.float64, scale=0.3)
    expected = Naive(5.0).weights(g, clients, [1] * 4, range(4))
    for _ in range(2):
        close(fedadp(g, clients).weights, expected, 1e-9)


def test_a_client_against_the_others_loses():
    g, clients = make(4, SHAPES, torch.float64, scale=0.1)
    clients[1] = {key: g[key] - (clients[2][key] - g[key]) for key in g}
    w = fedadp(g, clients, [1, 1, 1, 1]).weights
    assert w[1] < 0.02
    assert w[1] == w.min()


def test_a_share_of_zero_has_weight_zero():
    g, clients = make(3, SHAPES, torch.float64, scale=0.3)
    for alpha in (5.0, 1e4):
        w = fedadp(g, clients, [0, 1, 2], alpha=alpha).weights
        assert w[0] == 0
        assert torch.isfinite(w).all()
        assert w.sum().item() == pytest.approx(1, abs=1e-12)


def test_a_client_without_data_does_not_crowd_out_the_others():
    """It alone is under 1 radian, and by its exp(f) every other is 0"""
    g = {"w": torch.zeros(2, dtype=torch.float64)}
    rows = [1.0, 0.0], [math.cos(1.4), math.sin(1.4)], [math.cos(1.4), -math.sin(1.4)]
    clients = [{"w": torch.tensor(row, dtype=torch.float64)} for row in rows]
    close(fedadp(g, clients, [0, 1, 1], alpha=1e4).weights, [0, 0.5, 0.5], 1e-9)


@pytest.mark.parametrize(("g", "clients"), [pytest.param(*rest, id=name) for name, *rest in degenerate(SHAPES)])
@pytest.mark.filterwarnings("error")
def test_degenerate_cohorts(g, clients):
    for alpha in (1e-3, 5, 1e3, 1e200):
        w = fedadp(g, clients, range(1, len(clients) + 1), alpha=alpha).weights
        assert torch.isfinite(w).all()
        assert (w >= 0).all()
        assert w.sum().item() == pytest.approx(1, abs=1e-12)


def test_no_direction_leaves_the_data_shares():
    for name, g, clients in degenerate(SHAPES):
        if name in ("no update", "all zero", "updates cancel"):
            sizes = [2, 2] if name == "updates cancel" else range(1, len(clients) + 1)
            result = fedadp(g, clients, sizes)
            close(result.weights, [s / sum(sizes) for s in sizes], 1e-12)
            close(result.angles, [math.pi / 2] * len(clients), 1e-12)


def test_one_client_and_identical_clients():
    g, clients = make(1, SHAPES)
    alone = fedadp(g, clients)
    assert alone.weights.tolist() == [1.0]
    assert_same_bits(dict(alone), clients[0])
    result = fedadp(g, [clone(clients[0]) for _ in range(6)], range(1, 7))
    close(result.weights, [k / 21 for k in range(1, 7)], 1e-12)
    for key, value in clients[0].items():
        torch.testing.assert_close(result[key], value)


cohorts = {"K": st.integers(1, 7), "seed": st.integers(0, 10**6)}


@few
@given(**cohorts, random=st.randoms())
def test_permuting_clients_permutes_weights(K, seed, random):
    g, clients = make(K, SHAPES, torch.float64, scale=0.3, seed=seed)
    order = list(range(K))
    random.shuffle(order)
    servers = FedAdp(), FedAdp()
    for _ in range(2):
        w = servers[0].aggregate(g, clients, range(1, K + 1)).weights
        found = servers[1].aggregate(g, [clients[k] for k in order], [k + 1 for k in order], order).weights
        torch.testing.assert_close(found, w[order], rtol=1e-7, atol=0)
    assert (w >= 0).all()
    assert w.sum().item() == pytest.approx(1, abs=1e-12)


@few
@given(**cohorts, exponent=st.integers(-20, 20))
def test_the_scale_of_updates_does_not_matter(K, seed, exponent):
    zero = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in SHAPES.items()}
    _, clients = make(K, SHAPES, torch.float64, seed=seed)
    scaled = [{key: 2.0**exponent * value for key, value in sd.items()} for sd in clients]
    torch.testing.assert_close(fedadp(zero, scaled).weights, fedadp(zero, clients).weights)


@few
@given(**cohorts)
def test_smaller_angles_never_count_less(K, seed):
    g, clients = make(K, SHAPES, torch.float64, scale=0.3, seed=seed)
    result = fedadp(g, clients)
    order = result.angles.argsort()
    assert (result.weights[order].diff() <= 1e-12).all()


def played(rounds=2):
    server = FedAdp()
    for t in range(rounds):
        g, clients = make(3, SHAPES, scale=0.3, seed=t)
        server.aggregate(g, clients, [1, 2, 3], ["a", "b", 7])
    return server


def test_state_round_trip():
    server = played()
    file = io.BytesIO()
    torch.save(server.state_dict(), file)
    file.seek(0)
    other = FedAdp()
    other.load_state_dict(torch.load(file, weights_only=True))
    g, clients = make(3, SHAPES, scale=0.3, seed=9)
    one, two = (s.aggregate(g, clients, [1, 2, 3], [7, "b", "new"]) for s in (server, other))
    assert torch.equal(one.weights, two.weights)
    assert not torch.equal(one.weights, fedadp(g, clients, [1, 2, 3]).weights)
    assert server.state_dict()["client_ids"] == other.state_dict()["client_ids"] == [7, "a", "b", "new"]
    FedAdp().load_state_dict(FedAdp().state_dict())


def same_state(a, b):
    return a["client_ids"] == b["client_ids"] and all(torch.equal(a[x], b[x]) for x in ("angles", "rounds"))


def test_a_state_is_a_copy():
    server = played()
    state = server.state_dict()
    kept = copy.deepcopy(state)
    state["client_ids"].append("x")
    state["angles"].zero_()
    assert same_state(server.state_dict(), kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "fedawa"}, "it is of method 'fedawa'"),
        ({"angles": None}, "expected what state_dict"),
        ({"angles": torch.zeros(2)}, r"angles have shape \(2,\), expected \(3,\)"),
        ({"rounds": torch.ones(3, 1)}, r"rounds have shape \(3, 1\), expected \(3,\)"),
        ({"angles": torch.tensor([0.1, math.nan, 0.1])}, "angles are not all between 0 and pi"),
        ({"angles": torch.tensor([0.1, 0.1, 4.0])}, "angles are not all between 0 and pi"),
        ({"rounds": torch.tensor([1, 0, 1])}, "rounds are not all integers >= 1"),
        ({"rounds": torch.tensor([1, 1.5, 1])}, "rounds are not all integers >= 1"),
        ({"rounds": torch.tensor([1, math.inf, 1])}, "rounds are not all integers >= 1"),
        ({"client_ids": ["a", "a", "b"]}, "have the same id"),
        ({"client_ids": [1.5, "a", "b"]}, "expected a string or integer"),
        ({"angles": "abc"}, "fedadp state"),
    ],
)
def test_bad_states_raise_and_change_nothing(change, message):
    server = played()
    before = copy.deepcopy(server.state_dict())
    state = {**server.state_dict(), **change}
    state = {key: value for key, value in state.items() if value is not None}
    with pytest.raises(InputError, match=message):
        server.load_state_dict(state)
    assert same_state(server.state_dict(), before)
    with pytest.raises(InputError, match="expected what state_dict"):
        server.load_state_dict([1, 2])


def test_a_round_that_raises_is_forgotten():
    server = played()
    before = copy.deepcopy(server.state_dict())
    g, clients = make(3, SHAPES)
    with pytest.raises(InputError, match="out"):
        server.aggregate(g, clients, None, ["a", "b", 7], out=clients[0])
    clients[1]["a.bias"][0] = math.nan
    with pytest.raises(InputError, match=r"client 1 .*'a\.bias'"):
        server.aggregate(g, clients, None, ["a", "b", 7])
    assert same_state(server.state_dict(), before)


def test_out_is_written():
    g, clients = make(3, SHAPES)
    first = fedadp(g, clients)
    again = fedadp(g, clients, [1, 2, 3], out=first)
    assert all(again[key] is first[key] for key in first)
    assert_same_bits(dict(again), dict(fedadp(g, clients, [1, 2, 3])))


@pytest.mark.parametrize("alpha", [0, -1, math.nan, math.inf, "5", None])
def test_bad_options(alpha):
    with pytest.raises(ValueError, match="fedadp: alpha="):
        FedAdp(alpha=alpha)
