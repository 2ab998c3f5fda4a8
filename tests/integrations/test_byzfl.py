"""Robust methods give what byzfl gives on the same vectors, where that is installed and computes what it says.

byzfl finds eigenvectors by one step of the power method from a random vector. Where that matters (SMEA, CAF), the
random vector is replaced by the eigenvector itself, which one step leaves as it is.
"""

from itertools import combinations

import numpy as np
import pytest
import torch

import fastagg
from helpers.byzfl import load

pytestmark = pytest.mark.integration
byzfl = load("aggregators.aggregators")

CASES = [(5, 1), (9, 2), (11, 4)]  # clients, of whom so many are bad


def vectors(K, bad, seed):
    """[K, D]: clients that differ, the bad ones further away"""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((K, 40))
    x[rng.permutation(K)[:bad]] += 3 * rng.standard_normal((bad, 40))
    return x


def ours(name, x, **options):
    """A method's model from clients with these vectors, and a global model of zeros"""
    clients = [{"w": torch.from_numpy(row)} for row in x]
    return fastagg.aggregator(name, **options).aggregate({"w": torch.zeros(x.shape[1]).double()}, clients)["w"].numpy()


def same(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("K", "f"), CASES)
def test_what_is_chosen_by_distances(K, f, seed):
    x = vectors(K, f, seed)
    same(ours("mda", x, f=f), byzfl.MDA(f)(x))
    for pivot in (0, K - 1):
        same(ours("monna", x, f=f, pivot=pivot), byzfl.MoNNA(f, pivot)(x))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("K", "f"), CASES)
def test_krum(K, f, seed):
    """byzfl's scores are of K - f - 1 neighbours, which the paper has with one bad client less"""
    x = vectors(K, f, seed)
    same(ours("krum", x, f=f - 1), byzfl.Krum(f)(x))
    same(ours("multi_krum", x, f=f - 1, m=K - f), byzfl.MultiKrum(f)(x))


@pytest.mark.parametrize("seed", range(3))
def test_geometric_median(seed):
    """After so many iterations that it does not matter where they began: byzfl begins at zero"""
    x = vectors(9, 2, seed)
    theirs = byzfl.GeometricMedian(nu=1e-6, T=2000)(x)
    found = ours("geometric_median", x, weighted=False, nu=1e-6, iterations=2000, tolerance=0.0)
    np.testing.assert_allclose(found, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("tau", [1.0, 8.0, 100.0])
def test_centred_clipping(tau, iterations):
    x = vectors(9, 2, 0)
    same(ours("centred_clipping", x, tau=tau, iterations=iterations), byzfl.CenteredClipping(L=iterations, tau=tau)(x))


def first_vector(x, weights):
    """The eigenvector of the largest eigenvalue of the covariance"""
    apart = x - weights @ x / weights.sum()
    return np.linalg.svd(np.sqrt(weights)[:, None] * apart, full_matrices=False)[2][0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("K", "f"), CASES)
def test_smea(K, f, seed, monkeypatch):
    x = vectors(K, f, seed)
    starts = iter([first_vector(x[list(some)], np.ones(K - f)) for some in combinations(range(K), K - f)])
    monkeypatch.setattr(np.random, "randn", lambda dimension: next(starts))
    theirs = byzfl.SMEA(f)(x)
    assert not list(starts)
    same(ours("smea", x, f=f), theirs)


def test_caf(monkeypatch):
    """Outliers along axes of their own, which clients without weight have no part in: byzfl divides by the largest tau
    of all clients, fastagg by the largest of those that have weight left"""
    rng = np.random.default_rng(0)
    K, f, D = 12, 2, 14
    x = np.zeros((K, D))
    x[2:, 2:] = np.linalg.qr(rng.standard_normal((K, K)))[0][: K - 2] * rng.uniform(0.5, 1, (K - 2, 1))
    x[0, 0], x[1, 1] = 1000.0, 100.0
    starts = []

    def start(dimension):
        starts.append(len(starts))
        return first_vector(x, weights[len(starts) - 1])

    weights = weights_of_each_iteration(x, f)
    monkeypatch.setattr(np.random, "randn", start)
    theirs = byzfl.CAF(f)(x)
    assert len(starts) == len(weights) > 2
    same(ours("caf", x, f=f), theirs)
    assert np.abs(theirs[:2]).max() < 1


def weights_of_each_iteration(x, f):
    """c at the beginning of each iteration of byzfl's algorithm, with exact eigenvectors"""
    c, found = np.ones(len(x)), []
    while c.sum() > len(x) - 2 * f:
        found.append(c)
        tau = ((x - c @ x / c.sum()) @ first_vector(x, c)) ** 2
        c = c * (1 - tau / tau.max())
    return found


@pytest.mark.parametrize(("K", "f"), CASES)
def test_means_by_rank(K, f):
    x = vectors(K, f, seed=K)
    same(ours("median", x), byzfl.Median()(x))
    same(ours("trimmed_mean", x, f=f), byzfl.TrMean(f)(x))
    same(ours("meamed", x, f=f), byzfl.Meamed(f)(x))
