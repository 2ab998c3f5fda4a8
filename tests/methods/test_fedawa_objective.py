"""FedAWA's objective and its gradient: autograd's, the slope of the loss, and where it leads."""

import pytest
import torch

import fastagg
from helpers.fedawa import REGS, SIZES, VARIANTS, assert_close, call, flatten, make_cohort, objective, scopes_of

pytestmark = pytest.mark.filterwarnings("ignore:fedawa. variant='released' learns over rounds")
WEIGHTS = torch.tensor([0.30, 0.15, 0.55, 0.07, 0.41], dtype=torch.float64)  # sum to 1.48


def layer_weights(layerwise):
    factors = torch.tensor([1.0, 0.3, 1.7, 0.8, 1.1], dtype=torch.float64)
    return factors[:, None] * WEIGHTS if layerwise else WEIGHTS


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("reg", REGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_objective_equals_autograd(variant, reg, layerwise):
    global_sd, clients = make_cohort()
    gram = fastagg.gram(global_sd, clients, layerwise=layerwise)
    loss, gradient = fastagg.fedawa_objective(gram, layer_weights(layerwise), variant=variant, reg=reg)
    assert torch.as_tensor(loss).shape == gradient.shape[:-1]
    assert gradient.shape == ((5, 5) if layerwise else (5,))
    rows = layer_weights(layerwise).reshape(-1, 5)
    for i, keys in enumerate(scopes_of(global_sd, layerwise)):
        g, w = flatten(global_sd, keys), torch.stack([flatten(sd, keys) for sd in clients])
        l = rows[i].clone().requires_grad_()  # noqa: E741
        expected = objective(l, g, w, variant, reg)
        expected.backward()
        assert_close(torch.as_tensor(loss).double().reshape(-1)[i], expected.detach(), rtol=1e-12, atol=1e-12)
        assert_close(gradient.reshape(-1, 5)[i], l.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("reg", REGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_objective_gradient_is_the_slope_of_its_loss(variant, reg, layerwise):
    """Central differences at h = 1e-5: h^2 from the third derivative and 1e-15 / h from rounding, both 1e-10."""
    gram = fastagg.gram(*make_cohort(), layerwise=layerwise)
    weights, h = layer_weights(layerwise), 1e-5

    def loss(l):  # noqa: E741
        return torch.as_tensor(fastagg.fedawa_objective(gram, l, variant=variant, reg=reg)[0])

    steps = h * torch.eye(5, dtype=torch.float64)
    slope = torch.stack([(loss(weights + e) - loss(weights - e)) / (2 * h) for e in steps], -1)
    _, gradient = fastagg.fedawa_objective(gram, weights, variant=variant, reg=reg)
    assert_close(gradient, slope, rtol=1e-8, atol=1e-8)


def test_regularisers_and_variants_differ():
    """Otherwise the comparisons above would compare nothing."""
    gram = fastagg.gram(*make_cohort())
    losses = {
        (variant, reg): float(fastagg.fedawa_objective(gram, WEIGHTS, variant=variant, reg=reg)[0])
        for variant in VARIANTS for reg in REGS
    }  # fmt: skip
    assert losses["paper", None] == losses["released", None]
    assert min(abs(a - b) for x, a in losses.items() for y, b in losses.items() if x[1] and x != y) > 1e-3


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_minimised_to_the_end_it_collapses_onto_one_client(variant, optimizer, layerwise):
    """Eq. 2 is 0 at every corner of the simplex, because a client alone is no distance from itself."""
    global_sd, clients = make_cohort(torch.float32)
    options = {"variant": variant, "optimizer": optimizer, "reg": None, "layerwise": layerwise}
    result = call(fastagg.fedawa, global_sd, clients, SIZES, steps=600, lr=0.3, **options)
    assert result.weights.isfinite().all()
    assert result.logits.isfinite().all()
    with_parameters = result.weights[:-1] if layerwise else result.weights
    assert (with_parameters.amax(-1) > 0.9).all()
    few = fastagg.fedawa(global_sd, clients, SIZES, steps=10, lr=1e-3, **options)
    assert few.weights.max() < 0.6
