"""The file of `--state`, and how it stays in step with the global model when a run is stopped between the two.

The new state is complete on the disk before the new model takes its place, so that two renames are left. The model's
metadata name both states by their checksums: the one it was made with (`fastagg.state_before`) and the one that goes
with it (`fastagg.state`). When a run begins with a global model that is one round ahead of its state, an earlier run
was stopped between the two renames. The state it had prepared is still there under its temporary name, and takes its
place.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastagg._engine import atomic, saved
from fastagg._engine.files.mapped import MappedModel
from fastagg._engine.table import InputError

LOG = logging.getLogger("fastagg")


class StateFile:
    """A state, locked until release()"""

    def __init__(self, path: Path) -> None:
        if not path.absolute().parent.is_dir():
            raise InputError(f"{path}: there is no such folder")
        self.path = path
        self.lock = atomic.Lock(path.with_name(path.name + ".lock"), "this state")
        self.new: atomic.Temporary | None = None
        try:
            self.tree, metadata = saved.read_saved(path)
        except FileNotFoundError:
            self.tree, metadata = None, {}
        except BaseException:
            self.lock.release()
            raise
        self.checksum = metadata.get(saved.CHECKSUM, "")
        self.round = _number(metadata)

    def catch_up(self, model: MappedModel | None) -> bool:
        """Whether the model is one round ahead; then the state is completed, or an error where it is lost"""
        if model is None:
            return False
        said = model.metadata
        ahead = said.get("fastagg.state")
        if ahead in (None, self.checksum) or said.get("fastagg.state_before") != self.checksum:
            return False
        for left in atomic.stale(self.path):
            with suppress(InputError):
                tree, metadata = saved.read_saved(left)
                if metadata[saved.CHECKSUM] == ahead:
                    left.replace(self.path)
                    atomic.sync_folder(self.path.absolute().parent)
                    self.tree, self.checksum, self.round = tree, ahead, _number(metadata)
                    LOG.warning("%s: completed; an earlier run was stopped before that", self.path)
                    return True
        if self.checksum:
            raise InputError(
                f"{model.path} has round {_number(said)} already, and {self.path} is still of the round before. To "
                "repeat the round, use the former model; to start anew, remove the state"
            )
        return False  # there is no state: it may have been removed on purpose

    def metadata(self) -> dict[str, str]:
        """What a new model's file says of its state, of which the checksum is blank until prepare()"""
        checksum = saved.BLANK if self.new is None else self.new_checksum
        return {"round": str(self.round + 1), "state": checksum, "state_before": self.checksum}

    def prepare(self, tree: Any) -> None:
        self.new, self.new_checksum = saved.prepare(self.path, tree, {"fastagg.round": str(self.round + 1)})

    def place(self) -> None:
        assert self.new is not None  # prepare() has been called
        try:
            self.new.place()
        except OSError as error:
            raise InputError(
                f"the new model is written, but {self.path} is not: {error.strerror}. Repeat the command to complete it"
            ) from error
        try:
            atomic.sync_folder(self.path.absolute().parent)
        except OSError as error:  # the round is made: an error would invite to repeat it
            LOG.warning("%s: the folder cannot be synced: %s", self.path, error.strerror)

    def discard(self) -> None:
        if self.new is not None:
            self.new.discard()

    def release(self) -> None:
        """What was prepared and neither placed nor discarded stays, for a later run to place"""
        if self.new is not None:
            self.new.close()
        self.lock.release()


def fingerprint(what: Any, models: Iterable[MappedModel]) -> str:
    """Tells whether a command was repeated: the same files, unchanged since"""
    forms = [[(file.path.name, *file.form[:2]) for file in model.files] for model in models]  # size and time
    return hashlib.sha256(json.dumps([what, forms], default=_plain).encode()).hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else str(value)


def _number(metadata: dict[str, str]) -> int:
    text = metadata.get("fastagg.round", "")
    return int(text) if text.isdecimal() and len(text) < 19 else 0
