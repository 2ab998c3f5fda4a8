"""The native kernels for CUDA tensors: the names and contracts of reference.py, on addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fastagg.backends import plan
from fastagg.table import Table

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


@dataclass
class Uploaded:
    """A struct of the native module, and the device memory it points to, to be held until kernels are launched"""

    struct: Any
    memory: list[torch.Tensor]


class Kernels:
    """gram, mix, gram_mix and dots by a native module: fastagg._cuda, or the emulated one of the tests"""

    def __init__(self, native: ModuleType, emulated: bool = False) -> None:
        self.native, self.emulated = native, emulated
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

    def mix(self, table: Table, weights: torch.Tensor, row: np.ndarray, out: list[list[torch.Tensor]]) -> None:
        with current(table.device) as place:
            address = table.client_address
            mix = self._mix(table, self._rows(table, address), address, weights, row, out)
            self._launch_mix(table, np.zeros(table.T, dtype=np.int32), mix, place)

    def gram_mix(self, table, layer, layers, per_layer, weights, row, out) -> torch.Tensor:
        return self._gram(table, layer, layers, per_layer, (weights, row, out))

    def dots(self, table: Table, left: list[list[torch.Tensor]], row: np.ndarray, rows: int) -> torch.Tensor:
        address = np.concatenate([table.client_address, plan.addresses(left)], axis=1)  # [T, K + M]
        group = np.where(plan.is_floating(table.layout), row, -1)
        with current(table.device) as place:
            return self._products(
                table, self._rows(table, address), group, rows, self._no_mix, place, a_first=table.K, a_rows=len(left),
                b_first=0, b_rows=table.K, triangle=False, centred=False, tensor_cores=False,
            )  # fmt: skip

    def _gram(self, table: Table, layer: np.ndarray, layers: int, per_layer: bool, mixing) -> torch.Tensor:
        R, address = table.K + 1, plan.rows_with_center(table)  # [T, R]
        tensor_cores = R > MOST_FMA_ROWS and self.tensor_cores(table.device)
        with current(table.device) as place:
            rows = self._rows(table, address)
            mix = self._no_mix if mixing is None else self._mix(table, rows, address, *mixing)
            fused = not tensor_cores  # on tensor cores a mix on the way costs more than a read of its own
            result = self._products(
                table, rows, layer, layers, mix if fused else self._no_mix, place, want_total=not per_layer, a_first=0,
                a_rows=R, b_first=0, b_rows=R, triangle=True, centred=True, tensor_cores=tensor_cores,
            )  # fmt: skip
            if mixing is not None:
                self._launch_mix(table, np.where((layer >= 0) & fused, -1, 0), mix, place)  # what is not mixed yet
        return result

    def _rows(self, table: Table, address: np.ndarray) -> Uploaded:
        memory = plan.upload(table.device, address, plan.aligned(address))
        address_, aligned = (x.data_ptr() for x in memory)
        return Uploaded(self.native.Rows(address=address_, aligned=aligned, rows=address.shape[1]), memory)

    def _mix(self, table, rows: Uploaded, address: np.ndarray, weights, row, out) -> Uploaded:
        to = plan.addresses(out)  # [T, M]
        arrays = [row, to, plan.aligned(address, to)]
        if weights.device.type == "cpu":
            weights = weights.detach().numpy()
            *memory, weights = plan.upload(table.device, *arrays, np.asarray(weights, dtype=np.float64))
        else:
            memory = plan.upload(table.device, *arrays)
            weights = weights.detach().to(table.device, torch.float64).contiguous()
        row_, out_, aligned = (x.data_ptr() for x in memory)
        struct = self.native.Mix(
            rows=rows.struct, first=address.shape[1] - table.K, clients=table.K, weights=weights.data_ptr(), row=row_,
            out=out_, aligned=aligned, outputs=len(out),
        )  # fmt: skip
        return Uploaded(struct, [*rows.memory, *memory, weights])

    def _launch_mix(self, table: Table, group: np.ndarray, mix: Uploaded, place: tuple[int, int]) -> None:
        for code, work in self._work(table, plan.work(table.layout, group, 1, plan.MIX_ITEMS)):
            self.native.mix(code, work.struct, mix.struct, *place)

    def _work(self, table: Table, work: plan.Work) -> Iterator[tuple[int, Uploaded]]:
        """(dtype code, its items) for every launch"""
        memory = plan.upload(table.device, work.items, work.order, table.layout.numel)
        items, order, numel = (x.data_ptr() for x in memory)
        for code, first, count in work.launches:
            yield (
                code,
                Uploaded(self.native.Work(items=items, first=first, count=count, order=order, numel=numel), memory),
            )

    def _products(
        self, table: Table, rows: Uploaded, group: np.ndarray, groups: int, mix: Uploaded, place: tuple[int, int], *,
        want_total: bool = False, a_rows: int, b_rows: int, triangle: bool, tensor_cores: bool, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Products of rows, [groups, a_rows, b_rows], or their sum over groups, [1, a_rows, b_rows]"""
        device, native = table.device, self.native
        pairs, slices = native.shape(a_rows, b_rows, triangle, tensor_cores)
        work = plan.work(table.layout, group, groups, max(1, plan.PRODUCT_BLOCKS // pairs))

        def matrices(n: int) -> torch.Tensor:
            return torch.empty(n, a_rows, b_rows, dtype=torch.float64, device=device)

        partial, flags = matrices(work.slots * slices), torch.zeros(work.slots, dtype=torch.int32, device=device)
        for code, some in self._work(table, work):
            native.products(
                code, some.struct, rows.struct, a_rows=a_rows, b_rows=b_rows, triangle=triangle, **options,
                partial=partial.data_ptr(), flags=flags.data_ptr(), mix=mix.struct, tensor_cores=tensor_cores,
                device=place[0], stream=place[1],
            )  # fmt: skip
        [first_slot] = plan.upload(device, work.first_slot)
        by_group, total = matrices(groups), matrices(1)
        native.reduce(
            partial=partial.data_ptr(), first_slot=first_slot.data_ptr(), groups=groups, slices=slices, a_rows=a_rows,
            b_rows=b_rows, triangle=triangle, group=by_group.data_ptr(), total=total.data_ptr() if want_total else 0,
            device=place[0], stream=place[1],
        )  # fmt: skip
        return total if want_total else by_group

    @property
    def _no_mix(self) -> Uploaded:
        return Uploaded(self.native.Mix(), [])


try:
    from fastagg import _cuda
except ImportError as error:
    _missing = f"fastagg._cuda was not built, or does not load ({error})"

    def why_not(device: torch.device) -> str:
        return _missing
else:
    _native = Kernels(_cuda)
    why_not, gram, mix, gram_mix, dots = _native.why_not, _native.gram, _native.mix, _native.gram_mix, _native.dots
