"""The native kernels for CUDA tensors: the names and contracts of reference.py, on addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fastagg._engine.backends import plan
from fastagg._engine.native import why_missing
from fastagg._engine.table import Table

MOST_FMA_ROWS = 65  # K = 64: with more rows tensor cores are the faster way, where they are fast
# Compute capabilities of which tf32 products, three for one of float32, beat float32 multiply-adds: A100, H100, B200.
# On GeForce and RTX cards (8.6, 8.9, 12.0) tensor cores have no such lead, and Turing (7.5) has no tf32.
FAST_TF32 = {(8, 0), (9, 0), (10, 0), (10, 3)}


@contextmanager
def current(device: torch.device) -> Iterator[tuple[int, int]]:
    """Makes the device current; gives its number and the stream that kernels are launched on, the caller's."""
    if device.type == "cpu":  # emulated
        yield 0, 0
        return
    with torch.cuda.device(device):
        yield device.index, torch.cuda.current_stream(device).cuda_stream


@dataclass(frozen=True)
class Mixing:
    """What a call mixes: the arguments of mix. Nothing, if out is empty: then the call wants the weights alone."""

    weights: torch.Tensor
    row: np.ndarray
    out: list[list[torch.Tensor]]
    not_finite: torch.Tensor | None


class Form(NamedTuple):
    """Of the row products of a call: a_rows times b_rows, of which a triangle says it all if both are the same rows"""

    a_rows: int
    b_rows: int
    triangle: bool
    tensor_cores: bool


@dataclass
class Call:
    """The structs of a call, and the device memory they point to, to be held until kernels are launched"""

    rows: _cuda.Rows
    mix: _cuda.Mix
    mix_work: _cuda.Work | None  # of what the mix kernel mixes
    products_work: Callable[[int, int], _cuda.Work]  # (first item, number of items) -> of row products
    first_slot: int
    memory: list[torch.Tensor]


class Kernels:
    """The kernels of reference.py by a native module: fastagg._cuda, or the emulated one of the tests"""

    def __init__(self, native: ModuleType, emulated: bool = False) -> None:
        if TYPE_CHECKING:
            self.native = _cuda  # all such modules have the functions of its stub
        else:
            self.native = native
        self.emulated = emulated
        self.code_versions: dict[int, int] = {}  # by device
        assert native.chunk_elements == plan.CHUNK

    def why_not(self, device: torch.device) -> str:
        if device.type != ("cpu" if self.emulated else "cuda"):
            return f"it cannot read tensors on {device}"
        why = self.native.why_no_device()
        if why or self.emulated:
            return why
        if not torch.cuda.is_available():
            return "this torch is built without CUDA, or sees no device"
        if device.index is not None and device.index >= torch.cuda.device_count():
            return f"there is no {device}"
        if not self._code_version(device):
            major, minor = torch.cuda.get_device_capability(device)
            return f"fastagg._cuda was built without kernels for {device} (sm_{major}{minor})"
        return ""

    def tensor_cores(self, device: torch.device) -> bool:
        """Are there, and have the kernels been compiled for, tensor cores that are faster than multiply-adds?"""
        if self.emulated:
            return False
        return torch.cuda.get_device_capability(device) in FAST_TF32 and self._code_version(device) >= 80

    def _code_version(self, device: torch.device) -> int:
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self.code_versions:
            with torch.cuda.device(index):
                self.code_versions[index] = self.native.code_version(index)
        return self.code_versions[index]

    def gram(self, table: Table, layer: np.ndarray, layers: int, per_layer: bool) -> torch.Tensor:
        return self._gram(table, layer, layers, per_layer, None)

    def mix(
        self, table: Table, weights: torch.Tensor, row: np.ndarray, out: list[list[torch.Tensor]],
        not_finite: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        work = plan.work(table.layout, np.zeros(table.T, dtype=np.int32), 1, plan.MIX_ITEMS)
        with current(table.device) as place:
            call = self._call(table, table.client_address, Mixing(weights, row, out, not_finite), work, None)
            self._launch_mix(call, work, place)

    def gram_mix(
        self, table: Table, layer: np.ndarray, layers: int, per_layer: bool, weights: torch.Tensor, row: np.ndarray,
        out: list[list[torch.Tensor]], not_finite: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self._gram(table, layer, layers, per_layer, Mixing(weights, row, out, not_finite))

    def gram_times(
        self, table: Table, layer: np.ndarray, layers: int, per_layer: bool, weights: torch.Tensor, row: np.ndarray,
        out: list[list[torch.Tensor]] | None = None, not_finite: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        R, M, device = table.K + 1, weights.shape[1], table.device
        work, rest = plan.work(table.layout, layer, layers, plan.PRODUCT_BLOCKS), None
        if out:  # what is not mixed on the way
            rest = plan.work(table.layout, np.where(layer >= 0, -1, 0), 1, plan.MIX_ITEMS)
        with current(device) as place:
            mixing = Mixing(weights, row, out or [], not_finite)
            call = self._call(table, plan.rows_with_center(table), mixing, rest, work)
            partial = torch.empty(work.slots, R, 2 + M, dtype=torch.float64, device=device)
            flags = torch.zeros(work.slots, dtype=torch.int32, device=device)
            for code, first, count in work.launches:
                self.native.times(
                    code, call.products_work(first, count), call.rows, vectors=M, partial=partial.data_ptr(),
                    flags=flags.data_ptr(), mix=call.mix, device=place[0], stream=place[1],
                )  # fmt: skip
            result = self._reduce(partial, call, layers, place, want_total=not per_layer)
            if rest is not None:
                self._launch_mix(call, rest, place)
        return result

    def ranked_means(
        self, table: Table, means: np.ndarray, row: np.ndarray, out: list[list[torch.Tensor]],
        not_finite: torch.Tensor | None = None, mixing: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        layout, native, address, to = table.layout, self.native, plan.rows_with_any_center(table), plan.addresses(out)
        work = plan.work(layout, np.where(row >= 0, 0, -1), 1, plan.MIX_ITEMS)
        means, row = means.astype(np.int64), row.astype(np.int32)
        factors = np.empty((0, 0)) if mixing is None else plan.mixing_factors(mixing)  # [K + 1, R]
        arrays = [address, layout.numel, work.items, work.order, means, row, to, factors]
        key = "ranked", layout, work, *((a.shape, a.tobytes()) for a in (address, means, row, to, factors))
        with current(table.device) as (device, stream):
            [memory] = plan.upload(table.device, (key, lambda: arrays))
            addresses, numel, items, order, means_, row_, to_, factors_ = (x.data_ptr() for x in memory)
            rows = native.Rows(address=addresses, aligned=0, rows=address.shape[1])
            for code, first, count in work.launches:
                how = code, table.K if mixing is None else len(mixing), mixing is not None
                scratch = torch.empty(native.ranked_scratch(*how), dtype=torch.uint8, device=table.device)
                native.ranked_means(
                    code, native.Work(items=items, first=first, count=count, order=order, numel=numel), rows,
                    means=means_, row=row_, out=to_, outputs=len(out), scratch=scratch.data_ptr(),
                    not_finite=0 if not_finite is None else not_finite.data_ptr(), sorted=how[1],
                    mixing=0 if mixing is None else factors_, device=device, stream=stream,
                )  # fmt: skip

    def dots(self, table: Table, left: list[list[torch.Tensor]], row: np.ndarray, rows: int) -> torch.Tensor:
        address = np.concatenate([table.client_address, plan.addresses(left)], axis=1)  # [T, K + M]
        group = np.where(plan.is_floating(table.layout), row, -1)
        form = Form(a_rows=len(left), b_rows=table.K, triangle=False, tensor_cores=False)
        work = self._work(table, group, rows, form)
        with current(table.device) as place:
            call = self._call(table, address, None, None, work)
            return self._products(
                table, call, work, rows, self.native.Mix(), place, form, a_first=table.K, centred=False
            )

    def _gram(
        self, table: Table, layer: np.ndarray, layers: int, per_layer: bool, mixing: Mixing | None
    ) -> torch.Tensor:
        R = table.K + 1
        tensor_cores = R > MOST_FMA_ROWS and self.tensor_cores(table.device)
        fused = not tensor_cores  # on tensor cores a mix on the way costs more than a read of its own
        form = Form(a_rows=R, b_rows=R, triangle=True, tensor_cores=tensor_cores)
        work, rest = self._work(table, layer, layers, form), None
        if mixing is not None:  # what is not mixed on the way
            rest = plan.work(table.layout, np.where((layer >= 0) & fused, -1, 0), 1, plan.MIX_ITEMS)
        with current(table.device) as place:
            call = self._call(table, plan.rows_with_center(table), mixing, rest, work)
            result = self._products(
                table, call, work, layers, call.mix if fused else self.native.Mix(), place, form,
                want_total=not per_layer, a_first=0, centred=True,
            )  # fmt: skip
            if rest is not None:
                self._launch_mix(call, rest, place)
        return result

    def _work(self, table: Table, group: np.ndarray, groups: int, form: Form) -> plan.Work:
        pairs, _ = self.native.shape(*form)
        return plan.work(table.layout, group, groups, max(1, plan.PRODUCT_BLOCKS // pairs))

    def _call(
        self, table: Table, address: np.ndarray, mixing: Mixing | None, mix: plan.Work | None,
        products: plan.Work | None,
    ) -> Call:  # fmt: skip
        """All that a call needs, on the device: rows are at address [T, R], the clients last. One transfer, and none
        for tensors that are where they were in a former call."""
        layout, native, R = table.layout, self.native, address.shape[1]
        lists = [work for work in (mix, products) if work is not None]
        key: tuple[Hashable, ...] = layout, R, address.tobytes(), mix, products

        def arrays(*mixed: np.ndarray) -> list[np.ndarray]:
            made = [address, plan.aligned(address), layout.numel, layout.codes, *mixed]
            return made + [a for work in lists for a in (work.items, work.order, work.first_slot)]

        if mixing is None:
            [memory] = plan.upload(table.device, (key, arrays))
            addresses, aligned, numel, codes, *more = (x.data_ptr() for x in memory)
            rows, struct = native.Rows(address=addresses, aligned=aligned, rows=R), native.Mix()
        else:
            row = mixing.row  # [T]
            to = plan.addresses(mixing.out) if mixing.out else np.empty((table.T, 0), np.int64)  # [T, M]
            key += row.tobytes(), to.tobytes()
            wanted = key, lambda: arrays(row.astype(np.int32), to, plan.aligned(address, to))
            memory, weights = plan.upload_with_weights(table.device, wanted, mixing.weights)
            addresses, aligned, numel, codes, row_, out, out_aligned, *more = (x.data_ptr() for x in memory)
            rows = native.Rows(address=addresses, aligned=aligned, rows=R)
            struct = native.Mix(
                rows=rows, first=R - table.K, clients=table.K, weights=weights.data_ptr(), row=row_, out=out,
                aligned=out_aligned, dtype=codes, outputs=len(mixing.out),
                not_finite=0 if mixing.not_finite is None else mixing.not_finite.data_ptr(),
            )  # fmt: skip
            memory = [*memory, weights]

        def work_of(at: int) -> Callable[[int, int], _cuda.Work]:
            items, order = more[at : at + 2]
            return lambda first, count: native.Work(items=items, first=first, count=count, order=order, numel=numel)

        return Call(
            rows, struct, work_of(0)(0, len(mix.items)) if mix is not None else None, work_of(len(more) - 3),
            more[-1], memory,
        )  # fmt: skip

    def _launch_mix(self, call: Call, work: plan.Work, place: tuple[int, int]) -> None:
        if call.mix_work is not None and len(work.items):
            self.native.mix(call.mix_work, call.mix, *place)

    def _products(
        self, table: Table, call: Call, work: plan.Work, groups: int, mix: _cuda.Mix, place: tuple[int, int],
        form: Form, *, want_total: bool = False, a_first: int, centred: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Products of rows, [groups, a_rows, b_rows], or their sum over groups, [1, a_rows, b_rows]"""
        device, native = table.device, self.native
        a_rows, b_rows, triangle, tensor_cores = form
        _, slices = native.shape(*form)
        partial = torch.empty(work.slots * slices, a_rows, b_rows, dtype=torch.float64, device=device)
        flags = torch.zeros(work.slots, dtype=torch.int32, device=device)
        for code, first, count in work.launches:
            native.products(
                code, call.products_work(first, count), call.rows, a_first=a_first, a_rows=a_rows, b_first=0,
                b_rows=b_rows, triangle=triangle, centred=centred, partial=partial.data_ptr(), flags=flags.data_ptr(),
                mix=mix, tensor_cores=tensor_cores, device=place[0], stream=place[1],
            )  # fmt: skip
        return self._reduce(partial, call, groups, place, slices, triangle, want_total)

    def _reduce(
        self, partial: torch.Tensor, call: Call, groups: int, place: tuple[int, int], slices: int = 1,
        triangle: bool = False, want_total: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """partial [slots * slices, rows, columns] summed by groups, or over all: [groups or 1, rows, columns]"""
        _, a_rows, b_rows = partial.shape
        by_group, total = partial.new_empty(groups, a_rows, b_rows), None
        if want_total:
            total = partial.new_empty(1, a_rows, b_rows)
        self.native.reduce(
            partial=partial.data_ptr(), first_slot=call.first_slot, groups=groups, slices=slices, a_rows=a_rows,
            b_rows=b_rows, triangle=triangle, group=by_group.data_ptr(), total=0 if total is None else total.data_ptr(),
            device=place[0], stream=place[1],
        )  # fmt: skip
        return by_group if total is None else total


try:
    from fastagg import _cuda
except ImportError as error:
    _missing = why_missing("_cuda", error)

    def why_not(device: torch.device) -> str:
        return _missing
else:
    _native = Kernels(_cuda)
    why_not, gram, mix, gram_mix = _native.why_not, _native.gram, _native.mix, _native.gram_mix
    gram_times, ranked_means, dots = _native.gram_times, _native.ranked_means, _native.dots
