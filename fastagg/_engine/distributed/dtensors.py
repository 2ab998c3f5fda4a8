"""Models of DTensors: their local shards go in, and results are DTensors again. Nothing is ever gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastagg._engine import table as tables
from fastagg._engine.checks import BadClientError, InputError
from fastagg._engine.outputs import list_of
from fastagg._engine.result import Result
from fastagg._engine.table import Out, StateDict, client_name


@dataclass(frozen=True, eq=False)
class Form:
    """What a DTensor is besides its local shard"""

    mesh: Any
    placements: tuple
    shape: torch.Size
    stride: tuple[int, ...]
    make: Callable[..., Any]  # DTensor.from_local

    @classmethod
    def of(cls, value: Any) -> Form:
        return cls(value.device_mesh, tuple(value.placements), value.shape, value.stride(), type(value).from_local)

    @property
    def ranks(self) -> list[int]:
        return self.mesh.mesh.flatten().tolist()

    @property
    def counts(self) -> bool:
        """This rank's shard is the first of its copies"""
        at = self.mesh.get_coordinate()
        return at is not None and not any(i for i, p in zip(at, self.placements, strict=True) if p.is_replicate())

    def around(self, local: torch.Tensor) -> Any:
        return self.make(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.placements} on ranks {self.mesh.mesh.tolist()}"


class DTensors:
    """The DTensors of a round's models. `ranks` are those of the group that they have to be in."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = frozenset(ranks)
        self.forms: dict[str, Form] = {}  # of the keys that are DTensors
        self._given: dict[int, tuple[torch.Tensor, Any]] = {}  # DTensors that are written in place, by their shard's id

    def local(
        self, global_sd: StateDict | None, client_sds: Sequence[StateDict | InputError],
        client_ids: Sequence[Any] | None, drops: bool = False,
    ) -> tuple[StateDict | None, Sequence[StateDict | InputError]]:  # fmt: skip
        """The models with local shards in the place of DTensors, once these fit each other. With drops, an error
        stands in the place of a client's model that does not fit."""
        named: list[tuple[str, Any]] = [(client_name(k, client_ids), sd) for k, sd in enumerate(client_sds)]
        named = named if global_sd is None else [("the global model", global_sd), *named]
        named = [(who, tables._plain_dict(sd) if isinstance(sd, Mapping) else sd) for who, sd in named]
        found = [(who, sd) for who, sd in named if isinstance(sd, Mapping)]  # the table says what is wrong with others
        if not any(is_dtensor(value) for _, sd in found for value in sd.values()):
            return global_sd, client_sds
        who, reference = found[0]
        self.forms = {key: self._form(who, key, value) for key, value in reference.items() if is_dtensor(value)}
        models: list = []
        for at, (who, sd) in enumerate(named):
            is_client = at >= (global_sd is not None)
            try:
                shards = isinstance(sd, Mapping) and {key: self._shard(who, key, value) for key, value in sd.items()}
                models.append(shards or sd)
            except InputError as error:
                if not is_client:
                    raise
                reason = str(error).removeprefix(f"{who}: ")
                if not drops:
                    raise BadClientError(str(error), {at - (global_sd is not None): reason}) from error
                models.append(InputError(reason))
        return (None, models) if global_sd is None else (models[0], models[1:])

    def out(self, out: Out) -> Out:
        """The shards of what is to be written"""
        if out is None or not self.forms:
            return out
        outs, local = list_of(out), []
        for m, sd in enumerate(outs):
            who = "out" if len(outs) == 1 else f"out[{m}]"
            shards = {key: self._shard(who, key, value) for key, value in sd.items()}
            self._given |= {id(shards[key]): (shards[key], sd[key]) for key in sd if key in self.forms}
            local.append(shards)
        return local

    def restore(self, model: Result | None) -> None:
        """A result of shards becomes one of DTensors; with `out`, of those given"""
        if model is None:
            return
        for key, form in self.forms.items():
            _, given = self._given.get(id(model[key]), (None, None))
            model[key] = form.around(model[key]) if given is None else given

    def _form(self, who: str, key: str, value: Any) -> Form:
        form = Form.of(value)
        if any(p.is_partial() for p in form.placements):
            raise InputError(
                f"{who}: key {key!r} is placed {form}; a sum that is not yet added up cannot be aggregated"
            )
        if not self.ranks.issuperset(form.ranks):
            raise InputError(f"{who}: key {key!r} is placed {form}, of which some are not in the group")
        return form

    def _shard(self, who: str, key: str, value: Any) -> Any:
        form = self.forms.get(key)
        if is_dtensor(value) != (form is not None):
            kinds = ("a plain tensor", "a DTensor")
            raise InputError(f"{who}: key {key!r} is {kinds[form is None]}, expected {kinds[form is not None]}")
        if form is None:
            return value
        if tuple(value.placements) != form.placements or value.device_mesh != form.mesh:
            raise InputError(f"{who}: key {key!r} is placed {Form.of(value)}, expected {form}")
        if value.shape != form.shape:
            raise InputError(f"{who}: key {key!r} has shape {tuple(value.shape)}, expected {tuple(form.shape)}")
        local = value._local_tensor
        with torch.no_grad():
            return local if type(local) is torch.Tensor else value.to_local()  # which waits for what is on its way


def is_dtensor(value: Any) -> bool:
    return type(value).__name__ == "DTensor"  # by its name: importing the class takes a second
