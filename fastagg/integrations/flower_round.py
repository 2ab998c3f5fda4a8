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
from fastagg._engine import large_pages
from fastagg._engine.aggregator import Aggregator
from fastagg._engine.hints import prefix_hint
from fastagg._engine.result import Result, Results
from fastagg._engine.table import InputError

LOG = logging.getLogger("fastagg")
Model = dict[str, Tensor]


@dataclass
class Reply:
    """What one client sent, read as far as that can be done without the others"""

    node: Any
    origin: Any  # the reply as Flower has it
    size: float
    form: tuple = ()  # of its metrics: who differs from most cannot be averaged with them
    info: dict[str, Any] = field(default_factory=dict)  # what the method wants to know of each client
    model: Model = field(default_factory=dict)


class Server:
    """A method, the global model its clients started from, and the models that belong to some of them only.

    blank   from a state dict to what Flower sends, in the same form, with memory for its numbers
    view    the state dict over that memory: what is written there is sent, without another copy
    """

    def __init__(
        self, method: str | Aggregator, options: dict[str, Any], round_info: Any, blank: Callable, view: Callable
    ) -> None:
        if isinstance(method, Aggregator):
            if options:
                raise TypeError(f"{', '.join(options)}: these options are to be given where the aggregator is made")
            self.aggregator = method
        else:
            self.aggregator = fastagg.aggregator(method, **options)
        self.round_info, self.blank, self.view = round_info, blank, view
        self.center: Model | None = None
        self.models: dict[Any, Any] = {}  # client -> the model of its own, packed
        self.result: Result | Results | None = None
        # logits are what the server remembers: not for a client to choose
        self.asked = tuple(name for name in self.aggregator.per_client if name != "logits")

    @property
    def drops(self) -> bool:
        return self.aggregator.on_nonfinite == "drop"

    def start_of(self, node: Any) -> Any:
        """The packed model that a client starts from, None for the global one"""
        if self.aggregator.gives == "clusters" and node not in self.models:  # CFL puts it into its first cluster
            node = next((other for cluster in self.aggregator.clusters[:1] for other in cluster), node)
        return self.models.get(node)

    def select(
        self, replies: Iterable[tuple[Any, Any]], read: Callable[[Any, Any], Reply]
    ) -> tuple[list[Reply], list[Any]]:
        """The replies that can be used, and who sent the others; raises where bad ones are not to be dropped."""
        good, bad, seen = [], [], set()
        for node, reply in replies:
            if node in seen:  # its first reply counts, so it is not one of the bad
                self._leave_out(node, InputError(f"node {node}: it sent a second reply in this round"))
                continue
            seen.add(node)
            try:
                good.append(read(node, reply))
            except InputError as error:
                bad.append(self._leave_out(node, error))
        [(common, _)] = Counter(reply.form for reply in good).most_common(1) or [((), 0)]
        for reply in [reply for reply in good if reply.form != common]:
            odd = ", ".join(sorted(name for name, _ in set(reply.form) ^ set(common)))
            error = InputError(f"node {reply.node}: metrics {odd} are not as most clients send them")
            bad.append(self._leave_out(reply.node, error))
        return [reply for reply in good if reply.form == common], bad

    def _leave_out(self, node: Any, error: InputError) -> Any:
        if not self.drops:
            raise error
        LOG.warning("%s; left out of this round", error)
        return node

    def aggregate(self, server_round: int, replies: list[Reply], bad: list[Any]) -> tuple[Any, list[Reply], dict]:
        """The new global model, packed (None: it stays as it was); the replies it is made of; and what to report."""
        if self.center is None and self.aggregator.needs_global:
            raise RuntimeError(
                "the global model is not known: where you override configure_train or configure_fit, call super()'s"
            )
        model, used, weights, coherence = None, [], [], None
        try:
            if replies:
                info = self.round_info(server_round) if callable(self.round_info) else self.round_info or {}
                model, mean, used = self._round(replies, info)
                weights = _weights(mean, replies, used)
                coherence = _coherence(self.result, weights)
        except InputError as error:
            if not self.drops:
                raise
            LOG.error("round %d: %s; the model stays as it was", server_round, error)
        kept = {reply.node for reply in used}
        gone = bad + [reply.node for reply in replies if reply.node not in kept]
        about = {"clients": [reply.node for reply in used], "weights": weights, "dropped": gone}
        return model, used, about if coherence is None else {**about, "coherence": coherence}

    def _round(self, replies: list[Reply], info: Mapping[str, Any]) -> tuple[Any, Result, list[Reply]]:
        gives = self.aggregator.gives
        form = replies[0].model if self.center is None else self.center
        record = self.blank(form)
        if gives == "global":
            out = self.view(record)
            large_pages.ask_for(out.values())
            self.result = self._call(self.center, replies, info, out)
        elif gives == "personalised":
            own = [self.blank(form) for _ in replies]
            self.result = self._call(self.center, replies, info, [self.view(one) for one in own])
            pairs = zip(replies, self.result, own, strict=True)
            self.models.update((reply.node, one) for reply, model, one in pairs if model is not None)
        else:
            self.result = self._by_cluster(replies, info)
        used = [reply for reply in replies if reply.node not in self.result.dropped]
        if gives == "global":
            return record, self.result, used
        mean = fastagg.fedavg(
            self.center, [reply.model for reply in used], [reply.size for reply in used],
            client_ids=[reply.node for reply in used], out=self.view(record),
        )  # fmt: skip
        return record, mean, used

    def _call(self, center: Model | None, replies: list[Reply], info: Mapping, out: Any = None) -> Result | Results:
        told = {name: [reply.info[name] for reply in replies] for name in replies[0].info}
        return self.aggregator.aggregate(
            center, [reply.model for reply in replies], [reply.size for reply in replies],
            [reply.node for reply in replies], out=out, **{**info, **told},
        )  # fmt: skip

    def _by_cluster(self, replies: list[Reply], info: Mapping[str, Any]) -> Results:
        """CFL wants a call for each model that clients started from, with those clients"""
        groups: dict[int, tuple[Any, list[Reply]]] = {}
        for reply in replies:
            start = self.start_of(reply.node)
            groups.setdefault(id(start), (start, []))[1].append(reply)
        several = Results()
        several.clusters, several.dropped = [], []
        for start, members in groups.values():
            try:
                result = self._call(self.center if start is None else self.view(start), members, info)
            except InputError as error:
                if not self.drops:
                    raise
                LOG.error("%s; this cluster's model stays as it was", error)
                several.dropped += [reply.node for reply in members]
                continue
            several += result
            several.clusters += result.clusters
            several.dropped += result.dropped
        if not several:
            raise InputError("no cluster has a client that can be used")
        owner = {node: m for m, cluster in enumerate(several.clusters) for node in cluster}
        packed = [self._packed(model) for model in several]
        former, self.models = self.models, {}
        for cluster in self.aggregator.clusters:  # absent members get their cluster's new model too
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


class Served:
    """What the strategies of both APIs show of their server"""

    _server: Server

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


def check_size(node: Any, name: str, value: Any) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise InputError(f"node {node}: {name} is {reprlib.repr(value)}, expected a number >= 0")
    return value


def check_info(node: Any, name: str, value: Any) -> Any:
    """What a client says of itself: a number or a list of them"""
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        check_size(node, name, number)
    if name in ("local_steps", "label_dist") and not any(numbers):
        raise InputError(f"node {node}: {name} is zero")
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


def check_model(node: Any, model: Model, center: Model | None) -> Model:
    """Keys, shapes and dtypes against the global model's, so that a misfit is one client's and not the round's"""
    for key, like in (center or {}).items():
        if key not in model:
            raise InputError(f"node {node}: key {key!r} is missing{prefix_hint(model, center)}")
        if model[key].dtype != like.dtype or model[key].shape != like.shape:
            found, expected = ((x.dtype, tuple(x.shape)) for x in (model[key], like))
            raise InputError(f"node {node}: key {key!r} is {found[0]} {found[1]}, expected {expected[0]} {expected[1]}")
    for key, tensor in model.items():
        if tensor.dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
            raise InputError(f"node {node}: key {key!r} has booleans that are neither 0 nor 1")
        if center is not None and key not in center:
            raise InputError(f"node {node}: key {key!r} is not in the global model")
    return model


def _weights(mean: Result, replies: list[Reply], used: list[Reply]) -> list[float]:
    """A weight per client that was used; where they differ by layer, the mean over parameters"""
    weights = mean.weights.numpy()
    if weights.ndim == 2:
        numel = mean.gram.numel.numpy() if mean.gram is not None and mean.gram.layerwise else np.ones(len(weights))
        weights = numel @ weights / numel.sum()
    if len(weights) != len(used):  # those who were dropped have their zeros here
        kept = {reply.node for reply in used}
        weights = [w for w, reply in zip(weights, replies, strict=True) if reply.node in kept]
    return [float(w) for w in weights]


def _coherence(result: Result | Results, weights: list[float]) -> float | None:
    """FedLAW's, of the whole model, where the method has computed a Gram: to compute one for this would cost a read"""
    if result.gram is None:
        return None
    return float(fastagg.diagnostics(result.gram.model().present(), weights).coherence)
