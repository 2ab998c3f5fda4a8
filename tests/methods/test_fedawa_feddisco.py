"""FedAWA from FedDisco's weights (the paper's Figure 6): both transcribed naively, in float64."""

import math

import pytest
import torch

import fastagg
from helpers.fedawa import DTYPES, LAYERS, SIZES, VARIANTS, assert_agrees, call, make_cohort, reference

pytestmark = pytest.mark.filterwarnings("ignore:fedawa. variant='released' learns over rounds")
LABELS = [[60, 50, 10], [10, 10, 10], [75, 0, 0], [70, 60, 80], [0, 0, 15]]


def feddisco(sizes, labels):
    """relu(n_k - 0.5 d_k + 0.1), normalised; d_k: KL(labels of k || uniform) over the sum of all"""
    divergence = []
    for row in labels:
        shares = [count / sum(row) for count in row]
        divergence.append(sum(p * math.log(p * len(row)) for p in shares if p > 0))
    raw = [n / sum(sizes) - 0.5 * d / sum(divergence) + 0.1 for n, d in zip(sizes, divergence, strict=True)]
    raw = torch.tensor([max(x, 0.0) for x in raw], dtype=torch.float64)
    return raw / raw.sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_equations(variant, layerwise, steps, dtype):
    labels = [[60, 50, 10], [10, 10, 10], [40, 20, 15], [70, 60, 80], [5, 4, 6]]  # no weight is 0: its log is finite
    weights = feddisco(SIZES, labels)
    assert (weights > 0).all()
    T = weights if variant == "released" else weights.log()
    T = T.expand(len(LAYERS), -1) if layerwise else T
    options = {"variant": variant, "layerwise": layerwise, "steps": steps}
    global_sd, clients = make_cohort(dtype)
    result = call(fastagg.fedawa, global_sd, clients, SIZES, start="feddisco", label_dist=labels, **options)
    assert_agrees(result, reference(global_sd, clients, SIZES, logits=T, **options), T, dtype)


def test_a_client_that_feddisco_leaves_out_stays_out():
    weights = feddisco(SIZES, LABELS)
    assert weights[-1] == 0
    global_sd, clients = make_cohort()
    result = fastagg.fedawa(global_sd, clients, SIZES, label_dist=LABELS)
    assert result.weights[-1] == 0
    rest = fastagg.fedawa(global_sd, clients[:4], logits=weights[:4].log())
    torch.testing.assert_close(result.weights[:4], rest.weights, rtol=1e-9, atol=0)


def test_carried_logits_come_first():
    """ "released": who is known goes on from its logit, who is new starts at FedDisco's weight"""
    server = fastagg.aggregator("fedawa", variant="released", start="feddisco")
    global_sd, clients = make_cohort()
    first = server.aggregate(global_sd, clients[:3], SIZES[:3], [0, 1, 2], label_dist=LABELS[:3])
    second = server.aggregate(global_sd, clients, SIZES, [0, 1, 2, 3, 4], label_dist=LABELS)
    expected = torch.cat([first.logits, feddisco(SIZES, LABELS)[3:]]).softmax(0)
    torch.testing.assert_close(second.weights, expected, rtol=1e-12, atol=0)


def test_what_it_needs():
    global_sd, clients = make_cohort()
    with pytest.raises(fastagg.InputError, match="fedawa needs label_dist: each client's label distribution"):
        fastagg.fedawa(global_sd, clients, start="feddisco")
    with pytest.raises(ValueError, match="fedawa: variant='cos' has no weights to start from"):
        fastagg.aggregator("fedawa", variant="cos", start="feddisco")
    with pytest.raises(fastagg.InputError, match=r"variant='cos' .* takes no label_dist"):
        fastagg.fedawa(global_sd, clients, variant="cos", label_dist=LABELS)
