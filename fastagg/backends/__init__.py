"""Which implementation of the kernels serves a call, and why another one does not."""

from __future__ import annotations

import warnings
from types import ModuleType

import torch

from fastagg.backends import reference

try:
    from fastagg.backends import cpu

    _why_no_cpu = ""
except ImportError as error:
    cpu = None
    _why_no_cpu = str(error)
    warnings.warn(f"fastagg: no native module ({error}); the much slower reference is used", stacklevel=2)

NAMES = ("auto", "cpu", "reference")
_chosen = "auto"


def set_backend(name: str) -> None:
    """Chooses the kernels of every later call: "auto" (the fastest for where the tensors are), "cpu" or "reference"."""
    global _chosen
    _chosen = _known(name)


def choose(device: torch.device, name: str | None = None) -> ModuleType:
    name = _chosen if name is None else _known(name)
    if name == "reference" or (name == "auto" and (device.type != "cpu" or cpu is None)):
        return reference
    if cpu is None:
        raise RuntimeError(f"backend 'cpu' is not available: {_why_no_cpu}")
    if device.type != "cpu":
        raise RuntimeError(f"backend 'cpu' cannot read tensors on {device}")
    return cpu


def availability() -> dict[str, str]:
    """Each backend and 'available', or why it is not."""
    return {
        "cpu": "available" if cpu is not None else f"not available: {_why_no_cpu}",
        "reference": "available",
    }


def _known(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"unknown backend {name!r}; expected one of {', '.join(NAMES)}")
    return name
