"""Partitions: what every kind must keep to, and what each is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fastagg.sim.partition import KINDS, apportion, make

Y, TEST_Y = np.tile(np.arange(10), 600), np.tile(np.arange(10), 100)
GOLDEN_COUNTS = [
    [12, 3, 1, 1, 7, 23, 23, 12, 16, 0],
    [17, 9, 22, 2, 4, 4, 5, 18, 1, 30],
    [1, 18, 7, 27, 19, 3, 2, 0, 13, 0],
]
GOLDEN_FIRST = [75, 27, 52]
few = settings(deadline=None, max_examples=200, derandomize=True)


def entropies(counts):
    p = counts / counts.sum(1, keepdims=True)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(1)


def assert_sound(part, y, test_y, classes, clients, min_size, proxy, used=None):
    assert len(part.train) == len(part.test) == clients
    assert part.counts.shape == (clients, classes)
    everything = np.concatenate([*part.train, part.proxy])
    assert len(np.unique(everything)) == len(everything)  # disjoint, also from the proxy
    assert len(part.proxy) == proxy
    assert used is None or part.counts.sum() == used
    for k, (train, test) in enumerate(zip(part.train, part.test, strict=True)):
        assert train.dtype == test.dtype == part.proxy.dtype == part.labels.dtype == part.counts.dtype == np.int64
        assert len(train) >= min_size
        assert (np.bincount(y[train], minlength=classes) == part.counts[k]).all()
        assert len(np.unique(test)) == len(test)
        here = np.bincount(test_y[test], minlength=classes)
        share = np.where(np.bincount(test_y, minlength=classes) > 0, part.counts[k], 0)
        assert bool(len(test)) == share.any()
        if len(test):
            assert np.abs(here - len(test) * share / share.sum()).max() < 1 + 1e-6


def same(a, b):
    pairs = zip(
        [*a.train, *a.test, a.proxy, a.labels, a.counts], [*b.train, *b.test, b.proxy, b.labels, b.counts], strict=True
    )
    return all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind):
    options = {"kind": kind, "proxy": 100, "corrupted": 0.5, "seed": 3}
    part = make(Y, TEST_Y, 10, 12, **options)
    assert_sound(part, Y, TEST_Y, 10, 12, 10, 100)
    assert part.counts.sum() > 5800
    assert (np.bincount(Y[part.proxy]) == 10).all()
    assert same(part, make(torch.from_numpy(Y), torch.from_numpy(TEST_Y), 10, 12, **options))
    if kind != "groups":  # whose counts leave nothing to chance
        assert not np.array_equal(part.counts, make(Y, TEST_Y, 10, 12, **options | {"seed": 4}).counts)
    assert not np.array_equal(part.train[0], make(Y, TEST_Y, 10, 12, **options | {"seed": 4}).train[0])


@pytest.mark.parametrize("kind", KINDS)
def test_all_samples_are_used(kind):
    part = make(Y, TEST_Y, 10, 12, kind=kind)
    assert part.counts.sum() == 6000
    assert len(np.unique(np.concatenate(part.test))) > 980  # and nearly all of the test set


@pytest.mark.parametrize("kind", KINDS)
def test_options_do_not_disturb_each_other(kind):
    clean, other = (make(Y, TEST_Y, 10, 9, kind=kind, corrupted=c) for c in (0, 0.4))
    assert all(np.array_equal(a, b) for a, b in zip(clean.train + clean.test, other.train + other.test, strict=True))
    assert np.array_equal(clean.labels, Y)


def test_split_stays_as_it_is():
    """The same on every platform and from version to version, or results could not be compared"""
    part = make(Y, TEST_Y, 10, 3, alpha=0.5, samples=300, seed=8)
    assert part.counts.tolist() == GOLDEN_COUNTS
    assert [int(i[0]) for i in part.train] == GOLDEN_FIRST


def test_iid():
    part = make(Y, TEST_Y, 10, 7, kind="iid")
    sizes = part.counts.sum(1)
    assert sizes.max() - sizes.min() <= 1
    assert np.abs(part.counts - 6000 / 70).max() < 50


def test_dirichlet_alpha():
    for alpha, low, high in ((1e-4, 0, 0.1), (0.1, 0.2, 1.4), (1, 1.4, 2.1), (100, 2.29, 2.303), (1e6, 2.302, 2.303)):
        part = make(Y, TEST_Y, 10, 20, alpha=alpha)
        assert low <= entropies(part.counts).mean() <= high, alpha
    sizes = make(Y, TEST_Y, 10, 20, alpha=0.1).counts.sum(1)
    assert sizes.max() > 20 * sizes.min()  # unequal
    assert np.ptp(make(Y, TEST_Y, 10, 20, alpha=1e6).counts.sum(1)) < 10


def test_dirichlet_proportions():
    """Over many classes, shares have the mean and variance of a Dirichlet distribution"""
    y = np.tile(np.arange(100), 500)
    shares = np.concatenate([make(y, y[:0], 100, 5, alpha=0.7, seed=s, min_size=1).counts / 500 for s in range(10)], 1)
    assert np.abs(shares.mean(1) - 0.2).max() < 0.04  # [5]; 1000 classes, deviation of each 0.19
    assert np.abs(shares.var(1) - 0.2 * 0.8 / 4.5).max() < 0.01


def test_pathological():
    for clients, each in ((20, 2), (7, 3), (10, 1), (3, 10)):
        counts = make(Y, TEST_Y, 10, clients, kind="pathological", classes_per_client=each).counts
        assert ((counts > 0).sum(1) == each).all()
        held = (counts > 0).sum(0)
        assert held.max() - held.min() <= 1  # every class equally often
        for column in counts.T:
            assert np.ptp(column[column > 0]) <= 1  # and equally divided
    pairs = {tuple(np.flatnonzero(row)) for row in make(Y, TEST_Y, 10, 30, kind="pathological").counts}
    assert len(pairs) > 10
    lonely = make(Y, TEST_Y, 10, 3, kind="pathological").counts
    assert (lonely.sum(0) > 0).sum() == 6  # six classes for three clients; the others are left out


def test_hybrid():
    """FedLAW's Figure 13: 20 clients, the first ten balanced"""
    counts = make(Y, TEST_Y, 10, 20, kind="hybrid", alpha=0.1).counts
    H = entropies(counts)
    assert H[:10].min() > 2
    assert H[10:].mean() < 1.5
    assert np.abs(counts[:10].sum() / 6000 - 0.5) < 0.05
    assert len(make(Y, TEST_Y, 10, 5, kind="hybrid").train) == 5


def test_entropy():
    """WeiAvg's Table I for MNIST"""
    part = make(Y, TEST_Y, 10, 100, kind="entropy", samples=3000)
    assert (part.counts.sum(1) == 30).all()
    assert (part.counts.sum(0) == 300).all()
    H = entropies(part.counts)
    assert H[0] == 0
    assert H[-1] > 2.2
    assert np.corrcoef(H, np.arange(100))[0, 1] > 0.98
    assert np.abs(H - np.linspace(0, np.log(10), 100)).max() < 0.35
    assert (np.diff(H) > -0.1).all()


def test_groups():
    """FedAWA's Figure 2"""
    counts = make(Y, TEST_Y, 10, 12, kind="groups").counts
    assert (counts.sum(1) == 500).all()
    assert (counts[:4, :5] == 100).all()
    assert (counts[4:8, 5:] == 100).all()
    assert (counts[8:] == 50).all()
    for clients, y in ((3, Y), (13, Y), (14, Y[Y != 3]), (5, Y[:5995])):
        counts = make(y, TEST_Y, 10, clients, kind="groups").counts
        assert np.ptp(counts.sum(1)) == 0
        first, second = np.arange(clients) * 3 // clients == 0, np.arange(clients) * 3 // clients == 1
        assert not counts[first, 5:].any()
        assert not counts[second, :5].any()
        assert entropies(counts[~first & ~second]).min() > 2


def test_min_size():
    counts = make(Y, TEST_Y, 10, 100, alpha=0.01, min_size=1).counts
    assert counts.sum(1).min() == 1
    for min_size in (10, 30, 60):
        repaired = make(Y, TEST_Y, 10, 100, alpha=0.01, min_size=min_size).counts
        assert repaired.sum(1).min() == min_size
        assert (repaired.sum(0) == counts.sum(0)).all()
    tight = make(Y, TEST_Y, 10, 100, alpha=0.1, min_size=60).counts  # all of it
    assert (tight.sum(1) == 60).all()


def test_min_size_keeps_to_the_clients_classes():
    before, after = (make(Y, TEST_Y, 10, 60, alpha=0.05, min_size=m).counts for m in (1, 20))
    short = (before.sum(1) > 1) & (before.sum(1) < 20)
    assert short.sum() > 10
    assert not after[short][before[short] == 0].any()
    two = make(Y, TEST_Y, 10, 40, kind="pathological", long_tail=10, min_size=40).counts
    assert two.sum(1).min() == 40
    assert ((two > 0).sum(1) == 2).all()  # givers keep theirs too


def test_samples_are_stratified():
    y = np.repeat([0, 1, 2], [4000, 1500, 500])
    part = make(y, TEST_Y, 10, 5, samples=600, kind="iid")
    assert part.counts.sum(0)[:3].tolist() == [400, 150, 50]


def test_long_tail():
    sizes = make(Y, TEST_Y, 10, 10, long_tail=100).counts.sum(0)
    assert sizes[0] == 600
    assert sizes[-1] == 6
    np.testing.assert_allclose(sizes, 600 * 100 ** (-np.arange(10) / 9), atol=1)
    some = make(Y, TEST_Y, 10, 10, long_tail=10, samples=1000, proxy=200)
    assert some.counts.sum() == 1000
    assert some.counts.sum(0)[0] / some.counts.sum(0)[-1] == pytest.approx(10, rel=0.05)
    assert (np.bincount(Y[some.proxy]) == 20).all()  # balanced all the same
    uneven = make(Y[1000:4500][Y[1000:4500] != 0][:3000], TEST_Y, 10, 2, kind="iid", min_size=1)
    assert uneven.counts.sum() == 3000


def test_proxy_as_balanced_as_the_classes_allow():
    y = np.repeat([0, 1, 2, 3], [5, 40, 300, 300])
    part = make(y, TEST_Y, 10, 4, proxy=200, kind="iid")
    assert np.bincount(y[part.proxy]).tolist() in ([5, 40, 78, 77], [5, 40, 77, 78])
    assert_sound(part, y, TEST_Y, 10, 4, 10, 200, used=445)


def test_corrupted():
    for fraction, number in ((0.25, 5), (0.5, 10), (0.75, 15), (1, 20), (0.001, 1)):
        part = make(Y, TEST_Y, 10, 20, kind="iid", corrupted=fraction)
        wrong = []
        for train in part.train:
            pairs = {(int(a), int(b)) for a, b in zip(Y[train], part.labels[train], strict=True) if a != b}
            if pairs:
                (a, b), *_ = pairs
                assert pairs == {(a, b), (b, a)}
                mine = np.isin(Y[train], (a, b))
                assert (Y[train][mine] != part.labels[train][mine]).all()  # all of both classes
                wrong.append(frozenset((a, b)))
        assert len(wrong) == number
        assert number < 5 or len(set(wrong)) > 2  # not one pair for all
        assert (part.counts.sum(0) == 600).all()  # counts are of the true labels
    single = make(Y, TEST_Y, 10, 10, kind="pathological", classes_per_client=1, corrupted=1, proxy=50)
    assert all((single.labels[t] != Y[t]).all() for t in single.train)  # one class, renamed
    assert (single.labels[single.proxy] == Y[single.proxy]).all()


def test_test_shares():
    part = make(Y, TEST_Y, 10, 20, alpha=0.3)
    sizes = [len(t) for t in part.test]
    np.testing.assert_allclose(sizes, np.maximum(10, part.counts.sum(1) / 6), atol=6)
    alone = make(Y, TEST_Y, 10, 1, kind="iid")
    assert np.array_equal(alone.test[0], np.arange(1000))
    without_3 = make(Y, TEST_Y[TEST_Y != 3], 10, 10, kind="pathological", classes_per_client=1)
    assert sorted(len(t) for t in without_3.test)[:2] == [0, 90]
    assert all(len(t) == 0 for t in make(Y, np.empty(0, int), 10, 3).test)


@few
@given(st.data())
def test_any_arguments(data):
    draw = data.draw
    kind = draw(st.sampled_from(list(KINDS)))
    classes = draw(st.integers(2, 12))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    y = rng.integers(0, classes, draw(st.integers(30, 600)))
    test_y = rng.integers(0, classes, draw(st.integers(0, 80)))
    clients, min_size, proxy = draw(st.integers(3, 25)), draw(st.integers(1, 12)), draw(st.integers(0, 40))
    options = {
        "kind": kind,
        "alpha": draw(st.floats(1e-4, 1e6)),
        "classes_per_client": draw(st.integers(1, 3)),
        "min_size": min_size,
        "samples": draw(st.none() | st.integers(20, 400)),
        "long_tail": draw(st.sampled_from([1.0, 1.5, 10.0, 1000.0])),
        "corrupted": draw(st.floats(0, 1)),
        "proxy": proxy,
        "seed": draw(st.integers(0, 2**70)),
    }
    try:
        part = make(y, test_y, classes, clients, **options)
    except ValueError as impossible:
        if not str(impossible).startswith("partition: "):
            raise
        event("impossible")
        return
    used = options["samples"] if kind in ("iid", "dirichlet", "hybrid") else None
    assert_sound(part, y, test_y, classes, clients, min_size, proxy, used)
    assert same(part, make(y, test_y, classes, clients, **options))


@few
@given(st.integers(0, 10**7), st.lists(st.integers(0, 10**5), min_size=1, max_size=30).filter(any))
def test_apportion(total, weights):
    weights = np.array(weights)
    got = apportion(total, weights)
    assert got.sum() == total
    assert np.abs(got - total * weights / weights.sum()).max() < 1 + 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "Dirichlet"}, r"kind='Dirichlet'; expected one of 'iid', 'dirichlet'"),
        ({"clients": 0}, r"clients=0; expected an integer >= 1"),
        ({"clients": 2, "kind": "groups"}, r"clients=2; expected an integer >= 3"),
        ({"clients": 1, "kind": "hybrid"}, r"clients=1; expected an integer >= 2"),
        ({"clients": 2.5}, r"clients=2.5; expected an integer"),
        ({"classes": -1}, r"classes=-1; expected an integer >= 1"),
        ({"alpha": 0}, r"alpha=0; expected a number >= 0.0001"),
        ({"alpha": float("nan")}, r"alpha=nan; expected a number"),
        ({"long_tail": 0.5}, r"long_tail=0.5; expected a number >= 1"),
        ({"corrupted": 1.5}, r"corrupted=1.5; expected a number >= 0 and <= 1"),
        ({"min_size": 0}, r"min_size=0; expected an integer >= 1"),
        ({"samples": 0}, r"samples=0; expected an integer >= 1"),
        ({"proxy": -1}, r"proxy=-1; expected an integer >= 0"),
        ({"seed": -1}, r"seed=-1; expected an integer >= 0"),
        ({"seed": "a"}, r"seed='a'; expected an integer"),
        ({"samples": 7000}, r"samples=7000; expected at most 6000"),
        ({"samples": 5000, "long_tail": 100}, r"samples=5000; expected at most 14\d\d, .* with long_tail=100"),
        ({"samples": 50}, r"clients=10 with min_size=10 need 100 samples, but samples, long_tail and kind leave 50"),
        ({"clients": 10**12}, r"clients=10{12} with min_size=10 need 10{13} samples, but the training set has 6000"),
        ({"proxy": 5950}, r"proxy=5950 and clients=10 with min_size=10 need 6050 samples"),
        ({"kind": "pathological", "classes_per_client": 11}, r"classes_per_client=11; expected at most 10"),
        ({"classes": 9}, r"y has labels from 0 to 9; expected 0 to 8"),
        ({"y": Y / 2}, r"y is float64 of shape \(6000,\); expected \[N\] integers"),
        ({"test_y": Y[None]}, r"test_y is int64 of shape \(1, 6000\)"),
        ({"y": Y[Y > 4], "kind": "groups"}, r"needs samples in both halves"),
        ({"y": Y[Y != 4], "long_tail": 10}, r"long_tail needs samples of every class; 4 has none"),
    ],
)
def test_errors(options, message):
    options = {"y": Y, "test_y": TEST_Y, "classes": 10, "clients": 10} | options
    with pytest.raises(ValueError, match=message):
        make(**options)
