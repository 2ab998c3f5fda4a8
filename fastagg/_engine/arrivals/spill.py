"""The folder in which the clients of one round wait: a safetensors file for each, whose metadata say whose it is.

There is no other list of them. A file gets its name when all of it is on the disk, and a client is in the round as long
as its file is there, so a process that is killed leaves a folder from which the round can go on. Beside them are the
global model (global.safetensors) and what the round is (round.json). One process at a time holds the folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastagg._engine import atomic, saved
from fastagg._engine.checks import InputError
from fastagg._engine.files.mapped import MappedModel, open_model
from fastagg._engine.regular import open_regular

LOG = logging.getLogger("fastagg")
ROUND, GLOBAL, CLIENT = "round.json", "global.safetensors", "fastagg.client"
FORMAT = 1


class Spill:
    """A folder of the caller's, for a round that can be resumed; or one of our own, which goes when the round does"""

    def __init__(self, path: str | os.PathLike | None) -> None:
        self.resumable = path is not None
        self.lock: atomic.Lock | None = None
        self.about: dict[str, Any] = {}
        if path is None:
            self.path = Path(tempfile.mkdtemp(prefix="fastagg-round-"))
            self._finalizer = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
            return
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = atomic.Lock(self.path / "round.lock", "this round")

    @property
    def is_begun(self) -> bool:
        return os.path.lexists(self.path / ROUND)

    def begin(self, about: Mapping[str, Any], global_tensors: Mapping[str, torch.Tensor] | None) -> None:
        """round.json comes last: without it there is no round"""
        self.about = {"format": FORMAT, "token": secrets.token_hex(16), **about}
        if not self.resumable:
            return
        self.clear()  # what a stop in the middle of this has left: the clients of a round that is over
        if global_tensors is not None:
            write(self.path / GLOBAL, global_tensors, {})
        atomic.write_json(self.path / ROUND, self.about)

    def read(self) -> MappedModel | None:
        """What begin() wrote, after a stop; the global model. InputError where it is damaged, or of a later version."""
        path = self.path / ROUND
        try:
            with open_regular(path) as file:
                about = json.loads(file.read(1 << 20))
            if not isinstance(about, dict) or not isinstance(about.get("token"), str):
                raise ValueError("it does not describe a round")
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path} cannot be read: {error}") from error
        if about.get("format") != FORMAT:
            raise InputError(
                f"{path} is of format {about.get('format')!r}, and this version of fastagg reads format {FORMAT}: "
                "finish the round with the version that began it, or remove the folder"
            )
        self.about = about
        return open_model(self.path / GLOBAL) if about.get("global") else None

    def put(self, name: Any, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> MappedModel:
        """Writes a client's tensors; those that are returned look at the file"""
        path = self.path_of(self.path, name)
        write(path, tensors, {CLIENT: json.dumps({"id": name, **about}, default=_plain)})
        return open_model(path)

    def clients(self) -> Iterator[tuple[dict[str, Any], MappedModel]]:
        """Those that are there. A damaged file is left out, and said so: that client has to send again."""
        for path in sorted(self.path.glob("client-*.safetensors")):
            try:
                model = open_model(path)
                about = json.loads(model.metadata[CLIENT])
                if self.path_of(self.path, about["id"]) != path:
                    raise ValueError(f"it is of client {about['id']!r}")
                yield about, model
            except (InputError, KeyError, TypeError, ValueError) as error:
                LOG.warning("%s: left out of the round, its client has to send again: %s", path, error)
                path.unlink(missing_ok=True)

    def remove(self, name: Any) -> None:
        self.path_of(self.path, name).unlink(missing_ok=True)
        atomic.sync_folder(self.path)

    def clear(self) -> None:
        """Removes the round: round.json first, after which there is none, and nothing that is not ours"""
        for pattern in (ROUND, GLOBAL, "client-*.safetensors", ".client-*.part", f".{GLOBAL}*.part", f".{ROUND}*.part"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
            atomic.sync_folder(self.path)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.release()
        if not self.resumable:
            self._finalizer()

    @staticmethod
    def path_of(folder: Path, name: Any) -> Path:
        """The file of a client, whatever is in its name"""
        return folder / f"client-{hashlib.sha256(json.dumps(name).encode()).hexdigest()[:32]}.safetensors"


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file, atomically"""
    order = sorted(tensors, key=lambda key: -tensors[key].itemsize)  # each begins at a multiple of its item
    parts = [(key, tensors[key].dtype, tensors[key].shape) for key in order]
    try:
        with atomic.whole(path) as file:
            file.write(saved.header(parts, metadata))
            for key in order:
                file.write(saved.bytes_of(tensors[key].detach()))
    except OSError as error:
        raise InputError(f"{path}: cannot write there: {error.strerror or error}") from error


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else str(value)
