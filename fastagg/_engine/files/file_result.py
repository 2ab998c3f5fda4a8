"""What a round on files returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastagg._engine.gram import Gram


@dataclass(eq=False)
class FileResult:
    """How a model in a file came about; the model itself is there and not here.

    paths      the files written: a model, or the index of a sharded one; by client or cluster where there are several
    weights    the clients' weights in the order of clients, [K] or [L, K]; of several models .mixing, [M, K]
    dropped    clients that were left out, by id, and why (on_bad_client="drop")
    made_before   an earlier call made this round, and was stopped before its state was in its place; now it is
    """

    method: str
    clients: list[Any]
    paths: dict[str, Path] = field(default_factory=dict)
    weights: torch.Tensor | None = None
    mixing: torch.Tensor | None = None
    layers: tuple[str, ...] | None = None
    gram: Gram | None = None
    clusters: list[list[Any]] | None = None
    dropped: Mapping[Any, str] = field(default_factory=dict)
    passes: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    made_before: bool = False
