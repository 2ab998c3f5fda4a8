"""Krum and Multi-Krum against scores summed over pairs of flattened models."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg import krum, multi_krum
from fastagg.methods.krum import Krum, MultiKrum
from helpers.cohort import assert_same_bits, assert_unchanged, make_with_batch_norm, median_of, snapshot

SHAPES = {"fc.weight": (9, 5), "fc.bias": (9,), "bn.weight": (9,), "bn.running_mean": (9,), "bn.running_var": (9,)}
PARAMS = ("fc.weight", "fc.bias", "bn.weight")


def cohort(K, dtype=torch.float64, seed=0, scale=1e-1):
    return make_with_batch_norm(K, SHAPES, dtype, seed=seed, scale=scale)


def flat(sd):
    return torch.cat([sd[key].double().reshape(-1) for key in PARAMS])


def agreeing(K, apart, seed=0):
    """Clients at a distance of about 1 from g, and of `apart` from each other; float32"""
    g, clients = cohort(K, torch.float32, seed, scale=1.0)
    middle = {key: g[key] + clients[0][key] for key in PARAMS}
    return g, [sd | {key: middle[key] + apart * sd[key] for key in PARAMS} for sd in clients]


def naive_scores(clients, f):
    w = [flat(sd) for sd in clients]
    K = len(w)
    scores = []
    for i in range(K):
        others = sorted(float(((w[i] - w[j]) ** 2).sum()) for j in range(K) if j != i)
        scores.append(sum(others[: K - f - 2]))
    return scores


def best(scores, m):
    return sorted(range(len(scores)), key=lambda k: scores[k])[:m]


def mean_of(clients, taken):
    out = {}
    for key, value in clients[0].items():
        if key in PARAMS:
            out[key] = torch.stack([clients[k][key] for k in taken]).double().mean(0).to(value.dtype)
        else:
            out[key] = median_of([sd[key] for sd in clients])
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("K", "f"), [(3, 0), (5, 1), (9, 0), (9, 2), (9, 3), (12, 1)])
def test_equals_the_definition(K, f, seed, dtype):
    g, clients = cohort(K, dtype, seed)
    before = snapshot(g, *clients)
    scores = naive_scores(clients, f)
    one = krum(g, clients, f=f)
    assert_same_bits(one, mean_of(clients, best(scores, 1)))  # the very parameters
    assert one.weights.tolist() == [float(k == best(scores, 1)[0]) for k in range(K)]
    for m in (None, 1, 2, K - f):
        several = multi_krum(g, clients, f=f, m=m)
        taken = best(scores, K - f if m is None else m)
        torch.testing.assert_close(
            several.weights, torch.tensor([(k in taken) / len(taken) for k in range(K)], dtype=torch.float64)
        )
        for key, value in mean_of(clients, taken).items():
            torch.testing.assert_close(several[key], value, rtol=1e-9 if dtype == torch.float64 else 1e-6, atol=1e-7)
    assert_unchanged([g, *clients], before)
    torch.testing.assert_close(one.gram.matrix, fastagg.gram(g, clients).matrix, rtol=0, atol=0)


def test_number_of_neighbours():
    """Points 0, 1, 3, 3.5, 7, on a line: with two neighbours 3 wins (4.25), with three 1 does (1 + 4 + 6.25)."""
    g = {"w": torch.zeros(1)}
    clients = [{"w": torch.tensor([x])} for x in (0.0, 1.0, 3.0, 3.5, 7.0)]
    assert krum(g, clients, f=1)["w"].item() == 3.0
    clients = [{"w": torch.tensor([x])} for x in (0.0, 1.0, 2.9, 3.5, 70.0)]
    assert krum(g, clients, f=0)["w"].item() == pytest.approx(1.0)
    assert krum(g, clients, f=1)["w"].item() == pytest.approx(2.9)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(4, 12), st.integers(0, 10**6), st.data())
def test_properties(K, seed, data):
    """From 4 clients on: with 3 there is one neighbour to count, and the two closest to each other always tie."""
    g, clients = cohort(K, seed=seed)
    f = data.draw(st.integers(0, (K - 3) // 2))
    m = data.draw(st.integers(1, K - f))
    order = list(data.draw(st.permutations(range(K))))
    shuffled = [clients[k] for k in order]
    for method, options in ((krum, {"f": f}), (multi_krum, {"f": f, "m": m})):
        result = method(g, clients, **options)
        assert torch.equal(method(g, shuffled, **options).weights, result.weights[order])
        assert (result.weights >= 0).all()
        assert math.isclose(result.weights.sum().item(), 1, rel_tol=1e-12)
        assert torch.equal(method(g, clients, list(range(1, K + 1)), **options).weights, result.weights)
        wide = [{k: g[k] + 8 * (v - g[k]) if k in PARAMS else v for k, v in sd.items()} for sd in clients]
        assert torch.equal(method(g, wide, **options).weights, result.weights)  # scores scale, their order stays
        same = method(g, [clients[0]] * K, **options)
        for key in PARAMS:
            torch.testing.assert_close(same[key], clients[0][key], rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("bad", [1, 2, 3])
def test_resists_clients_at_1e6(bad, dtype):
    K = 2 * bad + 3
    g, clients = cohort(K, dtype)
    for k in range(bad):  # they agree with each other, and what is not a parameter of theirs is no better
        for key, value in clients[k].items():
            clients[k][key] = value + 10**6
        clients[k]["bn.running_var"] = clients[k]["bn.running_var"] * 1e30
    result = krum(g, clients, f=bad)
    assert any(torch.equal(result["fc.weight"], sd["fc.weight"]) for sd in clients[bad:])
    several = multi_krum(g, clients, f=bad)
    assert (several.weights[:bad] == 0).all()
    honest = mean_of(clients, range(bad, K))
    for key, value in honest.items():
        torch.testing.assert_close(several[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("apart", [1e-2, 1e-3, 1e-4, 1e-6])
def test_clients_that_agree_far_better_with_each_other_than_with_the_global_model(apart):
    """||w_i - w_j|| = apart ||w_i - g||: no wrong pick, and one more read of the clients; usually there is none."""
    for seed in range(10):
        g, clients = agreeing(9, apart, seed=seed)
        scores = naive_scores(clients, 2)
        assert krum(g, clients, f=2).weights.argmax() == best(scores, 1)[0]
        taken = multi_krum(g, clients, f=2, m=4).weights.nonzero().flatten().tolist()
        assert taken == sorted(best(scores, 4))
    torch.testing.assert_close(krum(g, clients).gram.matrix, fastagg.gram(g, clients).matrix, rtol=0, atol=0)


@pytest.mark.parametrize("magnitude", [0.0, 1.0, 1e6, 1e12, 1e20, 1e30, 1e36])
@pytest.mark.parametrize("apart", [1.0, 1e-4])
def test_no_magnitude_takes_digits_from_the_others(apart, magnitude):
    """Clients far away, and some close by that would be a bad center for the distances of the others"""
    g, clients = agreeing(11, apart)
    generator = torch.Generator().manual_seed(1)
    for k, size in ((0, magnitude), (1, -magnitude), (2, 50 * apart), (3, 50 * apart)):
        clients[k] = dict(clients[k], **{
            key: clients[k][key] + size * torch.randn(clients[k][key].shape, generator=generator) for key in PARAMS
        })  # fmt: skip
    scores = naive_scores(clients, 4)
    assert krum(g, clients, f=4).weights.argmax() == best(scores, 1)[0]
    assert multi_krum(g, clients, f=4, m=6).weights.nonzero().flatten().tolist() == sorted(best(scores, 6))


def test_degenerate_cohorts():
    g, clients = cohort(5, torch.float32)
    far = [
        {k: v + 1e6 * (j + 1) if v.is_floating_point() else v for k, v in sd.items()} for j, sd in enumerate(clients)
    ]
    zero = {k: torch.zeros_like(v) for k, v in g.items()}
    tiny = [dict(zero, **{"fc.bias": torch.full((9,), (k + 1) * 1e-20)}) for k in range(5)]
    against = [dict(g, **{"fc.bias": g["fc.bias"] + s}) for s in (1, -1, 2, -2, 3)]
    for start, models in (
        (g, [clients[0]] * 5),
        (g, [g] * 5),
        (g, [g, *clients[:4]]),
        (g, far),
        (zero, tiny),
        (g, against),
    ):
        for result in (krum(start, models), multi_krum(start, models), multi_krum(start, models, m=2)):
            assert torch.isfinite(result.weights).all()
            assert all(torch.isfinite(value.double()).all() for value in result.values())
    assert krum(g, [clients[0]] * 5).weights.tolist() == [1, 0, 0, 0, 0]  # ties: the first


def test_too_many_byzantine_clients():
    g, clients = cohort(8)
    for method in (krum, multi_krum):
        with pytest.raises(
            fastagg.InputError, match=f"{method.__name__}: f=3 needs .* 9 clients, got 8; .* possible is 2"
        ):
            method(g, clients, f=3)
        method(g, clients, f=2)
        with pytest.raises(fastagg.InputError, match="got 4; the largest f possible is 0"):
            method(g, clients[:4], f=1)
        for K in (1, 2):
            with pytest.raises(fastagg.InputError, match="at least 3 are needed even with f=0"):
                method(g, clients[:K], f=0)
    with pytest.raises(fastagg.InputError, match="m=7 of 8 clients; expected at most K - f = 6"):
        multi_krum(g, clients, f=2, m=7)


@pytest.mark.parametrize("method", [krum, multi_krum], ids=["krum", "multi_krum"])
def test_out(method):
    g, clients = cohort(6, torch.float32)
    expected = method(g, clients)
    out = {key: torch.zeros_like(value) for key, value in g.items()}
    result = method(g, clients, out=out)
    assert all(result[key] is out[key] for key in out)
    assert_same_bits(result, expected)
    for k in range(6):  # also one that is not taken
        with pytest.raises(fastagg.InputError, match="shares memory with an input"):
            method(g, clients, out=clients[k])


def test_numpy_in_numpy_out():
    g, clients = cohort(6, torch.float32)
    models = [{k: v.numpy() for k, v in sd.items()} for sd in [g, *clients]]
    result = multi_krum(models[0], models[1:])
    assert_same_bits({k: torch.from_numpy(v) for k, v in result.items()}, multi_krum(g, clients))


@pytest.mark.parametrize("f", [-1, 1.0, True, None, "1"])
def test_bad_f(f):
    with pytest.raises(ValueError, match="krum: f="):
        Krum(f=f)
    with pytest.raises(ValueError, match="multi_krum: f="):
        MultiKrum(f=f)


@pytest.mark.parametrize("m", [0, 1.5, True, "1"])
def test_bad_m(m):
    with pytest.raises(ValueError, match="multi_krum: m="):
        MultiKrum(m=m)


def test_a_client_that_is_not_finite_is_named():
    g, clients = cohort(5)
    clients[3]["fc.bias"] = clients[3]["fc.bias"] * math.nan
    with pytest.raises(fastagg.InputError, match=r"client 3: key 'fc\.bias'"):
        krum(g, clients)
