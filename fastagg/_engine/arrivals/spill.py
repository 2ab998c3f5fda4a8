"""The folder in which the clients of one round wait: a safetensors file for each, whose metadata say whose it is.

There is no other list of them. A file gets its name when all of it is on the disk, and a client is in the round as long
as its file is there, so a process that is killed leaves a folder from which the round can go on. Beside them are the
global model (round.safetensors) and what the round is (round.json). One process at a time holds the folder.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastagg._engine import atomic, saved
from fastagg._engine.checks import InputError
from fastagg._engine.files.mapped import MappedModel, open_model
from fastagg._engine.outputs import to_numpy
from fastagg._engine.regular import open_regular
from fastagg._engine.table import Table

LOG = logging.getLogger("fastagg")
ROUND, GLOBAL, CLIENT = "round.json", "round.safetensors", "fastagg.client"
CLIENTS = f"client-{'[0-9a-f]' * 32}.safetensors"  # so exactly that nobody else's file is meant
FORMAT = 1


class Spill:
    """A folder of the caller's, for a round that can be resumed; or one of our own, which goes when the round does"""

    def __init__(self, path: str | os.PathLike | None) -> None:
        self.resumable = path is not None
        self.lock: atomic.Lock | None = None
        self.about: dict[str, Any] = {}
        if path is None:
            self.path = Path(tempfile.mkdtemp(prefix="fastagg-round-"))
            self._finalizer = weakref.finalize(self, _of_process, os.getpid(), shutil.rmtree, self.path, True)
            return
        self.path = Path(path).absolute()  # wherever the process goes meanwhile
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{path}: cannot be the folder of a round: {error.strerror or error}") from error
        self.lock = atomic.Lock(self.path / "round.lock", "this round")
        self._finalizer = weakref.finalize(self, _of_process, os.getpid(), self.lock.release)

    @property
    def is_begun(self) -> bool:
        return os.path.lexists(self.path / ROUND)

    def begin(self, about: Mapping[str, Any], global_tensors: Mapping[str, torch.Tensor] | None) -> None:
        """round.json comes last: without it there is no round. What is there is left of one that was being removed."""
        self.about = {"format": FORMAT, "token": secrets.token_hex(16), **about}
        self.clear()
        if global_tensors is not None:
            write(self.path / GLOBAL, global_tensors, {})
        try:
            atomic.write_json(self.path / ROUND, self.about)
        except OSError as error:
            raise _no_room(self.path / ROUND, error) from error

    def read(self) -> MappedModel | None:
        """What begin() wrote, after a stop; the global model as it was given.

        InputError where it is damaged, or of a later version.
        """
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
        if not about.get("global"):
            return None
        model = open_model(self.path / GLOBAL)
        try:
            model.tensors = as_given(about["global"], model)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} and {GLOBAL} do not fit together: {error}") from error
        return model

    def put(self, name: Any, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> MappedModel:
        """Writes a client's tensors; those that are returned look at the file"""
        path = self.path_of(self.path, name)
        told = {CLIENT: json.dumps({"id": name, **about}, default=_plain)}
        try:
            write(path, tensors, told, lasting=self.resumable)
            model = open_model(path)
            model.tensors = as_given(about, model)
            return model
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise

    def clients(self) -> Iterator[tuple[dict[str, Any], MappedModel]]:
        """Those that are there, in the order of their arrival. A damaged file is left out, and said so: that client has
        to send again. One that this process may not read, or not now, stays: InputError."""
        for path in sorted(self.path.glob(CLIENTS), key=lambda path: (path.lstat().st_mtime_ns, path)):
            try:
                model = open_model(path)
                about = self._read_about(path, model)
                model.tensors = as_given(about, model)
            except (InputError, KeyError, TypeError, ValueError, RecursionError) as error:
                if isinstance(error.__cause__, OSError):
                    raise
                LOG.warning("%s: left out of the round, its client has to send again: %s", path, error)
                _remove(path)
                continue
            yield about, model

    def _read_about(self, path: Path, model: MappedModel) -> dict[str, Any]:
        match about := json.loads(model.metadata[CLIENT]):
            case {
                "id": str() | int() as name, "update": bool(), "size": None | int() | float(), "inputs": dict(),
                "keys": list(), "arrays": list(),
            } if self.path_of(self.path, name) == path:  # fmt: skip
                return about
        raise ValueError("what it says of its client is damaged, or of another client")

    def remove(self, name: Any) -> None:
        _remove(self.path_of(self.path, name))
        atomic.sync_folder(self.path)

    def clear(self) -> None:
        """Removes the round: round.json first, after which there is none, and nothing that is not ours"""
        if not self.resumable:  # all of the folder goes in close()
            return
        for pattern in (ROUND, GLOBAL, CLIENTS, f".{CLIENTS}*.part", f".{GLOBAL}*.part", f".{ROUND}*.part"):
            for path in self.path.glob(pattern):
                _remove(path)
            atomic.sync_folder(self.path)

    def close(self) -> None:
        self._finalizer()

    @staticmethod
    def path_of(folder: Path, name: Any) -> Path:
        """The file of a client, whatever is in its name"""
        return folder / f"client-{hashlib.sha256(json.dumps(name).encode()).hexdigest()[:32]}.safetensors"


def form_of(own: Table) -> dict[str, Any]:
    """Of a model, what its file does not say: the order of its tensors, and which of them are NumPy arrays"""
    return {"keys": own.layout.keys, "arrays": [k for k, a in zip(own.layout.keys, own.as_numpy, strict=True) if a]}


def as_given(form: Mapping[str, Any], model: MappedModel) -> dict[str, Any]:
    """The tensors of a file in that form; a KeyError, TypeError or ValueError where they have another"""
    arrays = set(form["arrays"])
    if set(form["keys"]) != set(model.tensors):
        raise ValueError("its tensors have other names than it says")
    tensors = ((key, model.tensors[key]) for key in form["keys"])
    return {key: to_numpy(tensor) if key in arrays else tensor for key, tensor in tensors}


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, lasting: bool = True
) -> None:
    """A safetensors file: atomically, and on the disk when this returns, if it is to outlive the process"""
    order = sorted(tensors, key=lambda key: -tensors[key].itemsize)  # each begins at a multiple of its item
    parts = [(key, tensors[key].dtype, tensors[key].shape) for key in order]
    try:
        with atomic.whole(path) if lasting else open(path, "wb") as file:
            file.write(saved.header(parts, metadata))
            for key in order:
                file.write(saved.bytes_of(tensors[key].detach()))
    except OSError as error:
        raise _no_room(path, error) from error


def _no_room(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot write there: {error.strerror or error}")


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be removed: {error.strerror or error}") from error


def _of_process(pid: int, do: Callable[..., Any], *given: Any) -> None:
    """A process that was forked has a copy of the round, and must leave the folder to the other"""
    if os.getpid() == pid:
        do(*given)


def _plain(value: Any) -> Any:
    """Numbers, as a round reads them"""
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else float(value)
