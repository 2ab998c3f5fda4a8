"""Data of the user's own: every form gives the same Dataset, and what is wrong is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from fastagg.sim.data import DataError, Dataset
from fastagg.sim.own import dataset_of

rng = np.random.default_rng(0)
X, TEST_X = rng.standard_normal((12, 5)).astype(np.float32), rng.standard_normal((6, 5)).astype(np.float32)
Y, TEST_Y = np.arange(12) % 3, np.arange(6) % 3
WORDS, TEST_WORDS = rng.integers(0, 50, (12, 7)), rng.integers(0, 50, (6, 7))
BYTES, TEST_BYTES = (rng.integers(0, 256, (n, 9, 10, 3), np.uint8) for n in (12, 6))


class Items:
    """A map-style data set, of pairs or of dicts"""

    def __init__(self, x, y, names=None):
        self.x, self.y, self.names = x, y, names

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if i >= len(self):
            raise AssertionError(f"read beyond the end: {i}")
        return dict(zip(self.names, (self.x[i], self.y[i]), strict=True)) if self.names else (self.x[i], self.y[i])


def tensors(*arrays):
    return tuple(torch.from_numpy(a) for a in arrays)


def as_lists(*arrays):
    return tuple(a.tolist() for a in arrays)


HUGGING = (Items(X, Y, ("x", "Label")), Items(TEST_X, TEST_Y, ("x", "Label")))
FORMS = {
    "tensors": tensors(X, Y, TEST_X, TEST_Y),
    "arrays": [X, Y, TEST_X, TEST_Y],
    "wide arrays": (X.astype(np.float64), Y.astype(np.int32), TEST_X.astype(np.float64), TEST_Y.astype(np.uint8)),
    "big-endian arrays": (X.astype(">f4"), Y.astype(">i2"), TEST_X.astype(">f4"), TEST_Y.astype(">i2")),
    "reversed arrays": (X[::-1].copy()[::-1], Y, TEST_X, TEST_Y),
    "lists": as_lists(X, Y, TEST_X, TEST_Y),
    "pairs": ((X, Y), (TEST_X, TEST_Y)),
    "torch data sets": (TensorDataset(*tensors(X, Y)), TensorDataset(*tensors(TEST_X, TEST_Y))),
    "items": (Items(X, Y), Items(TEST_X, TEST_Y)),
    "items of lists": (Items(X.tolist(), Y.tolist()), Items(TEST_X.tolist(), TEST_Y.tolist())),
    "a list of pairs": (list(zip(X, Y, strict=True)), list(zip(TEST_X, TEST_Y, strict=True))),
    "dicts": HUGGING,
    "a dict of sets": {"train": HUGGING[0], "test": HUGGING[1], "validation": None},
    "a Dataset": Dataset("own", *tensors(X, Y, TEST_X, TEST_Y), 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    found, parts = dataset_of(FORMS[form])
    assert parts is None
    assert (found.name, found.classes, found.vocabulary) == ("own", 3, 0)
    for values, expected in zip((found.x, found.test_x, found.y, found.test_y), (X, TEST_X, Y, TEST_Y), strict=True):
        assert values.dtype == (torch.float32 if expected.dtype == np.float32 else torch.int64)
        assert np.array_equal(values.numpy(), expected)


@pytest.mark.parametrize("make", [lambda x, y: (x, y), Items, lambda x, y: TensorDataset(*tensors(x, y))])
def test_clients_fix_the_split(make):
    cuts = [slice(0, 5), slice(5, 6), slice(6, 12)]
    found, parts = dataset_of({"clients": [make(X[c], Y[c]) for c in cuts], "test": make(TEST_X, TEST_Y)})
    assert np.array_equal(found.x.numpy(), X)
    assert np.array_equal(found.test_y.numpy(), TEST_Y)
    assert [part.tolist() for part in parts] == [[*range(5)], [5], [*range(6, 12)]]


def test_clients_of_several_forms():
    clients = [Items(X[:3], Y[:3]), (X[3:8].astype(np.float64), Y[3:8].astype(np.uint8)), (X[8:].tolist(), Y[8:])]
    found, parts = dataset_of({"clients": clients, "test": (TEST_X, TEST_Y)})
    assert np.array_equal(found.x.numpy(), X)
    assert np.array_equal(found.y.numpy(), Y)
    assert [len(part) for part in parts] == [3, 5, 4]


def test_words():
    for wide in (np.int64, np.int32, np.uint16):
        found, _ = dataset_of((WORDS.astype(wide), Y, TEST_WORDS.astype(wide), TEST_Y))
        assert found.x.dtype == torch.int64
        assert np.array_equal(found.x.numpy(), WORDS)
        assert found.vocabulary == max(WORDS.max(), TEST_WORDS.max()) + 1


@pytest.mark.parametrize("shape", ["last", "first", "grey"])
@pytest.mark.parametrize("pixels", ["standard", "unit", "half"])
def test_images(shape, pixels):
    both = [BYTES, TEST_BYTES]
    if shape == "grey":
        both = [b[..., 0] for b in both]
    given = [b.transpose(0, 3, 1, 2) for b in both] if shape == "first" else both
    found, _ = dataset_of((given[0], Y, given[1], TEST_Y), pixels=pixels)
    expected = [(b[..., None] if shape == "grey" else b).transpose(0, 3, 1, 2).astype(np.float64) for b in both]
    mean, deviation = expected[0].mean((0, 2, 3), keepdims=True), expected[0].std((0, 2, 3), keepdims=True)
    if pixels != "standard":
        mean, deviation = (0, 255) if pixels == "unit" else (127.5, 127.5)
    for values, raw in zip((found.x, found.test_x), expected, strict=True):
        assert values.is_contiguous()
        np.testing.assert_allclose(values.numpy(), (raw - mean) / deviation, rtol=1e-5, atol=1e-6)


def test_pil_images():
    image = pytest.importorskip("PIL.Image")
    sets = [Items([image.fromarray(b) for b in x], y, ("img", "label")) for x, y in ((BYTES, Y), (TEST_BYTES, TEST_Y))]
    found, _ = dataset_of(sets, pixels="unit")
    assert np.array_equal((found.x * 255).round().numpy(), BYTES.transpose(0, 3, 1, 2))
    flat = Items([image.fromarray(b).convert("P") for b in BYTES], Y)
    assert dataset_of((flat, sets[1]))[0].x.shape == (12, 3, 9, 10)
    mixed = Items([image.fromarray(b).convert("L" if i == 4 else "RGB") for i, b in enumerate(BYTES)], Y)
    with pytest.raises(DataError, match=r"x of sample 4 is uint8 of shape \(9, 10\).* first sample.*\(9, 10, 3\)"):
        dataset_of((mixed, sets[1]))


def test_values_to_predict():
    for y, test_y in ((X[:, 0], TEST_X[:, 0]), (X[:, :2].astype(np.float64), TEST_X[:, :2].astype(np.float64))):
        found, _ = dataset_of((X, y, TEST_X, test_y))
        assert found.classes == 0
        assert found.y.dtype == torch.float32
        assert np.array_equal(found.y.numpy(), y)
    with pytest.raises(DataError, match=r"y of the training set is float32 .* of the test set int64"):
        dataset_of((X, X[:, 0], TEST_X, TEST_Y))


def test_nothing_is_copied_that_need_not_be():
    given = tensors(X, Y, TEST_X, TEST_Y)
    for data in (given, (TensorDataset(*given[:2]), TensorDataset(*given[2:])), (X, Y, TEST_X, TEST_Y)):
        found, _ = dataset_of(data)
        assert found.x.data_ptr() == given[0].data_ptr()
        assert found.test_y.data_ptr() == given[3].data_ptr()


def test_inputs_stay_as_they_were():
    before = BYTES.copy()
    frozen = BYTES.copy()
    frozen.flags.writeable = False
    dataset_of((BYTES, Y, frozen[:6], TEST_Y))
    assert np.array_equal(BYTES, before)
    weight = torch.nn.Parameter(torch.from_numpy(X.copy()))
    assert not dataset_of((weight, Y, TEST_X, TEST_Y))[0].x.requires_grad


@pytest.mark.parametrize(
    ("names", "found"),
    [(("image", "label"), True), (("IMG", "Labels"), True), (("what", "label"), True), (("image", "what"), False)],
)
def test_columns(names, found):
    sets = (Items(X, Y, names), Items(TEST_X, TEST_Y, names))
    if found:
        assert np.array_equal(dataset_of(sets)[0].x.numpy(), X)
    else:
        with pytest.raises(DataError, match=r"columns 'image', 'what', and it is not clear.*\"columns\": \(\"im"):
            dataset_of(sets)
    named = {"train": sets[0], "test": sets[1], "columns": names}
    assert np.array_equal(dataset_of(named)[0].y.numpy(), Y)
    of_clients = {"clients": [sets[0]], "test": sets[1], "columns": list(names)}
    assert np.array_equal(dataset_of(of_clients)[0].y.numpy(), Y)
    with pytest.raises(DataError, match=f"sample 0 has no column 'no'; it has '{names[0]}', '{names[1]}'"):
        dataset_of(named | {"columns": ("no", "label")})
    with pytest.raises(DataError, match="columns is 'image'; expected the names of x and y"):
        dataset_of(named | {"columns": "image"})


def test_three_columns_are_in_doubt():
    rows = [{"img": x, "fine_label": y, "coarse_label": y} for x, y in zip(X, Y, strict=True)]
    with pytest.raises(DataError, match="columns 'img', 'fine_label', 'coarse_label'"):
        dataset_of((rows, rows))
    assert dataset_of({"train": rows, "test": rows, "columns": ("img", "fine_label")})[0].classes == 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[0], 0)])


def with_nan():
    x = X.copy()
    x[7, 2] = np.nan
    return x


BAD = {
    "two tensors": (tensors(X, Y), "a tuple of 2; expected a Dataset"),
    "nothing": (None, "a NoneType; expected"),
    "a path": ("cifar10", "a str; expected"),
    "lengths": ((X, Y[:-1], TEST_X, TEST_Y), r"training set: x has shape \(12, 5\) and y \(11,\)"),
    "empty": ((X, Y, TEST_X[:0], TEST_Y[:0]), r"test set: x has shape \(0, 5\)"),
    "nan": ((with_nan(), Y, TEST_X, TEST_Y), "x of sample 7 of the training set is not finite"),
    "nan to predict": ((X, with_nan(), TEST_X, TEST_X), "y of sample 7 of the training set is not finite"),
    "shapes": ((X, Y, TEST_X[:, :4], TEST_Y), r"\(12, 5\), and of the test set .*\(6, 4\); samples of both"),
    "kinds": ((X, Y, TEST_WORDS[:, :5], TEST_Y), "x of the training set is float32.* test set int64"),
    "from 1": ((X, Y + 1, TEST_X, TEST_Y), "classes from 1 to 3; number them from 0"),
    "negative": ((X, Y - 1, TEST_X, TEST_Y), "y of sample 0 of the training set is -1"),
    "gaps": ((X, Y * 1000, TEST_X, TEST_Y), "classes up to 2,000, for 12 samples"),
    "one class": ((X, Y * 0, TEST_X, TEST_Y * 0), "one class, 0"),
    "text": ((X, np.array(["a"] * 12), TEST_X, TEST_Y), "training set: y is text; expected numbers"),
    "objects": ((np.array([None] * 12), Y, TEST_X, TEST_Y), "x is of dtype object"),
    "complex": ((torch.complex(*tensors(X, X)), Y, TEST_X, TEST_Y), "x is complex"),
    "sparse": ((torch.from_numpy(X).to_sparse(), Y, TEST_X, TEST_Y), "x is a sparse tensor"),
    "column of classes": ((X, Y[:, None], TEST_X, TEST_Y[:, None]), r"y is int64 of shape \(12, 1\); expected classes"),
    "one feature": ((X[:, 0], Y, TEST_X[:, 0], TEST_Y), r"shape \(12,\); expected \[N, \.\.\.\] \(x\[:, None\]"),
    "bytes": ((BYTES[:, 0, 0], Y, TEST_BYTES[:, 0, 0], TEST_Y), r"uint8 of shape \(12, 3\): bytes are images"),
    "channels": ((BYTES[..., :2], Y, TEST_BYTES[..., :2], TEST_Y), "with 1, 3 or 4 channels"),
    "integer images": ((BYTES.astype(int), Y, TEST_BYTES.astype(int), TEST_Y), "pass images as uint8"),
    "negative words": ((WORDS - 1, Y, TEST_WORDS, TEST_Y), "integers from -1 to .*; expected words"),
    "ragged": (([[1, 2], [3]], [0, 1], [[1, 2]], [0]), "x is no array: .*; pad its entries to one length"),
    "ragged items": (([([1, 2], 0), ([3], 1)], [([1, 2], 0)]), r"x of sample 1 is int64 of shape \(1,\).*pad text"),
    "a stream": ((Stream(), Stream()), "training set is a Stream; expected a map-style data set"),
    "no items": (([], []), "training set has no samples"),
    "triples": (([(1, 2, 3)], [(1, 2)]), "sample 0 is a tuple of 3; expected"),
    "no clients": ({"clients": [], "test": (X, Y)}, "clients is a list of 0; expected a list"),
    "no test": ({"clients": [(X, Y)]}, "there is no 'test' among 'clients'"),
    "no split": ({"train": HUGGING[0], "validation": HUGGING[1]}, "there is no 'test' among 'train', 'validation'"),
    "clients differ": (
        {"clients": [(X, Y), (X[:, :4], Y)], "test": (TEST_X, TEST_Y)},
        r"client 1: x of sample 0 is float32 of shape \(4,\), and that of the first sample of all is .*\(5,\)",
    ),
    "client's lengths": ({"clients": [(X, Y), (X, Y[:3])], "test": (TEST_X, TEST_Y)}, "client 1: x has shape"),
    "a Dataset": (Dataset("own", *tensors(X, Y, TEST_X, TEST_Y), 2), "classes from 0 to 2; expected 0 to 1"),
    "a Dataset's words": (Dataset("own", *tensors(WORDS, Y, TEST_WORDS, TEST_Y), 3), "expected 0 to vocabulary - 1"),
    "no number of domains": (
        Dataset("own", *tensors(X, Y, TEST_X, TEST_Y), 3, domains=("a", "b"), domain=torch.from_numpy(Y % 2)),
        "each sample of the test set needs its number",
    ),
    "a domain too many": (
        Dataset("own", *tensors(X, Y, TEST_X, TEST_Y), 3, 0, ("a", "b"), *tensors(Y, TEST_Y)),
        "domains from 0 to 2, and there are 2",
    ),
    "a Dataset's bytes": (Dataset("own", *tensors(BYTES, Y, TEST_BYTES, TEST_Y), 3), "a Dataset holds float32"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_named(what):
    value, message = BAD[what]
    with pytest.raises(DataError, match=message):
        dataset_of(value)


def test_pixels_are_checked():
    with pytest.raises(ValueError, match="pixels='raw'"):
        dataset_of((X, Y, TEST_X, TEST_Y), pixels="raw")


def test_hugging_face():
    datasets = pytest.importorskip("datasets")
    columns = [{"image": x.tolist(), "label": y.tolist()} for x, y in ((X, Y), (TEST_X, TEST_Y))]
    train, test = (datasets.Dataset.from_dict(c) for c in columns)
    for data in ((train, test), datasets.DatasetDict(train=train, test=test)):
        found, _ = dataset_of(data)
        assert np.array_equal(found.x.numpy(), X)
        assert found.classes == 3


def test_features_that_are_true_or_false_are_numbers():
    dataset, _ = dataset_of((X > 0, Y, TEST_X > 0, TEST_Y))
    assert dataset.x.dtype == torch.float32
    assert dataset.x.tolist() == (X > 0).astype(float).tolist()
    assert dataset.vocabulary == 0
