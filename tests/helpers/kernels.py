"""What a kernel's answers are held against, whichever backend gives them."""

from __future__ import annotations

import numpy as np
import torch

from fastagg._engine import table as tables
from fastagg._engine.backends import reference
from fastagg._engine.outputs import allocate
from helpers.cohort import flat, make

TAILS = (1, 3, 7, 8, 9, 15, 16, 17, 31, 33)
SHAPES = {f"t{n}.weight": (n,) for n in TAILS} | {
    "big.weight": (150, 127),
    "big.bias": (16385,),
    "empty.weight": (0, 5),
}


def gram_error(got, expected):
    """Largest error of an entry relative to sqrt(G_ii G_jj)"""
    norms = expected.matrix.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = norms[..., :, None] * norms[..., None, :]
    difference = (got.matrix - expected.matrix).abs()
    assert (difference[scale == 0] == 0).all()
    return (difference[scale > 0] / scale[scale > 0]).max().item()


def gram_tolerance(dtype, numel):
    # float64 products summed in any order are off by at most numel * 2^-53; narrower types promise 1e-6
    return numel * 2.0**-53 if dtype == torch.float64 else 1e-6


def poisoned(sd):
    return {key: torch.full_like(value, float("nan")) for key, value in sd.items()}


def assert_mixed(got, clients, weights, dtype):
    """One rounding to the dtype, plus what K wide multiply-adds may lose"""
    stacked = torch.stack([flat(sd) for sd in clients])  # [K, D]
    exact = weights.double() @ stacked
    magnitude = weights.double().abs() @ stacked.abs()
    wide = 2.0**-53 if dtype in (torch.float32, torch.float64) else 2.0**-24
    info = torch.finfo(dtype)
    one_rounding = (info.eps / 2 * exact.abs() * (1 + 2**-10)).clamp(min=info.tiny * info.eps / 2)  # subnormals too
    bound = one_rounding + (len(clients) + 1) * wide * magnitude
    assert ((flat(got) - exact).abs() <= bound).all()


def marked(backend, g, clients, weights, layer=None):
    """Which tensors of a mix, or of a gram_mix, are marked as not finite"""
    table = tables.build(g, clients)
    weights = torch.as_tensor(weights, dtype=torch.float64)[None]
    out, row = allocate(table, weights.shape[1]), np.zeros(table.T, np.int32)
    marks = torch.zeros(table.T, dtype=torch.uint8, device=table.device)
    if layer is None:
        backend.mix(table, weights, row, out, marks)
    else:
        backend.gram_mix(table, layer, len(table.layout.layers), False, weights, row, out, marks)
    return [key for key, mark in zip(table.layout.keys, marks.tolist(), strict=True) if mark]


def check_marks(backend, dtype, M, offset=0, sizes=(1, 33, 1100)):
    shapes = {f"{what}{n}.weight": (n,) for n in sizes for what in ("fine", "nan", "inf", "over")}
    g, clients = make(3, shapes, dtype, offset=offset)
    for n in sizes:
        clients[1][f"nan{n}.weight"][n - 1] = float("nan")
        clients[2][f"inf{n}.weight"][n // 2] = -float("inf")
        for sd in clients:
            sd[f"over{n}.weight"][n // 3] = torch.finfo(dtype).max
    for k, sd in enumerate([g, *clients]):
        sd["count"] = torch.tensor(k)
    weights = torch.full((M, 3), 0.25)
    weights[-1] = torch.tensor([0.9, 0.0, 0.9])  # only the last output overflows; a weight of 0 hides no NaN
    expected = [key for key in g if key[0] in "nio"]
    assert marked(backend, g, clients, weights) == expected
    layer = tables.build(g, clients).layout.gram_layer
    assert marked(backend, g, clients, weights, layer) == expected
    assert marked(backend, g, clients, torch.full((M, 3), 0.25), np.full_like(layer, -1)) == [
        key for key in expected if key[0] != "o"
    ]


def times(backend, table, weights, row=None, *, per_layer=True, layer=None, out=None, marks=None):
    """gram_times of a table, as the engine calls it; weights are [M, K], or [S, M, K] with the row of every tensor"""
    weights = torch.as_tensor(weights, dtype=torch.float64)
    if row is None:
        weights, row = weights[None], np.zeros(table.T, np.int32)
    layer = table.layout.gram_layer if layer is None else layer
    return backend.gram_times(table, layer, len(table.layout.layers), per_layer, weights, row, out, marks)


def times_scale(table, weights, row=None, *, per_layer=True, layer=None):
    """What an error of gram_times is measured by, |r| |r|, |r| |g| and |r| |u_m| of its columns: [L or 1, K+1, 2+M]"""
    weights = torch.as_tensor(weights, dtype=torch.float64)
    if row is None:
        weights, row = weights[None], np.zeros(table.T, np.int32)
    layer = table.layout.gram_layer if layer is None else layer
    squares = torch.zeros(len(table.layout.layers), table.K + 1 + weights.shape[1], dtype=torch.float64)
    for t in np.flatnonzero(layer >= 0):
        g = table.center[t].cpu().double().flatten()
        updates = torch.stack([client[t].cpu().double().flatten() for client in table.clients]) - g
        vectors = torch.cat([g[None], updates, weights[row[t]].cpu() @ updates])
        squares[layer[t]] += (vectors * vectors).sum(1)
    norms = (squares if per_layer else squares.sum(0, keepdim=True)).sqrt()
    rows, us = norms[:, : table.K + 1], norms[:, table.K + 1 :]
    others = torch.cat([rows[:, :1], us], 1)  # [L, 1 + M]
    return torch.cat([(rows * rows)[:, :, None], rows[:, :, None] * others[:, None]], 2)


def check_times(backend, table, dtype, weights, row=None, **options):
    """gram_times against the reference; what it gives"""
    got = times(backend, table, weights, row, **options)
    how = {key: value for key, value in options.items() if key in ("per_layer", "layer")}
    expected = times(reference, table, weights, row, **how)
    scale = times_scale(table, weights, row, **how)
    assert got.dtype == torch.float64
    assert got.shape == expected.shape
    difference = (got - expected).abs().cpu()
    assert (difference[scale == 0] == 0).all()
    tolerance = 4 * gram_tolerance(dtype, int(table.layout.numel.sum()) + table.K) if dtype == torch.float64 else 1e-6
    worst = (difference[scale > 0] / scale[scale > 0]).max().item() if (scale > 0).any() else 0.0
    assert worst <= tolerance, worst
    return got
