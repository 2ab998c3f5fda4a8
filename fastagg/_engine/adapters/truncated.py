"""The best factors of a given rank for a weighted sum of updates, from small matrices.

The sum is S = C R, where C has the weighted columns of all B beside each other and R the rows of all A below each
other. With R R' = V L V' and N = C V sqrt(L), the singular values of S are those of N, whose N' N is small too. A
product of Grams knows singular values to 1e-8 of the largest: less than the factors' own float32 tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastagg._engine.adapters.factors import Core, Factors, combined, core_of

EPSILON = 2.0**-52


class Truncated(NamedTuple):
    """B A of the rank asked for; float64.

    B, A     [out, r], [r, in]: a component's length is shared by both equally, the longest first. The largest element
             of each row of A is positive.
    left     what the components left out have, relative to the whole: ||S - B A|| / ||S||
    """

    B: Tensor
    A: Tensor
    left: float


def truncated(
    factors: Sequence[Factors], weights: Sequence[float], rank: int, known: Core | None = None
) -> Truncated | None:
    """sum_k weights_k scaling_k B_k A_k, of this rank; None if it is not finite.

    Where the sum has fewer components, B is filled up with columns of zeros, beside rows of A that may still learn:
    directions of the A given, as long as they are on average.

    known   the products of these factors, if they have been computed
    """
    core = known or core_of(None, factors)
    ratios = [f.scaling / core.unit * w for f, w in zip(factors, weights, strict=True)]
    of_rows = torch.tensor(
        [w * core.unit for f, w in zip(factors, weights, strict=True) for _ in range(f.rank)], dtype=torch.float64
    )
    columns = of_rows[:, None] * core.B * of_rows  # C'C
    if not bool(torch.isfinite(core.A).all() and torch.isfinite(columns).all()):
        return None
    spread, basis = torch.linalg.eigh(core.A)
    kept = spread > EPSILON * len(spread) * spread[-1].clamp(min=0)
    spread, basis = spread[kept].sqrt(), basis[:, kept]
    small = spread[:, None] * (basis.T @ columns @ basis) * spread  # N'N
    squares, turn = torch.linalg.eigh(small)
    squares, turn = squares.flip(0).clamp(min=0), turn.flip(1)
    squares[squares <= EPSILON * len(squares) * squares[:1].max()] = 0
    left = float((squares[rank:].sum() / squares.sum()).sqrt()) if len(squares) and squares[0] > 0 else 0.0

    squares, turn = squares[:rank], turn[:, :rank]
    lengths = squares.sqrt()
    carries = lengths > 0
    usual = (core.A.trace() / max(len(core.A), 1)).sqrt()
    of_A = torch.where(carries, lengths.sqrt(), usual)
    of_B = torch.where(carries, 1 / torch.where(carries, lengths, 1.0).sqrt(), 0.0)
    missing = rank - len(squares)
    by_A = torch.nn.functional.pad((of_A * turn / spread[:, None]).T @ basis.T, (0, 0, 0, missing))
    by_B = torch.nn.functional.pad((of_B * turn * spread[:, None]).T @ basis.T, (0, 0, 0, missing))
    A = combined([f.A for f in factors], [1.0] * len(factors), by_A)
    B = combined([f.B.T for f in factors], [r * core.unit for r in ratios], by_B)
    largest = A.gather(1, A.abs().argmax(1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0)
    return Truncated((B * sign).T, A * sign, left)
