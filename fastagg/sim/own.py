"""Data of the user's own as a Dataset: tensors, arrays, map-style data sets, or those of each client as they are.

What x becomes is decided by what it holds:

    floats     float32 as they are, [N, ...]
    uint8      images [N, H, W], [N, H, W, C] or [N, C, H, W], with 1, 3 or 4 channels: [N, C, H, W], scaled by pixels
    integers   numbers of words, [N, length]: int64, from 0; vocabulary is the largest of both sets plus 1

and what y becomes too: integers [N] are classes, from 0; floats [N] or [N, outputs] are values to predict, classes = 0.
Large arrays are copied once at most, and not at all where they are what a Dataset holds already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fastagg._engine.checks import check_choice
from fastagg.sim.choices import PIXELS
from fastagg.sim.data import Dataset, scaled
from fastagg.sim.datasets import DataError

X_COLUMNS = ("image", "img", "pixel_values", "input_ids", "x", "features", "data")  # first letters may be capitals
Y_COLUMNS = ("label", "labels", "y", "target", "targets", "class")
CHANNELS = (1, 3, 4)
FORMS = (
    "expected a Dataset; (x, y, test_x, test_y); a pair of map-style data sets (train, test), or a dict of them; or"
    ' {"clients": [(x, y), ...], "test": (x, y)}'
)
Parts = list[np.ndarray]  # per client: numbers of its samples in the training set


def dataset_of(
    data: Any, *, columns: tuple[str, str] | None = None, pixels: str = "standard", name: str = "own"
) -> tuple[Dataset, Parts | None]:
    """The data set, and the split over clients if the data say who has what.

    data      a Dataset; (x, y, test_x, test_y), tensors, arrays or lists; (train, test) or {"train": ..., "test": ...}
              of map-style data sets with items (x, y) or dicts; {"clients": [one of each], "test": ...}. A tuple
              (x, y) is a data set too
    columns   which entries of such dicts are x and y; None: found by their names
    pixels    how uint8 images are scaled, one of choices.PIXELS
    """
    check_choice("data", "pixels", pixels, PIXELS)
    if isinstance(data, Dataset):
        check_dataset(data)
        return data, None
    if isinstance(data, Mapping) and "clients" in data:
        clients = data["clients"]
        if not isinstance(clients, Sequence) or isinstance(clients, str) or not clients:
            raise DataError(f"data: clients is {kind_of(clients)}; expected a list with a data set for each client")
        train = [(f"client {k}", source) for k, source in enumerate(clients)]
        test = one_of(data, "test")
    elif isinstance(data, Mapping):
        train, test = [("training set", one_of(data, "train"))], one_of(data, "test")
    elif isinstance(data, tuple | list) and len(data) == 4:
        train, test = [("training set", (data[0], data[1]))], (data[2], data[3])
    elif isinstance(data, tuple | list) and len(data) == 2 and not any(is_array(part) for part in data):
        train, test = [("training set", data[0])], data[1]
    else:
        raise DataError(f"data: {kind_of(data)}; {FORMS}")
    x, y, sizes = gathered(train, columns)
    test_x, test_y, _ = gathered([("test set", test)], columns)
    dataset = formed(name, x, y, test_x, test_y, pixels)
    check_dataset(dataset)
    ends = np.cumsum([0, *sizes])
    parts = [np.arange(a, b) for a, b in pairwise(ends)]
    return dataset, parts if isinstance(data, Mapping) and "clients" in data else None


def one_of(data: Mapping[str, Any], key: str) -> Any:
    if key not in data:
        raise DataError(f"data: there is no {key!r} among {', '.join(map(repr, data))}; {FORMS}")
    return data[key]


def kind_of(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")


def is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


# From sources to two tensors


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
            ' y; say so by columns=("image", "label")'
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
    if values.is_floating_point():
        return torch.float32
    if values.is_complex():
        raise DataError(f"data: {where}: {what} is complex; expected real numbers")
    return torch.uint8 if values.dtype == torch.uint8 and what == "x" else torch.int64


def form_of(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


# From two pairs of tensors to a Dataset


def formed(name: str, x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, pixels: str) -> Dataset:
    for what, of_train, of_test in (("x", x, test_x), ("y", y, test_y)):
        if (of_train.shape[1:], of_train.dtype) != (of_test.shape[1:], of_test.dtype):
            raise DataError(
                f"data: {what} of the training set is {form_of(of_train)}, and of the test set {form_of(of_test)};"
                " samples of both must be alike"
            )
    vocabulary = 0
    if x.dtype == torch.uint8:
        x, test_x = scaled(images(x), images(test_x), pixels)
    elif x.dtype == torch.int64:
        vocabulary = words(x, test_x)
    classes = 0 if y.is_floating_point() else classes_of(y, test_y)
    return Dataset(name, x, y, test_x, test_y, classes, vocabulary=vocabulary)


def images(x: Tensor) -> Tensor:
    """uint8 [N, C, H, W]"""
    if x.dim() == 3:
        return x[:, None]
    if x.dim() == 4 and x.shape[1] in CHANNELS:
        return x
    if x.dim() == 4 and x.shape[3] in CHANNELS:
        return x.permute(0, 3, 1, 2)
    raise DataError(
        f"data: x is {form_of(x)}: bytes are images, [N, H, W], or with 1, 3 or 4 channels [N, H, W, C] or [N, C, H,"
        " W]; pass other features as floats, and words as int64"
    )


def words(x: Tensor, test_x: Tensor) -> int:
    """Size of the vocabulary"""
    if x.dim() != 2:
        raise DataError(
            f"data: x is {form_of(x)}: integers are words, [N, length]; pass images as uint8, other features as floats"
        )
    low, high = (int(extreme(torch.stack([extreme(x), extreme(test_x)]))) for extreme in (torch.min, torch.max))
    if low < 0 or high >= 10_000_000:
        raise DataError(f"data: x has integers from {low:,} to {high:,}; expected words, numbered from 0 to 9,999,999")
    return high + 1


def classes_of(y: Tensor, test_y: Tensor) -> int:
    if y.dim() != 1:
        raise DataError(f"data: y is {form_of(y)}; expected classes [N] (or floats, to predict values)")
    for what, labels in (("training set", y), ("test set", test_y)):
        if (low := int(labels.min())) < 0:
            first = int((labels < 0).nonzero()[0])
            raise DataError(f"data: y of sample {first} of the {what} is {low}; expected classes, numbered from 0")
    low, high = int(y.min()), max(int(y.max()), int(test_y.max()))
    if low > 0:
        raise DataError(f"data: y has classes from {low} to {high}; number them from 0")
    if high == 0:
        raise DataError("data: y has one class, 0; expected two or more")
    if high >= max(1000, len(y)):
        raise DataError(f"data: y has classes up to {high:,}, for {len(y):,} samples; number them from 0, without gaps")
    return high + 1


def check_dataset(data: Dataset) -> None:
    """What everything else relies on, also for a Dataset that the user made"""
    for what, x, y in (("training set", data.x, data.y), ("test set", data.test_x, data.test_y)):
        check_lengths(what, x, y)
        if x.dim() < 2:
            raise DataError(f"data: x of the {what} has shape {tuple(x.shape)}; expected [N, ...] (x[:, None]?)")
        for name, values in (("x", x), ("y", y)):
            if values.is_floating_point() and not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
                sample = int((~values.isfinite()).nonzero()[0, 0])
                raise DataError(f"data: {name} of sample {sample} of the {what} is not finite (NaN or infinite)")
        if x.dtype not in (torch.float32, torch.int64):
            raise DataError(f"data: x of the {what} is {x.dtype}; a Dataset holds float32, or int64 for words")
        if data.classes == 0 and y.dtype != torch.float32:
            raise DataError(f"data: y of the {what} is {y.dtype} with classes=0; expected float32")
        if data.classes > 0 and (y.dtype != torch.int64 or y.dim() != 1):
            raise DataError(f"data: y of the {what} is {form_of(y)}; expected int64 classes [N]")
        if data.classes > 0 and not 0 <= int(y.min()) <= int(y.max()) < data.classes:
            raise DataError(
                f"data: y of the {what} has classes from {int(y.min())} to {int(y.max())}; expected 0 to"
                f" {data.classes - 1}"
            )
        if x.dtype == torch.int64 and not 0 <= int(x.min()) <= int(x.max()) < data.vocabulary:
            raise DataError(
                f"data: x of the {what} has words from {int(x.min())} to {int(x.max())}; expected 0 to vocabulary - 1,"
                f" which is {data.vocabulary - 1}"
            )
    if data.x.shape[1:] != data.test_x.shape[1:] or data.x.dtype != data.test_x.dtype:
        raise DataError(
            f"data: samples of the training set are {form_of(data.x[0])}, of the test set {form_of(data.test_x[0])}"
        )
