"""Median, trimmed mean, MeaMed and Phocas against sorted lists of each element."""

import statistics

import numpy as np
import pytest
import torch

import fastagg
from helpers.cohort import assert_same_bits, assert_unchanged, make_with_batch_norm, median_of, snapshot

SHAPES = {"fc.weight": (9, 5), "fc.bias": (9,), "bn.weight": (9,), "bn.running_mean": (9,), "bn.running_var": (9,)}
PARAMS = ("fc.weight", "fc.bias", "bn.weight")


def cohort(K, dtype=torch.float64, seed=0):
    return make_with_batch_norm(K, SHAPES, dtype, seed=seed, scale=0.1)


def nearest(values, center, count):
    return statistics.fmean(sorted(values, key=lambda x: (abs(x - center), x))[:count])


def trimmed(values, f):
    return statistics.fmean(sorted(values)[f : len(values) - f])


NAIVE = {
    "median": lambda x, f: statistics.median(x),
    "trimmed_mean": trimmed,
    "meamed": lambda x, f: nearest(x, statistics.median(x), len(x) - f),
    "phocas": lambda x, f: nearest(x, trimmed(x, f), len(x) - f),
}


def options_of(name, f):
    return {} if name == "median" else {"f": f}


def naive(name, clients, f):
    """Element by element, in float64"""
    model = {}
    for key, value in clients[0].items():
        if key not in PARAMS:
            model[key] = median_of([sd[key] for sd in clients])
            continue
        columns = torch.stack([sd[key].double().reshape(-1) for sd in clients]).T.tolist()
        found = torch.tensor([NAIVE[name](column, f) for column in columns], dtype=torch.float64)
        model[key] = found.reshape(value.shape)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("K", "f"), [(1, 0), (2, 0), (3, 1), (5, 0), (8, 3), (9, 4), (40, 7)])
@pytest.mark.parametrize("name", NAIVE)
def test_every_element(name, K, f, dtype):
    g, clients = cohort(K, dtype)
    before = snapshot(g, *clients)
    result = getattr(fastagg, name)(g, clients, **options_of(name, f))
    assert_unchanged([g, *clients], before)
    expected = naive(name, clients, f)
    for key, value in result.items():
        # one rounding to the dtype, and K additions in float64
        summed = K * 2.0**-53 * float(torch.stack([sd[key] for sd in clients]).abs().max())
        tolerance = {"rtol": torch.finfo(dtype).eps, "atol": summed} if key in PARAMS else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(value.to(expected[key].dtype), expected[key], **tolerance)
    assert result.weights.tolist() == [1 / K] * K
    without = getattr(fastagg, name)(None, clients, **options_of(name, f))
    assert_same_bits(result, without)


@pytest.mark.parametrize("name", NAIVE)
def test_the_order_of_clients_does_not_matter(name):
    g, clients = cohort(7, torch.float32)
    clients[2], clients[5] = dict(clients[1]), {key: -value for key, value in clients[1].items()}
    server = fastagg.aggregator(name, **options_of(name, 2))
    assert_same_bits(server.aggregate(g, clients), server.aggregate(g, clients[::-1]))


@pytest.mark.parametrize("name", NAIVE)
def test_the_bad_stay_without_effect_on_the_range(name):
    """f clients as far away as float32 goes: every element stays among those of the others"""
    g, clients = cohort(9, torch.float32)
    for k, value in enumerate((3e38, -3e38, 1e20)):
        clients[k] = {key: torch.full_like(x, value) if x.is_floating_point() else x for key, x in clients[k].items()}
    result = getattr(fastagg, name)(g, clients, **options_of(name, 3))
    for key in PARAMS:
        honest = torch.stack([sd[key] for sd in clients[3:]])
        assert (result[key] >= honest.amin(0)).all()
        assert (result[key] <= honest.amax(0)).all()


def test_a_share_in_the_place_of_a_number():
    g, clients = cohort(10)
    assert_same_bits(fastagg.trimmed_mean(g, clients, beta=0.25), fastagg.trimmed_mean(g, clients, f=2))
    assert_same_bits(fastagg.trimmed_mean(g, clients, beta=0), fastagg.trimmed_mean(g, clients, f=0))
    assert_same_bits(fastagg.trimmed_mean(g, clients), fastagg.trimmed_mean(g, clients, f=1))
    with pytest.raises(ValueError, match=r"f=1 and beta=0\.1; give one of them"):
        fastagg.trimmed_mean(g, clients, f=1, beta=0.1)
    with pytest.raises(ValueError, match="beta"):
        fastagg.trimmed_mean(g, clients, beta=0.5)


@pytest.mark.parametrize("name", ["trimmed_mean", "meamed", "phocas"])
def test_too_few_clients(name):
    g, clients = cohort(6)
    with pytest.raises(fastagg.InputError, match=rf"{name}: f=3 needs more than 2 f = 6 clients, got 6; .* is 2"):
        getattr(fastagg, name)(g, clients, f=3)
    with pytest.raises(ValueError, match="f"):
        getattr(fastagg, name)(g, clients, f=-1)


def test_no_bad_clients_is_the_mean():
    g, clients = cohort(6)
    mean = fastagg.uniform(g, clients)
    for name in ("trimmed_mean", "meamed", "phocas"):
        result = getattr(fastagg, name)(g, clients, f=0)
        for key in PARAMS:
            torch.testing.assert_close(result[key], mean[key], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_server_optimiser_on_a_median(dtype):
    """Momentum on what the median adds to the global model"""
    g, clients = cohort(5, dtype)
    server = fastagg.aggregator("fedavgm", weights="median", lr=0.5, momentum=0.9)
    m, model = {key: torch.zeros(g[key].shape, dtype=torch.float64) for key in PARAMS}, g
    for _ in range(3):
        result = server.aggregate(model, clients)
        median = fastagg.median(None, clients)
        for key in PARAMS:
            m[key] = 0.9 * m[key] + median[key].double() - model[key].double()
            expected = model[key].double() + 0.5 * m[key]
            torch.testing.assert_close(result[key].double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
        model = {key: value.clone() for key, value in result.items()}


def test_numpy_and_out():
    g, clients = cohort(5, torch.float32)
    arrays = [{key: value.numpy() for key, value in sd.items()} for sd in clients]
    result = fastagg.median(None, arrays)
    assert all(isinstance(value, np.ndarray) for value in result.values())
    out = {key: torch.full_like(value, 7) for key, value in g.items()}
    again = fastagg.median(g, clients, out=out)
    for key, value in again.items():
        assert value is out[key]
        assert np.array_equal(value.numpy(), result[key])
