"""A round whose clients arrive one by one: server.round(global_sd)."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fastagg._engine import kernels, nonfinite, rounds
from fastagg._engine import table as tables
from fastagg._engine.access import Access
from fastagg._engine.arrivals import forms, updates
from fastagg._engine.arrivals.held import Held
from fastagg._engine.arrivals.running import RunningSum, why_not
from fastagg._engine.arrivals.spill import Spill, form_of
from fastagg._engine.arrivals.updates import OfUpdates
from fastagg._engine.checks import BadClientError, InputError, byte_count, suggest
from fastagg._engine.dtypes import FLOATING
from fastagg._engine.files import paging
from fastagg._engine.files.mapped import MappedFile, MappedModel, open_model
from fastagg._engine.forked import one_thread
from fastagg._engine.in_memory import InMemory
from fastagg._engine.inputs import ClientId, data_shares, read_client_ids, read_inputs, read_sizes
from fastagg._engine.outputs import to_numpy
from fastagg._engine.table import Out, StateDict, Table

if TYPE_CHECKING:
    from fastagg._engine.aggregator import Aggregator

LOG = logging.getLogger("fastagg")
Check = Literal["add", "finish"]
Model = StateDict | MappedModel | str | os.PathLike  # a state dict, or where it is: a safetensors file or folder


@dataclass(eq=False)
class Arrived:
    """A client of the round"""

    model: StateDict
    is_update: bool  # and not a model
    size: float | None
    inputs: dict[str, Any]
    narrow: bool  # some of its tensors are of narrower dtypes than the global model's
    held: int = 0  # bytes of it in memory
    files: list[MappedFile] = field(default_factory=list)  # that its tensors look at
    spilled: bool = False


class Round:
    """Clients that arrive one by one, from any number of threads, and their aggregation.

    add() checks a client at once: one that cannot be used is refused there, by name. finish() aggregates those who came
    and gives what server.aggregate() would have given for them, bit for bit, whatever the order of their arrival.

    clients   ids of those in the round, in the order of their arrival. Attributes of the result have this order
    dropped   {client id: reason} of those that were refused (on_bad_client="drop")

    Use it in a `with` block. Clients are let go at its end, and removed from the disk if the round was finished and the
    block ends without an error: save the result and the server before that, and no stop of the process loses a client
    or counts one twice.
    """

    def __init__(
        self, server: Aggregator, global_sd: Model | None, *, memory: int | str | None = None,
        spill: str | os.PathLike | None = None, running: bool = False, check: Check = "add",
        resumed: Spill | None = None,
    ) -> None:  # fmt: skip
        if server.group is not None:
            raise InputError(f"{server.name}: clients that arrive one by one cannot be spread over processes (group=)")
        if server.partial:
            raise InputError(f"{server.name}: partial=True takes all clients at once: pass them to aggregate()")
        if global_sd is None and server.needs_global:
            raise server.missing_global()
        self._server = server
        self._memory = None if memory is None else byte_count("memory", memory)
        self._global_files: list[MappedFile] = []
        self._global = None if global_sd is None else self._opened(global_sd, self._global_files)
        self._form: StateDict | None = self._global  # what clients are compared with
        self._clients: dict[ClientId, Arrived] = {}
        self._coming: dict[ClientId, bool | None] = {}  # those being added; has it a size, where that is known
        self._refused: dict[ClientId, str] = {}
        self._state = "open"
        self._version = server.version
        if check not in ("add", "finish"):
            raise ValueError(f"check={check!r}; expected 'add' or 'finish'")
        self._looks = check == "add"  # for values that are not finite
        self._changed = threading.Condition()  # guards all of the above
        self._disk = threading.Lock()  # one file is written at a time
        self._sum: RunningSum | None = None
        self._running = running
        if running:
            self._check_running(spill)
        self._spill = resumed
        if resumed is None and spill is not None:
            self._spill = self._begin(spill)
        if resumed is not None:
            for about, model in resumed.clients():
                self._clients[about["id"]] = self._read_again(about, model)

    def _begin(self, path: str | os.PathLike) -> Spill:
        spill = Spill(path)
        try:
            if spill.is_begun:
                raise InputError(
                    f"{path} holds a round that was not finished: go on with server.resume_round({str(path)!r}), or "
                    "remove the folder"
                )
            try:
                own = None if self._global is None else self._own_table(self._global)
            except InputError as error:
                raise InputError(f"the global model: {str(error).removeprefix('client 0: ')}") from error
            form = None if own is None else form_of(own)
            about = {"method": self._server.name, "version": self._version, "global": form}
            spill.begin(about, None if own is None else self._tensors(own))
        except BaseException:
            spill.close()
            raise
        return spill

    def _check_running(self, spill: Any) -> None:
        if why := self._server.why_not_running(self._global):
            raise InputError(f"{self._server.name}: {why}; leave it out, and the clients are kept (memory=, spill=)")
        if not self._looks:
            raise InputError("running=True has no client left to look at in the end: leave check out")
        if spill is not None or self._memory is not None:
            raise InputError("running=True keeps no clients: leave memory and spill out")

    def add(
        self, client_id: ClientId, model: Model | None = None, *, update: Model | None = None,
        size: float | None = None, **inputs: Any,
    ) -> bool:  # fmt: skip
        """Adds a client: True if it is in the round now.

        model     a state dict, or the path of a .safetensors file or folder. Tensors are not copied: do not change them
                  before the round is finished. Floats may be narrower than the global model's (bfloat16 for float32)
        update    in its place, the model less the global model; buffers and counters as well
        size      how much data it has; of all clients, or of none
        inputs    its entries in the method's round inputs, such as local_steps=40

        A client that cannot be used raises BadClientError, and is not in the round; with on_bad_client="drop" it is
        logged, and False is returned. So is one that is in the round already: discard() it before.
        """
        [name] = read_client_ids([client_id], 1)
        if (model is None) == (update is None):
            raise TypeError("add() takes a client's model or its update")
        if update is not None and self._global is None:
            raise InputError("update= is of a global model, and server.round() was given none")
        sent, coming = model if update is None else update, False
        try:
            with self._changed:
                self._wait_for(name)
                if name in self._clients:
                    why = "it has sent a model in this round already; the first one counts"
                    return self._refuse(name, why, keep=True)
                coming, self._coming[name] = True, None
            try:
                self._keep(name, self._checked(name, sent, update is not None, size, inputs))
            except BadClientError as error:
                return self._refuse(name, next(iter(error.reasons.values())))
        finally:
            if coming:
                self._coming.pop(name, None)  # before any lock: after Ctrl-C, nobody is to wait for it
                with self._changed:
                    self._changed.notify_all()
        return True

    def discard(self, client_id: ClientId) -> bool:
        """Takes a client out of the round again; it may send another model. False if it was not in it"""
        [name] = read_client_ids([client_id], 1)
        with self._changed:
            self._wait_for(name)
            arrived = self._clients.get(name)
            if self._running and arrived is not None:
                raise InputError(f"client {name!r} was added to the running sum: it cannot be taken out again")
            if self._spill is not None and (arrived is None or arrived.spilled):  # None: perhaps add() was interrupted
                self._spill.remove(name)  # first: where that fails, the client is in the round here as well as there
            self._clients.pop(name, None)
            self._refused.pop(name, None)
        return arrived is not None

    @property
    def clients(self) -> list[ClientId]:
        with self._changed:
            return list(self._clients)

    @property
    def dropped(self) -> dict[ClientId, str]:
        with self._changed:
            return dict(self._refused)

    @property
    def is_ready(self) -> bool:
        """As many clients are in the round as the method waits for, if it says so (fedbuff, fedasync)"""
        wanted = self._server.waits_for
        with self._changed:
            return wanted is not None and len(self._clients) >= wanted

    def finish(self, *, client_ids: Sequence[ClientId] | None = None, out: Out = None, **inputs: Any) -> Any:
        """Aggregates the clients who came, and ends the round. After an error it is open again.

        client_ids  all of .clients in the order that the result's attributes are to have; default: as they arrived
        out         as for server.aggregate()
        inputs      round inputs that clients have no entries in, such as proxy data; or those of all clients, by id
        """
        ours, after = False, "open"
        try:
            with self._changed:
                self._check_open()
                ours, self._state = True, "being finished"
                self._changed.wait_for(lambda: not self._coming)
            if client_ids is not None:
                self._order(client_ids)
            result, kept = self._aggregate(out, inputs)
            after = "finished"  # first: after Ctrl-C in between it is not counted, and cannot be counted twice
            token = self._spill.about["token"] if self._spill is not None and self._spill.resumable else None
            self._server.commit(kept, token)
        finally:
            if ours:
                self._state = after  # as in add()
                with self._changed:
                    self._changed.notify_all()
        return result

    def _order(self, client_ids: Sequence[ClientId]) -> None:
        ids = read_client_ids(client_ids, len(client_ids))
        if set(ids) != set(self._clients):
            raise InputError(f"client_ids are {ids!r}, and the round has {list(self._clients)!r}")
        self._clients = {name: self._clients[name] for name in ids}

    def cancel(self) -> None:
        """Ends the round without a result, and removes what is on the disk"""
        self._end(remove_finished=True, remove_unfinished=True)

    def close(self) -> None:
        """Lets the clients go. Of a round that was not finished, those on the disk stay there for resume_round()"""
        self._end(remove_finished=True, remove_unfinished=False)

    def _end(self, *, remove_finished: bool, remove_unfinished: bool) -> None:
        """Once nothing is done in other threads any more: the folder may be the next round's at once"""
        with self._changed:
            self._changed.wait_for(lambda: self._state != "being finished")
            if self._state == "closed":  # and the folder, perhaps, another round's
                return
            finished, self._state = self._state == "finished", "closed"
            self._changed.wait_for(lambda: not self._coming)
            self._clients.clear()
        if self._spill is not None:
            try:
                if remove_finished if finished else remove_unfinished:
                    self._spill.clear()
            finally:
                self._spill.close()

    def __enter__(self) -> Round:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # who knows what became of the result
            self._end(remove_finished=False, remove_unfinished=False)

    def _wait_for(self, name: ClientId) -> None:
        """Until it is known whether another model of this client, which is being added, counts"""
        self._check_open()
        self._changed.wait_for(lambda: name not in self._coming)
        self._check_open()

    def _check_open(self) -> None:
        if self._state != "open":
            raise InputError(f"the round is {self._state}: begin another with server.round()")

    def _refuse(self, name: ClientId, reason: str, *, keep: bool = False) -> bool:
        """keep: another model of this client is in the round"""
        if self._server.on_bad_client == "raise":
            raise BadClientError(f"client {name!r}: {reason}", {0: reason})
        LOG.warning("%s: client %r: %s; refused", self._server.name, name, reason)
        if not keep:
            with self._changed:
                self._refused[name] = reason
        return False

    def _checked(
        self, name: ClientId, model: Any, is_update: bool, size: float | None, inputs: dict[str, Any]
    ) -> Arrived:  # fmt: skip
        specs = {spec.name: spec for spec in self._server.round_inputs if spec.per_client}
        for unknown in inputs.keys() - specs.keys():
            raise TypeError(f"{self._server.name}: a client has no {unknown!r}{suggest(unknown, specs)}")
        wrong: dict[int, str] = {}
        if size is not None:
            (size,), wrong = read_sizes([size], [name])
        given = [spec for spec in specs.values() if spec.name in inputs and not spec.pairwise and spec.client_axis == 0]
        read: dict[str, Any] = {}
        for spec in given:
            values, faults = read_inputs(self._server.name, [spec], {spec.name: [inputs[spec.name]]}, [name])
            wrong |= faults
            read |= {what: value[0] for what, value in values.items()}
        inputs |= read  # numbers, copied: the caller may fill an array anew for the next client
        if not wrong and (why := self._server.why_not_client(read, is_update)):
            wrong = {0: why}
        if (
            not wrong
            and self._running
            and (lacks := [what for what, s in specs.items() if s.required and what not in read])
        ):
            wrong = {0: f"it has no {lacks[0]}, which a running sum needs when it comes"}
        parts = self._server.parts_of_mean(1.0 if size is None else size, read) if self._running and not wrong else None
        if parts is not None and (why := why_not(parts)):
            wrong = {0: why}
        if wrong:
            raise BadClientError(wrong[0], wrong)
        files: list[MappedFile] = []
        try:
            sd = self._opened(model, files)
        except InputError as error:
            raise BadClientError(str(error), {0: str(error)}) from error
        with self._changed:
            known = self._form is not None
        if known:  # what has another form is not read
            self._in_form(sd)
        try:
            own = self._own_table(sd)
        except BadClientError:
            raise
        except InputError as error:  # of a model that nobody has seen the like of
            reason = str(error).removeprefix("client 0: ")
            raise BadClientError(reason, {0: reason}) from error
        if self._looks and (reason := self._not_finite(own, files)):
            raise BadClientError(reason, {0: reason})
        with self._changed:
            if self._form is None:  # only now: a client that is wrong sets no form
                self._form = forms.blank(sd)
            table = self._in_form(sd)
            sized = [client.size is not None for client in self._clients.values()] + list(self._coming.values())
            if (size is None) in sized:
                words = "has no size, and others have" if size is None else "has a size, and others have none"
                raise BadClientError(f"it {words}", {0: f"it {words}"})
            self._coming[name] = size is not None
            if self._running and self._sum is None:
                self._sum = RunningSum(table.global_model)
        if self._sum is not None:
            assert parts is not None  # see _check_running
            self._sum.add(name, table, parts, size is None or size > 0, is_update)
            return Arrived({}, is_update, size, inputs, False)
        dtypes = table.layout.dtypes
        narrow = any(t.dtype != dtype for t, dtype in zip(table.clients[0], dtypes, strict=True))
        held = 0 if files else int(own.layout.bytes.sum())
        return Arrived(sd, is_update, size, inputs, narrow, held, files)

    def _in_form(self, sd: StateDict) -> Table:
        options = {"params": self._server.params, "layers": self._server.layers}
        return tables.build(self._form, [sd], narrow=self._global is not None, hints=False, **options)

    def _not_finite(self, own: Table, files: list[MappedFile]) -> str:
        """Which keys, in words, by one read; a second one where there are any. Or why a file cannot be read."""
        squares: list[float] = []
        if files:
            try:
                Held(files, self._slab_bytes).each_part(
                    own, lambda part: squares.append(float(kernels.dots_of(part, part.clients[0])[0]))
                )
            except InputError as error:
                return str(error)
        else:
            squares.append(float(kernels.dots_of(own, own.clients[0])[0]))
        keys = [] if np.isfinite(squares).all() else nonfinite.keys_not_finite(own, own.clients[0])
        return nonfinite.in_words("", keys)

    def _own_table(self, sd: StateDict) -> Table:
        """Of one model, of which buffers are to be looked at as well"""
        own = tables.build(None, [sd], hints=False)
        floats = [key for key, dtype in zip(own.layout.keys, own.layout.dtypes, strict=True) if dtype in FLOATING]
        return tables.build(None, [sd], params=floats, hints=False) if floats else own

    @staticmethod
    def _tensors(own: Table) -> dict[str, torch.Tensor]:
        return dict(zip(own.layout.keys, own.clients[0], strict=True))

    def _opened(self, model: Model, files: list[MappedFile]) -> StateDict:
        if not isinstance(model, str | os.PathLike | MappedModel):
            return forms.copy_of(model) if isinstance(model, Mapping) else model  # whose entries the caller may replace
        opened = model if isinstance(model, MappedModel) else open_model(Path(model))
        files += opened.files
        return opened.tensors

    def _keep(self, name: ClientId, arrived: Arrived) -> None:
        """Puts a client into the round: in memory if there is room, else on the disk"""
        with self._changed:
            taken = sum(client.held for client in self._clients.values())
            room = None if self._memory is None else self._memory // 2
            fits = room is None or not arrived.held or taken + arrived.held <= room
            if fits:
                self._enter(name, arrived)
                return
        own = self._own_table(arrived.model)
        if own.device.type != "cpu":
            raise InputError(
                f"memory={self._memory}: models on {own.device} cannot be kept on the disk, CPU tensors can"
            )
        with self._disk:
            if self._spill is None:
                self._spill = Spill(None)
            about = {"update": arrived.is_update, "size": arrived.size, "inputs": arrived.inputs, **form_of(own)}
            kept = self._read_again(about, self._spill.put(name, self._tensors(own), about))
            paging.give_back()  # what clients before this one took
        with self._changed:
            self._enter(name, kept)

    def _enter(self, name: ClientId, arrived: Arrived) -> None:
        self._clients[name] = arrived
        self._refused.pop(name, None)  # an earlier model of its

    def _read_again(self, about: Mapping[str, Any], model: MappedModel) -> Arrived:
        sd, form = model.tensors, self._global or {}
        narrow = any(key in form and forms.dtype_of(form[key]) != forms.dtype_of(value) for key, value in sd.items())
        if self._form is None:
            self._form = sd
        return Arrived(
            sd, bool(about["update"]), about["size"], dict(about["inputs"]), narrow, files=model.files, spilled=True
        )  # fmt: skip

    def _aggregate(self, out: Out, inputs: Mapping[str, Any]) -> tuple[Any, rounds.Kept]:
        server = self._server
        if not self._clients:
            refused = f"; {len(self._refused)} were refused" if self._refused else ""
            raise InputError(f"no client is in the round{refused}")
        if server.version != self._version:
            raise InputError(
                f"{server.name}: the round was begun with version {self._version} of the global model, and another "
                f"round has made version {server.version}: begin a round when the one before is finished"
            )
        inputs = {**self._inputs(inputs), **inputs}
        if self._sum is not None:
            return self._mean_of(self._sum, out, inputs)
        clients = self._clients if self._in_pieces else self._whole()
        sizes = [client.size for client in clients.values()]
        access, models = self._access(list(clients.values())), [client.model for client in clients.values()]
        given = None if None in sizes else sizes
        self._check_files()
        try:
            result, kept = rounds.run(server, access, self._global, models, given, list(clients), out, inputs)
        except InputError:
            self._check_files()  # which says whose it is, where a file is the reason
            raise
        self._check_files()
        access.deliver(result)
        result.dropped = {**self._refused, **result.dropped}
        return result, kept

    def _mean_of(self, total: RunningSum, out: Out, inputs: Mapping[str, Any]) -> tuple[Any, rounds.Kept]:
        """What the method makes of the mean, as of a round with one client"""
        assert self._form is not None  # a client came
        sizes = [client.size for client in self._clients.values()]
        if None not in sizes:
            data_shares(np.array(sizes))  # which says what is wrong where they sum to zero, whatever the weights
        for name in total.parts.keys() - self._clients.keys():
            raise InputError(f"client {name!r} was interrupted while it was added: this sum cannot be used any more")
        shares, step = total.shares(self._clients), self._server.step_of_mean(total.parts_of(self._clients))
        as_update = self._server.mean_as == "update"
        tensors = zip(self._form.items(), total.mean(step, as_update), strict=True)
        mean = {key: t if isinstance(like, torch.Tensor) else to_numpy(t) for (key, like), t in tensors}
        access: Access = OfUpdates(InMemory()) if as_update else InMemory()
        anyone = {what: [next(iter(of.values()))] if isinstance(of, Mapping) else of for what, of in inputs.items()}
        server = copy.copy(self._server)
        server.on_bad_client = "raise"
        try:
            result, kept = rounds.run(server, access, self._global, [mean], None, None, out, anyone)
        except BadClientError as error:  # of the mean, which is nobody's
            raise InputError(f"{server.name}: the mean of all clients: {error.reasons[0]}") from error
        result.weights = torch.from_numpy(step * shares)
        result.dropped = dict(self._refused)
        return result, kept

    @property
    def _in_pieces(self) -> bool:
        """Whether the method can work on pieces of models, as Held makes them"""
        form = self._form or {}
        on_gpu = any(isinstance(form[key], torch.Tensor) and form[key].device.type != "cpu" for key in [*form][:1])
        return not on_gpu and not self._server.why_not_on_files()

    def _whole(self) -> dict[ClientId, Arrived]:
        """The clients in the global model's dtypes, all with models or all with updates. A method that tries models out
        needs these; for others, where some sent updates, those of the rest are made, for they are exact or nearly so,
        and models from updates lose digits."""
        clients = self._clients
        updates = not self._server.why_not_on_files() and any(client.is_update for client in clients.values())
        return {name: self._turned(client, updates) for name, client in clients.items()}

    @one_thread()
    def _turned(self, client: Arrived, to_update: bool) -> Arrived:
        if client.is_update == to_update and not client.narrow:
            return client
        table = tables.build(self._global, [client.model], narrow=True, hints=False)
        tensors = [t.detach().to(dtype) for t, dtype in zip(table.clients[0], table.layout.dtypes, strict=True)]
        if client.is_update != to_update:
            turn = updates.update_of if to_update else updates.model_of
            tensors = turn(tensors, self._started_from(client, table.layout.keys, table.global_model))
        sd = dict(zip(table.layout.keys, tensors, strict=True))
        return replace(client, model=sd, is_update=to_update, narrow=False, files=[])

    def _started_from(
        self, client: Arrived, keys: Sequence[str], base: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:  # fmt: skip
        start = self._server.started_from(client.inputs) or {}
        return [start[key].to(t.device) if key in start else t for key, t in zip(keys, base, strict=True)]

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the clients sent besides models, by client id"""
        names = {name for client in self._clients.values() for name in client.inputs}
        for name in names & given.keys():
            raise InputError(f"{name} came with the clients, and was given again")
        return {name: {who: client.inputs.get(name) for who, client in self._clients.items()} for name in names}

    def _access(self, clients: list[Arrived]) -> Access:
        are_updates, narrow = (any(getattr(c, what) for c in clients) for what in ("is_update", "narrow"))
        files = [file for client in clients for file in client.files] + self._global_files
        bases = {
            k: partial(self._started_from, client)
            for k, client in enumerate(clients)
            if are_updates and not client.is_update
        }
        access: Access = InMemory()  # it reads mapped tensors as well, without regard for how much it has in memory
        if self._in_pieces and (files or bases or narrow):
            buffers = len(clients) + 2 if bases or narrow else 0
            access = Held(files, self._slab_bytes, bases=bases, buffers=buffers)
        return OfUpdates(access) if are_updates else access

    def _check_files(self) -> None:
        files = {f"client {name!r}": client.files for name, client in self._clients.items()}
        for who, of in {"the global model": self._global_files, **files}.items():
            try:
                for file in of:
                    file.check_unchanged()
            except InputError as error:
                raise InputError(f"{who}: {error}") from error

    @property
    def _slab_bytes(self) -> int:
        """What is read back at a time, as much again being read ahead. Half of memory= is for clients that are kept; of
        the other half, this takes what pages of files leave that have more than what is asked for."""
        half = (1 << 30 if self._memory is None else self._memory) // 2
        on_disk = sum(bool(client.files) for client in self._clients.values())
        left = half - on_disk * 2 * paging.LARGE_PAGE  # of a piece, both ends may be in such pages
        return max(min(left // 2, half // 4), half // 8, 1 << 20)
