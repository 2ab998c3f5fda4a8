"""Models in safetensors files, as state dicts of tensors that look at the mapped file: nothing is read before its time.

A file comes from a stranger. All that its header says is checked before a byte behind it is used, by the safetensors
library first; what memory safety hangs on (where each tensor begins and ends) is checked here again, on the very file
that is mapped.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from fastagg._engine import saved
from fastagg._engine.dtypes import DTYPE_CODE
from fastagg._engine.files import paging
from fastagg._engine.regular import open_regular
from fastagg._engine.table import InputError

INDEX = ".safetensors.index.json"
LONGEST_HEADER = 100_000_000  # bytes, the format's own limit
READABLE = {name: dtype for dtype, name in saved.DTYPES.items() if dtype in DTYPE_CODE}


class MappedFile:
    """One safetensors file: its tensors in the order of their bytes, and its metadata"""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:  # first: the library would wait for a FIFO's writer
                with safe_open(path, framework="np"):
                    pass
                self.form = _form(os.fstat(file.fileno()))
                header, start = _read_header(path, file, self.form[0])
                memory = paging.mapped(file.fileno(), self.form[0])
        except SafetensorError as error:
            raise InputError(f"{path} is not a good safetensors file: {error}") from error
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
        self.metadata = _check_metadata(path, header.pop("__metadata__", {}))
        if not header:
            raise InputError(f"{path} has no tensors")
        self.address, self.length = ctypes.addressof(memory), len(memory)
        self.tensors = self._tensors(header, start, memory)

    def _tensors(self, header: dict[str, Any], start: int, memory: ctypes.Array) -> dict[str, torch.Tensor]:
        tensors, reached = {}, start
        places = [(self._place(key, entry, start), key) for key, entry in header.items()]
        for (begin, end, dtype, shape), key in sorted(places, key=lambda place: place[0][:2]):
            if begin != reached or end > self.length:
                raise InputError(f"{self.path}: key {key!r} overlaps another, leaves a hole or ends after the file")
            reached = end
            if begin == end:
                tensors[key] = torch.empty(shape, dtype=dtype, device="cpu")
            else:
                count = (end - begin) // dtype.itemsize
                tensors[key] = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(shape)
        if reached != self.length:
            raise InputError(f"{self.path}: {self.length - reached} bytes at its end belong to no tensor")
        return tensors

    def _place(self, key: str, entry: Any, start: int) -> tuple[int, int, torch.dtype, list[int]]:
        match entry:
            case {"dtype": str(name), "shape": list(shape), "data_offsets": [begin, end]} if _are_sizes(
                [*shape, begin, end]
            ):
                if name not in READABLE:
                    raise InputError(f"{self.path}: key {key!r} has dtype {name}, which cannot be aggregated")
                dtype = READABLE[name]
                if math.prod(shape) * dtype.itemsize != end - begin or math.prod(d or 1 for d in shape) >= 2**62:
                    raise InputError(f"{self.path}: key {key!r} of shape {shape} has {end - begin} bytes")
                return start + begin, start + end, dtype, shape
        raise InputError(f"{self.path}: key {key!r} is described by {str(entry)[:80]}, not by dtype, shape and offsets")

    def check_unchanged(self) -> None:
        """A mapping of a file that is written meanwhile shows what was written, and one that is cut kills the reader"""
        try:
            form = _form(os.stat(self.path))
        except OSError as error:
            raise InputError(f"{self.path} cannot be read any more: {error.strerror or error}") from error
        if form != self.form:
            raise InputError(f"{self.path} was changed while it was read")


@dataclass(eq=False)
class MappedModel:
    """A model in one or several files"""

    path: Path
    name: str  # what it is called as a client
    files: list[MappedFile]
    tensors: dict[str, torch.Tensor]

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def metadata(self) -> dict[str, str]:
        return self.files[0].metadata


def open_model(path: str | os.PathLike) -> MappedModel:
    """A .safetensors file, the index of a sharded model, or a folder that holds one of the two"""
    path = Path(path)
    inside, name = _model_in(path), client_name_of(path)
    if not inside.name.endswith(".index.json"):
        file = MappedFile(inside)
        return MappedModel(inside, name, [file], file.tensors)
    shards = [MappedFile(shard) for shard in _shards_of(inside)]
    tensors: dict[str, torch.Tensor] = {}
    listed = read_index(inside)
    for shard in shards:
        for key, tensor in shard.tensors.items():
            if listed.get(key) != shard.path.name:
                raise InputError(f"{shard.path}: key {key!r} is not listed for this file in {inside}")
            tensors[key] = tensor
    for key in listed.keys() - tensors.keys():
        raise InputError(f"{inside}: key {key!r} is not in {listed[key]}")
    return MappedModel(inside, name, shards, tensors)


def open_tensors(places: Mapping[str, tuple[str | os.PathLike, str]]) -> MappedModel:
    """A model whose tensors are in some safetensors files: {key: (file, name of the tensor in it)}"""
    files = {path: MappedFile(Path(path)) for path in {path: None for path, _ in places.values()}}
    for path, name in places.values():
        if name not in files[path].tensors:
            raise InputError(f"{path} has no tensor {name!r}")
    first = Path(next(iter(files), ""))
    tensors = {key: files[path].tensors[name] for key, (path, name) in places.items()}
    return MappedModel(first, first.stem, list(files.values()), tensors)


def client_name_of(path: Path) -> str:
    """What a client is called by default: its file without the ending, or the folder that was given"""
    if path.is_dir():
        return path.absolute().name
    return path.absolute().parent.name if path.name.endswith(".index.json") else path.stem


def read_index(path: Path) -> dict[str, str]:
    """Which file each tensor is in, by plain names of files beside the index"""
    try:
        with open_regular(path) as file:
            text = file.read(LONGEST_HEADER + 1)
        if len(text) > LONGEST_HEADER:
            raise InputError(f"{path} is longer than {LONGEST_HEADER} bytes: it is not an index")
        content = _parse(path, text)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    listed = content.get("weight_map")
    if not isinstance(listed, dict):
        raise InputError(f"{path} has no weight_map: it is not the index of a sharded model")
    for key, name in listed.items():
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
            raise InputError(f"{path}: key {key!r} is in {name!r}, which is not the name of a file beside it")
    return listed


def _shards_of(index: Path) -> list[Path]:
    shards = [index.parent / name for name in sorted(set(read_index(index).values()))]
    folder = index.parent.resolve()
    for shard in shards:  # who wrote the index and the links may not be allowed to read what they point to
        if shard.is_symlink() and shard.resolve().parent != folder:
            raise InputError(f"{shard} is a link to a file outside of its folder: copy that file here")
    return shards


def _model_in(path: Path) -> Path:
    if not path.is_dir():
        index = path.with_name(path.name + ".index.json")  # x.safetensors may have become several files
        return index if path.name.endswith(".safetensors") and index.exists() and not path.exists() else path
    for pattern in ("*" + INDEX, "*.safetensors"):
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise InputError(
                f"{path} holds {len(found)} models ({found[0].name}, {found[1].name} ..): name one of them"
            )
    raise InputError(f"{path} is a folder without a .safetensors file")


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors' bytes begin"""
    length = int.from_bytes(file.read(8), "little")
    if length > min(LONGEST_HEADER, size - 8):
        raise InputError(f"{path}: its header of {length} bytes is longer than the file, or than the format allows")
    return _parse(path, file.read(length)), 8 + length


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise InputError(f"{path}: {max(names, key=names.count)!r} is there twice")
        return found

    try:
        content = json.loads(text.decode(), object_pairs_hook=unique)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} has no good JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: its JSON is a {type(content).__name__}, expected an object")
    return content


def _check_metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(f"{path}: __metadata__ is not of strings")
    return metadata


def _are_sizes(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _form(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_dev
