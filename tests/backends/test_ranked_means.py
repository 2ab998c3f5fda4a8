"""Means by rank on GPUs: the CUDA kernels on the emulator, Triton's on a GPU or interpreted on CPU tensors where there
is none. The CPU's kernel is tested in engine/test_ranks.py. That Triton's kernels compile is in test_triton.py, what
nvcc makes of the CUDA kernels in test_cuda_build.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine import backends, ranks
from fastagg._engine import table as tables
from fastagg._engine.backends import plan, reference
from helpers import emulated, interpreted
from helpers.cohort import DTYPES
from helpers.interpreted import DEVICE, moved
from helpers.ranked import INTEGERS, cohort_of, every_mean, ranked_means, same_bits, values

# interpreted
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
CUDA = [(dtype, K) for dtype in DTYPES for K in (1, 4, 5, 8, 13, 16, 20, 24, 30, 32, 33, 64, 65, 100, 130, 260)]
TRITON = [(torch.float32, K) for K in (1, 2, 9, 17, 33)] + [(dtype, 5) for dtype in DTYPES[1:]]


@pytest.fixture(params=["cuda", "triton"])
def gpu(request, monkeypatch):
    return chosen(request.param, monkeypatch)


def chosen(name, monkeypatch):
    """A backend, emulated or interpreted"""
    if name == "cuda":
        return emulated.kernels()
    pytest.importorskip("triton", reason="triton is not installed")
    why = backends.why_not("triton", DEVICE)
    if why:
        pytest.skip(f"triton: {why}")
    interpreted.convert_as_gpus_do(monkeypatch)
    return backends.load("triton")[0]


def on(backend, g, clients):
    return (g, clients) if isinstance(backend, type(emulated.kernels())) else (moved(g), [moved(sd) for sd in clients])


def compare(backend, g, clients, means, **options):
    """With the definition, to the bit: what the backend gives"""
    g, clients = on(backend, g, clients)
    found = ranked_means(backend, g, clients, means, **options)
    expected = ranked_means(reference, g, clients, means, **options)
    assert found[1] == expected[1]
    assert same_bits(found[0], expected[0])
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "K"), [("cuda", *case) for case in CUDA] + [("triton", *case) for case in TRITON], ids=str
)
def test_bits_of_the_definition(monkeypatch, name, dtype, K):
    """Networks of all sizes, merged columns in shared and in device memory; sizes with tails"""
    g, clients = cohort_of(K, (1, 131) if name == "cuda" else (37,), dtype)
    compare(chosen(name, monkeypatch), g, clients, every_mean(K) if name == "cuda" or K < 9 else every_mean(K)[1:6:2])


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(gpu, dtype):
    for K in (1, 4, 7, 40):
        clients = [{"n": x} for x in values(K, 9, dtype, seed=K)]
        if dtype == torch.int64:
            clients[0]["n"][:2] = torch.tensor([-(2**63), 2**63 - 1])
            clients[-1]["n"][:2] = torch.tensor([2**63 - 1, -(2**63)])
        compare(gpu, {"n": torch.zeros(9, dtype=dtype)}, clients, every_mean(K)[:2] + every_mean(K)[-2:])


def test_tensors_have_means_of_their_own_or_are_left_alone(gpu, monkeypatch):
    """Dtypes, tails, views and empty tensors in one model, of which an item walks through several"""
    monkeypatch.setattr(plan, "MIX_ITEMS", 3)
    g, clients, K = {}, [{} for _ in range(5)], 5
    for i, dtype in enumerate(DTYPES):
        models = cohort_of(K, (3, 1030) if i == 0 else (3, 40), dtype, offset=i % 2)
        for sd, more in zip([g, *clients], [models[0], *models[1]], strict=True):
            sd |= {f"{i}.{key}": value for key, value in more.items()}
    for k, sd in enumerate([g, *clients]):
        sd |= {"m.count": torch.tensor(k * k), "m.empty": torch.empty(0), "m.scale": torch.tensor(1.0 - k)}
    means = [[ranks.median(K), ranks.trimmed(K, 1).around(3)], [ranks.RankedMean(0, 0, 2), ranks.maximum(K)]]
    row = [0, 1, -1, 0, 1, 1, 0, -1, 1, 0, 1]
    out, _ = compare(gpu, g, clients, means, row=row)
    assert (out[0][2] == 3).all()


def test_without_a_global_model(gpu):
    _, clients = cohort_of(6, (40,), torch.float32)
    _, clients = on(gpu, clients[0], clients)
    means = [ranks.median(6), ranks.trimmed(6, 1).around(3)]
    assert same_bits(ranked_means(gpu, None, clients, means)[0], ranked_means(reference, None, clients, means)[0])


@pytest.mark.parametrize(
    ("name", "dtype", "K"),
    [("cuda", dtype, K) for dtype in DTYPES for K in (5, 40)] + [("triton", dtype, 5) for dtype in DTYPES[::2]],
    ids=str,
)
def test_values_that_are_not_finite_are_marked(monkeypatch, name, dtype, K):
    gpu = chosen(name, monkeypatch)
    for bad in (math.nan, math.inf, -math.inf):
        for mixing in (None, np.eye(K)[: K - 2]):
            if mixing is not None and bad == math.inf:
                continue
            g, clients = cohort_of(K, (2, 33, 34), dtype)
            clients[K - 1]["33.weight"][32] = bad
            clients[0]["34.weight"][7] = torch.finfo(dtype).max  # which is a number
            g["2.weight"][1] = bad  # of the global model, which is asked for elsewhere
            assert ranked_means(gpu, *on(gpu, g, clients), [ranks.median(K - 2)], mixing=mixing)[1] == [0, 1, 0]


def test_a_mean_neither_overflows_nor_vanishes(gpu):
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        for x in (info.max, info.smallest_normal * info.eps):
            g, clients = cohort_of(5, (3,), dtype)
            for sd in clients:
                sd["3.weight"].fill_(x)
            [[a], [b]], _ = compare(gpu, g, clients, [ranks.trimmed(5, 0), ranks.median(5).around(2)])
            torch.testing.assert_close(a, clients[0]["3.weight"].to(a.device), rtol=info.eps, atol=0)
            assert torch.equal(b.cpu(), clients[0]["3.weight"])


@pytest.mark.parametrize(("name", "K"), [("cuda", 5), ("cuda", 20), ("cuda", 40), ("triton", 5)])
def test_the_order_of_clients_is_of_no_consequence(monkeypatch, name, K):
    """Also where values are the same, or zeros of both signs"""
    backend, generator = chosen(name, monkeypatch), torch.Generator().manual_seed(K)
    clients = [{"w": torch.randint(-2, 3, (100,), generator=generator).float() * 0.5} for _ in range(K)]
    for sd in clients[::2]:
        sd["w"][sd["w"] == 0] = -0.0
    g = {"w": torch.full((100,), -0.0)}
    means = every_mean(K)[1:]
    first, _ = compare(backend, g, clients, means)
    order = torch.randperm(K, generator=generator).tolist()
    assert same_bits(ranked_means(backend, *on(backend, g, [clients[k] for k in order]), means)[0], first)
    assert not any(torch.signbit(t[t == 0]).any() for row in first for t in row)


@pytest.mark.parametrize(
    ("name", "dtype", "K", "R"),
    [("cuda", dtype, K, R) for dtype in DTYPES for K, R in ((1, 1), (5, 5), (9, 3), (20, 20), (40, 40), (70, 70))]
    + [("cuda", torch.float32, 130, 130)]
    + [("triton", torch.float32, 5, 5), ("triton", torch.float32, 17, 9), ("triton", torch.bfloat16, 5, 3)],
    ids=str,
)
def test_means_of_mixed_clients(monkeypatch, name, dtype, K, R):
    """As the CPU's, which adds up the same; of the definition, which rounds products, all but the last digits"""
    backend, mixing = chosen(name, monkeypatch), np.random.default_rng(K).random((R, K)) / K
    mixing[0] /= mixing[0].sum()  # but for rounding, the global model has no part in it
    g, clients = cohort_of(K, (77,), dtype)
    for k, sd in enumerate([g, *clients]):
        sd["count"] = torch.tensor(k)
    means = every_mean(R) if name == "cuda" else every_mean(R)[:3]
    found, _ = ranked_means(backend, *on(backend, g, clients), means, mixing=mixing)
    expected, _ = ranked_means(reference, g, clients, means, mixing=mixing)
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-14}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a[0].cpu(), b[0], **tolerance)
        assert a[1] == b[1]
    if name == "cuda" and backends.cpu._cpu.simd_level() != "baseline":  # which has no fused multiply-add
        assert same_bits(found, ranked_means(backends.cpu, g, clients, means, mixing=mixing)[0])


@pytest.mark.parametrize(("K", "kernel"), [(20, "in_registers"), (40, "merged"), (260, "merged_many"), (-9, "mixed")])
def test_order_of_threads_changes_nothing(cuda, K, kernel):
    mixing = np.random.default_rng(0).random((-K, -K)) if K < 0 else None
    g, clients = cohort_of(abs(K), (150,), torch.float32)
    results = []
    for seed in (0, 1, 2):
        cuda.native.set_order(seed)
        results.append(ranked_means(cuda, g, clients, every_mean(abs(K)), mixing=mixing)[0])
    cuda.native.set_order(0)
    assert all(same_bits(out, results[0]) for out in results[1:])
    assert f"ranked_{kernel}" in cuda.native.launched()


def test_a_block_with_scratch_takes_several_items(cuda):
    """More tensors than blocks"""
    x = torch.randn(130, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    clients = [{f"{i}.weight": value for i, value in enumerate(row.split(1))} for row in x]
    [found], _ = ranked_means(cuda, clients[0], clients, [ranks.trimmed(130, 20)])
    assert cuda.native.ranked_scratch(1, 130, False) > 0
    torch.testing.assert_close(torch.cat(found), x.sort(0).values[20:110].mean(0), rtol=1e-14, atol=1e-15)


def test_one_transfer_and_none_for_tensors_that_stay(gpu, monkeypatch):
    g, clients = on(gpu, *cohort_of(3, (5,), torch.float32))
    sent, send = [], plan._send
    monkeypatch.setattr(plan, "_send", lambda device, packed: sent.append(packed) or send(device, packed))
    monkeypatch.setattr(plan, "_residents", plan._residents.__class__())
    table, out = tables.build(g, clients), [[torch.empty_like(t) for t in g.values()]]
    for number, mean in ((1, ranks.median(3)), (1, ranks.median(3)), (2, ranks.maximum(3))):
        gpu.ranked_means(table, ranks.means(mean), np.zeros(1, np.int32), out)
        assert len(sent) == number
    assert torch.equal(out[0][0], torch.stack([sd["5.weight"] for sd in clients]).amax(0))


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "meamed", "bulyan"])
def test_methods_agree_with_the_cpu(cuda, monkeypatch, name):
    g, clients = cohort_of(9, (150, 3), torch.float32)
    for k, sd in enumerate([g, *clients]):
        sd["bn.num_batches_tracked"] = torch.tensor(k)
    options = {} if name == "median" else {"f": 1}
    got = fastagg.aggregator(name, **options).aggregate(g, clients)
    monkeypatch.setattr(backends, "choose", lambda device, name=None: backends.cpu)
    expected = fastagg.aggregator(name, **options).aggregate(g, clients)
    assert all(torch.equal(got[key], value) for key, value in expected.items())
