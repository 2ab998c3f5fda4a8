"""Cohorts and means for ranked_means, whichever backend computes it."""

from __future__ import annotations

import numpy as np
import torch

from fastagg._engine import ranks
from fastagg._engine import table as tables
from helpers.cohort import DTYPES

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def values(K, n, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return list(torch.rand(K, n, generator=generator) < 0.5)
    if dtype not in DTYPES:
        return list(torch.randint(0, 100, (K, n), generator=generator).to(dtype))
    return list(torch.randn(K, n, generator=generator, dtype=torch.float64).to(dtype))


def every_mean(K):
    f = (K - 1) // 3
    return [
        ranks.median(K), ranks.trimmed(K, f), ranks.median(K).around(K - f), ranks.median(K).around(1),
        ranks.trimmed(K, f).around(max(K // 3, 1)), ranks.RankedMean(0, 0, max(K - 2 * f, 1)), ranks.RankedMean(0, 0),
        ranks.maximum(K),
    ]  # fmt: skip


def cohort_of(K, sizes, dtype, *, offset=0):
    """A global model and K clients with tensors of these sizes, `offset` elements off their allocation's alignment"""

    def model(seed):
        parts = [values(1, n + offset, dtype, seed=1000 * seed + n)[0][offset:] for n in sizes]
        return {f"{n}.weight": part for n, part in zip(sizes, parts, strict=True)}

    return model(0), [model(k + 1) for k in range(K)]


def ranked_means(backend, g, clients, means, row=None, mixing=None):
    """(outputs [M][T], marks [T]) of models, by a backend; means are [M] of them, or [S][M] with the row of each
    tensor. What is left alone is full of 3."""
    table = tables.build(g, clients)
    stats = np.array(means if row is not None else [means], dtype=np.int64)
    row = np.zeros(table.T, np.int32) if row is None else np.array(row, dtype=np.int32)
    out = [[torch.full_like(t, 3) for t in table.clients[0]] for _ in range(stats.shape[1])]
    marks = torch.zeros(table.T, dtype=torch.uint8, device=table.device)
    backend.ranked_means(table, stats, row, out, marks, mixing)
    return out, marks.tolist()


def same_bits(a, b):
    """Of outputs [M][T], the sign of zero included"""
    for x, y in zip((t for row in a for t in row), (t for row in b for t in row), strict=True):
        assert x.dtype == y.dtype
        if not torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)):
            return False
    return True
