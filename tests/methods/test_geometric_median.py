"""The geometric median against Weiszfeld's algorithm on flattened models, and against what defines a median."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastagg
from fastagg import geometric_median
from fastagg.methods.geometric_median import GeometricMedian
from helpers.cohort import assert_same_bits, assert_unchanged, make_with_batch_norm, median_of, snapshot

SHAPES = {"fc.weight": (9, 5), "fc.bias": (9,), "bn.weight": (9,), "bn.running_mean": (9,), "bn.running_var": (9,)}
PARAMS = ("fc.weight", "fc.bias", "bn.weight")
SIZES = (120, 30, 75, 210, 40)


def cohort(K=5, dtype=torch.float64, seed=0, scale=1e-1):
    return make_with_batch_norm(K, SHAPES, dtype, seed=seed, scale=scale)


def flat(sd):
    return torch.cat([sd[key].double().reshape(-1) for key in PARAMS])


def points(*values):
    """Models of one number or a few"""
    return [{"w": torch.tensor(v, dtype=torch.float64).reshape(-1)} for v in values]


def naive(clients, sizes, iterations, nu):
    """The paper's smoothed Weiszfeld, beta_k = alpha_k / max(nu, ||v - w_k||): first from the medoid, with its distance
    to the nearest client as nu"""
    w = torch.stack([flat(sd) for sd in clients])
    alpha = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    apart = torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist")
    medoid = apart[(apart @ alpha).argmin()]
    weights = alpha / medoid.clamp(min=medoid[medoid > 0].min())
    weights = weights / weights.sum()
    v = weights @ w
    for _ in range(iterations):
        beta = torch.stack([alpha[k] / max(nu, (v - w[k]).norm()) for k in range(len(w))])
        weights = beta / beta.sum()
        v = sum(weights[k] * w[k] for k in range(len(w)))
    return v, weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("nu", [1e-9, 0.7, 100.0])
@pytest.mark.parametrize("iterations", [0, 1, 4, 30])
def test_equals_the_algorithm(iterations, nu, dtype):
    g, clients = cohort(dtype=dtype)
    before = snapshot(g, *clients)
    result = geometric_median(g, clients, SIZES, iterations=iterations, nu=nu, tolerance=0)
    assert_unchanged([g, *clients], before)
    model, weights = naive(clients, SIZES, iterations, nu)
    rtol = 1e-9 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(result.weights, weights, rtol=rtol, atol=0)
    torch.testing.assert_close(flat(result), model, rtol=rtol, atol=rtol)
    for key in ("bn.running_mean", "bn.running_var"):
        assert torch.equal(result[key], median_of([sd[key] for sd in clients]))
    assert all(result[key].dtype == g[key].dtype for key in g)
    torch.testing.assert_close(result.gram.matrix, fastagg.gram(g, clients).matrix, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_the_default_has_converged(seed):
    """At the minimum the unit vectors towards the clients cancel, weighted by their data."""
    g, clients = cohort(7, seed=seed)
    sizes = [1 + 3 * k for k in range(7)]
    v, n = flat(geometric_median(g, clients, sizes)), torch.tensor(sizes, dtype=torch.float64)
    units = [(flat(sd) - v) / (flat(sd) - v).norm() for sd in clients]
    pull = sum(share * u for share, u in zip(n / n.sum(), units, strict=True))
    assert pull.norm() < 1e-5
    mean = flat(fastagg.fedavg(g, clients, sizes))
    units = [(flat(sd) - mean) / (flat(sd) - mean).norm() for sd in clients]
    assert sum(share * u for share, u in zip(n / n.sum(), units, strict=True)).norm() > 1e-2


def test_on_a_line_it_is_the_median():
    clients = points(0.0, 1.0, 2.5, 7.0, 100.0)
    assert geometric_median(points(0.0)[0], clients)["w"].item() == pytest.approx(2.5, abs=1e-4)
    heavy = geometric_median(points(0.0)[0], clients, [1, 6, 1, 1, 1])  # more than half the data
    assert heavy["w"].item() == pytest.approx(1.0, abs=1e-4)


def test_a_start_on_a_client_is_left_again():
    """The mean of these is 2, a client, whose weight is then 1 / nu; their median is 1."""
    clients = points(0.0, 1.0, 1.0, 6.0, 2.0)
    assert geometric_median(points(0.0)[0], clients)["w"].item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("K", [3, 4, 5, 10])
def test_resists_a_client_at_1e6(K, dtype):
    g, clients = cohort(K, dtype)
    honest = torch.stack([flat(sd) for sd in clients[1:]])
    clients[0] = {k: v + 1e6 if v.is_floating_point() else v for k, v in clients[0].items()}
    result = geometric_median(g, clients)
    spread = (honest - honest.mean(0)).norm(dim=1).max()
    assert (flat(fastagg.fedavg(g, clients)) - honest.mean(0)).norm() > 1e5
    assert (flat(result) - honest.mean(0)).norm() < 2 * spread
    assert result.weights[0] < 1e-5
    expected, _ = naive(clients, [1] * K, 200, 1e-9)
    torch.testing.assert_close(flat(result), expected, rtol=1e-4, atol=1e-4)


def attacked(K, bad, magnitude, together):
    """(g, clients, what the honest are apart from their mean); the first are attackers, in one place or in several"""
    g, clients = cohort(K, torch.float32)
    generator = torch.Generator().manual_seed(1)
    direction = {key: torch.randn(g[key].shape, generator=generator) for key in PARAMS}
    for k in range(bad):
        if not together:
            direction = {key: torch.randn(g[key].shape, generator=generator) for key in PARAMS}
        clients[k] = dict(clients[k], **{key: g[key] + magnitude * direction[key] for key in PARAMS})
    honest = torch.stack([flat(sd) for sd in clients[bad:]])
    return g, clients, honest.mean(0), (honest - honest.mean(0)).norm(dim=1).mean()


@pytest.mark.parametrize("magnitude", [1.0, 1e3, 1e6, 1e10, 1e12, 1e16, 1e20, 1e25, 1e30, 1e36])
@pytest.mark.parametrize(("K", "bad", "together", "most"), [(8, 1, True, 0.5), (20, 9, True, 1.7), (20, 9, False, 1.0)])
def test_no_magnitude_moves_it_further(K, bad, together, most, magnitude):
    """By 9 of 20 at one place far away the exact median is moved by 9 / sqrt(11^2 - 9^2) = 1.42 of the distance of
    honest clients from their mean, where these are at right angles."""
    g, clients, mean, apart = attacked(K, bad, magnitude, together)
    result = geometric_median(g, clients)
    assert (flat(result) - mean).norm() < most * apart
    expected, weights = naive(clients, [1] * K, 100, 1e-9)
    torch.testing.assert_close(flat(result), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.weights, weights, rtol=1e-3, atol=0)


def test_a_client_that_claims_more_data_than_all_others():
    g, clients, mean, apart = attacked(10, 1, 1e6, True)
    sizes = [10**6, *[100] * 9]
    assert (flat(geometric_median(g, clients, sizes)) - mean).norm() > 1e5 * apart
    alike = geometric_median(g, clients, sizes, weighted=False)
    assert (flat(alike) - mean).norm() < apart
    assert_same_bits(alike, geometric_median(g, clients))


@pytest.mark.parametrize("apart", [1e-3, 1e-4])
def test_clients_that_agree_far_better_with_each_other_than_with_the_global_model(apart):
    g, clients = cohort(7, torch.float32, scale=1.0)
    middle = {key: 2 * g[key] + 1 for key in PARAMS}
    clients = [sd | {key: middle[key] + apart * sd[key] for key in PARAMS} for sd in clients]
    result = geometric_median(g, clients)
    expected, weights = naive(clients, [1] * 7, 100, 1e-9)
    torch.testing.assert_close(result.weights, weights, rtol=1e-4, atol=0)
    torch.testing.assert_close(flat(result), expected, rtol=1e-6, atol=1e-6)


def test_converges_however_far_the_outlier_is():
    """From (+-1, 0) and (0, far) alike the unit vectors cancel at (0, 1 / sqrt 3)."""
    for far in (10.0, 1e4, 1e8):
        model = geometric_median(points([0.0, 0.0])[0], points([1.0, 0.0], [-1.0, 0.0], [0.0, far]))
        torch.testing.assert_close(model["w"], torch.tensor([0, 3**-0.5], dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_half_the_data_is_where_it_breaks():
    g, clients = cohort(5)
    honest = torch.stack([flat(sd) for sd in clients[1:]]).mean(0)
    clients[0] = {k: v + 1e3 if v.is_floating_point() else v for k, v in clients[0].items()}
    for share, resists in ((0.4, True), (0.6, False)):
        model = geometric_median(g, clients, [share, *[(1 - share) / 4] * 4])
        assert ((flat(model) - honest).norm() < 10) == resists


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(1, 7), st.integers(0, 10**6), st.sampled_from([2.0**-20, 1.0, 2.0**13]), st.data())
def test_properties(K, seed, scale, data):
    g, clients = cohort(K, seed=seed)
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=K, max_size=K))
    order = list(data.draw(st.permutations(range(K))))
    options = {"tolerance": 0, "iterations": 40}
    result = geometric_median(g, clients, sizes, client_ids=range(K), **options)
    given = ([clients[k] for k in order], [sizes[k] for k in order])
    permuted = geometric_median(g, *given, client_ids=order, **options)
    assert torch.equal(permuted.weights, result.weights[order])
    assert (result.weights >= 0).all()
    assert math.isclose(result.weights.sum().item(), 1, rel_tol=1e-12)
    same = geometric_median(g, [clients[0]] * K, sizes)
    torch.testing.assert_close(flat(same), flat(clients[0]), rtol=1e-13, atol=0)
    zero = {k: torch.zeros_like(v) for k, v in g.items()}
    near, wide = ([{k: s * v if k in PARAMS else v for k, v in sd.items()} for sd in clients] for s in (1.0, scale))
    a, b = (geometric_median(zero, models, sizes, **options).weights for models in (near, wide))
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)  # the default nu scales along

    def cost(model):
        return sum(size * (flat(sd) - flat(model)).norm() for size, sd in zip(sizes, clients, strict=True))

    assert cost(result) <= cost(fastagg.fedavg(g, clients, sizes)) * (1 + 1e-12)


def test_tolerance_stops_early():
    g, clients = cohort()
    exact = geometric_median(g, clients, tolerance=0, iterations=500).weights
    loose = geometric_median(g, clients, tolerance=0.5).weights
    close = geometric_median(g, clients).weights
    assert 0 < (close / exact - 1).abs().max() < 1e-4
    assert (loose / exact - 1).abs().max() > 1e-3
    one = geometric_median(g, clients, tolerance=1.0, iterations=50).weights
    assert torch.equal(one, geometric_median(g, clients, iterations=1).weights)


def test_degenerate_cohorts():
    g, clients = cohort(dtype=torch.float32)
    far = [
        {k: v + 1e6 * (j + 1) if v.is_floating_point() else v for k, v in sd.items()} for j, sd in enumerate(clients)
    ]
    zero = {k: torch.zeros_like(v) for k, v in g.items()}
    tiny = [dict(zero, **{"fc.bias": torch.full((9,), (k + 1) * 1e-20)}) for k in range(5)]
    against = [dict(g, **{"fc.bias": g["fc.bias"] + s}) for s in (1, -1, 2, -2, 3)]
    rounds = [(g, clients[:1]), (g, clients[:2]), (g, [clients[0]] * 3), (g, [g] * 2), (g, [g, clients[0]]), (g, far)]
    for start, models in [*rounds, (zero, tiny), (g, against), (g, [*[clients[0]] * 3, clients[1]])]:
        for sizes in (None, [0] * (len(models) - 1) + [1], [1e-300] * (len(models) - 1) + [1]):
            result = geometric_median(start, models, sizes)
            assert torch.isfinite(result.weights).all()
            assert math.isclose(result.weights.sum().item(), 1, rel_tol=1e-12)
            assert all(torch.isfinite(value.double()).all() for value in result.values())
    assert geometric_median(g, clients, [0, 1, 1, 1, 1]).weights[0] == 0
    most = geometric_median(g, [*[clients[0]] * 3, clients[1]])  # the majority is one point
    torch.testing.assert_close(flat(most), flat(clients[0]), rtol=1e-4, atol=1e-4)


def test_out_is_written_in_place():
    g, clients = cohort(dtype=torch.float32)
    out = {key: torch.zeros_like(value) for key, value in g.items()}
    result = geometric_median(g, clients, SIZES, out=out)
    assert all(result[key] is out[key] for key in out)
    assert_same_bits(result, geometric_median(g, clients, SIZES))


@pytest.mark.parametrize(
    "options",
    [{"iterations": -1}, {"iterations": 1.5}, {"iterations": True}, {"tolerance": -1e-3}, {"tolerance": 2}, {"nu": 0.0},
     {"nu": -1.0}, {"nu": math.nan}, {"nu": "x"}, {"weighted": 1}],
    ids=str,
)  # fmt: skip
def test_bad_options(options):
    [name] = options
    with pytest.raises(ValueError, match=f"geometric_median: {name}="):
        GeometricMedian(**options)


def test_bad_round():
    g, clients = cohort()
    with pytest.raises(fastagg.InputError, match="sizes"):
        geometric_median(g, clients, [1, 2])
    with pytest.raises(fastagg.InputError, match="global model is None"):
        geometric_median(None, clients)
