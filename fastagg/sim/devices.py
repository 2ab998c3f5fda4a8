"""Where clients train: the CPU, an NVIDIA GPU, or Apple's, which has no float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def device_of(name: str) -> torch.device:
    """ValueError where this machine, or this torch, does not have it"""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"sim: device={name!r} cannot be used here ({why}); choose cpu, or install what it needs"
        ) from error
    return device


def widest(device: torch.device) -> torch.dtype:
    """What losses are added up in where they are"""
    return torch.float32 if device.type == "mps" else torch.float64


def float64(x: Tensor) -> Tensor:
    """On its device, or on the CPU where that has no such numbers"""
    return (x.cpu() if x.device.type == "mps" else x).double()


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """torch's random numbers from this seed: of the CPU, which afterwards are as they were, and of the device"""
    with torch.random.fork_rng(devices=[]):
        if device is None or device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield
