"""Means by rank: the kernel, medians of what is not a parameter, and that bad buffers move no robust method."""

import math
import statistics

import ml_dtypes
import numpy as np
import pytest
import torch

import fastagg
from fastagg import _cpu as native
from fastagg._engine import kernels, ranks
from fastagg._engine import table as tables
from fastagg._engine.in_memory import InMemory
from helpers.cohort import DTYPES, assert_same_bits, median_of
from helpers.every_method import cohort
from helpers.ranked import INTEGERS, every_mean, values

ROBUST = {
    "krum": {"f": 1}, "multi_krum": {"f": 1}, "geometric_median": {"weighted": False}, "centred_clipping": {"tau": 0.5},
    "mda": {"f": 1}, "smea": {"f": 1}, "monna": {"f": 1}, "caf": {"f": 1}, "dnc": {"f": 1}, "foolsgold": {},
    "flame": {}, "median": {}, "trimmed_mean": {"f": 1}, "meamed": {"f": 1}, "phocas": {"f": 1},
}  # fmt: skip


def ranked(clients, *means, backend=None, mixing=None, center=None):
    """The means of tensors, by a backend"""
    models = [{"x": value} for value in clients]
    table = tables.build(None if center is None else {"x": center}, models)
    stats = np.array([means], dtype=np.int64)
    row = np.zeros(1, dtype=np.int32)
    return [r["x"] for r in kernels.ranked_means_of(table, stats, row, backend=backend, mixing=mixing)]


def simd_levels():
    """Sets them in turn; conftest.py sets back what there was"""
    for level in native.simd_levels():
        native.set_simd(level)
        if native.simd_level() == level:
            yield level


BACKENDS = ("cpu", "reference")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*DTYPES, *INTEGERS], ids=str)
def test_median_and_maximum(dtype, backend):
    for K in (1, 2, 3, 4, 7, 10):
        clients = values(K, 53, dtype)
        median, maximum = ranked(clients, ranks.median(K), ranks.maximum(K), backend=backend)
        assert torch.equal(median, median_of(clients))
        assert torch.equal(maximum, torch.stack(clients).amax(0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mean_neither_overflows_nor_vanishes(dtype, backend):
    info = torch.finfo(dtype)
    for x in (info.max, info.min, info.smallest_normal, info.smallest_normal * info.eps):
        for K in (2, 3, 5):
            clients = [torch.full((3,), x, dtype=dtype)] * K
            for mean in (ranks.median(K), ranks.trimmed(K, 0), ranks.trimmed(K, 0).around(K - 1)):
                [out] = ranked(clients, mean, backend=backend)
                torch.testing.assert_close(out, clients[0], rtol=info.eps * (K > 2), atol=0)
    for bad in (math.nan, math.inf, -math.inf):
        clients = [torch.zeros(3, dtype=dtype) for _ in range(5)]
        clients[3][1] = bad
        with pytest.raises(fastagg.NonFiniteError, match="client 3: key 'x'"):
            ranked(clients, ranks.median(5), backend=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [1, 2, 3, 5, 8, 16, 17, 20, 31, 32, 33, 47, 64, 65, 100, 129])
def test_every_level_has_the_bits_of_the_definition(K, dtype):
    """Sorting networks of all kinds: in registers, and merged; sizes with tails"""
    for n in (1, 3, 31, 300):
        clients, center = values(K, n, dtype, seed=n), values(1, n, dtype, seed=1000 + n)[0]
        expected = ranked(clients, *every_mean(K), backend="reference", center=center)
        for level in simd_levels():
            found = ranked(clients, *every_mean(K), backend="cpu", center=center)
            for mean, a, b in zip(every_mean(K), found, expected, strict=True):
                assert torch.equal(a, b), (level, n, mean)


@pytest.mark.parametrize("K", [5, 20, 40])
def test_the_order_of_clients_is_of_no_consequence(K):
    """Also where values are the same, or zeros of both signs"""
    generator = torch.Generator().manual_seed(K)
    clients = [torch.randint(-2, 3, (500,), generator=generator).float() * 0.5 for _ in range(K)]
    for value in clients[::2]:
        value[value == 0] = -0.0
    expected = ranked(clients, *every_mean(K), center=torch.zeros(500))
    for seed in range(3):
        order = torch.randperm(K, generator=torch.Generator().manual_seed(seed)).tolist()
        found = ranked([clients[k] for k in order], *every_mean(K), center=torch.zeros(500))
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def naive_nearest(column, center, count):
    """Of one element: the mean of the values nearest to the center, of two equally near ones the lower"""
    chosen = sorted(column, key=lambda x: (abs(x - center), x))[:count]
    return math.fsum(chosen) / count


@pytest.mark.parametrize("K", [1, 4, 9, 40])
def test_means_are_those_of_sorted_lists(K):
    clients = values(K, 40, torch.float64, seed=K)
    clients[-1] = clients[0].clone()  # ties
    center = values(1, 40, torch.float64, seed=99)[0]
    f, columns = (K - 1) // 3, torch.stack(clients).T.tolist()
    means = {
        "median": (ranks.median(K), lambda x, c: statistics.median(x)),
        "trimmed": (ranks.trimmed(K, f), lambda x, c: statistics.fmean(sorted(x)[f : K - f])),
        "around": (ranks.median(K).around(K - f), lambda x, c: naive_nearest(x, statistics.median(x), K - f)),
        "center": (ranks.RankedMean(0, 0, K - f), lambda x, c: naive_nearest(x, c, K - f)),
    }
    for name, (mean, naive) in means.items():
        for backend in BACKENDS:
            [found] = ranked(clients, mean, backend=backend, center=center)
            expected = torch.tensor(
                [naive(x, c) for x, c in zip(columns, center.tolist(), strict=True)], dtype=torch.float64
            )
            torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("K", "R"), [(1, 1), (5, 5), (9, 3), (20, 20), (40, 40)])
def test_means_of_mixed_clients(K, R, dtype):
    """As if the mixed models had been stored, in float64"""
    generator = np.random.default_rng(K)
    mixing = generator.random((R, K)) / K
    clients, center = values(K, 77, dtype), values(1, 77, dtype, seed=5)[0]
    wide = torch.stack(clients).double()
    mixed = torch.from_numpy(mixing) @ wide + (1 - torch.from_numpy(mixing).sum(1))[:, None] * center.double()
    stored = ranked(list(mixed), *every_mean(R), backend="reference", center=center.double())
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-14}
    for backend in BACKENDS:
        for _ in simd_levels() if backend == "cpu" else [0]:
            found = ranked(clients, *every_mean(R), backend=backend, center=center, mixing=mixing)
            for a, b in zip(found, stored, strict=True):
                torch.testing.assert_close(a.double(), b, **tolerance)
    clients[-1][3] = math.inf
    with pytest.raises(fastagg.NonFiniteError, match=f"client {K - 1}: key 'x'"):
        ranked(clients, ranks.median(R), center=center, mixing=mixing)


def poison(clients, bad):
    """What is not a parameter of theirs, as far as it can go"""
    for k in range(bad):
        clients[k] = clients[k] | {
            "bn.running_mean": torch.full((6,), 1e30), "bn.running_var": torch.full((6,), 3e38 if k % 2 else 1e30),
            "bn.num_batches_tracked": torch.tensor(2**62),
        }  # fmt: skip


@pytest.mark.parametrize("wrong_parameters", [False, True])
@pytest.mark.parametrize(("K", "bad"), [(10, 1), (5, 1), (9, 3), (10, 4)])
@pytest.mark.parametrize("name", ROBUST)
def test_bad_buffers_move_no_robust_method(name, K, bad, wrong_parameters):
    g, clients = cohort(K)
    if wrong_parameters:
        for sd in clients[:bad]:
            sd["fc.weight"] += 1e6
    poison(clients, bad)
    options = ROBUST[name] | ({"f": min(bad, (K - 3) // 2)} if "f" in ROBUST[name] else {})
    arrays = [{key: value.numpy() for key, value in sd.items()} for sd in (g, *clients)]
    out = {key: torch.full_like(value, 7) for key, value in g.items()}
    server = fastagg.aggregator(name, **options)
    results = [server.aggregate(g, clients), server.aggregate(g, clients, out=out)]
    results.append({key: torch.from_numpy(x) for key, x in server.aggregate(arrays[0], arrays[1:]).items()})
    assert all(results[1][key] is out[key] for key in out)
    for result in results:
        for key in ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked"):
            honest = torch.stack([sd[key] for sd in clients[bad:]])
            assert (result[key] >= honest.amin(0)).all()
            assert (result[key] <= honest.amax(0)).all()
            assert torch.equal(result[key], median_of([sd[key] for sd in clients]))


@pytest.mark.parametrize("name", ROBUST)
def test_buffers_of_other_dtypes(name):
    """float16 and bfloat16 arrays, and a table of integers and flags"""
    g, clients = cohort(6)
    for k, sd in enumerate((g, *clients)):
        sd["bn.running_mean"] = sd["bn.running_mean"].numpy().astype(ml_dtypes.bfloat16)
        sd["bn.running_var"] = sd["bn.running_var"].half()
        sd["mask"] = torch.tensor([k < 4, k > 1, True])
        sd["count"] = np.array([k, 10 - k], dtype=np.int16)
    result = fastagg.aggregator(name, **ROBUST[name]).aggregate(g, clients)
    mean = median_of([torch.from_numpy(sd["bn.running_mean"].astype(np.float32)).bfloat16() for sd in clients])
    assert torch.equal(torch.from_numpy(result["bn.running_mean"].astype(np.float32)), mean.float())
    assert torch.equal(result["bn.running_var"], median_of([sd["bn.running_var"] for sd in clients]))
    assert result["mask"].tolist() == [False, True, True]
    assert result["count"].tolist() == [3, 6]


def test_clients_without_data_set_no_integers():
    g, clients = cohort(4)
    clients[2]["bn.num_batches_tracked"] = torch.tensor(2**62)
    sizes = [3, 1, 0, 2]
    for name in ("fedavg", "simprox", "fedavgm", "fedamp"):  # plain, with a Gram, with the global model, several models
        found = fastagg.aggregator(name).aggregate(g, clients, sizes, ["d", "b", "c", "a"])
        for model in found if isinstance(found, list) else [found]:
            assert model["bn.num_batches_tracked"] == 14
    assert fastagg.fedavg(g, clients)["bn.num_batches_tracked"] == 2**62


def test_every_client_is_looked_at():
    """Also those that Krum does not take"""
    g, clients = cohort(7)
    clients[4]["conv.weight"] += 1
    clients[4]["bn.running_var"][2] = math.nan
    for name, options in ROBUST.items():
        with pytest.raises(fastagg.NonFiniteError, match=r"client 4: key 'bn.running_var'"):
            fastagg.aggregator(name, **options).aggregate(g, clients)
        found = fastagg.aggregator(name, on_bad_client="drop", **options).aggregate(g, clients)
        assert list(found.dropped) == [4]
        rest = clients[:4] + clients[5:]
        assert_same_bits(found, fastagg.aggregator(name, **options).aggregate(g, rest))


def test_a_layer_that_agrees_does_not_cost_a_read_of_the_others(monkeypatch):
    """Only the layer whose distances have lost their digits is read again."""
    generator = torch.Generator().manual_seed(0)
    g = {"a.weight": torch.randn(50, generator=generator), "b.weight": torch.randn(500, generator=generator)}
    clients = [
        {"a.weight": g["a.weight"] + 1 + 1e-5 * torch.randn(50, generator=generator),
         "b.weight": g["b.weight"] + torch.randn(500, generator=generator)}
        for _ in range(6)
    ]  # fmt: skip
    read, gram = [], InMemory.gram
    monkeypatch.setattr(
        InMemory, "gram", lambda self, t, by: read.append(t.layout.gram_layer.tolist()) or gram(self, t, by)
    )
    result = fastagg.simagg(g, clients)
    assert read == [[0, 1], [0, -1]]
    wide = [{key: value.double() for key, value in sd.items()} for sd in (g, *clients)]
    torch.testing.assert_close(result.weights, fastagg.simagg(wide[0], wide[1:]).weights, rtol=1e-5, atol=0)
