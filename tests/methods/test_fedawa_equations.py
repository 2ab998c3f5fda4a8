"""FedAWA against a naive transcription of its equations: float64, autograd through softmax, torch.optim."""

import pytest
import torch

import fastagg
from helpers.fedawa import (
    ADAM_LR,
    DTYPES,
    LAYERS,
    REGS,
    SCALES,
    SIZES,
    VARIANTS,
    assert_agrees,
    assert_close,
    call,
    first_logits,
    identical,
    make_client,
    make_cohort,
    make_global,
    naive_mix,
    reference,
)

pytestmark = pytest.mark.filterwarnings("ignore:fedawa. variant='released' learns over rounds")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("reg", REGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_equations(variant, reg, optimizer, layerwise, steps, dtype):
    options = {"variant": variant, "reg": reg, "optimizer": optimizer, "layerwise": layerwise, "steps": steps}
    global_sd, clients = make_cohort(dtype)
    result = call(fastagg.fedawa, global_sd, clients, SIZES, **options)
    assert result.layers == (LAYERS if layerwise else None)
    start = first_logits(SIZES, variant, LAYERS if layerwise else None)
    assert_agrees(result, reference(global_sd, clients, SIZES, **options), start, dtype)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_large_steps_equal_the_equations(variant, optimizer):
    """With lr=None every choice above stays near its start; here the weights leave it."""
    options = {"variant": variant, "optimizer": optimizer, "steps": 12, "lr": 0.1}
    global_sd, clients = make_cohort()
    result = call(fastagg.fedawa, global_sd, clients, SIZES, **options)
    shares = first_logits(SIZES, "released")
    assert (result.weights - shares).abs().max() > 0.05
    assert_agrees(result, reference(global_sd, clients, SIZES, **options), first_logits(SIZES, variant), torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_clients_that_nearly_agree(variant):
    """Update vectors at a cosine of 0.99 in float32: 1 % of the Gram's digits are left for their distances, so
    1e-7 / (1 - cos) = 1e-5 of each step is error."""
    global_sd = make_global(torch.float32)
    common = make_client(global_sd, 50, 1.0)
    clients = []
    for k, scale in enumerate(SCALES):
        own = make_client(global_sd, k + 1, 0.1 * scale)
        clients.append({key: value + (own[key] - global_sd[key]) for key, value in common.items()})
    assert fastagg.gram(global_sd, clients).cosine().min() > 0.98
    result = call(fastagg.fedawa, global_sd, clients, SIZES, variant=variant, steps=5)
    tolerance = 1e-5 * (1 + 2 + 3 + 4 + 5) * ADAM_LR[variant]  # each of five steps builds on the ones before it
    assert_close(result.weights, reference(global_sd, clients, SIZES, variant=variant, steps=5)[0], rtol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_default_sizes_are_equal_shares(variant):
    global_sd, clients = make_cohort()
    result = call(fastagg.fedawa, global_sd, clients, variant=variant, steps=3)
    assert identical(result, fastagg.fedawa(global_sd, clients, [7] * 5, variant=variant, steps=3))


@pytest.mark.parametrize("variant", VARIANTS)
def test_first_weights(variant):
    """The released code starts at softmax(n), the paper at n."""
    global_sd, clients = make_cohort()
    shares = first_logits(SIZES, "released")
    result = call(fastagg.fedawa, global_sd, clients, SIZES, variant=variant, steps=0)
    assert_close(result.weights, shares.softmax(0) if variant == "released" else shares, rtol=1e-15)


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_statistics_stay_out_of_the_objective(variant, layerwise):
    global_sd, clients = make_cohort()
    options = {"variant": variant, "layerwise": layerwise, "steps": 4, "lr": 0.1}
    expected = fastagg.fedawa(global_sd, clients, SIZES, **options)
    for k, sd in enumerate(clients):
        for key in sd:
            if key.endswith(("running_mean", "running_var")):
                sd[key] = sd[key] * 1000**k
    result = call(fastagg.fedawa, global_sd, clients, SIZES, **options)
    assert torch.equal(result.weights, expected.weights)
    assert torch.equal(result.logits, expected.logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_params_choose_what_the_objective_sees(variant):
    global_sd, clients = make_cohort()
    options = {"variant": variant, "optimizer": "sgd", "steps": 4}
    keys = ["fc2.weight", "fc1.bias"]
    result = call(fastagg.fedawa, global_sd, clients, SIZES, params=keys, **options)
    only = [{key: sd[key] for key in keys} for sd in [global_sd, *clients]]
    weights, logits, _ = reference(only[0], only[1:], SIZES, **options)
    expected = weights, logits, naive_mix(clients, weights, False)
    assert_agrees(result, expected, first_logits(SIZES, variant), torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_regroup(variant):
    global_sd, clients = make_cohort()
    options = {"variant": variant, "optimizer": "sgd", "steps": 4}
    result = call(fastagg.fedawa, global_sd, clients, SIZES, layerwise=True, layers=group, **options)
    assert result.layers == ("body", "head")
    for row, name in enumerate(result.layers):
        part = [{key: value for key, value in sd.items() if group(key) == name} for sd in [global_sd, *clients]]
        weights, logits, state = reference(part[0], part[1:], SIZES, **options)
        assert_close(result.weights[row], weights, rtol=1e-9)
        assert_close(result.logits[row], logits, rtol=1e-9)
        for key in state:
            assert_close(result[key], state[key], rtol=1e-9, atol=1e-9)


def group(key):
    return "head" if key.startswith("fc2") else "body"


def test_the_default_is_the_papers_algorithm():
    global_sd, clients = make_cohort()
    default = fastagg.fedawa(global_sd, clients, SIZES)
    assert identical(default, fastagg.fedawa(global_sd, clients, SIZES, variant="paper", steps=5, lr=0.05))
    expected = reference(global_sd, clients, SIZES, variant="paper", steps=5)
    assert_agrees(default, expected, first_logits(SIZES, "paper"), torch.float64)
    assert fastagg.aggregator("fedawa").variant == "paper"


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
def test_clients_that_agree_far_better_than_with_the_global_model(layerwise):
    """A thousandth of their distance to g apart: float32 products have no digit of that left, but models do. These have
    eps * |w| / |w_i - w_j| = 1e-7 * 10 / 1e-2 = 1e-4 of error, from their own rounding."""
    global_sd = make_global(torch.float32)
    common = make_client(global_sd, 50, 10.0)
    clients = []
    for k, scale in enumerate(SCALES):
        own = make_client(global_sd, k + 1, 0.01 * scale)
        clients.append({key: value + (own[key] - global_sd[key]) for key, value in common.items()})
    assert fastagg.gram(global_sd, clients).cosine().min() > 1 - 1e-5
    result = call(fastagg.fedawa, global_sd, clients, SIZES, layerwise=layerwise)
    expected = reference(global_sd, clients, SIZES, variant="paper", steps=5, layerwise=layerwise)[0]
    assert (expected - expected.mean(-1, keepdim=True)).abs().max() > 0.1
    assert_close(result.weights, expected, rtol=1e-4)
