"""Readers of single formats: what they read, against what was written, and what they refuse."""

from __future__ import annotations

import bz2
import csv
import io
import pickle
import struct
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
import torch

from fastagg.sim import data, models
from fastagg.sim.data import load
from fastagg.sim.datasets import DataError, folders, news
from fastagg.sim.datasets.libsvm import read_usps
from fastagg.sim.datasets.matlab import read_matlab
from helpers.data_files import (
    NEWS_ROWS,
    usps_text,
    write_idx,
    write_matlab,
    write_news,
    write_tiny_imagenet,
    write_usps,
)


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch):
    monkeypatch.delenv("FASTAGG_DATA", raising=False)


def bytes_of(x):
    """The pixels of a data set that was loaded with pixels="unit" """
    return (x * 255).round().to(torch.uint8).numpy()


def refused(call, message, path, memory=10e6):
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message) as caught:
            call()
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


# ---- MATLAB files ----


@pytest.mark.parametrize(("name", "prefix", "sub"), [("svhn", "", "."), ("svhn", "", "SVHN"), ("syn", "synth_", "syn")])
@pytest.mark.parametrize("compressed", [False, True])
def test_matlab(tmp_path, name, prefix, sub, compressed):
    arrays = write_matlab(tmp_path / sub, prefix, compressed=compressed)
    found = load(name, tmp_path, pixels="unit")
    for x, y, (pixels, labels) in zip((found.x, found.test_x), (found.y, found.test_y), arrays, strict=True):
        assert x.is_contiguous()
        assert np.array_equal(bytes_of(x), pixels.transpose(3, 2, 0, 1))
        assert y.tolist() == (labels.ravel() % 10).tolist()
    assert found.classes == 10


@pytest.mark.parametrize("shape", [(5, 1), (1, 5)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.int32])
def test_matlab_labels_of_any_form(tmp_path, shape, dtype):
    scipy_io = pytest.importorskip("scipy.io")
    x = np.zeros((32, 32, 3, 5), np.uint8)
    scipy_io.savemat(tmp_path / "a.mat", {"y": np.array([1, 10, 0, 9, 2], dtype).reshape(shape), "X": x})
    assert read_matlab(tmp_path / "a.mat", 5)[1].tolist() == [1, 0, 0, 9, 2]


def test_one_matlab_image(tmp_path):
    write_matlab(tmp_path, sizes=(1, 1))  # MATLAB writes no last size of 1
    assert load("svhn", tmp_path).x.shape == (1, 3, 32, 32)


def element(kind, body, order="<"):
    return struct.pack(f"{order}2I", kind, len(body)) + body + bytes(-len(body) % 8)


def array(name, shape, values, kind=2, order="<"):
    parts = [
        element(6, struct.pack(f"{order}2I", 9, 0), order),
        element(5, struct.pack(f"{order}{len(shape)}i", *shape), order),
        element(1, name, order),
        element(kind, values, order),
    ]
    return element(14, b"".join(parts), order)


def mat(*elements, order="<"):
    head = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack(f"{order}H", 0x0100) + (b"IM" if order == "<" else b"MI")
    return head + b"".join(elements)


ONE, LABEL = array(b"X", (32, 32, 3, 1), bytes(3072)), array(b"y", (1, 1), b"\x05")


def test_big_endian_matlab(tmp_path):
    path = tmp_path / "big.mat"
    x = np.arange(3072, dtype=np.uint32).astype(np.uint8)
    arrays = array(b"X", (32, 32, 3, 1), x.tobytes(), order=">"), array(b"y", (1, 1), b"\0\7", 4, ">")
    path.write_bytes(mat(*arrays, order=">"))
    found, labels = read_matlab(path, 1)
    assert labels.tolist() == [7]
    assert np.array_equal(found[0], x.reshape(3, 32, 32).swapaxes(1, 2))


def packed(*elements):
    return [struct.pack("<2I", 15, len(z := zlib.compress(e))) + z for e in elements]  # which are not filled up


BAD_MATLAB = {
    "empty": (b"", "expected a MATLAB file of version 5"),
    "version 7.3": (b"MATLAB 7.3 MAT-file".ljust(512), "found b'MATLAB 7.3 MAT-file "),
    "a pickle": (pickle.dumps({"X": bytes(500)}), "expected a MATLAB file of version 5"),
    "no arrays": (mat(), "expected the arrays 'X' and 'y', as in train_32x32.mat, found none"),
    "no labels": (mat(ONE), "found 'X'"),
    "other arrays": (mat(ONE, array(b"z", (1, 1), b"\1")), "found 'X', 'z'"),
    "truncated": (mat(ONE, LABEL)[:-10], "truncated: an element says"),
    "cut tag": (mat(ONE) + b"abc", "truncated: expected 8 bytes of an element, found 3"),
    "cut packed": (mat(*packed(ONE, LABEL))[:-4], "truncated"),
    "too many": (mat(array(b"X", (32, 32, 3, 4), bytes(4 * 3072)), LABEL), "N from 1 to 3; its header says 32 x 32 x"),
    "lying": (mat(array(b"X", (32, 32, 3, 3), bytes(3072)), LABEL), "3,072 bytes of uint8"),
    "negative": (mat(array(b"X", (32, 32, 3, -1), bytes(3072)), LABEL), "32 x 32 x 3 x -1"),
    "other sides": (mat(array(b"X", (28, 28, 3, 1), bytes(2352)), LABEL), "its header says 28 x 28 x 3 x 1"),
    "floats": (mat(array(b"X", (32, 32, 3, 1), bytes(3072 * 4), 7), LABEL), "12,288 bytes of float32"),
    "label 11": (mat(ONE, array(b"y", (1, 1), b"\x0b")), "labels from 0 to 10, found 11 at entry 0"),
    "label -1": (mat(ONE, array(b"y", (1, 1), b"\xff", 1)), "found -1"),
    "label nan": (mat(ONE, array(b"y", (1, 1), struct.pack("<d", np.nan), 9)), "found nan"),
    "label 1.5": (mat(ONE, array(b"y", (1, 1), struct.pack("<d", 1.5), 9)), "found 1.5"),
    "two labels": (mat(ONE, array(b"y", (2, 1), b"\1\2")), "X has 1 images, but y has 2 labels"),
    "a table of labels": (mat(ONE, array(b"y", (2, 2), b"\1\2\3\4")), "expected y of N x 1 labels"),
    "a cell": (mat(array(b"X", (1, 1), b"", 14)), "'X' is not an array of numbers"),
    "inner size": (mat(element(14, struct.pack("<2I", 6, 2**32 - 1) + bytes(8))), "says it has 4,294,967,295 bytes"),
    "short array": (mat(element(14, bytes(4))), "an array ends within its header"),
    "huge array": (mat(struct.pack("<2I", 14, 2**31) + bytes(99)), "truncated: an element says it has 2,147,483,648"),
    "packed garbage": (mat(element(15, b"not packed")), "cannot be read, or is damaged"),
    "packed and cut": (mat(element(15, zlib.compress(ONE)[:-20])), "a compressed array is damaged"),
}


@pytest.mark.parametrize("what", BAD_MATLAB)
def test_bad_matlab(tmp_path, what):
    raw, message = BAD_MATLAB[what]
    path = tmp_path / "bad.mat"
    path.write_bytes(raw)
    refused(lambda: read_matlab(path, 3), message, path, 1e6)


def test_good_matlab_is_good(tmp_path):
    """What the bad ones are made of"""
    path = tmp_path / "good.mat"
    for raw in (mat(ONE, LABEL), mat(*packed(ONE, LABEL)), mat(LABEL, element(99, bytes(3)), ONE)):
        path.write_bytes(raw)
        assert read_matlab(path, 3)[1].tolist() == [5]


def test_matlab_bombs(tmp_path):
    path = tmp_path / "bomb.mat"
    path.write_bytes(mat(*packed(array(b"X", (32, 32, 3, 20_000), bytes(20_000 * 3072)))))
    assert path.stat().st_size < 1e6
    refused(lambda: read_matlab(path, 3), "has more than 13,312 bytes", path, 1e6)
    with open(path, "wb") as file:
        file.write(mat(struct.pack("<2I", 14, 2**32 - 8)))
        file.truncate(2**33)  # a hole
    refused(lambda: read_matlab(path, 3), "says it has 4,294,967,288 bytes; expected at most 13,312", path, 1e6)


# ---- USPS ----


@pytest.mark.parametrize("is_packed", [False, True])
def test_usps(tmp_path, is_packed):
    arrays = write_usps(tmp_path / "usps", is_packed)
    found = load("usps", tmp_path, pixels="unit")
    for x, y, (values, labels) in zip((found.x, found.test_x), (found.y, found.test_y), arrays, strict=True):
        assert y.tolist() == (labels - 1).tolist()
        expected = (values.reshape(-1, 1, 16, 16) + 1) / 2
        assert np.abs(x.numpy() - expected).max() <= 0.5 / 255 + 1e-6
        assert x[0, 0, 0, :2].tolist() == [0, 1]


def test_usps_without_some_pixels(tmp_path):
    (tmp_path / "usps").write_text("3 2:1 256:-1\n")
    x, y = read_usps(tmp_path / "usps", 5)
    assert y.tolist() == [2]
    assert x.ravel()[[0, 1, 2, 255]].tolist() == [128, 255, 128, 0]


GOOD_LINE = usps_text(np.zeros((1, 256)), [4])
BAD_USPS = {
    "empty": (b"", "expected 1 to 3 lines, found 0"),
    "too many": (GOOD_LINE * 4, "expected 1 to 3 lines, found 4"),
    "label 0": (b"0" + GOOD_LINE[1:], "labels from 1 to 10, found 0 in sample 0"),
    "label 11": (GOOD_LINE + b"11 1:0\n", "found 11 in sample 1"),
    "label 1.5": (b"1.5 1:0\n", "found 1.5"),
    "label nan": (b"nan 1:0\n", "found nan"),
    "a word": (b"three 1:0\n", "expected lines of a label and number:value"),
    "pixel 257": (b"3 257:0.5\n", "number from 1 to 256"),
    "pixel 0": (b"3 0:0.5\n", "number from 1 to 256"),
    "a huge pixel": (b"3 99999999999999999999:0.5\n", "number from 1 to 256"),
    "too bright": (b"3 1:1.5\n", "pixels from -1 to 1, found others in sample 0"),
    "nan": (b"3 1:nan\n", "pixels from -1 to 1"),
    "no numbers": (b"3 0.5 0.5\n", "number:value"),
    "html": (b"<html>Not found</html>", "expected lines"),
    "a pickle": (pickle.dumps({"x": bytes(50)}), "expected lines|cannot be read"),
    "zeros": (bytes(3 * 8192 + 1), "expected at most 24,576 bytes of text"),
}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("what", BAD_USPS)
def test_bad_usps(tmp_path, what, is_packed):
    raw, message = BAD_USPS[what]
    path = tmp_path / "usps"
    path.write_bytes(bz2.compress(raw) if is_packed else raw)
    refused(lambda: read_usps(path, 3), message, path, 20e6)


def test_damaged_bz2(tmp_path):
    write_usps(tmp_path, True)
    path = tmp_path / "usps.t.bz2"
    whole = path.read_bytes()
    for raw in (whole[:-20], whole[:200] + b"xxxx" + whole[204:], b"BZh9" + b"nothing"):
        path.write_bytes(raw)
        refused(lambda: load("usps", tmp_path), "cannot be read, or is damaged", path, 80e6)
    path.write_bytes(bz2.compress(bytes(200_000_000)))
    refused(lambda: load("usps", tmp_path), "expected at most 16,441,344 bytes of text", path, 80e6)


# ---- Tiny-ImageNet ----


@pytest.mark.parametrize("sub", [".", "tiny-imagenet", "tiny-imagenet-200"])
def test_tiny_imagenet(tmp_path, sub):
    pytest.importorskip("PIL")
    train, test = write_tiny_imagenet(tmp_path / sub)
    found = load("tiny-imagenet", tmp_path, pixels="unit")
    assert found.classes == 200
    assert found.x.shape == (6, 3, 64, 64)
    assert found.test_x.shape == (4, 3, 64, 64)
    for x, y, expected in ((found.x, found.y, train), (found.test_x, found.test_y, test)):
        assert y.tolist() == [label for _, label in expected]
        grey = torch.tensor([value for value, _ in expected], dtype=torch.float32)
        assert (x * 255 - grey[:, None, None, None]).abs().max() <= 2  # JPEG's own loss


def set_up(tmp_path, path, raw):
    write_tiny_imagenet(tmp_path)
    path = tmp_path / path
    path.write_bytes(raw(path.read_bytes()) if callable(raw) else raw)
    return path


def jpeg(size=(64, 64), kind="JPEG"):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", size).save(file, kind)
    return file.getvalue()


FIRST = "train/n00000003/images/n00000003_0.JPEG"
BAD_TINY = {
    "cut": (FIRST, lambda raw: raw[: len(raw) // 2], "cannot be read, or is damaged"),
    "empty": (FIRST, b"", "cannot be read, or is damaged"),
    "a png": (FIRST, lambda raw: jpeg(kind="PNG"), "cannot be read, or is damaged"),
    "a pickle": (FIRST, pickle.dumps([1, 2]), "cannot be read, or is damaged"),
    "large": (FIRST, lambda raw: jpeg((65, 64)), "expected 64 x 64 pixels, found 65 x 64"),
    "a bomb": (FIRST, lambda raw: jpeg((2000, 2000)), "expected 64 x 64 pixels, found 2000 x 2000"),
    "heavy": (FIRST, lambda raw: raw + bytes(100_000), "expected at most 100,000 bytes"),
    "no such class": ("val/val_annotations.txt", b"val_0.JPEG n00000009", "class 'n00000009', which .*wnids.txt does"),
    "a path": ("val/val_annotations.txt", b"../../secret.JPEG n00000001", "lines like 'val_0.JPEG n01443537', found"),
    "no classes": ("wnids.txt", b"", "expected 1 to 200 names, each once, found 0"),
    "a class twice": ("wnids.txt", b"n00000001\nn00000001\n", "each once"),
    "a class with a path": ("wnids.txt", b"../n00000001\n", "lines like 'n01443537', found '../n00000001' in line 1"),
    "no text": ("wnids.txt", b"\xff\xfe", "cannot be read"),
    "no annotations": ("val/val_annotations.txt", b"\n", "expected 1 to 10,000 lines, found 0"),
    "a long list": ("wnids.txt", b"n00000001\n" * 300_000, "expected at most 2,000,000 bytes"),
}


@pytest.mark.parametrize("what", BAD_TINY)
def test_bad_tiny_imagenet(tmp_path, what):
    pytest.importorskip("PIL")
    path, raw, message = BAD_TINY[what]
    path = set_up(tmp_path, path, raw)
    refused(lambda: load("tiny-imagenet", tmp_path), message, path, 20e6)


def test_tiny_imagenet_lacks_something(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    write_tiny_imagenet(tmp_path)
    (tmp_path / "val/images/val_2.JPEG").unlink()
    refused(lambda: load("tiny-imagenet", tmp_path), r"val_2.JPEG: cannot be read", tmp_path)
    monkeypatch.setattr(folders, "EACH", 1)
    refused(lambda: load("tiny-imagenet", tmp_path), "expected 1 to 1 files .*, found 2", tmp_path)
    for path in (tmp_path / "train/n00000002/images").iterdir():
        path.unlink()
    monkeypatch.setattr(folders, "EACH", 2)
    refused(lambda: load("tiny-imagenet", tmp_path), r"n00000002/images: expected 1 to 2 files", tmp_path)
    (tmp_path / "train/n00000002/images").rmdir()
    refused(lambda: load("tiny-imagenet", tmp_path), r"n00000002/images: expected a folder of images", tmp_path)


def test_tiny_imagenet_without_pillow(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    write_tiny_imagenet(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="read by Pillow: pip install pillow"):
        load("tiny-imagenet", tmp_path)


def test_zip_is_still_packed(tmp_path):
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(b"")
    with pytest.raises(DataError, match=r"unpack it there: unzip tiny-imagenet-200\.zip"):
        load("tiny-imagenet", tmp_path)


# ---- text ----


@pytest.mark.parametrize(("name", "sub"), [("ag-news", "."), ("ag-news", "ag_news_csv"), ("sogou-news", "sogou-news")])
def test_news(tmp_path, name, sub):
    write_news(tmp_path / sub)
    found = load(name, tmp_path)
    assert found.x.shape == (4, news.LENGTH)
    assert found.x.dtype == torch.int64
    assert found.y.tolist() == [2, 3, 0, 1]
    assert found.test_y.tolist() == [0]
    assert found.classes == (4 if name == "ag-news" else 5)
    # x is there 62 times, after two other words
    texts = [
        "wall st bears claw back short sellers wall street s band are seeing green again",
        "quoted words here wall wall wall and a b",
        "éclair 2",
    ]
    first, second, third = (text.split() for text in texts)
    words = [*first, *second, *third]
    order = sorted(set(words) | {"x"}, key=lambda w: (-62 if w == "x" else -words.count(w), w))
    numbers = {w: i + 2 for i, w in enumerate(order)}
    assert found.x[0].tolist() == [numbers[w] for w in first] + [0] * (64 - len(first))
    assert found.x[1, : len(second)].tolist() == [numbers[w] for w in second]
    assert found.x[2].tolist() == [0] * 64
    assert found.x[3].tolist() == [numbers["éclair"], numbers["2"]] + [2] * 62
    assert found.test_x[0, :4].tolist() == [1, 3, numbers["green"], 0]
    assert found.vocabulary == len(order) + 2


def test_small_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setattr(news, "VOCABULARY", 4)
    write_news(tmp_path)
    found = load("ag-news", tmp_path)
    assert found.vocabulary == 4
    assert sorted(found.x.unique().tolist()) == [0, 1, 2, 3]


def test_names_of_columns_are_passed_over(tmp_path):
    write_news(tmp_path, [("Class Index", "Title", "Description"), *NEWS_ROWS])
    assert load("ag-news", tmp_path).y.tolist() == [2, 3, 0, 1]


def test_news_can_be_learned_from(tmp_path):
    write_news(tmp_path)
    found = load("ag-news", tmp_path)
    model = models.make("embedding", tuple(found.x.shape[1:]), found.classes, 0, found.vocabulary)
    assert model(found.test_x).shape == (1, 4)


BAD_NEWS = {
    "empty": (b"", "expected lines of class, title, description, found none"),
    "only names": (b"class,title\n", "found none"),
    "class 0": (b'"0","a","b"\n', "classes from 1 to 4, found 0 in line 1"),
    "class 5": (b'1,a,b\n"5","a","b"\n', "classes from 1 to 4, found 5 in line 2"),
    "a huge class": (b"9" * 5000 + b",a,b\n", "expected class, title, description, found '99999"),
    "a word": (b"1,a,b\nworld,a,b\n", "expected class, title, description, found 'world,a,b' in line 2"),
    "one column": (b"1\n", "found '1' in line 1"),
    "a blank line": (b"1,a,b\n\n", "found '' in line 2"),
    "latin-1": (b"1,caf\xe9,b\n", "no CSV file in UTF-8"),
    "a long field": (b"1," + b"a" * 200_000 + b"\n", "no CSV file in UTF-8: field larger than field limit"),
    "a pickle": (pickle.dumps(["a"]), "no CSV file in UTF-8|expected class"),
}


@pytest.mark.parametrize("what", BAD_NEWS)
def test_bad_news(tmp_path, what):
    raw, message = BAD_NEWS[what]
    write_news(tmp_path)
    (tmp_path / "train.csv").write_bytes(raw)
    refused(lambda: load("ag-news", tmp_path), message, tmp_path / "train.csv")


def test_too_much_news(tmp_path):
    write_news(tmp_path)
    with open(tmp_path / "train.csv", "w", newline="") as file:
        csv.writer(file).writerows([("1", "a", "b")] * 4)
    with pytest.raises(DataError, match="expected at most 3 lines, found more"):
        news.read_news([tmp_path / "train.csv", tmp_path / "test.csv"], 4, (3, 3))
    with open(tmp_path / "test.csv", "wb") as file:
        file.truncate(10**10)
    with pytest.raises(DataError, match="expected at most 31,129,600 bytes, found 10,000,000,000"):
        load("ag-news", tmp_path)


# ---- several domains ----


def write_domains(folder):
    return (
        write_idx(folder / "mnist"),
        write_usps(folder / "usps"),
        write_matlab(folder / "svhn"),
        write_matlab(folder / "syn", "synth_"),
    )


def test_domain_digits(tmp_path):
    mnist, usps, svhn, syn = write_domains(tmp_path)
    found = load("domain-digits", tmp_path, pixels="unit")
    assert found.domains == ("mnist", "usps", "svhn", "syn")
    sizes, test_sizes = (30, 7, 8, 8), (12, 3, 4, 4)
    assert found.domain.tolist() == [d for d, n in enumerate(sizes) for _ in range(n)]
    assert found.test_domain.tolist() == [d for d, n in enumerate(test_sizes) for _ in range(n)]
    assert found.x.shape == (53, 3, 32, 32)
    assert found.test_x.shape == (23, 3, 32, 32)
    labels = [mnist["train-labels"], usps[0][1] - 1, svhn[0][1].ravel() % 10, syn[0][1].ravel() % 10]
    assert found.y.tolist() == np.concatenate(labels).tolist()
    assert np.array_equal(bytes_of(found.x[37:45]), svhn[0][0].transpose(3, 2, 0, 1))  # of the right size already
    grey = bytes_of(found.x[:37])
    assert (grey == grey[:, :1]).all()
    image = pytest.importorskip("PIL.Image")  # an independent bilinear filter, in fixed point
    for i in (0, 5):
        expected = np.asarray(image.fromarray(mnist["train-images"][i]).resize((32, 32), image.Resampling.BILINEAR))
        assert np.abs(expected.astype(int) - grey[i, 0]).max() <= 1


def test_domains_are_limited(tmp_path, monkeypatch):
    write_domains(tmp_path)
    monkeypatch.setattr(data, "DOMAIN_MOST", (7, 3))
    found = load("domain-digits", tmp_path)
    assert np.bincount(found.domain).tolist() == [7] * 4
    assert np.bincount(found.test_domain).tolist() == [3] * 4
    assert abs(float(found.x.mean())) < 1e-5
    assert torch.equal(found.x, load("domain-digits", tmp_path).x)


def test_a_domain_is_missing(tmp_path):
    write_idx(tmp_path / "mnist")
    with pytest.raises(
        DataError, match=r"usps: its files were not found\nexpected, in one folder: usps, usps.t \(also"
    ):
        load("domain-digits", tmp_path)
