"""The new factors of a module, from a weighted sum of updates.

    "rank"       the best factors of a given rank: what clients can go on with
    "exact"      all factors beside each other (FLoRA): the sum itself, of the sum of all ranks, to be merged
    "frozen_a"   the mean of B, where all have the same A (FFA-LoRA): the sum itself
    "separate"   the means of A and of B (FedIT), which is not the sum; other ranks are filled up with zeros (HetLoRA)

All of them are taken times a scaling, that of the adapter whose form the new one has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fastagg._engine.adapters.factors import Core, Factors
from fastagg._engine.adapters.truncated import truncated
from fastagg._engine.checks import check_choice, check_integer

Form = Literal["rank", "exact", "frozen_a", "separate"]


class New(NamedTuple):
    """A [r, in] and B [out, r], to be taken times a scaling that is given; left: see truncated.py"""

    A: Tensor
    B: Tensor
    left: float = 0.0


def check(form: str, rank: int | None) -> None:
    check_choice("lora", "form", form, get_args(Form))
    if rank is not None:
        if form != "rank":
            raise ValueError(f"lora: rank={rank} is for form='rank'; form={form!r} has the rank that it has")
        check_integer("lora", "rank", rank, 1)


def new_factors(
    form: Form, factors: Sequence[Factors], weights: Sequence[float], like: Factors, rank: int, core: Core | None
) -> New | None:
    """sum_k weights_k scaling_k B_k A_k as like.scaling * B A; None if that is not finite

    like   whose A is frozen; and dtype and scaling
    core   products that are known
    """
    ratios = [w * f.scaling / like.scaling for f, w in zip(factors, weights, strict=True)]
    if not factors:  # of rank 0, PEFT takes none, and with A = 0 beside it B = 0 would never learn
        return _rounded(like.A.clone(), torch.zeros_like(like.B), like)
    if form == "rank":
        found = truncated(factors, weights, rank, None if core is None else core.of(factors))
        return None if found is None else _rounded(found.A, found.B / like.scaling, like, found.left)
    if form == "exact":
        A = torch.cat([f.A.to(like.A.dtype) for f in factors])
        B = [(f.B.double() * ratio).to(like.B.dtype) for f, ratio in zip(factors, ratios, strict=True)]
        return _rounded(A, torch.cat(B, 1), like)
    B = _mean([f.B for f in factors], ratios, (len(like.B), rank), like.B)
    if form == "frozen_a":
        return _rounded(like.A.clone(), B, like)
    return _rounded(_mean([f.A for f in factors], weights, (rank, like.A.shape[1]), like.A), B, like)


def _mean(tensors: Sequence[Tensor], weights: Sequence[float], shape: tuple[int, int], like: Tensor) -> Tensor:
    """sum_k weights_k tensors_k in float64; tensors of a smaller rank are filled up with zeros"""
    total = torch.zeros(shape, dtype=torch.float64, device=like.device)
    for tensor, weight in zip(tensors, weights, strict=True):
        total[: tensor.shape[0], : tensor.shape[1]].add_(tensor, alpha=weight)
    return total


def _rounded(A: Tensor, B: Tensor, like: Factors, left: float = 0.0) -> New | None:
    new = New(A.to(like.A.dtype).contiguous(), B.to(like.B.dtype).contiguous(), left)
    return new if bool(torch.isfinite(new.A).all() and torch.isfinite(new.B).all()) else None
