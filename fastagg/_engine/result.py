"""What an aggregation returns, and where it is written."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastagg._engine import large_pages
from fastagg._engine.hints import prefix_hint
from fastagg._engine.table import InputError, StateDict, Table, as_tensor, check_memory, scan

if TYPE_CHECKING:
    from fastagg._engine.gram import Gram


class Result(dict):
    """A state dict (`model.load_state_dict(result)` takes it as it is) that also says how it came about.

    weights   the clients' weights: [K], or [L, K] when they differ by layer
    layers    names of the L layers when weights differ by layer, else None
    gram      the Gram, where the method computed one, else None; row k + 1 is client k's, as in weights
    logits    the state an optimising method carries to its next round, else None
    dropped   ids of clients that were left out because they were not finite, or too large (on_nonfinite="drop")

    All that has an entry for every client has it for every client given, in the order given. Of a client that was
    dropped, the weight is 0, and so are its row and column of the Gram, which lists it in .absent:
    fastagg.diagnostics(result.gram, result.weights) is that of the others.

    Pickling (torch.save, multiprocessing) keeps the tensors only, as a plain OrderedDict, so that
    `torch.load(..., weights_only=True)` reads the file back without knowing of fastagg.
    """

    weights: torch.Tensor | None = None
    layers: tuple[str, ...] | None = None
    gram: Gram | None = None
    logits: torch.Tensor | None = None
    dropped: Sequence[Any] = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(self.items())

    def __deepcopy__(self, memo: dict) -> Result:
        other = Result((key, copy.deepcopy(value, memo)) for key, value in self.items())
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def copy(self) -> Result:
        other = Result(self)
        other.__dict__.update(self.__dict__)
        return other

    __copy__ = copy

    def __repr__(self) -> str:
        return f"Result({len(self)} tensors, weights={self.weights})"


class Results(list):
    """Several state dicts of one round, each a Result: a model per client, or per cluster.

    mixing     [M, K]: model m is sum_k mixing[m, k] w_k; [L, M, K] when it differs by layer
    layers     names of the L layers when mixing differs by layer, else None
    gram       the Gram, where the method computed one, else None; as in Result
    clusters   for methods that group clients: a list of lists of client ids, model m is that of clusters[m]
    dropped    ids of clients that were left out because they were not finite; where there is a model per client, theirs
               is None
    """

    mixing: torch.Tensor | None = None
    layers: tuple[str, ...] | None = None
    gram: Gram | None = None
    clusters: list[list[Any]] | None = None
    dropped: Sequence[Any] = ()


def allocate(table: Table, outputs: int) -> list[list[torch.Tensor]]:
    """[M][T] fresh tensors in the form of the table's."""
    like = table.clients[0]
    with torch.no_grad():
        made = [[torch.empty_like(t, memory_format=torch.contiguous_format) for t in like] for _ in range(outputs)]
    for row in made:
        large_pages.ask_for(row)
    return made


def check_out(table: Table, out: StateDict | list[StateDict], outputs: int) -> list[list[torch.Tensor]]:
    """The tensors of `out`, once it is certain that writing them loses nothing."""
    outs = list_of(out)
    if len(outs) != outputs:
        raise InputError(f"out: {len(outs)} state dicts given, {outputs} needed")
    address = np.empty((table.T, outputs), dtype=np.int64)
    tensors = [_check_one(table, sd, "out" if outputs == 1 else f"out[{m}]", address, m) for m, sd in enumerate(outs)]
    _check_overlap(table, address)
    _mark_written([tensor for row in tensors for tensor in row if not tensor.is_inference()])
    return tensors


def _mark_written(tensors: list[torch.Tensor]) -> None:
    """A graph that saved one of them must notice, as with any in-place write."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # before torch 2.6, one at a time
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)


def list_of(out: StateDict | list[StateDict]) -> list[StateDict]:
    return [out] if isinstance(out, Mapping) else list(out)


def _check_one(table: Table, sd: StateDict, who: str, address: np.ndarray, m: int) -> list[torch.Tensor]:
    layout = table.layout
    if len(sd) != table.T or any(key not in sd for key in layout.keys):
        wrong = next(iter(set(layout.keys) ^ set(sd)))
        fault = "missing" if wrong in layout.keys else "not in the model"
        raise InputError(f"{who}: key {wrong!r} is {fault}{prefix_hint(sd, layout.keys)}")
    row, odd = scan(sd, layout, table.device, address, m)
    for t in odd:
        key = layout.keys[t]
        if not isinstance(sd[key], torch.Tensor | np.ndarray):
            raise InputError(f"{who}: key {key!r} is a {type(sd[key]).__name__}, expected a tensor or array")
        if isinstance(sd[key], np.ndarray) and not sd[key].flags.writeable:
            raise InputError(f"{who}: key {key!r} is a read-only array")
        if isinstance(sd[key], np.ndarray) and not (sd[key].flags.c_contiguous and sd[key].dtype.isnative):
            raise InputError(f"{who}: key {key!r} is not contiguous, or not of this machine's byte order")
        tensor = as_tensor(sd[key], who, key)
        found = (tuple(tensor.shape), tensor.dtype, tensor.device)
        expected = (layout.shapes[t], layout.dtypes[t], table.device)
        if found != expected:
            raise InputError(f"{who}: key {key!r} is {_form(found)}, expected {_form(expected)}")
        check_memory(tensor, who, key)
        if not tensor.is_contiguous() or tensor.is_neg():
            raise InputError(f"{who}: key {key!r} is not contiguous")
        address[t, m] = tensor.data_ptr()
        row[t] = tensor
    for key, tensor in zip(layout.keys, row, strict=True):
        check_memory(tensor, who, key)  # the native scan sees storages that were freed, not those made smaller
        if tensor.requires_grad:
            raise InputError(f"{who}: key {key!r} requires grad; pass a former result, not a model's parameters")
    return row


def _form(form: tuple) -> str:
    shape, dtype, device = form
    return f"{dtype} {shape} on {device}"


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
        values = [_to_numpy(t) if wanted else t for t, wanted in zip(tensors, table.as_numpy, strict=True)]
    result = Result(zip(table.layout.keys, values, strict=True))
    if table.metadata is not None:
        about["_metadata"] = table.metadata
    result.__dict__.update(about)
    return result


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes  # the caller's arrays have its dtype, so it is there

    return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
