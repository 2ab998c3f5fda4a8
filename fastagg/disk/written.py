"""Models written as safetensors files, through a mapping, beside their place; a crash leaves the former model whole.

A model larger than the shard size becomes several files and an index, as Hugging Face's libraries write it:
`x-00001-of-00003.safetensors` and `x.safetensors.index.json`. The index is what makes them a model, so it is renamed
last, and shards never take the names of those that the former index lists: where these are taken, `x-b-00001-of-..` it
is. The former model's shards are removed after that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fastagg import files
from fastagg.disk import paging
from fastagg.disk.mapped import INDEX, read_index
from fastagg.table import InputError

PAGE = 4096  # tensors begin at a multiple of this, so that the header shares no page with them
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
    """A safetensors file being written: `<name>.part`, with room for a header that is not known yet"""

    def __init__(self, path: Path, parts: list[Part], room: int) -> None:
        self.path, self.parts = path, parts
        self.start = -(-(len(files.header(parts, {})) + room) // PAGE) * PAGE
        size = self.start + sum(map(_bytes, parts))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self.ours = True
        try:
            os.posix_fallocate(fd, 0, size)  # a full disk is an error now, and would be a crash later
            memory = paging.mapped(fd, size, writable=True)
        except BaseException:
            self.discard()
            raise
        finally:
            os.close(fd)  # there may be too few descriptors for all files
        self.tensors, at = {}, self.start
        for part in parts:
            key, dtype, shape = part
            if count := shape.numel():
                self.tensors[key] = torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(shape)
            else:
                self.tensors[key] = torch.empty(shape, dtype=dtype)
            at += _bytes(part)

    def complete(self, metadata: Mapping[str, str]) -> None:
        """Writes the header, and waits until all is on the disk"""
        with open(self.path, "r+b") as file:
            file.write(files.header(self.parts, metadata, self.start))
            file.flush()
            os.fsync(file.fileno())

    def move(self, place: Path) -> None:
        self.path.replace(place)
        self.ours = False

    def discard(self) -> None:
        if self.ours:
            self.path.unlink(missing_ok=True)
        self.ours = False


class ModelWriter:
    """One model on its way to the disk: tensors to be written, then complete(), then place()"""

    def __init__(self, folder: Path, stem: str, parts: Sequence[Part], shard_size: int, room: int) -> None:
        """room: bytes of metadata that the header can take"""
        self.folder = folder
        self.shards: list[PartFile] = []
        shards = shards_of(parts, shard_size)
        try:
            for name, shard in zip(names(stem, len(shards)), shards, strict=True):
                self.shards.append(PartFile(folder / (name + ".part"), shard, room))
        except OSError as error:
            self.discard()
            raise InputError(f"{folder / stem}: cannot write there: {error.strerror or error}") from error
        except BaseException:
            self.discard()
            raise
        self.tensors = {key: tensor for shard in self.shards for key, tensor in shard.tensors.items()}
        self.tensors = {key: self.tensors[key] for key, _, _ in parts}
        self.bytes = sum(map(_bytes, parts))

    def complete(self, metadata: Mapping[str, str]) -> None:
        for shard in self.shards:
            shard.complete(metadata)

    def place(self, stem: str, metadata: Mapping[str, str]) -> Path:
        """Replaces the model of this name, whichever form it had; the path of the file or the index"""
        single, index = self.folder / f"{stem}.safetensors", self.folder / (stem + INDEX)
        former = set(read_index(index).values()) if index.exists() else set()
        if len(self.shards) == 1:
            self.shards[0].move(single)
            index.unlink(missing_ok=True)
            new, place = {single.name}, single
        else:
            new = names(stem, len(self.shards))
            if former & set(new):
                new = names(stem + "-b", len(self.shards))
            for shard, name in zip(self.shards, new, strict=True):
                shard.move(self.folder / name)
            listed = {part[0]: name for shard, name in zip(self.shards, new, strict=True) for part in shard.parts}
            about = {**metadata, "total_size": self.bytes}
            files.sync_folder(self.folder)
            files.write_json(index, {"metadata": about, "weight_map": dict(sorted(listed.items()))})
            single.unlink(missing_ok=True)
            place = index
        files.sync_folder(self.folder)
        for name in _shards_beside(self.folder, stem):  # not all that the former index names: it may be anybody's
            if name not in new:
                (self.folder / name).unlink(missing_ok=True)
        return place

    def discard(self) -> None:
        """Removes what has not taken its place"""
        for shard in self.shards:
            shard.discard()


def names(stem: str, shards: int) -> list[str]:
    if shards == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]


def _shards_beside(folder: Path, stem: str) -> set[str]:
    """What a run that was killed may have left"""
    ours = re.compile(re.escape(stem) + r"(-b)?-\d{5}-of-\d{5}\.safetensors(\.part)?")
    return {name for name in os.listdir(folder) if ours.fullmatch(name)}
