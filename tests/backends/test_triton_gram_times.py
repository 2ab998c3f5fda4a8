"""Products of the Gram with vectors by Triton: on a GPU, or interpreted on CPU tensors where there is none. That its
kernels compile is in test_triton.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastagg._engine import backends
from fastagg._engine import table as tables
from fastagg._engine.backends import plan
from helpers import interpreted
from helpers.cohort import DTYPES
from helpers.interpreted import DEVICE, cohort, moved
from helpers.kernels import check_times, times

pytest.importorskip("triton", reason="triton is not installed")
WHY_NOT = backends.why_not("triton", DEVICE)
pytestmark = [
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),  # interpreted
    pytest.mark.skipif(bool(WHY_NOT), reason=f"triton: {WHY_NOT}"),
]
SMALL = {"a.weight": (3, 43), "a.bias": (3,), "b.weight": (128,)}


@pytest.fixture(autouse=True)
def _round_to_nearest(monkeypatch):
    interpreted.convert_as_gpus_do(monkeypatch)


def backend():
    return backends.load("triton")[0]


def vectors(M, K, seed=0):
    return torch.rand(M, K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 0.2


def poisoned(table, M):
    def fill(t):
        return torch.full_like(t, float("nan") if t.is_floating_point() else 1)

    return [[fill(t) for t in table.clients[0]] for _ in range(M)]


def check(table, dtype, weights, row=None, **options):
    """gram_times with and without a mix, which has the bits of mix"""
    M = weights.shape[-2]
    plain = check_times(backend(), table, dtype, weights, row, **options)
    out, alone = poisoned(table, M), poisoned(table, M)
    assert torch.equal(times(backend(), table, weights, row, out=out, **options), plain)
    stacked, rows = (weights[None], np.zeros(table.T, np.int32)) if row is None else (weights, row)
    backend().mix(table, stacked, rows, alone)
    for a, b in zip(out, alone, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)
    return plain


@pytest.mark.parametrize(
    ("dtype", "K", "M"),
    [(torch.float32, K, M) for K, M in ((1, 1), (2, 3), (5, 3), (15, 1), (16, 1), (20, 3), (33, 1), (130, 1))]
    + [(dtype, K, M) for dtype in DTYPES[1:] for K, M in ((5, 1), (33, 3))],
    ids=str,
)
def test_matches_the_reference(dtype, K, M):
    table = tables.build(*cohort(K, SMALL, dtype, seed=K))
    layers = check(table, dtype, vectors(M, K))
    total = times(backend(), table, vectors(M, K), per_layer=False)
    assert torch.equal(total[0], layers[0] + layers[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tails_and_unaligned_views(dtype):
    shapes = {f"m{n}.weight": (n,) for n in (1, 17, 127, 129, 1025)}
    aligned, shifted = (tables.build(*cohort(3, shapes, dtype, offset=offset)) for offset in (0, 1))
    assert torch.equal(check(aligned, dtype, vectors(1, 3)), check(shifted, dtype, vectors(1, 3)))


@pytest.mark.parametrize("K", [4, 35])
def test_layers_with_weights_of_their_own_and_tensors_that_are_left_out(K):
    g, clients = cohort(K, {"a.weight": (200,), "a.bias": (7,), "b.weight": (140,), "b.bias": (1,)})
    for k, sd in enumerate([g, *clients]):
        sd["c.count"], sd["c.empty"] = torch.tensor(k, device=DEVICE), torch.empty(0, device=DEVICE)
    table = tables.build(g, clients)
    row = (np.arange(table.T) % 3).astype(np.int32)
    weights = torch.stack([vectors(2, K, seed) * 10.0**seed for seed in range(3)])
    layer = table.layout.gram_layer.copy()
    layer[table.layout.keys.index("b.weight")] = -1
    for how in ({}, {"layer": layer, "per_layer": False}, {"layer": np.full_like(layer, -1)}):
        check(table, torch.float32, weights, row, **how)


def test_items_that_walk_through_tensors(monkeypatch):
    monkeypatch.setattr(plan, "PRODUCT_BLOCKS", 2)
    table = tables.build(*cohort(3, {"a.weight": (2050,), "a.bias": (3,), "a.more": (1100,)}))
    weights = torch.stack([vectors(1, 3, seed) * 1e6**seed for seed in range(2)])
    check(table, torch.float32, weights, np.array([0, 1, 1], np.int32))


@pytest.mark.parametrize("ratio", [1e-2, 1e-6])
def test_small_updates_keep_their_precision(ratio):
    check(tables.build(*cohort(20, {"a.weight": (1000,)}, scale=ratio)), torch.float32, vectors(1, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e30, 1e-30, 3e-38])
def test_values_whose_squares_leave_float32(dtype, size):
    g, clients = cohort(5, {"a.weight": (500,), "b.weight": (5,)}, torch.float64, scale=1.0)
    g, *clients = (moved({k: (v * size).to(dtype) for k, v in sd.items()}) for sd in (g, *clients))
    assert check_times(backend(), tables.build(g, clients), dtype, vectors(2, 5)).isfinite().all()


@pytest.mark.parametrize("size", [1e100, 1e-100])
def test_weights_of_any_size(size):
    weights = vectors(2, 5) * torch.tensor([[size], [1.0]], dtype=torch.float64)
    check_times(backend(), tables.build(*cohort(5, SMALL)), torch.float32, weights)


def test_u_that_is_much_smaller_than_the_weights():
    g, clients = cohort(4, SMALL)
    clients[0] = moved(g)  # the client with nearly all of the weight has not changed
    weights = torch.tensor([[0.25, 1e-40, 1e-40, 1e-40]], dtype=torch.float64)
    check_times(backend(), tables.build(g, clients), torch.float32, weights)


def test_frozen_layers_have_zero_rows_and_are_not_done_again(monkeypatch):
    g, clients = cohort(20, SMALL)
    for sd in clients:
        sd["b.weight"] = g["b.weight"].clone()
    flags, launch = [], backend()._launch

    def spy(table, kernel, grid, *args, **constants):
        launch(table, kernel, grid, *args, **constants)
        if constants.get("AGAIN") is False:
            flags.append(args[8].clone())

    monkeypatch.setattr(backend(), "_launch", spy)
    got = times(backend(), tables.build(g, clients), vectors(1, 20))
    assert (got[1, 1:] == 0).all()
    assert got[1, 0, 0] > 0
    assert len(flags) == 1
    assert not flags[0].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clients_that_are_not_finite_show_in_their_own_squares(bad):
    g, clients = cohort(4, SMALL)
    clients[2]["b.weight"][7] = bad
    table, marks = tables.build(g, clients), torch.zeros(3, dtype=torch.uint8, device=DEVICE)
    weights = torch.tensor([[0.5, 0.5, 0.0, 0.5]], dtype=torch.float64)
    got = times(backend(), table, weights, out=poisoned(table, 1), marks=marks)
    assert got[0].isfinite().all()
    assert got[1, :, 0].isfinite().tolist() == [True, True, True, False, True]
    assert marks.tolist() == [0, 0, 1]
