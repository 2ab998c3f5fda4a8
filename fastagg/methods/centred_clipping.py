"""Centred clipping (Karimireddy et al., ICML 2021): no client moves the model further than a clipped update may.

    v = v + 1/K sum_k (d_k - v) min(1, tau / ||d_k - v||),      new model g + v

from v = 0, or as in the paper from the v of the round before. Every v is u v_0 + sum_k c_k d_k with v_0 the start, so
||d_k - v|| comes from a Gram that has v_0 as one more row, and an iteration is c = (1 - mean s) c + s / K with
s_k = min(1, tau / ||d_k - v||): the coefficients are never negative and their sum is never above 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fastagg._engine import core
from fastagg._engine.aggregator import (
    Aggregator,
    Cohort,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    describe,
    function_of,
)
from fastagg._engine.finite import NonFiniteError
from fastagg._engine.gram import Gram
from fastagg._engine.remembered import check_form, check_tensor
from fastagg._engine.result import Result
from fastagg._engine.table import InputError, Table, as_tensor


@dataclass(kw_only=True, eq=False)
class CentredClipping(Aggregator):
    """The mean of the clients' updates, none longer than tau: the model moves at most that far per iteration.

    tau          updates are clipped to this length; choose it near the length of an honest one
    iterations   clip again around the model found so far, this often in all
    weighted     by the data shares. False, as in the paper: every client counts alike, whatever size it claims
    center       what updates are clipped around: "global", no update at all; "previous", as in the paper, the update of
                 the round before, which an aggregator remembers (in memory, not for models in files)
    params, layers, out   as in fastagg.gram and fastagg.mix

    The model is g + sum_k weights_k (w_k - g), and with center="previous" + previous_weight times the update before:
    .weights (and .previous_weight) are never negative and sum to at most 1, less when updates were clipped. Whatever is
    not a parameter (buffers, integers) is the coordinate-wise median over all clients.
    """

    name = "centred_clipping"
    paper = "Karimireddy et al., ICML 2021"

    tau: float = 10.0
    iterations: int = 1
    weighted: bool = False
    center: str = "global"
    # The update of the round before, a tensor for each parameter; None before the first. Never written to.
    _memory: dict[str, torch.Tensor] | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("centred_clipping", "tau", self.tau, 1e-100, float("inf"))
        check_integer("centred_clipping", "iterations", self.iterations, 1)
        check_flag("centred_clipping", "weighted", self.weighted)
        check_choice("centred_clipping", "center", self.center, ("global", "previous"))

    def round(self, cohort: Cohort, out) -> Result:
        K, table = cohort.K, cohort.table
        masses = cohort.n if self.weighted else np.full(K, 1 / K)
        if self.center == "previous" and not cohort.access.in_memory:
            raise InputError("centred_clipping: center='previous' keeps an update in memory and does not work on files")
        # any: of a model that is spread over processes, this one may have no part, and no update of it
        if self.center == "global" or not cohort.access.any(bool(cohort.memory)):
            gram = cohort.gram()
            c = clip(gram.updates().cpu().numpy(), masses, np.zeros(K), self.tau, self.iterations)
        else:
            table = _with_client(table, _start(table, cohort.memory or {}))  # the last
            whole = _gram(cohort, table)
            gram = Gram(whole.matrix[:-1, :-1].contiguous(), whole.numel)
            start = np.append(np.zeros(K), 1.0)
            c = clip(whole.updates().cpu().numpy(), np.append(masses, 0), start, self.tau, self.iterations)
        table, w = table.with_center_as_client(), np.append(c, 1 - c.sum())
        [result] = cohort.access.mix(table, w[None, None], core.rows(table, False), out, cohort.table)
        if self.center == "previous":
            cohort.memory = _update(cohort.table, result)
        cohort.take_medians(result)
        return describe(result, cohort, c[:K].copy(), gram, previous_weight=float(c[K:].sum()))

    def state_dict(self) -> dict[str, Any]:
        """The update of the last round by key: {"method": .., "previous": {key: tensor}}; none without a round, or with
        center="global\""""
        return {"method": self.name, "previous": {key: value.clone() for key, value in (self._memory or {}).items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state, ("previous",))
        previous = state["previous"]
        if not isinstance(previous, Mapping):
            raise InputError(f"{self.name} state: previous is a {type(previous).__name__}, expected a dict")
        if previous and self.center == "global":
            raise InputError(f"{self.name} state: it has a previous update, which center='global' does not use")
        for key, value in previous.items():
            check_tensor(f"{self.name} state: previous update of {key!r}", key, value)
        copies = {key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in previous.items()}
        self._memory = copies or None


def clip(G: np.ndarray, masses: np.ndarray, c: np.ndarray, tau: float, iterations: int) -> np.ndarray:
    """The coefficients after so many iterations from c, all [K], from <d_i, d_j> and masses that sum to 1"""
    squares = np.diag(G)
    for _ in range(iterations):
        Gc = G @ c
        distance = np.sqrt(np.maximum(squares - 2 * Gc + c @ Gc, 0))
        s = masses * (tau / np.maximum(distance, tau))
        c = (1 - s.sum()) * c + s
    return c


def _gram(cohort: Cohort, table: Table) -> Gram:
    """Of the clients and the start, which nobody sent: it is no client that could be dropped"""
    try:
        return cohort.access.gram(table, False)
    except NonFiniteError as error:
        if START not in error.clients:
            raise
        raise InputError(
            "centred_clipping: the global model and the update of the round before add up to a model that is not "
            "finite, or too far away; make a new aggregator to start without it"
        ) from error


START = -1  # its position among the clients


def _with_client(table: Table, tensors: Sequence[torch.Tensor]) -> Table:
    """The table with the start as one more client, the last"""
    positions = range(table.K) if table.positions is None else table.positions
    address = np.concatenate([table.client_address, _addresses(tensors)[:, None]], axis=1)
    clients = [*table.clients, tensors]
    return replace(table, clients=clients, client_address=address, positions=[*positions, START])


def _start(table: Table, update: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The global model plus an update"""
    layout = table.layout
    check_form("centred_clipping", layout, update)
    tensors = list(table.center)
    for t in np.flatnonzero(layout.is_param):
        tensors[t] = update[layout.keys[t]].to(table.device, layout.dtypes[t])
    return _sum(table, table.center, tensors, 1.0, check=False)


def _update(table: Table, result: Result) -> dict[str, torch.Tensor]:
    """What has been added to the parameters of the global model"""
    new = [as_tensor(result[key], "the result", key) for key in table.layout.keys]
    update = _sum(table, new, table.center, -1.0, check=True)
    return {table.layout.keys[t]: update[t] for t in np.flatnonzero(table.layout.is_param)}


def _sum(
    table: Table, a: list[torch.Tensor], b: list[torch.Tensor], factor: float, *, check: bool
) -> list[torch.Tensor]:
    """a + factor b, by the kernels, which torch's threads after a fork are not"""
    pair = replace(
        table, clients=[a, b], client_address=np.stack([_addresses(a), _addresses(b)], axis=1), center=None,
        as_numpy=(False,) * table.T, positions=None, client_ids=None,
    )  # fmt: skip
    weights = np.array([[[1.0, factor]]])
    [result] = core.mix_of(pair, weights, core.rows(pair, False), check=check)
    return [result[key] for key in table.layout.keys]


def _addresses(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


centred_clipping = function_of(CentredClipping)
