"""Aggregation of models in files, for rounds that no memory holds: fastagg.aggregate_files()."""

from __future__ import annotations

import copy
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastagg._engine import registry
from fastagg._engine.aggregator import Aggregator, suggest
from fastagg._engine.files.mapped import MappedModel, open_model
from fastagg._engine.files.slabs import slabs_of
from fastagg._engine.files.state import StateFile, fingerprint
from fastagg._engine.files.streamed import Progress, Streamed
from fastagg._engine.files.target import Target, Writing, parts_of, places
from fastagg._engine.files.written import shards_of
from fastagg._engine.gram import Gram
from fastagg._engine.table import FLOATING, InputError
from fastagg.methods.fedopt import ServerOptimiser

MOST_LISTED = 100_000  # weights in a file's metadata; of more (many layers) there are none
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(eq=False)
class FileResult:
    """How a model in a file came about; the model itself is there and not here.

    paths      the files written: a model, or the index of a sharded one; by client or cluster where there are several
    weights    the clients' weights in the order of clients, [K] or [L, K]; of several models .mixing, [M, K]
    made_before   an earlier call made this round, and was stopped before its state was in its place; now it is
    """

    method: str
    clients: list[Any]
    paths: dict[str, Path] = field(default_factory=dict)
    weights: torch.Tensor | None = None
    mixing: torch.Tensor | None = None
    layers: tuple[str, ...] | None = None
    gram: Gram | None = None
    clusters: list[list[Any]] | None = None
    dropped: Sequence[Any] = ()
    passes: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    made_before: bool = False


def aggregate_files(
    method: str | Aggregator, global_path: str | os.PathLike | None, client_paths: Sequence[str | os.PathLike],
    out_path: str | os.PathLike, *, sizes: Any = None, client_ids: Sequence[Any] | None = None,
    state: str | os.PathLike | None = None, memory: int | str = "1GB", shard_size: int | str = "5GB",
    progress: Progress | None = None, report: str | os.PathLike | None = None, **options: Any,
) -> FileResult:  # fmt: skip
    """One round on safetensors files, which are mapped and read piece by piece, whatever their size.

    method       a method's name with its options, or an aggregator. What a method wants for the round besides
                 (label_dist, local_steps ..) are options too: an entry for each client, in a list or by client id.
    paths        .safetensors files, indices of sharded models, or folders with one of these. No file may be changed
                 meanwhile.
    out_path     a .safetensors file, or a folder, which gets model.safetensors (of adapters adapter_model.safetensors
                 and adapter_config.json); where there are several models, the folder of all. It is replaced at the end,
                 whole, and may be the global model's, but no client's.
    sizes        how much data each client has, in a list or by client id; default: equally much
    client_ids   default: a file's name without its ending, or the name of the folder given
    state        file with what the method remembers: loaded if it is there, and replaced together with the model
    memory       that this may take, in bytes or as "500MB"; the clients' number times that of tensors takes some too
    shard_size   a model larger than this is written as several files and an index
    progress     function (what is being done, bytes read, bytes in all)
    report       folder, or .png, for the cosines of the updates as a picture and all numbers as JSON; a method without
                 a Gram reads the clients once more for it
    """
    job = Job(
        method, global_path, client_paths, out_path, sizes=sizes, client_ids=client_ids, memory=memory,
        shard_size=shard_size, options=options,
    )  # fmt: skip
    return job.run(state, progress, report)


class Job:
    """A round on files, once all that can be checked without reading them is checked"""

    def __init__(
        self, method, global_path, client_paths, out_path, *, sizes=None, client_ids=None, memory="1GB",
        shard_size="5GB", options=None,
    ) -> None:  # fmt: skip
        self.memory, self.shard_size = byte_count("memory", memory), byte_count("shard_size", shard_size)
        self.server, self.options, info = _server(method, dict(options or {}))
        self.kept = isinstance(method, Aggregator)  # by the caller, who may use it for further rounds
        if isinstance(client_paths, str | os.PathLike):
            raise InputError(f"client_paths is one path, {client_paths}; expected a list of them")
        if global_path is None and self.server.needs_global:
            raise InputError(f"{self.server.name} needs the global model")
        self.clients = [open_model(path) for path in client_paths]
        if not self.clients:
            raise InputError("no clients: no file was given")
        self.center = None if global_path is None else open_model(global_path)
        self.ids = _ids(self.clients, client_ids)
        self.sizes = by_client("sizes", sizes, self.ids)
        self.info = {
            name: by_client(name, value, self.ids, self.server.client_axis) if name in self.server.per_client else value
            for name, value in info.items()
        }
        self.target = Target(Path(out_path), self.server.gives, self.ids, self.shape_of)
        self.target.check(self.clients, self.center, self.shape_of.bytes)
        models = [*self.clients, *([self.center] if self.center else [])]
        self.inputs = [path for model in models for path in (model.path, *(file.path for file in model.files))]
        self.state: StateFile | None = None
        self.begun = False  # to replace files
        self._check_memory()

    @property
    def shape_of(self) -> MappedModel:
        """The model that sets the form of the new one"""
        return self.center or self.clients[0]

    @property
    def tensors(self) -> tuple[dict[str, torch.Tensor] | None, list[dict[str, torch.Tensor]]]:
        return None if self.center is None else self.center.tensors, [client.tensors for client in self.clients]

    def run(self, state=None, progress: Progress | None = None, report=None) -> FileResult:
        if report is not None:
            from fastagg._engine.files import report as file_report  # now: what it needs may be missing

            for path in file_report.paths(Path(report)):
                self._check_free(path, "the report", [] if state is None else [Path(state)])
        if state is None:
            if not self.kept:
                self.server.warn_memory_lost(self.info, "Keep its memory in a file (state=, --state)")
            return self._round(progress, report)
        self._check_free(Path(state), "the state")
        self.state = StateFile(Path(state))
        try:
            ahead = self.state.catch_up(self.center)
            if self.state.tree is not None:
                self.server.load_state_dict(self.state.tree)
            if ahead and self.target.is_output(self.center.path) and self._fingerprint() == self._said("inputs"):
                return self._made_before()
            return self._round(progress, report)
        finally:
            self.state.release()
            self.state = None

    def _round(self, progress: Progress | None, report) -> FileResult:
        began = time.perf_counter()
        writing = Writing(self.target, self.shard_size, self._metadata)
        access = self._access(writing, progress)
        g, clients = self.tensors
        try:
            found, kept = self.server.aggregate_from(access, g, clients, self.sizes, self.ids, None, self.info)
            result = FileResult(self.server.name, self.ids)
            for name in ("weights", "mixing", "layers", "gram", "clusters", "dropped"):
                setattr(result, name, getattr(found, name, None))
            if report is not None and result.gram is None and g is not None:
                here = [k for k, name in enumerate(self.ids) if name not in result.dropped]
                options = {"params": self.server.params, "layers": self.server.layers}
                gram = access.gram(access.build(g, [clients[k] for k in here], **options), False)
                result.gram = gram.among(len(clients), here)
            if report is not None:  # before the model: a round that is complete must not end with an error
                from fastagg._engine.files import report as file_report

                file_report.save(result, Path(report))
            if self.state is not None:
                after = copy.copy(self.server)
                after.commit(kept)
                self.state.prepare(after.state_dict())
            result.paths = writing.place(found)
        except BaseException:
            writing.discard()
            self.begun = writing.begun
            if self.state is not None and not writing.begun:
                self.state.discard()
            raise
        self.begun = True
        if self.state is not None:
            self.state.place()
        self.server.commit(kept)
        result.passes, result.bytes_read = access.passes, access.bytes_read
        result.seconds = time.perf_counter() - began
        return result

    def _made_before(self) -> FileResult:
        """The result of a round whose model is in its place, from what the file says of it"""
        self.target.tidy(self.center.path)
        result = FileResult(self.server.name, self.ids, {self.target.stems[0]: self.center.path}, made_before=True)
        with suppress(TypeError, ValueError):
            result.dropped = json.loads(self._said("dropped"))
            result.weights = torch.tensor(json.loads(self._said("weights")), dtype=torch.float64)
        return result

    def _said(self, key: str) -> str | None:
        return self.center.metadata.get(f"fastagg.{key}")

    def _fingerprint(self) -> str:
        return fingerprint([self.server.name, self.options, self.ids, self.sizes, self.info], self.clients)

    def _check_free(self, path: Path, what: str, more: Sequence[Path] = ()) -> None:
        """That a file we write besides the models replaces nothing that is read, and no new model replaces it"""
        self.target.refuse(path, what)
        here = path.parent.resolve() / path.name
        for other in (*self.inputs, *more):
            if here in places(other):
                raise InputError(f"{path}: {what} would replace {other}, which is used here: write it somewhere else")

    def plan(self) -> dict[str, Any]:
        """What would be read and written; raises where the models do not fit each other"""
        g, clients = self.tensors
        server = self.server
        table = Streamed([], None, 1).build(g, clients, params=server.params, layers=server.layers, client_ids=self.ids)
        passes, written = reads(server, self.info), len(self.ids) if server.gives == "personalised" else 1
        if isinstance(server, ServerOptimiser) and server.reads_twice(table.layout):
            passes = 2
        fused = passes == 1 and server.name == "fedawa"
        everything, slab = np.ones(table.T, bool), self.memory // 4
        slabs = [slabs_of(table, everything, table.K + fused + written, slab, with_gram=fused)]
        if passes == 2:
            slabs.insert(0, slabs_of(table, table.layout.gram_layer >= 0, table.K + 1, slab, with_gram=True))
        return {
            "method": server.name, "clients": self.ids, "tensors": table.T, "layers": len(table.layout.layers),
            "model_bytes": self.shape_of.bytes, "client_bytes": sum(c.bytes for c in self.clients), "passes": passes,
            "slabs": [len(of_pass) for of_pass in slabs], "models_written": written,
            "shards": len(shards_of(parts_of(table), self.shard_size)), "out": str(self.target.path),
        }  # fmt: skip

    def _access(self, writing: Writing, progress: Progress | None) -> Streamed:
        models = [*self.clients, *([self.center] if self.center else [])]
        return Streamed([file for model in models for file in model.files], writing, self.memory // 4, progress)

    def _metadata(self, weights: np.ndarray, layers: Sequence[str], dropped: Sequence[Any]) -> dict[str, str]:
        """What a new model's file says of it, after what the global model's says"""
        from fastagg import __version__

        about = {
            "version": __version__, "method": self.server.name, "options": json.dumps(self.options, default=str),
            "clients": json.dumps(self.ids), "dropped": json.dumps(list(dropped)),
        }  # fmt: skip
        if self.state is not None:
            about |= self.state.metadata() | {"inputs": self._fingerprint()}
        if weights.size <= MOST_LISTED:
            about["weights"] = json.dumps(weights.tolist())
            if weights.ndim == 2:
                about["layers"] = json.dumps(list(layers))
        kept = {} if self.center is None else self.center.metadata
        kept = {key: value for key, value in kept.items() if not key.startswith("fastagg.")}
        return {"format": "pt", **kept, **{f"fastagg.{key}": value for key, value in about.items()}}

    def _check_memory(self) -> None:
        if not isinstance(self.server, ServerOptimiser):
            return
        tensors = [t for t in self.shape_of.tensors.values() if t.dtype in FLOATING]
        width = [t.numel() * (8 if t.dtype == torch.float64 else 4) for t in tensors]
        need = 2 * len(self.server.moments) * sum(width) + 4 * max(width, default=0)  # old and new; those of a step
        if need > self.memory:
            raise InputError(
                f"{self.server.name} keeps its moments in memory, and computes new ones from them: that takes "
                f"{need / 1e9:.2g} GB, memory allows {self.memory / 1e9:.2g} GB"
            )


def reads(server: Aggregator, info: Mapping[str, Any]) -> int:
    """How often a round reads the clients: once where its weights do not depend on its Gram"""
    if server.name == "fedawa":
        return 1 if server.variant == "released" and server.steps <= 1 else 2
    if server.name == "weiavg":
        return 1 if info.get("entropies") is not None else 2
    free = ("fedavg", "feddisco", "fednova", "cwfedavg")
    return 1 if server.name in free or isinstance(server, ServerOptimiser) else 2


def byte_count(name: str, value: int | str) -> int:
    """Bytes, from a number or from words like 500MB, 2 GB or 1e9"""
    found = re.fullmatch(r"([0-9.e+]+) *([KMGT]?)i?B?", str(value).strip(), re.IGNORECASE)
    try:
        count = float(found[1]) * UNITS[found[2].upper()]
        if count < 1 or count > 2**62:
            raise ValueError
        return int(count)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r}; expected a number of bytes, such as 500MB or 2GB") from None


def by_client(name: str, given: Any, ids: list[Any], axis: int = 0) -> Any:
    """What was given by client id, in the order of the ids, and lists, as an array; all else as it is"""
    if not isinstance(given, Mapping):
        return _numbers(name, given) if isinstance(given, list | tuple | str | int | float) else given
    for client in ids:
        if client not in given:
            raise InputError(f"{name}: there is none for client {client!r}")
    for unknown in given.keys() - set(ids):
        raise InputError(f"{name}: {unknown!r} is not a client{suggest(str(unknown), map(str, ids))}")
    values = [_numbers(name, given[client]) for client in ids]
    try:
        return np.stack(values, axis=axis)
    except ValueError as error:
        raise InputError(f"{name}: expected numbers, as many for every client ({error})") from error


def _numbers(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name}: expected numbers, as many for every client ({error})") from error


def _server(method: str | Aggregator, options: dict[str, Any]) -> tuple[Aggregator, dict[str, Any], dict[str, Any]]:
    """The aggregator, the options it was made with, and what is for this round"""
    if isinstance(method, Aggregator):
        server, info, options = method, options, {}
        for unknown in info.keys() - set(server.round_info):
            raise TypeError(f"{server.name}: a round takes no {unknown!r}{suggest(unknown, server.round_info)}")
    else:
        takes = registry.REGISTRY[method].round_info if method in registry.REGISTRY else ()
        info = {name: options.pop(name) for name in takes if name in options}
        server = registry.aggregator(method, **options)
    if "proxy" in server.round_info:
        raise InputError(f"{server.name} learns on proxy data with the model itself: it cannot work on files alone")
    if getattr(server, "group", None) is not None:
        raise InputError(f"{server.name}: group= is for models spread over processes, not for files")
    return server, options, info


def _ids(clients: list[MappedModel], given: Sequence[Any] | None) -> list[Any]:
    given = [client.name for client in clients] if given is None else given
    ids = [name.item() if isinstance(name, np.generic | torch.Tensor) else name for name in given]
    if len(ids) != len(clients):
        raise InputError(f"client_ids has {len(ids)} entries for {len(clients)} files")
    seen: dict[Any, MappedModel] = {}
    for name, client in zip(ids, clients, strict=True):
        other = seen.setdefault(name, client)
        if other is not client:
            raise InputError(
                f"{other.path} and {client.path} are both client {name!r}: rename one, or name their folders instead"
            )
    return ids
