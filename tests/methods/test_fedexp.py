"""FedExP against Algorithm 1 of the paper, written out on flattened float64 vectors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg.methods.fedexp import FedExP, extrapolation
from helpers.cohort import assert_same_bits, assert_unchanged, degenerate, make, make_with_batch_norm, snapshot
from helpers.forming import never_formed

SHAPES = {"fc.weight": (9, 5), "fc.bias": (9,), "bn.weight": (9,), "bn.running_mean": (9,), "bn.running_var": (9,)}
PARAMS = ("fc.weight", "fc.bias", "bn.weight")
SIZES = (120, 30, 75, 210)


def cohort(K=4, dtype=torch.float64, seed=0, scale=0.1):
    return make_with_batch_norm(K, SHAPES, dtype, seed=seed, scale=scale)


def flat(sd):
    return torch.cat([sd[key].double().reshape(-1) for key in PARAMS])


def naive(g, clients, sizes, eps):
    """eta = max(1, sum_i p_i ||Delta_i||^2 / (2 (||Delta||^2 + eps))), w = w - eta Delta, with Delta_i = w - w_i"""
    w, p = flat(g), [size / sum(sizes) for size in sizes]
    updates = [w - flat(sd) for sd in clients]
    mean = torch.zeros_like(w)
    squares = 0.0
    for share, update in zip(p, updates, strict=True):
        mean += share * update
        squares += share * sum(float(x) ** 2 for x in update)
    eta = max(1.0, squares / (2 * (sum(float(x) ** 2 for x in mean) + eps)))
    return w - eta * mean, eta


@pytest.mark.parametrize("formed", [True, False], ids=["formed", "products only"])
@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.05])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_equals_the_equation(dtype, rtol, eps, formed):
    g, clients = cohort(12, dtype=dtype)
    sizes = range(5, 17)
    for sd in clients:  # the shared part of the updates is small: clients disagree
        for key in PARAMS:
            sd[key] = sd[key] - 0.9 * (sum(other[key] for other in clients) / 12 - g[key])
    before = snapshot(g, *clients)
    if formed:
        result = fastagg.fedexp(g, clients, sizes, eps=eps)
    else:
        with never_formed():
            result = fastagg.fedexp(g, clients, sizes, eps=eps)
        assert not result.gram.formed
    assert_unchanged([g, *clients], before)
    model, step = naive(g, clients, sizes, eps)
    assert step > 1.5
    assert result.server_lr == pytest.approx(step, rel=rtol)
    torch.testing.assert_close(flat(result), model, rtol=rtol, atol=rtol)
    shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    torch.testing.assert_close(result.weights, shares)
    for key in ("bn.running_mean", "bn.running_var"):  # convex, however long the step is
        mean = torch.tensordot(shares, torch.stack([sd[key] for sd in clients]).double(), 1)
        torch.testing.assert_close(result[key], mean.to(dtype), rtol=2e-7, atol=1e-7)
    assert result["bn.num_batches_tracked"] == max(int(sd["bn.num_batches_tracked"]) for sd in [g, *clients])


def test_clients_that_agree_give_fedavg():
    """The mean of squares is at most twice the square of the mean: the bits of FedAvg"""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        g, clients = make(4, SHAPES, dtype, scale=0.1)
        near = [{key: value + 0.5 for key, value in sd.items()} for sd in clients]
        result = fastagg.fedexp(g, near, SIZES)
        assert result.server_lr == 1
        assert naive(g, near, SIZES, 1e-3)[1] == 1
        assert_same_bits(result, fastagg.fedavg(g, near, SIZES))


def test_clients_at_right_angles():
    """K equal updates at right angles to each other: the step is K / 2"""
    g = {"w": torch.zeros(8, dtype=torch.float64)}
    clients = [{"w": 3.0 * torch.eye(8, dtype=torch.float64)[k]} for k in range(8)]
    result = fastagg.fedexp(g, clients, eps=0.0)
    assert result.server_lr == pytest.approx(4, rel=1e-14)
    torch.testing.assert_close(result["w"], torch.full((8,), 1.5, dtype=torch.float64), rtol=1e-14, atol=0)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(1, 6), st.integers(0, 10**6), st.floats(0, 1), st.data())
def test_properties(K, seed, eps, data):
    g, clients = cohort(K, seed=seed)
    sizes = data.draw(st.lists(st.integers(1, 500), min_size=K, max_size=K))
    order = data.draw(st.permutations(range(K)))
    result = fastagg.fedexp(g, clients, sizes, eps=eps)
    ids = [f"c{k}" for k in range(K)]
    named = fastagg.fedexp(g, clients, sizes, eps=eps, client_ids=ids)
    permuted = fastagg.fedexp(
        g, [clients[k] for k in order], [sizes[k] for k in order], client_ids=[ids[k] for k in order], eps=eps
    )
    assert_same_bits(permuted, named)
    model, step = naive(g, clients, sizes, eps)
    assert result.server_lr == pytest.approx(step, rel=1e-9)
    torch.testing.assert_close(flat(result), model, rtol=1e-10, atol=1e-10)
    assert fastagg.fedexp(g, clients, sizes, eps=1e9).server_lr == 1


@pytest.mark.parametrize("eps", [0.0, 1e-300, 1e-3])
@pytest.mark.parametrize("name", [name for name, _, _ in degenerate({"a": (3,)})])
def test_degenerate_cohorts(name, eps):
    [(g, clients)] = [(g, clients) for n, g, clients in degenerate(SHAPES) if n == name]
    result = fastagg.fedexp(g, clients, eps=eps)
    assert result.server_lr >= 1
    assert all(torch.isfinite(value).all() for value in result.values())
    if name in ("no update", "all zero", "updates cancel", "one is the mean"):
        assert result.server_lr == 1
        assert_same_bits(result, fastagg.fedavg(g, clients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_one_client_and_a_client_far_away(dtype):
    g, clients = cohort(dtype=dtype)
    assert_same_bits(fastagg.fedexp(g, clients[:1]), fastagg.fedavg(g, clients[:1]))
    assert_same_bits(fastagg.fedexp(g, clients[:1] * 3, eps=0.0), fastagg.fedavg(g, clients[:1] * 3))
    far = [{key: value + 1e20 if value.is_floating_point() else value for key, value in clients[0].items()}]
    for models in ([*clients, *far], far, [*clients, *far, *far]):
        result = fastagg.fedexp(g, models)
        model, step = naive(g, models, [1] * len(models), 1e-3)
        assert result.server_lr == pytest.approx(step, rel=1e-6)
        torch.testing.assert_close(flat(result), model, rtol=1e-6, atol=1e14)


def test_steps_of_any_numbers():
    for squares in (0.0, 1e-300, 1.0, 1e300):
        for mean in (-1e-20, 0.0, 1e-310, 1e-12, 1.0, 1e300):
            for eps in (0.0, 5e-324, 1e300):
                step = extrapolation(squares, mean, eps)
                assert math.isfinite(step)
                assert step >= 1


@pytest.mark.parametrize("eps", [-1e-3, math.nan, math.inf, None, "x", True])
def test_bad_eps(eps):
    with pytest.raises(ValueError, match="fedexp: eps="):
        FedExP(eps=eps)
