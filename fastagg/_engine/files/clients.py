"""The clients of a round on files: models that could be opened, what is wrong with the others, and their names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastagg._engine.checks import BadClientError, InputError
from fastagg._engine.files.mapped import MappedModel, client_name_of, open_model
from fastagg._engine.nonfinite import listed


@dataclass(frozen=True)
class Unusable:
    """A client whose file cannot be read"""

    path: Path
    name: str
    error: InputError


def open_client(path: str | os.PathLike) -> MappedModel | Unusable:
    """A client's model, or what is wrong with its file. A path where there is nothing is no client, and raises."""
    try:
        return open_model(path)
    except InputError as error:
        if not os.path.lexists(path):
            raise
        return Unusable(Path(path), client_name_of(Path(path)), error)


def ids_of(clients: Sequence[MappedModel | Unusable], given: Sequence[Any] | None) -> list[Any]:
    """The ids given, or the names of the files"""
    given = [client.name for client in clients] if given is None else given
    ids = [name.item() if isinstance(name, np.generic | torch.Tensor) else name for name in given]
    if len(ids) != len(clients):
        raise InputError(f"client_ids has {len(ids)} entries for {len(clients)} files")
    seen: dict[Any, MappedModel | Unusable] = {}
    for name, client in zip(ids, clients, strict=True):
        other = seen.setdefault(name, client)
        if other is not client:
            raise InputError(
                f"{other.path} and {client.path} are both client {name!r}: rename one, or name their folders instead"
            )
    return ids


@contextmanager
def naming_files(clients: Sequence[MappedModel | Unusable]) -> Iterator[None]:
    """An error about clients that is raised in here names their files as well"""
    try:
        yield
    except BadClientError as error:
        paths = [str(clients[k].path) for k in error.clients if 0 <= k < len(clients)]
        raise type(error)(f"{error}; in {listed(paths)}" if paths else str(error), error.reasons) from error
