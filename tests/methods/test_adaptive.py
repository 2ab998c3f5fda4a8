"""The promise of an adaptive method: within one call, the weights depend on what the clients sent."""

from __future__ import annotations

import pytest
import torch

import fastagg
from fastagg._engine.examples import ExampleNet, example_batches
from helpers.every_method import SHAPES

HONEST = 9
# The most an outlier may count, relative to the lightest of the others. SimProx takes a softmax of numbers that sum to
# 1, and L-DAWA the cosine of whole models with the global one: by their equations, neither can tell clients far apart.
METHODS = {
    "fedawa": ({}, 0.7),
    "fedawa, layerwise": ({"layerwise": True}, 0.7),
    "fedawa, cos": ({"variant": "cos"}, 0.1),
    "simprox": ({}, 0.95),
    "ldawa": ({}, 0.98),
    "fedadp": ({}, 0.1),
    "simagg": ({}, 0.7),
    "weiavg": ({}, 0.1),
}


def cohort(seed, outlier=True):
    """Nine clients that agree, more or less, and one that sends three times the opposite; or ten that all differ"""
    generator = torch.Generator().manual_seed(seed)

    def noise():
        return {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}

    g, shared = noise(), noise()

    def client(along, spread):
        own = noise()
        return {key: g[key] + 0.1 * (along * shared[key] + spread * own[key]) for key in g}

    if outlier:
        return g, [*(client(1, 0.5) for _ in range(HONEST)), client(-3, 0.5)]
    return g, [client(*torch.rand(2, generator=generator).tolist()) for _ in range(HONEST + 1)]


@pytest.mark.parametrize("case", METHODS)
def test_an_outlier_counts_clearly_less_than_the_others(case):
    options, most = METHODS[case]
    for seed in (0, 1):
        weights = getattr(fastagg, case.partition(",")[0])(*cohort(seed), **options).weights
        weights = weights.mean(0) if weights.dim() == 2 else weights
        assert weights[HONEST] < most * weights[:HONEST].min()


@pytest.mark.parametrize("case", METHODS)
def test_different_clients_give_different_weights(case):
    options, _ = METHODS[case]
    method = getattr(fastagg, case.partition(",")[0])
    first, second = (method(*cohort(seed, outlier=False), **options).weights for seed in (0, 1))
    assert (first - second).abs().max() > 1e-4


def test_fedlaw_learns_other_weights_from_other_clients():
    torch.manual_seed(0)
    model = ExampleNet()
    weights = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        g = model.state_dict()
        clients = [
            {k: v + torch.randn(v.shape, generator=generator) if k.startswith("fc") else v for k, v in g.items()}
            for _ in range(4)
        ]
        weights.append(
            fastagg.fedlaw(g, clients, model=model, proxy=example_batches(), epochs=3, progress=False).weights
        )
    assert (weights[0] - weights[1]).abs().max() > 1e-3
