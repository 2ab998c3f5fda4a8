"""Clients that are added up as they come and then let go, for means whose weights do not depend on the models."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from fastagg._engine.checks import InputError
from fastagg._engine.dtypes import FLOATING
from fastagg._engine.forked import one_thread
from fastagg._engine.inputs import data_shares
from fastagg._engine.table import Table

CHUNK = 1 << 19  # elements at a time: a float32 becomes a float64 first, in 4 MB


class RunningSum:
    """sum_k part_k w_k in float64, and the maximum of integers: a model of memory, of any number of clients.

    The parts are divided by their sum at the end, so the last bit may differ from that of a mix, and with the order of
    arrival.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.like = list(like)
        floats = [-(-t.numel() // 8) * 8 if t.dtype in FLOATING else 0 for t in like]
        ends = np.cumsum(floats).tolist()
        memory = torch.zeros(
            ends[-1] if ends else 0, dtype=torch.float64
        )  # in one piece: clients come and go around it
        self.sums = [
            memory[end - size : end - size + t.numel()] if t.dtype in FLOATING else torch.empty_like(t).reshape(-1)
            for t, size, end in zip(like, floats, ends, strict=True)
        ]
        self.parts: dict[Any, float] = {}  # by client
        self._half: Any = None  # a client of which only some tensors were added
        self._mean: list[torch.Tensor] | None = None
        self.any_data = False  # so far; integers are the largest of those who have some, or of all if nobody has
        self.of_updates = 0.0  # the part of those who sent updates
        self._lock = threading.Lock()

    @one_thread()
    def add(self, name: Any, table: Table, part: float, has_data: bool, is_update: bool) -> None:
        """The only client of a table"""
        [client] = table.clients
        with self._lock:
            if self._mean is not None:
                raise InputError("the running sum was divided already: nobody can be added to it")
            self._half = self._half or [name]
            counts = has_data or not self.any_data
            anew = not self.parts or (has_data and not self.any_data)
            self.any_data |= has_data
            for t, w in enumerate(client):
                w, total = w.detach().reshape(-1), self.sums[t]
                if w.dtype in FLOATING:
                    for at in range(0, w.numel() if part else 0, CHUNK):  # in float64, the wider of the two
                        total[at : at + CHUNK].add_(w[at : at + CHUNK], alpha=part)
                elif counts:
                    if is_update and w.dtype != torch.bool:
                        w = w + self.like[t].reshape(-1)
                    total.copy_(w if anew else torch.maximum(total, w))
            self.parts[name] = part
            self.of_updates += part if is_update else 0.0
            self._half = None

    def shares(self, names: Iterable[Any]) -> np.ndarray:
        """The clients' weights in the mean"""
        return data_shares(np.array([self.parts[name] for name in names]))

    @one_thread()
    def mean(self) -> list[torch.Tensor]:
        """In the form of the model, in the memory of the sums: nothing can be added any more"""
        if self._half is not None:
            raise InputError(f"client {self._half[0]!r} was added in part only: this sum cannot be used any more")
        self.shares(self.parts)  # which says what is wrong where they sum to zero
        mass = sum(self.parts.values())
        if self._mean is None:
            self._mean = [self._divided(t, mass) for t in range(len(self.sums))]
        return self._mean

    def _divided(self, t: int, mass: float) -> torch.Tensor:
        total, like = self.sums[t], self.like[t]
        if like.dtype not in FLOATING:
            return total.view(like.shape)
        new = total.view(like.dtype)[: total.numel()]  # an element is written when those up to it were read
        base = like.detach().reshape(-1) if self.of_updates else None
        for at in range(0, total.numel(), CHUNK):
            piece = slice(at, at + CHUNK)
            value = total[piece] / mass
            if base is not None:
                value.add_(base[piece].double(), alpha=self.of_updates / mass)
            new[piece] = value
        return new.view(like.shape)
