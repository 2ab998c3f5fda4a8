"""NVFlare: any method that gives one global model, as the aggregator of a FedAvg job.

    from fastagg.integrations.nvflare import FastAggAggregator

    recipe = FedAvgRecipe(..., aggregator=FastAggAggregator("fedawa"), server_expected_format=ExchangeFormat.PYTORCH)

Of fastagg, only what `import fastagg` and `from fastagg import ...` give is used: job export copies the file of every
module that is imported by its own name into the job, and the server has fastagg.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.aggregators.weighted_aggregation_helper import (
    WeightedAggregationHelper,
    filter_aggregatable_metrics,
)
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

import fastagg
from fastagg import extend

Form = dict[str, Any]  # of params: shape and dtype of each, where they matter
Group = tuple[ParamsType, bool, frozenset]  # kind of params, whether no data size came with them, and their form


@dataclass
class Told:
    """What a client sent, without its model"""

    meta: dict[str, Any]
    metrics: Any
    number: int | None
    kind: ParamsType
    fault: str = ""
    form: Form | None = None  # None: its params are no model
    size: float = 0.0
    files: Any = None  # what keeps them in existence


class FastAggAggregator(ModelAggregator):
    """Aggregates the models of a round with a fastagg method.

    method               a name of fastagg.list_methods() that gives one global model
    options              the method's options, {"layerwise": True}: a dict of plain data, so that job export keeps them
    on_bad_client        clients with NaN or infinity, other keys, shapes or dtypes, or a weight that is no number:
                         "raise" ends the job with an error that names client and key; "drop" leaves them out with a
                         warning, and keeps the former global model if no client is left
    weight_key           the entry of FLModel.meta with a client's data size. If no client has it, all count equally
    aggregation_weights  {client name: factor} to multiply the data sizes by; default: 1
    memory               how much memory the models of a round may take, in bytes or as "2GB". What does not fit waits
                         in temporary files (in TMPDIR); what can be a running sum (fedavg, fednova, fedadam ...) adds
                         models up as they come instead, so that the last bit of the result may depend on the order of
                         arrival. Default: models are kept in memory

    The global model that adaptive methods compare with is the one sent to the clients, seen at the event
    BEFORE_TRAIN_TASK; NVFlare passes it to no aggregator. Round inputs that clients report (label_dist, local_steps,
    entropies, lengths) are read from FLModel.meta under that name; override round_inputs() for the others.

    FULL models and DIFFs, of torch tensors or NumPy arrays, are aggregated to a model of the same kind. No copy is made
    of a DIFF. Tensors that NVFlare left on disk stay there: they are read piece by piece, by every method that can read
    files. A result's meta has fastagg_weights (of the clients that were used), fastagg_dropped ({client name: reason})
    and, where known, fastagg_coherence. Clients can see it, like all meta of the global model.
    """

    def __init__(
        self,
        method: str = "fedavg",
        options: dict[str, Any] | None = None,
        on_bad_client: str = "raise",
        weight_key: str = FLMetaKey.NUM_STEPS_CURRENT_ROUND,
        aggregation_weights: dict[str, float] | None = None,
        memory: int | str | None = None,
    ) -> None:
        super().__init__()
        # job export reads attributes of the arguments' names
        self.method, self.options, self.on_bad_client = method, options, on_bad_client
        self.weight_key, self.aggregation_weights, self.memory = weight_key, aggregation_weights, memory
        if memory is not None:
            extend.byte_count("memory", memory)
        self._server = fastagg.aggregator(method, on_bad_client=on_bad_client, **(options or {}))
        if self._server.partial:
            raise ValueError(f"{method}: partial=True is not possible here, where clients arrive one by one")
        if self._server.produces != "global":
            raise ValueError(f"{method} gives several models; NVFlare's FedAvg sends one to all clients")
        for name, factor in (aggregation_weights or {}).items():
            if not _is_weight(factor):
                raise ValueError(f"aggregation_weights: {name!r} has {factor!r}, expected a number >= 0")
        self._global: Mapping[str, Any] | None = None
        self._number: int | None = None  # of the round
        self._warned = False
        self._groups: dict[Group, Any] = {}
        self.reset_stats()

    def round_inputs(self) -> dict[str, Any]:
        """The method's round inputs that clients do not report: FedLAW's proxy. For subclasses."""
        return {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == AppEventType.BEFORE_TRAIN_TASK:
            sent = FLModelUtils.from_shareable(cast(Any, fl_ctx.get_prop(AppConstants.TRAIN_SHAREABLE)))
            self._global, self._number = sent.params, sent.current_round

    def reset_stats(self) -> None:
        """Forgets the round's models, not what the method remembers over rounds"""
        for group in self._groups.values():
            group.cancel()
        self._groups = {}
        self._told: dict[str, Told] = {}
        self._failure: Exception | None = None
        self._dropped: dict[str, str] = {}

    def accept_model(self, model: FLModel) -> None:
        """Adds the model to those of its form: most clients' form is known at the end only.

        What is wrong with it is said in aggregate_model: of an error here NVFlare only makes a line in the log, and the
        round would go on without the client.
        """
        name = (model.meta or {}).get("client_name")
        if not isinstance(name, str) or not name:
            raise fastagg.InputError("FLModel.meta has no 'client_name'")
        told = Told(dict(model.meta or {}), model.metrics, model.current_round, model.params_type or ParamsType.FULL)
        if self._told.setdefault(name, told) is not told:
            self.warning(f"client {name!r} sent a second model in this round; the first one counts")
            return
        try:
            self._add(name, told, model.params)
        except fastagg.BadClientError as error:
            told.fault = next(iter(error.reasons.values()))
        except fastagg.InputError as error:
            told.fault = str(error)
        except Exception as error:
            self._failure = error

    def _add(self, name: str, told: Told, params: Any) -> None:
        if not _is_dict(params):
            raise fastagg.InputError("its params are no dict of names and tensors")
        opened = _opened(params)
        told.form = _form(getattr(opened, "tensors", opened))
        said = told.meta.get(self.weight_key)
        if said is not None and not _is_weight(said):
            raise fastagg.InputError(f"{self.weight_key} is {_shown(said)}, expected a number >= 0")
        if self._global is None and self._needs_global(told.kind):
            return  # which aggregate_model says
        if self._global is not None and not told.form.keys() <= self._global.keys():
            return  # of no form that can be right
        told.files = params if opened is not params else None
        group = told.kind, said is None, frozenset(told.form.items() if self._global is None else told.form)
        told.size = min((1.0 if said is None else float(said)) * (self.aggregation_weights or {}).get(name, 1.0), 1e300)
        center = None
        if self._global is not None:
            center = _part(self._global, [key for key in self._global if key in told.form])
        round = self._groups.get(group)
        if round is None:
            round = self._groups.setdefault(group, self._begun(center, told.kind))
        inputs = {spec.name: told.meta[spec.name] for spec in self._client_inputs() if spec.name in told.meta}
        inputs = {what: value for what, value in inputs.items() if value is not None}
        if center is not None and told.kind == ParamsType.DIFF and self._needs_global(told.kind):
            _check_like(center, getattr(opened, "tensors", opened))
            round.add(name, update=opened, size=told.size, **inputs)
        else:  # where it needs no global model it is a weighted mean: of the updates as of the models
            round.add(name, opened, size=told.size, **inputs)

    def _begun(self, center: dict[str, Any] | None, kind: ParamsType) -> Any:
        """A round for the clients of one form. There is one, unless a client is wrong."""
        if center is not None and kind == ParamsType.DIFF and self._needs_global(kind):
            center = {key: _widened(value) for key, value in center.items()}
        # what is wrong with a client is said at the end, so its values need not be looked at before that
        if self.memory is None:
            return self._server.round(center, check="finish")
        if not self._groups and not self._server.why_not_running(center):
            return self._server.round(center, running=True)
        return self._server.round(center, memory=1 if self._groups else self.memory, check="finish")

    def aggregate_model(self) -> FLModel:
        try:
            return self._aggregate()
        finally:
            self.reset_stats()
            self._global = self._number = None

    def _aggregate(self) -> FLModel:
        if self._failure is not None:
            raise self._failure
        self._told = dict(sorted(self._told.items()))  # the order of arrival must not show
        if any(told.files is not None for told in self._told.values()):
            self.info("tensors are on disk: read piece by piece")
        kinds = Counter(told.kind for told in self._told.values() if told.form is not None)
        kind = kinds.most_common(1)[0][0] if kinds else ParamsType.FULL
        params, result, used = None, None, []
        try:
            if not self._told:
                raise fastagg.InputError("no client sent a model")
            result, used = self._finish(kind)
            params = self._params(result, kind)
        except fastagg.InputError as error:
            if self.on_bad_client == "raise":
                raise
            self.error(f"{self.method}: {error}; the model stays as it was")
            self._dropped |= {name: told.fault or str(error) for name, told in self._told.items()}
        params = self._unchanged(kind) if params is None else params
        meta: dict[str, Any] = {"fastagg_weights": {}} if result is None else self._describe(result, used)
        meta["fastagg_dropped"] = dict(sorted(self._dropped.items()))
        used = [name for name in used if name not in self._dropped]
        sizes = {name: self._told[name].size for name in used}
        meta["metrics_aggregation_info"] = {  # lets NVFlare 2.9 list every site's metrics, as with its own aggregation
            "metric_source": "client_reported_flmodel_metrics",
            "aggregation": {"method": "weighted_average", "weight_key": self.weight_key},
            "site_weights": [{"name": n, "weight": sizes[n], "weight_key": self.weight_key} for n in used],
            "use_contribution_sites": True,
        }
        self.info(f"{self.method}: weights {meta['fastagg_weights']}, left out {meta['fastagg_dropped']}")
        return FLModel(
            params=params,
            params_type=kind,
            metrics=self._metrics(sizes),
            current_round=self._number,  # not what a client says; where it is not known, NVFlare fills it in
            meta=meta,
        )

    def _finish(self, kind: ParamsType) -> tuple[Any, list[str]]:
        """The result of those of the right form, who are in it by name. Notes who was dropped."""
        group = self._right_group(kind)
        names, faults = list(self._told), {name: told.fault for name, told in self._told.items() if told.fault}
        round = None if group is None else self._groups.get(group)
        if faults and self.on_bad_client == "raise":
            raise extend.bad_clients({names.index(name): why for name, why in faults.items()}, names)
        if round is None:
            raise fastagg.InputError("no client is left")
        for name, fault in faults.items():
            self.warning(f"client {name!r}: {fault}; left out of this round")
        faults |= round.dropped
        for name, fault in faults.items():
            self._told[name].fault = fault
        used = sorted(round.clients)
        inputs = self.round_inputs()
        for spec in self._server.round_inputs:
            if spec.per_client and spec.name in inputs:
                inputs[spec.name] = _of_some(spec, inputs[spec.name], names, used)
        result = round.finish(client_ids=used, **inputs)
        self._dropped |= faults | result.dropped
        return result, used

    def _right_group(self, kind: ParamsType) -> Group | None:
        """The one of most clients. The others' faults are noted, unless there is one already."""
        said = [told.meta.get(self.weight_key) is not None for told in self._told.values()]
        if not any(said):
            if not self._warned:
                self.warning(f"no client says {self.weight_key!r} in its meta: all count equally")
            self._warned = True
        for told in self._told.values():
            if told.form is not None and told.kind != kind:
                told.fault = f"it sent {told.kind}, others {kind}"
            elif told.form is not None and any(said) and told.meta.get(self.weight_key) is None:
                told.fault = f"{self.weight_key} is None, expected a number >= 0"
        good = [told for told in self._told.values() if told.form is not None and self._could_be(told, kind, any(said))]
        form = self._usual_form(kind, [told.form or {} for told in good])
        for told in self._told.values():
            if told.form is not None and not told.fault:
                told.fault = _difference(told.form, form, shapes=self._global is None)
        return kind, not any(said), frozenset(form.items() if self._global is None else form)

    def _could_be(self, told: Told, kind: ParamsType, some_said: bool) -> bool:
        said = told.meta.get(self.weight_key)
        return told.kind == kind and (said is not None or not some_said) and (said is None or _is_weight(said))

    def _usual_form(self, kind: ParamsType, forms: list[Form]) -> Form:
        """What is aggregated: of the global model, or where it is not known of all that came, what most clients sent"""
        if self._global is None and self._needs_global(kind):
            raise fastagg.InputError(
                f"{self.method} needs the global model, and this controller fires no BEFORE_TRAIN_TASK"
            )
        sent = Counter(key for form in forms for key in form)
        known = list(sent if self._global is None else self._global)
        keys = [key for key in known if 2 * sent[key] > len(forms)] or known
        if self._global is not None:
            return dict.fromkeys(keys)
        same = Counter(frozenset(form.items()) for form in forms if form.keys() == set(keys))
        return dict(same.most_common(1)[0][0]) if same else dict.fromkeys(keys)

    def _client_inputs(self) -> list[Any]:
        return [spec for spec in self._server.round_inputs if spec.per_client and spec.from_clients]

    def _params(self, result: Any, kind: ParamsType) -> dict[str, Any]:
        """Of the kind that clients sent"""
        if self._global is None or kind == ParamsType.FULL or not self._needs_global(kind):
            return dict(result)
        for key in list(result):
            [like] = _part(self._global, [key]).values()
            result[key] = _in_form(result[key] - _widened(like), like)
        return dict(result)

    def _needs_global(self, kind: ParamsType) -> bool:
        """Of updates, gamma times their mean is not the update to gamma times the mean of the models"""
        return self._server.needs_global or (kind == ParamsType.DIFF and getattr(self._server, "gamma", 1.0) != 1.0)

    def _unchanged(self, kind: ParamsType) -> dict[str, Any]:
        """What leaves the global model as it is"""
        if self._global is None:
            raise fastagg.InputError("no client is left, and the former global model is not known")
        if kind == ParamsType.FULL:
            return dict(self._global)
        return {key: _in_form(torch.zeros(_widened(value).shape), value) for key, value in self._global.items()}

    def _describe(self, result: Any, names: list[str]) -> dict[str, Any]:
        """A result in plain data"""
        meta: dict[str, Any] = {"fastagg_weights": {}}
        if result.weights is not None:
            weights = dict(zip(names, result.weights.movedim(-1, 0).tolist(), strict=True))
            meta["fastagg_weights"] = {name: w for name, w in weights.items() if name not in self._dropped}
        if result.layers is not None:
            meta["fastagg_layers"] = list(result.layers)
        coherence = None if result.gram is None else fastagg.diagnostics(result.gram, result.weights).coherence
        if coherence is not None:
            meta["fastagg_coherence"] = coherence.tolist()
        return meta

    def _metrics(self, sizes: dict[str, float]) -> dict[str, Any] | None:
        """The clients' metrics weighted by their data, as NVFlare's own FedAvg has them: none if a client has none. One
        that is NaN or infinite is left out, and its client's weight with it."""
        if not sizes or any(self._told[name].metrics is None for name in sizes):
            return None
        mean = WeightedAggregationHelper()
        for name, size in sizes.items():
            if size > 0:
                try:
                    metrics = filter_aggregatable_metrics(self._told[name].metrics)
                    odd = {key: value for key, value in metrics.items() if not _is_finite(value)}
                    if odd:
                        self.warning(f"client {name!r}: {odd}; left out of the averages of metrics")
                    metrics = {key: value for key, value in metrics.items() if key not in odd}
                    mean.add(metrics, size, name, self._told[name].number)
                except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
                    text = f"client {name!r}: its metrics cannot be averaged with the others': {error}"
                    if self.on_bad_client == "raise":
                        raise fastagg.InputError(text) from error
                    self.warning(f"{text}; this round has no metrics")
                    return None
        return mean.get_result() or None


def _is_weight(value: Any) -> bool:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_number and bool(0 <= value < 1e300)


def _is_finite(metric: Any) -> bool:
    return bool(np.isfinite(np.asarray(metric, dtype=np.float64)).all())


def _is_dict(params: Any) -> bool:
    return callable(getattr(params, "keys", None)) and all(isinstance(key, str) for key in params)


def _is_lazy(value: Any) -> bool:
    return callable(getattr(value, "materialize", None))


def _opened(params: Mapping[str, Any]) -> Any:
    """Params whose tensors NVFlare left on disk, as they lie there. Where it does not say where, they are read."""
    if not any(map(_is_lazy, params.values())):
        return params
    places = {key: (getattr(ref, "file_path", None), getattr(ref, "key", None)) for key, ref in params.items()}
    if all(isinstance(path, str) and isinstance(name, str) for path, name in places.values()):
        return extend.open_tensors(cast(Any, places))
    return _part(params, list(params))


def _part(params: Mapping[str, Any], keys: list[str]) -> dict[str, Any]:
    """Those of the keys that there are. A tensor that NVFlare left on disk is read; what is in memory stays there."""
    found = {key: params[key] for key in keys if key in params}
    return {key: value.materialize() if _is_lazy(value) else value for key, value in found.items()}


def _form(params: Mapping[str, Any]) -> Form:
    return {
        key: (tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", None)).removeprefix("torch."))
        for key, value in params.items()
    }


def _difference(form: Form, usual: Form, *, shapes: bool) -> str:
    """In words, if there is one"""
    none = torch.empty(0)
    try:
        extend.tables.build(dict.fromkeys(usual, none), [dict.fromkeys(form, none)], hints=False)
    except fastagg.InputError as error:
        return str(error).removeprefix("client 0: ")
    for key in form if shapes else ():
        if form[key] != usual[key]:
            return f"key {key!r} has shape and dtype {form[key]}, most clients have {usual[key]}"
    return ""


def _check_like(center: dict[str, Any], update: Mapping[str, Any]) -> None:
    """An update to a 16-bit model may not be wider than that, though it is added to a wide copy"""
    extend.tables.build(center, [update], hints=False, narrow=True)


def _of_some(spec: Any, value: Any, names: list[str], some: list[str]) -> Any:
    """A round input that has an entry for each of the names, for some of them"""
    if isinstance(value, Mapping):
        return {name: value[name] for name in some if name in value}
    order = [names.index(name) for name in some]
    if spec.pairwise:
        return np.asarray(value)[np.ix_(order, order)]
    return [value[k] for k in order] if spec.client_axis == 0 else np.take(np.asarray(value), order, spec.client_axis)


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except ValueError:  # an integer of thousands of digits, which Python does not write out
        return f"a {type(value).__name__}"


def _widened(value: Any) -> torch.Tensor:
    """In float32 if it is a 16-bit format: a model plus an update would lose most of the update there"""
    tensor = extend.as_tensor(value, "the model", "")
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _in_form(tensor: torch.Tensor, like: Any) -> Any:
    return tensor.to(like.dtype) if isinstance(like, torch.Tensor) else tensor.numpy().astype(like.dtype)
