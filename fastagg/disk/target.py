"""Where the new models of a round go, and how all of them get there at once."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastagg import files
from fastagg.disk.mapped import INDEX, MappedModel, read_index
from fastagg.disk.written import ModelWriter
from fastagg.result import Result
from fastagg.table import InputError, Table

FORM = re.compile(r"(.*?)((-b)?-\d{5}-of-\d{5})?\.safetensors(\.index\.json|\.part)?", re.DOTALL)  # of a model's files


class Target:
    """A file, or a folder: of one model, of one per client, or of one per cluster"""

    def __init__(self, path: Path, gives: str, ids: list[Any]) -> None:
        self.path, self.gives, self.ids = path, gives, ids
        is_file = path.name.endswith(".safetensors") and not path.is_dir()
        if is_file and gives != "global":
            raise InputError(f"{path}: there will be several models, name a folder for them")
        self.folder, stem = (path.parent, path.name.removesuffix(".safetensors")) if is_file else (path, "model")
        if is_file and not self.folder.is_dir():
            raise InputError(f"{path}: there is no folder {self.folder}")
        self.stems = [str(name) for name in ids] if gives == "personalised" else [stem]
        for name in self.stems:
            if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
                raise InputError(f"client id {name!r} cannot be the name of a file")
        for name in self.stems:
            whose = FORM.fullmatch(f"{name}.safetensors")[1]
            if gives == "personalised" and whose != name and whose in self.stems:
                raise InputError(f"client id {name!r} is like the name of a part of client {whose!r}'s model")
        if len(set(self.stems)) < len(self.stems):
            raise InputError("two client ids are the same as names of files")

    def check(self, clients: list[MappedModel], size: int) -> None:
        """That no client is replaced, that what is replaced is understood, and that there is room for such models"""
        for stem in self.stems:
            if (self.folder / (stem + INDEX)).exists():
                read_index(self.folder / (stem + INDEX))
        for client in clients:
            for path in (client.path, *(file.path for file in client.files)):
                self.refuse(path, "a client")
        where = next(folder for folder in (self.folder.absolute(), *self.folder.absolute().parents) if folder.exists())
        if not where.is_dir():
            raise InputError(f"{self.path}: {where} is not a folder")
        free, needed = shutil.disk_usage(where).free, size * len(self.stems)
        if needed > free:
            raise InputError(f"{self.path}: {needed / 1e9:.3g} GB are to be written, {free / 1e9:.3g} GB are free")

    def refuse(self, path: Path, what: str) -> None:
        """Raises when writing the new models would replace this file"""
        for place in (path.parent.resolve() / path.name, path.resolve()):  # a link, and what it points to
            form = FORM.fullmatch(place.name)
            if form is None or place.parent != self.folder.resolve():
                continue
            if form[1] in self.stems or (self.gives == "clusters" and re.fullmatch(r"cluster-\d+", form[1])):
                raise InputError(f"{place} is {what}, and a new model would take its place: write it somewhere else")


class Writing:
    """The models of a round on their way to the disk. Streamed calls it once it knows how many there are.

    metadata   (weights, names of layers, ids of dropped clients) -> what a file says of its model
    """

    def __init__(self, target: Target, shard_size: int, metadata: Callable[..., dict[str, str]]) -> None:
        self.target, self.shard_size, self.metadata = target, shard_size, metadata
        self.writers: list[ModelWriter] = []
        self.lock: files.Lock | None = None

    def __call__(self, table: Table, models: int, rows: int) -> list[dict[str, torch.Tensor]]:
        self._discard_writers()  # of a try in which a client was not finite
        target, layers, ids = self.target, table.layout.layers, self.target.ids
        target.folder.mkdir(parents=True, exist_ok=True)
        if self.lock is None:
            name = f"{target.stems[0]}.safetensors" if target.gives == "global" else "fastagg"
            self.lock = files.Lock(target.folder / f"{name}.lock", "this output")
        longest = np.full((len(layers), len(ids)) if rows >= len(layers) else (len(ids),), -1.7976931348623157e308)
        room = len(json.dumps(self.metadata(longest, layers, ids)))
        stems = target.stems if target.gives == "global" else [f"fastagg-{m}" for m in range(models)]
        for stem in stems:
            self.writers.append(ModelWriter(target.folder, stem, parts_of(table), self.shard_size, room))
        return [writer.tensors for writer in self.writers]

    def place(self, found: Result | list) -> dict[str, Path]:
        """All are on the disk before the first takes its place"""
        target = self.target
        models = [found] if target.gives == "global" else found
        stems = [f"cluster-{m}" for m in range(len(models))] if target.gives == "clusters" else target.stems
        ready = []
        for stem, model in zip(stems, models, strict=True):
            if model is None:  # of a client that was dropped
                continue
            writer = next(w for w in self.writers if all(w.tensors[key] is model[key] for key in model))
            metadata = self.metadata(model.weights.numpy(), model.layers, found.dropped)
            writer.complete(metadata)
            ready.append((stem, writer, metadata))
        paths = {stem: writer.place(stem, metadata) for stem, writer, metadata in ready}
        if target.gives == "clusters":
            files.write_json(target.folder / "clusters.json", dict(zip(stems, found.clusters, strict=True)))
        if target.gives != "global":
            for path in target.folder.glob("fastagg-*.safetensors.part"):  # of a run that was killed
                path.unlink(missing_ok=True)
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


def parts_of(table: Table) -> list[tuple[str, torch.dtype, torch.Size]]:
    layout = table.layout
    return list(zip(layout.keys, layout.dtypes, map(torch.Size, layout.shapes), strict=True))
