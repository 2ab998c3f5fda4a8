"""What all methods share: a round's cohort, the base of every aggregator, and the list of them.

A method is a dataclass: its fields are its options, `weigh` turns a round's Gram into weights, and the base class does
the rest (reading, checking, mixing, naming what is wrong). `function_of` makes the public function of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
import torch

from fastagg import core
from fastagg import table as tables
from fastagg.core import Layers, Params
from fastagg.gram import Gram
from fastagg.result import Result, Results
from fastagg.table import InputError, StateDict, Table


class Cohort:
    """The clients of one round: their table, data shares and ids. The Gram is computed when first asked for."""

    def __init__(self, table: Table, n: np.ndarray, ids: list[Any]) -> None:
        self.table, self.n, self.ids = table, n, ids
        self._grams: dict[bool, Gram] = {}

    @property
    def K(self) -> int:
        return self.table.K

    def gram(self, layerwise: bool = False) -> Gram:
        """One read of the clients, the first time"""
        if layerwise not in self._grams:
            self._keep(core.gram_of(self.table, layerwise), layerwise)
        return self._grams[layerwise]

    def mix(
        self, weights: np.ndarray, *, layerwise: bool = False, buffers: np.ndarray | None = None,
        center: np.ndarray | float | None = None, out=None, with_gram: bool = False,
    ) -> list[Result]:  # fmt: skip
        """sum_k weights_k w_k + center g, in one read: M models for weights [M, K], or [L, M, K] with layerwise.

        buffers    other weights for what is not a parameter (BatchNorm's statistics), in the same form
        center     how much of the global model is added to each, [M] or [L, M]: zero for a mean of the clients
        with_gram  the Gram in the same read, for weights that did not need it
        """
        table = self.table
        w = np.atleast_2d(np.asarray(weights, dtype=np.float64))  # [.., M, K]
        b = w if buffers is None else np.broadcast_to(np.asarray(buffers, dtype=np.float64), w.shape)
        if center is not None:
            table = table.with_center_as_client()
            w = np.concatenate([w, np.broadcast_to(center, w.shape[:-1])[..., None]], axis=-1)
            b = np.concatenate([b, np.zeros(b.shape[:-1])[..., None]], axis=-1)
            b = w if buffers is None else b
        w, b = (np.ascontiguousarray(x if layerwise else x[None]) for x in (w, b))  # [L or 1, M, K]
        row = core.rows(table, layerwise)
        if b is not w and not np.array_equal(b, w):
            is_buffer = (~table.layout.is_param).astype(np.int32)
            w, row = np.concatenate([w, b]), row + is_buffer * np.int32(len(w))
        if not with_gram:
            return core.mix_of(table, w, row, out)
        gram, results = core.gram_mix_of(table, layerwise, w, row, out)
        self._keep(gram, layerwise)
        return results

    def _keep(self, gram: Gram, layerwise: bool) -> None:
        core.check_finite(self.table, gram)
        self._grams[layerwise] = gram


@dataclass(kw_only=True, eq=False)
class Aggregator:
    """A method with its options, and what it remembers from round to round.

    params   names of the parameters, or the nn.Module; default: all but BatchNorm's running statistics
    layers   function from a tensor's name to its layer's; default: the module it sits in
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    gives: ClassVar[str] = "global"  # or "personalised": a model per client, or "clusters"
    round_info: ClassVar[tuple[str, ...]] = ()  # what aggregate() takes besides models and sizes
    needs_global: ClassVar[bool] = True

    params: Params = None
    layers: Layers = None

    def aggregate(
        self, global_sd: StateDict, client_sds: Sequence[StateDict], sizes=None, client_ids=None, *, out=None,
        **round_info: Any,
    ) -> Result:  # fmt: skip
        """One round: the new global model. client_ids names the clients over rounds (default: 0, 1, ...)."""
        for unknown in round_info.keys() - set(self.round_info):
            raise TypeError(f"{self.name}: aggregate() takes no {unknown!r}{suggest(unknown, self.round_info)}")
        if self.params is not None and not isinstance(self.params, torch.nn.Module):
            self.params = frozenset(self.params)  # an iterator would be empty in the next round
        if isinstance(client_sds, Iterable) and not isinstance(client_sds, Mapping):
            client_sds = list(client_sds)
        ids = check_client_ids(client_ids, len(client_sds)) if isinstance(client_sds, list) else None
        if self.needs_global:
            core.need_global(global_sd)
        table = tables.build(global_sd, client_sds, params=self.params, layers=self.layers, client_ids=ids)
        return self.round(Cohort(table, data_shares(sizes, table.K), ids), out, **round_info)

    def round(self, cohort: Cohort, out, **round_info: Any) -> Result:
        """The round of a method that has one set of weights; others override this."""
        layerwise = getattr(self, "layerwise", False)
        gram = cohort.gram(layerwise)
        weights = np.asarray(self.weigh(gram, cohort.n, **round_info), dtype=np.float64)  # [K] or [L, K]
        [result] = cohort.mix(weights[..., None, :], layerwise=layerwise, out=out)
        return describe(result, cohort, weights, gram)

    def weigh(self, gram: Gram, n: np.ndarray, **round_info: Any) -> np.ndarray:
        """The clients' weights, [K] or [L, K], from the Gram and the data shares"""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What a server saves to resume after a crash: plain data and tensors"""
        return {"method": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state_dict(); one that does not fit raises InputError and changes nothing."""
        self.check_state(state, ())

    def check_state(self, state: Any, keys: Iterable[str]) -> None:
        if not isinstance(state, Mapping) or {"method", *keys} - set(state):
            raise InputError(f"{self.name} state: expected what state_dict() returned")
        if state["method"] != self.name:
            raise InputError(f"{self.name} state: it is of method {state['method']!r}")

    def read_clients(self, state: Mapping[str, Any], *names: str) -> tuple[list[Any], list[np.ndarray]]:
        """The client ids of a state, and the arrays of these names, float64; InputError where they are none"""
        try:
            ids = check_client_ids(list(state["client_ids"]), len(state["client_ids"]))
            return ids, [float64(state[name]) for name in names]
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{self.name} state: {error}") from error


def describe(result: Result, cohort: Cohort, weights: np.ndarray, gram: Gram | None = None, **more: Any) -> Result:
    """A result that says how it came about"""
    result.weights = torch.from_numpy(weights)
    result.layers = cohort.table.layout.layers if weights.ndim == 2 else None
    result.gram = gram
    result.__dict__.update(more)
    return result


REGISTRY: dict[str, type[Aggregator]] = {}


def function_of(cls: type[Aggregator]) -> Callable[..., Result]:
    """Registers a method, and returns its function: name(global_sd, client_sds, sizes=None, *, out=None, options)."""
    REGISTRY[cls.name] = cls

    def function(global_sd, client_sds, sizes=None, *, out=None, **options):
        info = {key: options.pop(key) for key in cls.round_info if key in options}
        return make(cls, options, cls.round_info).aggregate(global_sd, client_sds, sizes, out=out, **info)

    P = inspect.Parameter
    head = [P(name, P.POSITIONAL_OR_KEYWORD) for name in ("global_sd", "client_sds")]
    head.append(P("sizes", P.POSITIONAL_OR_KEYWORD, default=None))
    own = [P(f.name, P.KEYWORD_ONLY, default=f.default) for f in option_fields(cls)]
    extra = [P(name, P.KEYWORD_ONLY, default=None) for name in (*cls.round_info, "out")]
    function.__signature__ = inspect.Signature(head + own + extra)
    function.__name__ = function.__qualname__ = cls.name.replace("-", "_")
    function.__module__ = cls.__module__
    function.__doc__ = cls.__doc__
    return function


def option_fields(cls: type[Aggregator]) -> list[dataclasses.Field]:
    """The options of a method, its own before those all methods have"""
    shared = {f.name for f in dataclasses.fields(Aggregator)}
    return sorted((f for f in dataclasses.fields(cls) if f.init), key=lambda f: f.name in shared)


def make(cls: type[Aggregator], options: dict[str, Any], round_info: Iterable[str] = ()) -> Aggregator:
    known = [f.name for f in option_fields(cls)] + list(round_info)
    for unknown in options.keys() - set(known):
        raise TypeError(f"{cls.name}: no option {unknown!r}{suggest(unknown, known)}; it has {', '.join(known)}")
    return cls(**options)


def suggest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def float64(values: Any) -> np.ndarray:
    """A tensor, array or list as a float64 array of its own (torch would read a list as float32)"""
    if isinstance(values, torch.Tensor):
        if values.is_complex():
            raise InputError(f"expected real numbers, got {values.dtype}")
        return values.detach().to("cpu", torch.float64, copy=True).numpy()
    return np.array(values, dtype=np.float64)


def one_per_client(name: str, values: Any, K: int) -> np.ndarray:
    """A list or tensor of K numbers that a caller gave, as float64"""
    try:
        numbers = float64(values)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: expected {K} numbers, one per client ({error})") from error
    if numbers.shape != (K,):
        raise InputError(f"{name} have shape {numbers.shape}, expected ({K},): one number per client")
    return numbers


def data_shares(sizes: Sequence[float] | torch.Tensor | None, K: int) -> np.ndarray:
    """n_k, the clients' shares of the data, summing to 1: [K]. None: equal shares."""
    if sizes is None:
        return np.full(K, 1 / K)
    n = one_per_client("sizes", sizes, K)
    for k in np.flatnonzero(~np.isfinite(n) | (n < 0)):
        raise InputError(f"sizes: client {k} has size {n[k]}, expected a number >= 0")
    if not n.any():
        raise InputError("sizes sum to zero: no client has data")
    return shares(n)


def shares(x: np.ndarray) -> np.ndarray:
    """Numbers >= 0 over their sum, along the last dimension; over the largest first, or huge ones would overflow"""
    x = ratio(x, x.max(-1, keepdims=True))
    return ratio(x, x.sum(-1, keepdims=True))


def check_client_ids(client_ids: Sequence[Any] | None, K: int) -> list[Any]:
    """The clients' identities over rounds; their positions when none are given."""
    if client_ids is None:
        return list(range(K))
    ids = [x.item() if isinstance(x, np.generic | torch.Tensor) else x for x in client_ids]
    if len(ids) != K:
        raise InputError(f"client_ids has {len(ids)} entries for {K} clients")
    seen: dict[Any, int] = {}
    for k, name in enumerate(ids):
        if not isinstance(name, str | int):
            raise InputError(
                f"client_ids: the id of client {k} is a {type(name).__name__}, expected a string or integer"
            )
        if seen.setdefault(name, k) != k:
            raise InputError(f"client_ids: clients {seen[name]} and {k} have the same id {name!r}")
    return ids


def check_number(method: str, option: str, value: Any, low: float, high: float, *, strict: bool = False) -> None:
    """A finite number in [low, high]; strict: above low"""
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool) and np.isfinite(value)
    if not good or not low <= value <= high or (strict and value == low):
        bounds = f"{'>' if strict else '>='} {low}" + ("" if high == float("inf") else f" and <= {high}")
        raise ValueError(f"{method}: {option}={value!r}; expected a number {bounds}")


def check_integer(method: str, option: str, value: Any, low: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low:
        raise ValueError(f"{method}: {option}={value!r}; expected an integer >= {low}")


def check_flag(method: str, option: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{method}: {option}={value!r}; expected True or False")


def check_choice(method: str, option: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{method}: {option}={value!r}; expected one of {', '.join(map(repr, allowed))}")


def ratio(a, b):
    """a / b, and 0 where b is 0"""
    zero = b == 0
    return np.where(zero, 0.0, a / (b + zero))


def describe_several(
    results: list[Result], cohort: Cohort, mixing: np.ndarray, gram: Gram | None = None, **more: Any
) -> Results:
    """Several results, mixing [M, K] or [L, M, K], that say how they came about"""
    several = Results(describe(r, cohort, mixing[..., m, :].copy(), gram) for m, r in enumerate(results))
    several.mixing = torch.from_numpy(mixing)
    several.layers = cohort.table.layout.layers if mixing.ndim == 3 else None
    several.gram = gram
    several.__dict__.update(more)
    return several
