"""The best factors of a given rank for a weighted sum of updates, from small matrices.

The sum is S = C R, where R has the rows of all A below each other, each divided by its length, and C the weighted
columns of all B beside each other, times these lengths. With R R' = V L V' and N = C V sqrt(L), the singular values of
S are those of N, whose N' N is small too. A product of Grams knows singular values to 1e-8 of the largest: less than
the factors' own float32 tells. Lengths are in C, or one client with long A and short B would blur all the others.

Directions of R that are too short for V, along which clients have hardly moved, do not choose the components B, but A
has its part in them: it is B'S, divided by the squares of the lengths of B.
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


class Small(NamedTuple):
    """B and A of Truncated as combinations of the columns of all B and the rows of all A, but for their signs: at most
    [r, P]. length: of a row of all A, on average"""

    of_B: Tensor
    of_A: Tensor
    left: float
    length: Tensor


def truncated(
    factors: Sequence[Factors], weights: Sequence[float], rank: int, known: Core | None = None
) -> Truncated | None:
    """sum_k weights_k scaling_k B_k A_k, of this rank; None if it is not finite.

    Where the sum has fewer components, B is filled up with columns of zeros, beside rows of A that may still learn, as
    long as those given are on average: directions of these and, if they have too few, random ones, always the same.

    known   the products of these factors, if they have been computed
    """
    core = known or core_of(None, factors)
    small = combinations(core, [w for f, w in zip(factors, weights, strict=True) for _ in range(f.rank)], rank)
    if small is None:
        return None
    A = combined([f.A for f in factors], [1.0] * len(factors), small.of_A)
    B = combined([f.B.T for f in factors], [f.scaling for f in factors], small.of_B)
    if missing := rank - len(A):
        generator = torch.Generator("cpu").manual_seed(0)
        more = torch.randn(missing, A.shape[1], generator=generator, dtype=torch.float64, device="cpu")
        A = torch.cat([A, (small.length * more / more.norm(dim=1, keepdim=True)).to(A.device)])
        B = torch.nn.functional.pad(B, (0, 0, 0, missing))
    largest = A.gather(1, A.abs().argmax(1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0)
    return Truncated((B * sign).T, A * sign, small.left)


def combinations(core: Core, weights: Sequence[float], rank: int) -> Small | None:
    """From products of factors without a center, each row of which has a weight; None if they are not finite"""
    length = core.A.diagonal().sqrt()
    length = torch.where(length > 0, length, 1.0)
    columns = core.unit * length * torch.tensor(weights, dtype=torch.float64, device="cpu")
    products = columns[:, None] * core.B * columns  # C'C
    if not bool(torch.isfinite(core.A).all() and torch.isfinite(products).all()):
        return None
    spread, basis = torch.linalg.eigh(core.A / length[:, None] / length)
    kept = spread > EPSILON * len(spread) * spread[-1].clamp(min=0)
    spread, basis, short = spread[kept].sqrt(), basis[:, kept], basis[:, ~kept]
    squares, turn = torch.linalg.eigh(spread[:, None] * (basis.T @ products @ basis) * spread)  # of N'N
    squares, turn = squares.flip(0).clamp(min=0), turn.flip(1)
    squares = torch.where(squares > EPSILON * len(squares) * squares[:1], squares, 0.0)
    left = float((squares[rank:].sum() / squares.sum()).sqrt()) if len(squares) and squares[0] > 0 else 0.0

    squares, turn = squares[:rank], turn[:, :rank]
    long = squares.sqrt()
    carries = long > 0
    inverse = torch.where(carries, 1 / torch.where(carries, long, 1.0), 0.0)
    usual = (core.A.trace() / max(len(core.A), 1)).sqrt()
    of_B = (inverse.sqrt() * turn * spread[:, None]).T @ basis.T
    of_A = (torch.where(carries, long.sqrt(), usual) * turn / spread[:, None]).T @ basis.T
    of_A += inverse[:, None] * of_B @ products @ short @ short.T  # B'S / long, of what R has along short directions
    return Small(of_B * columns / core.unit, of_A / length, left, usual)
