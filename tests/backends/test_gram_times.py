"""Products of the Gram with vectors, without the Gram: the native kernels against the reference that defines them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from fastagg._engine import backends
from fastagg._engine import table as tables
from fastagg._engine.backends import plan
from helpers.cohort import DTYPES, assert_unchanged, make, snapshot
from helpers.kernels import SHAPES, check_times, times

FEW = {"a.weight": (33,), "b.weight": (1300,)}
each = pytest.mark.parametrize("kernels", ["baseline", "avx2", "avx512", "cuda"], indirect=True)


def backend():
    return backends.choose(torch.device("cpu"))


def vectors(M, K, seed=0):
    return torch.rand(M, K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 0.2


def poisoned(table, M, offset=0):
    """Outputs full of NaN, or of 1 where there are integers, that do not begin where memory is aligned"""
    out = []
    for _ in range(M):
        memory = [torch.ones(t.numel() + offset, dtype=t.dtype) for t in table.clients[0]]
        for x in memory:
            if x.is_floating_point():
                x.fill_(float("nan"))
        out.append([x[offset:].view(t.shape) for x, t in zip(memory, table.clients[0], strict=True)])
    return out


def assert_same_outputs(got, expected):
    for a, b in zip(got, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def mixed(table, weights, row=None, offset=0):
    weights = weights[None] if row is None else weights
    out = poisoned(table, weights.shape[1], offset)
    backend().mix(table, weights, np.zeros(table.T, np.int32) if row is None else row, out)
    return out


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("K", "M"), [(1, 1), (1, 3), (2, 1), (5, 3), (20, 1), (20, 3), (33, 1), (130, 1), (130, 3)])
def test_matches_the_reference(kernels, dtype, K, M):
    shapes = SHAPES if K <= 5 and kernels != "cuda" else FEW | ({"c.weight": (5000,)} if kernels != "cuda" else {})
    g, clients = make(K, shapes, dtype, seed=K)
    before = snapshot(g, *clients)
    table, weights = tables.build(g, clients), vectors(M, K)
    layers = check_times(backend(), table, dtype, weights)
    total = check_times(backend(), table, dtype, weights, per_layer=False)
    in_order = torch.zeros_like(total[0])
    for layer in layers:
        in_order += layer
    assert torch.equal(total[0], in_order)

    out = poisoned(table, M)
    check_times(backend(), table, dtype, weights, out=out)
    assert_same_outputs(out, mixed(table, weights))
    assert_unchanged([g, *clients], before)


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tails(kernels, dtype):
    g, clients = make(3, {f"m{n}.weight": (n,) for n in (*range(1, 20), 31, 33, 63, 65, 127, 129, 255, 257)}, dtype)
    table, weights = tables.build(g, clients), vectors(2, 3)
    out = poisoned(table, 2)
    check_times(backend(), table, dtype, weights, out=out)
    assert_same_outputs(out, mixed(table, weights))


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [4, 19])
def test_layers_with_weights_of_their_own_and_tensors_that_are_left_out(kernels, dtype, K):
    shapes = {"a.weight": (700,), "a.bias": (7,), "b.weight": (1025,), "b.bias": (1,), "c.weight": (60,)}
    g, clients = make(K, shapes, dtype)
    for k, sd in enumerate([g, *clients]):
        sd["c.count"], sd["c.empty"] = torch.tensor(k), torch.empty(0, dtype=dtype)
    table = tables.build(g, clients)
    row = (np.arange(table.T) % 3).astype(np.int32)  # also within a layer
    weights = torch.stack([vectors(2, K, seed) * 10.0**seed for seed in range(3)])
    layer = table.layout.gram_layer.copy()
    layer[table.layout.keys.index("b.weight")] = -1
    for how in ({}, {"per_layer": False}, {"layer": layer}, {"layer": np.full_like(layer, -1)}):
        check_times(backend(), table, dtype, weights, row, **how)
        out = poisoned(table, 2)
        check_times(backend(), table, dtype, weights, row, out=out, **how)
        assert_same_outputs(out, mixed(table, weights, row))


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 3])
def test_unaligned_views(kernels, dtype, offset):
    weights, results = vectors(2, 6), []
    for shift in (offset, 0):
        table = tables.build(*make(6, FEW, dtype, offset=shift))
        out = poisoned(table, 2, shift)
        results.append((check_times(backend(), table, dtype, weights, out=out), out))
        assert_same_outputs(out, mixed(table, weights))
    assert torch.equal(results[0][0], results[1][0])
    assert_same_outputs(results[0][1], results[1][1])


@each
@pytest.mark.parametrize("ratio", [1e-2, 1e-4, 1e-6])
def test_small_updates_keep_their_precision(kernels, ratio):
    table = tables.build(*make(20, {"a.weight": (3000,)}, scale=ratio))
    check_times(backend(), table, torch.float32, vectors(1, 20))
    check_times(backend(), table, torch.float32, vectors(1, 20), out=poisoned(table, 1))


@each
@pytest.mark.parametrize("fill", [0.1, 1 / 3, 0.7])
def test_constant_data_does_not_accumulate_rounding(kernels, fill):
    g = {"w": torch.zeros(20_000)}
    table = tables.build(g, [{"w": torch.full((20_000,), fill)} for _ in range(3)])
    check_times(backend(), table, torch.float32, vectors(1, 3))


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e30, 1e-30, 3e-38])
def test_values_whose_squares_leave_float32(kernels, dtype, size):
    g, clients = make(5, {"a.weight": (1500,), "b.weight": (5,)}, torch.float64, scale=1.0)
    g, *clients = ({k: (v * size).to(dtype) for k, v in sd.items()} for sd in (g, *clients))
    table = tables.build(g, clients)
    assert check_times(backend(), table, dtype, vectors(2, 5)).isfinite().all()


@each
@pytest.mark.parametrize("huge", [1e25, 1e38])
def test_one_huge_client_among_many(kernels, huge):
    g, clients = make(40, {"a.weight": (600,), "b.weight": (600,)})
    clients[17]["a.weight"].clamp_(-3, 3).mul_(huge)
    check_times(backend(), tables.build(g, clients), torch.float32, vectors(1, 40))


@each
def test_difference_that_leaves_float32(kernels):
    g, clients = {"w": torch.full((40,), -3e38)}, [{"w": torch.full((40,), 3e38)}]
    check_times(backend(), tables.build(g, clients), torch.float32, vectors(1, 1))


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e100, 1e-100])
def test_weights_of_any_size(kernels, dtype, size):
    table = tables.build(*make(5, FEW, dtype))
    check_times(backend(), table, dtype, vectors(2, 5) * torch.tensor([[size], [1.0]], dtype=torch.float64))


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_client_that_stands_still_and_has_nearly_all_the_weight(kernels, dtype):
    """What the others add to the sum must not be lost in the digits of its model"""
    g, clients = make(5, FEW, dtype)
    clients[2] = g
    weights = 1e-20 * vectors(1, 5)
    weights[0, 2] = 1.0
    check_times(backend(), tables.build(g, clients, hints=False), dtype, weights)


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_frozen_layers_have_zero_rows(kernels, dtype):
    g, clients = make(4, FEW, dtype)
    for sd in clients:
        sd["b.weight"] = g["b.weight"].clone()
    got = times(backend(), tables.build(g, clients), vectors(1, 4))
    assert (got[1, 1:] == 0).all()
    assert (got[1, 0, :2] > 0).all()
    assert got[1, 0, 2].abs() <= 1e-15 * got[1, 0, 0]  # u may be what rounding leaves of it
    assert (got[0, :, 0] > 0).all()


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_clients_that_are_not_finite_show_in_their_own_squares(kernels, dtype, bad):
    g, clients = make(7, FEW, dtype)
    clients[4]["b.weight"][1299] = bad
    table, weights = tables.build(g, clients), vectors(1, 7)
    weights[0, 4] = 0  # hides nothing
    own, others = 5, [0, 1, 2, 3, 4, 6, 7]
    for out in (None, poisoned(table, 1)):
        marks = torch.zeros(table.T, dtype=torch.uint8)
        got = times(backend(), table, weights, out=out, marks=marks)
        assert got[0].isfinite().all()
        assert not got[1, own, 0].isfinite()
        assert got[1, others, :2].isfinite().all()
        assert marks.tolist() == [0, int(out is not None)]


@each
@pytest.mark.parametrize("offset", [0, 1])
def test_outputs_that_overflow_are_marked(kernels, offset):
    g, clients = make(3, {"a.weight": (40,), "b.weight": (1100,), "c.weight": (9,)}, offset=offset)
    for sd in clients:
        sd["b.weight"][1099] = torch.finfo(torch.float32).max
    table, marks = tables.build(g, clients), torch.zeros(3, dtype=torch.uint8)
    weights = torch.tensor([[0.25] * 3, [0.9] * 3], dtype=torch.float64)  # only the last output overflows
    out = poisoned(table, 2, offset)
    check_times(backend(), table, torch.float32, weights, out=out, marks=marks)
    assert marks.tolist() == [0, 1, 0]
    assert_same_outputs(out, mixed(table, weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [20, 130])
def test_same_bits_for_any_number_of_threads_and_any_cache(dtype, K):
    shapes = {"a.weight": (40000 if K == 20 else 9000,), "a.bias": (7,), "b.weight": (123, 157), "c.weight": (5,)}
    table, weights = tables.build(*make(K, shapes, dtype)), vectors(2, K)
    native, results = backends.cpu._cpu, []
    try:
        for threads, cache in ((1, 0), (2, 0), (4, 0), (2, 65536), (1, 1 << 24)):
            torch.set_num_threads(threads)
            native.set_cache_bytes(cache)
            out = poisoned(table, 2)
            results.append((times(backends.cpu, table, weights, out=out), out))
    finally:
        native.set_cache_bytes(0)
    for products, out in results[1:]:
        assert torch.equal(products, results[0][0])
        assert_same_outputs(out, results[0][1])


# On the emulator


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [5, 40])
def test_order_of_threads_changes_nothing(cuda, dtype, K):
    table, weights = tables.build(*make(K, FEW | {"a.bias": (7,)}, dtype)), vectors(2, K)
    results = []
    for seed in (0, 0, 1, 2, 3):
        cuda.native.set_order(seed)
        out = poisoned(table, 2)
        results.append((times(cuda, table, weights, out=out), out))
    cuda.native.set_order(0)
    for products, out in results[1:]:
        assert torch.equal(products, results[0][0])
        assert_same_outputs(out, results[0][1])


@pytest.mark.parametrize("blocks", [1, 3])
def test_items_that_walk_through_tensors(cuda, monkeypatch, blocks):
    monkeypatch.setattr(plan, "PRODUCT_BLOCKS", blocks)
    g, clients = make(5, {"a.weight": (2050,), "a.bias": (3,), "a.more": (1100,), "b.weight": (9,)})
    table = tables.build(g, clients)
    weights = torch.stack([vectors(2, 5, seed) * 1e6**seed for seed in range(2)])
    row = np.array([0, 1, 1, 0], np.int32)
    check_times(cuda, table, torch.float32, weights, row, out=poisoned(table, 2))


def test_memory_is_written_before_it_is_read(cuda):
    table, weights = tables.build(*make(5, FEW)), vectors(2, 5)
    torch.use_deterministic_algorithms(True)  # new tensors are full of NaN
    try:
        assert torch.empty(3).isnan().all()
        check_times(cuda, table, torch.float32, weights)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("change", "flagged"), [("nothing", 0), ("frozen", 0), ("tiny", 1), ("huge", 1), ("nan", 1), ("tiny u", 1)]
)
def test_only_untrusted_items_are_done_again(cuda, monkeypatch, change, flagged):
    g, clients = make(4, {"a.weight": (1024,), "b.weight": (1024,)})
    weights = torch.full((1, 4), 0.25, dtype=torch.float64)
    for sd in clients:
        if change == "frozen":
            sd["a.weight"] = g["a.weight"].clone()
        if change == "tiny":
            sd["a.weight"] = 1e-30 * torch.randn(1024)
    if change == "tiny":
        g["a.weight"].zero_()
    if change == "tiny u":  # the client with nearly all of the weight has not changed this tensor
        clients[0]["a.weight"] = g["a.weight"].clone()
        weights[0, 1:] = 1e-40
    if change in ("huge", "nan"):
        clients[2]["a.weight"][77] = {"huge": 1e25, "nan": float("nan")}[change]
    flags, real = [], cuda.native

    class Spy:
        def __getattr__(self, name):
            return getattr(real, name)

        def times(self, code, work, rows, **options):
            real.times(code, work, rows, **options)
            flags.extend((ctypes.c_int32 * 2).from_address(options["flags"]))

    monkeypatch.setattr(cuda, "native", Spy())
    table = tables.build(g, clients)
    if change == "nan":
        times(cuda, table, weights)
    else:
        check_times(cuda, table, torch.float32, weights)
    assert flags == [flagged, 0]


def test_one_transfer_and_none_for_tensors_that_stay(cuda, monkeypatch):
    sent, send = [], plan._send
    monkeypatch.setattr(plan, "_send", lambda device, packed: sent.append(packed) or send(device, packed))
    monkeypatch.setattr(plan, "_residents", plan._residents.__class__())
    table, weights = tables.build(*make(3, FEW)), vectors(1, 3)
    for out in (None, poisoned(table, 1)):
        for factor, sizes in ((1, 1), (1, 0), (2, 1)):  # all together; nothing; the new weights alone
            sent.clear()
            times(cuda, table, factor * weights, out=out)
            assert len(sent) == sizes
        assert len(sent[0]) == 32
        weights = 4 * weights
