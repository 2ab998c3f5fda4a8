"""Which implementation of the kernels serves a call, and why another one does not."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from typing import Protocol, cast

import numpy as np
import torch

from fastagg._engine.backends import reference
from fastagg._engine.table import Table

NAMES = ("auto", "cpu", "cuda", "triton", "reference")
# What "auto" tries before the reference, in this order, by the kind of device the tensors are on.
PREFERENCE = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
_chosen = "auto"


class Backend(Protocol):
    """A module with the kernels; reference.py says what each of them computes."""

    __name__: str

    def why_not(self, device: torch.device) -> str:
        """Why it cannot serve tensors on this device; empty if it can"""
        ...

    def gram(self, table: Table, layer: np.ndarray, layers: int, per_layer: bool) -> torch.Tensor: ...

    def mix(
        self,
        table: Table,
        weights: torch.Tensor,
        row: np.ndarray,
        out: list[list[torch.Tensor]],
        not_finite: torch.Tensor | None = None,
    ) -> None: ...

    def gram_mix(
        self,
        table: Table,
        layer: np.ndarray,
        layers: int,
        per_layer: bool,
        weights: torch.Tensor,
        row: np.ndarray,
        out: list[list[torch.Tensor]],
        not_finite: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def gram_times(
        self,
        table: Table,
        layer: np.ndarray,
        layers: int,
        per_layer: bool,
        weights: torch.Tensor,
        row: np.ndarray,
        out: list[list[torch.Tensor]] | None = None,
        not_finite: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def ranked_means(
        self,
        table: Table,
        means: np.ndarray,
        row: np.ndarray,
        out: list[list[torch.Tensor]],
        not_finite: torch.Tensor | None = None,
        mixing: np.ndarray | None = None,
    ) -> None: ...

    def dots(self, table: Table, left: list[list[torch.Tensor]], row: np.ndarray, rows: int) -> torch.Tensor: ...


def set_backend(name: str) -> None:
    """Chooses the kernels of every later call: "auto" (the fastest for where the tensors are), "cpu", "cuda", "triton"
    or "reference"."""
    global _chosen
    _chosen = _known(name)


@cache
def load(name: str) -> tuple[Backend | None, str]:
    """The module of a backend, loaded when it is first wanted, or None and why there is none."""
    try:
        return cast(Backend, importlib.import_module(f"fastagg._engine.backends.{name}")), ""
    except ImportError as error:
        return None, str(error)
    except Exception as error:  # a broken installation of Triton must not keep others from serving
        if name != "triton":
            raise
        return None, f"{type(error).__name__}: {error}"


cpu, _ = load("cpu")


def why_not(name: str, device: torch.device) -> str:
    """Why a backend cannot serve tensors on a device; empty if it can."""
    if name == "reference":
        return ""
    module, why = load(name)
    return why if module is None else module.why_not(device)


def choose(device: torch.device, name: str | None = None) -> Backend:
    name = _chosen if name is None else _known(name)
    if name == "auto":
        return _auto(device)
    why = why_not(name, device)
    if why:
        raise RuntimeError(f"backend {name!r} is not available: {why}")
    return _module(name)


@cache
def _auto(device: torch.device) -> Backend:
    refused = []
    for name in PREFERENCE.get(device.type, ()):
        why = why_not(name, device)
        if not why:
            return _module(name)
        refused.append(f"{name}: {why}")
    if refused:
        warnings.warn(
            f"fastagg: the much slower reference serves tensors on {device} ({'; '.join(refused)})", stacklevel=4
        )
    return reference


def _module(name: str) -> Backend:
    """Of a backend that why_not() says nothing against"""
    module = reference if name == "reference" else load(name)[0]
    assert module is not None
    return module


def availability() -> dict[str, str]:
    """Each backend and 'available', or why it is not."""
    cpu_, gpu = torch.device("cpu"), torch.device("cuda", 0)
    return {name: _said(why_not(name, cpu_ if name == "cpu" else gpu)) for name in NAMES if name != "auto"}


def serves() -> dict[str, str]:
    """Which backend "auto" takes for tensors on the CPU, and on every GPU there is"""
    devices = [torch.device("cpu")] + [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {str(device): _auto(device).__name__.rpartition(".")[2] for device in devices}


def _said(why: str) -> str:
    return f"not available: {why}" if why else "available"


def _known(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"unknown backend {name!r}; expected one of {', '.join(NAMES)}")
    return name
