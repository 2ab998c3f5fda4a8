"""Rounds for tests of robust methods: clients with BatchNorm, flattened parameters, and attackers."""

from __future__ import annotations

import math

import pytest
import torch

import fastagg
from helpers.cohort import assert_same_bits, make_with_batch_norm, median_of

SHAPES = {"fc.weight": (9, 5), "fc.bias": (9,), "bn.weight": (9,), "bn.running_mean": (9,), "bn.running_var": (9,)}
PARAMS = ("fc.weight", "fc.bias", "bn.weight")


def cohort(K, dtype=torch.float64, seed=0, scale=0.1):
    return make_with_batch_norm(K, SHAPES, dtype, seed=seed, scale=scale)


def flat(sd):
    """The parameters end to end, float64"""
    return torch.cat([sd[key].double().reshape(-1) for key in PARAMS])


def rows(clients, g=None):
    """The clients' models, or their updates, [K, D]"""
    w = torch.stack([flat(sd) for sd in clients])
    return w if g is None else w - flat(g)


def on_a_line(*places):
    """One parameter"""
    return {"w": torch.zeros(1, dtype=torch.float64)}, [{"w": torch.tensor([float(x)]).double()} for x in places]


def tolerance(dtype):
    """Of weights and parameters: the Gram of float32 models is accurate to 1e-7 of the updates' squares"""
    return {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}


def assert_mixed(result, g, clients, weights):
    """g + sum_k weights_k (w_k - g) for parameters, medians for the rest"""
    dtype = g[PARAMS[0]].dtype
    for key, value in result.items():
        if key in PARAMS:
            updates = torch.stack([sd[key].double() - g[key].double() for sd in clients])
            expected = g[key].double() + torch.tensordot(weights, updates, 1)
            torch.testing.assert_close(value.double(), expected, **tolerance(dtype))
        else:
            assert torch.equal(value, median_of([sd[key] for sd in clients])), key


def far_away(clients, bad, magnitude):
    """The first clients moved by so much, in different directions"""
    generator = torch.Generator().manual_seed(3)
    moved = [
        sd | {key: sd[key] + magnitude * torch.randn(sd[key].shape, generator=generator).to(sd[key]) for key in PARAMS}
        for sd in clients[:bad]
    ]
    return moved + clients[bad:]


def degenerate():
    """Rounds (g, clients) of five in which distances, directions or scales vanish, or are very large"""
    g, clients = cohort(5, torch.float32)
    zero = {key: torch.zeros_like(value) for key, value in g.items()}
    against = [dict(g, **{"fc.bias": g["fc.bias"] + s}) for s in (1, -1, 2, -2, 3)]
    yield g, [dict(clients[0]) for _ in range(5)]
    yield g, [dict(g) for _ in range(5)]
    yield g, [dict(g), *clients[:4]]
    yield zero, [dict(zero, **{"fc.bias": torch.full((9,), (k + 1) * 1e-20)}) for k in range(5)]
    yield g, against
    yield g, against[:2] * 2 + [dict(g)]
    for magnitude in (1e6, 1e20, 1e36):
        yield g, far_away(clients, 2, magnitude)
        yield g, far_away(clients, 5, magnitude)


def check_degenerate(method, **options):
    """Never a NaN, and parameters that do not differ stay what they are"""
    for g, clients in degenerate():
        result = method(g, clients, **options)
        assert torch.isfinite(result.weights).all()
        assert all(torch.isfinite(value.double()).all() for value in result.values())
        if all(torch.equal(flat(sd), flat(clients[0])) for sd in clients) and result.weights.sum() > 1 - 1e-12:
            for key in PARAMS:
                torch.testing.assert_close(result[key], clients[0][key], rtol=1e-6, atol=0)
    g, clients = cohort(1)
    one = method(g, clients, **options | ({"f": 0} if "f" in options else {}))
    torch.testing.assert_close(flat(one), flat(clients[0]), rtol=1e-12, atol=0)


def check_order(method, **options):
    """The clients in another order give the same bits; also if some are the same, or at the same distances"""
    g, clients = cohort(9, torch.float32)
    check_order_of(g, clients, method, **options)
    check_order_of(g, [dict(clients[k % 3]) for k in range(9)], method, **options)
    check_order_of(*on_a_line(0, 1, 2, 3, 4, 5, 6, 7, 8), method, **options)


def check_order_of(g, clients, method, **options):
    K = len(clients)
    ids = [f"client {k}" for k in range(K)]
    expected = method(g, clients, client_ids=ids, **options)
    for seed in range(3):
        order = torch.randperm(K, generator=torch.Generator().manual_seed(seed)).tolist()
        found = method(g, [clients[k] for k in order], client_ids=[ids[k] for k in order], **options)
        assert_same_bits(found, expected)
        assert torch.equal(found.weights, expected.weights[order])
    claimed = method(g, clients, list(range(1, K + 1)), client_ids=ids, **options)  # sizes, which may be any
    assert torch.equal(claimed.weights, expected.weights)


def check_f(method, cls):
    """K >= 2 f + 1, and what is said otherwise"""
    g, clients = cohort(6)
    name = cls.name
    method(g, clients, f=2)
    with pytest.raises(fastagg.InputError, match=f"{name}: f=3 needs .* 7 clients, got 6; the largest f possible is 2"):
        method(g, clients, f=3)
    with pytest.raises(fastagg.InputError, match="got 1; the largest f possible is 0"):
        method(g, clients[:1], f=1)
    assert [cls(f=f).min_clients for f in (0, 1, 4)] == [1, 3, 9]
    for f in (-1, 1.0, True, None, "1"):
        with pytest.raises(ValueError, match=f"{name}: f="):
            cls(f=f)
    assert math.isclose(method(g, clients[:1], f=0).weights.item(), 1)
