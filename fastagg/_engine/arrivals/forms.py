"""State dicts as a round keeps them, and what it knows of models that it does not keep."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from fastagg._engine.table import StateDict


def copy_of(sd: StateDict) -> StateDict:
    """The same tensors, and what state_dict() says of its modules' versions"""
    copy = OrderedDict(sd)
    if hasattr(sd, "_metadata"):
        vars(copy)["_metadata"] = sd._metadata  # type: ignore[attr-defined]
    return copy


def blank(sd: StateDict) -> StateDict:
    """A model of this form. On the CPU it takes no memory, for it is never written to"""
    return {key: _blank_like(value) for key, value in sd.items()}


def _blank_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return np.zeros(value.shape, value.dtype)
    return zero_bytes(value.numel() * value.itemsize, value.device).view(value.dtype).view(value.shape)


def zero_bytes(count: int, device: torch.device) -> torch.Tensor:
    """On the CPU by NumPy, whose zeros take no memory as long as they are only read; nor torch's threads, which hang in
    a child that was forked"""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(max(count, 1), dtype=np.uint8))[:count]  # of none, torch gives no view
    return torch.zeros(count, dtype=torch.uint8, device=device)


def dtype_of(value: Any) -> str:
    """Of a tensor or an array"""
    return str(value.dtype).removeprefix("torch.")
