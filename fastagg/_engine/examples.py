"""Rounds that every method can take, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from fastagg._engine.inputs import RoundInput

CLASSES = 4


class ExampleRound(NamedTuple):
    """A round to try a method on: the method's options, and the inputs of the round for K clients"""

    options: dict[str, Any]
    inputs: dict[str, Any]


class ExampleNet(torch.nn.Module):
    """Two layers and BatchNorm, for inputs of 3 x 4 x 4"""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 6, 3, bias=False)
        self.bn = torch.nn.BatchNorm2d(6)
        self.fc = torch.nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


def example_inputs(specs: Iterable[RoundInput], K: int, *, optional: bool = False) -> dict[str, Any]:
    """Values for the inputs that a method requires, and for optional ones if asked, as their declarations allow"""
    generator = torch.Generator().manual_seed(9)
    return {spec.name: _example(spec, K, generator) for spec in specs if spec.required or optional}


def _example(spec: RoundInput, K: int, generator: torch.Generator) -> Any:
    if spec.kind == "proxy":
        return example_batches()
    if spec.entry_dims == 0:
        return list(range(1, K + 1))
    return torch.rand(K, K if spec.pairwise else CLASSES, generator=generator, dtype=torch.float64) + 0.1


def example_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches for ExampleNet"""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 3, 4, 4, generator=generator), torch.randint(CLASSES, (8,), generator=generator))
        for _ in range(2)
    ]
