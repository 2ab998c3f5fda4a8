"""Clients that are added up as they come and then let go, for means whose weights do not depend on the models."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from fastagg._engine.arrivals.forms import zero_bytes
from fastagg._engine.checks import InputError
from fastagg._engine.dtypes import FLOATING
from fastagg._engine.forked import one_thread
from fastagg._engine.inputs import data_shares
from fastagg._engine.table import Table

CHUNK = 1 << 19  # elements at a time: a float32 becomes a float64 first, in 4 MB. Not kept, they took 1.4 x the time
LEAST, MOST = 1e-100, 1e100  # parts, other than 0: larger ones might overflow the sum with all others in it


def why_not(parts: Sequence[float]) -> str:
    """Why a client with these parts cannot be added; empty if it can"""
    odd = [part for part in parts if part and not LEAST <= part <= MOST]
    return f"it counts for {odd[0]:.3g} in the running sum, expected {LEAST:g} to {MOST:g}, or 0" if odd else ""


class RunningSum:
    """sum_k part_k w_k in float64, and the maximum of integers: a model of memory, of any number of clients.

    A client has a part among parameters and one among buffers.

    The parts are divided by their sum at the end, so the last bit may differ from that of a mix, and with the order of
    arrival.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.like = list(like)
        floats = [-(-t.numel() // 8) * 8 if t.dtype in FLOATING else 0 for t in like]
        ends = np.cumsum(floats).tolist()
        count = ends[-1] if ends else 0
        memory = zero_bytes(8 * count, torch.device("cpu")).view(torch.float64)  # one piece: clients go around it
        self.sums = [
            memory[end - size : end - size + t.numel()] if t.dtype in FLOATING else torch.empty_like(t).reshape(-1)
            for t, size, end in zip(like, floats, ends, strict=True)
        ]
        self._wide = torch.empty(min(CHUNK, len(memory)), dtype=torch.float64, device="cpu")
        self.parts: dict[Any, tuple[float, float]] = {}  # by client: of parameters, of buffers
        self._is_buffer = np.zeros(len(self.like), dtype=int)
        self._half = ""  # what was done with only some tensors, in words
        self._mean: list[torch.Tensor] | None = None
        self.any_data = False  # so far; integers are the largest of those who have some, or of all if nobody has
        self.of_updates = np.zeros(2)  # the parts of those who sent updates
        self._lock = threading.Lock()

    @one_thread()
    def add(self, name: Any, table: Table, parts: tuple[float, float], has_data: bool, is_update: bool) -> None:
        """The only client of a table"""
        [client], self._is_buffer = table.clients, (~table.layout.is_param).astype(int)
        with self._lock:
            self._check_whole()
            if self._mean is not None:
                raise InputError("the running sum was divided already: nobody can be added to it")
            if name in self.parts:  # and in no round: add() was interrupted in between
                raise InputError(f"client {name!r} was added to the running sum already")
            self._half = f"client {name!r} was added in part only"
            counts = has_data or not self.any_data
            anew = not self.parts or (has_data and not self.any_data)
            self.any_data |= has_data
            for t, w in enumerate(client):
                w, total, part = w.detach().reshape(-1), self.sums[t], parts[self._is_buffer[t]]
                if w.dtype in FLOATING:
                    for piece, add in zip(w.split(CHUNK), total.split(CHUNK), strict=True) if part else ():
                        add.add_(self._wide[: len(piece)].copy_(piece), alpha=part)
                elif counts:
                    if is_update and w.dtype != torch.bool:
                        w = w + self.like[t].reshape(-1)
                    total.copy_(w if anew else torch.maximum(total, w))
            self.parts[name] = parts
            self.of_updates += np.array(parts) if is_update else 0.0
            self._half = ""

    def shares(self, names: Iterable[Any]) -> np.ndarray:
        """The clients' weights in the mean of parameters"""
        return data_shares(self.parts_of(names)[:, 0])

    def parts_of(self, names: Iterable[Any]) -> np.ndarray:
        return np.array([self.parts[name] for name in names])  # [K, 2]

    @one_thread()
    def mean(self, step: float = 1.0, as_update: bool = False) -> list[torch.Tensor]:
        """In the form of the model, in the memory of the sums: nothing can be added any more. Parameters have gone this
        part of the way from the model that the sum is like; as_update: less that model, before it is rounded"""
        self._check_whole()
        self.shares(self.parts)  # which says what is wrong where they sum to zero
        if self._mean is None:
            masses, self._half = self.parts_of(self.parts).sum(0), "the sum was divided in part only"
            self._mean = [self._divided(t, masses, step, as_update) for t in range(len(self.sums))]
            self._half = ""
        return self._mean

    def _check_whole(self) -> None:
        if self._half:
            raise InputError(f"{self._half}: this sum cannot be used any more")

    def _divided(self, t: int, masses: np.ndarray, step: float, as_update: bool) -> torch.Tensor:
        total, like, kind = self.sums[t], self.like[t], self._is_buffer[t]
        mass, of_updates, step = float(masses[kind]), float(self.of_updates[kind]), 1.0 if kind else step
        if like.dtype not in FLOATING:
            if as_update and like.dtype != torch.bool:
                total -= like.reshape(-1)
            return total.view(like.shape)
        new = total.view(like.dtype)[: total.numel()]  # an element is written when those up to it were read
        of_base = 1 - step * (1 - of_updates / mass) - as_update
        base = like.detach().reshape(-1) if of_base else None
        for at in range(0, total.numel(), CHUNK):
            piece = slice(at, at + CHUNK)
            value = total[piece] / (mass / step)
            if base is not None:
                value.add_(base[piece].double(), alpha=of_base)
            new[piece] = value
        return new.view(like.shape)
