"""What is done to the clients before a method sees them (its option `pre`), as arithmetic on their Gram.

A stage makes R rows of the K updates, d'_r = sum_k M[r, k] d_k. Stages compose by products of their matrices, each made
from the Gram M G M' that the stages before it have left. No mixed model is ever stored: a method sees the rows' Gram,
and its weights l of the rows are weights M'l of the clients.

    nnm         every client becomes the mean of the K - f nearest to it, itself included (Allouah et al., AISTATS 2023)
    bucketing   means of s clients each, in a random order (Karimireddy et al., ICLR 2022)
    clipping    updates longer than c are shortened to c
    arc         the floor(2 f (K - f) / K) longest updates are shortened to the next length (Allouah et al., ICLR 2025)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from fastagg._engine.checks import InputError, suggest
from fastagg._engine.forked import one_thread
from fastagg._engine.gram import Gram
from fastagg._engine.options import Range, check_options, options_of
from fastagg._engine.terminal import key_value

Pre = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None  # the option, as it is given


@dataclass(frozen=True)
class Rows:
    """What the stages so far have made of K clients: [R, K]

    gram     of the clients
    near     of the clients, to read distances from; maybe not centred on the global model
    """

    matrix: np.ndarray
    gram: Gram
    near: Gram

    def lengths(self) -> np.ndarray:
        """||d'_r||: [R]"""
        return transformed(self.gram, self.matrix).norms().numpy()

    def squared_distances(self) -> np.ndarray:
        """||d'_r - d'_s||^2: [R, R]"""
        return (
            transformed(self.near if sums_to_one(self.matrix) else self.gram, self.matrix).squared_distances().numpy()
        )


@dataclass(frozen=True)
class Stage:
    """A stage with its options, which are declared and checked like those of a method"""

    name: ClassVar[str]
    reads_gram: ClassVar[bool] = True

    def buckets(self, R: int, turn: int) -> np.ndarray | None:
        """The bucket of each of R rows, [R]; None: a row stays what it is"""
        return None

    def matrix(self, rows: Rows) -> np.ndarray:
        """[R, R], of a stage without buckets"""
        raise NotImplementedError


@dataclass(frozen=True)
class _Tolerant(Stage):
    """f clients may be faulty or malicious; default: the method's f"""

    f: Annotated[int, Range(0)] | None = None

    def checked(self, R: int) -> int:
        f = self.f or 0
        if 2 * f >= R:
            raise InputError(
                f"{self.name}: f={f} needs more than 2 f = {2 * f} clients or buckets, got {R}; the largest f possible "
                f"is {(R - 1) // 2}"
            )
        return f


@dataclass(frozen=True)
class NNM(_Tolerant):
    name = "nnm"

    def matrix(self, rows: Rows) -> np.ndarray:
        squares = rows.squared_distances()
        np.fill_diagonal(squares, -1)  # itself first, also where others are equal
        near = np.argsort(squares, axis=1, kind="stable")[:, : len(squares) - self.checked(len(squares))]
        matrix = np.zeros_like(squares)
        np.put_along_axis(matrix, near, 1 / near.shape[1], axis=1)
        return matrix


@dataclass(frozen=True)
class ARC(_Tolerant):
    name = "arc"

    def matrix(self, rows: Rows) -> np.ndarray:
        lengths = rows.lengths()
        R, f = len(lengths), self.checked(len(lengths))
        return _shortened(lengths, np.sort(lengths)[R - 1 - 2 * f * (R - f) // R])


@dataclass(frozen=True)
class Clipping(Stage):
    name = "clipping"

    c: Annotated[float, Range(1e-100)] | None = None

    def matrix(self, rows: Rows) -> np.ndarray:
        assert self.c is not None
        return _shortened(rows.lengths(), self.c)


@dataclass(frozen=True)
class Bucketing(Stage):
    """Which rows share a bucket depends on the seed, the number of rounds before this one, and the rows' number"""

    name = "bucketing"
    reads_gram = False

    s: Annotated[int, Range(1)] = 2
    seed: Annotated[int, Range(0)] = 0

    def buckets(self, R: int, turn: int) -> np.ndarray:
        drawn = [hashlib.sha256(f"{self.seed} {turn} {r}".encode()).digest() for r in range(R)]  # alike everywhere
        bucket = np.empty(R, dtype=np.int64)
        bucket[sorted(range(R), key=drawn.__getitem__)] = np.arange(R) // self.s
        return bucket


STAGES: dict[str, type[Stage]] = {cls.name: cls for cls in (NNM, Bucketing, Clipping, ARC)}
NEEDS = {"f": "the number of clients that may be faulty or malicious", "c": "the length that updates are clipped to"}


def read(method: str, pre: Any, f: int | None) -> tuple[Stage, ...]:
    """The stages of a method that itself tolerates f faulty clients, from what its option `pre` may be:

    "nnm", "bucketing s=3 + nnm", {"stage": "nnm", "f": 2}, or a list of names and such tables
    """
    if pre is None:
        return ()
    if isinstance(pre, str):
        pre = [_of_text(method, text) for text in pre.split("+")]
    elif isinstance(pre, Mapping):
        pre = [pre]
    if not isinstance(pre, Iterable):
        raise ValueError(f"{method}: pre={pre!r}; expected a list of stages, of which there are {', '.join(STAGES)}")
    return tuple(_stage(method, _of_text(method, one) if isinstance(one, str) else one, f) for one in pre)


def _of_text(method: str, text: str) -> dict[str, Any]:
    """A name and options after it, key=value"""
    name, *more = text.split() or [""]
    options: dict[str, Any] = {"stage": name}
    for pair in more:
        try:
            options |= key_value(pair)
        except ValueError as error:
            raise ValueError(f"{method}: pre: {name}: {error}") from error
    return options


def _stage(method: str, given: Any, f: int | None) -> Stage:
    if not isinstance(given, Mapping) or not isinstance(given.get("stage"), str):
        raise ValueError(f"{method}: pre has {given!r}; expected the name of a stage, or a table with its name: "
                         '{"stage": "nnm", "f": 2}')  # fmt: skip
    name = given["stage"]
    if name not in STAGES:
        raise ValueError(f"{method}: pre: no stage {name!r}{suggest(name, STAGES)}; there are {', '.join(STAGES)}")
    cls, where = STAGES[name], f"{method}: pre: {name}"
    known = options_of(cls)
    options = {key: value for key, value in given.items() if key != "stage"}
    for unknown in options.keys() - known.keys():
        raise ValueError(f"{where}: no option {unknown!r}{suggest(str(unknown), known)}; it has {', '.join(known)}")
    values = {key: option.default for key, option in known.items()} | options
    if "f" in known and values["f"] is None:
        values["f"] = f
    for key, value in values.items():
        if value is None:
            raise ValueError(
                f'{where} needs {key}, {NEEDS[key]}: {{"stage": "{name}", "{key}": ..}} or "{name} {key}=.."'
            )
    check_options(cls, where, values)
    return cls(**values)


def read_gram(stages: Sequence[Stage]) -> bool:
    return any(stage.reads_gram for stage in stages)


def compare_pairs(stages: Sequence[Stage]) -> bool:
    return any(isinstance(stage, NNM) for stage in stages)


def make_buckets(stages: Sequence[Stage]) -> bool:
    return any(isinstance(stage, Bucketing) for stage in stages)


def rows_of(stages: Sequence[Stage], K: int, turn: int) -> np.ndarray:
    """The row that each of K clients is in or, without buckets, is: [K]"""
    row = np.arange(K)
    for stage in stages:
        bucket = stage.buckets(int(row.max()) + 1, turn)
        row = row if bucket is None else bucket[row]
    return row


def matrix_of(stages: Sequence[Stage], K: int, turn: int, gram: Gram | None, near: Gram | None) -> np.ndarray:
    """What all stages together make of K clients: [R, K]. Grams may be None where no stage reads them."""
    matrix = np.eye(K)
    for stage in stages:
        bucket = stage.buckets(len(matrix), turn)
        if bucket is not None:
            members = (bucket == np.arange(bucket.max() + 1)[:, None]).astype(np.float64)
            matrix = members / members.sum(1, keepdims=True) @ matrix
        else:
            assert gram is not None
            assert near is not None
            matrix = stage.matrix(Rows(matrix, gram, near)) @ matrix
    return matrix


@one_thread()
def transformed(gram: Gram, matrix: np.ndarray) -> Gram:
    """The Gram of the rows, [R, K], of its updates, in host memory"""
    whole = np.zeros((len(matrix) + 1, gram.K + 1))
    whole[0, 0], whole[1:, 1:] = 1, matrix
    products = whole @ gram.host.matrix.numpy() @ whole.T
    return Gram(torch.from_numpy((products + products.swapaxes(-1, -2)) / 2), gram.numel, gram.layers)


def sums_to_one(matrix: np.ndarray) -> bool:
    """Whether the rows are means of models: their distances do not depend on what the Gram is centred on"""
    return bool((np.abs(matrix.sum(1) - 1) <= 1e-12).all())


def _shortened(lengths: np.ndarray, most: float) -> np.ndarray:
    return np.diag(np.divide(most, lengths, out=np.ones_like(lengths), where=lengths > most))
