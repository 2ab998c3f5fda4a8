"""What both GPU backends hand to their kernels: addresses and a list of work, uploaded in one transfer, and once.

Tensors are cut into chunks, and runs of chunks are the work of one block: hundreds of tiny tensors and one huge one
both fill a GPU. Cuts depend on the tensors alone, never on the device, so that sums come out the same everywhere.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fastagg._engine.dtypes import FLOATING
from fastagg._engine.table import Layout, Table

CHUNK = 1024  # elements
MIX_ITEMS = 16384  # at most about so many blocks for a weighted sum: 8 or more for every SM, 16 waves on an A100
PRODUCT_BLOCKS = 2048  # the same for row products, times what small layers add


@dataclass(frozen=True, eq=False)
class Work:
    """Work on the tensors of some groups (layers). An item never spans two groups or two dtypes."""

    order: np.ndarray  # [n] int32: tensors that have elements, in the order items walk through them
    items: np.ndarray  # [I, 4] int32: place in order, chunk of that tensor, number of chunks, slot for its sums
    launches: tuple[tuple[int, int, int], ...]  # (dtype code, first item, number of items), one per dtype
    first_slot: np.ndarray  # [G + 1] int32: the slots of group g are first_slot[g] to first_slot[g + 1]

    @property
    def slots(self) -> int:
        return len(self.items)


def work(layout: Layout, group: np.ndarray, groups: int, most: int) -> Work:
    """The work on all tensors t with group[t] >= 0, as about `most` items, or one per group if those are more."""
    return _work(layout, group.astype(np.int32).tobytes(), groups, most)


@lru_cache(maxsize=64)
def _work(layout: Layout, group_bytes: bytes, groups: int, most: int) -> Work:
    group = np.frombuffer(group_bytes, dtype=np.int32)
    used = np.flatnonzero((group >= 0) & (layout.numel > 0))
    order = used[np.lexsort((used, layout.codes[used], group[used]))].astype(np.int32)
    if not len(order):
        return Work(order, np.empty((0, 4), np.int32), (), np.zeros(groups + 1, np.int32))
    chunks = -(-layout.numel[order] // CHUNK)  # [n]
    first_chunk = np.concatenate([[0], np.cumsum(chunks)])  # of each tensor, counted through `order`
    run = max(1, -(-int(first_chunk[-1]) // most))
    segment = group[order].astype(np.int64) * 16 + layout.codes[order]  # an item stays in one of these
    begins = np.flatnonzero(np.diff(segment, prepend=-1))
    ends = np.append(begins[1:], len(order))
    starts, counts, owner, code = [], [], [], []
    for begin, end in zip(begins, ends, strict=True):
        at = np.arange(int(first_chunk[begin]), int(first_chunk[end]), run)
        starts.append(at)
        counts.append(np.minimum(run, first_chunk[end] - at))
        owner.append(np.full(len(at), group[order[begin]]))
        code.append(np.full(len(at), layout.codes[order[begin]]))
    start, count, owners, codes = (np.concatenate(x) for x in (starts, counts, owner, code))
    place = np.searchsorted(first_chunk, start, side="right") - 1
    items = np.stack([place, start - first_chunk[place], count, np.arange(len(start))], axis=1).astype(np.int32)
    by_code = np.argsort(codes, kind="stable")
    kinds, first, number = np.unique(codes[by_code], return_index=True, return_counts=True)
    launches = tuple((int(c), int(f), int(n)) for c, f, n in zip(kinds, first, number, strict=True))
    first_slot = np.searchsorted(owners, np.arange(groups + 1)).astype(np.int32)
    return Work(order, np.ascontiguousarray(items[by_code]), launches, first_slot)


def rows_with_center(table: Table) -> np.ndarray:
    """Addresses [T, K + 1]: the global model, then the clients"""
    return np.concatenate([table.center_address[:, None], table.client_address], axis=1)


def rows_with_any_center(table: Table) -> np.ndarray:
    """The same for a call that may do without a global model: then the first client is in its place"""
    return rows_with_center(table) if table.center is not None else table.client_address[:, [0, *range(table.K)]]


def mixing_factors(mixing: np.ndarray) -> np.ndarray:
    """Of mixing [R, K] as in reference.ranked_means, those of the clients and of the global model: [K + 1, R]"""
    return np.vstack([mixing.T, 1 - mixing.sum(1)])


def addresses(tensors: list[list[torch.Tensor]]) -> np.ndarray:
    """[M][T] tensors -> [T, M] addresses"""
    array = np.array([[t.data_ptr() for t in row] for row in tensors], dtype=np.int64)
    return np.ascontiguousarray(array.reshape(len(tensors), -1).T)


def aligned(*tables: np.ndarray) -> np.ndarray:
    """[T] int32: 1 where all of a tensor's addresses ([T, n] each) allow 16-byte loads"""
    return np.logical_and.reduce([(a % 16 == 0).all(axis=1) for a in tables]).astype(np.int32)


def is_floating(layout: Layout) -> np.ndarray:
    return layout.codes < len(FLOATING)


Wanted = tuple[Hashable, Callable[[], Sequence[np.ndarray]]]


@dataclass
class _Resident:
    """Arrays that are on a device, or on their way there"""

    arrays: list[torch.Tensor]
    size: int  # in bytes
    stream: int  # that they were sent on
    event: torch.cuda.Event | None  # recorded behind the transfer; None: it was waited for
    captured: bool = False  # a CUDA graph reads it: kept for good


_residents: OrderedDict[tuple, _Resident] = OrderedDict()
_lock = threading.Lock()  # of the residents
_MOST_RESIDENTS, _MOST_BYTES = 32, 32 << 20
_TORCH = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}


def upload(device: torch.device, *wanted: Wanted) -> list[list[torch.Tensor]]:
    """For each (key, make), the arrays that make() gives, on the device.

    What is there already is known by its key, which must determine the arrays. All the rest is made and sent in one
    transfer that nobody waits for.
    """
    with _lock:
        missing = [(key, make) for key, make in wanted if (device, key) not in _residents]
        if missing:
            _send_all(device, missing)
            _drop_old({(device, key) for key, _ in wanted})
        return [_used(device, key) for key, _ in wanted]


def _send_all(device: torch.device, missing: list[Wanted]) -> None:
    on_gpu = device.type != "cpu"  # emulated and interpreted kernels take CPU tensors
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, and addresses or weights are not on the device yet: make the same "
            "call once before, with the same tensors and the same out="
        )
    groups = [[np.ascontiguousarray(a) for a in make()] for _, make in missing]
    starts = np.cumsum([0, *(-(-a.nbytes // 16) * 16 for arrays in groups for a in arrays)]).tolist()
    packed = np.zeros(max(starts[-1], 16), dtype=np.uint8)
    for a, start in zip((a for arrays in groups for a in arrays), starts, strict=False):
        packed[start : start + a.nbytes] = a.reshape(-1).view(np.uint8)
    buffer = _send(device, packed)
    stream, event = (torch.cuda.current_stream(device), _event()) if on_gpu else (None, None)
    if event is not None:
        event.record(stream)
    elif stream is not None:
        stream.synchronize()
    places = iter(starts)
    for (key, _), arrays in zip(missing, groups, strict=True):
        views = [_view(buffer, next(places), a) for a in arrays]
        handle = 0 if stream is None else stream.cuda_stream
        _residents[device, key] = _Resident(views, sum(a.nbytes for a in arrays), handle, event)


def _view(buffer: torch.Tensor, start: int, array: np.ndarray) -> torch.Tensor:
    return buffer[start : start + array.nbytes].view(_TORCH[array.dtype.name]).view(array.shape)


def _event() -> torch.cuda.Event | None:
    """An event that CUDA graphs can wait for. Older torch has none: uploads are waited for at once then."""
    try:
        return torch.cuda.Event(external=True)
    except TypeError:
        return None


def _used(device: torch.device, key: Hashable) -> list[torch.Tensor]:
    """The arrays of a resident; the current stream will not read them before they have arrived."""
    entry = _residents[device, key]
    _residents.move_to_end((device, key))
    if device.type == "cpu":
        return entry.arrays
    stream = torch.cuda.current_stream(device)
    if torch.cuda.is_current_stream_capturing():
        # Whatever streams the transfer and the replays are on, nothing else orders them: the wait becomes a node of
        # the graph.
        entry.captured = True
        if entry.event is not None:
            stream.wait_event(entry.event)
    elif entry.stream != stream.cuda_stream:
        if entry.event is not None:
            stream.wait_event(entry.event)
        for array in entry.arrays[:1]:  # all are views of one allocation
            array.record_stream(stream)
    return entry.arrays


def _drop_old(wanted: set[tuple]) -> None:
    """Forgets what was not used for longest, down to a number and a size; what is wanted, or a graph reads, stays."""
    kept, size = 0, 0
    for key in reversed([key for key, entry in _residents.items() if not entry.captured]):
        kept, size = kept + 1, size + _residents[key].size
        if key not in wanted and (kept > _MOST_RESIDENTS or size > _MOST_BYTES):
            del _residents[key]


def _send(device: torch.device, packed: np.ndarray) -> torch.Tensor:
    if device.type == "cpu":
        return torch.from_numpy(packed)
    # torch keeps this memory until the copy is done
    pinned = torch.empty(len(packed), dtype=torch.uint8, device="cpu", pin_memory=True)
    pinned.numpy()[:] = packed
    return pinned.to(device, non_blocking=True)


def upload_with_weights(
    device: torch.device, wanted: Wanted, weights: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """upload(), and weights [S, M, K] in float64 with it; those on the device already are used where they are"""
    if weights.device.type == "cpu":
        array = np.ascontiguousarray(weights.detach().numpy(), dtype=np.float64)
        arrays, [sent] = upload(device, wanted, (("weights", array.shape, array.tobytes()), lambda: [array]))
        return arrays, sent
    [arrays] = upload(device, wanted)
    return arrays, weights.detach().to(device, torch.float64).contiguous()
