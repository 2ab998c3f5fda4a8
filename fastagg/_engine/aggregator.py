"""The base of every method: its options, the facts that its class declares, its round, and what it remembers."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from typing_extensions import dataclass_transform

from fastagg._engine import options, rounds, saved
from fastagg._engine.access import Access
from fastagg._engine.arrivals.round import Check, Round
from fastagg._engine.arrivals.spill import Spill
from fastagg._engine.checks import InputError
from fastagg._engine.cohort import Cohort
from fastagg._engine.describe import ClientValue, describe, describe_several
from fastagg._engine.distributed.sharded import OverGroup
from fastagg._engine.examples import ExampleRound, example_inputs
from fastagg._engine.in_memory import InMemory
from fastagg._engine.inputs import ClientId, RoundInput, missing_global, read_client_ids
from fastagg._engine.numerics import float64
from fastagg._engine.options import SetBy
from fastagg._engine.result import Result, Results
from fastagg._engine.stages import Pre, Stage, make_buckets
from fastagg._engine.stages import read as read_stages
from fastagg._engine.table import Layers, Layout, Out, Params, StateDict
from fastagg._engine.weights import Weights

R = TypeVar("R", Result, Results)
Produces = Literal["global", "personalised", "clusters"]
Reads = Literal["weights", "products", "pairs", "ranks", "models"]
Buffers = Literal["mean", "median"]
Pass = Literal["gram", "mix", "gram_mix", "times", "times_mix", "update", "ranks"]


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
@dataclass(kw_only=True, eq=False)
class Aggregator(Generic[R]):
    """A method with its options, and what it remembers from round to round.

    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    A method derives from GlobalAggregator, PersonalisedAggregator or ClusterAggregator. Its annotated fields are its
    options (options.py explains how ranges are declared and checked). Its class declares these facts:

    name, paper     its name, and where it was published
    reads           what it needs to know about the clients. "weights": nothing, its weights do not depend on the
                    models;
                    "products": products of the Gram with vectors, its squares and its row of the global model;
                    "pairs": the whole Gram, because it compares clients with each other;
                    "ranks": the values of each element in the order of their size;
                    "models": the models themselves, because it tries them out
    round_inputs    what it takes in a round in addition to models, data sizes and ids
    client_values   what its result says about each client in addition to weights
    needs_global    whether a round requires a global model
    buffers         how tensors that are not parameters are combined: "mean", with the weights, or "median"
    stale_as        of asynchronous methods: as what clients that started from an older version of the global model are
                    taken without that version, "models" or "updates"
    mean_as         what it is given of clients that were added up as they came: their mean, or its update, which has
                    digits that the mean has not

    It implements weigh().
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    produces: ClassVar[Produces] = "global"
    reads: ClassVar[Reads] = "pairs"
    round_inputs: ClassVar[tuple[RoundInput, ...]] = ()
    client_values: ClassVar[tuple[ClientValue, ...]] = ()
    needs_global: ClassVar[bool] = True
    buffers: ClassVar[Buffers] = "mean"
    stale_as: ClassVar[Literal["models", "updates"] | None] = None
    mean_as: ClassVar[Literal["model", "update"]] = "model"

    params: Annotated[Params, SetBy("module")] = None
    layers: Layers = None
    on_bad_client: Literal["raise", "drop"] = "raise"
    gram: Literal["auto", "full"] = "auto"
    pre: Pre = None
    partial: bool = False
    group: Any = None
    stages: tuple[Stage, ...] = field(init=False, default=(), repr=False)  # what pre says
    turn: int = field(init=False, default=0, repr=False)  # how many rounds there have been
    # What is carried from round to round. Replaced as a whole when a round is complete, never modified in place.
    state: Any = field(init=False, default=None, repr=False)
    finished_round: str | None = field(init=False, default=None, repr=False)  # the last one that can be resumed
    _unnamed: int | None = field(init=False, default=None, repr=False)  # clients of the last round, if it had no ids

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "__post_init__" in cls.__dict__:
            raise TypeError(f"{cls.__name__}: check options in check_options(); __post_init__() checks those declared")
        dataclass(kw_only=True, eq=False)(cls)

    def __post_init__(self) -> None:
        cls = type(self)
        options.check_options(cls, self.name, {name: getattr(self, name) for name in options.options_of(cls)})
        if self.params is not None and not isinstance(self.params, torch.nn.Module):
            self.params = frozenset(self.params)  # an iterator would be empty in the next round
        self.check_options()
        self.stages = read_stages(self.name, self.pre, self.tolerates())
        if self.stages:
            vars(self).update(needs_global=True)  # of this object: updates are mixed
            if why := self.why_not_pre(make_buckets(self.stages)):
                raise ValueError(f"{self.name}: pre={self.pre!r} cannot be before it: {why}")
        if self.partial:
            vars(self).update(needs_global=True)  # of this object: it has what a client does not
            if why := "group= is for whole models" if self.group is not None else self.why_not_partial():
                raise ValueError(f"{self.name}: partial=True is not possible: {why}")
        if self.group is not None and (why := self.why_not_over_group(None)):
            raise ValueError(f"{self.name}: {why}")

    # What a method implements

    def check_options(self) -> None:
        """Checks what the annotations of the options cannot express; sets defaults that depend on other options"""

    def require(self, *names: str) -> None:
        """Makes round inputs of these names required, for check_options(): with these options no round is without"""
        specs = [replace(spec, required=spec.required or spec.name in names) for spec in self.round_inputs]
        vars(self).update(round_inputs=tuple(specs))  # of this object

    def weigh(self, cohort: Cohort, *args: Any, **inputs: Any) -> Weights | np.ndarray:
        """Returns the clients' weights, computed from the cohort's Gram, data shares and state, and the round inputs"""
        raise NotImplementedError

    def learn(self, cohort: Cohort, weights: Weights, result: R | None) -> None:
        """Called after the models are mixed, for methods whose state depends on the result, or on a Gram computed in
        the same read. result is None if the weights serve a server optimiser.
        """

    def combine(self, cohort: Cohort, **inputs: Any) -> R:
        """Computes the round: weighs the clients, mixes their models, and describes the result"""
        weights = self.weights_of(cohort, **inputs)
        several = self.produces != "global"
        weights.check_form(self.name, self.produces, cohort.K)
        try:
            models = cohort.mix(weights, several=several)
        except InputError as error:
            raise self.explain(cohort, error, **inputs)  # noqa: B904  it may be the same
        result: Any = models if several else models[0]
        self.learn(cohort, weights, result)
        return describe_several(models, cohort, weights) if several else describe(result, cohort, weights)  # type: ignore

    def weights_of(self, cohort: Cohort, **inputs: Any) -> Weights:
        weights = Weights.of(self.name, self.weigh(cohort, **inputs))
        if self.buffers == "median" and weights.others is None:
            weights.others = "median"
        return weights

    def explain(self, cohort: Cohort, error: InputError, *args: Any, **inputs: Any) -> InputError:
        """Returns the error that the mix raised, or one that says more: which input may have caused it"""
        return error

    def missing_global(self) -> InputError:
        """What is raised where a round needs a global model and has none"""
        if self.partial:
            return InputError("the global model is None; partial=True takes from it what a client does not have")
        return missing_global()

    def passes(self, layout: Layout, inputs: Mapping[str, Any]) -> tuple[Pass, ...]:
        """The reads of the clients that a round makes, at least. "gram_mix" is both in one read; "update" is the
        weighted update in more digits than 16-bit models have, "ranks" means by rank. Where a Gram is not formed, the
        engine makes "times", its products with vectors, of "gram".
        """
        if self.reads == "ranks":
            return ("ranks",)
        return ("mix",) if self.reads == "weights" else ("gram", "mix")

    def products(self) -> int:
        """How many products of the Gram with a vector a round needs, about; if it reads "products". Decides whether the
        Gram is formed.
        """
        return 1

    def why_not_on_files(self) -> str:
        """Why the method cannot aggregate models in files; empty if it can"""
        return ""

    def why_not_over_group(self, inputs: Mapping[str, Any] | None) -> str:
        """Why it cannot aggregate models spread over processes; empty if it can. inputs=None: in any round"""
        return ""

    def why_not_on_adapters(self) -> str:
        """Why it cannot aggregate low-rank adapters; empty if it can"""
        if self.reads == "ranks":
            return "it orders the values of each element, and the elements of an adapter's update B A are never formed"
        if self.reads == "models" or type(self).combine is not Aggregator.combine:
            return "it uses the models themselves, and of an adapter's update there are only the factors"
        return ""

    def why_not_partial(self) -> str:
        """Why it cannot aggregate clients that hold only some of the tensors; empty if it can"""
        if self.reads == "ranks":
            return "it orders the values of each element, of clients that must all have it"
        if self.reads == "models":
            return "it tries out whole models"
        if self.stale_as is not None:
            return "clients that started from older versions are compared with these as a whole"
        return ""

    def bytes_needed(self, parameters: Iterable[tuple[int, torch.dtype]]) -> int:
        """The memory that the state needs in a round, for parameters with these numbers of elements and dtypes"""
        return 0

    def tolerates(self) -> int | None:
        """How many faulty clients it is made for, if it says so: the f of stages that are given none"""
        return getattr(self, "f", None)

    def why_not_pre(self, buckets: bool) -> str:
        """Why it cannot work on what stages make of the clients (or on buckets of them); empty if it can"""
        if self.produces != "global":
            return "it gives models to clients, not one model"
        if self.reads == "models" or type(self).combine is not Aggregator.combine:
            return "it uses the models themselves, and mixed ones do not exist"
        if buckets and type(self).known_clients is not Aggregator.known_clients:
            return "it remembers clients, and buckets of them are others in every round"
        for spec in self.round_inputs:
            if buckets and spec.required and spec.per_client:
                return f"it needs {spec.name} of each client, and sees buckets of them"
        return ""

    def why_not_running(self, global_sd: StateDict | None) -> str:
        """Why clients cannot be added up as they come; empty if they can"""
        if self.parts_of_mean(1.0, {}) is None or self.stages:
            return "running=True is for means whose weights do not depend on the models"
        return ""

    def parts_of_mean(self, size: float, inputs: Mapping[str, Any]) -> tuple[float, float] | None:
        """What a client with so much data counts for, among parameters and among buffers, if this method reads no more
        of the clients than means with such parts: they can then be added up as they come"""
        return None

    def step_of_mean(self, parts: np.ndarray) -> float:
        """How far the parameters then go from the global model towards their mean, with the parts of all [K, 2]"""
        return 1.0

    @property
    def min_clients(self) -> int:
        """The smallest number of clients that a round can have"""
        return 1

    @property
    def waits_for(self) -> int | None:
        """With how many clients a round is complete; None: whoever calls finish() knows"""
        return None

    @property
    def version(self) -> int | None:
        """The number of the current version of the global model, of asynchronous methods: what clients are told"""
        return None

    def why_not_client(self, inputs: Mapping[str, Any], is_update: bool) -> str:
        """Why a client that sends its model, or an update, with these inputs cannot be in the round; empty if it can"""
        return ""

    def started_from(self, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor] | None:
        """The parameters of the model that a client with these inputs started from, if that is not the global model"""
        return None

    @classmethod
    def example_round(cls, K: int) -> ExampleRound:
        """Options and inputs of a round with K clients, for tests and benchmarks of every method. If they depend on the
        model, it is examples.ExampleNet.
        """
        return ExampleRound({}, example_inputs(cls.round_inputs, K))

    def describe_dropped(self, result: R, ids: list[Any], inputs: Mapping[str, Any]) -> None:
        """Called when clients were left out, for what the result is to say of them besides client_values' missing"""

    def known_clients(self) -> Iterable[Any]:
        """The client ids that this aggregator remembers something about"""
        return ()

    def warn_state_lost(self, inputs: Mapping[str, Any], remedy: str) -> None:
        """Called for a single round whose state is not kept; a method that depends on its state warns"""

    def state_dict(self) -> dict[str, Any]:
        """What a server saves to resume after a crash: plain data and tensors. Methods add theirs to it."""
        about: dict[str, Any] = {"method": self.name}
        if make_buckets(self.stages):
            about["turn"] = self.turn
        if self.finished_round is not None:
            about["finished_round"] = self.finished_round
        return about

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state_dict(). One that does not fit raises InputError and changes nothing. Methods load theirs, and
        call this before they change anything."""
        self.check_state(state, ())
        turn = state.get("turn", 0)
        if not isinstance(turn, int) or isinstance(turn, bool) or turn < 0:
            raise InputError(f"{self.name} state: turn is {turn!r}, expected how many rounds there have been")
        token = state.get("finished_round")
        if token is not None and not isinstance(token, str):
            raise InputError(f"{self.name} state: finished_round is a {type(token).__name__}, expected text")
        self.turn, self.finished_round = turn, token

    # What a server calls

    def aggregate(
        self, global_sd: StateDict | None, client_sds: Iterable[StateDict | InputError],
        sizes: Sequence[float] | Mapping[ClientId, float] | torch.Tensor | np.ndarray | None = None,
        client_ids: Sequence[ClientId] | None = None, *, out: Out = None, **inputs: Any,
    ) -> R:  # fmt: skip
        """Aggregates one round and returns the new global model.

        global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                       not need it accept None.
        client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                       are read in place and never modified.
        sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
        client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                       With the same ids, the same clients in another order give the same bits.
        out            a former result, or any state dict of the same form, to write in place instead of allocating
                       tensors; a list of them if the method returns several models. It must not share memory with an
                       input.

        Further keyword arguments are the method's .round_inputs. Returns a fastagg.Result: the new state dict, with
        .weights, .gram and .dropped. Methods that produce several models return fastagg.Results, a list of them with
        .mixing.
        """
        access: Access = InMemory()
        if self.group is not None:
            access = OverGroup(self.group, {"method": self.name, "sizes": sizes, "client_ids": client_ids,
                                            **self.comparable_options(), **inputs})  # fmt: skip
        with access.together():
            result, kept = rounds.run(self, access, global_sd, client_sds, sizes, client_ids, out, inputs)
            access.deliver(result)
        self.commit(kept)  # only now: another process may have failed
        return result

    def round(
        self, global_sd: StateDict | str | os.PathLike | None, *, memory: int | str | None = None,
        spill: str | os.PathLike | None = None, running: bool = False, check: Check = "add",
    ) -> Round:  # fmt: skip
        """Begins a round whose clients arrive one by one:

            with server.round(global_sd, memory="1GB", spill="waiting") as round:
                round.add("hospital-3", client_sd, size=600)
                round.add("hospital-7", "hospital-7.safetensors", size=150)
                global_sd = round.finish()

        With an asynchronous method (fedbuff, fedasync), clients say which version they started from:

                round.add("hospital-3", update=diff_sd, version=3)  # they were told server.version with the model
                if round.is_ready:
                    global_sd = round.finish()  # and another round begins

        global_sd  as for aggregate(); or the path of a safetensors file
        memory     how much of the clients to keep in memory, in bytes or as "500MB"; the rest is written to the disk
                   and read back piece by piece. Default: all of it
        spill      folder for that, from which resume_round() goes on after a stop of the process. Default: a temporary
                   folder, which is lost with the process
        running    clients are added up in float64 as they come, and let go: fedavg, uniform, fednova, and the server
                   optimisers on top of these. The result may differ from that of aggregate() in its last bit;
                   otherwise, it has the same bits
        check      when clients are searched for NaN and infinity: as they come, by one read of each, or ("finish") in
                   the reads that the method makes at the end
        """
        return Round(self, global_sd, memory=memory, spill=spill, running=running, check=check)

    def resume_round(self, spill: str | os.PathLike, *, memory: int | str | None = None) -> Round | None:
        """Goes on with the round in this folder and the clients that are on the disk there. None if there is none, or
        if it was finished before this server's state was saved, so that its clients count only once."""
        folder = Spill(spill)
        try:
            model = folder.read() if folder.is_begun else None
            if not folder.is_begun or folder.about["token"] == self.finished_round:
                folder.clear()  # what is left of one that was being removed
                folder.close()
                return None
            if folder.about.get("method") != self.name:
                raise InputError(f"{spill}: the round is of method {folder.about.get('method')!r}, not {self.name!r}")
            if folder.about.get("version") != self.version:
                raise InputError(
                    f"{spill}: the round was begun with version {folder.about.get('version')} of the global model, and "
                    f"this server has version {self.version}: load the state that was saved with it"
                )
            return Round(self, model, memory=memory, resumed=folder)
        except BaseException:
            folder.close()
            raise

    def commit(self, kept: rounds.Kept, finished: str | None = None) -> None:
        """Remembers a round, and which one that can be resumed it was: the last thing that is done in it"""
        finished = finished or self.finished_round
        self.state, self._unnamed, self.turn, self.finished_round = *kept, self.turn + 1, finished

    def comparable_options(self) -> dict[str, Any]:
        """Options that have to be the same in all processes of a group, and can be compared"""
        names = [name for name in options.options_of(type(self)) if name not in NOT_COMPARED]
        return {name: getattr(self, name) for name in names} | {"pre": repr(self.stages)}

    def check_unnamed(self, K: int) -> None:
        """Clients without ids are known by their positions, which says nothing once the cohort has changed."""
        known = set(self.known_clients())
        before = self._unnamed if self._unnamed is not None else len(known)  # which a loaded state does not say
        if known and (before != K or not known <= set(range(K))):
            raise InputError(
                f"{self.name} remembers clients by their ids, but none were given, and this round has {K} clients "
                f"where there were {before} before: pass client_ids, one string or integer per client"
            )

    def with_state(self, state: Any) -> Aggregator[R]:
        """The same method with another state; this object keeps its own"""
        other = copy.copy(self)
        other.state = state
        return other

    def save(self, path: str | os.PathLike) -> None:
        """Writes state_dict() to a safetensors file, atomically"""
        saved.save(path, self.state_dict())

    def load(self, path: str | os.PathLike) -> None:
        """Loads what save() wrote. A file that is damaged or does not fit raises InputError and changes nothing."""
        self.load_state_dict(saved.load(path))

    def check_state(self, state: Any, keys: Iterable[str]) -> None:
        if not isinstance(state, Mapping) or {"method", *keys} - set(state):
            raise InputError(f"{self.name} state: expected what state_dict() returned")
        if not isinstance(state["method"], str) or state["method"] != self.name:
            raise InputError(f"{self.name} state: it is of method {state['method']!r}")

    def read_clients(self, state: Mapping[str, Any], *names: str) -> tuple[list[Any], list[np.ndarray]]:
        """The client ids of a state, and the arrays of these names, float64; InputError where they are none"""
        try:
            ids = read_client_ids(list(state["client_ids"]), len(state["client_ids"]))
            return ids, [float64(state[name]) for name in names]
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{self.name} state: {error}") from error


NOT_COMPARED = ("group", "params", "layers")


class GlobalAggregator(Aggregator[Result]):
    """A method that produces one model for all clients; weigh() returns [K] or [L, K]"""

    produces = "global"


class PersonalisedAggregator(Aggregator[Results]):
    """A method that produces one model per client; weigh() returns [K, K] or [L, K, K]"""

    produces = "personalised"


class ClusterAggregator(Aggregator[Results]):
    """A method that produces one model per cluster; weigh() returns [M, K], with about={"clusters": ids}.

    clusters       the client ids of every cluster, including clients that are absent from this round, for programs that
                   send each client the model of its cluster
    first_models   how many models there are before the first round, of which clients choose if there are several
    """

    produces = "clusters"

    @property
    def clusters(self) -> list[list[Any]]:
        raise NotImplementedError

    @property
    def first_models(self) -> int:
        return 1
