"""Where the new models of a call are written: fresh tensors, or the caller's once that is known to be safe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fastagg._engine import large_pages
from fastagg._engine.checks import InputError
from fastagg._engine.result import Result
from fastagg._engine.table import Layout, StateDict, Table, extent, look_closer, scan


def allocate(table: Table, outputs: int) -> list[list[torch.Tensor]]:
    """[M][T] fresh tensors in the form of the table's."""
    like = table.clients[0] if table.center is None else table.center
    with torch.no_grad():
        made = [[torch.empty_like(t, memory_format=torch.contiguous_format) for t in like] for _ in range(outputs)]
    for row in made:
        large_pages.ask_for(row)
    return made


def check_out(table: Table, out: StateDict | Sequence[StateDict], outputs: int) -> list[list[torch.Tensor]]:
    """The tensors of `out`, once it is certain that writing them loses nothing."""
    outs = list_of(out)
    if len(outs) != outputs:
        raise InputError(f"out: {len(outs)} state dicts given, {outputs} needed")
    address = np.empty((table.T, outputs), dtype=np.int64)
    tensors, layout = [], table.layout
    for m, scanned in enumerate(scan(outs, layout, table.device, address)):
        who = "out" if outputs == 1 else f"out[{m}]"
        tensors.append(look_closer(outs[m], layout, table.device, who, address[:, m], scanned))
        _check_in_place(layout, outs[m], who, tensors[m], scanned[1])
    _check_overlap(table, address)
    _mark_written([tensor for row in tensors for tensor in row if not tensor.is_inference()])
    return tensors


def _mark_written(tensors: list[torch.Tensor]) -> None:
    """A graph that saved one of them must notice, as with any in-place write."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except (RuntimeError, TypeError):  # of torch 2.4, and 2.5: one at a time
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def list_of(out: StateDict | Sequence[StateDict]) -> list[StateDict]:
    return [out] if isinstance(out, Mapping) else list(out)


def _check_in_place(layout: Layout, sd: StateDict, who: str, row: list[torch.Tensor], odd: Iterable[int]) -> None:
    """That writing to row, [T], writes to the caller's own memory; odd are those that the scan has not recognised"""
    for t in odd:
        key, value = layout.keys[t], sd[layout.keys[t]]
        if isinstance(value, np.generic):
            raise InputError(f"{who}: key {key!r} is a {type(value).__name__}, expected a tensor or array")
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            raise InputError(f"{who}: key {key!r} is a read-only array")
        if row[t].numel() and extent(value) != extent(row[t]):  # it had to be copied
            raise InputError(f"{who}: key {key!r} is not contiguous, or not of this machine's byte order")
    for t, tensor in enumerate(row):
        if tensor.requires_grad:
            raise InputError(
                f"{who}: key {layout.keys[t]!r} requires grad; pass a former result, not a model's parameters"
            )


_apart: set[tuple] = set()  # calls, by their addresses, whose outputs are known to overlap nothing


def _check_overlap(table: Table, address: np.ndarray) -> None:  # address [T, M]
    where = address, table.client_address, table.center_address
    call = table.layout, table.center is None, *table.other_inputs, *((a.shape, a.tobytes()) for a in where)
    if call in _apart:
        return
    _look_for_overlap(table, address)
    if len(_apart) >= 32:
        _apart.clear()
    _apart.add(call)


def _look_for_overlap(table: Table, address: np.ndarray) -> None:
    size = table.layout.bytes  # [T]
    real = size > 0  # an empty tensor overlaps nothing
    start, stop = _intervals(address[real], size[real])
    if (start[1:] < stop[:-1]).any():
        raise InputError("out: two of its tensors share memory")
    inputs = table.client_address[real]
    if table.center is not None:
        inputs = np.concatenate([inputs, table.center_address[real, None]], axis=1)
    input_start, input_stop = _intervals(inputs, size[real], table.other_inputs)
    reach = np.maximum.accumulate(input_stop)  # inputs may overlap each other
    before = np.searchsorted(input_start, stop, side="left")  # inputs that start before this output stops
    hit = (before > 0) & (reach[before - 1] > start)
    if hit.any():
        t = int(np.flatnonzero((address == start[hit.argmax()]).any(1) & real)[0])
        raise InputError(f"out: key {table.layout.keys[t]!r} shares memory with an input; inputs are never modified")


def _intervals(address: np.ndarray, size: np.ndarray, more=()) -> tuple[np.ndarray, np.ndarray]:
    """[first byte, past the last) of tensors [T, n] and of more, sorted by the first"""
    extra = np.array(more, dtype=np.int64).reshape(-1, 2)
    start = np.concatenate([address.ravel(), extra[:, 0]])
    stop = np.concatenate([(address + size[:, None]).ravel(), extra[:, 1]])
    order = np.argsort(start)
    return start[order], stop[order]


def finish(table: Table, tensors: list[torch.Tensor], out: StateDict | None, **about: Any) -> Result:
    """The state dict of one output; with `out`, its very tensors under a new Result."""
    values = [out[key] for key in table.layout.keys] if out is not None else tensors
    if out is None and any(table.as_numpy):
        values = [to_numpy(t) if wanted else t for t, wanted in zip(tensors, table.as_numpy, strict=True)]
    result = Result(zip(table.layout.keys, values, strict=True))
    if table.metadata is not None:
        about["_metadata"] = table.metadata
    result.__dict__.update(about)
    return result


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes  # the caller's arrays have its dtype, so it is there

    return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
