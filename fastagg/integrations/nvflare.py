"""NVFlare: any method that gives one global model, as the aggregator of a FedAvg job.

    from fastagg.integrations.nvflare import FastAggAggregator

    recipe = FedAvgRecipe(..., aggregator=FastAggAggregator("fedawa"), server_expected_format=ExchangeFormat.PYTORCH)

Of fastagg, only what `import fastagg` and `from fastagg import ...` give is used: job export copies the file of every
module that is imported by its own name into the job, and the server has fastagg.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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


class FastAggAggregator(ModelAggregator):
    """Aggregates the models of a round with a fastagg method.

    method               a name of fastagg.list_methods() that gives one global model
    options              the method's options, {"layerwise": True}: a dict of plain data, so that job export keeps them
    on_bad_client        clients with NaN or infinity, other keys, shapes or dtypes, or a weight that is no number:
                         "raise" ends the job with an error that names client and key; "drop" leaves them out with a
                         warning, and keeps the former global model if no client is left
    weight_key           the entry of FLModel.meta with a client's data size. If no client has it, all count equally
    aggregation_weights  {client name: factor} to multiply the data sizes by; default: 1

    The global model that adaptive methods compare with is the one sent to the clients, seen at the event
    BEFORE_TRAIN_TASK; NVFlare passes it to no aggregator. Round inputs that clients report (label_dist, local_steps,
    entropies, lengths) are read from FLModel.meta under that name; override round_inputs() for the others.

    FULL models and DIFFs, of torch tensors or NumPy arrays, are aggregated to a model of the same kind. Where the
    method needs the global model, DIFFs are added to it first, which takes a copy of every client. Tensors that NVFlare
    left on disk are read one key at a time by methods whose weights do not depend on the models (FedAvg, FedDisco);
    others need them all in memory. A result's meta has fastagg_weights (of the clients that were used), fastagg_dropped
    ({client name: reason}) and, where known, fastagg_coherence. Clients can see it, like all meta of the global model.
    """

    def __init__(
        self,
        method: str = "fedavg",
        options: dict[str, Any] | None = None,
        on_bad_client: str = "raise",
        weight_key: str = FLMetaKey.NUM_STEPS_CURRENT_ROUND,
        aggregation_weights: dict[str, float] | None = None,
    ) -> None:
        super().__init__()
        # job export reads attributes of the arguments' names
        self.method, self.options, self.on_bad_client = method, options, on_bad_client
        self.weight_key, self.aggregation_weights = weight_key, aggregation_weights
        self._server = fastagg.aggregator(method, on_bad_client=on_bad_client, **(options or {}))
        if self._server.produces != "global":
            raise ValueError(f"{method} gives several models; NVFlare's FedAvg sends one to all clients")
        for name, factor in (aggregation_weights or {}).items():
            if not _is_weight(factor):
                raise ValueError(f"aggregation_weights: {name!r} has {factor!r}, expected a number >= 0")
        self._global: Mapping[str, Any] | None = None
        self._number: int | None = None  # of the round
        self._warned = False
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
        self._models: dict[str, FLModel] = {}
        self._dropped: dict[str, str] = {}

    def accept_model(self, model: FLModel) -> None:
        """Keeps the model, which keeps its files if it is on disk. What is wrong with it is said in aggregate_model:
        of an error here NVFlare only makes a line in the log, and the round would go on without the client."""
        name = (model.meta or {}).get("client_name")
        if not isinstance(name, str) or not name:
            raise fastagg.InputError("FLModel.meta has no 'client_name'")
        if name in self._models:
            self.warning(f"client {name!r} sent a second model in this round; the first one counts")
        else:
            self._models[name] = model

    def aggregate_model(self) -> FLModel:
        try:
            return self._aggregate()
        finally:
            self.reset_stats()
            self._global = self._number = None

    def _aggregate(self) -> FLModel:
        self._models = dict(sorted(self._models.items()))  # the order of arrival must not show
        usable = {name: model for name, model in self._models.items() if _is_dict(model.params)}
        types = Counter(_kind(model) for model in usable.values())
        kind = types.most_common(1)[0][0] if types else ParamsType.FULL
        names, (sizes, faults) = list(self._models), self._sizes()
        faults |= {
            name: f"it sent {_kind(model)}, others {kind}" for name, model in usable.items() if _kind(model) != kind
        }  # fmt: skip
        faults |= dict.fromkeys(self._models.keys() - usable.keys(), "its params are no dict of names and tensors")
        params, result = None, None
        try:
            if not self._models:
                raise fastagg.InputError("no client sent a model")
            params, result = self._params(kind, faults, sizes)
        except fastagg.InputError as error:
            if self.on_bad_client == "raise":
                raise
            self.error(f"{self.method}: {error}; the model stays as it was")
            self._dropped |= {name: faults.get(name, str(error)) for name in self._models}
            self._models = {}
        params = self._unchanged(kind) if params is None else params
        meta: dict[str, Any] = {"fastagg_weights": {}} if result is None else self._describe(result, names)
        meta["fastagg_dropped"] = dict(sorted(self._dropped.items()))
        meta["metrics_aggregation_info"] = {  # lets NVFlare 2.9 list every site's metrics, as with its own aggregation
            "metric_source": "client_reported_flmodel_metrics",
            "aggregation": {"method": "weighted_average", "weight_key": self.weight_key},
            "site_weights": [{"name": n, "weight": sizes[n], "weight_key": self.weight_key} for n in self._models],
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

    def _sizes(self) -> tuple[dict[str, float], dict[str, str]]:
        """How much each client counts, by what it says and the factors given; and of whom what it says is wrong"""
        said = {name: (model.meta or {}).get(self.weight_key) for name, model in self._models.items()}
        if said and all(value is None for value in said.values()):
            if not self._warned:
                self.warning(f"no client says {self.weight_key!r} in its meta: all count equally")
            self._warned = True
            said = dict.fromkeys(said, 1.0)
        good = {name: float(value) for name, value in said.items() if value is not None and _is_weight(value)}
        factors = self.aggregation_weights or {}
        sizes = {name: min(good.get(name, 0.0) * factors.get(name, 1.0), 1e300) for name in said}
        wrong = {name: f"{self.weight_key} is {_shown(value)}" for name, value in said.items() if name not in good}
        return sizes, {name: f"{fault}, expected a number >= 0" for name, fault in wrong.items()}

    def _client_inputs(self, names: list[str]) -> dict[str, list[Any]]:
        """What clients say of themselves for the round inputs that the method takes of them"""
        inputs = {}
        for spec in self._server.round_inputs:
            if spec.per_client and spec.from_clients:
                said = [(self._models[name].meta or {}).get(spec.name) for name in names]
                if any(value is not None for value in said):
                    inputs[spec.name] = said
        return inputs

    def _params(self, kind: ParamsType, faults: dict[str, str], sizes: dict[str, float]) -> tuple[dict[str, Any], Any]:
        """The aggregated params, and a Result that says how"""
        names = list(self._models)
        whole: dict[str, Mapping[str, Any]] = {
            name: model.params or {} for name, model in self._models.items() if name not in faults
        }
        keys = self._keys(kind, list(whole.values()))
        others = {name: sorted(params.keys() - set(keys)) for name, params in whole.items()}
        on_disk = any(_is_lazy(value) for params in whole.values() for value in params.values())
        # where weights do not depend on the models, keys can be mixed one by one
        free = self._server.reads == "weights" and not self._server.needs_global and self._server.params is None
        if on_disk:
            self.info(f"tensors are on disk: read {'one key at a time' if free else 'all at once'}")
        params: dict[str, Any] = {}
        result = None
        for some in [[key] for key in keys] if on_disk and free and keys else [keys]:
            clients = [
                fastagg.InputError(faults[name]) if name in faults else _part(whole[name], [*some, *others[name]])
                for name in names
            ]
            center = None if self._global is None else _part(self._global, some)
            result = self._round(kind, center, clients, [sizes[name] for name in names], names)
            new = {name: why for name, why in result.dropped.items() if name not in faults}
            if new and params:  # the keys before these were mixed with those clients
                return self._params(kind, faults | new, sizes)
            params.update(result)
            faults = faults | new
        self._dropped |= faults
        self._models = {name: model for name, model in self._models.items() if name not in faults}
        return params, result

    def _round(
        self, kind: ParamsType, center: dict[str, Any] | None, clients: list, sizes: list[float], names: list[str]
    ) -> Any:
        inputs = self._client_inputs(names) | self.round_inputs()
        if center is None or kind == ParamsType.FULL or not self._needs_global(kind):
            # where it needs no global model it is a weighted mean: of the updates as of the models
            return self._server.aggregate(center, clients, sizes, names, **inputs)
        wide = {key: _widened(value) for key, value in center.items()}
        result = self._server.aggregate(wide, [_moved(center, wide, sd) for sd in clients], sizes, names, **inputs)
        for key, like in center.items():
            result[key] = _in_form(result[key] - wide[key], like)
        return result

    def _needs_global(self, kind: ParamsType) -> bool:
        """Of updates, gamma times their mean is not the update to gamma times the mean of the models"""
        return self._server.needs_global or (kind == ParamsType.DIFF and getattr(self._server, "gamma", 1.0) != 1.0)

    def _keys(self, kind: ParamsType, models: list[Mapping[str, Any]]) -> list[str]:
        """What is aggregated: of the global model, or where it is not known of all that came, what most clients sent"""
        if self._global is None and self._needs_global(kind):
            raise fastagg.InputError(
                f"{self.method} needs the global model, and this controller fires no BEFORE_TRAIN_TASK"
            )
        sent = Counter(key for params in models for key in params)
        known = list(sent if self._global is None else self._global)
        return [key for key in known if 2 * sent[key] > len(models)] or known

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
            meta["fastagg_weights"] = {name: w for name, w in weights.items() if name in self._models}
        if result.layers is not None:
            meta["fastagg_layers"] = list(result.layers)
        coherence = None if result.gram is None else fastagg.diagnostics(result.gram, result.weights).coherence
        if coherence is not None:
            meta["fastagg_coherence"] = coherence.tolist()
        return meta

    def _metrics(self, sizes: dict[str, float]) -> dict[str, Any] | None:
        """The clients' metrics weighted by their data, as NVFlare's own FedAvg has them: none if a client has none. One
        that is NaN or infinite is left out, and its client's weight with it."""
        if not self._models or any(model.metrics is None for model in self._models.values()):
            return None
        mean = WeightedAggregationHelper()
        for name, model in self._models.items():
            if sizes[name] > 0:
                try:
                    metrics = filter_aggregatable_metrics(model.metrics)
                    odd = {key: value for key, value in metrics.items() if not _is_finite(value)}
                    if odd:
                        self.warning(f"client {name!r}: {odd}; left out of the averages of metrics")
                    metrics = {key: value for key, value in metrics.items() if key not in odd}
                    mean.add(metrics, sizes[name], name, model.current_round)
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


def _kind(model: FLModel) -> ParamsType:
    return model.params_type or ParamsType.FULL


def _is_lazy(value: Any) -> bool:
    return callable(getattr(value, "materialize", None))


def _part(params: Mapping[str, Any], keys: list[str]) -> dict[str, Any]:
    """Those of the keys that there are. A tensor that NVFlare left on disk is read; what is in memory stays there."""
    found = {key: params[key] for key in keys if key in params}
    return {key: value.materialize() if _is_lazy(value) else value for key, value in found.items()}


def _moved(center: dict[str, Any], wide: dict[str, torch.Tensor], update: Any) -> Any:
    """The global model plus an update of its form; of another form, an error that says so"""
    if isinstance(update, fastagg.InputError):
        return update
    try:
        extend.tables.build(center, [update], hints=False)
    except fastagg.InputError as error:
        return fastagg.InputError(str(error).removeprefix("client 0: "))
    return {key: wide[key] + _widened(value) for key, value in update.items()}


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
