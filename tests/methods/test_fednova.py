"""FedNova against the paper's update rule, with its accumulation vectors a_i written out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg import fednova
from fastagg.methods.fednova import FedNova
from helpers.cohort import assert_same_bits, assert_unchanged, make, snapshot

SHAPES = {"fc.weight": (9, 5), "fc.bias": (9,), "bn.weight": (9,), "bn.running_mean": (9,), "bn.running_var": (9,)}
PARAMS = ("fc.weight", "fc.bias", "bn.weight")
BUFFERS = ("bn.running_mean", "bn.running_var")
SIZES = (120, 30, 75, 210)
STEPS = (7, 1, 40, 13)


def cohort(K=4, dtype=torch.float64, seed=0, scale=1e-1):
    g, clients = make(K, SHAPES, dtype, seed=seed, scale=scale)
    for k, sd in enumerate([g, *clients]):
        sd["bn.running_var"] = sd["bn.running_var"].abs()
        sd["bn.num_batches_tracked"] = torch.tensor(10 + 7 * k % 5)
    return g, clients


def flat(sd, keys=PARAMS):
    return torch.cat([sd[key].double().reshape(-1) for key in keys])


def naive(g, clients, sizes, steps, rho):
    """x - tau_eff sum_i p_i eta d_i, d_i = (x - x_i) / (eta |a_i|_1), a_i = [1 - rho^tau, ..., 1 - rho] / (1 - rho)"""
    x, p = flat(g), [size / sum(sizes) for size in sizes]
    norms = [sum((1 - rho**j) / (1 - rho) for j in range(1, tau + 1)) for tau in steps]
    tau_eff = sum(share * a for share, a in zip(p, norms, strict=True))
    moved = torch.zeros_like(x)
    for share, sd, a in zip(p, clients, norms, strict=True):
        moved += share * (x - flat(sd)) / a
    weights = [tau_eff * share / a for share, a in zip(p, norms, strict=True)]
    return x - tau_eff * moved, torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.999])
def test_equals_the_equation(momentum, dtype):
    g, clients = cohort(dtype=dtype)
    before = snapshot(g, *clients)
    result = fednova(g, clients, SIZES, local_steps=STEPS, momentum=momentum)
    assert_unchanged([g, *clients], before)
    model, weights = naive(g, clients, SIZES, STEPS, momentum)
    rtol = 1e-9 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(flat(result), model, rtol=rtol, atol=rtol)
    torch.testing.assert_close(result.weights, weights, rtol=1e-10, atol=0)
    assert abs(weights.sum().item() - 1) > 0.1
    shares = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    for key in BUFFERS:  # convex, whatever the weights are
        mean = torch.tensordot(shares, torch.stack([sd[key] for sd in clients]).double(), 1)
        torch.testing.assert_close(result[key], mean.to(dtype), rtol=2e-7, atol=1e-7)
    assert (result["bn.running_var"] >= 0).all()
    assert result["bn.num_batches_tracked"] == max(int(sd["bn.num_batches_tracked"]) for sd in [g, *clients])
    assert result.gram is None
    assert all(result[key].dtype == g[key].dtype for key in g)


def test_momentum_near_one():
    """The formula cancels there: at the largest momentum allowed a single step still is one."""
    g, clients = cohort()
    result = fednova(g, clients, SIZES, local_steps=[1, 2, 3, 1000], momentum=0.9999)
    model, weights = naive(g, clients, SIZES, [1, 2, 3, 1000], 0.9999)
    torch.testing.assert_close(result.weights, weights, rtol=1e-9, atol=0)
    torch.testing.assert_close(flat(result), model, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.9]), st.data())
def test_properties(K, seed, momentum, data):
    g, clients = cohort(K, seed=seed)
    numbers = st.lists(st.integers(1, 500), min_size=K, max_size=K)
    sizes, steps = data.draw(numbers), data.draw(numbers)
    order = data.draw(st.permutations(range(K)))
    result = fednova(g, clients, sizes, local_steps=steps, momentum=momentum)
    permuted = fednova(
        g, [clients[k] for k in order], [sizes[k] for k in order], local_steps=[steps[k] for k in order],
        momentum=momentum,
    )  # fmt: skip
    torch.testing.assert_close(permuted.weights, result.weights[list(order)], rtol=1e-12, atol=0)
    torch.testing.assert_close(flat(permuted), flat(result), rtol=1e-11, atol=1e-11)
    assert (result.weights > 0).all()
    equal = fednova(g, clients, sizes, local_steps=[steps[0]] * K, momentum=momentum)  # FedAvg
    torch.testing.assert_close(equal.weights, torch.tensor(sizes).double() / sum(sizes), rtol=1e-12, atol=0)
    torch.testing.assert_close(flat(equal), flat(fastagg.fedavg(g, clients, sizes)), rtol=1e-12, atol=1e-12)
    if momentum == 0:  # only how many steps a client took relative to the others matters
        scaled = fednova(g, clients, sizes, local_steps=[3 * s for s in steps])
        torch.testing.assert_close(scaled.weights, result.weights, rtol=1e-12, atol=0)
    same = fednova(g, [clients[0]] * K, sizes, local_steps=[5] * K, momentum=momentum)
    torch.testing.assert_close(flat(same), flat(clients[0]), rtol=1e-12, atol=1e-12)


def test_degenerate_cohorts():
    g, clients = cohort(dtype=torch.float32)
    far = [{k: v + 1e6 if v.is_floating_point() else v for k, v in sd.items()} for sd in clients]
    for models in (clients[:1], [clients[0]] * 3, [g] * 2, [g, clients[0]], far):
        for steps in (range(1, len(models) + 1), [1e-3 * (k + 1) for k in range(len(models))], [1e9] * len(models)):
            for momentum in (0.0, 0.9):
                result = fednova(g, models, local_steps=list(steps), momentum=momentum)
                assert torch.isfinite(result.weights).all()
                assert all(torch.isfinite(value.double()).all() for value in result.values())
    assert_same_bits(fednova(g, [g] * 2, local_steps=[1, 9]), g)


@pytest.mark.parametrize(
    "kind", [list, torch.tensor, lambda x: torch.tensor(x).numpy()], ids=["list", "torch", "numpy"]
)
def test_steps_in_any_form(kind):
    g, clients = cohort()
    expected = fednova(g, clients, SIZES, local_steps=STEPS)
    assert_same_bits(FedNova().aggregate(g, clients, SIZES, local_steps=kind(list(STEPS))), expected)


def test_out_is_written_in_place():
    g, clients = cohort(dtype=torch.float32)
    out = {key: torch.zeros_like(value) for key, value in g.items()}
    result = fednova(g, clients, SIZES, local_steps=STEPS, out=out)
    assert all(result[key] is out[key] for key in out)
    assert_same_bits(result, fednova(g, clients, SIZES, local_steps=STEPS))


@pytest.mark.parametrize(
    ("steps", "match"),
    [
        (None, "fednova needs local_steps"),
        ([1, 2, 3], r"local_steps have shape \(3,\), expected one for each of the 4 clients"),
        ([1, 2, 3, 0], "client 3: its entry in local_steps is 0, expected a finite number > 0"),
        ([1, -2, 3, 4], "client 1: its entry in local_steps is -2"),
        ([1, 2, math.nan, 4], "client 2: its entry in local_steps is nan"),
        ([math.inf, 2, 3, 4], "client 0: its entry in local_steps is inf"),
        ("many", "local_steps: expected one for each of the 4 clients"),
    ],
)
def test_bad_steps(steps, match):
    g, clients = cohort()
    with pytest.raises(fastagg.InputError, match=match):
        fednova(g, clients, SIZES, local_steps=steps)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bad", [1e308, 1e60, 1e-60, 5e-324, math.nan, 0.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_a_client_with_an_odd_number_of_steps_is_named_or_dropped(dtype, bad, momentum):
    if dtype == torch.float64 and bad > 1e-100 and not (bad == 1e308 and momentum):
        return  # float64 has room for that
    g, clients = cohort(5, dtype)
    ids, steps = ["d", "b", "e", "a", "c"], [7, 5, bad, 9, 6]
    with pytest.raises(fastagg.BadClientError, match=r"client 2 \(id 'e'\)") as caught:
        fednova(g, clients, local_steps=steps, client_ids=ids, momentum=momentum)
    assert caught.value.clients == [2]
    result = fednova(g, clients, local_steps=steps, client_ids=ids, on_bad_client="drop", momentum=momentum)
    assert list(result.dropped) == ["e"]
    rest = [0, 1, 3, 4]
    assert_same_bits(result, fednova(
        g, [clients[k] for k in rest], local_steps=[steps[k] for k in rest], client_ids=[ids[k] for k in rest],
        momentum=momentum))  # fmt: skip


def test_a_client_with_large_values_and_few_steps_is_named():
    g, clients = cohort(5, torch.float32)
    clients[3]["fc.bias"][2] = 3e38
    with pytest.raises(fastagg.NonFiniteError, match=r"client 3: with it, the result: key 'fc.bias' has values"):
        fednova(g, clients, local_steps=[9, 9, 9, 1, 9])
    assert list(fednova(g, clients, local_steps=[9, 9, 9, 1, 9], on_bad_client="drop").dropped) == [3]


@pytest.mark.parametrize("momentum", [-0.1, 1.0, math.nan, None, "x", True])
def test_bad_momentum(momentum):
    with pytest.raises(ValueError, match="fednova: momentum="):
        FedNova(momentum=momentum)


def test_state():
    server = FedNova()
    server.load_state_dict(server.state_dict())
    with pytest.raises(fastagg.InputError, match="fednova state"):
        server.load_state_dict({"method": "fedavg"})


@pytest.mark.parametrize("steps", [1e308, 1e45])
def test_steps_are_blamed_before_a_client_with_the_only_value_of_a_tensor(steps):
    generator = torch.Generator().manual_seed(0)
    g = {"b": torch.zeros(3), "w": torch.randn(200, generator=generator)}
    clients = [{"b": torch.zeros(3), "w": g["w"] + 0.01 * torch.randn(200, generator=generator)} for _ in range(6)]
    clients[1]["b"] += 0.1
    local_steps = [5, 5, 5, steps, 5, 5]
    with pytest.raises(fastagg.NonFiniteError, match=r"^client 3: .*local steps"):
        fastagg.fednova(g, clients, local_steps=local_steps)
    assert list(fastagg.fednova(g, clients, local_steps=local_steps, on_bad_client="drop").dropped) == [3]
