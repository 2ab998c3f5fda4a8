"""The model that FedAWA returns: the mean of the clients by the weights that it returns."""

import pytest
import torch

import fastagg
from helpers.fedawa import DTYPES, SIZES, VARIANTS, assert_close, call, identical, make_cohort, naive_mix

pytestmark = pytest.mark.filterwarnings("ignore:fedawa. variant='released' learns over rounds")


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("variant", [*VARIANTS, "cos"])
def test_the_model_is_the_mean_by_the_weights_returned(variant, layerwise, dtype, gamma):
    """Accumulated wide and rounded once: float32 may differ from the float64 mean by its last bit, 2^-23."""
    global_sd, clients = make_cohort(dtype)
    result = call(fastagg.fedawa, global_sd, clients, SIZES, variant=variant, layerwise=layerwise, gamma=gamma, steps=2)
    expected = naive_mix(clients, result.weights, layerwise, gamma)
    for key, value in expected.items():
        if value.is_floating_point():
            assert_close(result[key], value, rtol=2**-23 if dtype == torch.float32 else 1e-13, atol=1e-15)
        else:
            assert torch.equal(result[key], value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize(
    "options", [{}, {"variant": "released"}, {"variant": "released", "steps": 4}, {"variant": "cos"}], ids=str
)
def test_the_model_is_the_mix_bit_for_bit(options, layerwise, dtype):
    """In particular for one released step, where Gram and mix share a read."""
    global_sd, clients = make_cohort(dtype)
    result = call(fastagg.fedawa, global_sd, clients, SIZES, layerwise=layerwise, **options)
    assert identical(result, fastagg.mix(clients, result.weights, layerwise=layerwise))
    gram = fastagg.gram(global_sd, clients, layerwise=layerwise)
    assert torch.equal(result.gram.matrix, gram.matrix)


@pytest.mark.parametrize(
    "options", [{"variant": "released"}, {"variant": "paper", "layerwise": True}, {"variant": "cos"}], ids=str
)
def test_out_is_written_in_place(options):
    global_sd, clients = make_cohort(torch.float32)
    expected = fastagg.fedawa(global_sd, clients, SIZES, **options)
    out = {key: torch.zeros_like(value) for key, value in global_sd.items()}
    result = call(fastagg.fedawa, global_sd, clients, SIZES, out=out, **options)
    assert all(result[key] is out[key] for key in out)
    assert identical(result, expected)
