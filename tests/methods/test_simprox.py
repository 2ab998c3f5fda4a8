"""SimProx against a transcription of Eq. 7 to 13 on flattened models, in loops."""

from __future__ import annotations

import math
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastagg import InputError, simprox
from fastagg.methods.simprox import SimProx
from helpers.cohort import assert_same_bits, assert_unchanged, flat, make, snapshot

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "bn.weight": (6,), "bn.running_mean": (6,), "c.weight": (3, 6)}
few = settings(deadline=None, max_examples=25, derandomize=True)


def vectors(g, clients):
    """g [D] and w [K, D] of the parameters, float64"""
    parameters = [{k: v for k, v in sd.items() if "running" not in k} for sd in (g, *clients)]
    rows = [flat(sd).numpy() for sd in parameters]
    return rows[0], rows[1:]


def cosine(x, y):
    return float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))


def similarity(g, w, lam, tau):
    """S of Eq. 7 to 10 with the dynamic lambda, as a nested list"""
    K = len(w)
    pairs = [(i, j) for i in range(K) for j in range(i + 1, K)]
    sigma = sum(np.linalg.norm(w[i] - w[j]) for i, j in pairs) / math.comb(K, 2)
    mean = sum(cosine(x, g) for x in w) / K
    if mean < tau:
        lam = lam * mean / tau
    S = [[0.0] * K for _ in w]
    for i in range(K):
        for j in range(K):
            gaussian = math.exp(-(np.linalg.norm(w[i] - w[j]) ** 2) / (2 * sigma**2))
            S[i][j] = lam * cosine(w[i], w[j]) + (1 - lam) * gaussian
    return S


def naive(g, clients, lam=0.7, tau=0.5, lengths=None, exp=math.exp):
    """exp may be Decimal's, whose smallest number no update is long enough for"""
    g, w = vectors(g, clients)
    K = len(w)
    S = similarity(g, w, lam, tau)
    alpha = []
    for i in range(K):
        moved = np.linalg.norm(w[i] - g) if lengths is None else lengths[i]
        others = sum(S[i][j] for j in range(K) if j != i) / (K - 1)
        alpha.append(exp(-moved) * type(exp(0))(1 + others))
    total = sum(alpha)
    share = [float(x / total) for x in alpha]
    e = [math.exp(x) for x in share]
    return [x / sum(e) for x in e]


def decimal_exp(x):
    return Decimal(float(x)).exp()


def close(found, expected, rtol):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=0)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@pytest.mark.parametrize("scale", [0.01, 0.1, 0.5, 2.0])  # the last two have a mean cosine below tau
def test_against_the_equations(dtype, rtol, scale):
    g, clients = make(5, SHAPES, dtype, scale=scale, seed=3)
    before = snapshot(g, *clients)
    for lam in (0.0, 0.3, 0.7, 1.0):
        for tau in (0.5, 1.0):
            expected = naive(g, clients, lam, tau)
            result = simprox(g, clients, lam=lam, tau=tau)
            close(result.weights, expected, rtol)
            for key in SHAPES:
                mean = sum(w * sd[key].double() for w, sd in zip(expected, clients, strict=True))
                torch.testing.assert_close(result[key].double(), mean, rtol=rtol, atol=rtol)
    assert_unchanged([g, *clients], before)


def test_defaults():
    for scale in (0.2, 2.0):  # the mean cosine above tau, and below
        g, clients = make(4, SHAPES, torch.float64, scale=scale)
        close(simprox(g, clients).weights, naive(g, clients, 0.7, 0.5), 1e-9)


def test_tau_decides_when_lambda_shrinks():
    g, clients = make(4, SHAPES, torch.float64, scale=1.0, seed=1)
    G, w = vectors(g, clients)
    mean = sum(cosine(x, G) for x in w) / 4
    assert 0.1 < mean < 0.9
    above, below = mean * 0.99, mean * 1.5
    assert torch.equal(simprox(g, clients, tau=above).weights, simprox(g, clients, tau=0.05).weights)
    close(simprox(g, clients, tau=below).weights, naive(g, clients, 0.7, below), 1e-9)
    close(simprox(g, clients, tau=below).weights, naive(g, clients, 0.7 / 1.5, 0.01), 1e-9)


def test_lambda_is_never_negative():
    g, _ = make(1, SHAPES, torch.float64)
    _, clients = make(4, SHAPES, torch.float64, scale=0.2)
    for sd in clients:
        for value in sd.values():
            value.neg_()  # every model points away from the global one
    close(simprox(g, clients).weights, naive(g, clients, 0.0), 1e-9)


def test_given_lengths_replace_those_of_the_updates():
    g, clients = make(4, SHAPES, torch.float64, scale=0.2)
    lengths = [0.5, 2.0, 0.0, 1.0]
    expected = naive(g, clients, lengths=lengths)
    for given_as in (lengths, torch.tensor(lengths), np.array(lengths)):
        close(simprox(g, clients, lengths=given_as).weights, expected, 1e-9)
        close(SimProx().aggregate(g, clients, lengths=given_as).weights, expected, 1e-9)
    assert (simprox(g, clients).weights - torch.tensor(expected)).abs().max() > 1e-3


@pytest.mark.parametrize("scale", [300.0, 1e4, 1e6])
def test_long_updates_stay_finite_where_the_papers_form_is_zero_by_zero(scale):
    g, clients = make(5, SHAPES, torch.float64, scale=scale)
    with pytest.raises(ZeroDivisionError):
        naive(g, clients)
    with localcontext(Context(prec=40, Emin=MIN_EMIN, Emax=MAX_EMAX)):
        expected = naive(g, clients, exp=decimal_exp)
    close(simprox(g, clients).weights, expected, 1e-9)
    single = [{k: v.float() for k, v in sd.items()} for sd in (g, *clients)]
    result = simprox(single[0], single[1:])
    assert torch.isfinite(result.weights).all()
    assert all(torch.isfinite(value).all() for value in result.values())


def test_long_updates_of_nearly_one_length():
    """The shares of alpha are all in play, though exp(-g) is 0 for every client"""
    g, clients = make(4, SHAPES, torch.float64, scale=0.1)
    lengths = [1e6, 1e6 + 0.5, 1e6 + 1, 1e6 + 0.1]
    close(simprox(g, clients, lengths=lengths).weights, naive(g, clients, lengths=[0, 0.5, 1, 0.1]), 1e-9)


def clone(sd):
    return {key: value.clone() for key, value in sd.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_identical_clients_sigma_zero(dtype):
    g, [client] = make(1, SHAPES, dtype, scale=0.3)
    result = simprox(g, [clone(client) for _ in range(7)])
    close(result.weights, [1 / 7] * 7, 1e-12)
    for key, value in client.items():
        torch.testing.assert_close(result[key], value)


def test_one_client():
    g, clients = make(1, SHAPES)
    result = simprox(g, clients)
    assert result.weights.tolist() == [1.0]
    assert_same_bits(dict(result), clients[0])


def degenerate():
    g, clients = make(4, SHAPES, torch.float64, scale=0.1)
    zero = {key: torch.zeros_like(value) for key, value in g.items()}
    minus = {key: -value for key, value in g.items()}
    tiny = [{key: 1e-20 * value for key, value in sd.items()} for sd in (g, *clients)]
    yield "no update", g, [clone(g) for _ in range(3)]
    yield "one update zero", g, [clone(g), *clients]
    yield "all zero", zero, [clone(zero), clone(zero)]
    yield "global zero", zero, clients
    yield "one client zero", g, [zero, *clients]
    yield "two opposite", zero, [g, minus]
    yield "all away from g", minus, clients
    yield "tiny models", tiny[0], tiny[1:]


@pytest.mark.parametrize(("g", "clients"), [pytest.param(*rest, id=name) for name, *rest in degenerate()])
def test_degenerate_cohorts(g, clients):
    for lam in (0, 0.7, 1):
        w = simprox(g, clients, lam=lam, tau=1.0).weights
        assert torch.isfinite(w).all()
        assert (w > 0).all()
        assert w.sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.filterwarnings("error")
def test_opposite_models():
    g, _ = make(1, SHAPES, torch.float64)
    zero = {key: torch.zeros_like(value) for key, value in g.items()}
    minus = {key: -value for key, value in g.items()}
    close(simprox(zero, [g, minus], lam=1).weights, [0.5, 0.5], 1e-12)
    # lam stays 1, for the mean cosine is 1/3: the third has 1 + mean S = 0
    clients = [{key: 0.9 * value for key, value in g.items()}, {key: 1.2 * value for key, value in g.items()}, minus]
    close(simprox(g, clients, lam=1, tau=0.3).weights, naive(g, clients, 1, 0.3), 1e-9)


@few
@given(st.integers(2, 7), st.integers(0, 10**6), st.floats(-3, 2), st.randoms())
def test_permuting_clients_permutes_weights(K, seed, exponent, random):
    g, clients = make(K, SHAPES, torch.float64, scale=10**exponent, seed=seed)
    order = list(range(K))
    random.shuffle(order)
    w = simprox(g, clients).weights
    assert (w >= 0).all()
    assert w.sum().item() == pytest.approx(1, abs=1e-12)
    # softmax of shares between 0 and 1: no client counts e times another
    assert w.max() / w.min() <= math.e * (1 + 1e-12)
    torch.testing.assert_close(simprox(g, [clients[k] for k in order]).weights, w[order], rtol=1e-9, atol=0)


def test_sizes_do_not_matter_and_out_is_written():
    g, clients = make(3, SHAPES)
    first = simprox(g, clients, [1, 2, 3])
    assert torch.equal(first.weights, simprox(g, clients).weights)
    assert first.gram.K == 3
    again = simprox(g, clients[::-1], out=first)
    assert all(again[key] is first[key] for key in first)
    assert_same_bits(dict(again), dict(simprox(g, clients[::-1])))


@pytest.mark.parametrize("option", [{"lam": -0.1}, {"lam": 1.1}, {"lam": "x"}, {"lam": math.nan}, {"tau": 0}])
def test_bad_options(option):
    with pytest.raises(ValueError, match=f"simprox: {next(iter(option))}="):
        SimProx(**option)


@pytest.mark.parametrize("lengths", [[1.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf], [[1.0, 1.0]]])
def test_bad_lengths(lengths):
    g, clients = make(2, SHAPES)
    with pytest.raises(InputError, match=r"client 1: its entry in lengths is|lengths have shape"):
        simprox(g, clients, lengths=lengths)


def test_state():
    server = SimProx()
    server.load_state_dict(server.state_dict())
    with pytest.raises(InputError, match="it is of method 'fedadp'"):
        server.load_state_dict({"method": "fedadp"})
