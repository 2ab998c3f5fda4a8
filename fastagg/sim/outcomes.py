"""Losses and metrics of a model's outputs, those that a run has if it is told no others, and evaluation.

Both are functions of outputs [N, ...] and targets [N, ...] that return one value for each sample, or one for all.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastagg._engine.checks import check_integer
from fastagg.sim.devices import float64
from fastagg.sim.workers import one_thread, spread

Measure = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return (as_targets(outputs, y) - y).square()


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).float()


def explained(outputs: Tensor, y: Tensor) -> Tensor:
    """R^2: the part of the targets' variance that the outputs explain; 0 where all targets are the same"""
    around = (y - y.mean(0)).square().sum()
    missed = squared_error(outputs, y).sum()
    return torch.where(around > 0, 1 - missed / around, 0.0)


def as_targets(outputs: Tensor, y: Tensor) -> Tensor:
    """[N, 1] for targets [N], which would otherwise be subtracted pair by pair"""
    if outputs.numel() != y.numel():
        raise ValueError(
            f"outputs {tuple(outputs.shape)} do not fit targets {tuple(y.shape)}, values to predict (classes are "
            "integers); give a loss of your own"
        )
    return outputs.reshape(y.shape)


def usual_loss(y: Tensor) -> Measure:
    """Cross-entropy for classes, the squared error for numbers"""
    return squared_error if y.is_floating_point() else cross_entropy


def usual_metric(y: Tensor) -> Measure:
    return explained if y.is_floating_point() else accuracy


def check_samples(x: Tensor, y: Tensor) -> None:
    whole = not (x.is_complex() or x.dtype == torch.bool)
    if not whole or not (y.dtype == torch.int64 or y.is_floating_point()) or len(x) != len(y) or len(x) == 0:
        found = f"{x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}"
        raise ValueError(
            f"x and y are {found}; expected floats or integers [N, ...], and int64 classes or floats [N, ...], "
            "at least one sample"
        )


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Where the model's outputs are computed"""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def is_convolutional(model: nn.Module, x: Tensor) -> bool:
    """Images for convolutions, which take half the time if the channels of a pixel are next to each other in memory"""
    return x.dim() == 4 and x.is_floating_point() and any(isinstance(m, nn.Conv2d) for m in model.modules())


def copied(model: nn.Module, device: torch.device, images: bool) -> nn.Module:
    """On the device, with the weights of convolutions as images have them in memory"""
    model = copy.deepcopy(model).to(device)
    return cast(Any, model).to(memory_format=torch.channels_last) if images else model


def by_pixel(x: Tensor) -> Tensor:
    """Images [N, C, H, W] as [N, H, W, C]"""
    return x.permute(0, 2, 3, 1).contiguous()


def by_channel(x: Tensor) -> Tensor:
    """[N, H, W, C] as [N, C, H, W], left where they are in memory (torch's channels_last, also where C is 1)"""
    return x.permute(0, 3, 1, 2)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients; afterwards every module is in the mode that it was in"""
    training = [module.training for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in zip(model.modules(), training, strict=True):
            module.training = mode


@dataclass(frozen=True)
class Outcomes:
    """What a model makes of samples"""

    outputs: Tensor
    y: Tensor
    loss: Measure
    metric: Measure

    def of(self, rows: np.ndarray | None = None) -> tuple[float, float]:
        """Metric and mean loss, of all samples or of some"""
        outputs, y = self.outputs, self.y
        with one_thread():
            if rows is not None:
                chosen = torch.from_numpy(rows).to(y.device)
                outputs, y = outputs[chosen], y[chosen]
            return mean_of(self.metric(outputs, y)), mean_of(self.loss(outputs, y))


def mean_of(values: Any) -> float:
    """Of a tensor, an array or a number"""
    return float(float64(values).mean()) if isinstance(values, Tensor) else float(np.mean(values))


def check_measures(model: nn.Module, x: Tensor, y: Tensor, loss: Measure, metric: Measure | None) -> None:
    """That both can do with what the model gives for samples like these. Nothing is changed"""
    with evaluating(model):
        outputs = model(x[:2])
        check_pairs("loss", loss, outputs, y[:2])
        value = loss(outputs, y[:2])
        if not isinstance(value, Tensor) or (value.dim() and len(value) != len(y[:2])):
            found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"sim: the loss of 2 samples is {found}; expected a tensor, a value of each or their mean")
        if metric is not None:
            check_pairs("metric", metric, outputs, y[:2])
            value = metric(outputs, y[:2])
            if not isinstance(value, Tensor | np.ndarray | np.generic | float | int):
                raise ValueError(
                    f"sim: the metric of 2 samples is a {type(value).__name__}; expected a number of each or of all"
                )


def check_pairs(what: str, measure: Measure, outputs: Any, y: Tensor) -> None:
    """That outputs [N, 1] are not compared with all targets [N] each, as by nn.MSELoss, which only warns"""
    alike = isinstance(outputs, Tensor) and outputs.numel() == y.numel()
    if not alike or not y.is_floating_point() or outputs.shape == y.shape:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            given, paired = (mean_of(measure(o, y)) for o in (outputs, outputs.reshape(y.shape)))
        except Exception:  # whatever the user's code raises where it wants one of these shapes
            return
    if math.isfinite(given) and math.isfinite(paired) and not math.isclose(given, paired, rel_tol=1e-3):
        raise ValueError(
            f"sim: the {what} compares each output with all targets: outputs are {tuple(outputs.shape)} and targets "
            f"{tuple(y.shape)} for {len(y)} samples; make the model's outputs like the targets, or the {what} a "
            "function that does: lambda outputs, y: mse_loss(outputs[:, 0], y)"
        )


def outcomes(
    model: nn.Module, state: Mapping[str, Tensor], x: Tensor, y: Tensor, batch_size: int = 200, *,
    loss: Measure | None = None, metric: Measure | None = None, precision: str = "float32",
) -> Outcomes:  # fmt: skip
    """Of the model with this state, on its device, with batches spread over torch's threads. Neither model nor state is
    changed."""
    check_samples(x, y)
    check_integer("outcomes", "batch_size", batch_size, 1)
    device = next((value.device for value in state.values()), torch.device("cpu"))
    images = is_convolutional(model, x)
    with one_thread():
        module = copied(model, device, images).eval()
        module.load_state_dict(state)  # once, for all threads: functional_call would change it under the others

    def forward(xs: Tensor) -> Tensor:
        xs = by_channel(by_pixel(xs.to(device))) if images else xs.to(device)
        with torch.no_grad(), autocast(device, precision):
            return module(xs).float() if precision == "bfloat16" else module(xs)

    outputs = torch.cat(spread(forward, x.split(batch_size)))
    return Outcomes(outputs, y.to(device), loss or usual_loss(y), metric or usual_metric(y))
