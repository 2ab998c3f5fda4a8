"""L-DAWA against 1/K sum_k cos(w_k, g) w_k, layer by layer, in loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastagg import InputError, ldawa
from fastagg.methods.ldawa import LDAWA
from helpers.cohort import assert_unchanged, make, snapshot

SHAPES = {
    "a.weight": (6, 5), "a.bias": (6,), "bn.weight": (6,), "bn.bias": (6,), "bn.running_mean": (6,),
    "bn.running_var": (6,), "plain.running_var": (4,), "c.weight": (3, 6), "scale": (3,),
}  # fmt: skip
LAYERS = ("a", "bn", "plain", "c", "")
few = settings(deadline=None, max_examples=25, derandomize=True)


def cohort(K, dtype=torch.float64, *, scale=0.5, seed=0):
    """Positive variances, and a counter"""
    g, clients = make(K, SHAPES, dtype, scale=scale, seed=seed)
    for k, sd in enumerate((g, *clients)):
        for key in sd:
            if key.endswith("var"):
                sd[key] = sd[key].abs()
        sd["bn.num_batches_tracked"] = torch.tensor(10 + k % 3)
    return g, clients


def is_buffer(key):
    return "running" in key or "num_batches" in key


def layer_of(key):
    return key.rpartition(".")[0]


def vector(sd, layer):
    parts = [v.double().reshape(-1).numpy() for k, v in sd.items() if layer in (None, layer_of(k)) and not is_buffer(k)]
    return np.concatenate([np.zeros(0), *parts])


def cosines_of(g, clients, layer):
    found = []
    y = vector(g, layer)
    for sd in clients:
        x = vector(sd, layer)
        found.append(min(1.0, float(x @ y) / float(np.linalg.norm(x) * np.linalg.norm(y))))
    return found


def naive(g, clients, *, normalize=False, layerwise=True):
    """(state dict, weights by layer); layers without parameters have no cosine: 1/K"""
    K = len(clients)
    new, weights = {}, {}
    for layer in LAYERS:
        if layerwise and not len(vector(g, layer)):
            cosines = [1.0] * K
        else:
            cosines = cosines_of(g, clients, layer if layerwise else None)
        total = sum(cosines)
        w = [1 / K] * K if normalize and total <= 0 else [c / (total if normalize else K) for c in cosines]
        positive = [max(0.0, c) for c in cosines]
        statistics = [p / sum(positive) for p in positive] if any(positive) else [1 / K] * K
        weights[layer] = w
        for key in g:
            if layer_of(key) == layer and key != "bn.num_batches_tracked":
                pairs = zip(statistics if is_buffer(key) else w, clients, strict=True)
                new[key] = sum(x * sd[key].double() for x, sd in pairs)
    return new, weights


def assert_agrees(result, expected, rtol):
    new, weights = expected
    if result.weights.dim() == 2:
        found = dict(zip(result.layers, result.weights, strict=True))
    else:
        found = dict.fromkeys(LAYERS, result.weights)
    for layer, w in weights.items():
        torch.testing.assert_close(found[layer], torch.tensor(w, dtype=torch.float64), rtol=rtol, atol=rtol)
    for key, value in new.items():
        torch.testing.assert_close(result[key].double(), value, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("scale", [0.01, 0.5, 3.0])  # the last has negative cosines
def test_against_the_equation(dtype, rtol, normalize, layerwise, scale):
    g, clients = cohort(5, dtype, scale=scale, seed=2)
    before = snapshot(g, *clients)
    result = ldawa(g, clients, [1, 2, 3, 4, 5], normalize=normalize, layerwise=layerwise)
    assert_agrees(result, naive(g, clients, normalize=normalize, layerwise=layerwise), rtol)
    assert result["bn.num_batches_tracked"].item() == 12
    assert result.layers == (LAYERS if layerwise else None)
    assert result.gram.layerwise is layerwise
    assert_unchanged([g, *clients], before)


def test_the_widest_cohort_above_has_negative_cosines():
    g, clients = cohort(5, scale=3.0, seed=2)
    cosines = [cosines_of(g, clients, layer) for layer in ("a", "bn", "c", "")]
    assert min(map(min, cosines)) < -0.1


def test_defaults():
    g, clients = cohort(4)
    result = ldawa(g, clients)
    assert_agrees(result, naive(g, clients, normalize=False, layerwise=True), 1e-9)
    assert (result.weights.sum(1) < 1).any()


def test_layers_can_be_grouped_otherwise():
    g, clients = cohort(4)
    result = ldawa(g, clients, layers=lambda key: key)
    at = result.layers.index("a.bias")
    x = [sd["a.bias"].numpy() for sd in (g, *clients)]
    expected = [float(w @ x[0]) / np.linalg.norm(w) / np.linalg.norm(x[0]) / 4 for w in x[1:]]
    torch.testing.assert_close(result.weights[at], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)


def opposite(g, K):
    """Every client the global model turned round, its statistics excepted"""
    return [{k: v.clone() if is_buffer(k) else -(1 + 0.1 * n) * v for k, v in g.items()} for n in range(K)]


def test_all_cosines_negative():
    g, _ = cohort(1)
    clients = opposite(g, 3)
    for n, sd in enumerate(clients):
        sd["bn.running_var"] = g["bn.running_var"] * (n + 1)
    result = ldawa(g, clients)
    torch.testing.assert_close(result["a.weight"], 1.1 * g["a.weight"])  # -1/3 of each
    torch.testing.assert_close(result["bn.running_var"], 2 * g["bn.running_var"])  # the mean, never turned round
    normalized = ldawa(g, clients, normalize=True)
    torch.testing.assert_close(normalized.weights, torch.full((5, 3), 1 / 3, dtype=torch.float64))


def test_statistics_stay_between_the_clients():
    for seed in range(5):
        g, clients = cohort(4, scale=3.0, seed=seed)
        for normalize in (False, True):
            result = ldawa(g, clients, normalize=normalize)
            for key in ("bn.running_var", "bn.running_mean", "plain.running_var"):
                stack = torch.stack([sd[key] for sd in clients])
                assert (result[key] >= stack.amin(0) - 1e-12).all()
                assert (result[key] <= stack.amax(0) + 1e-12).all()


def test_cosines_that_cancel_do_not_explode():
    """cos = 1 and -1: their sum is rounding, and dividing by it would give weights of 1e16"""
    g, [client] = cohort(1, torch.float32, scale=1e-4)
    clients = [client, {k: v.clone() if is_buffer(k) else -1.3 * v for k, v in client.items()}]
    w = ldawa(g, clients, normalize=True).weights
    torch.testing.assert_close(w, torch.full((5, 2), 0.5, dtype=torch.float64))


def test_a_layer_that_is_zero_in_the_global_model_is_averaged():
    """A zero initialisation must not stay zero for ever"""
    g, clients = cohort(3)
    g["c.weight"].zero_()
    for normalize in (False, True):
        result = ldawa(g, clients, normalize=normalize)
        torch.testing.assert_close(result["c.weight"], sum(sd["c.weight"] for sd in clients) / 3)


def clone(sd):
    return {key: value.clone() for key, value in sd.items()}


def degenerate():
    g, clients = cohort(4, scale=0.1)
    zero = {key: torch.zeros_like(value) for key, value in g.items()}
    yield "no update", g, [clone(g) for _ in range(3)]
    yield "one update zero", g, [clone(g), *clients]
    yield "all zero", zero, [clone(zero), clone(zero)]
    yield "global zero", zero, clients
    yield "one client zero", g, [zero, *clients]
    yield "all negative", g, opposite(g, 3)
    for scale in (1e6, 1e-20):
        far = [{k: v if is_buffer(k) else scale * v for k, v in sd.items()} for sd in (g, *clients)]
        yield f"scale {scale}", far[0], far[1:]
        yield f"far from g {scale}", g, far[1:]


@pytest.mark.parametrize(("g", "clients"), [pytest.param(*rest, id=name) for name, *rest in degenerate()])
def test_degenerate_cohorts(g, clients):
    for normalize in (False, True):
        for layerwise in (False, True):
            result = ldawa(g, clients, normalize=normalize, layerwise=layerwise)
            assert torch.isfinite(result.weights).all()
            assert all(torch.isfinite(value).all() for value in result.values())
            if normalize:
                torch.testing.assert_close(result.weights.sum(-1), torch.ones_like(result.weights.sum(-1)))


def test_no_update_gives_the_global_model_back():
    g, _ = cohort(1)
    result = ldawa(g, [clone(g) for _ in range(3)])
    for key, value in g.items():
        torch.testing.assert_close(result[key], value)


def test_one_client_and_identical_clients():
    g, [client] = cohort(1)
    cosine = dict(zip(LAYERS, ldawa(g, [client]).weights[:, 0].tolist(), strict=True))
    for clients in ([client], [clone(client) for _ in range(6)]):
        scaled, same = ldawa(g, clients), ldawa(g, clients, normalize=True)
        for key, value in client.items():
            torch.testing.assert_close(same[key], value)
            factor = 1 if is_buffer(key) else cosine[layer_of(key)]
            torch.testing.assert_close(scaled[key], (factor * value).to(value.dtype))


cohorts = {"K": st.integers(1, 7), "seed": st.integers(0, 10**6), "exponent": st.floats(-3, 1)}


@few
@given(**cohorts, normalize=st.booleans(), random=st.randoms())
def test_permuting_clients_permutes_weights(K, seed, exponent, normalize, random):
    g, clients = cohort(K, scale=10**exponent, seed=seed)
    order = list(range(K))
    random.shuffle(order)
    w = ldawa(g, clients, normalize=normalize).weights
    shuffled = ldawa(g, [clients[k] for k in order], normalize=normalize).weights
    torch.testing.assert_close(shuffled, w[:, order], rtol=1e-9, atol=1e-12)


@few
@given(**cohorts)
def test_weights_are_at_most_one_over_k_and_normalised_ones_sum_to_one(K, seed, exponent):
    g, clients = cohort(K, scale=10**exponent, seed=seed)
    assert (ldawa(g, clients).weights.abs() <= (1 + 1e-12) / K).all()
    total = ldawa(g, clients, normalize=True).weights.sum(1)
    torch.testing.assert_close(total, torch.ones(5, dtype=torch.float64), rtol=1e-9, atol=0)


@few
@given(**cohorts, factor=st.floats(0.1, 10))
def test_the_length_of_the_global_model_does_not_matter(K, seed, exponent, factor):
    g, clients = cohort(K, scale=10**exponent, seed=seed)
    scaled = {key: value if is_buffer(key) else factor * value for key, value in g.items()}
    torch.testing.assert_close(ldawa(scaled, clients).weights, ldawa(g, clients).weights, rtol=1e-7, atol=1e-9)


def test_out_is_written():
    g, clients = cohort(3)
    first = ldawa(g, clients)
    again = ldawa(g, clients, normalize=True, out=first)
    assert all(again[key] is first[key] for key in first)
    for key, value in ldawa(g, clients, normalize=True).items():
        assert torch.equal(again[key], value)


@pytest.mark.parametrize("option", [{"normalize": "yes"}, {"normalize": None}, {"layerwise": 2}, {"layerwise": 0}])
def test_bad_options(option):
    with pytest.raises(ValueError, match=f"ldawa: {next(iter(option))}=.* expected True or False"):
        LDAWA(**option)


def test_bad_models_are_named():
    g, clients = cohort(2)
    clients[1]["c.weight"][0, 0] = float("nan")
    with pytest.raises(InputError, match=r"client 1: key 'c.weight'"):
        ldawa(g, clients)
    with pytest.raises(InputError, match="the global model is None"):
        ldawa(None, clients)
