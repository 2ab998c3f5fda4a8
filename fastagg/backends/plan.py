"""What both GPU backends hand to their kernels: addresses and a list of work, uploaded in one transfer.

Tensors are cut into chunks, and runs of chunks are the work of one block: hundreds of tiny tensors and one huge one
both fill a GPU. Cuts depend on the tensors alone, never on the device, so that sums come out the same everywhere.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fastagg.table import FLOATING, Layout, Table

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
        at = np.arange(first_chunk[begin], first_chunk[end], run)
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


def addresses(tensors: list[list[torch.Tensor]]) -> np.ndarray:
    """[M][T] tensors -> [T, M] addresses"""
    array = np.array([[t.data_ptr() for t in row] for row in tensors], dtype=np.int64)
    return np.ascontiguousarray(array.reshape(len(tensors), -1).T)


def aligned(*tables: np.ndarray) -> np.ndarray:
    """[T] int32: 1 where all of a tensor's addresses ([T, n] each) allow 16-byte loads"""
    return np.logical_and.reduce([(a % 16 == 0).all(axis=1) for a in tables]).astype(np.int32)


def is_floating(layout: Layout) -> np.ndarray:
    return layout.codes < len(FLOATING)


@dataclass
class _Upload:
    buffer: torch.Tensor
    event: Any
    stream: int
    size: int  # in bytes
    captured: bool = False  # a CUDA graph reads it: kept for good


_uploads: OrderedDict[tuple, _Upload] = OrderedDict()
_lock = threading.Lock()  # of the uploads
_MOST_UPLOADS, _MOST_BYTES = 32, 32 << 20


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """The arrays on the device, in one transfer that nobody waits for. What is there already is not sent again."""
    arrays = tuple(np.ascontiguousarray(a) for a in arrays)
    if device.type == "cpu":  # emulated or interpreted kernels
        return [torch.from_numpy(a.copy()) for a in arrays]
    starts = np.cumsum([0, *(-(-a.nbytes // 16) * 16 for a in arrays)])
    packed = np.zeros(max(int(starts[-1]), 16), dtype=np.uint8)
    for a, start in zip(arrays, starts, strict=False):
        packed[start : start + a.nbytes] = a.reshape(-1).view(np.uint8)
    with _lock:
        buffer = _resident(device, packed)
    return [
        buffer[start : start + a.nbytes].view(_TORCH[a.dtype.name]).view(a.shape)
        for a, start in zip(arrays, starts, strict=False)
    ]


_TORCH = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}


def _resident(device: torch.device, packed: np.ndarray) -> torch.Tensor:
    key = device, hashlib.blake2b(packed, digest_size=32).digest()  # of addresses and weights: no need to keep them
    stream = torch.cuda.current_stream(device)
    capturing = torch.cuda.is_current_stream_capturing()
    known = _uploads.get(key)
    if known is None:
        if capturing:
            raise RuntimeError(
                "a CUDA graph is being captured, and addresses or weights are not on the device yet: make the same "
                "call once before, with the same tensors and the same out="
            )
        known = _uploads[key] = _Upload(_send(device, packed), torch.cuda.Event(), stream.cuda_stream, len(packed))
        known.event.record(stream)
        _drop_old(key)
    elif capturing:
        known.captured = True
    elif known.stream != stream.cuda_stream:
        stream.wait_event(known.event)
        known.buffer.record_stream(stream)
    _uploads.move_to_end(key)
    return known.buffer


def _drop_old(newest: tuple) -> None:
    """Forgets what was not used for longest, down to a number and a size; what a graph reads stays."""
    kept, size = 0, 0
    for key in reversed([key for key, entry in _uploads.items() if not entry.captured]):
        kept, size = kept + 1, size + _uploads[key].size
        if key != newest and (kept > _MOST_UPLOADS or size > _MOST_BYTES):
            del _uploads[key]


def _send(device: torch.device, packed: np.ndarray) -> torch.Tensor:
    # torch keeps this memory until the copy is done
    pinned = torch.empty(len(packed), dtype=torch.uint8, device="cpu", pin_memory=True)
    pinned.numpy()[:] = packed
    return pinned.to(device, non_blocking=True)
