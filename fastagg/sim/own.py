"""Data of the user's own as a Dataset: tensors, arrays, map-style data sets, or those of each client as they are.

What x becomes is decided by what it holds:

    floats     float32 as they are, [N, ...]
    uint8      images [N, H, W], [N, H, W, C] or [N, C, H, W], with 1, 3 or 4 channels: [N, C, H, W], scaled by pixels
    integers   numbers of words, [N, length]: int64, from 0; vocabulary is the largest of both sets plus 1

and what y becomes too: integers [N] are classes, from 0; floats [N] or [N, outputs] are values to predict, classes = 0.
Large arrays are copied once at most, and not at all where they are what a Dataset holds already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastagg._engine.checks import check_choice
from fastagg.sim.choices import PIXELS
from fastagg.sim.data import Dataset, scaled
from fastagg.sim.datasets import DataError
from fastagg.sim.gathering import check_lengths, form_of, gathered, is_array, kind_of

CHANNELS = (1, 3, 4)
FORMS = (
    "expected a Dataset; (x, y, test_x, test_y); a pair of map-style data sets (train, test), or a dict of them; or"
    ' {"clients": [(x, y), ...], "test": (x, y)}'
)
Parts = list[np.ndarray]  # per client: numbers of its samples in the training set


def dataset_of(data: Any, *, pixels: str = "standard", name: str = "own") -> tuple[Dataset, Parts | None]:
    """The data set, and the split over clients if the data say who has what.

    data      a Dataset; (x, y, test_x, test_y), tensors, arrays or lists; (train, test) or {"train": ..., "test": ...}
              of map-style data sets with items (x, y) or dicts; {"clients": [one of each], "test": ...}. A tuple
              (x, y) is a data set too. Which entries of dicts are x and y is found by their names, or said in
              {..., "columns": ("image", "label")}
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
    columns = columns_of(data)
    x, y, sizes = gathered(train, columns)
    test_x, test_y, _ = gathered([("test set", test)], columns)
    dataset = formed(name, x, y, test_x, test_y, pixels)
    check_dataset(dataset)
    ends = np.cumsum([0, *sizes])
    parts = [np.arange(a, b) for a, b in pairwise(ends)]
    return dataset, parts if isinstance(data, Mapping) and "clients" in data else None


def columns_of(data: Any) -> tuple[str, str] | None:
    given = data.get("columns") if isinstance(data, Mapping) else None
    if given is None:
        return None
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise DataError(f'data: columns is {given!r}; expected the names of x and y: ("image", "label")')
    return given[0], given[1]


def one_of(data: Mapping[str, Any], key: str) -> Any:
    if key not in data:
        raise DataError(f"data: there is no {key!r} among {', '.join(map(repr, data))}; {FORMS}")
    return data[key]


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
        domain = data.domain if what == "training set" else data.test_domain
        if data.domains and (domain is None or domain.shape != y.shape[:1] or domain.dtype != torch.int64):
            raise DataError(f"data: there are domains, so each sample of the {what} needs its number, int64 [N]")
        if domain is not None and not 0 <= int(domain.min()) <= int(domain.max()) < len(data.domains):
            raise DataError(
                f"data: the {what} has domains from {int(domain.min())} to {int(domain.max())}, and there are"
                f" {len(data.domains)}"
            )
    if data.x.shape[1:] != data.test_x.shape[1:] or data.x.dtype != data.test_x.dtype:
        raise DataError(
            f"data: samples of the training set are {form_of(data.x[0])}, of the test set {form_of(data.test_x[0])}"
        )
