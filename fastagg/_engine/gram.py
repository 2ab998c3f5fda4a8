"""What can be read off a Gram: norms, distances and similarities of models that are not read again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from fastagg._engine.forked import one_thread

# A squared distance below this many epsilons of the squares that it is the difference of has lost its digits: for
# float32, where distances are under 3 % of the updates' lengths and an entry's error of 1e-7 is one of 1e-4 in them.
LOST = 2.0**13


class OnHost(NamedTuple):
    """Products of a Gram, float64: [K], [K] and [], each with a leading [L] if layer-wise"""

    squares: np.ndarray  # ||d_k||^2
    along_global: np.ndarray  # <g, d_k>
    global_square: np.ndarray  # ||g||^2


class Gram:
    """Inner products of the global model g and the client updates d_k = w_k - g, in float64.

    A Gram is an operator. Most methods do not compare pairs of clients and need only these:

    gram @ v         <d_k, sum_j v_j d_j> for each client: [K]; a NumPy array for a NumPy array, a tensor for a tensor
    .squares         ||d_k||^2: [K]
    .along_global    <g, d_k>: [K]
    .along_mean      <d_k, mean of the d_j>: [K]
    .global_square   ||g||^2: []

    Methods that compare clients with each other need the whole matrix:

    .matrix          [K+1, K+1] of the rows [g, d_1, ..., d_K]; [L, K+1, K+1] if layer-wise

    formed   whether there is a matrix. With many clients a method that compares no pairs computes only the products it
             needs (fastagg.UnformedGram); gram="full" makes it form the Gram.

    numel    number of elements that the products run over; [L] if layer-wise
    layers   names of the L layers, or None
    absent   positions of clients that were left out of the round (see .dropped of a result). Their rows and columns are
             zero, as if they had not moved, so position k is the same client here and in the weights of the result.
             Means over clients do not count them.

    All methods below work on both forms; with layers, results have a leading [L]. The cosine of a zero vector is 0.
    """

    formed: bool = True

    def __init__(
        self, matrix: Tensor, numel: Tensor | int, layers: tuple[str, ...] | None = None, absent: Sequence[int] = ()
    ) -> None:
        self.matrix = matrix
        self.numel = numel if isinstance(numel, Tensor) else torch.tensor(numel, device="cpu")
        self.layers = layers
        self.absent = tuple(absent)

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @cached_property
    def host(self) -> Gram:
        """The same Gram in host memory: itself, or a copy made on first use"""
        if self.matrix.device.type == "cpu":
            return self
        return Gram(self.matrix.cpu(), self.numel, self.layers, self.absent)

    @property
    def squares(self) -> Tensor:
        """||d_k||^2: [K]"""
        if self.device.type == "cpu":
            return torch.from_numpy(self.on_host.squares.copy())
        return self._squares(self.updates())

    @property
    def along_global(self) -> Tensor:
        """<g, d_k>: [K]"""
        return self.matrix[..., 0, 1:]

    @property
    def global_square(self) -> Tensor:
        """||g||^2: []"""
        return self.matrix[..., 0, 0]

    @property
    def along_mean(self) -> Tensor:
        """<d_k, mean of the d_j>: [K]"""
        return torch.from_numpy(self._updates_on_host.sum(-1) / max(len(self.took_part), 1))

    def knows(self, v: np.ndarray) -> bool:
        """Whether `gram @ v` is known, or can be computed"""
        return True

    @overload
    def __matmul__(self, v: np.ndarray) -> np.ndarray: ...
    @overload
    def __matmul__(self, v: Tensor) -> Tensor: ...
    def __matmul__(self, v: Any) -> Any:
        """<d_k, sum_j v_j d_j> for v [K]: [K]; for several, v [K, M]: [K, M]. With layers, v is [K], [L, K] or
        [L, K, M]."""
        if isinstance(v, np.ndarray) and v.ndim == 1:
            return self._updates_on_host @ v
        v = v if isinstance(v, np.ndarray) else v.double()
        G = self._updates_on_host if isinstance(v, np.ndarray) else self.updates()
        several = v.ndim == 2 + self.layerwise
        return G @ v if several else (G @ v[..., None])[..., 0]

    @cached_property
    def on_host(self) -> OnHost:
        """What methods mostly need, as NumPy arrays; not to be changed"""
        whole = self.host.matrix.numpy()
        squares = np.maximum(np.einsum("...kk->...k", whole)[..., 1:], 0)  # NaN stays NaN
        return OnHost(squares, whole[..., 0, 1:], whole[..., 0, 0])

    @cached_property
    def _updates_on_host(self) -> np.ndarray:
        return np.ascontiguousarray(self.host.matrix.numpy()[..., 1:, 1:])

    @property
    def K(self) -> int:
        return self.matrix.shape[-1] - 1

    @property
    def layerwise(self) -> bool:
        return self.matrix.dim() == 3

    @one_thread()
    def model(self) -> Gram:
        """The Gram of the whole model: the sum over the layers, in their order"""
        if not self.layerwise:
            return self
        total = torch.zeros_like(self.matrix[0])
        for layer in self.matrix:  # not .sum(0): the order of addition is part of the contract
            total += layer
        return Gram(total, self.numel.sum(), absent=self.absent)

    @property
    def took_part(self) -> list[int]:
        """Positions of the clients that are not absent"""
        return [k for k in range(self.K) if k not in self.absent]

    def present(self) -> Gram:
        """The Gram of only those clients that took part"""
        return self.part(self.took_part) if self.absent else self

    @one_thread()
    def part(self, clients: Sequence[int]) -> Gram:
        """The Gram of some of the clients, in the given order"""
        at = torch.tensor([0, *(k + 1 for k in clients)], device=self.matrix.device)
        matrix = self.matrix.index_select(-2, at).index_select(-1, at)
        return Gram(matrix, self.numel, self.layers, [i for i, k in enumerate(clients) if k in self.absent])

    @one_thread()
    def among(self, K: int, positions: Sequence[int]) -> Gram:
        """The same Gram for K clients: these clients are at the given positions, the others are absent"""
        at = torch.tensor([0, *(k + 1 for k in positions)], device=self.matrix.device)
        matrix = self.matrix.new_zeros(*self.matrix.shape[:-2], K + 1, K + 1)
        matrix[..., at[:, None], at] = self.matrix
        return Gram(matrix, self.numel, self.layers, sorted(set(range(K)) - set(positions)))

    def updates(self) -> Tensor:
        """<d_i, d_j>: [K, K]"""
        return self.matrix[..., 1:, 1:]

    @one_thread()
    def models(self) -> Tensor:
        """<w_i, w_j>: [K, K]"""
        c, b = self.global_square[..., None, None], self.along_global
        return c + b[..., :, None] + b[..., None, :] + self.updates()

    @one_thread()
    def norms(self) -> Tensor:
        """||d_k||, the length of each client update, which is the client's distance to the global model: [K]"""
        return self.squares.sqrt()

    @one_thread()
    def distances(self) -> Tensor:
        """||w_i - w_j||: [K, K]"""
        return self.squared_distances().sqrt()

    @one_thread()
    def squared_distances(self) -> Tensor:
        """||w_i - w_j||^2: [K, K], zero if the two are equal within the precision of float64"""
        G = self.updates()
        s = self._squares(G)
        scale = s[..., :, None] + s[..., None, :]
        d = scale - 2 * G
        return torch.where(d <= 1e-14 * scale, 0.0, d)  # NaN stays NaN

    def clients_in_the_middle(self, epsilon: float) -> np.ndarray:
        """The client to centre a second Gram on if distances have lost their digits in this one: [1], or [L] if
        layer-wise; -1 if they have not.

        Digits are lost if a client is much closer to most of the others than all of these are to the centre. The method
        chooses the client with the smallest median of these relative distances, so that fewer than half of the clients
        cannot make it choose a remote one.
        """
        if self.K < 2:
            return np.full(self.numel.numel() if self.layerwise else 1, -1)
        half = self.on_host.squares.reshape(-1, self.K) / 2
        mean = half[:, :, None] + half[:, None, :]
        products = self._updates_on_host.reshape(-1, self.K, self.K)
        nearly = products > (1 - LOST * epsilon) * mean  # within twice the limit below
        if nearly.sum(-1).max() <= (self.K - 1) // 2 + 1:  # of whom one is the client itself
            return np.full(len(half), -1)  # as in nearly every round
        squares = 2 * (mean - products)
        squares[squares <= 2e-14 * mean] = 0  # as squared_distances() has it
        near = np.divide(squares, mean, out=np.ones_like(mean), where=(mean > 0) & np.isfinite(squares))
        near[:, np.arange(self.K), np.arange(self.K)] = np.inf
        middle = (self.K - 1) // 2  # of the K - 1 others, the upper if these are even
        typical = np.partition(near, middle, axis=-1)[..., middle]
        return np.where(typical.min(-1) < LOST * epsilon, typical.argmin(-1), -1)

    @one_thread()
    def cosine(self, of: str = "updates") -> Tensor:
        """cos(d_i, d_j) of="updates", cos(w_i, w_j) of="models": [K, K]; cos(w_k, g) of="global": [K]"""
        if of == "updates":
            return _cosine(self.updates())
        if of == "models":
            return _cosine(self.models())
        if of == "global":
            c, b = self.global_square[..., None], self.along_global
            lengths = (c + 2 * b + self.squares).clamp(min=0).sqrt()  # ||w_k||
            return _divide(c + b, lengths * c.sqrt()).clamp(-1, 1)
        raise ValueError(f"cosine of {of!r}: expected 'updates', 'models' or 'global'")

    @one_thread()
    def gaussian(self, sigma: float | Tensor | None = None) -> Tensor:
        """exp(-||w_i - w_j||^2 / (2 sigma^2)): [K, K]; sigma defaults to the mean distance between two clients"""
        squares = self.squared_distances()
        if sigma is None:
            here = self.took_part
            pairs = max(len(here) * (len(here) - 1), 1)
            sigma = (squares[..., here, :][..., here] if self.absent else squares).sqrt().sum((-2, -1)) / pairs
        sigma = torch.as_tensor(sigma, dtype=torch.float64, device=squares.device)
        if not bool((sigma >= 0).all()):
            raise ValueError(f"sigma must not be negative, got {sigma}")
        wide = 2 * sigma[..., None, None] ** 2
        return torch.exp(-torch.where(squares == 0, 0.0, squares / wide))  # equal clients: 1, also where sigma is 0

    @one_thread()
    def projection(self, weights: Tensor | Sequence[float] | None = None) -> Tensor:
        """<d_k, u> / ||u||, the length of each update along u = sum_j weights_j d_j (default: the mean update): [K]"""
        if weights is None:
            weights = [1 / len(self.took_part)] * self.K  # of those who are absent, nothing is added
        w = torch.as_tensor(weights, dtype=torch.float64, device=self.device)
        along = self @ w
        length = (along * w).sum(-1, keepdim=True).clamp(min=0).sqrt()
        return _divide(along, length)

    @staticmethod
    def _squares(products: Tensor) -> Tensor:
        return products.diagonal(dim1=-2, dim2=-1).clamp(min=0)

    def __repr__(self) -> str:
        layers = f", {len(self.layers)} layers" if self.layers is not None else ""
        return f"Gram(K={self.K}{layers}, numel={int(self.numel.sum())})"


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0"""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))


def _cosine(products: Tensor) -> Tensor:
    norms = Gram._squares(products).sqrt()
    return _divide(products, norms[..., :, None] * norms[..., None, :]).clamp(-1, 1)
