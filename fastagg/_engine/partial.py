"""Clients that hold only some of the tensors (the option `partial`): what they are compared by, and who mixes what.

Where a client does not have a tensor, the table has the global model's in its place, so the update there is zero, and
an inner product of two updates is one over what both clients have. From these sums

    cosine   of i and j    <d_i, d_j> / (||d_i|| ||d_j||), over the tensors that both have; 0 if they share none
    length   of d_k        ||d_k|| sqrt(D / D_k), D_k of the D elements being those that k has

make the Gram: its diagonal are the squares of the lengths, the other entries the cosines times two lengths. The global
model g has everything, and is one of its rows. Clients that have everything have the Gram that they always have. In
the Gram of a layer, a client that has nothing of it is the mean of those that have, so that it does not change what a
method makes of these.

Cosines over different tensors need not be those of any vectors. Where the matrix has negative eigenvalues these become
zero, and its rows are stretched back to length 1 (Rebonato and Jaeckel, 1999): no square, distance or cosine that a
method reads off it is impossible, and lengths stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from fastagg._engine import kernels, nonfinite
from fastagg._engine.gram import Gram
from fastagg._engine.numerics import ratio
from fastagg._engine.table import Table

INDEFINITE = 1e-10  # an eigenvalue of cosines below minus this; float64 leaves 1e-13 with a hundred clients
MOST_BYTES = 256 << 20  # of the products of pieces that are there at once
NONE = 1e-12  # of all weight: what clients with a tensor have together where none of them counts


def gram(table: Table, layerwise: bool, gram_of: Callable[[Table, bool], Gram]) -> Gram:
    """The Gram of a table of which some clients hold only a part

    gram_of   gives the layer-wise Gram of a table of whole models
    """
    pieces, has, numel, layer = _pieces(table, layerwise)
    P, R = has.shape
    sums = np.zeros((len(table.layout.layers) if layerwise else 1, R, R))
    squares = np.zeros((P, R))
    some = max(MOST_BYTES // (8 * R * R), 1)
    for first in range(0, P, some):
        products = gram_of(_slice(pieces, first, min(first + some, P)), True).host.matrix.numpy()
        for p, product in enumerate(products, first):
            sums[layer[p]] += product
            squares[p] = product.diagonal()
    for at, total in enumerate(sums):
        these = layer == at
        if these.any():
            known = np.any(has[these & (numel > 0)], axis=0)  # of a layer, whose clients have some of it
            sums[at] = _with_means(_scaled(total, squares[these], has[these], numel[these]), known)
    found = kernels.formed(table, layerwise, torch.from_numpy(sums))
    nonfinite.check_gram(table, found)
    return found


def _pieces(table: Table, layerwise: bool) -> tuple[Table, np.ndarray, np.ndarray, np.ndarray]:
    """The table with a layer for all tensors, of a layer if layer-wise, that the same clients have; and of these pieces
    who has them [P, K+1], g being first, their elements [P], and the layer that each belongs to [P]"""
    assert table.has is not None
    layout = table.layout
    used = np.flatnonzero(layout.gram_layer >= 0)
    layer = layout.gram_layer[used] if layerwise else np.zeros(len(used), dtype=np.int32)
    found, piece = distinct(layer, table.has[used])
    names = tuple(map(str, range(len(found))))
    numel = np.bincount(piece, layout.numel[used], len(found)).astype(np.int64)
    gram_layer = np.full(table.T, -1, dtype=np.int32)
    gram_layer[used] = piece
    some = replace(layout, layers=names, gram_layer=gram_layer, layer_numel=numel)
    has = np.hstack([np.ones((len(found), 1), dtype=np.int32), found[:, 1:]])
    return replace(table, layout=some), has.astype(bool), numel, found[:, 0]


def _slice(table: Table, first: int, stop: int) -> Table:
    """The table with some of its layers"""
    layout, layer = table.layout, table.layout.gram_layer
    gram_layer = np.where((layer >= first) & (layer < stop), layer - first, -1).astype(np.int32)
    names, numel = layout.layers[first:stop], layout.layer_numel[first:stop]
    return replace(table, layout=replace(layout, layers=names, gram_layer=gram_layer, layer_numel=numel))


def distinct(row: np.ndarray, has: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct pairs of a row and of clients, of row [T] and has [T, K], as an array [P, 1 + K]; and which of them
    each tensor is: [T]"""
    pairs, at = np.unique(np.column_stack([row, has]), axis=0, return_inverse=True)
    return pairs, at.reshape(-1).astype(np.int32)


def _with_means(products: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The products with the mean of the clients that are known in the place of those that are not, rows [K+1]"""
    if known.all() or not known[1:].any() or not np.isfinite(products).all():
        return products
    rows = np.diag(known.astype(np.float64))
    rows[~known] = known / known[1:].sum()
    rows[~known, 0] = 0  # g is no client
    return rows @ products @ rows.T


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is noticed on the diagonal
def _scaled(total: np.ndarray, squares: np.ndarray, has: np.ndarray, numel: np.ndarray) -> np.ndarray:
    """From the products [R, R] of rows over all pieces, and their squares over pieces [P, R] with so many elements [P],
    of which rows have them [P, R]"""
    if not np.isfinite(total).all() or len(has) == 1:  # whoever has something has everything
        return total
    squares = squares.clip(min=0) * has
    shared = squares.T @ has  # [R, R]: of a row, over what another has as well
    own = squares.sum(0) * ratio(float(numel.sum()), numel @ has)
    longer = np.sqrt(ratio(own[:, None], shared))  # than what is shared
    scaled = total * longer * longer.T
    np.fill_diagonal(scaled, own)
    if not np.isfinite(scaled).all():
        return scaled
    lengths = np.sqrt(own)
    return _possible(ratio(ratio(scaled, lengths[:, None]), lengths), lengths, scaled)


def _possible(cosines: np.ndarray, lengths: np.ndarray, products: np.ndarray) -> np.ndarray:
    """The products, or those of vectors of the same lengths with cosines that there can be"""
    values, vectors = np.linalg.eigh((cosines + cosines.T) / 2)
    if values[0] >= -INDEFINITE:
        return (products + products.T) / 2
    rows = vectors * np.sqrt(values.clip(min=0))
    rows = ratio(rows, np.sqrt((rows * rows).sum(1, keepdims=True))) * lengths[:, None]
    found = rows @ rows.T
    np.fill_diagonal(found, lengths**2)
    return (found + found.T) / 2


def weights(w: np.ndarray, row: np.ndarray, has: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights [S, M, K+1], of which tensors [T] take a row and the last is the global model's, as those of the clients
    that have each tensor, has [T, K]: what all clients have together is shared by these, in proportion. A tensor that
    no client of any weight has remains the global model's."""
    pairs, new_row = distinct(row, has)
    return np.stack([_among(w[pair[0]], pair[1:].astype(bool)) for pair in pairs]), new_row


def _among(w: np.ndarray, here: np.ndarray) -> np.ndarray:
    """Weights [M, K+1] as those of the clients here [K]"""
    given = w[:, :-1]
    kept, everyone = given * here, np.abs(given).sum(1)
    theirs = np.abs(kept).sum(1)
    nobody = theirs <= NONE * everyone
    kept = kept * ratio(everyone, np.where(nobody, 0.0, theirs))[:, None]
    # What weights of both signs add up to changes as they are shared; the global model makes up for it.
    rest = np.where(nobody | (given < 0).any(1), given.sum(1) - kept.sum(1), 0.0)
    center = w[:, -1] + rest
    center = np.where(nobody & (np.abs(center - np.rint(center)) <= NONE), np.rint(center), center)  # 1: bit for bit
    return np.column_stack([kept, center])


def parts(w: np.ndarray) -> np.ndarray:
    """The part from 0 to 1 that each client has in a tensor, of such weights [.., K]; 0 where nobody has any"""
    size = np.abs(w)
    return ratio(size, size.sum(-1, keepdims=True))


def groups(has: np.ndarray, used: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The tensors used [T], by who has them: the clients' numbers, and which tensors these are [T]"""
    found, at = distinct(np.where(used, 0, 1), has)
    return [(np.flatnonzero(pair[1:]), at == p) for p, pair in enumerate(found) if not pair[0]]
