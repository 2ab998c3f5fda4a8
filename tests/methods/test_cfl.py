"""CFL against the paper's conditions and bipartitions, found by trying them all, on flattened models."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg import cfl
from fastagg.methods.cfl import CFL, bipartition
from helpers.cohort import assert_same_bits, assert_unchanged, make, snapshot

SHAPES = {"fc.weight": (9, 5), "fc.bias": (9,), "bn.weight": (9,), "bn.running_mean": (9,), "bn.running_var": (9,)}
PARAMS = ("fc.weight", "fc.bias", "bn.weight")


def cohort(groups, dtype=torch.float64, seed=0, length=2.0, noise=0.05):
    """A client per entry of `groups`: +1 and -1 train one way and the other, 2 and -2 along another direction."""
    g, clients = make(len(groups), SHAPES, dtype, seed=seed)
    rng = torch.Generator().manual_seed(100 + seed)
    axes = {key: torch.randn(2, *shape, generator=rng, dtype=torch.float64) for key, shape in SHAPES.items()}
    size = [math.sqrt(sum(float((axes[key][a] ** 2).sum()) for key in PARAMS)) for a in (0, 1)]
    for k, (group, sd) in enumerate(zip(groups, clients, strict=True)):
        axis = abs(group) - 1
        for key in PARAMS:
            own = torch.randn(SHAPES[key], generator=rng, dtype=torch.float64)
            sd[key] = (g[key] + math.copysign(length / size[axis], group) * axes[key][axis] + noise * own / 8).to(dtype)
        sd["bn.running_var"] = sd["bn.running_var"].abs()
        sd["bn.num_batches_tracked"] = torch.tensor(10 + k)
    g["bn.num_batches_tracked"] = torch.tensor(3)
    return g, clients


def updates(g, clients):
    flat = [torch.cat([sd[key].double().reshape(-1) for key in PARAMS]) for sd in [g, *clients]]
    return [w - flat[0] for w in flat[1:]]


def similarity(d):
    return [[float(a @ b / (a.norm() * b.norm())) for b in d] for a in d]


def optimal(S):
    """argmin over bipartitions of the maximal similarity across: the paper's, by trying all"""
    K = len(S)
    halves = [(0, *rest) for r in range(K - 1) for rest in itertools.combinations(range(1, K), r)]

    def across(half):
        return max(S[i][j] for i in half for j in range(K) if j not in half)

    return set(min(halves, key=across))


def complete(S):
    """Merge the two clusters whose least similar clients are most similar, until two are left: the half of client 0"""
    clusters = [{k} for k in range(len(S))]
    while len(clusters) > 2:
        pairs = itertools.combinations(range(len(clusters)), 2)
        a, b = max(pairs, key=lambda p: min(S[i][j] for i in clusters[p[0]] for j in clusters[p[1]]))
        clusters[a] |= clusters.pop(b)
    return next(c for c in clusters if 0 in c)


def test_halves_equal_those_of_the_definition():
    rng = np.random.default_rng(0)
    differ = 0
    for K in (2, 3, 4, 5, 6, 8, 10):
        for _ in range(6):
            d = [torch.from_numpy(row) for row in rng.normal(size=(K, 4)) + rng.normal(size=4)]
            S = similarity(d)
            single, full = (bipartition(1 - np.array(S), linkage) for linkage in ("single", "complete"))
            assert set(np.flatnonzero(~single)) == optimal(S)
            assert set(np.flatnonzero(~full)) == complete(S)
            differ += not np.array_equal(single, full)
    assert differ > 5


@pytest.mark.parametrize("linkage", ["complete", "single"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_round_equals_the_definition(dtype, linkage):
    groups, sizes = [1, -1, -1, 1, 1, -1], [5, 3, 4, 2, 4, 6]
    g, clients = cohort(groups, dtype)
    before = snapshot(g, *clients)
    results = cfl(g, clients, sizes, eps1=0.5, linkage=linkage)
    assert_unchanged([g, *clients], before)
    d, total = updates(g, clients), sum(sizes)
    assert sum(s / total * x for s, x in zip(sizes, d, strict=True)).norm() < 0.5
    assert max(x.norm() for x in d) > 1.6
    half = (optimal if linkage == "single" else complete)(similarity(d))
    assert half == {0, 3, 4}
    assert results.clusters == [[0, 3, 4], [1, 2, 5]]
    assert isinstance(results, fastagg.Results)
    assert results.mixing.shape == (2, 6)
    for model, row, members in zip(results, results.mixing, results.clusters, strict=True):
        weight = sum(sizes[k] for k in members)
        expected = [sizes[k] / weight if k in members else 0.0 for k in range(6)]
        torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
        assert torch.equal(model.weights, row)
        for key, value in model.items():
            if value.is_floating_point():
                mean = sum(sizes[k] / weight * clients[k][key].double() for k in members)
                rtol = 1e-9 if dtype == torch.float64 else 1e-6
                torch.testing.assert_close(value, mean.to(dtype), rtol=rtol, atol=rtol)
    torch.testing.assert_close(results.gram.matrix, fastagg.gram(g, clients).matrix, rtol=0, atol=0)


def test_both_conditions_are_needed():
    g, clients = cohort([1, -1, 1, -1])
    d = updates(g, clients)
    mean, longest = float(sum(d).norm() / 4), max(float(x.norm()) for x in d)
    for eps1, eps2, split in (
        (mean * 1.001, longest * 0.999, True),
        (mean * 0.999, longest * 0.999, False),
        (mean * 1.001, longest * 1.001, False),
    ):
        results = cfl(g, clients, eps1=eps1, eps2=eps2)
        assert len(results) == len(results.clusters) == (2 if split else 1)
    d = [x * s for x, s in zip(d, (0.7, 0.1, 0.1, 0.1), strict=True)]
    weighted = float(sum(d).norm())
    assert len(cfl(g, clients, [7, 1, 1, 1], eps1=weighted * 1.001)) == 2  # the mean by data shares, not the plain one
    assert len(cfl(g, clients, [7, 1, 1, 1], eps1=weighted * 0.999)) == 1


def test_small_clusters_are_not_split():
    g, clients = cohort([1, -1, 1, -1])
    assert len(cfl(g, clients, min_size=3)) == 2
    assert len(cfl(g, clients, min_size=4)) == 1
    assert len(cfl(g, clients[:2])) == 1
    assert cfl(g, clients[:2], min_size=1).clusters == [[0], [1]]


def test_one_cluster_is_fedavg():
    g, clients = cohort([1, 1, 1])
    [model] = cfl(g, clients, [3, 1, 2])
    assert_same_bits(model, fastagg.fedavg(g, clients, [3, 1, 2]))


def test_plain_means_on_request():
    """The authors' code: sizes count neither in the first condition nor in a cluster's model"""
    g, clients = cohort([1, -1, 1, -1])
    sizes = [97, 1, 1, 1]
    assert len(cfl(g, clients, sizes)) == 1  # by data the mean is long
    models = cfl(g, clients, sizes, weighted=False)
    assert models.clusters == [[0, 2], [1, 3]]
    assert models.mixing.tolist() == [[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]]
    for model, members in zip(models, models.clusters, strict=True):
        mean = fastagg.fedavg(g, [clients[k] for k in members])
        assert all(torch.equal(model[key], mean[key]) for key in PARAMS)


def test_rounds_remember_clusters():
    server = CFL()
    assert server.clusters == []
    g, clients = cohort([1, -1, 1, -1, 1, -1])
    assert server.aggregate(g, clients, client_ids=list("abcdef")).clusters == [list("ace"), list("bdf")]
    other = cohort([1, 1, 1], seed=4)[1]  # alike, but in a cluster each by what came before
    results = server.aggregate(g, other, [1, 2, 3], client_ids=["f", "a", "b"])
    assert results.clusters == [["a"], ["b", "f"]]
    torch.testing.assert_close(results.mixing, torch.tensor([[0, 1, 0], [0.25, 0, 0.75]], dtype=torch.float64))
    assert [sorted(c) for c in server.clusters] == [list("ace"), list("bdf")]
    assert server.aggregate(g, other[:1], client_ids=["d"]).clusters == [["d"]]


def test_a_cluster_splits_again_with_its_own_model():
    """One call per cluster, as documented: the other clusters wait."""
    server = CFL(linkage="single", eps1=0.5)
    g, clients = cohort([1, 1, 1, -1, -1, -1])
    first = server.aggregate(g, clients, client_ids=list("abcxyz"))
    assert first.clusters == [list("abc"), list("xyz")]
    model, others = cohort([2, -2, 2], seed=3)
    second = server.aggregate(model, others, [1, 2, 1], client_ids=list("abc"))
    assert second.clusters == [["a", "c"], ["b"]]
    assert server.clusters == [["a", "c"], list("xyz"), ["b"]]
    third = server.aggregate(g, clients, client_ids=list("abcxyz"))
    assert third.clusters == [["a", "c"], list("xyz"), ["b"]]
    assert third.mixing.shape == (3, 6)


def test_new_clients_join_who_they_are_most_similar_to():
    server = CFL()
    g, clients = cohort([1, 1, -1, -1, 1, -1, -1])
    server.aggregate(g, clients[:4], client_ids=list("abxy"))
    assert server.clusters == [["a", "b"], ["x", "y"]]
    results = server.aggregate(g, [clients[k] for k in (4, 0, 5, 2, 6)], client_ids=["c", "a", "z", "x", "w"])
    assert results.clusters == [["a", "c"], ["w", "x", "z"]]
    assert [sorted(c) for c in server.clusters] == [["a", "b", "c"], ["w", "x", "y", "z"]]
    alone = server.aggregate(g, clients[:1], client_ids=["new"])  # nobody known is there
    assert alone.clusters == [["new"]]
    assert "new" in server.clusters[0]


def test_clients_absent_from_a_split_are_asked_again():
    server = CFL()
    g, clients = cohort([1, 1, -1, -1, -1, 1])
    server.aggregate(g, [clients[0], clients[1], clients[4]], client_ids=["a", "b", "late"], sizes=[1, 1, 9])
    assert len(server.clusters) == 1
    server.aggregate(g, clients[:4], client_ids=list("abxy"))
    assert server.clusters == [["a", "b"], ["x", "y"]]
    results = server.aggregate(g, [clients[0], clients[2], clients[4]], client_ids=["a", "x", "late"])
    assert results.clusters == [["a"], ["late", "x"]]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    st.lists(st.sampled_from([1, -1, 2, -2]), min_size=1, max_size=9),
    st.integers(0, 10**6), st.sampled_from(["complete", "single"]), st.data(),
)  # fmt: skip
def test_properties(groups, seed, linkage, data):
    g, clients = cohort(groups, seed=seed)
    K = len(groups)
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=K, max_size=K))
    order = data.draw(st.permutations(range(K)))
    options = {"eps1": data.draw(st.sampled_from([0.4, 1.0, 100.0])), "linkage": linkage}
    results = CFL(**options).aggregate(g, clients, sizes, list(range(K)))
    permuted = CFL(**options).aggregate(g, [clients[k] for k in order], [sizes[k] for k in order], list(order))
    assert results.clusters == permuted.clusters
    assert torch.equal(permuted.mixing, results.mixing[:, list(order)])
    assert sorted(itertools.chain(*results.clusters)) == list(range(K))
    assert (results.mixing >= 0).all()
    torch.testing.assert_close(results.mixing.sum(1), torch.ones(len(results), dtype=torch.float64), rtol=1e-12, atol=0)
    if len(set(groups)) > 1:  # who trains alike stays together
        for group in set(groups):
            alike = {k for k in range(K) if groups[k] == group}
            assert any(alike <= set(c) for c in results.clusters)
    same = CFL(eps1=100.0, eps2=0.0).aggregate(g, [clients[0]] * K, sizes)
    for model in same:
        for key in PARAMS:
            torch.testing.assert_close(model[key], clients[0][key], rtol=1e-13, atol=0)


def test_degenerate_cohorts():
    g, clients = cohort([1, -1, 1, -1, 2], torch.float32)
    far = [
        {k: v + 1e6 * (j + 1) if v.is_floating_point() else v for k, v in sd.items()} for j, sd in enumerate(clients)
    ]
    zero = {k: torch.zeros_like(v) for k, v in g.items()}
    tiny = [dict(zero, **{"fc.bias": torch.full((9,), (k + 1) * 1e-20)}) for k in range(5)]
    rounds = [(g, clients[:1]), (g, [clients[0]] * 3), (g, [g] * 3), (g, [g, *clients[:3]]), (g, far), (zero, tiny)]
    for start, models in rounds:
        for options in ({}, {"eps1": 1e30, "eps2": 0.0, "min_size": 1}):
            for sizes in (None, [1] + [0] * (len(models) - 1)):
                for linkage in ("complete", "single"):
                    server = CFL(linkage=linkage, **options)
                    for _ in range(3):
                        results = server.aggregate(start, models, sizes)
                        assert torch.isfinite(results.mixing).all()
                        torch.testing.assert_close(results.mixing.sum(1), torch.ones(len(results), dtype=torch.float64))
                        for model in results:
                            assert all(torch.isfinite(value.double()).all() for value in model.values())


def test_out_is_written_in_place():
    g, clients = cohort([1, -1, 1, -1], torch.float32)
    outs = [{key: torch.zeros_like(value) for key, value in g.items()} for _ in range(2)]
    server = CFL()
    with pytest.raises(fastagg.InputError, match="out: 1 state dicts given, 2 needed"):
        server.aggregate(g, clients, out=outs[0])
    assert server.clusters == []  # the round failed: nothing is remembered
    for result, out, expected in zip(server.aggregate(g, clients, out=outs), outs, cfl(g, clients), strict=True):
        assert all(result[key] is out[key] for key in out)
        assert_same_bits(result, expected)


def test_state_round_trip(tmp_path):
    g, clients = cohort([1, -1, 1, -1])
    server, resumed = CFL(), CFL()
    resumed.load_state_dict(server.state_dict())
    server.aggregate(g, clients, client_ids=["a", 7, "b", 9])
    torch.save(server.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.clusters == server.clusters == [[7, 9], ["a", "b"]]  # numbers before strings
    first, second = (s.aggregate(g, clients[:2], client_ids=[9, "b"]) for s in (server, resumed))
    assert first.clusters == second.clusters == [[9], ["b"]]


@pytest.mark.parametrize(
    "change",
    [{"method": "fedavg"}, {"clusters": torch.tensor([0])}, {"clusters": torch.tensor([0.5, 0, 0, 0])},
     {"clusters": torch.tensor([-1, 0, 0, 0])}, {"clusters": torch.tensor([math.nan, 0, 0, 0])}, {"clusters": "abcd"},
     {"client_ids": ["a", "a", "b", "c"]}, {"client_ids": [0.5, 1, 2, 3]}, {"client_ids": None}],
    ids=str,
)  # fmt: skip
def test_a_bad_state_changes_nothing(change):
    g, clients = cohort([1, -1, 1, -1])
    server = CFL()
    server.aggregate(g, clients)
    with pytest.raises(fastagg.InputError, match="cfl state"):
        server.load_state_dict({**server.state_dict(), **change})
    state = server.state_dict()
    del state["clusters"]
    with pytest.raises(fastagg.InputError, match="cfl state"):
        server.load_state_dict(state)
    assert server.clusters == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    "options",
    [{"eps1": -1}, {"eps1": math.nan}, {"eps2": -0.1}, {"eps2": "x"}, {"min_size": 0}, {"min_size": 2.5},
     {"min_size": True}, {"linkage": "average"}],
    ids=str,
)  # fmt: skip
def test_bad_options(options):
    [name] = options
    with pytest.raises(ValueError, match=f"cfl: {name}="):
        CFL(**options)


def test_a_failed_round_changes_nothing():
    g, clients = cohort([1, -1, 1, -1])
    server = CFL()
    server.aggregate(g, clients)
    clients[1]["fc.bias"] = clients[1]["fc.bias"] * math.nan
    with pytest.raises(fastagg.InputError, match=r"client 1 .*'fc\.bias'|client 1: key 'fc\.bias'"):
        server.aggregate(g, clients, client_ids=[5, 6, 7, 8])
    assert server.clusters == [[0, 2], [1, 3]]
