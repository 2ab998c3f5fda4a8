"""Gram and mix of models that do not fit into memory: slab by slab, a slab being the same piece of every model.

Bits do not depend on where slabs are cut. Mixing is done element by element. The kernels add up a layer's Gram chunk by
chunk, so tensors are cut between two chunks only, each chunk of a layer that is cut has a Gram of its own, and those
are added here in the kernels' order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastagg._engine import backends, kernels, nonfinite, wide
from fastagg._engine import table as tables
from fastagg._engine.checks import InputError
from fastagg._engine.files import paging
from fastagg._engine.files.mapped import MappedFile
from fastagg._engine.files.slabs import LayerSums, Pieces, Slab, item_bytes, slabs_of
from fastagg._engine.gram import Gram
from fastagg._engine.outputs import finish
from fastagg._engine.result import Result, Results
from fastagg._engine.table import Out, StateDict, Table
from fastagg._engine.unformed import UnformedGram

if TYPE_CHECKING:
    from fastagg._engine.aggregator import Aggregator

Progress = Callable[[str, int, int], None]  # what is being done, bytes read of it so far, bytes in all
Places = tuple[np.ndarray, np.ndarray]  # where a model's tensors are, [T], and the bytes of an element of each, [T]
Outputs = Callable[[Table, int, int], list[dict[str, torch.Tensor]]]


class InFiles:
    """Models whose tensors look at mapped files. The last mix of a round is its outcome: each writes the same files.

    files        all that is read
    outputs      (table, M, S) -> M state dicts to write, whose tensors look at mapped files, for S rows of weights
    slab_bytes   of all models together, computed with at a time; as much again is read ahead
    """

    pass_cost = 6.0  # a disk of 5 GB/s, where memory gives 30 and more

    def __init__(
        self, files: Sequence[MappedFile], outputs: Outputs, slab_bytes: int, progress: Progress | None = None
    ) -> None:
        self.files, self.outputs, self.slab_bytes, self.progress = files, outputs, slab_bytes, progress
        self.sum_bytes: float = 2 * slab_bytes  # what the Grams of layers may take that are not complete
        self.passes = self.bytes_read = 0

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def why_not(self, method: Aggregator, inputs: Mapping[str, Any]) -> str:
        return method.why_not_on_files()

    def build(self, global_sd: StateDict | None, client_sds: Sequence[StateDict | InputError], **options: Any) -> Table:
        return tables.build(global_sd, client_sds, **options)

    def part(self, slab: Slab, table: Table) -> Table:
        """The table of a slab's pieces, for the kernels"""
        return slab.of(table)

    def _outs(self, table: Table, models: int, rows: int, out: Out) -> SlabOutputs:
        outs = self.outputs(table, models, rows)
        return SlabOutputs(table, [[each[key] for key in table.layout.keys] for each in outs], outs)

    def _read(self, table: Table, center: bool) -> list[Places]:
        """Of the models that a walk is to have in memory when it reads them"""
        addresses = [*([table.center_address] if center else []), *table.client_address.T]
        return [(address, item_bytes(table.layout)) for address in addresses]

    def _written(self, table: Table, outputs: list[list[torch.Tensor]]) -> list[Places]:
        """Of those that it writes"""
        return [(addresses_of(tensors), item_bytes(table.layout)) for tensors in outputs]

    def any(self, flag: bool) -> bool:
        return flag

    def deliver(self, result: Result | Results) -> None:
        pass

    def refuse(self, table: Table, clients: Sequence[int], words: str) -> None:
        if words:
            raise nonfinite.too_large(table, clients, words)

    def gram(self, table: Table, layerwise: bool) -> Gram:
        sums = LayerSums(table, layerwise, self.sum_bytes, table.K + 1)

        def compute(slab: Slab) -> None:
            slab, row, layers = sums.cut(slab)
            sums.add(layers, _kernels(table).gram(self.part(slab, table), row, len(layers), True))

        self._walk("Gram", table, table.layout.gram_layer >= 0, [], compute, sums.shape[1])
        gram = kernels.formed(table, layerwise, torch.from_numpy(sums.result()))
        nonfinite.check_gram(table, gram)
        return gram

    def mix(self, table: Table, weights: np.ndarray, row: np.ndarray, out: Out, blame: Table) -> list[Result]:
        outs = self._outs(table, weights.shape[1], len(weights), out)

        def compute(slab: Slab) -> None:
            part, tensors = self.part(slab, table), outs.of(slab)
            marks = not_finite_marks(part)
            _kernels(table).mix(part, torch.from_numpy(weights), row[slab.t], tensors, marks)
            outs.mark(slab, marks)

        self._walk("mix", table, np.ones(table.T, bool), outs.tensors, compute)
        nonfinite.check_outputs(blame, outs.not_finite)
        return outs.results()

    def gram_mix(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out
    ) -> tuple[Gram, list[Result]]:
        outs = self._outs(table, weights.shape[1], len(weights), out)
        sums = LayerSums(table, layerwise, self.sum_bytes, table.K + 1)

        def compute(slab: Slab) -> None:
            slab, gram_row, layers = sums.cut(slab)
            part, tensors = self.part(slab, table), outs.of(slab)
            marks = not_finite_marks(part)
            matrices = _kernels(table).gram_mix(
                part, gram_row, len(layers), True, torch.from_numpy(weights), row[slab.t], tensors, marks
            )
            outs.mark(slab, marks)
            sums.add(layers, matrices)

        self._walk("Gram and mix", table, np.ones(table.T, bool), outs.tensors, compute, sums.shape[1])
        nonfinite.check_outputs(table, outs.not_finite)
        gram = kernels.formed(table, layerwise, torch.from_numpy(sums.result()))
        nonfinite.check_gram(table, gram)
        return gram, outs.results()

    def gram_times(
        self, table: Table, layerwise: bool, weights: np.ndarray, row: np.ndarray, out: Out = None, *, mix: bool = False
    ) -> tuple[UnformedGram, list[Result]]:
        outs = self._outs(table, weights.shape[1], len(weights), out) if mix else SlabOutputs(table, [], [])
        sums = LayerSums(table, layerwise, self.sum_bytes, 2 + weights.shape[1])

        def compute(slab: Slab) -> None:
            slab, sum_row, layers = sums.cut(slab)
            part, tensors = self.part(slab, table), outs.of(slab)
            marks = not_finite_marks(part)
            columns = _kernels(table).gram_times(
                part,
                sum_row,
                len(layers),
                True,
                torch.from_numpy(weights),
                row[slab.t],
                tensors if mix else None,
                marks,
            )
            outs.mark(slab, marks)
            sums.add(layers, columns)

        used = np.ones(table.T, bool) if mix else table.layout.gram_layer >= 0
        name = "products and mix" if mix else "products"
        self._walk(name, table, used, outs.tensors, compute, sums.shape[1])
        nonfinite.check_outputs(table, outs.not_finite)
        gram = kernels.unformed(table, layerwise, sums.result(), weights)
        nonfinite.check_gram(table, gram)
        return gram, outs.results()

    def ranked_means(
        self, table: Table, means: np.ndarray, row: np.ndarray, out: Out = None, *, into: list[Result] | None = None,
        mixing: np.ndarray | None = None,
    ) -> list[Result]:  # fmt: skip
        if into is None:
            outs = self._outs(table, means.shape[1], len(means), out)
        else:
            outs = SlabOutputs(table, kernels.tensors_of(table, into), into)
        stats = np.broadcast_to(means, (len(means), len(outs.tensors), 3))

        def compute(slab: Slab) -> None:
            part, tensors = self.part(slab, table), outs.of(slab)
            marks = not_finite_marks(part)
            _kernels(table).ranked_means(part, stats, row[slab.t], tensors, marks, mixing)
            outs.mark(slab, marks)

        center = None if mixing is None and (means[..., 1] > means[..., 0]).all() else 0
        name = "buffers" if not (table.layout.is_param & (row >= 0)).any() else "ranks"
        self._walk(name, table, row >= 0, outs.tensors, compute, center)
        nonfinite.check_outputs(table, outs.not_finite)
        return into or outs.results()

    def wide_updates(
        self, table: Table, weights: np.ndarray, row: np.ndarray, used: np.ndarray
    ) -> dict[int, torch.Tensor]:
        updates = {t: wide.empty_update(table.global_model[t]) for t in np.flatnonzero(used).tolist()}

        def compute(slab: Slab) -> None:
            part = self.part(slab, table)
            models = [part.global_model, *part.clients]
            for p, (t, begin, count) in enumerate(zip(slab.t, slab.begin, slab.count, strict=True)):
                g, *clients = (model[p] for model in models)
                wide.weighted_update(g, clients, weights[row[t]], updates[int(t)].view(-1)[begin : begin + count])

        self._walk("mean update", table, used, [], compute, 0)
        return updates

    def _walk(
        self, name: str, table: Table, used: np.ndarray, outputs: list[list[torch.Tensor]],
        compute: Callable[[Slab], None], columns: int | None = None,
    ) -> None:  # fmt: skip
        """compute(slab) for all of the tensors used [T], the next slab being read meanwhile

        columns   of the sums that are computed from them and the global model; None: the latter is not read
        """
        center = columns is not None
        slabs = slabs_of(table, used, table.K + center + len(outputs), self.slab_bytes, columns or 0)
        read, written = self._read(table, center), self._written(table, outputs)
        models = center + (table.K if table.has is None else table.has.sum(1))
        total = sum(slab.bytes(table.layout, models) for slab in slabs)
        done = 0
        self._check_files()
        with paging.ReadAhead() as ahead:

            def ask(slab: Slab) -> tuple[list, Future]:
                inputs, outs = ([s for at, size in side for s in slab.pages(at, size)] for side in (read, written))
                return inputs + outs, ahead.populate(inputs, outs)

            coming = [ask(slab) for slab in slabs[:1]]
            for at, slab in enumerate(slabs):
                pages, there = coming.pop()
                self._wait(there)
                coming += [ask(following) for following in slabs[at + 1 : at + 2]]
                compute(slab)
                ahead.release(pages)
                done += slab.bytes(table.layout, models)
                if self.progress is not None:
                    self.progress(name, done, total)
        self._check_files()
        self.passes += bool((used & table.layout.is_param).any())  # buffers alone are no pass over the models
        self.bytes_read += done

    def _wait(self, there: Future) -> None:
        try:
            there.result()
        except paging.Unreadable as error:
            for file in self.files:
                if file.address <= error.address < file.address + file.length:
                    file.check_unchanged()
                    raise InputError(f"{file.path} cannot be read: {error.error.strerror}") from error
            raise error.error from None

    def _check_files(self) -> None:
        for file in self.files:
            file.check_unchanged()


class SlabOutputs:
    """The models that a mix writes"""

    def __init__(self, table: Table, tensors: list[list[torch.Tensor]], outputs: Sequence[StateDict | None]) -> None:
        """tensors [M][T], of the state dicts in outputs, or new ones where there is None"""
        self.table, self.tensors, self.outputs = table, tensors, outputs
        self.not_finite = not_finite_marks(table)

    def of(self, slab: Slab) -> list[list[torch.Tensor]]:
        """The pieces to write"""
        return [list(Pieces(row, slab)) for row in self.tensors]

    def mark(self, slab: Slab, marks: torch.Tensor) -> None:
        np.maximum.at(self.not_finite.numpy(), slab.t, marks.numpy())

    def results(self) -> list[Result]:
        return [finish(self.table, row, out) for row, out in zip(self.tensors, self.outputs, strict=True)]


def addresses_of(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def not_finite_marks(table: Table) -> torch.Tensor:
    """[T], for a mix to set"""
    return torch.zeros(table.T, dtype=torch.uint8, device=table.device)


def _kernels(table: Table):
    return backends.choose(table.device)
