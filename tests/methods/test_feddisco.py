"""FedDisco against relu(n_k - a disc_k + b), in loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastagg import InputError, feddisco
from fastagg._engine.cohort import Cohort
from fastagg.methods.feddisco import FedDisco
from helpers.cohort import assert_same_bits, assert_unchanged, make, snapshot

SHAPES = {"a.weight": (6, 5), "a.bias": (6,), "bn.weight": (6,), "bn.running_var": (6,)}
COUNTS = [[30, 30, 40, 0], [100, 0, 0, 0], [5, 5, 5, 5], [0, 1, 2, 3], [10, 40, 0, 0]]
SIZES = [100, 100, 20, 6, 50]
few = settings(deadline=None, max_examples=25, derandomize=True)


def naive(counts, sizes, a=0.5, b=0.1, metric="kl", target="uniform", normalize=None):
    K, C = len(counts), len(counts[0])
    n = [s / sum(sizes) for s in sizes]
    p = [[c / sum(row) for c in row] for row in counts]
    t = [1 / C] * C if target == "uniform" else [sum(n[k] * p[k][c] for k in range(K)) for c in range(C)]
    disc = []
    for row in p:
        if metric == "l2":
            disc.append(math.sqrt(sum((x - y) ** 2 for x, y in zip(row, t, strict=True))))
        else:
            disc.append(sum(x * math.log(x / y) for x, y in zip(row, t, strict=True) if x > 0))
    if normalize or (normalize is None and metric == "kl"):
        disc = [d / sum(disc) for d in disc]
    raw = [max(0.0, n[k] - a * disc[k] + b) for k in range(K)]
    return [x / sum(raw) for x in raw] if sum(raw) > 0 else n


def close(found, expected, rtol=1e-9):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=1e-15)


@pytest.mark.parametrize("metric", ["l2", "kl"])
@pytest.mark.parametrize("target", ["uniform", "global"])
@pytest.mark.parametrize("normalize", [None, False, True])
@pytest.mark.parametrize(("a", "b"), [(0.5, 0.1), (0, 0), (0.2, 0.3), (1.0, -0.05), (0.05, 0)])
def test_against_the_equation(metric, target, normalize, a, b):
    g, clients = make(5, SHAPES, torch.float64)
    options = {"metric": metric, "target": target, "normalize": normalize, "a": a, "b": b}
    result = feddisco(g, clients, SIZES, label_dist=COUNTS, **options)
    close(result.weights, naive(COUNTS, SIZES, **options))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
def test_the_model_is_the_weighted_mean(dtype, rtol):
    g, clients = make(5, SHAPES, dtype)
    before = snapshot(g, *clients)
    expected = naive(COUNTS, SIZES, metric="l2")
    assert min(expected) == 0  # somebody is cut off
    result = feddisco(g, clients, SIZES, label_dist=COUNTS, metric="l2")
    for key in SHAPES:
        mean = sum(w * sd[key].double() for w, sd in zip(expected, clients, strict=True))
        torch.testing.assert_close(result[key].double(), mean, rtol=rtol, atol=rtol)
    assert_unchanged([g, *clients], before)


def released(counts, sizes, a=0.5, b=0.1):
    """The authors' code with its default options: KL by scipy's kl_div (x log(x / y) - x + y), over its sum"""
    p = np.array(counts, dtype=float)
    p = p / p.sum(1)[:, None]
    uniform = 1 / p.shape[1]
    terms = np.array([[x * math.log(x / uniform) - x + uniform if x else uniform for x in row] for row in p])
    difference = terms.sum(1)
    difference = np.zeros(len(p)) if difference.sum() == 0 else difference / difference.sum()
    weights = np.array(sizes) / sum(sizes) - a * difference + b
    weights[weights < 0] = 0
    return difference, weights / weights.sum()


def test_defaults_are_the_authors():
    o = FedDisco()
    assert (o.a, o.b, o.metric, o.target, o.normalize) == (0.5, 0.1, "kl", "uniform", None)
    g, clients = make(5, SHAPES)
    for sizes in (SIZES, [1] * 5):
        difference, weights = released(COUNTS, sizes)
        result = feddisco(g, clients, sizes, label_dist=COUNTS)
        close(result.discrepancy, difference.tolist(), rtol=1e-12)
        close(result.weights, weights.tolist(), rtol=1e-12)
    plain = feddisco(g, clients, label_dist=COUNTS, metric="l2")
    close(plain.discrepancy[1:3], [math.sqrt(0.75), 0])
    assert feddisco(g, clients, label_dist=COUNTS, metric="kl", normalize=False).discrepancy[1] == math.log(4)


def test_very_unequal_labels_leave_more_than_one_client():
    """19 clients with one or two classes each, and one with all: plain distances leave only that one"""
    g, clients = make(20, {"w": (3,)})
    counts = np.random.default_rng(0).dirichlet([0.1] * 10, 20) * 100
    counts[4] = 10
    sizes = [10 + 30 * (k % 7) for k in range(20)]
    assert (feddisco(g, clients, sizes, label_dist=counts).weights > 0.005).all()
    for options in ({"metric": "l2"}, {"normalize": False}):
        assert feddisco(g, clients, sizes, label_dist=counts, **options).weights[4] > 0.999


def test_a_bad_row_is_named_by_the_callers_position():
    g, clients = make(3, SHAPES)
    with pytest.raises(InputError, match=r"client 1 \(id 'a'\): its entry in label_dist is \[0, 0\]"):
        feddisco(g, clients, label_dist=[[1, 1], [0, 0], [1, 2]], client_ids=["c", "a", "b"])


def test_no_gram_and_no_global_model(monkeypatch):
    g, clients = make(5, SHAPES)
    monkeypatch.setattr(Cohort, "gram", lambda *_: pytest.fail("a Gram was computed"))
    result = feddisco(g, clients, SIZES, label_dist=COUNTS)
    assert result.gram is None
    assert_same_bits(dict(feddisco(None, clients, SIZES, label_dist=COUNTS)), dict(result))


def test_counts_and_shares_are_the_same_in_any_form():
    g, clients = make(5, SHAPES)
    expected = feddisco(g, clients, SIZES, label_dist=COUNTS).weights
    counts = np.array(COUNTS)
    shares = counts / counts.sum(1, keepdims=True)
    for given_as in (counts, shares, torch.tensor(counts), torch.tensor(shares), shares.tolist()):
        close(feddisco(g, clients, SIZES, label_dist=given_as).weights, expected.tolist())
    huge = feddisco(g, clients, SIZES, label_dist=[[1e308, 1e308], *[[1, 0]] * 4])
    close(huge.weights, naive([[1, 1], *[[1, 0]] * 4], SIZES))


def test_all_cut_off_gives_data_shares():
    g, clients = make(3, SHAPES)
    one_class = [[1, 0], [0, 1], [1, 0]]
    result = feddisco(g, clients, [1, 2, 1], label_dist=one_class, a=10)
    close(result.weights, [0.25, 0.5, 0.25])


def test_a_label_nobody_with_data_has():
    g, clients = make(2, SHAPES)
    for a in (0, 0.5):
        result = feddisco(g, clients, [1, 0], label_dist=[[1, 0], [0, 1]], metric="kl", target="global", a=a)
        assert torch.isfinite(result.weights).all()
        assert torch.isfinite(result.discrepancy).all()
    close(result.weights, [1, 0])


@pytest.mark.parametrize("metric", ["l2", "kl"])
@pytest.mark.parametrize("normalize", [False, True])
def test_same_labels_leave_only_the_data(metric, normalize):
    """Also where the rounding of a discrepancy of zero would be all that is normalised"""
    g, clients = make(5, SHAPES)
    options = {"metric": metric, "normalize": normalize, "target": "global", "b": 0}
    for row in ([4, 1], [3, 1, 3], [0.1, 0.7, 0.3, 1.1]):
        for sizes in ([1, 2, 3, 4, 5], [7, 1, 1, 5, 3], [0.3, 0.1, 0.7, 0.9, 1.3]):
            w = feddisco(g, clients, sizes, label_dist=[row] * 5, **options).weights
            close(w, [s / sum(sizes) for s in sizes])


def test_one_client_identical_clients_and_extremes():
    g, [client] = make(1, SHAPES)
    alone = feddisco(g, [client], label_dist=[[3, 1]])
    assert alone.weights.tolist() == [1.0]
    assert_same_bits(dict(alone), client)
    same = feddisco(g, [{k: v.clone() for k, v in client.items()} for _ in range(4)], label_dist=[[1, 2]] * 4)
    close(same.weights, [0.25] * 4)
    for key, value in client.items():
        torch.testing.assert_close(same[key], value)
    for scale in (1e6, 1e-20, 0.0):
        far = [{k: scale * v for k, v in client.items()}, {k: -scale * v for k, v in client.items()}]
        result = feddisco(g, far, label_dist=[[1, 2], [2, 1]])
        assert all(torch.isfinite(value).all() for value in result.values())
    assert feddisco(g, [client], label_dist=[[7]]).weights.tolist() == [1.0]  # one class


rounds = st.integers(1, 6).flatmap(
    lambda K: st.tuples(
        st.lists(st.lists(st.integers(0, 100), min_size=3, max_size=3).filter(any), min_size=K, max_size=K),
        st.lists(st.integers(1, 1000), min_size=K, max_size=K),
    )
)
options = st.fixed_dictionaries(
    {"a": st.floats(0, 3), "b": st.floats(-0.2, 1), "metric": st.sampled_from(("l2", "kl")),
     "target": st.sampled_from(("uniform", "global"))}
)  # fmt: skip


@few
@given(rounds, options, st.randoms())
def test_permuting_clients_permutes_weights_that_sum_to_one(cohort, options, random):
    counts, sizes = cohort
    g, clients = make(len(counts), {"w": (3,)})
    order = list(range(len(counts)))
    random.shuffle(order)
    w = feddisco(g, clients, sizes, label_dist=counts, **options).weights
    assert (w >= 0).all()
    assert w.sum().item() == pytest.approx(1, abs=1e-12)
    permuted = [[x[k] for k in order] for x in (clients, sizes, counts)]
    found = feddisco(g, permuted[0], permuted[1], label_dist=permuted[2], **options).weights
    torch.testing.assert_close(found, w[order], rtol=1e-6, atol=1e-9)


@few
@given(rounds, st.integers(0, 2))
def test_renaming_classes_changes_nothing(cohort, shift):
    counts, sizes = cohort
    g, clients = make(len(counts), {"w": (3,)})
    turned = [row[shift:] + row[:shift] for row in counts]
    expected = feddisco(g, clients, sizes, label_dist=counts).weights
    torch.testing.assert_close(feddisco(g, clients, sizes, label_dist=turned).weights, expected)


def test_out_is_written():
    g, clients = make(5, SHAPES)
    first = feddisco(g, clients, label_dist=COUNTS)
    again = FedDisco(a=0).aggregate(g, clients, SIZES, out=first, label_dist=COUNTS)
    assert all(again[key] is first[key] for key in first)
    assert_same_bits(dict(again), dict(feddisco(g, clients, SIZES, label_dist=COUNTS, a=0)))


@pytest.mark.parametrize(
    "option",
    [{"a": -1}, {"a": math.inf}, {"b": math.nan}, {"b": "x"}, {"metric": "l1"}, {"target": "mean"}, {"normalize": 3}],
)
def test_bad_options(option):
    with pytest.raises(ValueError, match=f"feddisco: {next(iter(option))}="):
        FedDisco(**option)


@pytest.mark.parametrize(
    ("label_dist", "message"),
    [
        (None, "feddisco needs label_dist"),
        ([[1, 2]], r"label_dist have shape \(1,\), expected one for each of the 2 clients"),
        ([1, 2], "client 0: its entry in label_dist is 1, expected finite numbers >= 0"),
        ([[], []], r"client 0: its entry in label_dist is \[\]"),
        ([[1, 2], [1, -1]], r"client 1: its entry in label_dist is \[1, -1\], expected finite numbers >= 0"),
        ([[1, math.nan], [1, 1]], r"client 0: its entry in label_dist is \[1, nan\]"),
        ([[1, 1], [math.inf, 1]], r"client 1: its entry in label_dist is \[inf, 1\]"),
        ([[1, 1], [0, 0]], r"client 1: its entry in label_dist is \[0, 0\], .*not all of them 0"),
    ],
)
def test_bad_label_distributions(label_dist, message):
    g, clients = make(2, SHAPES)
    with pytest.raises(InputError, match=message):
        FedDisco().aggregate(g, clients, label_dist=label_dist)
