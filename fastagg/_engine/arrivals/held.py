"""Clients that arrived one by one, wherever they are: in memory or in files, in the model's dtype or a narrower one.

The bits are those of whole models in memory and in the model's dtype: see files/streamed.py. What is narrower becomes
wide piece by piece, in a buffer that stays in the cache; so do models become updates where others have sent updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fastagg._engine import table as tables
from fastagg._engine.checks import InputError
from fastagg._engine.files import paging
from fastagg._engine.files.mapped import MappedFile
from fastagg._engine.files.slabs import CHUNK, Slab
from fastagg._engine.files.streamed import InFiles, Places, SlabOutputs
from fastagg._engine.forked import one_thread
from fastagg._engine.in_memory import InMemory
from fastagg._engine.outputs import allocate, check_out, list_of
from fastagg._engine.table import Out, StateDict, Table

PIECE = 4 * CHUNK  # elements of a client at a time that go through a buffer: 256 KB of float32
BaseOf = Callable[[Sequence[str], Sequence[torch.Tensor]], list[torch.Tensor]]  # of keys and the global model


class Held(InFiles):
    """Models whose tensors are in memory or look at mapped files, of which new ones are made in memory.

    bases     clients who sent models where others sent updates, by position: what theirs are updates of
    buffers   how many models may have to go through a buffer, because they are narrow or among bases
    """

    pass_cost = InMemory.pass_cost  # whether the Gram is formed must not depend on where clients are, for bits would

    def __init__(
        self, files: Sequence[MappedFile], slab_bytes: int, *, bases: Mapping[int, BaseOf] | None = None,
        buffers: int = 0,
    ) -> None:  # fmt: skip
        if buffers:
            slab_bytes = min(slab_bytes, 4 * PIECE * buffers)
        super().__init__(files, _nothing, slab_bytes)
        self.sum_bytes = math.inf  # the result has the layers' Grams in any case
        self._bases = bases or {}
        self._buffered: dict[int, tuple[Any, bool]] = {}  # by a model's identity: the model, and whether it has to be
        self._buffers: dict[int, torch.Tensor] = {}

    def build(self, global_sd: StateDict | None, client_sds: Sequence[StateDict | InputError], **options: Any) -> Table:
        table = tables.build(global_sd, client_sds, narrow=global_sd is not None, **options)
        bases: dict[int, torch.Tensor] = {}
        for m, k in enumerate(table.given(range(table.K))):
            if k in self._bases:
                table.clients[m] = [t.detach() for t in table.clients[m]]  # of their own: others may have sent the same
                base = self._bases[k](table.layout.keys, table.global_model)
                bases |= {id(t): g for t, g in zip(table.clients[m], base, strict=True)}
        return replace(table, bases=bases)

    def each_part(self, table: Table, look: Callable[[Table], None]) -> None:
        """look(part) at all that is in a table of models in files, piece by piece"""
        self._walk("check", table, np.ones(table.T, bool), [], lambda slab: look(self.part(slab, table)))

    def part(self, slab: Slab, table: Table) -> Table:
        part = slab.of(table)
        buffered = [k for k, model in enumerate(table.clients) if self._is_buffered(table, model)]
        if buffered:
            clients, address = list(part.clients), part.client_address.copy()
            for k in buffered:
                clients[k] = self._in_buffer(part, clients[k], k)
                address[:, k] = [piece.data_ptr() for piece in clients[k]]
            part = replace(part, clients=clients, client_address=address)
        if table.center is not None and self._is_buffered(table, table.center):  # a client's, in its place
            center = self._in_buffer(part, part.global_model, -1)
            part = replace(part, center=center, center_address=np.array([piece.data_ptr() for piece in center]))
        return part

    def _is_buffered(self, table: Table, model: list[torch.Tensor]) -> bool:
        if id(model) not in self._buffered:
            each = zip(model, table.layout.dtypes, strict=True)
            self._buffered[id(model)] = model, any(t.dtype != dtype or id(t) in table.bases for t, dtype in each)
        return self._buffered[id(model)][1]

    @one_thread()
    def _in_buffer(self, part: Table, pieces: Any, k: int) -> list[torch.Tensor]:
        """Pieces of a model as the kernels want them, in a buffer that the next slab uses again"""
        layout = part.layout
        stops = np.cumsum(-(-layout.bytes // 64) * 64)  # each begins at a multiple of 64 bytes
        buffer = self._buffers.get(k)
        if buffer is None or buffer.numel() < stops[-1]:
            buffer = self._buffers[k] = torch.empty(int(stops[-1]), dtype=torch.uint8, device="cpu")
        made = []
        for p, piece in enumerate(pieces):
            begin = int(stops[p - 1]) if p else 0
            memory = buffer[begin : begin + int(layout.bytes[p])].view(layout.dtypes[p]).copy_(piece)
            base = part.bases.get(id(pieces.tensors[pieces.slab.t[p]]))
            if base is not None and memory.dtype != torch.bool:  # as updates.update_of
                memory.sub_(pieces.slab.of_tensor(base, p))
            made.append(memory)
        return made

    def _outs(self, table: Table, models: int, rows: int, out: Out) -> SlabOutputs:
        if out is None:
            return SlabOutputs(table, allocate(table, models), [None] * models)
        outs = list_of(out)
        return SlabOutputs(table, check_out(self._as_inputs(table), outs, models), outs)

    def _as_inputs(self, table: Table) -> Table:
        """The table with the memory of narrow clients as it is, for what must not be written"""
        wide = [k for k, model in enumerate(table.clients) if not self._is_buffered(table, model)]
        others = [tables.extent(t) for k in range(table.K) if k not in wide for t in table.clients[k]]
        address = np.ascontiguousarray(table.client_address[:, wide])
        return replace(table, client_address=address, other_inputs=[*table.other_inputs, *others])

    def _read(self, table: Table, center: bool) -> list[Places]:
        models = [*([table.global_model] if center else []), *table.clients]
        addresses = [*([table.center_address] if center else []), *table.client_address.T]
        items = [np.array([t.element_size() for t in model], dtype=np.int64) for model in models]
        some = int(np.argmax(table.layout.numel > 0))  # a tensor that is somewhere: a model is in files, or in memory
        return [place for place in zip(addresses, items, strict=True) if paging.is_mapped(place[0][some])]

    def _written(self, table: Table, outputs: list[list[torch.Tensor]]) -> list[Places]:
        return []


def _nothing(table: Table, models: int, rows: int) -> list[dict[str, torch.Tensor]]:
    raise AssertionError("new models are made in memory")
