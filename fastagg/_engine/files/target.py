"""Where the new models of a round go, and how all of them get there at once."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastagg._engine import atomic
from fastagg._engine.files.mapped import INDEX, MappedModel, read_index
from fastagg._engine.files.written import SHARD, ModelWriter, Part, shards_in
from fastagg._engine.regular import open_regular
from fastagg._engine.result import Result, Results
from fastagg._engine.table import InputError, Table

FORM = re.compile(rf"(.*?)({SHARD})?\.safetensors(\.index\.json)?", re.DOTALL)  # of the names of a model's files
ADAPTER = "adapter_model"  # what PEFT calls the file, and what it wants beside it
MOST_CONFIG = 1_000_000  # bytes
ADAPTER_CONFIG = "adapter_config.json"
CLUSTERS = "clusters.json"
SEVERAL = "fastagg"  # temporary files are named after this where a run gives several models


def adapter_config(path: Path) -> bytes:
    """The configuration of a LoRA adapter, to be copied. Who sent it may not be allowed to read what a link names."""
    if path.is_symlink() and path.resolve().parent != path.parent.resolve():
        raise InputError(f"{path} is a link to a file outside of its folder: copy that file here")
    with open_regular(path) as file:
        content = file.read(MOST_CONFIG + 1)
    try:
        if len(content) <= MOST_CONFIG and isinstance(json.loads(content), dict):
            return content
    except (ValueError, RecursionError):
        pass
    raise InputError(f"{path} is not the configuration of an adapter: expected a JSON object of at most 1 MB")


class Target:
    """A file, or a folder: of one model, of one per client, or of one per cluster"""

    def __init__(self, path: Path, produces: str, ids: list[Any], form: MappedModel) -> None:
        """form: the model that sets the form of the new ones"""
        self.path, self.produces, self.ids = path, produces, ids
        is_file = path.name.endswith(".safetensors") and not path.is_dir()
        if is_file and produces != "global":
            raise InputError(f"{path}: there will be several models, name a folder for them")
        if not is_file and re.match(r"\.[A-Za-z]", path.suffix) and not path.is_dir():  # out.pt, but not v1.0
            raise InputError(f"{path}: expected a .safetensors file or a folder; make it if it is to be a folder")
        kind = FORM.fullmatch(form.path.name)
        stem = ADAPTER if kind and kind[1] == ADAPTER else "model"
        self.folder, stem = (path.parent, path.name.removesuffix(".safetensors")) if is_file else (path, stem)
        if is_file and not self.folder.is_dir():
            raise InputError(f"{path}: there is no folder {self.folder}")
        self.stems = [str(name) for name in ids] if produces == "personalised" else [stem]
        for name in self.stems:
            if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
                raise InputError(f"client id {name!r} cannot be the name of a file")
        for name in self.stems:
            kind = FORM.fullmatch(f"{name}.safetensors")
            whose = kind and kind[1]
            if produces == "personalised" and whose != name and whose in self.stems:
                raise InputError(f"client id {name!r} is like the name of a part of client {whose!r}'s model")
        if len(set(self.stems)) < len(self.stems):
            raise InputError("two client ids are the same as names of files")
        self.mode = atomic.mode_of(form.path)  # a new model is not readable by more people than this one
        self.beside: dict[str, bytes] = {}  # other files that a new model needs in its folder
        config = form.path.with_name(ADAPTER_CONFIG)
        if self.stems == [ADAPTER] and config.exists() and config.resolve() != (self.folder / ADAPTER_CONFIG).resolve():
            self.beside[ADAPTER_CONFIG] = adapter_config(config)

    def tidy(self, new: Path) -> None:
        """Removes the former model's index and shards, or single file, where a run was stopped after it had placed the
        new model at this path and before it could do so"""
        single, index = (self.folder / (self.stems[0] + ending) for ending in (".safetensors", INDEX))
        if new.name == single.name and index.exists():
            former = shards_in(index, self.stems[0])
            index.unlink()
            for name in former:
                (self.folder / name).unlink(missing_ok=True)
        elif new.name == index.name:
            single.unlink(missing_ok=True)

    def check(self, clients: list[MappedModel], center: MappedModel | None, size: int) -> None:
        """That no input is replaced, that what is replaced is understood, and that there is room for such models"""
        for stem in self.stems:
            if (self.folder / (stem + INDEX)).exists():
                read_index(self.folder / (stem + INDEX))
        for client in clients:
            for path in (client.path, *(file.path for file in client.files)):
                self.refuse(path, "a client")
        if center is not None and not self.is_output(center.path):
            for path in (center.path, *(file.path for file in center.files)):
                self.refuse(path, "the global model")
        where = next(folder for folder in (self.folder.absolute(), *self.folder.absolute().parents) if folder.exists())
        if not where.is_dir():
            raise InputError(f"{self.path}: {where} is not a folder")
        free, needed = shutil.disk_usage(where).free, size * len(self.stems)
        if needed > free:
            raise InputError(f"{self.path}: {needed / 1e9:.3g} GB are to be written, {free / 1e9:.3g} GB are free")

    def refuse(self, path: Path, what: str) -> None:
        """Raises when writing the new models would replace this file"""
        for place in places(path):
            if place.parent == self.folder.resolve() and self._replaces(place.name):
                raise InputError(f"{place} is {what}, and a new model would take its place: write it somewhere else")

    def _replaces(self, name: str) -> bool:
        """Whether a file of this name in the folder may be replaced or removed"""
        if name in self.beside or (self.produces == "clusters" and name == CLUSTERS):
            return True
        form = FORM.fullmatch(atomic.target_of(name) or name)
        if form is None:
            return False
        if form[1] in self.stems or (self.produces == "clusters" and re.fullmatch(r"cluster-\d+", form[1])):
            return True
        return form[1] == SEVERAL and atomic.target_of(name) is not None

    def is_output(self, path: Path) -> bool:
        """Whether a model is the very one that the new one replaces"""
        if self.produces != "global":
            return False
        out = [self.folder.resolve() / (self.stems[0] + ending) for ending in (".safetensors", INDEX)]
        return any(place in out for place in places(path))


def places(path: Path) -> list[Path]:
    """Where a file is: that of a link, and that of what it points to"""
    return [path.parent.resolve() / path.name, path.resolve()]


class RoundFiles:
    """The models of a round on their way to the disk. InFiles calls it once it knows how many there are.

    metadata   (weights, names of layers, ids of dropped clients) -> what a file says of its model
    """

    def __init__(self, target: Target, shard_size: int, metadata: Callable[..., dict[str, str]]) -> None:
        self.target, self.shard_size, self.metadata = target, shard_size, metadata
        self.writers: list[ModelWriter] = []
        self.lock: atomic.Lock | None = None
        self.begun = False  # to replace the former models

    def __call__(self, table: Table, models: int, rows: int) -> list[dict[str, torch.Tensor]]:
        return self.open([parts_of(table)] * models, table.layout.layers, rows)

    def open(self, models: Sequence[list[Part]], layers: Sequence[str], rows: int) -> list[dict[str, torch.Tensor]]:
        """The tensors to write, for models of these parts and weights of so many rows"""
        self._discard_writers()  # of a try in which a client was not finite
        target, ids = self.target, self.target.ids
        target.folder.mkdir(parents=True, exist_ok=True)
        if self.lock is None:
            name = f"{target.stems[0]}.safetensors" if target.produces == "global" else "fastagg"
            self.lock = atomic.Lock(target.folder / f"{name}.lock", "this output")
        longest = np.full((len(layers), len(ids)) if rows >= len(layers) else (len(ids),), -1.7976931348623157e308)
        room = len(json.dumps(self.metadata(longest, layers, ids)))
        name = target.folder / f"{target.stems[0] if target.produces == 'global' else SEVERAL}.safetensors"
        atomic.remove_stale(name)
        for parts in models:
            self.writers.append(ModelWriter(name, parts, self.shard_size, room, target.mode))
        return [writer.tensors for writer in self.writers]

    def write(self, found: Result) -> None:
        """Opens files for a model that is in memory, and copies it"""
        layers = found.layers or ("", "")  # of which there are more than rows of weights
        parts = [(key, tensor.dtype, tensor.shape) for key, tensor in found.items()]
        [tensors] = self.open([parts], layers, len(layers) if found.layers else 1)
        for key, tensor in found.items():
            tensors[key].copy_(tensor)
        found.update(tensors)

    def place(self, found: Result | Results) -> dict[str, Path]:
        """All are on the disk before the first takes its place"""
        assert self.lock is not None  # there are writers
        target = self.target
        models = found if isinstance(found, Results) else [found]
        stems = [f"cluster-{m}" for m in range(len(models))] if target.produces == "clusters" else target.stems
        ready = []
        for stem, model in zip(stems, models, strict=True):
            if model is None:  # of a client that was dropped
                continue
            writer = next(w for w in self.writers if all(w.tensors[key] is model[key] for key in model))
            assert model.weights is not None
            metadata = self.metadata(model.weights.numpy(), model.layers, found.dropped)
            writer.complete(stem, metadata)
            ready.append((stem, writer))
        beside = []
        for name, content in target.beside.items():
            with atomic.prepared(target.folder / name) as (new, file):
                file.write(content)
            beside.append(new)
        self.begun = True
        for new in beside:
            atomic.put(new)
        paths = {stem: writer.place() for stem, writer in ready}
        if target.produces == "clusters":
            assert isinstance(found, Results)
            assert found.clusters is not None
            atomic.write_json(target.folder / CLUSTERS, dict(zip(stems, found.clusters, strict=True)))
        self.lock.release()
        return paths

    def discard(self) -> None:
        self._discard_writers()
        if self.lock is not None:
            self.lock.release()

    def _discard_writers(self) -> None:
        for writer in self.writers:
            writer.discard()
        self.writers = []


def parts_of(table: Table) -> list[Part]:
    layout = table.layout
    return list(zip(layout.keys, layout.dtypes, map(torch.Size, layout.shapes), strict=True))
