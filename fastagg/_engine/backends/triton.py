"""The kernels in Triton: the names and contracts of reference.py, on addresses, compiled when first used.

Gram and dots: one block takes an item of plan.work and a pair of row groups. It reads STEP elements of both groups,
subtracts the global model in registers, multiplies in float32, adds the sums of STEP products to float64 accumulators,
and writes these to a slot of its own. Slots are then added in a fixed order: no atomics, the same bits every time.
A block that meets values whose squares leave float32 raises a flag and is done again in float64; the host never waits
to learn whether one did.

Gram times vectors: a block takes an item, and PIECE elements of all clients at a time. It forms u from them, then reads
them again, from the cache (or has them in registers if they are few), and multiplies. Its sums are in its slot in
memory, for the rows may be any number. Squares that leave float32 are dealt with as above.

Means by rank: a program counts, for every value of an element, the values below it, which is its place among them in
order; then it adds up the places that are wanted. The values in order are in memory, for they may be any number.

Mix: clients are added one after the other, each with an explicit fma, so that gram_mix, which cuts the work
differently, gives the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from fastagg._engine.backends import plan
from fastagg._engine.backends import triton_kernels as kernels
from fastagg._engine.backends import triton_ranked as ranked
from fastagg._engine.backends import triton_times as times
from fastagg._engine.dtypes import DTYPE_CODE
from fastagg._engine.table import Table

_POINTEE = (tl.float32, tl.float64, tl.bfloat16, tl.float16, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8)  # by code
_F64, _F16 = DTYPE_CODE[torch.float64], DTYPE_CODE[torch.float16]
# By the rows of a group. STEP is the number of products added in float32: fewer on tensor cores, which truncate. By a
# model of one that keeps only 24 bits, constant data is off by up to 1.3e-6 with 32 of them and 0.6e-6 with 16.
_GROUPS = {
    16: {"STEP": 32, "PRECISION": "ieee", "num_warps": 2},
    32: {"STEP": 32, "PRECISION": "ieee", "num_warps": 4},
    64: {"STEP": 16, "PRECISION": "tf32x3", "num_warps": 8},
}
_RANKED_PROGRAMS = 512  # at once, each with memory of its own: four on every SM of an A100
_VERSION = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))  # older ones do not compile these kernels


class Mixing(NamedTuple):
    """What a call mixes: the arguments of mix. Nothing, if out is empty: then the call wants the weights alone."""

    weights: torch.Tensor
    row: np.ndarray
    out: list[list[torch.Tensor]]
    not_finite: torch.Tensor


def why_not(device: torch.device) -> str:
    if _VERSION < (3, 9):
        return f"it needs Triton 3.9, this is {triton.__version__}"
    interpreted = not isinstance(kernels.mix, triton.JITFunction)
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


def mix(
    table: Table, weights: torch.Tensor, row: np.ndarray, out: list[list[torch.Tensor]],
    not_finite: torch.Tensor | None = None,
) -> None:  # fmt: skip
    _mix_where(np.ones(table.T, bool), table, Mixing(weights, row, out, _not_finite_tensor(table, not_finite)))


def gram_mix(
    table: Table, layer: np.ndarray, layers: int, per_layer: bool, weights: torch.Tensor, row: np.ndarray,
    out: list[list[torch.Tensor]], not_finite: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    mixing = Mixing(weights, row, out, _not_finite_tensor(table, not_finite))
    _mix_where(layer < 0, table, mixing)
    return _gram(table, layer, layers, per_layer, mixing)


def gram_times(
    table: Table, layer: np.ndarray, layers: int, per_layer: bool, weights: torch.Tensor, row: np.ndarray,
    out: list[list[torch.Tensor]] | None = None, not_finite: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    mixing = Mixing(weights, row, out or [], _not_finite_tensor(table, not_finite))
    if out:
        _mix_where(layer < 0, table, mixing)
    layout, R, (S, M, _), address = table.layout, table.K + 1, weights.shape, plan.rows_with_center(table)
    work = plan.work(layout, layer, layers, plan.PRODUCT_BLOCKS)
    rows, numel, order, items, first_slot, to, weight_row, w, marks = _upload(table, address, work, mixing)
    scales = _empty(table, 2, S, M)
    _launch(table, times.find_scales, (S * M,), w, scales, table.K, S * M, CLIENTS_AT_ONCE=128, num_warps=1)
    partial, squares = _empty(table, work.slots, R, 2 + M), _empty(table, work.slots, M)  # squares: of u
    flags = torch.empty(work.slots, dtype=torch.int32, device=table.device)
    args = rows, numel, order, items, R, partial, squares, flags, to, weight_row, w, scales, S * M, marks, M
    group = 16 if R <= 16 else 32
    usual = {"GROUP": group, "ALONE": group >= R, "PIECE": 128, "num_warps": 8}
    for code, first, count in work.launches:
        usual |= {"DTYPE": _POINTEE[code], "ALIGNED": _aligned((layer >= 0) & (layout.codes == code), address, mixing)}
        wide, outputs = code == _F64, _outputs(len(mixing.out))
        _launch(table, times.times, (count,), first, *args, WIDE=wide, AGAIN=False, OUTPUTS=outputs, **usual)
        if not wide:
            _launch(table, times.times, (count,), first, *args, WIDE=True, AGAIN=True, OUTPUTS=0, **usual)
    parts, total, size = _empty(table, layers, R, 2 + M), _empty(table, 1, R, 2 + M), R * (2 + M)
    grid = triton.cdiv(size, 128), layers
    _launch(table, times.add_items, grid, partial, first_slot, parts, size, ENTRIES=128, SLOTS=16, num_warps=4)
    if per_layer:
        return parts
    _launch(table, kernels.add_layers, grid[:1], parts, total, layers, size, ENTRIES=128, num_warps=4)
    return total


def ranked_means(
    table: Table, means: np.ndarray, row: np.ndarray, out: list[list[torch.Tensor]],
    not_finite: torch.Tensor | None = None, mixing: np.ndarray | None = None,
) -> None:  # fmt: skip
    layout, K, M = table.layout, table.K, len(out)
    work = plan.work(layout, np.where(row >= 0, 0, -1), 1, plan.MIX_ITEMS)
    means, row, to = means.astype(np.int64), row.astype(np.int32), plan.addresses(out)
    address = plan.rows_with_any_center(table)
    factors = np.empty((0, 0)) if mixing is None else plan.mixing_factors(mixing)  # [K + 1, R]
    arrays = [address, layout.numel, work.order, work.items, means, row, to, factors]
    key = "ranked", layout, work, *((a.shape, a.tobytes()) for a in (address, means, row, to, factors))
    [memory] = plan.upload(table.device, (key, lambda: arrays))
    marks = _not_finite_tensor(table, not_finite)
    for code, first, count in work.launches:
        mixed = mixing is not None and _POINTEE[code].is_floating()
        R = len(mixing) if mixing is not None and mixed else K
        programs, N = min(count, _RANKED_PROGRAMS), 128
        scratch = _empty(table, programs * (1 + mixed), R, N)  # 8 bytes for a value, of which narrow ones use less
        constants = {"DTYPE": _POINTEE[code], "MIXED": mixed, "GROUP": 8 if R <= 8 else 16, "N": N, "num_warps": 4}
        _launch(table, ranked.ranked, (programs,), first, count, *memory, marks, scratch, K, R, M, **constants)


def dots(table: Table, left: list[list[torch.Tensor]], row: np.ndarray, rows: int) -> torch.Tensor:
    K, M, group = table.K, len(left), 16  # left is usually one row, and all rows of its group are multiplied
    address = np.concatenate([table.client_address, plan.addresses(left)], axis=1)  # [T, K + M]
    pairs = [(K + m, k) for m in range(0, M, group) for k in range(0, K, group)]
    owner = np.where(plan.is_floating(table.layout), row, -1)
    out = _empty(table, rows, M, K)
    _multiply(table, address, owner, pairs, group, out, (K + M, K), centred=False)
    return out


def _gram(table: Table, layer: np.ndarray, layers: int, per_layer: bool, mixing: Mixing | None) -> torch.Tensor:
    R = table.K + 1
    group = 16 if R <= 16 else 32 if table.K <= 64 else 64
    pairs = [(a, b) for a in range(0, R, group) for b in range(0, a + 1, group)]
    parts = _empty(table, layers, R, R)
    _multiply(table, plan.rows_with_center(table), layer, pairs, group, parts, (R, R), centred=True, mixing=mixing)
    if per_layer:
        return parts
    out = _empty(table, 1, R, R)
    _launch(table, kernels.add_layers, (triton.cdiv(R * R, 128),), parts, out, layers, R * R, ENTRIES=128, num_warps=4)
    return out


def _multiply(
    table: Table, address: np.ndarray, owner: np.ndarray, pairs: list[tuple[int, int]], group: int, out: torch.Tensor,
    ends: tuple[int, int], *, centred: bool, mixing: Mixing | None = None,
) -> None:  # fmt: skip
    """out[o] = products of the rows at address [T, R] over the tensors with owner[t] == o. Mixes those too if told how.

    A pair is the first rows of two groups; rows from ends on are not wanted. out begins at row ends[0] - out.shape[1].
    """
    layout, P, M = table.layout, len(pairs), len(mixing.out) if mixing else 0
    work = plan.work(layout, owner, len(out), max(1, plan.PRODUCT_BLOCKS // P))
    rows, numel, order, items, first_slot, pair, *to_mix = _upload(table, address, work, mixing, pairs)
    partial = _empty(table, work.slots, P, group, group)
    flags = torch.empty(work.slots, P, dtype=torch.int32, device=table.device)
    to_mix = to_mix or [rows, order, partial, flags]  # not read: there are no outputs
    args = rows, pair, numel, order, items, address.shape[1], P, partial, flags, *to_mix, M
    usual = {"CENTRED": centred, "SAME": centred and P == 1, "GROUP": group, **_GROUPS[group]}
    for code, first, count in work.launches:
        usual |= {"DTYPE": _POINTEE[code], "ALIGNED": _aligned((owner >= 0) & (layout.codes == code), address, mixing)}
        wide, outputs = code == _F64, _outputs(M)
        _launch(table, kernels.products, (count, P), first, *args, WIDE=wide, AGAIN=False, OUTPUTS=outputs, **usual)
        if code not in (_F64, _F16):  # the squares of float16 stay in float32
            _launch(table, kernels.products, (count, P), first, *args, WIDE=True, AGAIN=True, OUTPUTS=0, **usual)
    args, tile = (partial, pair, first_slot, out, P, *ends, ends[0] - out.shape[1]), group * group // 16
    usual = {"GROUP": group, "SYMMETRIC": centred, "ENTRIES": tile, "SLOTS": 2048 // tile, "num_warps": 4}
    _launch(table, kernels.add_slots, (P * 16, len(out)), *args, **usual)


def _mix_where(which: np.ndarray, table: Table, mixing: Mixing) -> None:
    layout, M, address = table.layout, len(mixing.out), table.client_address
    work = plan.work(layout, np.where(which, 0, -1), 1, plan.MIX_ITEMS)
    if not work.launches:
        return
    rows, numel, order, items, _, *to_mix = _upload(table, address, work, mixing)
    args = rows, numel, order, items, *to_mix, table.K, M
    for code, first, count in work.launches:
        usual = {"DTYPE": _POINTEE[code], "ALIGNED": _aligned(which & (layout.codes == code), address, mixing)}
        warps = 4 if M == 1 else 8
        _launch(table, kernels.mix, (count,), first, *args, OUTPUTS=_outputs(M), num_warps=warps, **usual)


def _upload(
    table: Table,
    address: np.ndarray,
    work: plan.Work,
    mixing: Mixing | None,
    pairs: list[tuple[int, int]] | None = None,
) -> list[torch.Tensor]:
    """On the device: address, numel, order, items, first_slot, pairs if there are any, and if there is something to
    mix: out [T, M], row [T], weights [S, M, K], not_finite [T]. They are sent again only if tensors have moved or
    weights have changed."""
    key: tuple[Hashable, ...] = table.layout, work, address.shape, address.tobytes(), tuple(pairs or ())

    def arrays() -> list[np.ndarray]:
        made = [address, table.layout.numel, work.order, work.items, work.first_slot]
        return made + ([np.array(pairs, np.int32)] if pairs else [])

    if mixing is None:
        return plan.upload(table.device, (key, arrays))[0]
    row = mixing.row
    to = plan.addresses(mixing.out) if mixing.out else np.empty((table.T, 0), np.int64)
    key += row.tobytes(), to.tobytes()
    wanted = key, lambda: [*arrays(), to, row.astype(np.int32)]
    memory, weights = plan.upload_with_weights(table.device, wanted, mixing.weights)
    return [*memory, weights, mixing.not_finite]


def _not_finite_tensor(table: Table, not_finite: torch.Tensor | None) -> torch.Tensor:
    """Where the kernels mark tensors with results that are not finite, which they always do: the caller's array, or
    one that nobody reads"""
    return torch.empty(table.T, dtype=torch.uint8, device=table.device) if not_finite is None else not_finite


def _aligned(which: np.ndarray, address: np.ndarray, mixing: Mixing | None) -> bool:
    return bool(plan.aligned(address, *([plan.addresses(mixing.out)] if mixing and mixing.out else []))[which].all())


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
