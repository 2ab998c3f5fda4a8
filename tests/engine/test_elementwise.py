"""Medians of what is not a parameter, and that clients with bad buffers move no robust method by them."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine import elementwise
from fastagg._engine.in_memory import InMemory
from helpers.cohort import DTYPES, assert_same_bits, median_of
from helpers.every_method import cohort

ROBUST = {
    "krum": {"f": 1}, "multi_krum": {"f": 1}, "geometric_median": {"weighted": False}, "centred_clipping": {"tau": 0.5},
    "mda": {"f": 1}, "smea": {"f": 1}, "monna": {"f": 1}, "caf": {"f": 1}, "dnc": {"f": 1}, "foolsgold": {},
    "flame": {},
}  # fmt: skip
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def values(K, n, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return list(torch.rand(K, n, generator=generator) < 0.5)
    if dtype not in DTYPES:
        return list(torch.randint(0, 100, (K, n), generator=generator).to(dtype))
    return list(torch.randn(K, n, generator=generator, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("compute", ["_numpy", "_torch"])  # the CPU's, and that of other devices
@pytest.mark.parametrize("dtype", [*DTYPES, *INTEGERS], ids=str)
def test_median_and_maximum(dtype, compute, monkeypatch):
    monkeypatch.setattr(elementwise, "_numpy", getattr(elementwise, compute))
    monkeypatch.setattr(elementwise, "AT_ONCE", 100)  # several pieces
    for K in (1, 2, 3, 4, 7, 10):
        clients = values(K, 53, dtype)
        outs = [torch.ones(53, dtype=dtype) for _ in range(2)]
        assert elementwise.combine("median", clients, outs)
        for out in outs:
            assert torch.equal(out, median_of(clients))
        if dtype in INTEGERS:
            assert elementwise.combine("maximum", clients, outs)
            assert torch.equal(outs[1], torch.stack(clients).amax(0))


@pytest.mark.parametrize("compute", ["_numpy", "_torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_of_the_middle_neither_overflows_nor_vanishes(dtype, compute, monkeypatch):
    monkeypatch.setattr(elementwise, "_numpy", getattr(elementwise, compute))
    info = torch.finfo(dtype)
    for x in (info.max, info.min, info.smallest_normal, info.smallest_normal * info.eps):
        clients = [torch.full((3,), x, dtype=dtype)] * 2
        out = torch.zeros(3, dtype=dtype)
        assert elementwise.combine("median", clients, [out])
        assert torch.equal(out, clients[0])
    for bad in (math.nan, math.inf, -math.inf):
        clients = [torch.zeros(3, dtype=dtype) for _ in range(5)]
        clients[3][1] = bad
        assert not elementwise.combine("median", clients, [out])


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
