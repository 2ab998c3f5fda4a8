"""Aggregation of models in files, for rounds that no memory holds: fastagg.aggregate_files()."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastagg._engine import forming, partial, registry, rounds
from fastagg._engine import table as tables
from fastagg._engine.adapters import folders, forms
from fastagg._engine.adapters.access import AdapterResult, InAdapters
from fastagg._engine.adapters.forms import Form
from fastagg._engine.aggregator import Aggregator, Pass
from fastagg._engine.checks import InputError, byte_count, suggest
from fastagg._engine.dtypes import FLOATING
from fastagg._engine.files.clients import Unusable, ids_of, naming_files, open_client
from fastagg._engine.files.file_result import FileResult
from fastagg._engine.files.mapped import MappedModel, open_model
from fastagg._engine.files.slabs import slabs_of
from fastagg._engine.files.state import StateFile, fingerprint
from fastagg._engine.files.streamed import InFiles, Progress
from fastagg._engine.files.target import ADAPTER, ADAPTER_CONFIG, RoundFiles, Target, parts_of, places
from fastagg._engine.files.written import shards_of
from fastagg._engine.inputs import bad_clients, read_inputs, read_sizes
from fastagg._engine.options import options_of
from fastagg._engine.table import StateDict, Table

MOST_LISTED = 100_000  # weights in a file's metadata; of more (many layers) there are none


def aggregate_files(
    method: str | Aggregator, global_path: str | os.PathLike | None, client_paths: Sequence[str | os.PathLike],
    out_path: str | os.PathLike, *, sizes: Any = None, client_ids: Sequence[Any] | None = None,
    state: str | os.PathLike | None = None, memory: int | str = "1GB", shard_size: int | str = "5GB",
    progress: Progress | None = None, report: str | os.PathLike | None = None, lora: Form | None = None,
    rank: int | None = None, **options: Any,
) -> FileResult:  # fmt: skip
    """Runs one round on safetensors files of any size, which are mapped and read piece by piece.

    method       the name of a method, with its options, or an aggregator. Pass the method's round inputs (label_dist,
                 local_steps, ..) like options: one entry per client, in a list or by client id.
    global_path, client_paths   .safetensors files, indices of sharded models, or folders that contain one of these.
                 No file may be changed during the call.
    out_path     a .safetensors file, or a folder, which receives model.safetensors (for adapters,
                 adapter_model.safetensors and adapter_config.json). If there are several models, the folder for all of
                 them. It is replaced at the end, as a whole. It may be the global model, but not a client.
    sizes        data sizes of the clients, in a list or by client id; default: equal
    client_ids   default: the name of the file without its extension, or the name of the folder given
    state        file for what the method remembers: loaded if it exists, and replaced together with the model
    memory       how much memory the call may use, in bytes or as "500MB"; tables that grow with the number of clients
                 times the number of tensors come on top
    shard_size   a model larger than this is written as several files and an index, an adapter always as one file
    progress     function (current step, bytes read, bytes in total)
    report       folder, or .png file, for a picture of the cosines of the client updates and all numbers as JSON. If
                 the method has no Gram, the clients are read once more for it
    lora, rank   LoRA adapters are aggregated by their updates B A, and what the new one is made of them: `form` and
                 `rank` of fastagg.lora.aggregate. Default: "rank", if a model has an adapter_config.json beside it.
                 The new factors are computed in memory, and the option `memory` does not bound them.
    """
    job = Job(
        method, global_path, client_paths, out_path, sizes=sizes, client_ids=client_ids, memory=memory,
        shard_size=shard_size, lora=lora, rank=rank, options=options,
    )  # fmt: skip
    return job.run(state, progress, report)


class Job:
    """A round on files, once all that can be checked without reading them is checked"""

    def __init__(
        self, method, global_path, client_paths, out_path, *, sizes=None, client_ids=None, memory: int | str = "1GB",
        shard_size: int | str = "5GB", lora: Form | None = None, rank: int | None = None, options=None,
    ) -> None:  # fmt: skip
        self.memory, self.shard_size = byte_count("memory", memory), byte_count("shard_size", shard_size)
        self.server, self.options, self.inputs = _server(method, dict(options or {}))
        if lora is not None or rank is not None:
            forms.check(lora or "rank", rank)
        self.kept = isinstance(method, Aggregator)  # by the caller, who may use it for further rounds
        if isinstance(client_paths, str | os.PathLike):
            raise InputError(f"client_paths is one path, {client_paths}; expected a list of them")
        self.center = None if global_path is None else open_model(global_path)
        self.models = [open_client(path) for path in client_paths]
        given = [model for model in (self.center, *self.models) if isinstance(model, MappedModel)]
        wanted = lora is not None or rank is not None
        self.form: Form | None = None  # None: they are no adapters
        if wanted or any(map(folders.is_adapter, given)):
            self.form = lora or "rank"
        self.rank = rank
        if global_path is None and self.server.needs_global and self.form is None:
            raise InputError(f"{self.server.name} needs the global model")
        if not self.models:
            raise InputError("no clients: no file was given")
        self.ids = ids_of(self.models, client_ids)
        self.sizes = _kept(sizes)
        self.inputs = {name: _kept(value) for name, value in self.inputs.items()}
        self.target = Target(Path(out_path), self.server.produces, self.ids, self.shape_of)
        if self.form is not None:
            self._check_adapters()
        self._check_inputs()
        self.target.check(self.clients, self.center, self.shape_of.bytes)
        unusable = [model.path for model in self.models if isinstance(model, Unusable)]
        for path in unusable:
            self.target.refuse(path, "a client")
        models = [*self.clients, *([self.center] if self.center else [])]
        self.read_paths = [path for model in models for path in (model.path, *(file.path for file in model.files))]
        self.read_paths += unusable
        self.state: StateFile | None = None
        self.begun = False  # to replace files
        self._check_memory()

    @property
    def clients(self) -> list[MappedModel]:
        """The clients' models that could be opened"""
        found = [model for model in self.models if isinstance(model, MappedModel)]
        if not found:
            [first, *_] = (model for model in self.models if isinstance(model, Unusable))
            raise InputError(f"no client is left: none of {len(self.models)} files can be used. {first.error}")
        return found

    @property
    def shape_of(self) -> MappedModel:
        """The model that sets the form of the new one"""
        if self.center is not None:
            return self.center
        clients = self.clients
        return clients[tables.most_usual([client.tensors for client in clients], range(len(clients)))]

    @property
    def tensors(self) -> tuple[StateDict | None, list[Any]]:
        """What a round is given: state dicts or adapters, and the error in the place of one that cannot be read"""
        read = folders.with_config if self.form is not None else lambda model: model.tensors
        clients = [model.error if isinstance(model, Unusable) else read(model) for model in self.models]
        none = None if self.form is None else {}  # adapters without a global one began with B = 0
        return none if self.center is None else read(self.center), clients

    def run(self, state=None, progress: Progress | None = None, report=None) -> FileResult:
        if report is not None:
            self.server.gram = "full"  # which the report shows, in the same read if the method computes it anyway
            from fastagg._engine.files import report as file_report  # now: what it needs may be missing

            for path in file_report.paths(Path(report)):
                self._check_free(path, "the report", [] if state is None else [Path(state)])
        if state is None:
            if not self.kept:
                self.server.warn_state_lost(self.inputs, "Keep its state in a file (state=, --state)")
            return self._round(progress, report)
        self._check_free(Path(state), "the state")
        self.state = StateFile(Path(state))
        try:
            ahead = self.state.catch_up(self.center)
            if self.state.tree is not None:
                self.server.load_state_dict(self.state.tree)
            if (
                ahead
                and self.center is not None
                and self.target.is_output(self.center.path)
                and self._fingerprint() == self._said("inputs")
            ):
                return self._made_before()
            return self._round(progress, report)
        finally:
            self.state.release()
            self.state = None

    def _round(self, progress: Progress | None, report) -> FileResult:
        began = time.perf_counter()
        whole = 2**62 if self.form is not None else self.shard_size  # PEFT reads an adapter from one file
        writing = RoundFiles(self.target, whole, self._metadata)
        access = self._access(writing, progress)
        g, clients = self.tensors
        try:
            with naming_files(self.models):
                found, kept = rounds.run(self.server, access, g, clients, self.sizes, self.ids, None, self.inputs)
            if isinstance(found, AdapterResult):
                writing.write(found)
                self.target.beside[ADAPTER_CONFIG] = folders.as_json(found.config or {}).encode()
            result = FileResult(self.server.name, self.ids)
            result.take_over(found)
            if report is not None and result.gram is None and g is not None:
                here = [k for k, name in enumerate(self.ids) if name not in result.dropped]
                table = access.build(g, [clients[k] for k in here], **self._form, client_ids=None, bad=None)
                gram = access.gram(table, False) if table.has is None else partial.gram(table, False, access.gram)
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

    @property
    def _form(self) -> dict[str, Any]:
        """How a table of the models is built"""
        server = self.server
        return {"params": server.params, "layers": server.layers, "partial": server.partial}

    def _made_before(self) -> FileResult:
        """The result of a round whose model is in its place, from what the file says of it"""
        assert self.center is not None
        self.target.tidy(self.center.path)
        result = FileResult(self.server.name, self.ids, {self.target.stems[0]: self.center.path}, made_before=True)
        with suppress(TypeError, ValueError):
            result.dropped = dict.fromkeys(json.loads(self._said("dropped")), "left out by the run that made the model")
            result.weights = torch.tensor(json.loads(self._said("weights")), dtype=torch.float64, device="cpu")
        return result

    def _said(self, key: str) -> str:
        """What the global model's file says of the round that made it"""
        return "" if self.center is None else self.center.metadata.get(f"fastagg.{key}", "")

    def _fingerprint(self) -> str:
        return fingerprint([self.server.name, self.options, self.ids, self.sizes, self.inputs], self.clients)

    def _check_free(self, path: Path, what: str, more: Sequence[Path] = ()) -> None:
        """That a file we write besides the models replaces nothing that is read, and no new model replaces it"""
        self.target.refuse(path, what)
        here = path.parent.resolve() / path.name
        for other in (*self.read_paths, *more):
            if here in places(other):
                raise InputError(f"{path}: {what} would replace {other}, which is used here: write it somewhere else")

    def plan(self) -> dict[str, Any]:
        """What would be read and written; raises where the models do not fit each other"""
        g, clients = self.tensors
        server = self.server
        dropped: dict[int, str] = {}
        with naming_files(self.models):
            adapters = None if self.form is None else InAdapters(self.form, self.rank)
            table = (tables.build if adapters is None else adapters.build)(
                g, clients, **self._form, client_ids=self.ids, bad=dropped if server.on_bad_client == "drop" else None
            )
        passes = forming.passes(server, table, (adapters or InFiles).pass_cost, self.inputs)
        written = len(self.ids) if server.produces == "personalised" else 1
        return {
            "method": server.name, "clients": [name for k, name in enumerate(self.ids) if k not in dropped],
            "tensors": table.T, "layers": len(table.layout.layers),
            "model_bytes": self.shape_of.bytes,
            "new_bytes": self.shape_of.bytes if adapters is None else adapters.new_bytes(table),
            "client_bytes": sum(c.bytes for c in self.clients),
            "passes": len(passes), "models_written": written, "out": str(self.target.path),
            "slabs": [self._slabs(kind, table, written) if self.form is None else 1 for kind in passes],
            "shards": len(shards_of(parts_of(table), self.shard_size)) if self.form is None else 1,
        }  # fmt: skip

    def _slabs(self, kind: Pass, table: Table, written: int) -> int:
        """In how many pieces a pass reads the models"""
        whole = kind in ("mix", "gram_mix", "times_mix", "ranks")
        used = np.ones(table.T, bool) if whole else table.layout.gram_layer >= 0
        models = table.K + (kind not in ("mix", "ranks")) + (written if whole else 0)
        columns = {"gram": table.K + 1, "gram_mix": table.K + 1, "times": 3, "times_mix": 3}.get(kind, 0)
        return len(slabs_of(table, used, models, self.memory // 4, columns))

    def _access(self, writing: RoundFiles, progress: Progress | None) -> InFiles | InAdapters:
        if self.form is not None:
            return InAdapters(self.form, self.rank, None, progress)
        models = [*self.clients, *([self.center] if self.center else [])]
        return InFiles([file for model in models for file in model.files], writing, self.memory // 4, progress)

    def _check_adapters(self) -> None:
        """That adapters can be aggregated, and written as such. One without a config is a bad client."""
        if why := self.server.why_not_on_adapters():
            raise InputError(f"{self.server.name}: {why}")
        if self.server.produces != "global":
            raise InputError(f"{self.server.name} gives several models; fastagg.lora.aggregate gives several adapters")
        if self.target.stems != [ADAPTER]:
            named = f"{ADAPTER}.safetensors and {ADAPTER_CONFIG}"
            raise InputError(f"{self.target.path}: name a folder, which gets {named}")
        if self.center is not None:
            folders.with_config(self.center)
        for k, model in enumerate(self.models):
            try:
                _ = None if isinstance(model, Unusable) else folders.with_config(model)
            except InputError as error:
                self.models[k] = Unusable(model.path, model.name, error)

    def _metadata(self, weights: np.ndarray, layers: Sequence[str], dropped: Sequence[Any]) -> dict[str, str]:
        """What a new model's file says of it, after what the global model's says"""
        about = {
            "version": version("fastagg"), "method": self.server.name, "options": json.dumps(self.options, default=str),
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

    def _check_inputs(self) -> None:
        """Now, not after a model has been read"""
        _, bad = read_inputs(self.server.name, self.server.round_inputs, self.inputs, self.ids)
        bad |= read_sizes(self.sizes, self.ids)[1]
        bad |= {k: str(model.error) for k, model in enumerate(self.models) if isinstance(model, Unusable)}
        if bad and self.server.on_bad_client == "raise":
            raise bad_clients(bad, self.ids)

    def _check_memory(self) -> None:
        tensors = [t for t in self.shape_of.tensors.values() if t.dtype in FLOATING]
        need = self.server.bytes_needed((t.numel(), t.dtype) for t in tensors)
        if need > self.memory:
            raise InputError(
                f"{self.server.name} keeps tensors of the model's size in memory, and computes new ones: that takes "
                f"{need / 1e9:.2g} GB, memory allows {self.memory / 1e9:.2g} GB"
            )


def _kept(given: Any) -> Any:
    """What can be read once is read now"""
    return list(given) if isinstance(given, Iterator) else given


def _server(method: str | Aggregator, options: dict[str, Any]) -> tuple[Aggregator, dict[str, Any], dict[str, Any]]:
    """The aggregator, the options it was made with, and the inputs of this round"""
    if isinstance(method, Aggregator):
        server, inputs, options = method, options, {}
    else:
        cls = registry.find(method)
        inputs = {name: options.pop(name) for name in options.keys() - options_of(cls).keys()}
        server = registry.make(cls, options)
    takes = [spec.name for spec in server.round_inputs]
    for unknown in inputs.keys() - set(takes):
        known = [*options_of(type(server)), *takes]
        raise TypeError(f"{server.name}: no option {unknown!r}{suggest(unknown, known)}; it has {', '.join(known)}")
    if why := server.why_not_on_files():
        raise InputError(f"{server.name}: {why}")
    if server.group is not None:
        raise InputError(f"{server.name}: group= is for models spread over processes, not for files")
    return server, options, inputs
