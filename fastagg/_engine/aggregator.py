"""What all methods share: the base of every aggregator, its checks, and the list of them.

A method is a dataclass: its fields are its options, `weigh` turns a round's Gram into weights, and the base class does
the rest (reading, checking, mixing, naming what is wrong). `function_of` makes the public function of it.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from fastagg._engine import core, saved
from fastagg._engine.access import Memory
from fastagg._engine.checks import check_choice, check_flag, check_integer, check_number, suggest  # noqa: F401  methods use them
from fastagg._engine.cohort import Cohort, by_id, pick, restore
from fastagg._engine.core import Layers, Params
from fastagg._engine.finite import NonFiniteError
from fastagg._engine.gram import Gram
from fastagg._engine.result import Result, Results, list_of
from fastagg._engine.table import InputError, StateDict, Table

LOG = logging.getLogger("fastagg")


@dataclass(kw_only=True, eq=False)
class Aggregator:
    """A method with its options, and what it remembers from round to round.

    params         names of the parameters, or the nn.Module; default: all but BatchNorm's running statistics. Models
                   are compared by their parameters; the rest follows (averaged; in robust methods, medians).
    layers         function from a tensor's name to its layer's; default: the module it sits in
    on_nonfinite   clients with a NaN or an infinity, or with values so large that the round cannot be computed with
                   them: "raise" names them in a NonFiniteError; "drop" leaves them out, as if they had not been given,
                   and lists their ids in the result's .dropped
    group          the models are spread over the ranks of this torch.distributed process group (True: the default one):
                   each gives its part of every model, DTensors or tensors of its own, and gets its part of the result
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    gives: ClassVar[str] = "global"  # or "personalised": a model per client, or "clusters"
    round_info: ClassVar[tuple[str, ...]] = ()  # what aggregate() takes besides models and sizes
    per_client: ClassVar[tuple[str, ...]] = ()  # of round_info, what has an entry for every client
    client_axis: ClassVar[int] = 0  # and along which axis
    needs_global: ClassVar[bool] = True

    params: Params = None
    layers: Layers = None
    on_nonfinite: str = "raise"
    group: Any = None
    # What is carried from round to round. Replaced as a whole when a round is complete, never modified in place.
    _memory: Any = field(init=False, default=None, repr=False)
    _unnamed: int | None = field(init=False, default=None, repr=False)  # clients of the last round, if it had no ids

    def __post_init__(self) -> None:
        check_choice(self.name, "on_nonfinite", self.on_nonfinite, ("raise", "drop"))

    def aggregate(
        self, global_sd: StateDict, client_sds: Sequence[StateDict], sizes=None, client_ids=None, *, out=None,
        **round_info: Any,
    ) -> Result:  # fmt: skip
        """One round: the new global model.

        global_sd      the model the clients started from, a state dict of tensors or NumPy arrays. Methods that do not
                       need it accept None.
        client_sds     the K clients' models, state dicts of the same keys, shapes and dtypes, on the same device. They
                       are read where they are, and never modified.
        sizes          how much data each client has, K numbers >= 0; default: equally much
        client_ids     K strings or integers that name the clients over rounds and in messages; default: 0, 1, ... With
                       the same ids, the same clients in another order give the same bits.
        out            a former result, or any state dict of this form, that is written in place instead of new tensors;
                       a list of them where the method gives several models. It must not share memory with an input.

        Further keyword arguments are what a method wants to know of the round besides, listed in .round_info. The
        result is a fastagg.Result: the new state dict, with .weights, .gram and .dropped. Methods that give several
        models return fastagg.Results, a list of them with .mixing.
        """
        if self.group is not None:
            from fastagg._engine.distributed import sharded

            return sharded.aggregate(self, global_sd, client_sds, sizes, client_ids, out, round_info)
        result, kept = self.aggregate_from(Memory(), global_sd, client_sds, sizes, client_ids, out, round_info)
        self.commit(kept)
        return result

    def aggregate_from(
        self, access: Memory, global_sd: StateDict, client_sds: Sequence[StateDict], sizes, client_ids, out, round_info
    ) -> tuple[Result, Any]:
        """aggregate() on models that may be elsewhere: the result, and what to commit() once it has been delivered.

        Does not change what this object remembers, so a round that fails or is interrupted leaves no trace.
        """
        for unknown in round_info.keys() - set(self.round_info):
            raise TypeError(f"{self.name}: aggregate() takes no {unknown!r}{suggest(unknown, self.round_info)}")
        if self.params is not None and not isinstance(self.params, torch.nn.Module):
            self.params = frozenset(self.params)  # an iterator would be empty in the next round
        if isinstance(client_sds, Iterable) and not isinstance(client_sds, Mapping):
            client_sds = list(client_sds)
        ids = check_client_ids(client_ids, len(client_sds)) if isinstance(client_sds, list) else None
        if self.needs_global:
            core.need_global(global_sd)
        table = access.build(global_sd, client_sds, params=self.params, layers=self.layers, client_ids=ids)
        if client_ids is None:
            self._check_unnamed(table.K)
        amounts = check_sizes(sizes, table.K)
        order, dropped = list(range(table.K)) if client_ids is None else by_id(ids), []
        while True:
            try:
                result, memory = self._round_of(order, access, table, amounts, ids, out, round_info)
                break
            except NonFiniteError as error:
                if self.on_nonfinite == "raise":
                    raise
                LOG.warning("%s: %s; left out of this round", self.name, error)
                dropped += error.clients
                order = [k for k in order if k not in dropped]
                if not order:
                    raise InputError(f"no client is left, none of {table.K} is finite. {error}") from error
        result = restore(result, order, table.K, self.gives == "personalised")
        result.dropped = [ids[k] for k in sorted(dropped)]
        if dropped:
            self.complete(result, ids, round_info)
        return result, (memory, table.K if client_ids is None else None)

    def commit(self, kept: tuple[Any, int | None]) -> None:
        """Remembers a round: the last thing that is done in it"""
        self._memory, self._unnamed = kept

    def _check_unnamed(self, K: int) -> None:
        """Clients without ids are known by their positions, which says nothing once the cohort has changed."""
        known = set(self.known_clients())
        before = self._unnamed if self._unnamed is not None else len(known)  # which a loaded state does not say
        if known and (before != K or not known <= set(range(K))):
            raise InputError(
                f"{self.name} remembers clients by their ids, but none were given, and this round has {K} clients "
                f"where there were {before} before: pass client_ids, one string or integer per client"
            )

    def known_clients(self) -> Iterable[Any]:
        """The client ids that this aggregator remembers something of"""
        return ()

    def warn_memory_lost(self, round_info: Mapping[str, Any], remedy: str) -> None:
        """Called for a single round whose memory is not kept; a method that needs its memory warns"""

    def _round_of(
        self, order: list[int], access: Memory, table: Table, amounts, ids: list[Any], out, round_info: dict
    ) -> tuple[Result, Any]:
        """The round of some of the clients, in this order, and what is to be remembered of it"""
        K = table.K
        info = {
            name: pick(name, value, order, K, self.client_axis) if name in self.per_client else value
            for name, value in round_info.items()
        }
        if order != list(range(K)):
            table = table.part(order)
            if out is not None and self.gives == "personalised":
                outs = list_of(out)
                if len(outs) != K:
                    raise InputError(f"out: {len(outs)} state dicts given, {K} needed")
                out = [outs[k] for k in order]
        cohort = Cohort(table, data_shares(amounts[order]), [ids[k] for k in order], access, self._memory)
        result = self.round(cohort, out, **info)
        return result, cohort.memory

    def complete(self, result: Result, ids: list[Any], round_info: dict[str, Any]) -> None:
        """Called when clients were dropped, for what a result is to say of them"""

    def round(self, cohort: Cohort, out, **round_info: Any) -> Result:
        """The round of a method that has one set of weights; others override this.

        A method with memory reads cohort.memory and assigns a new value to it; the base class keeps that value once the
        round is complete. It must not modify the old one, nor this object.
        """
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

    def save(self, path: str | os.PathLike) -> None:
        """Writes state_dict() as a safetensors file: whole, or not at all"""
        saved.save(path, self.state_dict())

    def load(self, path: str | os.PathLike) -> None:
        """Takes over what save() wrote; a file that is damaged or does not fit raises InputError and alters nothing."""
        self.load_state_dict(saved.load(path))

    def check_state(self, state: Any, keys: Iterable[str]) -> None:
        if not isinstance(state, Mapping) or {"method", *keys} - set(state):
            raise InputError(f"{self.name} state: expected what state_dict() returned")
        if not isinstance(state["method"], str) or state["method"] != self.name:
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

    def function(global_sd, client_sds, sizes=None, *, client_ids=None, out=None, **options):
        info = {key: options.pop(key) for key in cls.round_info if key in options}
        server = make(cls, options, cls.round_info)
        server.warn_memory_lost(info, f'Keep an aggregator, fastagg.aggregator("{cls.name}", ..), or pass logits=')
        return server.aggregate(global_sd, client_sds, sizes, client_ids, out=out, **info)

    P = inspect.Parameter
    head = [P(name, P.POSITIONAL_OR_KEYWORD) for name in ("global_sd", "client_sds")]
    head.append(P("sizes", P.POSITIONAL_OR_KEYWORD, default=None))
    own = [P(f.name, P.KEYWORD_ONLY, default=f.default) for f in option_fields(cls)]
    extra = [P(name, P.KEYWORD_ONLY, default=None) for name in (*cls.round_info, "client_ids", "out")]
    function.__signature__ = inspect.Signature(head + own + extra)
    function.__name__ = function.__qualname__ = cls.name.replace("-", "_")
    function.__module__ = cls.__module__
    function.__doc__ = documentation(cls)
    return function


def documentation(cls: type[Aggregator]) -> str:
    """What help() shows of a method's function: its class's text, and the arguments that all methods have"""
    every_round, every_method = (
        inspect.cleandoc(doc or "").split("\n\n")[1:] for doc in (Aggregator.aggregate.__doc__, Aggregator.__doc__)
    )
    shared = "Arguments of every method:\n\n" + "\n".join([every_round[0], every_method[0]])
    gives = {
        "global": "Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.",
        "personalised": "Returns fastagg.Results: a Result for each client, with .mixing, .gram and .dropped.",
        "clusters": "Returns fastagg.Results: a Result for each cluster, with .clusters, .mixing, .gram and .dropped.",
    }
    return "\n\n".join([inspect.cleandoc(cls.__doc__ or ""), shared, gives[cls.gives]])


def option_fields(cls: type[Aggregator]) -> list[dataclasses.Field]:
    """The options of a method, its own before those all methods have"""
    shared = {f.name for f in dataclasses.fields(Aggregator)}
    return sorted((f for f in dataclasses.fields(cls) if f.init), key=lambda f: f.name in shared)


def make(cls: type[Aggregator], options: dict[str, Any], round_info: Iterable[str] = ()) -> Aggregator:
    known = [f.name for f in option_fields(cls)] + list(round_info)
    for unknown in options.keys() - set(known):
        raise TypeError(f"{cls.name}: no option {unknown!r}{suggest(unknown, known)}; it has {', '.join(known)}")
    return cls(**options)


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


def check_sizes(sizes: Sequence[float] | torch.Tensor | None, K: int) -> np.ndarray:
    """How much data each client has: [K]. None: equally much."""
    if sizes is None:
        return np.ones(K)
    n = one_per_client("sizes", sizes, K)
    for k in np.flatnonzero(~np.isfinite(n) | (n < 0)):
        raise InputError(f"sizes: client {k} has size {n[k]}, expected a number >= 0")
    return n


def data_shares(amounts: np.ndarray) -> np.ndarray:
    """n_k, the clients' shares of the data, summing to 1: [K]"""
    if not amounts.any():
        raise InputError("sizes sum to zero: no client has data")
    return shares(amounts)


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
