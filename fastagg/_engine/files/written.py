"""Models written as safetensors files, through a mapping, beside their place; a crash leaves the former model whole.

A model larger than the shard size becomes several files and an index, as Hugging Face's libraries write it:
`x-00001-of-00003.safetensors` and `x.safetensors.index.json`. The index is what makes them a model, so it is renamed
last. Shards only take names that are free: `x-b-00001-of-..` where the first ones are taken, and so on.

Two kinds of shards are removed, and no others: those that the former index of this model lists, and those of a run that
was killed before its index was in place. The temporary index of that run, which was written first, lists them.
"""

from __future__ import annotations

import json
import os
import re
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from fastagg._engine import atomic, saved
from fastagg._engine.files import paging
from fastagg._engine.files.mapped import INDEX, read_index
from fastagg._engine.table import InputError

PAGE = 4096  # tensors begin at a multiple of this, so that the header shares no page with them
SHARD = r"(-[b-z])?-\d{5}-of-\d{5}"  # what a shard's name has after that of its model
Part = tuple[str, torch.dtype, torch.Size]  # a tensor's name, dtype and shape


def shards_of(parts: Sequence[Part], most: int) -> list[list[Part]]:
    """Tensors in their order, cut into files of at most so many bytes (or of one tensor); larger items first in each,
    so that every tensor begins at a multiple of its item"""
    shards: list[list[Part]] = [[]]
    filled = 0
    for part in parts:
        size = _bytes(part)
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(part)
        filled += size
    return [sorted(shard, key=lambda part: -part[1].itemsize) for shard in shards]


def _bytes(part: Part) -> int:
    return part[2].numel() * part[1].itemsize


class PartFile:
    """A safetensors file being written under a temporary name, with room for a header that is not known yet"""

    def __init__(self, target: Path, parts: list[Part], room: int) -> None:
        self.parts = parts
        self.start = -(-(len(saved.header(parts, {})) + room) // PAGE) * PAGE
        size = self.start + sum(map(_bytes, parts))
        self.new = atomic.Temporary(target)
        try:
            os.posix_fallocate(self.new.fd, 0, size)  # a full disk is an error now, and would be a crash later
            self.memory = paging.mapped(self.new.fd, size, writable=True)
        except BaseException:
            self.new.discard()
            raise
        self.new.close()  # there may be too few descriptors for all files; the mapping keeps the lock
        self.tensors, at = {}, self.start
        for part in parts:
            key, dtype, shape = part
            if count := shape.numel():
                self.tensors[key] = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=at).view(shape)
            else:
                self.tensors[key] = torch.empty(shape, dtype=dtype, device="cpu")
            at += _bytes(part)

    def complete(self, metadata: Mapping[str, str], mode: int | None) -> None:
        """Writes the header, and waits until all is on the disk"""
        self.new.reopen()
        with open(self.new.fd, "r+b", closefd=False) as file:
            file.write(saved.header(self.parts, metadata, self.start))
        self.new.complete(mode)
        self.new.close()


class ModelWriter:
    """One model on its way to the disk: tensors to be written, then complete(), then place()"""

    def __init__(
        self, target: Path, parts: Sequence[Part], shard_size: int, room: int, mode: int | None = None
    ) -> None:
        """target: where it will be, or another file in the same folder; room: bytes of metadata in the header;
        mode: the most permissions that a model which replaces none gets"""
        self.folder, self.most = target.parent, mode
        self.shards: list[PartFile] = []
        self.index: atomic.Temporary | None = None
        self.placed: list[Path] = []  # shards without an index yet
        try:
            for shard in shards_of(parts, shard_size):
                self.shards.append(PartFile(target, shard, room))
        except OSError as error:
            self.discard()
            raise InputError(f"{target}: cannot write there: {error.strerror or error}") from error
        except BaseException:
            self.discard()
            raise
        tensors = {key: tensor for shard in self.shards for key, tensor in shard.tensors.items()}
        self.tensors = {key: tensors[key] for key, _, _ in parts}
        self.bytes = sum(map(_bytes, parts))

    def complete(self, stem: str, metadata: Mapping[str, str]) -> None:
        """All is on the disk, and place() has only to rename. The model gets the permissions of the former one."""
        single, index = self.paths = self.folder / f"{stem}.safetensors", self.folder / (stem + INDEX)
        modes = [mode for mode in (atomic.mode_of(single), atomic.mode_of(index)) if mode is not None]
        mode = modes[0] if modes else None
        if mode is None and self.most is not None:
            mode = self.shards[0].new.mode & self.most
        for shard in self.shards:
            with atomic.naming(single):
                shard.complete(metadata, mode)
        self.former = shards_in(index, stem) if index.exists() else set()
        self._remove_orphans(index, stem)
        self.names = [single.name] if len(self.shards) == 1 else self._free_names(stem)
        if len(self.shards) > 1:
            pairs = zip(self.shards, self.names, strict=True)
            listed = {key: name for shard, name in pairs for key in shard.tensors}
            content = {"metadata": {**metadata, "total_size": self.bytes}, "weight_map": dict(sorted(listed.items()))}
            with atomic.prepared(index, mode) as (self.index, file):
                file.write(json.dumps(content, indent=1).encode())
            self.index.close()  # the lock of the output protects it from here on

    def place(self) -> Path:
        """Replaces the model of this name, whichever form it had; the path of the file or the index"""
        single, index = self.paths
        with atomic.naming(single):
            self._place(single, index)
        return single if self.index is None else index

    def _place(self, single: Path, index: Path) -> None:
        if self.index is None:
            self.shards[0].new.place(single)
            index.unlink(missing_ok=True)
        else:
            for shard, name in zip(self.shards, self.names, strict=True):
                shard.new.place(self.folder / name)
                self.placed.append(self.folder / name)
            atomic.sync_folder(self.folder)
            self.index.place()
            self.placed = []
            single.unlink(missing_ok=True)
        atomic.sync_folder(self.folder)
        for name in self.former - set(self.names):
            (self.folder / name).unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes what has not become part of a model"""
        for new in [*(shard.new for shard in self.shards), *([self.index] if self.index else [])]:
            new.discard()
        for path in self.placed:
            path.unlink(missing_ok=True)
        self.placed = []

    def _free_names(self, stem: str) -> list[str]:
        names: list[str] = []
        for tag in ("", *(f"-{letter}" for letter in string.ascii_lowercase[1:])):
            names = [f"{stem}{tag}-{i:05}-of-{len(self.shards):05}.safetensors" for i in range(1, len(self.shards) + 1)]
            if not any(os.path.lexists(self.folder / name) for name in names):
                return names
        raise InputError(f"{self.folder / names[0]} and all other names for the parts of this model are taken")

    def _remove_orphans(self, index: Path, stem: str) -> None:
        """Shards of a run that was killed while it placed them, which no index lists"""
        for path in atomic.stale(index):
            with suppress(InputError):  # it was killed before that was complete, and before it placed any
                for name in shards_in(path, stem) - self.former:
                    if not (self.folder / name).is_symlink():
                        (self.folder / name).unlink(missing_ok=True)
        atomic.remove_stale(index)


def shards_in(index: Path, stem: str) -> set[str]:
    """The files that an index lists, those that are named like shards of this model: others may be anybody's"""
    ours = re.compile(re.escape(stem) + SHARD + r"\.safetensors")
    return {name for name in read_index(index).values() if ours.fullmatch(name)}
