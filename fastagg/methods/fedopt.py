"""Server optimisers (Reddi et al., Alg. 5): the mean update of the clients is a gradient for an optimiser with memory.

    delta = sum_k n_k d_k
    FedAvgM      m = momentum m + delta,                              x = g + lr m
    the others   m = beta1 m + (1 - beta1) delta,                     x = g + lr m / (sqrt(v) + tau)
    FedAdam      v = beta2 v + (1 - beta2) delta^2
    FedYogi      v = v - (1 - beta2) delta^2 sign(v - delta^2)
    FedAdagrad   v = v + delta^2

with m = 0 and v = tau^2 at the start, and no bias correction. On BatchNorm's running statistics such steps would give
negative variances, so whatever is not a parameter is plainly averaged.

One read of the clients gives delta itself, subtracted before it is rounded: the difference of a rounded mean and g
would have lost its digits where clients moved little. The kernels round to the dtype of the models, which is too coarse
for 16-bit ones: their delta is summed up in float64 by a second read, and rounded once, to float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from fastagg._engine import finite
from fastagg._engine.aggregator import Aggregator, Cohort, check_number, describe, function_of
from fastagg._engine.forked import one_thread
from fastagg._engine.remembered import check_form, check_tensor
from fastagg._engine.result import Result
from fastagg._engine.table import InputError, Layout, Table, as_tensor
from fastagg._engine.wide import largest_update, wide_dtype

INFINITY = float("inf")


@dataclass(kw_only=True, eq=False)
class ServerOptimiser(Aggregator):
    """What the four share: the round, and a tensor per moment and parameter as its memory."""

    moments: ClassVar[tuple[str, ...]] = ("m", "v")

    # moment -> key of the parameter -> float32 or float64 tensor. A tensor in here is replaced, never written to.
    _memory: dict[str, dict[str, torch.Tensor]] = field(init=False, default_factory=dict, repr=False)

    @torch.no_grad()
    def round(self, cohort: Cohort, out) -> Result:
        table, n = cohort.table, cohort.n
        layout = table.layout
        params = [(int(t), layout.keys[t]) for t in np.flatnonzero(layout.is_param)]
        if self._memory:
            check_form(self.name, layout, self._memory["m"])
        wide = cohort.access.any(self.reads_twice(layout))
        [result] = cohort.mix(n[None], out=out) if wide else cohort.mix(n[None], center=-1.0, buffers=n[None], out=out)
        values = {t: as_tensor(result[key], "the result", key) for t, key in params}
        deltas = cohort.access.mean_updates(table, n, layout.is_param) if wide else dict(values)
        with one_thread():
            state, found = self._advance_all(table, params, deltas, values)
        clients = {k for t, _ in found for k in self._blamed(table, n, t)}
        cohort.access.refuse(table, sorted(clients), f"{self.name}: {found[0][1]}" if found else "")
        cohort.memory = state
        return describe(result, cohort, n)

    def _advance_all(self, table: Table, params, deltas, values) -> tuple[dict[str, dict[str, torch.Tensor]], list]:
        """Writes all new values; the new moments, and what is out of range: (tensor, words)"""
        found = [(t, f"the mean update of key {key!r} is too large for {deltas[t].dtype}")
                 for t, key in params if not self._in_range(deltas[t])]  # fmt: skip
        state: dict[str, dict[str, torch.Tensor]] = {moment: {} for moment in self.moments}
        for t, key in params if not found else ():
            new, fits = self._advance(key, table.center[t].detach(), deltas.pop(t), values[t])
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

    def _blamed(self, table: Table, n: np.ndarray, t: int) -> list[int]:
        """The clients, if they are few, that move tensor t by far the most"""
        moved = [largest_update(table.center[t], client[t]) for client in table.clients]
        return finite.dominant(np.where(n > 0, moved, 0))

    def _step(self, delta: torch.Tensor, *old: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, float]:
        """The new moments, and a step and its factor, from the old moments, which stay as they are"""
        raise NotImplementedError

    def _start(self, moment: str, key: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._memory:
            return self._memory[moment][key].to(like.device, dtype)
        first = self.tau**2 if moment == "v" else 0.0
        return torch.full(like.shape, first, dtype=dtype, device=like.device)

    def state_dict(self) -> dict[str, Any]:
        """The moments as float32 or float64 tensors by key: {"method": .., "m": {key: tensor}, "v": {key: tensor}}.

        They are copies: what the caller does to them does not reach the aggregator.
        """
        return {"method": self.name} | {
            moment: {key: tensor.clone() for key, tensor in self._memory.get(moment, {}).items()}
            for moment in self.moments
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state, self.moments)
        loaded: dict[str, dict[str, torch.Tensor]] = {}
        for moment in self.moments:
            if not isinstance(state[moment], Mapping):
                raise InputError(f"{self.name} state: {moment} is a {type(state[moment]).__name__}, expected a dict")
            loaded[moment] = {key: self._checked(moment, key, value) for key, value in state[moment].items()}
        form, *others = ({key: t.shape for key, t in tensors.items()} for tensors in loaded.values())
        for key in (key for other in others for key in form.keys() | other.keys() if form.get(key) != other.get(key)):
            raise InputError(f"{self.name} state: the moments of {key!r} differ in shape, or one is missing")
        self._memory = loaded if form else {}

    def _checked(self, moment: str, key: Any, value: Any) -> torch.Tensor:
        where = f"{self.name} state: {moment} of {key!r}"
        check_tensor(where, key, value)
        if moment == "v" and (value < 0).any():
            raise InputError(f"{where} has negative values")
        return value.detach().to(wide_dtype(value.dtype), copy=True)


def _magnitude(tensor: torch.Tensor) -> float:
    """The largest absolute value; NaN if any element is"""
    if not tensor.numel():
        return 0.0
    low, high = (x.item() for x in tensor.aminmax())
    return max(-low, high)


def _is_finite(tensor: torch.Tensor) -> bool:
    return _magnitude(tensor) < INFINITY


def _check_decay(method: str, option: str, value: Any) -> None:
    check_number(method, option, value, 0, 1)
    if value == 1:
        raise ValueError(f"{method}: {option}={value!r}; expected a number below 1")


@dataclass(kw_only=True, eq=False)
class FedAvgM(ServerOptimiser):
    """FedAvg with momentum on the server: m = momentum m + sum_k n_k d_k, the new model g + lr m.

    lr          server learning rate; 1 with momentum 0 is FedAvg
    momentum    what is left of m from one round to the next

    Only parameters take such steps, buffers are averaged. .weights are the data shares.
    """

    name = "fedavgm"
    paper = "Hsu et al., 2019"
    moments = ("m",)

    lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "lr", self.lr, 0, 1e30, strict=True)  # float32 holds no 1e300
        _check_decay(self.name, "momentum", self.momentum)

    def _is_fedavg(self) -> bool:
        return self.lr == 1 and self.momentum == 0

    def _step(self, delta: torch.Tensor, m: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, float]:
        m = torch.add(delta, m, alpha=self.momentum)
        return [m], m, self.lr


@dataclass(kw_only=True, eq=False)
class _Adaptive(ServerOptimiser):
    """Steps of m / (sqrt(v) + tau)"""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "lr", self.lr, 0, 1e30, strict=True)  # float32 holds no 1e300
        _check_decay(self.name, "beta1", self.beta1)
        _check_decay(self.name, "beta2", self.beta2)
        check_number(self.name, "tau", self.tau, 1e-18, 1e18)  # its square has to fit into float32

    def _step(
        self, delta: torch.Tensor, m: torch.Tensor, v: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, float]:
        m = torch.mul(m, self.beta1).add_(delta, alpha=1 - self.beta1)
        v = self._second(delta, v)
        step = v.sqrt().add_(self.tau)
        return [m, v], torch.div(m, step, out=step), self.lr

    def _second(self, delta: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@dataclass(kw_only=True, eq=False)
class FedAdam(_Adaptive):
    """Adam on the server, with the clients' mean update as its gradient.

    lr          server learning rate; the paper tunes it, so should you
    beta1       decay of the mean update m
    beta2       decay of its mean square v
    tau         adaptivity: added to sqrt(v), and where that starts; a small tau makes the steps of all elements alike

    Only parameters take such steps, buffers are averaged. .weights are the data shares.
    """

    name = "fedadam"
    paper = "Reddi et al., ICLR 2021"

    def _second(self, delta: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.mul(v, self.beta2).addcmul_(delta, delta, value=1 - self.beta2)


@dataclass(kw_only=True, eq=False)
class FedYogi(_Adaptive):
    """Yogi on the server: Adam whose second moment moves by at most a fraction of the new square.

    lr          server learning rate; the paper tunes it, so should you
    beta1       decay of the mean update m
    beta2       1 - beta2 of the squared update is added to v, or taken off it when v is larger than that square
    tau         adaptivity: added to sqrt(v), and where that starts; a small tau makes the steps of all elements alike

    Only parameters take such steps, buffers are averaged. .weights are the data shares.
    """

    name = "fedyogi"
    paper = "Reddi et al., ICLR 2021"

    def _second(self, delta: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        square = delta * delta
        sign = torch.sub(v, square).sign_()
        return sign.mul_(square).mul_(self.beta2 - 1).add_(v)


@dataclass(kw_only=True, eq=False)
class FedAdagrad(_Adaptive):
    """Adagrad on the server: steps shrink with the sum of all squared updates so far.

    lr          server learning rate; the paper tunes it, so should you
    beta1       decay of the mean update m; 0 as in the paper's experiments, which is no momentum
    tau         adaptivity: added to sqrt(v), and where that starts; a small tau makes the steps of all elements alike

    Only parameters take such steps, buffers are averaged. .weights are the data shares.
    """

    name = "fedadagrad"
    paper = "Reddi et al., ICLR 2021"

    lr: float = 0.1
    beta1: float = 0.0
    beta2: float = field(init=False, default=0.0, repr=False)

    def _second(self, delta: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(v, delta, delta)


fedavgm = function_of(FedAvgM)
fedadam = function_of(FedAdam)
fedyogi = function_of(FedYogi)
fedadagrad = function_of(FedAdagrad)
