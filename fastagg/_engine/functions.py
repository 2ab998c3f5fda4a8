"""The public functions on state dicts: gram, mix, gram_mix, client_vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastagg._engine import kernels
from fastagg._engine import table as tables
from fastagg._engine.checks import InputError
from fastagg._engine.gram import Gram
from fastagg._engine.inputs import require_global
from fastagg._engine.outputs import finish
from fastagg._engine.partial import gram as gram_of_parts
from fastagg._engine.result import Result
from fastagg._engine.table import Layers, Out, Params, StateDict, Table
from fastagg._engine.unformed import UnformedGram


def gram(
    global_sd: StateDict, client_sds: Sequence[StateDict], *, layerwise: bool = False, params: Params = None,
    layers: Layers = None, partial: bool = False, backend: str | None = None,
) -> Gram:  # fmt: skip
    """Computes the centred Gram of the client models in one read: all inner products of g and the updates w_k - g.

    layerwise   compute one Gram per layer (a layer is a module: weight and bias together) instead of one for the model
    params      names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running statistics
    layers      function from the name of a tensor to the name of its layer, for another grouping
    partial     clients may hold only some of the tensors, and are compared by what they share (docs/partial.md)
    backend     the kernels to use, as in set_backend; default: what set_backend chose
    """
    table = tables.build(require_global(global_sd), client_sds, params=params, layers=layers, partial=partial)
    if table.has is not None:
        return gram_of_parts(table, layerwise, lambda pieces, by_piece: kernels.gram_of(pieces, by_piece, backend))
    return kernels.gram_of(table, layerwise, backend)


def mix(
    client_sds: Sequence[StateDict], weights: Any, *, layerwise: bool = False, layers: Layers = None, out: Out = None,
    on_nonfinite: str = "raise", backend: str | None = None,
) -> Result | list[Result]:  # fmt: skip
    """Computes weighted sums of the client models in one read.

    weights       [K]: one state dict; [M, K]: a list of M. Any numbers; they need not sum to 1. If weights is a tensor
                  that requires grad, the result is differentiable in it. The clients are constants here
                  (torch.ops.fastagg.mix, after `import fastagg.ops`, is differentiable in both). Weights on a GPU are
                  used as they are: checking that they are finite would mean waiting for the device.
    layerwise     weights are [L, K] or [L, M, K], one row per layer, in the order of the layers in client 0
    layers        as in gram
    out           a former result (or a list of them) to write in place; must not overlap an input. If this function or
                  a method raises because a client is not finite, out may already have been written.
    on_nonfinite  "raise": a NonFiniteError names a client with a NaN or an infinity, whatever its weight. On a GPU, the
                  call then waits for its result, to read one byte per tensor.
                  "pass": the result contains whatever was computed, and nothing waits for the GPU. This always applies
                  if weights require grad, and while a CUDA graph is captured.
    backend       as in gram
    Integer tensors (BatchNorm's num_batches_tracked) become the maximum over the clients.
    """
    check = _is_checked(on_nonfinite)
    table = tables.build(None, client_sds, layers=layers)
    if out is not None and isinstance(weights, torch.Tensor | np.ndarray):
        table.other_inputs.append(tables.extent(weights))  # an input as others are
    weights, several = _mix_weights(table, weights, layerwise)
    row = kernels.rows(table, layerwise)
    if weights.requires_grad:
        if out is not None:
            raise InputError("out: cannot be written in place when weights require grad")
        if backend is not None:
            raise InputError("backend: cannot be chosen per call when weights require grad; use fastagg.set_backend")
        from fastagg import ops  # noqa: F401  registers the operator

        clients = [t.detach() for client in table.clients for t in client]
        flat = torch.ops.fastagg.mix(clients, weights, row.tolist())
        results = [finish(table, flat[at : at + table.T], None) for at in range(0, len(flat), table.T)]
    else:
        results = kernels.mix_of(table, weights, row, out, backend=backend, check=check)
    _describe(results, table, weights, layerwise)
    return results if several else results[0]


def gram_mix(
    global_sd: StateDict, client_sds: Sequence[StateDict], weights: Any, *, layerwise: bool = False,
    params: Params = None, layers: Layers = None, out: Out = None, on_nonfinite: str = "raise",
    backend: str | None = None,
) -> tuple[Gram, Result | list[Result]]:  # fmt: skip
    """Computes Gram and weighted sum in the same read of the clients, for weights that are known in advance.

    Arguments are those of gram and mix; with layerwise=True both are per layer.
    """
    check = _is_checked(on_nonfinite)
    table = tables.build(require_global(global_sd), client_sds, params=params, layers=layers)
    if out is not None and isinstance(weights, torch.Tensor | np.ndarray):
        table.other_inputs.append(tables.extent(weights))  # an input as others are
    weights, several = _mix_weights(table, weights, layerwise)
    matrix, results = kernels.gram_mix_of(
        table, layerwise, weights.detach(), kernels.rows(table, layerwise), out, backend=backend, check=check
    )
    _describe(results, table, weights, layerwise, matrix)
    return matrix, results if several else results[0]


def gram_times(
    global_sd: StateDict, client_sds: Sequence[StateDict], vectors: Any, *, layerwise: bool = False,
    params: Params = None, layers: Layers = None, backend: str | None = None,
) -> UnformedGram:  # fmt: skip
    """Multiplies the Gram of the client models with vectors, in one read, without forming it.

    vectors     [K], or [M, K] for M vectors v: the products are <w_k - g, sum_j v_j (w_j - g)> for each client k; with
                layerwise=True also [L, M, K], other vectors for each layer
    Other arguments are those of gram. Returns an UnformedGram: `gram @ v` for these vectors, norms, the products with
    the global model, but no similarities of clients. Its cost grows with K, that of gram with the square of K.
    """
    table = tables.build(require_global(global_sd), client_sds, params=params, layers=layers)
    given = vectors.detach().cpu() if isinstance(vectors, torch.Tensor) else np.asarray(vectors)
    per_layer = layerwise and given.ndim == 3
    weights, _ = _mix_weights(table, given, per_layer, "vectors")
    columns, _ = kernels.gram_times_of(
        table, layerwise, weights.numpy(), kernels.rows(table, per_layer), backend=backend
    )
    return kernels.unformed(table, layerwise, columns.numpy(), weights.numpy())


def client_vectors(global_sd: StateDict, client_sds: Sequence[StateDict], *, params: Params = None) -> torch.Tensor:
    """Returns the client updates d_k = w_k - g, flattened over the parameters: [K, D]. This does materialise them."""
    table = tables.build(require_global(global_sd), client_sds, params=params)
    used = np.flatnonzero(table.layout.gram_layer >= 0)
    if not len(used):
        raise InputError("the model has no parameters: every tensor is a buffer or an integer")
    g = torch.cat([table.global_model[t].detach().reshape(-1) for t in used])
    out = torch.empty(table.K, g.numel(), dtype=g.dtype, device=table.device)
    for k, client in enumerate(table.clients):
        torch.sub(torch.cat([client[t].detach().reshape(-1) for t in used]), g, out=out[k])
    return out


def _is_checked(on_nonfinite: str) -> bool:
    if on_nonfinite not in ("raise", "pass"):
        raise InputError(f"on_nonfinite={on_nonfinite!r}; expected 'raise' or 'pass'")
    return on_nonfinite == "raise"


def _describe(results: list[Result], table: Table, weights: torch.Tensor, layerwise: bool, gram=None) -> None:
    for m, result in enumerate(results):
        result.weights = (weights[:, m] if layerwise else weights[0, m]).detach().clone()
        result.layers = table.layout.layers if layerwise else None
        result.gram = gram


def _mix_weights(table: Table, weights: Any, layerwise: bool, name: str = "weights") -> tuple[torch.Tensor, bool]:
    """weights as [S, M, K] float64, and whether the caller asked for several outputs"""
    w = weights.double() if isinstance(weights, torch.Tensor) else torch.from_numpy(np.array(weights, dtype=np.float64))
    K, L = table.K, len(table.layout.layers)
    expected = f"[L, K] or [L, M, K] with L = {L}, K = {K}" if layerwise else f"[K] or [M, K] with K = {K}"
    good = w.dim() in (2, 3) and w.shape[0] == L if layerwise else w.dim() in (1, 2)
    if not good or w.shape[-1] != K or 0 in w.shape[layerwise:]:
        raise InputError(f"{name} have shape {tuple(w.shape)}, expected {expected}")
    if w.device.type == "cpu":  # to look at others would mean to wait for their device
        for at in (~torch.isfinite(w.detach())).nonzero():
            raise InputError(f"{name}: the weight of client {int(at[-1])} is {w.detach()[tuple(at)].item()}")
    several = w.dim() == 2 + layerwise
    return (w if layerwise else w[None]).reshape(L if layerwise else 1, -1, K), several
