"""The CUDA kernels as they are, run by the emulator. test_kernels.py runs on it too; here is what is special to
GPUs: grids, the order of threads, and the emulator's own promise to show mistakes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine import backends
from fastagg._engine import table as tables
from fastagg._engine.backends import plan
from helpers import emulated
from helpers.cohort import DTYPES, assert_same_bits, assert_unchanged, make, snapshot
from helpers.kernels import gram_error, gram_tolerance, poisoned, times
from helpers.ranked import cohort_of, every_mean, ranked_means


def every_dtype(K):
    """Hundreds of small tensors, two dtypes in a layer, counters, an empty and a 0-d tensor, and a large one"""
    g, clients = {}, [{} for _ in range(K)]
    for n, dtype in enumerate(DTYPES):
        shapes = {f"m{i}.{name}{n}": (1 + 37 * i % 91,) for i in range(40) for name in ("weight", "bias")}
        some, theirs = make(K, shapes | {f"m3.exact{n}": (2048,), f"m3.large{n}": (2500,)}, dtype, seed=n, offset=n % 2)
        g |= some
        for sd, more in zip(clients, theirs, strict=True):
            sd |= more
    for k, sd in enumerate([g, *clients]):
        for i, dtype in enumerate((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)):
            sd[f"m1.count{i}"] = (torch.arange(5) * 3 + 7 * k % 4 - 3).abs().to(dtype)
        sd["m2.empty"], sd["m2.scale"] = torch.empty(0, 3), torch.tensor(1.0 + k)
    return g, clients


@pytest.mark.parametrize("blocks", [1, 5, 2048])
@pytest.mark.parametrize("K", [3, 26])
def test_many_tensors_of_every_dtype_on_several_grids(cuda, monkeypatch, blocks, K):
    monkeypatch.setattr(plan, "PRODUCT_BLOCKS", blocks)
    monkeypatch.setattr(plan, "MIX_ITEMS", blocks)
    g, clients = every_dtype(K)
    before = snapshot(g, *clients)
    exact = fastagg.gram(g, clients, layerwise=True, backend="reference")
    assert gram_error(fastagg.gram(g, clients, layerwise=True), exact) <= 1e-6
    weights = torch.rand(len(exact.layers), 5, K, dtype=torch.float64)
    out = [
        {k: torch.full_like(v, float("nan") if v.is_floating_point() else 0) for k, v in g.items()} for _ in range(5)
    ]
    both, mixed = fastagg.gram_mix(g, clients, weights, layerwise=True, out=out)
    assert gram_error(both, exact) <= 1e-6
    on_cpu = fastagg.mix(clients, weights, layerwise=True, backend="cpu")
    for a, b, c in zip(mixed, on_cpu, fastagg.mix(clients, weights, layerwise=True), strict=True):
        assert_same_bits(a, b)
        assert_same_bits(c, b)
    assert_unchanged([g, *clients], before)


def test_one_transfer_per_call_and_none_for_tensors_that_stay(cuda, monkeypatch):
    g, clients = every_dtype(3)
    sent, launched, send, real = [], [], plan._send, cuda.native

    class Spy:
        def __getattr__(self, name):
            return getattr(real, name)

        def mix(self, *args):
            launched.append("mix")
            real.mix(*args)

    monkeypatch.setattr(cuda, "native", Spy())
    monkeypatch.setattr(plan, "_send", lambda device, packed: sent.append(packed) or send(device, packed))
    monkeypatch.setattr(plan, "_residents", plan._residents.__class__())
    out = {key: torch.empty_like(value) for key, value in g.items()}
    calls = {
        "mix": lambda weights: fastagg.mix(clients, weights, out=out),
        "gram_mix": lambda weights: fastagg.gram_mix(g, clients, weights, out=out),
    }
    for name, call in calls.items():
        weights = torch.rand(3, dtype=torch.float64)
        for transfers in (1, 0):  # addresses, work and weights together; then nothing
            sent.clear(), launched.clear()
            call(weights)
            assert (len(sent), launched) == (transfers, ["mix"])  # one launch, whatever dtypes there are
        before = out["m3.large0"].clone()
        sent.clear()
        call(2 * weights)
        assert [len(packed) for packed in sent] == [32]  # the weights alone
        assert torch.equal(out["m3.large0"], 2 * before), name


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [5, 20, 40, 66])
def test_order_of_threads_changes_nothing(cuda, monkeypatch, dtype, K, tensor_cores):
    monkeypatch.setattr(cuda, "tensor_cores", lambda device: tensor_cores)
    g, clients = make(K, {"a.weight": (1500,), "a.bias": (7,), "b.weight": (33,)}, dtype)
    weights, left = torch.rand(2, K), [v for sd in clients[:2] for v in sd.values()]
    flat = [v for sd in clients for v in sd.values()]
    results = []
    for seed in (0, 0, 1, 2, 3):
        cuda.native.set_order(seed)
        gram, mixed = fastagg.gram_mix(g, clients, weights, out=[poisoned(g), poisoned(g)])
        results.append((gram.matrix, torch.ops.fastagg.dots(left, flat, [0, 0, 1], 2), *mixed))
    cuda.native.set_order(0)
    for matrix, dots, *mixed in results[1:]:
        assert torch.equal(matrix, results[0][0])
        assert torch.equal(dots, results[0][1])
        for a, b in zip(mixed, results[0][2:], strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("K", "M"), [(1, 1), (7, 1), (20, 1), (20, 3), (17, 9), (130, 2), (3, 40)])
def test_dots(cuda, dtype, K, M):
    _, clients = make(K, {"a.weight": (2100,), "b.weight": (33,), "c.weight": (5,)}, dtype, scale=1.0)
    _, left = make(M, {"a.weight": (2100,), "b.weight": (33,), "c.weight": (5,)}, dtype, scale=1.0, seed=1)
    lists = [v for sd in left for v in sd.values()], [v for sd in clients for v in sd.values()], [1, 0, 1], 2
    got = torch.ops.fastagg.dots(*lists)
    w, v = (
        torch.stack([torch.cat([sd[k].double() for k in ("a.weight", "c.weight")]) for sd in x])
        for x in (clients, left)
    )
    size = v.norm(dim=1)[:, None] * w.norm(dim=1)
    assert ((got[1] - v @ w.T).abs() / size).max() <= gram_tolerance(dtype, 2105)


@pytest.mark.parametrize("size", [1e25, 1e-30])
def test_dots_of_values_that_leave_float32(cuda, size):
    x, y = torch.randn(3000) * size, torch.randn(3000)
    got = torch.ops.fastagg.dots([x], [y, x], [0], 1)[0, 0]
    expected = torch.stack([x.double() @ y.double(), x.double() @ x.double()])
    assert (
        (got - expected).abs() <= 1e-6 * x.double().norm() * torch.stack([y.double().norm(), x.double().norm()])
    ).all()


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize(
    ("change", "flagged"),
    [("nothing", 0), ("frozen", 0), ("tiny", 1), ("huge", 1), ("nan", 1)],
)
def test_only_untrusted_items_are_done_again(cuda, monkeypatch, change, flagged, tensor_cores):
    monkeypatch.setattr(cuda, "tensor_cores", lambda device: tensor_cores)
    g, clients = make(4, {"a.weight": (1024,), "b.weight": (1024,)})
    for sd in clients:
        if change == "frozen":
            sd["a.weight"] = g["a.weight"].clone()
        if change == "tiny":
            sd["a.weight"] = g["a.weight"] * 0 + 1e-30 * torch.randn(1024)
    if change == "tiny":
        g["a.weight"].zero_()
    if change in ("huge", "nan"):
        clients[2]["a.weight"][77] = {"huge": 1e25, "nan": float("nan")}[change]
    flags, real = [], cuda.native

    class Spy:
        def __getattr__(self, name):
            return getattr(real, name)

        def products(self, code, work, rows, **options):
            real.products(code, work, rows, **options)
            flags.extend((ctypes.c_int32 * 2).from_address(options["flags"]))

    monkeypatch.setattr(cuda, "native", Spy())
    fastagg.gram(g, clients)
    assert flags == [flagged, 0]


def test_a_client_that_is_not_finite_is_named(cuda):
    g, clients = make(20, {"a.weight": (2000,), "b.weight": (5,)})
    clients[7]["b.weight"][3] = float("nan")
    with pytest.raises(fastagg.InputError, match=r"client 7: key 'b.weight' has values that are not finite"):
        fastagg.fedawa(g, clients)


@pytest.mark.parametrize("name", ["fedavg", "fedawa", "simprox", "fedadam", "krum", "ldawa", "fedamp"])
def test_methods_agree_with_the_cpu(cuda, monkeypatch, name):
    g, clients = make(9, {"a.weight": (1500,), "a.bias": (3,), "bn.running_mean": (7,)}, scale=0.1)
    for k, sd in enumerate([g, *clients]):
        sd["bn.num_batches_tracked"] = torch.tensor(k)
    got = fastagg.aggregator(name).aggregate(g, clients, range(1, 10))
    monkeypatch.setattr(backends, "choose", lambda device, name=None: backends.cpu)
    expected = fastagg.aggregator(name).aggregate(g, clients, range(1, 10))
    if name != "fedamp":  # which gives a model per client
        got, expected = [got], [expected]
    for a, b in zip(got, expected, strict=True):
        for key in b:
            torch.testing.assert_close(a[key], b[key], rtol=1e-6, atol=1e-6)


def test_blocks_fit_on_every_gpu(cuda):
    """Every kernel of the table, with its largest block, on a Turing SM: 1,024 threads, 64 KB of shared memory"""
    for K in (3, 7, 15, 23, 24, 70):
        g, clients = make(K, {"a.weight": (40,)})
        fastagg.gram_mix(g, clients, torch.rand(K))
        fastagg.mix(clients, torch.rand(K))
        fastagg.mix(clients, torch.rand(5, K))
        torch.ops.fastagg.dots(list(g.values()), [v for sd in clients for v in sd.values()], [0], 1)
        table = tables.build(g, clients)
        times(cuda, table, torch.rand(5, K), out=[[torch.empty(40)] for _ in range(5)])
        times(cuda, table, torch.rand(5, K))
    for K in (5, 32, 64, 128, 256, 260):
        ranked_means(cuda, *cohort_of(K, (3,), torch.float64), every_mean(K)[:2])
        ranked_means(cuda, *cohort_of(K, (3,), torch.float32), every_mean(K)[:2])
        ranked_means(cuda, *cohort_of(K, (3,), torch.float32), every_mean(K)[:2], mixing=np.eye(K))
    launched = cuda.native.launched()
    assert {"products", "products_mix", "products_again", "mix", "mix_several", "reduce_slots"} <= launched.keys()
    assert {"times", "times_mix", "times_again"} <= launched.keys()
    assert {
        f"ranked_{how}" for how in ("in_registers", "merged", "merged_many", "mixed", "mixed_many")
    } <= launched.keys()
    for name, (threads, shared) in launched.items():
        assert threads <= 256, name
        assert shared <= 64 << 10, name


# The emulator itself


@pytest.fixture(scope="module")
def racy():
    return emulated.build("_racy", [emulated.HERE / "racy.cu"])


def run(racy, name, seed=0, n=64):
    racy.set_order(seed)
    out = torch.full((n,), -5, dtype=torch.int32)
    racy.run(name, out.data_ptr(), n)
    racy.set_order(0)
    return out


def test_a_race_shows(racy):
    expected = (torch.arange(64, dtype=torch.int32) + 1) % 64
    for seed in range(6):
        assert torch.equal(run(racy, "neighbour", seed), expected)
    assert not torch.equal(run(racy, "race"), expected)
    results = {tuple(run(racy, "race", seed).tolist()) for seed in range(6)}
    assert len(results) > 3


def test_a_barrier_that_some_threads_miss_is_an_error(racy):
    with pytest.raises(
        RuntimeError, match=r"barrier_for_some: a barrier is not reached by all: thread 0 is at .*racy.cu"
    ):
        run(racy, "barrier_for_some")
    with pytest.raises(RuntimeError, match="two_barriers: a barrier is not reached by all"):
        run(racy, "two_barriers")
    with pytest.raises(RuntimeError, match=r"shuffle_for_some: .*thread 3 has ended"):
        run(racy, "shuffle_for_some")
    assert torch.equal(run(racy, "neighbour"), (torch.arange(64, dtype=torch.int32) + 1) % 64)  # and it goes on


def test_shared_memory_begins_as_nan(racy):
    assert run(racy, "unwritten").view(torch.float32).isnan().all()
