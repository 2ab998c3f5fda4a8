"""FLAME against HDBSCAN's hierarchy and clipping of flattened updates; and its clusters against scikit-learn's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg.methods.flame import FLAME, majority
from helpers import robust


def cosine_distances(x):
    lengths = x.norm(dim=1)
    product = lengths[:, None] * lengths
    return 1 - torch.where(product > 0, x @ x.T / torch.where(product > 0, product, 1.0), 0.0)


def components(distance, width):
    """Sets of clients that are connected by pairs within so much"""
    left, found = set(range(len(distance))), []
    while left:
        part, todo = set(), [min(left)]
        while todo:
            i = todo.pop()
            part.add(i)
            todo += [j for j in left - part if distance[i][j] <= width]
        left -= part
        found.append(part)
    return found


def cluster(distance):
    """What remains of the one cluster until it falls apart into pieces that are all too small"""
    K = len(distance)
    inside = set(range(K))
    for width in sorted({float(distance[i][j]) for i in range(K) for j in range(i)}, reverse=True):
        large = [part for part in components(distance, width) if len(part) >= K // 2 + 1]
        if not large:
            break
        [inside] = large
    return inside


def flame(x, d):
    """The weights of updates d, clustered by the cosine distances of x"""
    inside = cluster(cosine_distances(x))
    lengths = d.norm(dim=1)
    s = lengths.quantile(0.5)
    clipped = [min(1.0, float(s / length)) if length else 1.0 for length in lengths]
    return torch.tensor([(k in inside) * c / len(inside) for k, c in enumerate(clipped)], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("of", ["updates", "models"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("K", [2, 3, 6, 9, 12])
def test_equals_the_definition(K, seed, of, dtype):
    g, clients = robust.cohort(K, dtype, seed)
    d, w = robust.rows(clients, g), robust.rows(clients)
    weights = flame(d if of == "updates" else w, d)
    result = fastagg.flame(g, clients, of=of)
    torch.testing.assert_close(result.weights, weights, **robust.tolerance(dtype))
    robust.assert_mixed(result, g, clients, weights)
    assert (weights > 0).sum() > K / 2


@pytest.mark.parametrize("scale", [1e-2, 1e-4])
def test_models_that_are_nearly_parallel(scale):
    """Cosine distances of 1e-8 and less, from a Gram of float32 models that is accurate to 1e-7"""
    for seed in range(5):
        g, clients = robust.cohort(9, torch.float32, seed, scale=scale)
        w = robust.rows(clients)
        assert cosine_distances(w).max() < scale
        inside = cluster(cosine_distances(w))
        assert set(fastagg.flame(g, clients, of="models").weights.nonzero().flatten().tolist()) == inside


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.integers(2, 16), st.integers(0, 10**6), st.booleans())
def test_the_cluster_is_that_of_hdbscan(K, seed, ties):
    """Of scikit-learn, which sees the same distances; with ties, all at the distance of the last one are inside"""
    cluster_module = pytest.importorskip("sklearn.cluster")
    rng = np.random.default_rng(seed)
    distance = rng.integers(1, 6, (K, K)).astype(float) if ties else rng.random((K, K))
    distance = np.triu(distance, 1) + np.triu(distance, 1).T
    inside = majority(distance)
    assert set(np.flatnonzero(inside).tolist()) == cluster(distance)
    assert inside.sum() > K / 2
    hdbscan = cluster_module.HDBSCAN(
        metric="precomputed", min_cluster_size=K // 2 + 1, min_samples=1, allow_single_cluster=True, copy=True
    )
    assert (hdbscan.fit_predict(distance) == 0).tolist() == inside.tolist()


@pytest.mark.parametrize("magnitude", [1.0, 1e6, 1e20, 1e36])
def test_attackers_that_point_another_way_are_left_out(magnitude):
    """Attackers who agree with each other, however long their updates are"""
    generator = torch.Generator().manual_seed(0)
    g, clients = robust.cohort(9, torch.float32)
    way, other = ({key: torch.randn(g[key].shape, generator=generator) for key in robust.PARAMS} for _ in range(2))
    for k in range(9):
        move = {key: magnitude * other[key] if k < 4 else 0.1 * way[key] for key in way}
        noise = {key: 0.1 * torch.randn(g[key].shape, generator=generator) for key in robust.PARAMS}
        clients[k] = clients[k] | {key: g[key] + move[key] * (1 + noise[key]) for key in way}
    weights = fastagg.flame(g, clients).weights
    assert weights[:4].tolist() == [0] * 4
    assert (weights[4:] > 0).all()


def test_a_client_in_the_cluster_moves_the_model_by_the_median_length_at_most():
    g, clients = robust.cohort(5)
    d = robust.rows(clients, g)
    longer = [dict(g, **{key: g[key] + 1e6 * (clients[0][key] - g[key]) for key in robust.PARAMS}), *clients[1:]]
    result = fastagg.flame(g, [longer[0], *(dict(clients[0]) for _ in range(4))])
    assert result.weights.tolist() == pytest.approx([0.2e-6, 0.2, 0.2, 0.2, 0.2], rel=1e-9)
    torch.testing.assert_close(robust.flat(result), robust.flat(g) + d[0], rtol=1e-9, atol=1e-12)


def test_degenerate_cohorts_and_order():
    for of in ("updates", "models"):
        robust.check_degenerate(fastagg.flame, of=of)
        robust.check_order(fastagg.flame, of=of)


def test_bad_option():
    with pytest.raises(ValueError, match="flame: of='weights'; expected one of 'updates', 'models'"):
        FLAME(of="weights")
