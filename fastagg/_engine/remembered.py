"""Tensors that a method remembers, one per parameter: checked when they are loaded, and against each round's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastagg._engine.dtypes import FLOATING
from fastagg._engine.table import InputError, Layout


def check_tensor(where: str, key: Any, value: Any) -> None:
    """That what was loaded is an ordinary, finite, floating-point tensor under a string"""
    if not isinstance(key, str) or not isinstance(value, torch.Tensor) or value.dtype not in FLOATING:
        raise InputError(f"{where} is not a floating-point tensor under a string")
    if value.is_meta or value.layout is not torch.strided:
        raise InputError(f"{where} is not an ordinary dense tensor")
    if not torch.isfinite(value).all():
        raise InputError(f"{where} is not finite")


def check_form(method: str, layout: Layout, remembered: Mapping[str, torch.Tensor]) -> None:
    """That there is a tensor for each parameter of this round's model, of its shape, and no other"""
    known = {key: tuple(tensor.shape) for key, tensor in remembered.items()}
    given = {key: shape for key, shape, p in zip(layout.keys, layout.shapes, layout.is_param, strict=True) if p}
    for key in [*given, *known]:
        if known.get(key) != given.get(key):
            was, now = (f"of shape {x[key]}" if key in x else "not a parameter" for x in (known, given))
            raise InputError(f"{method}: {key!r} is {now}, but was {was} in the rounds before")
