"""What a round on files returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastagg._engine.gram import Gram
from fastagg._engine.result import Result, Results


@dataclass(eq=False)
class FileResult:
    """Describes how a model in a file was computed. The model itself is in the file.

    method     name of the method
    clients    ids of the clients
    paths      the files written: a model, or the index of a sharded one; by client or cluster if there are several
    weights    weights of the clients, in the order of clients, [K] or [L, K]; for several models .mixing, [M, K]
    dropped    the clients that were left out: a dict from client id to reason (on_bad_client="drop")
    passes, bytes_read, seconds   what the round cost
    made_before   True if an earlier call computed this round but was stopped before its state was in place. Now it is

    Whatever else the result of such a round says in memory (.logits, .angles, ...) is an attribute here, too.
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

    def take_over(self, found: Result | Results) -> None:
        """What a round's result says, without its models"""
        own = ("method", "clients", "paths", "passes", "bytes_read", "seconds", "made_before")
        said = {name: value for name, value in vars(found).items() if not isinstance(value, Result | Results)}
        vars(self).update({name: value for name, value in said.items() if name not in own and name[0] != "_"})
