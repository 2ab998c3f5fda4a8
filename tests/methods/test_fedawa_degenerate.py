"""FedAWA on cohorts that degenerate: models and updates that are 0, the same or opposite, clients without data."""

import copy

import pytest
import torch

import fastagg
from helpers.fedawa import (
    ADAM_LR,
    REGS,
    SIZES,
    VARIANTS,
    assert_agrees,
    assert_close,
    call,
    first_logits,
    identical,
    make_cohort,
    reference,
    scaled,
)

pytestmark = pytest.mark.filterwarnings("ignore:fedawa. variant='released' learns over rounds")


def degenerate(case, dtype=torch.float32):
    g, clients = make_cohort(dtype)
    if case == "one client":
        return g, clients[:1]
    if case == "identical clients":
        return g, [copy.deepcopy(clients[1]) for _ in range(5)]
    if case == "no update":
        return g, [copy.deepcopy(g) for _ in range(5)]
    if case == "one without update":
        return g, [copy.deepcopy(g), *clients[1:]]
    if case == "all but one without update":
        return g, [clients[0], *(copy.deepcopy(g) for _ in range(4))]
    if case == "global model 0":
        return scaled(g, 0), clients
    if case == "a client 0":
        return g, [*clients[:4], scaled(g, 0)]
    if case == "a client against g":
        return g, [*clients[:4], scaled(clients[4], -0.7)]
    if case == "all against g":
        return scaled(g, -1), clients
    if case == "all 0":
        return scaled(g, 0), [scaled(g, 0) for _ in range(5)]
    if case == "opposite updates":  # at 0, so that they cancel without rounding; one client is their mean
        return scaled(g, 0), [clients[0], scaled(clients[0], -1), scaled(g, 0)]
    raise AssertionError(case)


DEGENERATE = (
    "one client", "identical clients", "no update", "one without update", "all but one without update",
    "global model 0", "a client 0", "a client against g", "all against g", "all 0", "opposite updates",
)  # fmt: skip


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_cohorts_are_never_nan(case, layerwise):
    global_sd, clients = degenerate(case)
    sizes = None if case in ("opposite updates", "identical clients") else SIZES[: len(clients)]
    gram = fastagg.gram(global_sd, clients, layerwise=layerwise)
    choices = [{"variant": v, "reg": r, "optimizer": o} for v in VARIANTS for r in REGS for o in ("adam", "sgd")]
    for options in [*choices, {"variant": "cos"}]:
        for more in ({"steps": 1}, {"steps": 40, "lr": 0.5}):
            result = call(fastagg.fedawa, global_sd, clients, sizes, layerwise=layerwise, **options, **more)
            assert all(value.isfinite().all() for value in result.values()), options
            assert result.weights.isfinite().all(), options
            assert (result.weights >= 0).all(), options
            assert result.logits is None or result.logits.isfinite().all(), options
        if options.pop("optimizer", None) == "adam":
            loss, gradient = fastagg.fedawa_objective(gram, result.weights, **options)
            assert torch.as_tensor(loss).isfinite().all(), options
            assert gradient.isfinite().all(), options


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("variant", [*VARIANTS, "cos"])
@pytest.mark.parametrize("case", ["one client", "identical clients", "no update"])
def test_clients_that_are_the_same_give_that_client(case, variant, layerwise):
    """Weights that sum to 1 within 1e-16 cannot change a float32 before it is rounded."""
    global_sd, clients = degenerate(case)
    for steps in (1, 7):
        result = call(fastagg.fedawa, global_sd, clients, SIZES[: len(clients)], variant=variant, layerwise=layerwise,
                      steps=steps)  # fmt: skip
        assert identical(result, clients[0])


@pytest.mark.parametrize("reg", REGS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "case",
    ["one without update", "all but one without update", "global model 0", "a client 0", "a client against g",
     "all against g"],
)  # fmt: skip
def test_degenerate_cohorts_equal_the_equations(case, variant, reg):
    """Where a vector is 0 (its cosine is then 0) or a cosine negative, the equations still say what to do."""
    global_sd, clients = degenerate(case, torch.float64)
    options = {"variant": variant, "reg": reg, "steps": 4, "optimizer": "sgd"}
    result = call(fastagg.fedawa, global_sd, clients, SIZES, **options)
    expected = reference(global_sd, clients, SIZES, **options)
    assert_agrees(result, expected, first_logits(SIZES, variant), torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_differences_there_is_nothing_to_learn(variant):
    global_sd, clients = degenerate("no update", torch.float64)
    result = call(fastagg.fedawa, global_sd, clients, SIZES, variant=variant, steps=10)
    # the gradient is exactly 0 but for rounding, of which Adam makes 1e-7 of a step
    assert_close(result.logits, first_logits(SIZES, variant), rtol=0, atol=1e-7 * ADAM_LR[variant])


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("variant", [*VARIANTS, "cos"])
def test_a_client_without_data(variant, optimizer, layerwise):
    """log 0 must neither become NaN nor spoil the state that is carried."""
    global_sd, clients = make_cohort()
    aggregator = fastagg.FedAWA(variant=variant, optimizer=optimizer, layerwise=layerwise, steps=3)
    for sizes in ((0, 1, 2, 3, 4), (5, 1, 2, 3, 4)):
        result = call(aggregator.aggregate, global_sd, clients, sizes)
        assert all(value.isfinite().all() for value in result.values())
        assert result.weights.isfinite().all()
        without = sizes[0] == 0
        assert variant != "paper" or ((result.weights[..., 0] < 1e-200) == without).all()
    fastagg.FedAWA(variant=variant, layerwise=layerwise).load_state_dict(aggregator.state_dict())
