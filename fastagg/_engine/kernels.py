"""The kernels on a table of models: gram, mix, gram_mix, gram_times, ranked_means, by whichever backend serves the
table's device."""

from __future__ import annotations

import numpy as np
import torch

from fastagg._engine import backends, nonfinite
from fastagg._engine.gram import Gram
from fastagg._engine.outputs import allocate, check_out, finish, list_of
from fastagg._engine.result import Result
from fastagg._engine.table import Out, Table, as_tensor
from fastagg._engine.unformed import UnformedGram


def gram_of(table: Table, layerwise: bool, backend: str | None = None) -> Gram:
    layout = table.layout
    matrix = backends.choose(table.device, backend).gram(table, layout.gram_layer, len(layout.layers), layerwise)
    return formed(table, layerwise, matrix)


def mix_of(
    table: Table, weights, row: np.ndarray, out: Out = None, *, backend: str | None = None, check: bool = False,
    blame: Table | None = None,
) -> list[Result]:  # fmt: skip
    """weights [S, M, K] float64; row [T] says which of the S each tensor takes.

    check   raise where a client is not finite; blame is the table whose clients are looked at then, if another
    """
    tensors, outs = _outputs(table, weights.shape[1], out)
    marks = nonfinite.marks(table, check)
    backends.choose(table.device, backend).mix(table, _tensor(weights), row, tensors, marks)
    nonfinite.check_outputs(blame or table, marks)
    return [finish(table, t, o) for t, o in zip(tensors, outs, strict=True)]


def gram_mix_of(
    table: Table, layerwise: bool, weights, row: np.ndarray, out: Out = None, *, backend: str | None = None,
    check: bool = False,
) -> tuple[Gram, list[Result]]:  # fmt: skip
    layout = table.layout
    tensors, outs = _outputs(table, weights.shape[1], out)
    marks = nonfinite.marks(table, check)
    matrix = backends.choose(table.device, backend).gram_mix(
        table, layout.gram_layer, len(layout.layers), layerwise, _tensor(weights), row, tensors, marks
    )
    nonfinite.check_outputs(table, marks)
    return formed(table, layerwise, matrix), [finish(table, t, o) for t, o in zip(tensors, outs, strict=True)]


def gram_times_of(
    table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out = None, *,
    backend: str | None = None, check: bool = False, mix: bool = False,
) -> tuple[torch.Tensor, list[Result]]:  # fmt: skip
    """The columns of reference.gram_times, on the host: [L or 1, K+1, 2+M]; and with mix, the models"""
    layout = table.layout
    tensors, outs = _outputs(table, weights.shape[1], out) if mix else (None, [])
    marks = nonfinite.marks(table, check and mix)
    columns = backends.choose(table.device, backend).gram_times(
        table, layout.gram_layer, len(layout.layers), layerwise, _tensor(weights), row, tensors, marks
    )
    nonfinite.check_outputs(table, marks)
    return columns.cpu(), [finish(table, t, o) for t, o in zip(tensors or [], outs, strict=True)]


def ranked_means_of(
    table: Table, means: np.ndarray, row: np.ndarray, out: Out = None, *, into: list[Result] | None = None,
    mixing: np.ndarray | None = None, backend: str | None = None,
) -> list[Result]:  # fmt: skip
    """means [S, M, 3] as in reference.ranked_means; row [T] says which of the S each tensor takes, -1: none. Raises
    where a client is not finite.

    into   results of which the tensors with a row are replaced; all take the same mean if there is but one
    """
    M = means.shape[1]
    tensors, outs = _outputs(table, M, out) if into is None else (tensors_of(table, into), into)
    marks = nonfinite.marks(table)
    stats = np.broadcast_to(means, (len(means), len(tensors), 3))
    backends.choose(table.device, backend).ranked_means(table, stats, row, tensors, marks, mixing)
    nonfinite.check_outputs(table, marks)
    return into or [finish(table, t, o) for t, o in zip(tensors, outs, strict=True)]


def tensors_of(table: Table, results: list[Result]) -> list[list[torch.Tensor]]:
    keys = table.layout.keys
    return [[as_tensor(result[key], "the result", key).detach() for key in keys] for result in results]


def unformed(
    table: Table, layerwise: bool, columns: np.ndarray, weights: np.ndarray, numel: torch.Tensor | None = None
) -> UnformedGram:
    """The Gram of which columns [L or 1, K+1, 2+M] are known, for weights [S, M, K] of which tensors take row 0 or, if
    layer-wise, that of their layer"""
    numel = table.layout.gram_numel[0] if numel is None else numel
    if not layerwise:
        return UnformedGram.of(columns[0], weights[0], numel.sum())
    L = len(table.layout.layers)
    return UnformedGram.of(columns, np.broadcast_to(weights[:L], (L, *weights.shape[1:])), numel, table.layout.layers)


def _tensor(weights) -> torch.Tensor:
    """An array as a tensor where it is: torch.as_tensor would move it to torch's default device"""
    return weights if isinstance(weights, torch.Tensor) else torch.from_numpy(np.asarray(weights))


def rows(table: Table, layerwise: bool) -> np.ndarray:
    """Which row of the weights each tensor takes: its layer's, or the only one. [T]"""
    return table.layout.layer if layerwise else np.zeros(table.T, dtype=np.int32)


def formed(table: Table, layerwise: bool, matrix: torch.Tensor) -> Gram:
    """The Gram of which matrix is [L or 1, K+1, K+1]"""
    of_layers, of_model = table.layout.gram_numel
    if layerwise:
        return Gram(matrix, of_layers, table.layout.layers)
    return Gram(matrix[0], of_model)


def _outputs(table: Table, M: int, out: Out) -> tuple[list[list[torch.Tensor]], list]:
    if out is None:
        return allocate(table, M), [None] * M
    outs = list_of(out)
    return check_out(table, outs, M), outs


def dots_of(table: Table, left: list[torch.Tensor]) -> torch.Tensor:
    """<left, w_k> for every client: [K]"""
    return backends.choose(table.device).dots(table, [left], rows(table, False), 1)[0, 0]
