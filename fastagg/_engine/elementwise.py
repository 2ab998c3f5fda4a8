"""What is computed for each element on its own over the clients: medians, and maxima of integers.

On the CPU this is NumPy, on the calling thread alone: in a forked child torch's threads may hang.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fastagg._engine.dtypes import FLOATING
from fastagg._engine.forked import one_thread
from fastagg._engine.result import Result
from fastagg._engine.table import Layout, Table, as_tensor

AT_ONCE = 1 << 20  # elements of all clients together that are copied at a time


def used_by(rule: str, layout: Layout) -> np.ndarray:
    """The tensors that a rule applies to, [T] bool. "median": all but the parameters; "maximum": all integers."""
    if rule == "median":
        return ~layout.is_param
    return np.array([dtype not in FLOATING for dtype in layout.dtypes], dtype=bool)


def groups(used: np.ndarray, layout: Layout, clients: int) -> list[list[int]]:
    """The tensors used, [T] bool, in runs of one dtype that are small enough to be computed with at once.

    A model has many tiny buffers: one by one, the calls would cost more than the arithmetic.
    """
    found: list[list[int]] = []
    filled: dict[torch.dtype, int] = {}
    last: dict[torch.dtype, list[int]] = {}
    for t in np.flatnonzero(used).tolist():
        dtype, size = layout.dtypes[t], int(layout.numel[t]) * clients
        if dtype not in last or filled[dtype] + size > AT_ONCE:
            last[dtype], filled[dtype] = [], 0
            found.append(last[dtype])
        last[dtype].append(t)
        filled[dtype] += size
    return found


def combine_models(rule: str, table: Table, results: Sequence[Result]) -> torch.Tensor:
    """Replaces the tensors that a rule applies to in every result; [T] uint8: where a client is not finite"""
    not_finite = torch.zeros(table.T, dtype=torch.uint8, device="cpu")  # the rules look on the host
    keys = table.layout.keys
    for group in groups(used_by(rule, table.layout), table.layout, table.K):
        outs = [[as_tensor(result[keys[t]], "the result", keys[t]) for t in group] for result in results]
        clients = [[client[t] for t in group] for client in table.clients]
        not_finite.numpy()[group] = combine_several(rule, clients, outs)
    return not_finite


@one_thread()
def combine_several(
    rule: str, clients: Sequence[Sequence[torch.Tensor]], outs: Sequence[Sequence[torch.Tensor]]
) -> np.ndarray:
    """combine() for several tensors of a dtype: clients [K][n], outs [M][n]. [n] bool: where a client is not finite."""
    if len(clients[0]) == 1:
        return np.array([not combine(rule, [c[0] for c in clients], [o[0] for o in outs])])
    with torch.no_grad():
        whole = [torch.cat([x if x.dim() == 1 else x.reshape(-1) for x in tensors]) for tensors in clients]
        result = torch.empty_like(whole[0])
    good = combine(rule, whole, [result])
    sizes = [x.numel() for x in clients[0]]
    for tensors in outs:
        for out, part in zip(tensors, result.split(sizes), strict=True):
            out.copy_(part.view(out.shape))
    if good:
        return np.zeros(len(sizes), dtype=bool)
    return np.array([not all(bool(torch.isfinite(c[i]).all()) for c in clients) for i in range(len(sizes))])


def combine(rule: str, clients: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> bool:
    """Writes the rule's result for one tensor of every client to each of the outs. False: a client is not finite.

    The median of an even number of floats is the mean of the middle two, rounded once; of integers, the lower one.
    """
    clients, outs = ([x.detach().reshape(-1) for x in tensors] for tensors in (clients, outs))
    one = clients[0]
    compute = _numpy if one.device.type == "cpu" else _torch
    step = max(AT_ONCE // len(clients), 1)
    finite = True
    for at in range(0, one.numel(), step):
        good = compute(rule, [x[at : at + step] for x in clients], [x[at : at + step] for x in outs])
        finite = finite and good
    return finite


def _numpy(rule: str, clients: list[torch.Tensor], outs: list[torch.Tensor]) -> bool:
    values = np.stack([_array(x) for x in clients])  # [K, n]
    low, high = (len(values) - 1) // 2, len(values) // 2
    finite = True
    if rule == "maximum":
        result = values.max(0)
    elif values.dtype.kind == "f":
        finite = bool(np.isfinite(values).all())
        values.sort(axis=0)
        a, b = values[low], values[high]
        with np.errstate(over="ignore", invalid="ignore"):
            result = (a + b) / 2
            result = np.where(np.isfinite(result), result, a / 2 + b / 2) if high > low else a
    else:
        values.sort(axis=0)
        result = values[low]
    for out in outs:
        _write(out, result)
    return finite


def _torch(rule: str, clients: list[torch.Tensor], outs: list[torch.Tensor]) -> bool:
    values = torch.stack([x.view(torch.uint8) if x.dtype == torch.bool else x for x in clients])  # [K, n]
    low, high = (len(values) - 1) // 2, len(values) // 2
    finite = True
    if rule == "maximum":
        result = values.amax(0)
    elif values.is_floating_point():
        finite = bool(torch.isfinite(values).all())
        values = values.sort(0).values
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        a, b = values[low].to(wide), values[high].to(wide)
        result = (a + b) / 2
        result = torch.where(torch.isfinite(result), result, a / 2 + b / 2) if high > low else a
    else:
        result = values.sort(0).values[low]
    for out in outs:
        out.copy_(result)
    return finite


def _array(x: torch.Tensor) -> np.ndarray:
    """A tensor on the CPU as an array; 16-bit floats as float32"""
    if x.dtype == torch.bfloat16:
        return (x.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    return x.numpy().astype(np.float32) if x.dtype == torch.float16 else x.numpy()


def _write(out: torch.Tensor, values: np.ndarray) -> None:
    if out.dtype == torch.bfloat16:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        out.view(torch.int16).numpy().view(np.uint16)[...] = rounded
    else:
        (out.view(torch.uint8) if out.dtype == torch.bool else out).numpy()[...] = values
