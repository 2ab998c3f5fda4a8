"""What the server optimisers share: the round, the moments that are remembered, and the method that gives the weights.

One read of the clients gives delta itself, subtracted before it is rounded: the difference of a rounded mean and g
would have lost its digits where clients moved little. The kernels round to the dtype of the models, which is too coarse
for 16-bit ones: their delta is summed up in float64 by a second read, and rounded once, to float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from fastagg.extend import (
    Aggregator,
    Cohort,
    GlobalAggregator,
    InputError,
    Layout,
    Pass,
    Result,
    StateDict,
    Table,
    Weights,
    aggregator,
    as_tensor,
    check_form,
    check_tensor,
    describe,
    largest_update,
    nonfinite,
    one_thread,
    wide_dtype,
)

INFINITY = float("inf")
Moments = dict[str, dict[str, torch.Tensor]]  # moment -> key of the parameter -> float32 or float64 tensor


class Remembered(NamedTuple):
    """What a server optimiser remembers: its moments, whose tensors are replaced and never written to; and the state of
    the method that gives the weights"""

    moments: Moments
    of_weights: Any = None


class ServerOptimiser(GlobalAggregator):
    """What the four share: the round, and a tensor per moment and parameter as its state."""

    moments: ClassVar[tuple[str, ...]] = ("m", "v")
    reads = "weights"  # or what the method of its weights reads
    mean_as = "update"

    weights: str | Mapping[str, Any] | Aggregator | None = None
    state: Remembered = field(init=False, default=Remembered({}), repr=False)
    _method: Aggregator | None = field(init=False, default=None, repr=False)  # that gives the weights

    def check_options(self) -> None:
        if self.weights is None:
            return
        method = self._method = _weights_from(self.name, self.weights)
        self.state = Remembered({}, method.state)
        vars(self).update(  # this object's facts are those of the method
            reads=method.reads, round_inputs=method.round_inputs, client_values=method.client_values,
            stale_as=method.stale_as,
        )  # fmt: skip

    def passes(self, layout: Layout, inputs: Mapping[str, Any]) -> tuple[Pass, ...]:
        own: tuple[Pass, ...] = ("mix", "update") if self.reads_twice(layout) else ("mix",)
        if self._method is None:
            return own
        *before, last = self._method.passes(layout, inputs)
        if last == "ranks":
            return (*before, last)
        return (*before, *(["gram"] if last == "gram_mix" else []), *own)

    def products(self) -> int:
        return super().products() if self._method is None else self._method.products()

    @torch.no_grad()
    def combine(self, cohort: Cohort, **inputs: Any) -> Result:
        table, layout = cohort.table, cohort.table.layout
        state: Remembered = cohort.state
        params = [(int(t), layout.keys[t]) for t in np.flatnonzero(layout.is_param)]
        if state.moments:
            check_form(self.name, layout, state.moments["m"])
        weights, of_weights = self._weigh(cohort, inputs)
        if weights.others_for is not None and not np.array_equal(weights.others_for, ~layout.is_param):
            raise InputError(
                f"{self.name}: the method of its weights takes other tensors for parameters; pass params= the model"
            )
        ranked = weights.ranked is not None
        wide = not ranked and cohort.access.any(self.reads_twice(layout))
        try:
            [result] = cohort.mix(weights if wide or ranked else _less_global(weights))
        except InputError as error:
            raise error if self._method is None else self._method.explain(cohort, error, **inputs)  # noqa: B904
        values = {t: as_tensor(result[key], "the result", key) for t, key in params}
        with one_thread():
            if ranked:
                deltas = {t: _difference(value, table.global_model[t]) for t, value in values.items()}
            else:
                deltas = cohort.wide_updates(weights) if wide else dict(values)
            moments, found = self._advance_all(table, params, deltas, values)
        counts = np.abs(cohort.of_clients(weights.values)).reshape(-1, table.K).max(0) > 0
        clients = {k for t, _ in found for k in self._blamed(table, counts, t)}
        cohort.access.refuse(table, sorted(clients), f"{self.name}: {found[0][1]}" if found else "")
        cohort.state = Remembered(moments, of_weights)
        return describe(result, cohort, weights)

    def _weigh(self, cohort: Cohort, inputs: Mapping[str, Any]) -> tuple[Weights, Any]:
        """The clients' weights, and the new state of the method that gives them"""
        if self._method is None:
            return Weights(cohort.shares), None
        cohort.state = cohort.state.of_weights
        weights = self._method.weights_of(cohort, **inputs)
        weights.with_gram = False  # the mix here is another one
        self._method.learn(cohort, weights, None)
        return weights, cohort.state

    def _advance_all(self, table: Table, params, deltas, values) -> tuple[Moments, list]:
        """Writes all new values; the new moments, and what is out of range: (tensor, words)"""
        found = [(t, f"the mean update of key {key!r} is too large for {deltas[t].dtype}")
                 for t, key in params if not self._in_range(deltas[t])]  # fmt: skip
        state: Moments = {moment: {} for moment in self.moments}
        for t, key in params if not found else ():
            new, fits = self._advance(key, table.global_model[t].detach(), deltas.pop(t), values[t])
            if not fits:
                words = f"the new value of key {key!r}, or a moment of it, is too large for {values[t].dtype}"
                return state, [(t, words)]
            for moment, tensor in zip(self.moments, new, strict=True):
                state[moment][key] = tensor
        return state, found

    def reads_twice(self, layout: Layout) -> bool:
        """Whether the mean update is computed apart from the mean, by another read of the clients"""
        return self._is_fedavg() or any(
            dtype.itemsize == 2 for dtype, is_param in zip(layout.dtypes, layout.is_param, strict=True) if is_param
        )

    def _is_fedavg(self) -> bool:
        """The new model is the clients' mean, whatever the moments are"""
        return False

    def _advance(
        self, key: str, g: torch.Tensor, delta: torch.Tensor, value: torch.Tensor
    ) -> tuple[list[torch.Tensor], bool]:
        """Writes the new value; returns the new moments, and whether all is finite. delta may be value itself."""
        dtype = wide_dtype(delta.dtype)
        old = [self._start(moment, key, delta, dtype) for moment in self.moments]
        if self._is_fedavg():  # value has the mean's own bits, which g + delta may miss by a rounding
            new, _, _ = self._step(delta, *old)
        else:
            new, step, scale = self._step(delta.to(dtype), *old)
            torch.add(g.to(dtype), step, alpha=scale, out=value)
        return new, all(_is_finite(tensor) for tensor in (value, *new))  # by aminmax: no temporary tensor

    def _in_range(self, delta: torch.Tensor) -> bool:
        """A moment that is once not finite stays so for all rounds to come: stop before it is."""
        largest = torch.finfo(delta.dtype).max
        return _magnitude(delta) <= (largest**0.5 if "v" in self.moments else largest)

    def _blamed(self, table: Table, counts: np.ndarray, t: int) -> list[int]:
        """The clients, if they are few, that move tensor t by far the most, of those that count"""
        moved = [largest_update(table.global_model[t], table.model_tensor(k, t)) for k in range(table.K)]
        return nonfinite.dominant(np.where(counts, moved, 0))

    def _step(self, delta: torch.Tensor, *old: Any, **_: Any) -> tuple[list[torch.Tensor], torch.Tensor, float]:
        """The new moments, and a step and its factor, from the old moments, which stay as they are"""
        raise NotImplementedError

    def start_of(self, moment: str) -> float:
        """What a moment is before the first round"""
        return 0.0

    def _start(self, moment: str, key: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.state.moments:
            return self.state.moments[moment][key].to(like.device, dtype)
        first = self.start_of(moment)
        return torch.full(like.shape, first, dtype=dtype, device=like.device)

    @property
    def _weights_method(self) -> Any:
        """The method that gives the weights, with what it remembers; None if there is none"""
        return None if self._method is None else self._method.with_state(self.state.of_weights)

    @property
    def waits_for(self) -> int | None:
        return None if self._method is None else self._method.waits_for

    @property
    def version(self) -> int | None:
        return None if self._method is None else self._weights_method.version

    def why_not_client(self, inputs: Mapping[str, Any], is_update: bool) -> str:
        return "" if self._method is None else self._weights_method.why_not_client(inputs, is_update)

    def started_from(self, inputs: Mapping[str, Any]) -> Mapping[str, torch.Tensor] | None:
        return None if self._method is None else self._weights_method.started_from(inputs)

    def why_not_running(self, global_sd: StateDict | None) -> str:
        why = super().why_not_running(global_sd)
        tensors = [as_tensor(value, "the model", key) for key, value in (global_sd or {}).items()]
        if not why and any(t.is_floating_point() and t.itemsize == 2 for t in tensors):
            return "running=True rounds the mean update to the model's dtype: it needs more digits than 16 bits have"
        return why

    def parts_of_mean(self, size: float, inputs: Mapping[str, Any]) -> tuple[float, float] | None:
        return (size, size) if self._method is None else self._method.parts_of_mean(size, inputs)

    def step_of_mean(self, parts: np.ndarray) -> float:
        return 1.0 if self._method is None else self._method.step_of_mean(parts)

    def known_clients(self) -> Iterable[Any]:
        return () if self._method is None else self._weights_method.known_clients()

    def describe_dropped(self, result: Result, ids: list[Any], inputs: Mapping[str, Any]) -> None:
        if self._method is not None:
            self._weights_method.describe_dropped(result, ids, inputs)

    def warn_state_lost(self, inputs: Mapping[str, Any], remedy: str) -> None:
        if self._method is not None:
            self._method.warn_state_lost(inputs, remedy)

    def why_not_on_files(self) -> str:
        return "" if self._method is None else self._method.why_not_on_files()

    def why_not_over_group(self, inputs: Mapping[str, Any] | None) -> str:
        return "" if self._method is None else self._method.why_not_over_group(inputs)

    def why_not_partial(self) -> str:
        return "" if self._method is None else self._method.why_not_partial()

    def tolerates(self) -> int | None:
        return None if self._method is None else self._method.tolerates()

    def why_not_pre(self, buckets: bool) -> str:
        return "" if self._method is None else self._method.why_not_pre(buckets)

    @property
    def min_clients(self) -> int:
        return 1 if self._method is None else self._method.min_clients

    def bytes_needed(self, parameters: Iterable[tuple[int, torch.dtype]]) -> int:
        parameters = list(parameters)
        width = [numel * (8 if dtype == torch.float64 else 4) for numel, dtype in parameters]
        more = 0 if self._method is None else self._method.bytes_needed(parameters)
        return 2 * len(self.moments) * sum(width) + 4 * max(width, default=0) + more  # old and new; those of a step

    def state_dict(self) -> dict[str, Any]:
        """The moments as float32 or float64 tensors by key: {"method": .., "m": {key: tensor}, "v": {key: tensor}}.

        They are copies: what the caller does to them does not reach the aggregator.
        """
        moments = {
            moment: {key: tensor.clone() for key, tensor in self.state.moments.get(moment, {}).items()}
            for moment in self.moments
        }
        of_weights = {} if self._method is None else {"weights": self._weights_method.state_dict()}
        return {**super().state_dict(), **moments, **of_weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state, self.moments if self._method is None else (*self.moments, "weights"))
        if self._method is None and "weights" in state:
            raise InputError(f"{self.name} state: it has the state of a method that gives the weights; pass weights=")
        loaded: Moments = {}
        for moment in self.moments:
            if not isinstance(state[moment], Mapping):
                raise InputError(f"{self.name} state: {moment} is a {type(state[moment]).__name__}, expected a dict")
            loaded[moment] = {key: self._checked(moment, key, value) for key, value in state[moment].items()}
        form, *others = ({key: t.shape for key, t in tensors.items()} for tensors in loaded.values())
        for key in (key for other in others for key in form.keys() | other.keys() if form.get(key) != other.get(key)):
            raise InputError(f"{self.name} state: the moments of {key!r} differ in shape, or one is missing")
        method = self._weights_method
        if method is not None:
            method.load_state_dict(state["weights"])
        super().load_state_dict(state)
        self.state = Remembered(loaded if form else {}, None if method is None else method.state)

    def _checked(self, moment: str, key: Any, value: Any) -> torch.Tensor:
        where = f"{self.name} state: {moment} of {key!r}"
        check_tensor(where, key, value)
        if moment == "v" and (value < 0).any():
            raise InputError(f"{where} has negative values")
        return value.detach().to(wide_dtype(value.dtype), copy=True)


def _difference(value: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    dtype = wide_dtype(value.dtype)
    return value.to(dtype) - g.detach().to(dtype)


def _magnitude(tensor: torch.Tensor) -> float:
    """The largest absolute value; NaN if any element is"""
    if not tensor.numel():
        return 0.0
    low, high = (x.item() for x in tensor.aminmax())
    return max(-low, high)


def _is_finite(tensor: torch.Tensor) -> bool:
    return _magnitude(tensor) < INFINITY


def _weights_from(name: str, given: str | Mapping[str, Any] | Aggregator) -> Aggregator:
    """The method that gives the weights: by name, by name and options ({"method": name, option: value}), or made"""
    if isinstance(given, str):
        method = aggregator(given)
    elif isinstance(given, Mapping) and isinstance(given.get("method"), str):
        method = aggregator(**{("name" if key == "method" else key): value for key, value in given.items()})
    elif isinstance(given, Aggregator):
        method = given
    else:
        raise ValueError(f"{name}: weights={given!r}; expected the name of a method, or an aggregator")
    ignored = [f.name for f in dataclasses.fields(Aggregator) if f.init and getattr(method, f.name) != f.default]
    if ignored:
        raise ValueError(f"{name}: give {', '.join(ignored)} to {name} itself, not to the method of its weights")
    if method.produces != "global" or type(method).combine is not Aggregator.combine:
        raise ValueError(f"{name}: weights={method.name!r} does not give weights for one global model")
    return method


def _less_global(weights: Weights) -> Weights:
    """The same aggregate less the global model; what is not a parameter stays as it is"""
    return dataclasses.replace(
        weights,
        center=-1.0 if weights.center is None else weights.center - 1.0,
        others=weights.values if weights.others is None else weights.others,
    )
