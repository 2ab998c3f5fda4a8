"""What is read off a Gram against the same computed from the flattened models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine.cohort import Cohort
from fastagg._engine.in_memory import InMemory
from helpers.cohort import flat, make


@pytest.fixture(scope="module")
def models():
    g, clients = make(6, {"a.weight": (50,), "b.weight": (30,)}, torch.float64, scale=0.3)
    return fastagg.gram(g, clients), flat(g), torch.stack([flat(sd) for sd in clients])


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_against_the_flattened_models(models):
    gram, g, w = models
    d = w - g
    assert gram.K == 6
    close(gram.norms(), d.norm(dim=1))
    close(gram.distances(), torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist"))
    close(gram.models(), w @ w.T)
    close(gram.cosine(), torch.nn.functional.cosine_similarity(d[:, None], d[None], dim=-1))
    close(gram.cosine("models"), torch.nn.functional.cosine_similarity(w[:, None], w[None], dim=-1))
    close(gram.cosine("global"), torch.nn.functional.cosine_similarity(w, g[None], dim=-1))
    close(gram.gaussian(0.7), torch.exp(-(torch.cdist(w, w) ** 2) / (2 * 0.49)))
    sigma = torch.pdist(w).mean()
    close(gram.gaussian(), torch.exp(-(torch.cdist(w, w) ** 2) / (2 * sigma**2)))
    close(gram.projection(), d @ d.mean(0) / d.mean(0).norm())
    weights = torch.rand(6, dtype=torch.float64)
    close(gram.projection(weights), d @ (weights @ d) / (weights @ d).norm())


def test_layers_have_a_leading_dimension():
    g, clients = make(5, {"a.weight": (50,), "b.weight": (30,)})
    gram = fastagg.gram(g, clients, layerwise=True)
    for at, layer in enumerate("ab"):
        part = [{k: v for k, v in sd.items() if k.startswith(layer)} for sd in (g, *clients)]
        alone = fastagg.gram(part[0], part[1:])
        for read in ("norms", "distances", "cosine", "gaussian", "projection", "models"):
            close(getattr(gram, read)()[at], getattr(alone, read)())
        close(gram.cosine("global")[at], alone.cosine("global"))
    assert torch.equal(gram.model().matrix, fastagg.gram(g, clients).matrix)
    assert "2 layers" in repr(gram)


def agreeing(apart, K=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    g, middle = (torch.randn(2000, generator=generator, dtype=torch.float64) for _ in range(2))
    clients = [middle + apart * torch.randn(2000, generator=generator, dtype=torch.float64) for _ in range(K)]
    return {"w": g.to(dtype)}, [{"w": x.to(dtype)} for x in clients]


class Counting(InMemory):
    def __init__(self):
        self.grams = 0

    def gram(self, table, layerwise):
        self.grams += 1
        return super().gram(table, layerwise)


def distances(g, clients, layerwise=False):
    """As the methods read them, and the number of reads"""
    access = Counting()
    n, ids = np.full(len(clients), 1 / len(clients)), list(range(len(clients)))
    seen = Cohort(access.build(g, clients), n, ids, access)
    gram = seen.distance_gram(layerwise)
    assert seen.distance_gram(layerwise) is gram
    assert torch.equal(seen.gram(layerwise).matrix, fastagg.gram(g, clients, layerwise=layerwise).matrix)
    return gram.distances(), access.grams


@pytest.mark.parametrize(("apart", "reads"), [(1.0, 1), (0.1, 1), (1e-2, 2), (1e-3, 2), (1e-4, 2), (1e-6, 2), (0.0, 2)])
def test_distances_of_clients_that_agree(apart, reads):
    g, clients = agreeing(apart)
    w = torch.stack([flat(sd) for sd in clients])
    found, count = distances(g, clients)
    assert count == reads
    true = torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist")
    torch.testing.assert_close(found, true, rtol=1e-6 if reads == 2 else 2e-5, atol=0)
    _, count = distances(*agreeing(apart, dtype=torch.float64))
    assert count == (2 if apart < 1e-5 else 1)  # float64 has more digits


def test_one_layer_in_which_clients_agree():
    (g, clients), (h, others) = agreeing(1e-4), agreeing(1.0)
    g, *clients = ({"a.w": a["w"], "b.w": b["w"]} for a, b in zip((g, *clients), (h, *others), strict=True))
    found, count = distances(g, clients, layerwise=True)
    assert count == 2
    for layer, key in zip(found, ("a.w", "b.w"), strict=True):
        w = torch.stack([sd[key].double() for sd in clients])
        true = torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist")
        torch.testing.assert_close(layer, true, rtol=1e-6, atol=0)


@pytest.mark.parametrize("magnitude", [1.0, 1e6, 1e12, 1e20, 1e36])
def test_a_client_far_away_takes_no_digits_from_the_others(magnitude):
    for apart in (1.0, 1e-4):
        g, clients = agreeing(apart)
        clients[3]["w"] *= magnitude
        w = torch.stack([flat(sd) for sd in clients])
        found, _ = distances(g, clients)
        true = torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist")
        torch.testing.assert_close(found, true, rtol=1e-6, atol=0)


def test_zero_vectors_give_zero_cosines_and_no_nan():
    g, clients = make(3, {"w": (10,)})
    clients[1]["w"] = g["w"].clone()
    gram = fastagg.gram(g, clients)
    assert (gram.cosine()[1] == 0).all()
    still = fastagg.gram(g, [{"w": g["w"].clone()}] * 3)
    zero = {"w": torch.zeros(10)}
    nothing = fastagg.gram(zero, [zero, {"w": torch.zeros(10)}])
    for each in (gram, still, nothing):
        for value in (each.cosine(), each.cosine("models"), each.cosine("global"), each.gaussian(), each.projection()):
            assert torch.isfinite(value).all()
    assert (still.gaussian() == 1).all()
    assert (nothing.cosine("global") == 0).all()
    assert fastagg.gram(g, clients[:1]).gaussian().tolist() == [[1.0]]


def test_bad_arguments():
    g, clients = make(2, {"w": (3,)})
    gram = fastagg.gram(g, clients)
    with pytest.raises(ValueError, match="expected 'updates', 'models' or 'global'"):
        gram.cosine("weights")
    with pytest.raises(ValueError, match="sigma must not be negative"):
        gram.gaussian(-1.0)


def test_a_client_that_is_not_a_number_is_not_close_to_the_others():
    gram = fastagg.gram({"w": torch.zeros(4)}, [{"w": torch.tensor([float("nan"), 0, 0, 0])}, {"w": torch.ones(4)}])
    assert gram.distances()[0, 1].isnan()


def test_the_narrowest_gaussian():
    g, clients = make(2, {"w": (3,)})
    assert fastagg.gram(g, clients).gaussian(0.0).tolist() == [[1.0, 0.0], [0.0, 1.0]]
