"""FedAWA with variant='cos': weights by the cosine of an update with the mean of all."""

import pytest
import torch
from torch.nn import functional as F

import fastagg
from helpers.fedawa import (
    DTYPES,
    SIZES,
    assert_close,
    call,
    first_logits,
    flatten,
    identical,
    make_cohort,
    make_global,
    scaled,
    scopes_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:fedawa. variant='released' learns over rounds")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
def test_cos_variant(layerwise, dtype):
    global_sd, clients = make_cohort(dtype)
    clients[2] = {  # against the others, so that its weight is 0
        key: 2 * global_sd[key] - value if value.is_floating_point() else value for key, value in clients[3].items()
    }
    result = call(fastagg.fedawa, global_sd, clients, SIZES, variant="cos", layerwise=layerwise)
    shares = first_logits(SIZES, "released")
    rows = []
    for keys in scopes_of(global_sd, layerwise):
        g, w = flatten(global_sd, keys), torch.stack([flatten(sd, keys) for sd in clients])
        cos = F.cosine_similarity(w - g, (shares[:, None] * (w - g)).sum(0)[None], dim=1).clamp(min=0)
        rows.append(cos / cos.sum() if cos.sum() > 0 else shares)
    expected = torch.stack(rows) if layerwise else rows[0]
    # cosines are sums of a thousand products of numbers with 24 or 53 bits
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert_close(result.weights, expected, rtol=tolerance, atol=tolerance)
    assert (result.weights.reshape(-1, 5)[0, 2] == 0).item()
    assert result.logits is None


@pytest.mark.parametrize("layerwise", [False, True], ids=["model", "layers"])
def test_cos_variant_falls_back_to_data_shares(layerwise):
    """sum n_k d_k = 0 is the only way no cosine is positive; these updates cancel without rounding."""
    global_sd = scaled(make_global(torch.float32), 0)
    update = {key: torch.full_like(value, 0.5) for key, value in global_sd.items()}
    clients = [scaled(update, factor) for factor in (1, -1, 2, -2)]
    sizes = (4, 4, 3, 3)
    result = call(fastagg.fedawa, global_sd, clients, sizes, variant="cos", layerwise=layerwise)
    shares = first_logits(sizes, "released")
    assert_close(result.weights, shares.expand_as(result.weights), rtol=1e-15)
    assert identical(result, fastagg.fedavg(global_sd, clients, sizes))
