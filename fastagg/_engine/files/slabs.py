"""Slabs: the same piece of every model, small enough that all of them fit into memory; and Grams added up over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fastagg._engine.files import paging
from fastagg._engine.table import InputError, Layout, Table

CHUNK = 16384  # elements that the native kernels add up at once: chunk_elements in csrc/cpu/work.h


@dataclass(eq=False)
class Slab:
    """P pieces of tensors, the same of every model: elements [begin, begin + count) of tensor t"""

    t: np.ndarray  # [P] int64, as the others
    begin: np.ndarray
    count: np.ndarray

    def bytes(self, layout: Layout, models: int | np.ndarray = 1) -> int:
        """models: how many of them have it; maybe of each tensor, [T]"""
        return int((self.count * (item_bytes(layout) * models)[self.t]).sum())

    def pages(self, address: np.ndarray, item: np.ndarray) -> list[tuple[int, int]]:
        """Where the pieces of a model are, with tensors at address [T] of elements with so many bytes [T]"""
        item = item[self.t]
        return paging.ranges(address[self.t] + self.begin * item, self.count * item)

    def of_tensor(self, tensor: torch.Tensor, p: int) -> torch.Tensor:
        """Piece p, of one model's tensor t[p]"""
        begin = int(self.begin[p])
        return tensor.detach().reshape(-1)[begin : begin + int(self.count[p])]

    def of(self, table: Table) -> Table:
        """The table of the pieces"""
        layout, t = table.layout, self.t
        item = item_bytes(layout)[t]
        names = t.tolist()
        part = replace(
            layout,
            keys=tuple(layout.keys[i] for i in names),
            shapes=tuple((n,) for n in self.count.tolist()),
            dtypes=tuple(layout.dtypes[i] for i in names),
            numel=self.count, bytes=self.count * item, codes=layout.codes[t], layer=layout.layer[t],
            is_param=layout.is_param[t], gram_layer=layout.gram_layer[t],
        )  # fmt: skip
        return replace(
            table, layout=part, as_numpy=(False,) * len(t),
            clients=[Pieces(client, self) for client in table.clients],
            center=None if table.center is None else Pieces(table.center, self),
            client_address=table.client_address[t] + (self.begin * item)[:, None],
            center_address=table.center_address[t] + self.begin * item,
            has=None,
        )  # fmt: skip


class Pieces:
    """A slab of one model's tensors, each made when asked for: the native kernels want addresses only"""

    def __init__(self, tensors: Sequence[torch.Tensor], slab: Slab) -> None:
        self.tensors, self.slab = tensors, slab

    def __len__(self) -> int:
        return len(self.slab.t)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[p] for p in range(len(self)))

    def __getitem__(self, p: int) -> torch.Tensor:
        return self.slab.of_tensor(self.tensors[self.slab.t[p]], p)


def slabs_of(table: Table, used: np.ndarray, models: int, most: int, columns: int) -> list[Slab]:
    """The tensors used, in their order, in slabs that take at most `most` bytes in so many models, and in the sums
    [K+1, columns] of their chunks; or of one chunk, where that alone takes more."""
    layout, item = table.layout, item_bytes(table.layout)
    matrix = (table.K + 1) * columns * 8.0  # one for each layer in a slab, or chunk of a layer
    slabs: list[Slab] = []
    pieces: list[tuple[int, int, int]] = []
    left, held = float(most), set()
    for t in np.flatnonzero(used & (layout.numel > 0)).tolist():
        numel, each, begin = int(layout.numel[t]), int(item[t]) * models + matrix / CHUNK, 0
        layer = int(layout.gram_layer[t])
        while begin < numel:
            first = matrix if layer >= 0 and layer not in held else 0.0
            count = min(int(max(left - first, 0.0) / each), numel - begin)
            if begin + count < numel:
                count = count // CHUNK * CHUNK
            if not count and pieces:
                slabs.append(_slab(pieces))
                pieces, left, held = [], float(most), set()
                continue
            count = count or min(CHUNK, numel - begin)
            pieces.append((t, begin, count))
            begin, left = begin + count, max(left - first - count * each, 0.0)
            held.add(layer)
    return [*slabs, _slab(pieces)] if pieces else slabs


def _slab(pieces: list[tuple[int, int, int]]) -> Slab:
    return Slab(*np.array(pieces, dtype=np.int64).T.copy())


class LayerSums:
    """Sums [K+1, columns] of the layers, added up over slabs in the order in which the kernels add chunks: the layers'
    Grams, or columns of them"""

    def __init__(self, table: Table, layerwise: bool, most: float, columns: int) -> None:
        layout = table.layout
        self.layout, self.layerwise, self.shape, self.most = layout, layerwise, (table.K + 1, columns), most
        if layerwise:
            self._require_memory(len(layout.layers))
        self.left = layout.layer_numel.copy()  # [L], elements that are still to come
        self.sums: dict[int, np.ndarray] = {}  # of layers that are begun, or wait for earlier ones
        self.total, self.next = np.zeros(self.shape), 0

    def _require_memory(self, layers: int) -> None:
        """Raises where the Grams of so many layers at once take more than is allowed"""
        needed = layers * self.shape[0] * self.shape[1] * 8
        if layers > 1 and needed > self.most:
            clients, size = self.shape[0] - 1, f"{needed / 1e9:.2g} GB"
            raise InputError(f"the Grams of {layers} layers and {clients} clients take {size}: allow more memory")

    def cut(self, slab: Slab) -> tuple[Slab, np.ndarray, np.ndarray]:
        """The slab with the layers that it does not hold whole cut into chunks; the row of the result that each piece's
        Gram goes to, -1 for none; and the layer of each row"""
        layer = self.layout.gram_layer[slab.t]
        held = np.bincount(layer[layer >= 0], slab.count[layer >= 0], len(self.left)).astype(np.int64)
        self.left -= held
        whole = held == self.layout.layer_numel
        chunked = (layer >= 0) & ~whole[layer]
        n = np.where(chunked, -(-slab.count // CHUNK), 1)
        piece = np.repeat(np.arange(len(n)), n)
        within = (np.arange(len(piece)) - np.repeat(np.cumsum(n) - n, n)) * CHUNK
        count = np.where(chunked[piece], np.minimum(CHUNK, slab.count[piece] - within), slab.count[piece])
        slab = Slab(slab.t[piece], slab.begin[piece] + within, count)

        layer, chunked = layer[piece], chunked[piece]
        label = np.where(chunked, len(self.left) + np.arange(len(layer)), layer)
        used = layer >= 0
        row = np.full(len(layer), -1, dtype=np.int32)
        _, first, row[used] = np.unique(label[used], return_index=True, return_inverse=True)
        return slab, row, layer[used][first]

    def add(self, layers: np.ndarray, matrices: torch.Tensor) -> None:
        for layer, matrix in zip(layers.tolist(), matrices.cpu().numpy(), strict=True):
            if layer not in self.sums:
                self._require_memory(len(self.sums) + 1)
                self.sums[layer] = np.zeros(self.shape)
            self.sums[layer] += matrix
        while not self.layerwise and self.next < len(self.left) and not self.left[self.next]:
            self.total += self.sums.pop(self.next, 0.0)  # in the order of the layers
            self.next += 1

    def result(self) -> np.ndarray:
        """[L, K+1, columns] if layer-wise, else [1, K+1, columns]"""
        if not self.layerwise:
            self.add(np.zeros(0), torch.empty(0, device="cpu"))  # layers without parameters, at the end
            return self.total[None]
        none = np.zeros(self.shape)
        return np.stack([self.sums.get(layer, none) for layer in range(len(self.left))])


def item_bytes(layout: Layout) -> np.ndarray:
    """Bytes of an element of each tensor: [T]"""
    return layout.bytes // np.maximum(layout.numel, 1)
