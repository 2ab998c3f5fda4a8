"""The native kernels for CPU tensors: the names and contracts of reference.py, on addresses."""

from __future__ import annotations

import os

import numpy as np
import torch

from fastagg._engine.native import why_missing
from fastagg._engine.table import Table

try:
    from fastagg import _cpu
except ImportError as error:
    raise ImportError(why_missing("_cpu", error)) from error

_level = os.environ.get("FASTAGG_SIMD")
if _level and not _cpu.set_simd(_level):
    raise ValueError(f"FASTAGG_SIMD={_level!r}: expected auto, {', '.join(_cpu.simd_levels())}")


def why_not(device: torch.device) -> str:
    return "" if device.type == "cpu" else f"it cannot read tensors on {device}"


def gram(table: Table, layer: np.ndarray, layers: int, per_layer: bool) -> torch.Tensor:
    out = np.empty((layers if per_layer else 1, table.K + 1, table.K + 1))
    _cpu.gram(*_inputs(table), table.center_address, layer, per_layer, out, torch.get_num_threads())
    return torch.from_numpy(out)


def mix(
    table: Table, weights: torch.Tensor, row: np.ndarray, out: list[list[torch.Tensor]],
    not_finite: torch.Tensor | None = None,
) -> None:  # fmt: skip
    _cpu.mix(
        *_inputs(table), _float64(weights), row, _addresses(out), _not_finite_array(table, not_finite),
        torch.get_num_threads(),
    )  # fmt: skip


def gram_mix(
    table: Table, layer: np.ndarray, layers: int, per_layer: bool, weights: torch.Tensor, row: np.ndarray,
    out: list[list[torch.Tensor]], not_finite: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    result = np.empty((layers if per_layer else 1, table.K + 1, table.K + 1))
    _cpu.gram_mix(
        *_inputs(table), table.center_address, layer, per_layer, result,
        _float64(weights), row, _addresses(out), _not_finite_array(table, not_finite), torch.get_num_threads(),
    )  # fmt: skip
    return torch.from_numpy(result)


def gram_times(
    table: Table, layer: np.ndarray, layers: int, per_layer: bool, weights: torch.Tensor, row: np.ndarray,
    out: list[list[torch.Tensor]] | None = None, not_finite: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    w = _float64(weights)
    products = np.empty((layers if per_layer else 1, table.K + 1, 2 + w.shape[1]))
    _cpu.gram_times(
        *_inputs(table), table.center_address, layer, per_layer, products, w, row,
        None if out is None else _addresses(out), _not_finite_array(table, not_finite), torch.get_num_threads(),
    )  # fmt: skip
    return torch.from_numpy(products)


def ranked_means(
    table: Table, means: np.ndarray, row: np.ndarray, out: list[list[torch.Tensor]],
    not_finite: torch.Tensor | None = None, mixing: np.ndarray | None = None,
) -> None:  # fmt: skip
    if mixing is not None:
        mixing = np.hstack([mixing, 1 - mixing.sum(1, keepdims=True)])  # [R, K + 1]
    _cpu.ranked_means(
        *_inputs(table), None if table.center is None else table.center_address,
        np.ascontiguousarray(means, dtype=np.int64), row, _addresses(out), _not_finite_array(table, not_finite), mixing,
        torch.get_num_threads(),
    )  # fmt: skip


def dots(table: Table, left: list[list[torch.Tensor]], row: np.ndarray, rows: int) -> torch.Tensor:
    result = np.empty((rows, len(left), table.K))
    _cpu.dots(*_inputs(table), _addresses(left), row, result, torch.get_num_threads())
    return torch.from_numpy(result)


def _inputs(table: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return table.client_address, table.layout.numel, table.layout.codes


def _addresses(tensors: list[list[torch.Tensor]]) -> np.ndarray:  # [M, T]
    return np.array([[t.data_ptr() for t in row] for row in tensors], dtype=np.int64).reshape(len(tensors), -1)


def _not_finite_array(table: Table, not_finite: torch.Tensor | None) -> np.ndarray:
    """Where the kernels mark tensors with results that are not finite, which they always do: the caller's array, or
    one that nobody reads"""
    return np.zeros(table.T, np.uint8) if not_finite is None else not_finite.numpy()


def _float64(weights: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(weights.detach().cpu().numpy(), dtype=np.float64)
