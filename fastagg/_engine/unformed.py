"""A Gram that is never formed: only its diagonal, its row of the global model, and its products with a few vectors.

A product of the Gram with a vector v is <d_k, u> with u = sum_j v_j d_j: one read of the clients, and work that grows
with K and not with its square.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastagg._engine.gram import LOST, Gram, OnHost

Multiply = Callable[[np.ndarray], np.ndarray]  # v -> G v, both [K] or [L, K], by another read


class UnformedGram(Gram):
    """Inner products of the global model g and the client updates d_k = w_k - g, as far as a round needed them.

    .squares, .along_global, .global_square, norms() and cosine("global") are there, and `gram @ v` for the vectors v
    that were multiplied with in the round (.vectors). All else compares pairs of clients, and raises a RuntimeError:
    with gram="full", a method forms the whole Gram.
    """

    formed = False

    def __init__(
        self, squares: np.ndarray, along_global: np.ndarray, global_square: np.ndarray,
        products: Sequence[tuple[np.ndarray, np.ndarray]], numel: Tensor, layers: tuple[str, ...] | None = None,
        absent: Sequence[int] = (), multiply: Multiply | None = None,
    ) -> None:  # fmt: skip
        """products: pairs of v and G v; all arrays are [K], or [L, K] if layer-wise"""
        self._diagonal, self._along, self._own = squares, along_global, global_square
        self._products = list(products)
        self.numel, self.layers, self.absent = numel, layers, tuple(absent)
        self.multiply = multiply  # while the round lasts

    @classmethod
    def of(
        cls, columns: np.ndarray, vectors: np.ndarray, numel: Tensor, layers: tuple[str, ...] | None = None
    ) -> UnformedGram:
        """From what the kernel gives, [K+1, 2+M] or [L, K+1, 2+M], for vectors [M, K] or [L, M, K]"""
        products = [(vectors[..., m, :].copy(), columns[..., 1:, 2 + m].copy()) for m in range(columns.shape[-1] - 2)]
        return cls(columns[..., 1:, 0].copy(), columns[..., 1:, 1].copy(), columns[..., 0, 0].copy(), products, numel,
                   layers)  # fmt: skip

    @property
    def matrix(self) -> Tensor:  # type: ignore[override]
        raise RuntimeError(
            "this Gram was not formed, for a round of many clients is cheaper without it: it has norms() and "
            "cosine('global'), but nothing that compares two clients. Pass gram='full' to the method, or call "
            "fastagg.gram"
        )

    @property
    def products(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Those vectors v and their products G v"""
        return list(self._products)

    @property
    def vectors(self) -> list[np.ndarray]:
        """The vectors whose products with the Gram are known: [K] or [L, K] each"""
        return [v for v, _ in self._products]

    @property
    def host(self) -> Gram:  # type: ignore[override]
        return self

    @property
    def on_host(self) -> OnHost:  # type: ignore[override]
        return OnHost(np.maximum(self._diagonal, 0), self._along, np.asarray(self._own))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def squares(self) -> Tensor:
        return torch.from_numpy(self._diagonal).clamp(min=0)

    @property
    def along_global(self) -> Tensor:
        return torch.from_numpy(self._along)

    @property
    def global_square(self) -> Tensor:
        return torch.from_numpy(np.asarray(self._own))

    @property
    def along_mean(self) -> Tensor:
        return torch.from_numpy(self._times(np.full(self.K, 1 / max(len(self.took_part), 1))))

    @property
    def K(self) -> int:
        return self._diagonal.shape[-1]

    @property
    def layerwise(self) -> bool:
        return self._diagonal.ndim == 2

    def __matmul__(self, v: Any) -> Any:
        given = v.detach().cpu().double().numpy() if isinstance(v, Tensor) else np.asarray(v, dtype=np.float64)
        if given.ndim == 2 + self.layerwise:
            out = np.stack([self._times(given[..., m]) for m in range(given.shape[-1])], axis=-1)
        else:
            out = self._times(given)
        return torch.from_numpy(out) if isinstance(v, Tensor) else out

    def knows(self, v: np.ndarray) -> bool:
        return self.multiply is not None or self._known(np.broadcast_to(v, self._diagonal.shape)) is not None

    def _known(self, v: np.ndarray) -> np.ndarray | None:
        for known, product in self._products:
            if np.array_equal(known, v) or np.array_equal(known, self._without_absent(v)):
                return product.copy()
        return None if v.any() else np.zeros_like(self._diagonal)

    def _times(self, v: np.ndarray) -> np.ndarray:
        v = np.broadcast_to(v, self._diagonal.shape)
        if (known := self._known(v)) is not None:
            return known
        if self.multiply is None:
            raise RuntimeError(
                "this Gram was not formed, and its product with this vector was not computed in the round: pass "
                "gram='full' to the method, or call fastagg.gram"
            )
        product = self.multiply(v)
        self._products.append((v.copy(), product))
        return product.copy()

    @property
    def last_product(self) -> np.ndarray:
        return self._products[-1][1]

    def _without_absent(self, v: np.ndarray) -> np.ndarray:
        if not self.absent:
            return v
        v = v.copy()
        v[..., list(self.absent)] = 0
        return v

    def unscaled(self, v: np.ndarray, scale: float) -> UnformedGram:
        """The same, with the product with v in the place of that with scale times v, its only one"""
        v, [(_, product)] = np.broadcast_to(v, self._diagonal.shape), self._products
        return self._like(products=[(v, product / scale)] if scale else [])

    def closed(self) -> UnformedGram:
        """The same, for a result: it holds no client, and multiplies with no other vectors"""
        return self._like()

    def _like(self, **other: Any) -> UnformedGram:
        facts = {
            "squares": self._diagonal, "along_global": self._along, "global_square": self._own,
            "products": self._products, "numel": self.numel, "layers": self.layers, "absent": self.absent,
        }  # fmt: skip
        return UnformedGram(**{**facts, **other})

    def model(self) -> Gram:
        if not self.layerwise:
            return self
        common = [(v[0], in_order(product)) for v, product in self._products if (v == v[0]).all()]
        return self._like(
            squares=in_order(self._diagonal), along_global=in_order(self._along),
            global_square=in_order(np.asarray(self._own)), products=common, numel=self.numel.sum(), layers=None,
            multiply=None if self.multiply is None else lambda v: in_order(self._times(v)),
        )  # fmt: skip

    def part(self, clients: Sequence[int]) -> Gram:
        at = list(clients)
        left = np.setdiff1d(np.arange(self.K), at)
        known = [(v[..., at], product[..., at]) for v, product in self._products if not v[..., left].any()]

        def multiply(v: np.ndarray) -> np.ndarray:
            return self._times(_spread(v, self.K, at))[..., at]

        return self._like(
            squares=self._diagonal[..., at], along_global=self._along[..., at], products=known,
            absent=[i for i, k in enumerate(at) if k in self.absent],
            multiply=None if self.multiply is None else multiply,
        )  # fmt: skip

    def among(self, K: int, positions: Sequence[int]) -> Gram:
        at = list(positions)
        return self._like(
            squares=_spread(self._diagonal, K, at), along_global=_spread(self._along, K, at),
            products=[(_spread(v, K, at), _spread(product, K, at)) for v, product in self._products],
            absent=sorted(set(range(K)) - set(at)),
        )  # fmt: skip

    def clients_in_the_middle(self, epsilon: float) -> np.ndarray:
        """As of a Gram that was formed, but by the distances of the clients to their mean instead of each other"""
        v, along = (x.reshape(-1, self.K) for x in self._products[0])
        own = self._diagonal.reshape(-1, self.K).clip(min=0)
        total = v.sum(-1, keepdims=True)
        total[total == 0] = 1
        to_mean = along / total
        mean_square = (v / total * to_mean).sum(-1, keepdims=True)
        apart = np.maximum(own + mean_square - 2 * to_mean, 0)
        typical = own / 2 + mean_square / 2
        near = np.divide(apart, typical, out=np.ones_like(own), where=(typical > 0) & np.isfinite(apart))
        if self.K < 2:
            return np.full(len(own), -1)
        lost = np.median(near, axis=-1) < LOST * epsilon
        return np.where(lost & (typical > 0).any(-1), near.argmin(-1), -1)

    def __repr__(self) -> str:
        return super().__repr__().replace("Gram(", "UnformedGram(")


def _spread(values: np.ndarray, K: int, at: Sequence[int]) -> np.ndarray:
    """Values of some clients for K of them, the others' being 0"""
    out = np.zeros((*values.shape[:-1], K))
    out[..., at] = values
    return out


def in_order(values: np.ndarray) -> np.ndarray:
    """The sum over layers, in their order"""
    total = np.zeros_like(values[0])
    for layer in values:
        total = total + layer
    return total
