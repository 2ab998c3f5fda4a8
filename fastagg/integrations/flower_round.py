"""One round of a Flower server, whichever of Flower's two APIs the replies came by."""

from __future__ import annotations

import inspect
import logging
import math
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastagg
from fastagg import Aggregator, InputError, Result, Results
from fastagg._engine import large_pages
from fastagg.extend import ClusterAggregator

LOG = logging.getLogger("fastagg")
Model = dict[str, Tensor]


@dataclass
class Reply:
    """What one client sent, as far as it can be read without the others.

    What is wrong with it stands in the place of its model: the aggregator's on_bad_client says what is done about it.
    """

    node: Any
    origin: Any  # the reply as Flower has it
    model: Any  # a state dict, or an InputError
    size: Any = None
    form: tuple | None = None  # of its metrics: those that differ from most cannot be averaged with them
    inputs: dict[str, Any] = field(default_factory=dict)  # what the client says for the method's round inputs


class RoundServer:
    """An aggregator, the global model its clients started from, and the models that belong to some of them only.

    blank   from a state dict to what Flower sends, in the same form, with memory for its numbers
    view    the state dict over that memory: what is written there is sent, without another copy
    """

    def __init__(
        self, method: str | Aggregator, options: dict[str, Any],
        round_inputs: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None, blank: Callable, view: Callable,
    ) -> None:  # fmt: skip
        if isinstance(method, Aggregator):
            if options:
                raise TypeError(f"{', '.join(options)}: these options are to be given where the aggregator is made")
            self.aggregator = method
        else:
            self.aggregator = fastagg.aggregator(method, **options)
        self.round_inputs, self.blank, self.view = round_inputs, blank, view
        self.center: Model | None = None
        self.models: dict[Any, Any] = {}  # client -> the model of its own, packed
        self.result: Result | Results | None = None
        self.client_inputs = tuple(
            spec.name for spec in self.aggregator.round_inputs if spec.per_client and spec.from_clients
        )

    @property
    def drops(self) -> bool:
        return self.aggregator.on_bad_client == "drop"

    @property
    def clusters(self) -> list[list[Any]]:
        """The client ids of every cluster, where the method has any"""
        return self.aggregator.clusters if isinstance(self.aggregator, ClusterAggregator) else []

    def start_of(self, node: Any) -> Any:
        """The packed model that a client starts from, None for the global one"""
        if node not in self.models:  # a method with clusters will put it into the first
            node = next((other for cluster in self.clusters[:1] for other in cluster), node)
        return self.models.get(node)

    def read(self, replies: Iterable[tuple[Any, Any]], read: Callable[[Any, Any], Reply]) -> list[Reply]:
        """All replies; those that cannot be used, or have metrics unlike those of most, have an error for a model"""
        found: dict[Any, Reply] = {}
        for node, origin in replies:
            if node in found:  # its first reply counts
                self.leave_out(InputError(f"node {node}: it sent a second reply in this round"))
                continue
            try:
                found[node] = read(node, origin)
            except InputError as error:
                found[node] = Reply(node, origin, InputError(str(error).removeprefix(f"node {node}: ")))
        usual = Counter(reply.form for reply in found.values() if reply.form is not None).most_common(1)
        for reply in found.values():
            if reply.form is not None and reply.form != usual[0][0]:
                odd = ", ".join(sorted(name for name, _ in set(reply.form) ^ set(usual[0][0])))
                reply.model = InputError(f"metrics {odd} are not as most clients send them")
        return list(found.values())

    def usable(self, replies: Iterable[Reply]) -> list[Reply]:
        """The replies without an error, where there is nothing to aggregate: of an evaluation"""
        good = []
        for reply in replies:
            if isinstance(reply.model, InputError):
                self.leave_out(InputError(f"node {reply.node}: {reply.model}"))
            else:
                good.append(reply)
        return good

    def leave_out(self, error: InputError) -> None:
        if not self.drops:
            raise error
        LOG.warning("%s; left out of this round", error)

    def aggregate(self, server_round: int, replies: list[Reply]) -> tuple[Any, list[Reply], dict[str, Any]]:
        """The new global model, packed (None: it stays as it was); the replies it is made of; and what to report."""
        if self.center is None and self.aggregator.needs_global:
            raise RuntimeError(
                "the global model is not known: where you override configure_train or configure_fit, call super()'s"
            )
        model, used, weights, coherence = None, [], [], None
        why: dict[Any, str] = {reply.node: str(reply.model) for reply in replies if isinstance(reply.model, InputError)}
        try:
            given = self.round_inputs
            inputs = given(server_round) if callable(given) else given
            result, model, mean, used = self._round(replies, inputs or {})
            self.result = result
            why = dict(result.dropped)
            weights = _weights(mean, replies, used)
            coherence = _coherence(result, weights)
        except InputError as error:
            if not self.drops:
                raise
            LOG.error("round %d: %s; the model stays as it was", server_round, error)
            why = {reply.node: why.get(reply.node, str(error)) for reply in replies}
        kept = {reply.node for reply in used}
        about: dict[str, Any] = {
            "clients": [reply.node for reply in used], "weights": weights,
            "dropped": {reply.node: why[reply.node] for reply in replies if reply.node not in kept},
        }  # fmt: skip
        return model, used, about if coherence is None else {**about, "coherence": coherence}

    def _round(self, replies: list[Reply], inputs: Mapping[str, Any]) -> tuple[Any, Any, Result, list[Reply]]:
        """The method's result; the global model, packed; a Result that says what each client counts in that one; and
        the replies that were used"""
        if self.aggregator.produces == "global":
            record = None if self.center is None else self.blank(self.center)
            out = None if record is None else self.view(record)
            large_pages.ask_for((out or {}).values())
            result = self._call(self.center, replies, inputs, out)
            record = self._packed(result) if record is None else record
            return result, record, result, _kept(replies, result)
        if self.aggregator.produces == "clusters":
            result = self._by_cluster(replies, inputs)
        else:
            own = None if self.center is None else [self.blank(self.center) for _ in replies]
            result = self._call(self.center, replies, inputs, own and [self.view(one) for one in own])
            for k, (reply, model) in enumerate(zip(replies, result, strict=True)):
                if model is not None:
                    self.models[reply.node] = self._packed(model) if own is None else own[k]
        used = _kept(replies, result)
        record = self.blank(used[0].model)
        mean = fastagg.fedavg(
            self.center, [reply.model for reply in used], [reply.size for reply in used],
            client_ids=[reply.node for reply in used], out=self.view(record),
        )  # fmt: skip
        return result, record, mean, used

    def _call(self, center: Model | None, replies: list[Reply], inputs: Mapping, out: Any = None) -> Any:
        names = [name for name in self.client_inputs if any(name in reply.inputs for reply in replies)]
        told = {name: [reply.inputs.get(name) for reply in replies] for name in names}
        sizes = [0 if isinstance(reply.model, InputError) else reply.size for reply in replies]
        return self.aggregator.aggregate(
            center, [reply.model for reply in replies], sizes, [reply.node for reply in replies], out=out,
            **{**inputs, **told},
        )  # fmt: skip

    def _by_cluster(self, replies: list[Reply], inputs: Mapping[str, Any]) -> Results:
        """A call for each model that clients started from, with those clients"""
        groups: dict[int, tuple[Any, list[Reply]]] = {}
        for reply in replies:
            start = self.start_of(reply.node)
            groups.setdefault(id(start), (start, []))[1].append(reply)
        several, clusters, dropped = Results(), [], {}
        for start, members in groups.values():
            try:
                result = self._call(self.center if start is None else self.view(start), members, inputs)
            except InputError as error:
                if not self.drops:
                    raise
                LOG.error("%s; this cluster's model stays as it was", error)
                dropped |= {reply.node: str(error) for reply in members}
                continue
            several += result
            clusters += result.clusters
            dropped |= result.dropped
        if not several:
            raise InputError("no cluster has a client that can be used")
        several.clusters, several.dropped = clusters, dropped
        owner = {node: m for m, cluster in enumerate(clusters) for node in cluster}
        packed = [self._packed(model) for model in several]
        former, self.models = self.models, {}
        for cluster in self.clusters:  # absent members get their cluster's new model too
            m = next((owner[node] for node in cluster if node in owner), None)
            own = packed[m] if m is not None else former.get(cluster[0])
            if own is not None:  # else the aggregator was loaded, and this cluster not heard of since
                self.models.update(dict.fromkeys(cluster, own))
        return several

    def _packed(self, model: Result) -> Any:
        """A copy that can be sent, which the result looks into from now on: it need not keep another"""
        record = self.blank(model)
        target = self.view(record)
        for key, tensor in model.items():
            target[key].copy_(tensor)
        model.update(target)
        return record


class HasAggregator:
    """What the strategies of both APIs show of their aggregator"""

    _server: RoundServer

    @property
    def aggregator(self) -> Aggregator:
        return self._server.aggregator

    @property
    def result(self) -> Result | Results | None:
        return self._server.result


def split_options(strategy: type, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flower's own arguments of a strategy, and the rest"""
    theirs = inspect.signature(strategy.__init__).parameters
    return {k: v for k, v in options.items() if k in theirs}, {k: v for k, v in options.items() if k not in theirs}


def check_size(name: str, value: Any) -> float:
    is_number = issubclass(type(value), Real) and not issubclass(type(value), bool)
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise InputError(f"{name} is {reprlib.repr(value)}, expected a number >= 0")
    return value


def not_finite(node: Any, metrics: Mapping[str, Any]) -> set[str]:
    """Names of a client's metrics that are NaN or infinite. They are no fault of its model, but would make the average
    over all clients NaN too, so they are left out of it."""
    odd = {name for name, value in metrics.items() if not _finite(value)}
    if odd:
        told = ", ".join(f"{name} = {reprlib.repr(metrics[name])}" for name in sorted(odd))
        LOG.warning("node %s: %s; left out of the averages of metrics", node, told)
    return odd


def _finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, Real) or isinstance(value, Integral) or math.isfinite(value)


def check_booleans(model: Model) -> Model:
    """Bytes that a client sent as booleans, and are none, are its fault"""
    for key, tensor in model.items():
        if tensor.dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
            raise InputError(f"key {key!r} has booleans that are neither 0 nor 1")
    return model


def _kept(replies: list[Reply], result: Result | Results) -> list[Reply]:
    return [reply for reply in replies if reply.node not in result.dropped]


def _weights(mean: Any, replies: list[Reply], used: list[Reply]) -> list[float]:
    """A weight per client that was used; where they differ by layer, the mean over parameters"""
    weights = mean.weights.numpy()
    if weights.ndim == 2:
        numel = mean.gram.numel.numpy() if mean.gram is not None and mean.gram.layerwise else np.ones(len(weights))
        weights = numel @ weights / numel.sum()
    if len(weights) != len(used):  # those who were dropped have their zeros here
        kept = {reply.node for reply in used}
        weights = [w for w, reply in zip(weights, replies, strict=True) if reply.node in kept]
    return [float(w) for w in weights]


def _coherence(result: Any, weights: list[float]) -> float | None:
    """FedLAW's, of the whole model, where the method has computed a Gram: to compute one for this would cost a read"""
    if result.gram is None:
        return None
    coherence = fastagg.diagnostics(result.gram.model().present(), weights).coherence
    return None if coherence is None else float(coherence)
