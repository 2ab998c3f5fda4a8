"""Diagnostics against the same computed from flattened models, a pair of clients at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg._engine.diagnostics import Diagnostics, diagnostics
from fastagg._engine.gram import Gram
from helpers.cohort import flat, make

SHAPES = {"a.weight": (8, 5), "a.bias": (8,), "b.weight": (4, 8)}


def naive(g, clients, lam, gamma):
    g, w = flat(g), [flat(sd) for sd in clients]
    K = len(w)
    d = [x - g for x in w]

    def cos(x, y):
        lengths = float(x.norm() * y.norm())
        return float(x @ y) / lengths if lengths else 0.0

    cosine = torch.tensor([[cos(d[i], d[j]) for j in range(K)] for i in range(K)], dtype=torch.float64)
    coherence = sum(lam[i] * lam[j] * cosine[i, j] for i in range(K) for j in range(K) if i != j) / K
    aggregate = sum(gamma * lam[k] * w[k] for k in range(K))
    total = gamma * sum(lam)
    learned = sum(gamma * lam[k] * d[k] for k in range(K)).norm()  # of Eq. 4: gamma g_g, and (1 - gamma) w_g
    shrunk = ((1 - total) * g).norm() if abs(1 - total) > 1e-12 else torch.tensor(0.0)
    r = learned / shrunk if shrunk else torch.tensor(math.inf, dtype=torch.float64)
    norms = torch.stack([x.norm() for x in d])
    return Diagnostics(norms, cosine, torch.as_tensor(coherence), (aggregate - g).norm(), r)


def agree(got, expected, tolerance):
    for field in ("update_norms", "cosine", "coherence", "distance_to_global", "shrink_ratio"):
        a, b = getattr(got, field), torch.as_tensor(getattr(expected, field), dtype=torch.float64)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, f=field: f"{f}: {m}")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@pytest.mark.parametrize("gamma", [1.0, 0.93, 1.2])
def test_against_flattened_models(dtype, tolerance, gamma):
    g, clients = make(5, SHAPES, dtype, scale=0.3)
    lam = [0.1, 0.3, 0.2, 0.15, 0.25]
    agree(diagnostics(fastagg.gram(g, clients), lam, gamma=gamma), naive(g, clients, lam, gamma), tolerance)
    agree(diagnostics(fastagg.gram(g, clients), gamma=gamma), naive(g, clients, [0.2] * 5, gamma), tolerance)
    loose = [0.5, 0.1, 0.0, 0.2, 0.1]  # a sum of 0.9 shrinks as gamma = 0.9 does
    got = diagnostics(fastagg.gram(g, clients), torch.tensor(loose, dtype=torch.float64), gamma=gamma)
    agree(got, naive(g, clients, loose, gamma), tolerance)


def test_a_layerwise_gram_gives_every_layer():
    g, clients = make(4, SHAPES, torch.float64, scale=0.3)
    gram = fastagg.gram(g, clients, layerwise=True)
    weights = torch.softmax(torch.randn(2, 4, dtype=torch.float64), -1)
    for given_weights in (weights, weights[0]):
        got = diagnostics(gram, given_weights, gamma=0.9, class_dist=np.eye(4))
        assert got.cosine.shape == (2, 4, 4)
        assert got.heterogeneity_coherence.shape == (2,)
        for at, layer in enumerate("ab"):
            part = [{k: v for k, v in sd.items() if k.startswith(layer)} for sd in (g, *clients)]
            lam = given_weights[at] if given_weights.dim() == 2 else given_weights
            one = Diagnostics(*(x[at] for x in vars(got).values()))
            agree(one, naive(part[0], part[1:], lam.tolist(), 0.9), 1e-9)
            expected = torch.nn.functional.cosine_similarity(lam, torch.ones(4, dtype=torch.float64), dim=0)
            torch.testing.assert_close(one.heterogeneity_coherence, expected)


def test_heterogeneity_coherence():
    g, clients = make(3, SHAPES)
    gram = fastagg.gram(g, clients)
    assert diagnostics(gram).heterogeneity_coherence is None
    counts = np.array([[30, 10, 0], [0, 20, 20], [5, 0, 45]])
    lam, everyone = [0.5, 0.3, 0.2], [100.0, 150.0, 90.0]
    rows = [[x / sum(row) for x in row] for row in counts.tolist()]
    cohort = [sum(lam[i] * rows[i][j] for i in range(3)) for j in range(3)]

    def cos(p, q):
        return sum(x * y for x, y in zip(p, q, strict=True)) / math.hypot(*p) / math.hypot(*q)

    got = diagnostics(gram, lam, class_dist=counts, population=everyone).heterogeneity_coherence
    assert float(got) == pytest.approx(cos(cohort, everyone), rel=1e-12)
    got = diagnostics(gram, lam, class_dist=counts).heterogeneity_coherence
    assert float(got) == pytest.approx(cos(cohort, counts.sum(0).tolist()), rel=1e-12)
    sizes = counts.sum(1) / counts.sum()  # everyone in the round, by their data: nothing is missing
    assert float(diagnostics(gram, sizes, class_dist=counts).heterogeneity_coherence) == pytest.approx(1, rel=1e-12)
    only = diagnostics(gram, [1, 0, 0], class_dist=np.eye(3), population=[0, 1, 1])
    assert float(only.heterogeneity_coherence) == 0


@settings(deadline=None, max_examples=25, derandomize=True)
@given(K=st.integers(1, 6), seed=st.integers(0, 999), scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e6]))
def test_permuted_with_the_clients_and_within_bounds(K, seed, scale):
    g, clients = make(K, {"w": (30,)}, torch.float64, scale=scale, seed=seed)
    generator = np.random.default_rng(seed)
    lam = generator.dirichlet(np.ones(K))
    order = generator.permutation(K)
    got = diagnostics(fastagg.gram(g, clients), lam)
    other = diagnostics(fastagg.gram(g, [clients[k] for k in order]), lam[order])
    torch.testing.assert_close(other.update_norms, got.update_norms[order])
    torch.testing.assert_close(other.cosine, got.cosine[order][:, order])
    torch.testing.assert_close(other.coherence, got.coherence)
    torch.testing.assert_close(other.distance_to_global, got.distance_to_global)
    assert abs(got.coherence) <= 1 / K
    assert got.distance_to_global <= got.update_norms.max() * (1 + 1e-9)
    assert got.shrink_ratio == math.inf


def test_cohorts_that_degenerate():
    g, clients = make(3, SHAPES)
    zero = {key: torch.zeros_like(value) for key, value in g.items()}
    for center, cohort in ((g, [g, g]), (g, [g, clients[0]]), (g, clients[:1]), (zero, [zero, zero]), (zero, clients)):
        for gamma in (1.0, 0.9):
            got = diagnostics(fastagg.gram(center, cohort), gamma=gamma, class_dist=np.zeros((len(cohort), 2)))
            for value in vars(got).values():
                assert not torch.isnan(value).any()
            assert float(got.heterogeneity_coherence) == 0
    still = diagnostics(fastagg.gram(g, [g, g]))
    assert float(still.coherence) == float(still.distance_to_global) == 0
    same = diagnostics(fastagg.gram(g, [clients[1]] * 3))
    assert float(same.coherence) == pytest.approx((1 - 1 / 3) / 3)
    assert float(same.distance_to_global) == pytest.approx(float((flat(clients[1]) - flat(g)).norm()), rel=1e-6)
    opposite = Gram(torch.tensor([[1.0, 0, 0], [0, 4, -4], [0, -4, 4]], dtype=torch.float64), 9)
    assert float(diagnostics(opposite).coherence) == pytest.approx(-0.25)
    assert float(diagnostics(opposite).distance_to_global) == 0


def test_clients_that_were_left_out_count_for_nothing():
    for layerwise in (False, True):
        gram = fastagg.gram(*make(4, SHAPES, torch.float64), layerwise=layerwise)
        wider = gram.among(6, [4, 0, 5, 2])
        assert wider.absent == (1, 3)
        assert torch.equal(wider.part([4, 0, 5, 2]).matrix, gram.matrix)
        assert torch.equal(wider.model().present().matrix, gram.model().part([1, 3, 0, 2]).matrix)
        assert gram.present() is gram
        ours, theirs = diagnostics(wider), diagnostics(gram)
        torch.testing.assert_close(ours.coherence, theirs.coherence)
        torch.testing.assert_close(ours.distance_to_global, theirs.distance_to_global)
        assert torch.equal(ours.update_norms[..., [4, 0, 5, 2]], theirs.update_norms)
        for name in ("projection", "norms"):
            torch.testing.assert_close(getattr(wider, name)()[..., [4, 0, 5, 2]], getattr(gram, name)())
        torch.testing.assert_close(wider.gaussian()[..., [4, 0, 5, 2], :][..., [4, 0, 5, 2]], gram.gaussian())


def test_bad_arguments():
    gram = fastagg.gram(*make(3, SHAPES))
    with pytest.raises(fastagg.InputError, match=r"weights have shape \(2,\), expected \(3,\)"):
        diagnostics(gram, [0.5, 0.5])
    with pytest.raises(fastagg.InputError, match="weights are not finite"):
        diagnostics(gram, [0.5, 0.5, float("nan")])
    for gamma in (float("nan"), "one", None):
        with pytest.raises(fastagg.InputError, match="gamma="):
            diagnostics(gram, gamma=gamma)
    for rows in (np.ones((2, 4)), np.ones(3), -np.ones((3, 4))):
        with pytest.raises(fastagg.InputError, match=r"class_dist: expected \[3, classes\]"):
            diagnostics(gram, class_dist=rows)
    for everyone in (np.ones(3), -np.ones(4), [1, 1, 1, float("inf")]):
        with pytest.raises(fastagg.InputError, match="population: expected 4"):
            diagnostics(gram, class_dist=np.ones((3, 4)), population=everyone)
