"""FedAvg and the plain mean, their server step and their shrinking factor, against the formula on flattened models."""

from __future__ import annotations

import pytest
import torch

import fastagg
from fastagg._engine import backends
from helpers.cohort import DTYPES, assert_same_bits, assert_unchanged, make, make_with_batch_norm, snapshot

SHAPES = {"a.weight": (30, 20), "a.bias": (30,), "bn.running_mean": (30,), "bn.running_var": (30,), "c.weight": (3, 30)}
SIZES = [3.0, 1.0, 4.0, 1.0, 5.0]
OPTIONS = [(1.0, 1.0), (0.55, 1.0), (1.0, 0.97), (0.5, 0.9), (1.5, 0.95)]
N = {"fedavg": torch.tensor(SIZES, dtype=torch.float64) / 14, "uniform": torch.full((5,), 0.2, dtype=torch.float64)}
both = pytest.mark.parametrize("name", N)


@both
@pytest.mark.parametrize(("server_lr", "gamma"), OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_equation(name, server_lr, gamma, dtype):
    """w = gamma (g + server_lr sum_k n_k (w_k - g)): FedLAW's Eq. 4, parameters only"""
    g, clients = make_with_batch_norm(5, SHAPES, dtype, seed=1, scale=0.1)
    before = snapshot(g, *clients)
    result = getattr(fastagg, name)(g, clients, SIZES, server_lr=server_lr, gamma=gamma)
    assert_unchanged([g, *clients], before)
    torch.testing.assert_close(result.weights, N[name], rtol=1e-15, atol=0)
    for key in SHAPES:
        mean = sum(n * sd[key].double() for n, sd in zip(N[name], clients, strict=True))
        start = g[key].double()
        expected = mean if "running" in key else gamma * (start + server_lr * (mean - start))
        error, about = (result[key].double() - expected).abs(), torch.finfo(dtype)
        least = (
            about.smallest_normal * about.eps + 1e-14
        )  # what float64 sums may differ by, and 16 bits can tell from 0
        assert (error <= about.eps / 2 * expected.abs() + least).all()
    assert result["bn.num_batches_tracked"] == max(sd["bn.num_batches_tracked"] for sd in clients)


@both
def test_the_defaults_are_the_mean_bit_by_bit(name):
    g, clients = make(5, SHAPES)
    sizes = SIZES if name == "fedavg" else None
    expected = fastagg.mix(clients, getattr(fastagg, name)(None, clients, sizes).weights)
    for start in (g, None):
        assert_same_bits(getattr(fastagg, name)(start, clients, sizes), expected)
        assert_same_bits(getattr(fastagg, name)(start, clients, sizes, server_lr=1.0, gamma=1), expected)


def test_uniform_does_not_look_at_sizes():
    g, clients = make(5, SHAPES)
    assert_same_bits(fastagg.uniform(g, clients, SIZES), fastagg.fedavg(g, clients))
    assert_same_bits(fastagg.uniform(g, clients, [0, 0, 1, 0, 0]), fastagg.fedavg(g, clients))
    with pytest.raises(fastagg.BadClientError, match="its entry in sizes is -1"):
        fastagg.uniform(g, clients, [1, -1, 1, 1, 1])


@both
def test_a_step_needs_the_model_it_starts_from(name):
    g, clients = make(3, SHAPES)
    shrunk = getattr(fastagg, name)(None, clients, gamma=0.9)
    assert_same_bits(shrunk, getattr(fastagg, name)(g, clients, gamma=0.9))
    with pytest.raises(fastagg.InputError, match=rf"{name}: the global model is None; server_lr=0.5 is a step from"):
        getattr(fastagg, name)(None, clients, server_lr=0.5)


@both
@pytest.mark.parametrize(
    ("option", "bad"), [("server_lr", 0), ("server_lr", -1), ("gamma", 0), ("gamma", float("nan"))]
)
def test_options_out_of_range(name, option, bad):
    with pytest.raises(ValueError, match=rf"{name}: {option}="):
        fastagg.aggregator(name, **{option: bad})


@both
def test_one_read(name, monkeypatch):
    """Of the clients and the global model together"""
    g, clients = make(5, SHAPES)
    kernels, calls = backends.choose(torch.device("cpu")), []
    for kind in ("gram", "mix", "gram_mix", "gram_times"):
        real = getattr(kernels, kind)
        monkeypatch.setattr(
            kernels, kind, lambda *args, kind=kind, real=real, **more: calls.append(kind) or real(*args, **more)
        )
    result = getattr(fastagg, name)(g, clients, server_lr=0.5, gamma=0.9)
    assert calls == ["mix"]
    assert result.gram is None
