"""The kernels as torch.library operators, so that autograd and torch.compile see them. `import fastagg.ops` registers
them; `import fastagg` alone does so only when it comes after `import torch`, or once a name of fastagg was used.

    fastagg::gram(center, clients, layer, layers, per_layer) -> [L or 1, K+1, K+1] float64
    fastagg::mix(clients, weights [S, M, K], row) -> M * T tensors                  differentiable
    fastagg::gram_mix(center, clients, layer, layers, per_layer, weights, row) -> (Gram, M * T tensors)
    fastagg::dots(left, clients, row, rows) -> [S, M, K] float64                    differentiable; the gradient of mix

A list of tensors is flat: client k's tensor t is clients[k * T + t]. The public functions of core.py call a backend
directly with a table of addresses and come here only when a gradient is wanted: handing 1,240 tensors through the
dispatcher costs more than aggregating a small model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastagg._engine import backends
from fastagg._engine import table as tables
from fastagg._engine.dtypes import FLOATING
from fastagg._engine.table import InputError, Table


def _op(name: str, schema: str):
    # the schema is written out: torch 2.4 cannot read it off annotations such as list[Tensor]
    return torch.library.custom_op(f"fastagg::{name}", mutates_args=(), schema=schema)


def _table(center: Sequence[Tensor] | None, clients: Sequence[Tensor], T: int) -> Table:
    """The table of flat lists: tensor t is key str(t)"""
    center_sd = None if center is None else _models("center", center, T)[0]
    # autograd may well hand over one gradient for two outputs
    return tables.build(center_sd, _models("client", clients, T), hints=False)


def _models(what: str, flat: Sequence[Tensor], T: int) -> list[dict[str, Tensor]]:
    if T == 0 or not flat or len(flat) % T:
        raise InputError(f"{len(flat)} {what} tensors do not divide into models of {T} tensors")
    return [{str(t): x for t, x in enumerate(flat[at : at + T])} for at in range(0, len(flat), T)]


def _empty(clients: Sequence[Tensor], T: int, M: int) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(M) for x in clients[:T]]


def _nested(flat: Sequence[Tensor], T: int) -> list[list[Tensor]]:
    return [list(flat[at : at + T]) for at in range(0, len(flat), T)]


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@_op("gram", "(Tensor[] center, Tensor[] clients, int[] layer, int layers, bool per_layer) -> Tensor")
def gram(center: list[Tensor], clients: list[Tensor], layer: list[int], layers: int, per_layer: bool) -> Tensor:
    table = _table(center, clients, len(center))
    return backends.choose(table.device).gram(table, _int32(layer), layers, per_layer)


@gram.register_fake
def _(center, clients, layer, layers, per_layer):
    R = len(clients) // len(center) + 1
    return center[0].new_empty((layers if per_layer else 1, R, R), dtype=torch.float64)


@_op("mix", "(Tensor[] clients, Tensor weights, int[] row) -> Tensor[]")
def mix(clients: list[Tensor], weights: Tensor, row: list[int]) -> list[Tensor]:
    T = len(row)
    table = _table(None, clients, T)
    out = _empty(clients, T, weights.shape[1])
    backends.choose(table.device).mix(table, weights.double(), _int32(row), _nested(out, T))
    return out


@mix.register_fake
def _(clients, weights, row):
    return _empty(clients, len(row), weights.shape[1])


@_op(
    "gram_mix",
    "(Tensor[] center, Tensor[] clients, int[] layer, int layers, bool per_layer, Tensor weights, int[] row)"
    " -> (Tensor, Tensor[])",
)
def gram_mix(
    center: list[Tensor], clients: list[Tensor], layer: list[int], layers: int, per_layer: bool,
    weights: Tensor, row: list[int],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    T = len(center)
    table = _table(center, clients, T)
    out = _empty(clients, T, weights.shape[1])
    matrix = backends.choose(table.device).gram_mix(
        table, _int32(layer), layers, per_layer, weights.double(), _int32(row), _nested(out, T)
    )
    return matrix, out


@gram_mix.register_fake
def _(center, clients, layer, layers, per_layer, weights, row):
    R = len(clients) // len(center) + 1
    matrix = center[0].new_empty((layers if per_layer else 1, R, R), dtype=torch.float64)
    return matrix, _empty(clients, len(center), weights.shape[1])


@_op("dots", "(Tensor[] left, Tensor[] clients, int[] row, int rows) -> Tensor")
def dots(left: list[Tensor], clients: list[Tensor], row: list[int], rows: int) -> Tensor:
    T = len(row)
    table = _table(None, clients, T)
    form = list(zip(table.layout.shapes, table.layout.dtypes, strict=True))
    plain = [
        [
            tables.checked(tables.as_tensor(x, "left", key), *form[t], table.device, "left", key)
            for t, (key, x) in enumerate(model.items())
        ]
        for model in _models("left", left, T)
    ]
    return backends.choose(table.device).dots(table, plain, _int32(row), rows)


@dots.register_fake
def _(left, clients, row, rows):
    T = len(row)
    return left[0].new_empty((rows, len(left) // T, len(clients) // T), dtype=torch.float64)


# The gradients of mix and dots are mixes and dots again, so both can be differentiated any number of times:
#     y[m] = sum_k w[m, k] x[k]:        dx[k] = sum_m w[m, k] dy[m],    dw[m, k] = <dy[m], x[k]>
#     p[m, k] = <v[m], x[k]>:           dx[k] = sum_m dp[m, k] v[m],    dv[m] = sum_k dp[m, k] x[k]


def _save_mix(ctx, inputs, output):
    clients, weights, ctx.row = inputs
    ctx.save_for_backward(*clients, weights)
    ctx.mark_non_differentiable(*(x for x in output if x.dtype not in FLOATING))


def _mix_backward(ctx, grads):
    *clients, weights = ctx.saved_tensors
    T = len(ctx.row)
    left = [
        torch.zeros_like(clients[i % T]) if g is None else g.to(clients[i % T].dtype).contiguous()
        for i, g in enumerate(grads)
    ]
    of_clients, of_weights = [None] * len(clients), None
    if any(ctx.needs_input_grad[0]):
        of_clients = _floating(torch.ops.fastagg.mix(left, weights.mT, ctx.row))
    if ctx.needs_input_grad[1]:
        of_weights = torch.ops.fastagg.dots(left, clients, ctx.row, weights.shape[0]).to(weights)
    return of_clients, of_weights, None


def _save_dots(ctx, inputs, output):
    left, clients, ctx.row, _ = inputs
    ctx.save_for_backward(*left, *clients)
    ctx.lefts = len(left)


def _dots_backward(ctx, grad):
    left, clients = ctx.saved_tensors[: ctx.lefts], ctx.saved_tensors[ctx.lefts :]
    of_left, of_clients = [None] * len(left), [None] * len(clients)
    if any(ctx.needs_input_grad[0]):
        of_left = _floating(torch.ops.fastagg.mix(list(clients), grad, ctx.row))
    if any(ctx.needs_input_grad[1]):
        of_clients = _floating(torch.ops.fastagg.mix(list(left), grad.mT, ctx.row))
    return of_left, of_clients, None, None


def _floating(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients; integers have none"""
    return [x if x.dtype in FLOATING else None for x in tensors]


mix.register_autograd(_mix_backward, setup_context=_save_mix)
dots.register_autograd(_dots_backward, setup_context=_save_dots)
