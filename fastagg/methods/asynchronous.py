"""What asynchronous methods share: the number of the global model's version, and how stale what a client sends is.

Clients do not wait for each other: while one trains, others make new versions of the global model. The first one has
the number 0, and each round makes the next. A client says which version it started from. Its staleness t is the number
of versions made since then, and it counts less by s(t), which is 1 for t = 0:

    polynomial   s(t) = (1 + t)^-a
    hinge        s(t) = 1 if t <= b, else 1 / (a (t - b) + 1)
    constant     s(t) = 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch

from fastagg.extend import (
    BadClientError,
    ClientValue,
    Cohort,
    ExampleRound,
    GlobalAggregator,
    InputError,
    Range,
    Result,
    RoundInput,
    Weights,
    check_tensor,
)

VERSION = RoundInput(
    "version", "the number of the version of the global model that each client started from", required=True, low=0,
    kind="versions",
)  # fmt: skip
STEEPNESS = {"polynomial": 0.5, "hinge": 10.0, "constant": 0.0}  # a, as FedAsync's paper has it
Model = Mapping[str, torch.Tensor]  # parameters by key


class Versions(NamedTuple):
    """The number of the current version, and the parameters of former ones by their numbers, in order"""

    now: int = 0
    former: Mapping[int, Model] = {}


class Asynchronous(GlobalAggregator):
    reads = "weights"
    round_inputs = (VERSION,)
    client_values = (ClientValue("staleness"),)

    decay: Literal["polynomial", "hinge", "constant"] = "polynomial"
    a: Annotated[float, Range(0)] | None = None
    b: Annotated[float, Range(0)] = 4.0
    state: Versions = field(init=False, default=Versions(), repr=False)

    @classmethod
    def example_round(cls, K: int) -> ExampleRound:
        return ExampleRound({}, {"version": [0] * K})

    @property
    def version(self) -> int:
        return self.state.now

    def why_not_pre(self, buckets: bool) -> str:
        return "it takes clients that started from different models"

    def why_not_client(self, inputs: Mapping[str, Any], is_update: bool) -> str:
        if "version" not in inputs:
            return "it does not say which version of the global model it started from (version=)"
        return self._why_not(self.state, float(inputs["version"]), is_update)

    def _why_not(self, state: Versions, version: float, is_update: bool) -> str:
        if version % 1:
            return f"it started from version {version:.15g} of the global model, expected an integer"
        if version > state.now:
            why = f"it started from version {version:.15g} of the global model, and the current one is {state.now}"
            return why if state.now else f"{why}; an aggregator counts its own rounds: keep one, or load its state"
        if version < state.now and is_update == (self.stale_as != "updates"):
            return self._why_not_stale(state, int(version))
        return ""

    def _why_not_stale(self, state: Versions, version: int) -> str:
        """Why a client of an older version cannot be used that sent a model where an update was better, or an update
        where a model was"""
        raise NotImplementedError

    def stalenesses(self, cohort: Cohort, version: np.ndarray, are_updates: bool = False) -> np.ndarray:
        """t of each client, [K]. BadClientError where there is none."""
        found = {k: self._why_not(cohort.state, v, are_updates) for k, v in enumerate(version)}
        if any(found.values()):
            said = "; ".join(f"{cohort.table.name(k)}: {why}" for k, why in found.items() if why)
            raise BadClientError(said, {cohort.positions[k]: why for k, why in found.items() if why})
        return cohort.state.now - version

    def discounts(self, t: np.ndarray) -> np.ndarray:
        """s(t)"""
        a = STEEPNESS[self.decay] if self.a is None else self.a
        if self.decay == "hinge":
            return 1 / (a * np.maximum(t - self.b, 0) + 1)
        return (1 + t) ** -a if self.decay == "polynomial" else np.ones_like(t)

    def learn(self, cohort: Cohort, weights: Weights, result: Result | None) -> None:
        cohort.state = Versions(cohort.state.now + 1, self._kept(cohort))

    def _kept(self, cohort: Cohort) -> Mapping[int, Model]:
        """The former versions that the next round needs"""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """{"method": .., "version": 5, "former": {"3": {key: tensor}, "4": {key: tensor}}}, the latter copies of the
        parameters of former versions"""
        former = {str(v): {key: t.clone() for key, t in model.items()} for v, model in self.state.former.items()}
        return {**super().state_dict(), "version": self.state.now, "former": former}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state, ("version", "former"))
        now, given = state["version"], state["former"]
        if not isinstance(now, int) or isinstance(now, bool) or now < 0:
            raise InputError(f"{self.name} state: version is {now!r}, expected an integer >= 0")
        if not isinstance(given, Mapping) or not all(isinstance(model, Mapping) for model in given.values()):
            raise InputError(f"{self.name} state: former is no dict of models")
        for v, model in given.items():
            if not isinstance(v, str) or not v.isdecimal() or int(v) >= now:
                raise InputError(f"{self.name} state: there is a former version {v!r}, and the current one is {now}")
            for key, value in model.items():
                check_tensor(f"{self.name} state: {key!r} of version {v}", key, value)
        super().load_state_dict(state)
        former = {int(v): {key: t.detach().clone() for key, t in model.items()} for v, model in given.items()}
        self.state = Versions(now, dict(sorted(former.items())))
