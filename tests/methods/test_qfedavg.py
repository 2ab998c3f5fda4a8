"""q-FedAvg against Algorithm 2 of the paper, written out on flattened float64 vectors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg.methods.qfedavg import QFedAvg, fair_weights
from helpers.cohort import assert_same_bits, assert_unchanged, degenerate, make_with_batch_norm, snapshot
from helpers.forming import never_formed

SHAPES = {"fc.weight": (9, 5), "fc.bias": (9,), "bn.weight": (9,), "bn.running_mean": (9,), "bn.running_var": (9,)}
PARAMS = ("fc.weight", "fc.bias", "bn.weight")
SIZES = (120, 30, 75, 210)
LOSSES = (0.4, 2.3, 0.9, 1.2)


def cohort(K=4, dtype=torch.float64, seed=0, scale=0.1):
    return make_with_batch_norm(K, SHAPES, dtype, seed=seed, scale=scale)


def flat(sd):
    return torch.cat([sd[key].double().reshape(-1) for key in PARAMS])


def naive(g, clients, p, losses, q, lr):
    """Delta w_k = L (w - w_k), Delta_k = F_k^q Delta w_k, h_k = q F_k^(q-1) ||Delta w_k||^2 + L F_k^q,
    w = w - sum Delta_k / sum h_k; both sums weighted by p"""
    w, L = flat(g), 1 / lr
    total, h = torch.zeros_like(w), 0.0
    for share, sd, F in zip(p, clients, losses, strict=True):
        moved = L * (w - flat(sd))
        total += share * F**q * moved
        h += share * (q * F ** (q - 1) * sum(float(x) ** 2 for x in moved) + L * F**q)
    return w - total / h


@pytest.mark.parametrize("formed", [True, False], ids=["formed", "products only"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("q", "lr"), [(0.0, 0.1), (0.2, 0.1), (1.0, 0.1), (1.0, 3.0), (5.0, 0.01)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-6)], ids=str)
def test_equals_the_algorithm(dtype, rtol, q, lr, weighted, formed):
    g, clients = cohort(dtype=dtype)
    before = snapshot(g, *clients)
    options = {"q": q, "lr": lr, "weighted": weighted, "start_losses": LOSSES}
    if formed:
        result = fastagg.qfedavg(g, clients, SIZES, **options)
    else:
        with never_formed():
            result = fastagg.qfedavg(g, clients, SIZES, **options)
        assert not result.gram.formed
    assert_unchanged([g, *clients], before)
    p = [size / sum(SIZES) for size in SIZES] if weighted else [1] * 4
    expected = naive(g, clients, p, LOSSES, q, lr)
    torch.testing.assert_close(flat(result), expected, rtol=rtol, atol=rtol)
    step = torch.stack([flat(sd) - flat(g) for sd in clients])
    torch.testing.assert_close(result.weights @ step, expected - flat(g), rtol=100 * rtol, atol=rtol)
    shares = torch.tensor(p, dtype=torch.float64) / sum(p)
    for key in ("bn.running_mean", "bn.running_var"):
        mean = torch.tensordot(shares, torch.stack([sd[key] for sd in clients]).double(), 1)
        torch.testing.assert_close(result[key], mean.to(dtype), rtol=2e-7, atol=1e-7)
    assert result["bn.num_batches_tracked"] == max(int(sd["bn.num_batches_tracked"]) for sd in [g, *clients])


@pytest.mark.parametrize("q", [0.1, 1.0, 2.5])
def test_equals_flowers(q):
    flower = pytest.importorskip("flwr.serverapp.strategy.qfedavg")
    whole, others = cohort()
    g, *clients = ({key: sd[key] for key in PARAMS} for sd in (whole, *others))
    arrays = [[sd[key].numpy().copy() for key in PARAMS] for sd in (g, *clients)]  # which it writes to
    found = [flower.compute_delta_and_h(arrays[0], w, q, 1 / 0.05, F) for w, F in zip(arrays[1:], LOSSES, strict=True)]
    total = sum(h for _, h in found)
    result = fastagg.qfedavg(g, clients, q=q, lr=0.05, weighted=False, start_losses=LOSSES)
    for i, key in enumerate(PARAMS):
        expected = arrays[0][i] - sum(delta[i] for delta, _ in found) / total
        torch.testing.assert_close(result[key], torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_without_fairness_it_is_fedavg(dtype):
    g, clients = cohort(dtype=dtype)
    eps = torch.finfo(dtype).eps
    for other, sizes in ((fastagg.fedavg(g, clients, SIZES), SIZES), (fastagg.uniform(g, clients), None)):
        result = fastagg.qfedavg(g, clients, SIZES, q=0.0, weighted=sizes is not None, start_losses=LOSSES)
        torch.testing.assert_close(result.weights, other.weights, rtol=1e-14, atol=0)
        for key in g:
            torch.testing.assert_close(result[key], other[key], rtol=2 * eps, atol=2 * eps)


def test_clients_with_a_large_loss_count_more():
    """Relative weights are p_k F_k^q, whatever the lengths of the updates are"""
    g, clients = cohort()
    result = fastagg.qfedavg(g, clients, SIZES, q=3.0, start_losses=LOSSES)
    relative = torch.tensor([s * loss**3 for s, loss in zip(SIZES, LOSSES, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(result.weights / result.weights.sum(), relative / relative.sum(), rtol=1e-8, atol=0)
    assert result.weights.sum() < 1  # the step is shorter than FedAvg's


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(1, 6), st.integers(0, 10**6), st.floats(0, 4), st.data())
def test_properties(K, seed, q, data):
    g, clients = cohort(K, seed=seed)
    sizes = data.draw(st.lists(st.integers(1, 500), min_size=K, max_size=K))
    losses = data.draw(st.lists(st.floats(0.01, 10), min_size=K, max_size=K))
    order, ids = data.draw(st.permutations(range(K))), [f"c{k}" for k in range(K)]
    result = fastagg.qfedavg(g, clients, sizes, client_ids=ids, q=q, start_losses=losses)
    permuted = fastagg.qfedavg(
        g, [clients[k] for k in order], [sizes[k] for k in order], client_ids=[ids[k] for k in order], q=q,
        start_losses=dict(zip(ids, losses, strict=True)),
    )  # fmt: skip
    assert_same_bits(permuted, result)
    assert (result.weights > 0).all()
    assert result.weights.sum() <= 1 + 1e-12
    p = [size / sum(sizes) for size in sizes]
    torch.testing.assert_close(flat(result), naive(g, clients, p, losses, q, 0.1), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 15.0, 1e6])
@pytest.mark.parametrize("name", [name for name, _, _ in degenerate({"a": (3,)})])
def test_degenerate_cohorts(name, q):
    [(g, clients)] = [(g, clients) for n, g, clients in degenerate(SHAPES) if n == name]
    K = len(clients)
    for losses in ([1.0] * K, [0.0] * K, list(range(K)), [0.0] * (K - 1) + [1e308]):
        result = fastagg.qfedavg(g, clients, q=q, start_losses=losses)
        assert torch.isfinite(result.weights).all()
        assert all(torch.isfinite(value).all() for value in result.values())
    if name in ("no update", "all zero"):  # but for the rounding of weights that sum to 1
        torch.testing.assert_close(flat(result), flat(g), rtol=1e-15, atol=0)


def test_one_client_and_a_client_far_away():
    g, clients = cohort(dtype=torch.float32)
    assert_same_bits(fastagg.qfedavg(g, [g], start_losses=[1.0]), g)
    one = fastagg.qfedavg(g, clients[:1], q=1.0, start_losses=[0.7])
    torch.testing.assert_close(flat(one), naive(g, clients[:1], [1], [0.7], 1.0, 0.1), rtol=1e-6, atol=1e-6)
    far = {key: value + 1e20 if value.is_floating_point() else value for key, value in clients[0].items()}
    result = fastagg.qfedavg(g, [*clients, far], start_losses=[*LOSSES, 1.0])
    torch.testing.assert_close(flat(result), flat(g), rtol=0, atol=1e-6)  # h_k of the far client stops all


def test_weights_of_any_numbers():
    rng, largest = np.random.default_rng(0), np.finfo(np.float64).max
    numbers = np.array([0.0, 5e-324, 1e-100, 1.0, 1e100, 1e308, largest])
    for q in (0.0, 1e-3, 1.0, 1e6):
        for L in (1e-30, 1.0, 1e30):
            for _ in range(50):
                p = rng.choice([0.0, 1.0, 1e-300], 4) + np.eye(4)[0]
                weights = fair_weights(p / p.sum(), rng.choice(numbers, 4), rng.choice(numbers, 4), q, L)
                assert np.isfinite(weights).all()
                assert (weights >= 0).all()
                assert weights.sum() <= 1 + 1e-12


@pytest.mark.parametrize(
    ("losses", "match"),
    [
        (None, "qfedavg needs start_losses: the loss of the global model"),
        ([1, 2, 3], r"start_losses have shape \(3,\), expected one for each of the 4 clients"),
        ([1, 2, -3, 0], "client 2: its entry in start_losses is -3, expected a finite number >= 0"),
        ([1, math.nan, 3, 4], "client 1: its entry in start_losses is nan"),
        ([1, 1, 3, math.inf], "client 3: its entry in start_losses is inf"),
    ],
)
def test_bad_losses(losses, match):
    g, clients = cohort()
    with pytest.raises(fastagg.InputError, match=match):
        fastagg.qfedavg(g, clients, SIZES, start_losses=losses)


def test_a_client_with_a_bad_loss_is_dropped():
    g, clients = cohort()
    result = fastagg.qfedavg(g, clients, SIZES, start_losses=[0.4, math.nan, 0.9, 1.2], on_bad_client="drop")
    assert list(result.dropped) == [1]
    rest = [0, 2, 3]
    expected = fastagg.qfedavg(
        g, [clients[k] for k in rest], [SIZES[k] for k in rest], start_losses=[LOSSES[k] for k in rest]
    )
    assert_same_bits(result, expected)


@pytest.mark.parametrize(
    ("option", "value"), [("q", -0.1), ("q", math.nan), ("q", None), ("lr", 0), ("lr", -1.0), ("weighted", "yes")]
)
def test_bad_options(option, value):
    with pytest.raises(ValueError, match=f"qfedavg: {option}="):
        QFedAvg(**{option: value})
