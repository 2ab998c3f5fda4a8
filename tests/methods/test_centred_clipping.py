"""Centred clipping against the paper's iteration on flattened models."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg import centred_clipping
from fastagg.methods.centred_clipping import CentredClipping
from helpers.cohort import assert_same_bits, assert_unchanged, make_with_batch_norm, median_of, snapshot

SHAPES = {"fc.weight": (9, 5), "fc.bias": (9,), "bn.weight": (9,), "bn.running_mean": (9,), "bn.running_var": (9,)}
PARAMS = ("fc.weight", "fc.bias", "bn.weight")
SIZES = (120, 30, 75, 210, 40)


def cohort(K=5, dtype=torch.float64, seed=0, scale=0.3):
    return make_with_batch_norm(K, SHAPES, dtype, seed=seed, scale=scale)


def flat(sd):
    return torch.cat([sd[key].double().reshape(-1) for key in PARAMS])


def naive(g, clients, tau, iterations, shares, start=0.0):
    """v <- v + sum_k p_k (x_k - v) min(1, tau / ||x_k - v||) from v = g + start; the paper's p_k are 1 / K"""
    v = flat(g) + start
    for _ in range(iterations):
        step = torch.zeros_like(v)
        for p, sd in zip(shares, clients, strict=True):
            diff = flat(sd) - v
            step += p * diff * min(1.0, tau / diff.norm().item())
        v = v + step
    return v


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("iterations", [1, 2, 7])
@pytest.mark.parametrize("tau", [0.05, 3.0, 4.0, 100.0])
def test_equals_the_iteration(tau, iterations, weighted, dtype):
    g, clients = cohort(dtype=dtype)
    norms = fastagg.gram(g, clients).norms()
    assert norms.min() < 3 < 4 < norms.max()  # tau of 3 and 4 clip some, not all
    before = snapshot(g, *clients)
    result = centred_clipping(g, clients, SIZES, tau=tau, iterations=iterations, weighted=weighted)
    assert_unchanged([g, *clients], before)
    shares = [s / sum(SIZES) for s in SIZES] if weighted else [0.2] * 5
    rtol = 1e-9 if dtype == torch.float64 else 1e-6
    expected = naive(g, clients, tau, iterations, shares)
    torch.testing.assert_close(flat(result), expected, rtol=rtol, atol=rtol)
    moved = sum(c * (flat(sd) - flat(g)) for c, sd in zip(result.weights, clients, strict=True))
    torch.testing.assert_close(moved, expected - flat(g), rtol=10 * rtol, atol=10 * rtol)
    for key in ("bn.running_mean", "bn.running_var"):
        assert torch.equal(result[key], median_of([sd[key] for sd in clients]))
    assert result["bn.num_batches_tracked"] == median_of([sd["bn.num_batches_tracked"] for sd in clients])
    assert all(result[key].dtype == g[key].dtype for key in g)
    torch.testing.assert_close(result.gram.matrix, fastagg.gram(g, clients).matrix, rtol=0, atol=0)


def test_sizes_are_not_trusted_unless_asked_for():
    g, clients = cohort()
    alike, given = centred_clipping(g, clients), centred_clipping(g, clients, SIZES)
    assert_same_bits(alike, given)
    assert not torch.equal(centred_clipping(g, clients, SIZES, weighted=True).weights, alike.weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("iterations", [1, 3])
def test_moves_at_most_tau(iterations, dtype):
    """However far the clients are, all of them in one direction"""
    for tau in (0.1, 1.0, 10.0):
        for distance in (1.0, 1e3, 1e6):
            g, clients = cohort(dtype=dtype)
            far = [{k: v + distance if v.is_floating_point() else v for k, v in sd.items()} for sd in clients]
            moved = (flat(centred_clipping(g, far, tau=tau, iterations=iterations)) - flat(g)).norm()
            assert moved <= iterations * tau * (1 + 1e-5)
    assert moved > 0.99 * iterations * tau


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_one_client_at_1e6_moves_it_by_a_share_of_tau(dtype):
    g, clients = cohort(dtype=dtype)
    bad = {k: v + 1e6 if v.is_floating_point() else v for k, v in clients[0].items()}
    tau = 10.0
    result = centred_clipping(g, [bad, *clients[1:]], tau=tau)
    without = flat(g) + sum(flat(sd) - flat(g) for sd in clients[1:]) / 5
    assert (flat(result) - without).norm() <= tau / 5 * (1 + 1e-5)
    honest = torch.stack([sd["bn.running_var"] for sd in clients[1:]])
    assert (result["bn.running_var"] <= honest.amax(0)).all()


@pytest.mark.parametrize("magnitude", [1.0, 1e6, 1e12, 1e20, 1e36])
def test_no_magnitude_takes_digits_from_the_others(magnitude):
    g, clients = cohort(8, torch.float32)
    generator = torch.Generator().manual_seed(1)
    clients[0] = {k: v + magnitude * torch.randn(v.shape, generator=generator) if k in PARAMS else v
                  for k, v in clients[0].items()}  # fmt: skip
    result = centred_clipping(g, clients, tau=3.0, iterations=5)
    expected = naive(g, clients, 3.0, 5, [1 / 8] * 8)
    torch.testing.assert_close(flat(result), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("iterations", [1, 3])
def test_the_previous_aggregate_as_center(iterations, dtype):
    """As in the paper: what is clipped is the difference to the aggregate of the round before."""
    server = CentredClipping(center="previous", tau=2.5, iterations=iterations)
    plain = CentredClipping(tau=2.5, iterations=iterations)
    tolerance = 1e-9 if dtype == torch.float64 else 3e-6
    start = 0.0
    for r, K in enumerate((5, 7, 4, 5)):
        g, clients = cohort(K, dtype, seed=r)
        before = snapshot(g, *clients)
        ids = [f"c{k}" for k in range(K)][::-1]
        result = server.aggregate(g, clients, client_ids=ids)
        assert_unchanged([g, *clients], before)
        expected = naive(g, clients, 2.5, iterations, [1 / K] * K, start)
        torch.testing.assert_close(flat(result), expected, rtol=tolerance, atol=tolerance)
        moved = sum(c * (flat(sd) - flat(g)) for c, sd in zip(result.weights, clients, strict=True))
        moved = moved + result.previous_weight * start
        torch.testing.assert_close(flat(g) + moved, expected, rtol=10 * tolerance, atol=10 * tolerance)
        torch.testing.assert_close(result.gram.matrix, fastagg.gram(g, clients).matrix, rtol=1e-6, atol=1e-9)
        assert (r == 0) == torch.equal(flat(result), flat(plain.aggregate(g, clients, client_ids=ids)))
        assert torch.equal(result["bn.running_var"], median_of([sd["bn.running_var"] for sd in clients]))
        start = flat(result) - flat(g)


def test_the_previous_aggregate_is_saved_and_checked(tmp_path):
    server, other = (CentredClipping(center="previous", tau=2.0) for _ in range(2))
    g, clients = cohort(dtype=torch.float32)
    assert server.state_dict() == {"method": "centred_clipping", "previous": {}}
    server.aggregate(g, clients)
    server.save(tmp_path / "s")
    server.state_dict()["previous"]["fc.bias"].zero_()  # a copy
    other.load(tmp_path / "s")
    g, clients = cohort(dtype=torch.float32, seed=1)
    arrays = [{k: v.numpy() for k, v in sd.items()} for sd in (g, *clients)]
    expected, found = server.aggregate(g, clients), other.aggregate(arrays[0], arrays[1:])
    assert_same_bits({k: torch.from_numpy(v) for k, v in found.items()}, expected)
    state = server.state_dict()
    for key, value in state["previous"].items():
        assert torch.equal(value, other.state_dict()["previous"][key])
    with pytest.raises(fastagg.InputError, match=r"'fc\.bias' is of shape \(3,\), but was of shape \(9,\)"):
        other.aggregate(g | {"fc.bias": torch.zeros(3)}, [sd | {"fc.bias": torch.zeros(3)} for sd in clients])
    with pytest.raises(fastagg.InputError, match="center='global' does not use"):
        CentredClipping().load_state_dict(state)
    state["previous"]["fc.bias"][0] = math.nan
    with pytest.raises(fastagg.InputError, match=r"previous update of 'fc\.bias' is not finite"):
        other.load_state_dict(state)
    with pytest.raises(fastagg.InputError, match="previous is a list"):
        other.load_state_dict({"method": "centred_clipping", "previous": []})


def test_who_is_not_finite_is_named_with_a_previous_aggregate_too():
    server = CentredClipping(center="previous", on_bad_client="drop")
    g, clients = cohort(dtype=torch.float32)
    server.aggregate(g, clients)
    clients[2]["fc.bias"][0] = math.nan
    clients[3]["bn.running_var"][0] = math.inf
    assert list(server.aggregate(g, clients).dropped) == [2, 3]
    server.load_state_dict(server.state_dict() | {"previous": {k: torch.full_like(g[k], 3e38) for k in PARAMS}})
    far = {k: v + 3e38 if k in PARAMS else v for k, v in g.items()}
    with pytest.raises(fastagg.InputError, match="add up to a model that is not finite"):
        server.aggregate(far, clients)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(1, 7), st.integers(0, 10**6), st.floats(1e-2, 20), st.integers(1, 5), st.data())
def test_properties(K, seed, tau, iterations, data):
    g, clients = cohort(K, seed=seed)
    order = list(data.draw(st.permutations(range(K))))
    options = {"tau": tau, "iterations": iterations}
    result = centred_clipping(g, clients, **options)
    permuted = centred_clipping(g, [clients[k] for k in order], **options)
    torch.testing.assert_close(permuted.weights, result.weights[order], rtol=1e-9, atol=1e-14)
    assert (result.weights > 0).all()
    assert result.weights.sum() <= 1 + 1e-12
    assert (flat(result) - flat(g)).norm() <= iterations * tau * (1 + 1e-9)
    longest = fastagg.gram(g, clients).norms().max().item()
    loose = centred_clipping(g, clients, tau=4 * longest + 1, iterations=iterations)  # nothing is clipped: the mean
    torch.testing.assert_close(loose.weights, torch.full((K,), 1 / K, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(flat(loose), flat(fastagg.fedavg(g, clients)), rtol=1e-12, atol=1e-12)
    same = centred_clipping(g, [clients[0]] * K, tau=100.0)
    torch.testing.assert_close(flat(same), flat(clients[0]), rtol=1e-12, atol=1e-12)
    zero = {k: torch.zeros_like(v) for k, v in g.items()}
    for scale in (1e-6, 1e4):  # lengths and tau together
        wide = [{k: scale * v if k in PARAMS else v for k, v in sd.items()} for sd in clients]
        a = centred_clipping(zero, clients, **options).weights
        b = centred_clipping(zero, wide, tau=scale * tau, iterations=iterations).weights
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14)


def test_degenerate_cohorts():
    g, clients = cohort(dtype=torch.float32)
    far = [
        {k: v + 1e6 * (j + 1) if v.is_floating_point() else v for k, v in sd.items()} for j, sd in enumerate(clients)
    ]
    zero = {k: torch.zeros_like(v) for k, v in g.items()}
    tiny = [dict(zero, **{"fc.bias": torch.full((9,), (k + 1) * 1e-20)}) for k in range(5)]
    against = [dict(g, **{"fc.bias": g["fc.bias"] + s}) for s in (1, -1, 2, -2, 3)]
    rounds = [(g, clients[:1]), (g, [clients[0]] * 3), (g, [g] * 2), (g, [g, clients[0]]), (g, far), (zero, tiny)]
    for start, models in [*rounds, (g, against)]:
        for tau in (1e-100, 1e-20, 1e-3, 10.0, 1e30):
            for sizes, weighted in ((None, False), ([1] + [0] * (len(models) - 1), True)):
                result = centred_clipping(start, models, sizes, tau=tau, iterations=3, weighted=weighted)
                assert torch.isfinite(result.weights).all()
                assert all(torch.isfinite(value.double()).all() for value in result.values())


def test_out_is_written_in_place():
    g, clients = cohort(dtype=torch.float32)
    out = {key: torch.zeros_like(value) for key, value in g.items()}
    result = centred_clipping(g, clients, tau=1.0, out=out)
    assert all(result[key] is out[key] for key in out)
    assert_same_bits(result, centred_clipping(g, clients, tau=1.0))


@pytest.mark.parametrize(
    "options",
    [{"tau": 0}, {"tau": -1.0}, {"tau": math.nan}, {"tau": "x"}, {"iterations": 0}, {"iterations": 1.5},
     {"iterations": True}, {"weighted": 1}, {"center": "mean"}],
    ids=str,
)  # fmt: skip
def test_bad_options(options):
    [name] = options
    with pytest.raises(ValueError, match=f"centred_clipping: {name}="):
        CentredClipping(**options)


def test_defaults():
    assert (CentredClipping().tau, CentredClipping().iterations, CentredClipping().weighted) == (10.0, 1, False)
