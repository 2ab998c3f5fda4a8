"""Stages before a method give what byzfl's pre-aggregators give, where byzfl is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastagg
from helpers.byzfl import load

pytestmark = pytest.mark.integration
byzfl = load("aggregators.preaggregators")


def vectors(K=11, n=400):
    generator = torch.Generator().manual_seed(K)
    x = torch.randn(K, n, generator=generator, dtype=torch.float64)
    return x * (0.5 + torch.arange(K, dtype=torch.float64)[:, None] % 5)


@pytest.mark.parametrize("f", [0, 1, 3, 5])
@pytest.mark.parametrize(
    ("pre", "theirs"),
    [
        ("nnm", lambda f: [byzfl.NNM(f)]),
        ("arc", lambda f: [byzfl.ARC(f)]),
        ("clipping c=30", lambda f: [byzfl.Clipping(30.0)]),
        ("arc + nnm", lambda f: [byzfl.ARC(f), byzfl.NNM(f)]),
        ("nnm + arc", lambda f: [byzfl.NNM(f), byzfl.ARC(f)]),
        ("nnm + clipping c=12", lambda f: [byzfl.NNM(f), byzfl.Clipping(12.0)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stages(pre, theirs, f):
    x = vectors()
    expected = x.numpy().copy()
    for stage in theirs(f):
        expected = stage(expected)
    expected = np.sort(expected, axis=0)[f : len(x) - f].mean(0)
    g = {"w": torch.zeros(x.shape[1], dtype=torch.float64)}
    found = fastagg.trimmed_mean(g, [{"w": row} for row in x], f=f, pre=pre)
    np.testing.assert_allclose(found["w"].numpy(), expected, rtol=1e-10, atol=1e-12)
