"""The kernels in Triton: the names and contracts of reference.py, on addresses, compiled when first used.

Gram and dots: one block takes an item of plan.work and a pair of row groups. It reads STEP elements of both groups,
subtracts the global model in registers, multiplies in float32, adds the sums of STEP products to float64 accumulators,
and writes these to a slot of its own. Slots are then added in a fixed order: no atomics, the same bits every time.
A block that meets values whose squares leave float32 raises a flag and is done again in float64; the host never waits
to learn whether one did.

Mix: clients are added one after the other, each with an explicit fma, so that gram_mix, which cuts the work
differently, gives the same bits.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fastagg.backends import plan
from fastagg.table import DTYPE_CODE, Table

_POINTEE = (tl.float32, tl.float64, tl.bfloat16, tl.float16, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8)  # by code
_F64, _F16 = DTYPE_CODE[torch.float64], DTYPE_CODE[torch.float16]
# By the rows of a group. STEP is the number of products added in float32: fewer on tensor cores, which truncate. By a
# model of one that keeps only 24 bits, constant data is off by up to 1.3e-6 with 32 of them and 0.6e-6 with 16.
_GROUPS = {
    16: {"STEP": 32, "PRECISION": "ieee", "num_warps": 2},
    32: {"STEP": 32, "PRECISION": "ieee", "num_warps": 4},
    64: {"STEP": 16, "PRECISION": "tf32x3", "num_warps": 8},
}
_VERSION = tuple(int(n) for n in triton.__version__.split(".")[:2])  # older ones do not compile these kernels
CHUNK = tl.constexpr(plan.CHUNK)
SPAN = tl.constexpr(256)  # elements after which gram_mix mixes: what it has read of all clients still is in the cache
CLIENTS = tl.constexpr(8)  # loads of mix that are under way at once
# Rows whose largest value is between sqrt(count) / SCALE and MOST have squares that float32 adds without harm: STEP of
# them do not overflow, and what is lost below 2^-149 is nothing beside a sum of count * 2^-116.
MOST = tl.constexpr(2.0**61)
SCALE = tl.constexpr(2.0**58)


def why_not(device: torch.device) -> str:
    if _VERSION < (3, 9):
        return f"it needs Triton 3.9, this is {triton.__version__}"
    interpreted = not isinstance(_mix, triton.JITFunction)
    if device.type == "cpu":
        return "" if interpreted else "it cannot read tensors on cpu (only when interpreted: TRITON_INTERPRET=1)"
    if device.type != "cuda" or torch.version.hip:
        return f"it cannot read tensors on {device}, only on NVIDIA GPUs"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if interpreted:
        return f"it cannot read tensors on {device} when interpreted (TRITON_INTERPRET=1)"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= 8 else f"{device} has compute capability {major}.{minor}, less than 8.0"


def gram(table: Table, layer: np.ndarray, layers: int, per_layer: bool) -> torch.Tensor:
    return _gram(table, layer, layers, per_layer, None)


def mix(table: Table, weights: torch.Tensor, row: np.ndarray, out: list[list[torch.Tensor]]) -> None:
    _mix_where(np.ones(table.T, bool), table, weights, row, out)


def gram_mix(table, layer, layers, per_layer, weights, row, out) -> torch.Tensor:
    _mix_where(layer < 0, table, weights, row, out)
    return _gram(table, layer, layers, per_layer, (weights, row, out))


def dots(table: Table, left: list[list[torch.Tensor]], row: np.ndarray, rows: int) -> torch.Tensor:
    K, M, group = table.K, len(left), 16  # left is usually one row, and all rows of its group are multiplied
    address = np.concatenate([table.client_address, plan.addresses(left)], axis=1)  # [T, K + M]
    pairs = [(K + m, k) for m in range(0, M, group) for k in range(0, K, group)]
    owner = np.where(plan.is_floating(table.layout), row, -1)
    out = _empty(table, rows, M, K)
    _multiply(table, address, owner, pairs, group, out, (K + M, K), centred=False)
    return out


def _gram(table: Table, layer: np.ndarray, layers: int, per_layer: bool, mixed: tuple | None) -> torch.Tensor:
    R = table.K + 1
    group = 16 if R <= 16 else 32 if table.K <= 64 else 64
    pairs = [(a, b) for a in range(0, R, group) for b in range(0, a + 1, group)]
    parts = _empty(table, layers, R, R)
    _multiply(table, plan.rows_with_center(table), layer, pairs, group, parts, (R, R), centred=True, mixed=mixed)
    if per_layer:
        return parts
    out = _empty(table, 1, R, R)
    _launch(table, _add_layers, (triton.cdiv(R * R, 128),), parts, out, layers, R * R, ENTRIES=128, num_warps=4)
    return out


def _multiply(
    table: Table, address: np.ndarray, owner: np.ndarray, pairs: list[tuple[int, int]], group: int, out: torch.Tensor,
    ends: tuple[int, int], *, centred: bool, mixed: tuple | None = None,
) -> None:  # fmt: skip
    """out[o] = products of the rows at address [T, R] over the tensors with owner[t] == o. Mixes those too if told how.

    A pair is the first rows of two groups; rows from ends on are not wanted. out begins at row ends[0] - out.shape[1].
    """
    layout, P, M = table.layout, len(pairs), len(mixed[2]) if mixed else 0
    work = plan.work(layout, owner, len(out), max(1, plan.PRODUCT_BLOCKS // P))
    arrays = [address, np.array(pairs, np.int32), layout.numel, work.order, work.items, work.first_slot]
    rows, pair, numel, order, items, first_slot, *mixing = _upload(table, arrays, mixed)
    partial = _empty(table, work.slots, P, group, group)
    flags = torch.empty(work.slots, P, dtype=torch.int32, device=table.device)
    args = rows, pair, numel, order, items, address.shape[1], P, partial, flags, *(mixing or [rows, order, partial]), M
    usual = {"CENTRED": centred, "SAME": centred and P == 1, "GROUP": group, **_GROUPS[group]}
    for code, first, count in work.launches:
        usual |= {"DTYPE": _POINTEE[code], "ALIGNED": _aligned((owner >= 0) & (layout.codes == code), address, mixed)}
        wide, outputs = code == _F64, _outputs(M)
        _launch(table, _products, (count, P), first, *args, WIDE=wide, AGAIN=False, OUTPUTS=outputs, **usual)
        if code not in (_F64, _F16):  # the squares of float16 stay in float32
            _launch(table, _products, (count, P), first, *args, WIDE=True, AGAIN=True, OUTPUTS=0, **usual)
    args, tile = (partial, pair, first_slot, out, P, *ends, ends[0] - out.shape[1]), group * group // 16
    usual = {"GROUP": group, "SYMMETRIC": centred, "ENTRIES": tile, "SLOTS": 2048 // tile, "num_warps": 4}
    _launch(table, _add_slots, (P * 16, len(out)), *args, **usual)


def _mix_where(which: np.ndarray, table: Table, weights: torch.Tensor, row: np.ndarray, out: list) -> None:
    layout, M, address, mixed = table.layout, len(out), table.client_address, (weights, row, out)
    work = plan.work(layout, np.where(which, 0, -1), 1, plan.MIX_ITEMS)
    if not work.launches:
        return
    args = *_upload(table, [address, layout.numel, work.order, work.items], mixed), table.K, M
    for code, first, count in work.launches:
        usual = {"DTYPE": _POINTEE[code], "ALIGNED": _aligned(which & (layout.codes == code), address, mixed)}
        warps = 4 if M == 1 else 8
        _launch(table, _mix, (count,), first, *args, OUTPUTS=_outputs(M), num_warps=warps, **usual)


def _upload(table: Table, arrays: list[np.ndarray], mixed: tuple | None) -> list[torch.Tensor]:
    """arrays on the device, and behind them, if there is something to mix: out [T, M], row [T], weights [S, M, K]"""
    if mixed is None:
        return plan.upload(table.device, *arrays)
    weights, row, out = mixed
    arrays = [*arrays, plan.addresses(out), row.astype(np.int32)]
    weights = weights.detach().double().contiguous()
    if weights.device.type == "cpu":
        return plan.upload(table.device, *arrays, weights.numpy())
    return [*plan.upload(table.device, *arrays), weights.to(table.device)]


def _aligned(which: np.ndarray, address: np.ndarray, mixed: tuple | None) -> bool:
    return bool(plan.aligned(address, *([plan.addresses(mixed[2])] if mixed else []))[which].all())


def _outputs(M: int) -> int:
    """Outputs in registers at once; for the next ones a block reads the clients again, from the cache."""
    return (0, 1, 2, 4)[min(M, 3)]


def _empty(table: Table, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float64, device=table.device)


def _launch(table: Table, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Every launch comes through here: tests/triton_aot.py listens in to learn what has to compile."""
    if 0 not in grid:
        with torch.cuda.device(table.device) if table.device.type == "cuda" else nullcontext():
            kernel[grid](*args, **constants)


@triton.jit
def _at(address, e, ALIGNED: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to elements e of the rows at address: [n, len(e)]. Says so if 16 bytes can be read at once."""
    p = address.to(tl.pointer_type(DTYPE))[:, None] + e[None, :]
    if ALIGNED:
        p = tl.max_contiguous(tl.multiple_of(p, [1, 16]), [1, 128 // DTYPE.primitive_bitwidth])
    return p


@triton.jit
def _read(
    address, center, row, R, e, end,
    MASKED: tl.constexpr, CENTRED: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Elements e of some rows, less the global model's unless that is the row: [GROUP, STEP]. 0 where there is none."""
    real: tl.constexpr = tl.float64 if WIDE else tl.float32
    inside = (e < end)[None, :] if MASKED else None  # only the last step has such a mask: it stops 16-byte loads
    some = (row < R)[:, None]
    if MASKED:
        some = some & inside
    x = tl.load(_at(address, e, ALIGNED, DTYPE), mask=some, other=0).to(real)
    if CENTRED:
        g = tl.load(_at(center, e, ALIGNED, DTYPE), mask=inside).to(real)  # [1, STEP]
        x -= tl.where(some & (row > 0)[:, None], g, 0)
    return x


@triton.jit
def _step(
    sums, top_a, top_b, at_a, at_b, center, a, b, R, e, end, MASKED: tl.constexpr, CENTRED: tl.constexpr,
    SAME: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the products of STEP elements to sums, and keeps the largest values."""
    x = _read(at_a, center, a, R, e, end, MASKED, CENTRED, ALIGNED, DTYPE, WIDE)
    y = x if SAME else _read(at_b, center, b, R, e, end, MASKED, CENTRED, ALIGNED, DTYPE, WIDE)
    if WIDE:
        sums = tl.dot(x, tl.trans(y), sums, input_precision="ieee", out_dtype=tl.float64)
    else:
        sums += tl.dot(x, tl.trans(y), input_precision=PRECISION).to(tl.float64)
        top_a = tl.maximum(top_a, tl.abs(x))
        if not SAME:
            top_b = tl.maximum(top_b, tl.abs(y))
    return sums, top_a, top_b


@triton.jit
def _leaves_float32(top, count):
    """1 if a row's squares are too large or too small to be added in float32; a row of zeros is neither."""
    most = tl.max(top, 1)  # [GROUP]
    scaled = most * SCALE
    return tl.max(((most > MOST) | ((most > 0) & (scaled * scaled < count.to(tl.float32)))).to(tl.int32), 0)


@triton.jit(do_not_specialize=["first", "R", "P", "M"])
def _products(
    first, rows, pairs, numel, order, items, R, P, partial, flags, out, weight_row, weights, M,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, AGAIN: tl.constexpr, CENTRED: tl.constexpr, SAME: tl.constexpr,
    GROUP: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr, OUTPUTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """partial[slot, pair] = products of two groups of rows over an item. AGAIN: only where a flag was raised."""
    pair = tl.program_id(1)
    item = items + (first + tl.program_id(0)) * 4
    place, left = tl.load(item), tl.load(item + 2)
    at = tl.load(item + 1).to(tl.int64) * CHUNK
    slot = tl.load(item + 3).to(tl.int64) * P + pair
    if AGAIN:  # noqa: SIM102 (decided when compiling)
        if tl.load(flags + slot) == 0:
            return
    a = tl.load(pairs + 2 * pair) + tl.arange(0, GROUP)
    b = tl.load(pairs + 2 * pair + 1) + tl.arange(0, GROUP)
    sums = tl.zeros([GROUP, GROUP], tl.float64)
    top_a = tl.zeros([GROUP, STEP], tl.float32)
    top_b = top_a
    count = tl.full((), 0, tl.int64)
    while left > 0:
        t = tl.load(order + place).to(tl.int64)
        end = tl.minimum(tl.load(numel + t), at + left.to(tl.int64) * CHUNK)
        left -= tl.cdiv(end - at, CHUNK).to(tl.int32)
        count += end - at
        own = rows + t * R
        center = tl.load(own + tl.arange(0, 1))
        at_a = tl.load(own + a, mask=a < R, other=0)
        at_b = tl.load(own + b, mask=b < R, other=0)
        while at < end:
            stop = tl.minimum(at + SPAN, end) if OUTPUTS > 0 else end
            whole = stop - (stop - at) % STEP
            for e in range(at, whole, STEP):
                sums, top_a, top_b = _step(
                    sums, top_a, top_b, at_a, at_b, center, a, b, R, e + tl.arange(0, STEP), end,
                    False, CENTRED, SAME, ALIGNED, DTYPE, WIDE, PRECISION,
                )  # fmt: skip
            if whole < stop:
                sums, top_a, top_b = _step(
                    sums, top_a, top_b, at_a, at_b, center, a, b, R, whole + tl.arange(0, STEP), end,
                    True, CENTRED, SAME, ALIGNED, DTYPE, WIDE, PRECISION,
                )  # fmt: skip
            if OUTPUTS > 0:  # noqa: SIM102
                if (t + at // SPAN) % P == pair:  # the blocks of this item share the work
                    own_weights = weights + tl.load(weight_row + t).to(tl.int64) * M * (R - 1)
                    _mix_span(own + 1, out + t * M, own_weights, at, end, R - 1, M, SPAN, OUTPUTS, ALIGNED, DTYPE)
            at = stop
        place += 1
        at = tl.full((), 0, tl.int64)
    entry = tl.arange(0, GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(partial + slot * (GROUP * GROUP) + entry, sums)
    if not WIDE:
        tl.store(flags + slot, tl.maximum(_leaves_float32(top_a, count), _leaves_float32(top_b, count)))


@triton.jit(do_not_specialize=["P", "end_a", "end_b", "origin"])
def _add_slots(
    partial, pairs, first_slot, out, P, end_a, end_b, origin,
    SYMMETRIC: tl.constexpr, GROUP: tl.constexpr, ENTRIES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """out[owner] = sum of the owner's slots, always in the same order. A symmetric result is read where i >= j."""
    blocks: tl.constexpr = GROUP * GROUP // ENTRIES
    pair, owner = tl.program_id(0) // blocks, tl.program_id(1)
    entry = tl.program_id(0) % blocks * ENTRIES + tl.arange(0, ENTRIES)
    last = tl.load(first_slot + owner + 1)
    sums = tl.zeros([SLOTS, ENTRIES], tl.float64)
    for at in range(tl.load(first_slot + owner), last, SLOTS):
        slot = (at + tl.arange(0, SLOTS))[:, None]
        p = partial + (slot.to(tl.int64) * P + pair) * (GROUP * GROUP) + entry[None, :]
        sums += tl.load(p, mask=slot < last, other=0)
    total = tl.sum(sums, 0)
    i = tl.load(pairs + 2 * pair) + entry // GROUP
    j = tl.load(pairs + 2 * pair + 1) + entry % GROUP
    wanted = (i < end_a) & (j < end_b) & ((i >= j) if SYMMETRIC else True)
    to = out + owner.to(tl.int64) * (end_a - origin) * end_b
    tl.store(to + (i - origin).to(tl.int64) * end_b + j, total, mask=wanted)
    if SYMMETRIC:
        tl.store(to + j.to(tl.int64) * end_b + i, total, mask=wanted)


@triton.jit(do_not_specialize=["layers", "size"])
def _add_layers(parts, out, layers, size, ENTRIES: tl.constexpr):
    """out = sum of parts [layers, size], one after the other: their order is part of the contract."""
    e = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    total = tl.zeros([ENTRIES], tl.float64)
    for layer in range(layers):
        total += tl.load(parts + tl.cast(layer, tl.int64) * size + e, mask=e < size)
    tl.store(out + e, total, mask=e < size)


@triton.jit(do_not_specialize=["first", "K", "M"])
def _mix(
    first, rows, numel, order, items, out, weight_row, weights, K, M,
    DTYPE: tl.constexpr, OUTPUTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    item = items + (first + tl.program_id(0)) * 4
    place, left = tl.load(item), tl.load(item + 2)
    at = tl.load(item + 1).to(tl.int64) * CHUNK
    while left > 0:
        t = tl.load(order + place).to(tl.int64)
        end = tl.minimum(tl.load(numel + t), at + left.to(tl.int64) * CHUNK)
        left -= tl.cdiv(end - at, CHUNK).to(tl.int32)
        own_weights = weights + tl.load(weight_row + t).to(tl.int64) * M * K
        for start in range(at, end, CHUNK):
            _mix_span(rows + t * K, out + t * M, own_weights, start, end, K, M, CHUNK, OUTPUTS, ALIGNED, DTYPE)
        place += 1
        at = tl.full((), 0, tl.int64)


@triton.jit
def _mix_span(
    clients, out, weights, at, end, K, M,
    N: tl.constexpr, OUTPUTS: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Mixes N elements from `at` on, up to the end: clients [K] and out [M] are addresses, weights is [M, K]."""
    if at + N <= end:
        _mix_elements(clients, out, weights, at, end, K, M, N, OUTPUTS, ALIGNED, DTYPE, False)
    else:
        _mix_elements(clients, out, weights, at, end, K, M, N, OUTPUTS, ALIGNED, DTYPE, True)


@triton.jit
def _mix_elements(
    clients, out, weights, at, end, K, M,
    N: tl.constexpr, OUTPUTS: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    e = at + tl.arange(0, N)
    inside = (e < end)[None, :] if MASKED else tl.full([1, 1], 1, tl.int1)
    one = tl.arange(0, 1)
    real: tl.constexpr = tl.float64 if DTYPE.primitive_bitwidth >= 32 else tl.float32
    for first in range(0, M, OUTPUTS):
        m = first + tl.arange(0, OUTPUTS)
        if DTYPE.is_int():
            mixed = tl.load(_at(tl.load(clients + one), e, ALIGNED, DTYPE), mask=inside, other=0)  # [1, N]
            for k in range(1, K):
                x = tl.load(_at(tl.load(clients + k + one), e, ALIGNED, DTYPE), mask=inside, other=0)
                mixed = tl.maximum(mixed, x)
        else:
            mixed = tl.zeros([OUTPUTS, N], real)
            for some in range(0, K, CLIENTS):
                for i in tl.static_range(CLIENTS):
                    k = some + i + one  # [1]
                    p = _at(tl.load(clients + k, mask=k < K, other=0), e, ALIGNED, DTYPE)
                    x = tl.load(p, mask=inside & (k < K)[:, None], other=0).to(real)  # [1, N]
                    w = tl.load(weights + m * K + k, mask=(m < M) & (k < K), other=0).to(real)  # [OUTPUTS]
                    mixed = tl.fma(tl.broadcast_to(w[:, None], mixed.shape), tl.broadcast_to(x, mixed.shape), mixed)
        p = _at(tl.load(out + m, mask=m < M, other=0), e, ALIGNED, DTYPE)
        tl.store(p, tl.broadcast_to(mixed.to(DTYPE), [OUTPUTS, N]), mask=inside & (m < M)[:, None])
