"""x and y of sources that hold samples: pairs of arrays, or map-style data sets that are read item by item."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fastagg.sim.datasets import DataError

X_COLUMNS = ("image", "img", "pixel_values", "input_ids", "x", "features", "data")  # in any case
Y_COLUMNS = ("label", "labels", "y", "target", "targets", "class")


def gathered(sources: list[tuple[str, Any]], columns: tuple[str, str] | None) -> tuple[Tensor, Tensor, list[int]]:
    """x and y of all sources, one after the other, and how many samples each has"""
    if len(sources) == 1 and (pair := pair_of(sources[0][1])) is not None:
        where = sources[0][0]
        x, y = viewed(pair[0], f"{where}: x"), viewed(pair[1], f"{where}: y")
        check_lengths(where, x, y)
        return x.to(stored("x", x, where)), y.to(stored("y", y, where)), [len(x)]
    sizes = [length(source, where) for where, source in sources]
    x = y = None
    done = 0
    for (where, source), size in zip(sources, sizes, strict=True):
        for start, xs, ys in pieces(source, where, columns):
            for what, values, held in (("x", xs, x), ("y", ys, y)):
                dtype = stored(what, values, where)
                if held is not None and (held.shape[1:], held.dtype) != (values.shape[1:], dtype):
                    raise DataError(
                        f"data: {where}: {what} of sample {start} is {form_of(values[0])}, and that of the first sample"
                        f" of all is {form_of(held[0])}; all must be alike (pad text to one length)"
                    )
            if x is None or y is None:
                x, y = (
                    torch.empty((sum(sizes), *values.shape[1:]), dtype=stored(what, values, where))
                    for what, values in (("x", xs), ("y", ys))
                )
            at = slice(done + start, done + start + len(xs))
            x[at], y[at] = xs, ys
        done += size
    assert x is not None  # every source has a sample
    assert y is not None
    return x, y, sizes


def pair_of(source: Any) -> tuple[Any, Any] | None:
    """x and y of a source that has them as wholes"""
    if isinstance(source, TensorDataset) and len(source.tensors) == 2:
        return source.tensors[0], source.tensors[1]
    return source if isinstance(source, tuple) and len(source) == 2 else None


def length(source: Any, where: str) -> int:
    if (pair := pair_of(source)) is not None:
        x, y = viewed(pair[0], f"{where}: x"), viewed(pair[1], f"{where}: y")
        check_lengths(where, x, y)
        return len(x)
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise DataError(
            f"data: {where} is {kind_of(source)}; expected a map-style data set, with a length and items, or (x, y)"
        )
    if len(source) == 0:
        raise DataError(f"data: {where} has no samples")
    return len(source)


def check_lengths(where: str, x: Tensor, y: Tensor) -> None:
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y) or len(x) == 0:
        raise DataError(
            f"data: {where}: x has shape {tuple(x.shape)} and y {tuple(y.shape)}; expected [N, ...] and [N] with"
            " the same N, at least 1"
        )


def pieces(source: Any, where: str, columns: tuple[str, str] | None) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The number of the first sample, and samples [n, ...]: all at once, or one by one"""
    if (pair := pair_of(source)) is not None:
        yield 0, viewed(pair[0], f"{where}: x"), viewed(pair[1], f"{where}: y")
        return
    split = None
    for i in range(len(source)):
        item = source[i]
        if split is None:
            split = splitter(item, where, columns)
        x, y = split(item, i)
        yield i, viewed(x, f"{where}: x of sample {i}")[None], viewed(y, f"{where}: y of sample {i}")[None]


def splitter(first: Any, where: str, columns: tuple[str, str] | None) -> Callable[[Any, int], tuple[Any, Any]]:
    """How x and y are taken from an item"""
    if isinstance(first, Mapping):
        names = columns or guessed(list(first), where)

        def from_dict(item: Any, i: int) -> tuple[Any, Any]:
            for name in names:
                if not isinstance(item, Mapping) or name not in item:
                    has = ", ".join(map(repr, item)) if isinstance(item, Mapping) else kind_of(item)
                    raise DataError(f"data: {where}: sample {i} has no column {name!r}; it has {has}")
            return item[names[0]], item[names[1]]

        return from_dict

    def from_pair(item: Any, i: int) -> tuple[Any, Any]:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"data: {where}: sample {i} is {kind_of(item)}; expected (x, y), or a dict of columns")
        return item[0], item[1]

    return from_pair


def guessed(names: list[str], where: str) -> tuple[str, str]:
    """The columns of x and y"""
    xs, ys = ([n for n in names if str(n).lower() in known] for known in (X_COLUMNS, Y_COLUMNS))
    if len(ys) == 1 and not xs and len(names) == 2:
        xs = [n for n in names if n not in ys]
    if len(xs) != 1 or len(ys) != 1:
        raise DataError(
            f"data: {where} has the columns {', '.join(map(repr, names))}, and it is not clear which is x and which is"
            ' y; say so: {"train": .., "test": .., "columns": ("image", "label")}'
        )
    return xs[0], ys[0]


def viewed(value: Any, where: str) -> Tensor:
    """A tensor of whatever dtype it is, without a copy if that can be"""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise DataError(f"data: {where} is a sparse tensor; make it dense")
        return value.detach().cpu()
    if hasattr(value, "convert") and hasattr(value, "mode"):  # a PIL image: palettes and single bits are no pixels
        value = value.convert({"P": "RGB", "1": "L"}.get(value.mode, value.mode))
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of unequal lengths
        raise DataError(f"data: {where} is no array: {error}; pad its entries to one length") from error
    if array.dtype.kind not in "fiub":
        what = "text" if array.dtype.kind in "US" else f"of dtype {array.dtype}"
        raise DataError(f"data: {where} is {what}; expected numbers (number words and classes from 0)")
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))  # copied if it is read-only, or reversed


def stored(what: str, values: Tensor, where: str) -> torch.dtype:
    """What such values are held as, until x is scaled"""
    if values.is_floating_point() or (values.dtype == torch.bool and what == "x"):
        return torch.float32
    if values.is_complex():
        raise DataError(f"data: {where}: {what} is complex; expected real numbers")
    return torch.uint8 if values.dtype == torch.uint8 and what == "x" else torch.int64


def form_of(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def kind_of(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")


def is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)
