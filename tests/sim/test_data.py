"""Loaders, on small files in the official layouts; on the real ones where they are."""

from __future__ import annotations

import gzip
import pickle
import struct
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastagg.sim import data
from fastagg.sim.choices import PIXELS
from fastagg.sim.data import SOURCES, load
from fastagg.sim.datasets import DataError, cifar
from fastagg.sim.datasets import idx as idx_files
from fastagg.sim.datasets.files import Source, find
from fastagg.sim.datasets.idx import read_idx
from helpers.data_files import TRAIN, idx, write_cifar, write_idx

DIGITS_TEST = [5, 9, 2, 4, 6, 7, 9, 3, 4, 6]
few = settings(deadline=None, max_examples=150, derandomize=True)


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch, request):
    """Neither this machine's data nor its environment takes part."""
    if request.node.originalname != "test_real_files":
        monkeypatch.delenv("FASTAGG_DATA", raising=False)
        monkeypatch.setitem(SOURCES, "fashion-mnist", without_system(SOURCES["fashion-mnist"]))


def without_system(source):
    return Source(**{**vars(source), "system": ()})


def assert_normalised(x, test_x, pixels, test_pixels):
    """Against float64 numpy; pixels [N, C, H, W]"""
    pixels, test_pixels = pixels.astype(np.float64), test_pixels.astype(np.float64)
    mean, std = pixels.mean((0, 2, 3), keepdims=True), pixels.std((0, 2, 3), keepdims=True)
    for found, raw in ((x, pixels), (test_x, test_pixels)):
        assert found.dtype == torch.float32
        assert found.is_contiguous()
        np.testing.assert_allclose(found.numpy(), (raw - mean) / std, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sep", ["-", "."])
@pytest.mark.parametrize("sub", [".", "{}", "official"])
def test_idx(tmp_path, name, packed, sep, sub):
    official = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}[name]
    arrays = write_idx(tmp_path / (official if sub == "official" else sub.format(name)), sep, packed)
    found = load(name, str(tmp_path))
    assert found.name == name
    assert found.classes == 10
    assert found.x.shape == (TRAIN, 1, 28, 28)
    assert found.y.dtype == found.test_y.dtype == torch.int64
    assert found.y.tolist() == arrays["train-labels"].tolist()
    assert found.test_y.tolist() == arrays["t10k-labels"].tolist()
    assert_normalised(found.x, found.test_x, arrays["train-images"][:, None], arrays["t10k-images"][:, None])


@pytest.mark.parametrize("sub", [".", "cifar10", "cifar-10-batches-bin"])
def test_cifar10(tmp_path, sub):
    *train, test = write_cifar(tmp_path / sub)
    found = load("cifar10", tmp_path)
    train = np.concatenate(train)
    assert found.x.shape == (30, 3, 32, 32)
    assert found.y.tolist() == train[:, 0].tolist()
    assert found.test_y.tolist() == test[:, 0].tolist()
    pixels, test_pixels = (r[:, 1:].reshape(-1, 3, 32, 32) for r in (train, test))
    assert_normalised(found.x, found.test_x, pixels, test_pixels)


@pytest.mark.parametrize("sub", [".", "cifar100", "cifar-100-binary"])
def test_cifar100_fine_labels(tmp_path, sub):
    train, test = write_cifar(tmp_path / sub, 100)
    found = load("cifar100", tmp_path)
    assert found.classes == 100
    assert found.y.tolist() == train[:, 1].tolist()
    assert found.test_y.tolist() == test[:, 1].tolist()
    assert_normalised(found.x, found.test_x, *(r[:, 2:].reshape(-1, 3, 32, 32) for r in (train, test)))


def test_digits():
    pytest.importorskip("sklearn")
    found = load("digits")
    assert found.x.shape[1:] == (1, 8, 8)
    assert len(found.x) + len(found.test_x) == 1797
    train, test = found.y.bincount(), found.test_y.bincount()
    assert (test / (train + test) - 0.2).abs().max() < 0.01
    assert found.x.mean().abs() < 1e-5
    assert found.x.std() == pytest.approx(1, abs=1e-4)
    again = load("digits", "/nowhere")
    assert torch.equal(found.x, again.x)
    assert torch.equal(found.test_y, again.test_y)
    assert found.test_y[:10].tolist() == DIGITS_TEST  # the same everywhere


def test_digits_without_sklearn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install '\.\[sim\]' in a clone"):
        load("digits")


def test_environment_variable(tmp_path, monkeypatch):
    write_idx(tmp_path / "mnist")
    monkeypatch.setenv("FASTAGG_DATA", str(tmp_path))
    assert len(load("mnist").x) == TRAIN
    write_cifar(tmp_path / "first", each=2)
    write_cifar(tmp_path, each=3)
    assert len(load("cifar10", tmp_path / "first").x) == 10  # data_dir comes first
    monkeypatch.setenv("FASTAGG_DATA", "")
    with pytest.raises(DataError, match="neither data_dir nor FASTAGG_DATA"):
        load("mnist")


@pytest.mark.parametrize("made", [False, True], ids=["missing", "empty"])
def test_a_folder_that_is_named_has_no_substitute(tmp_path, monkeypatch, made):
    for copy in ("env", "system"):
        write_idx(tmp_path / copy)
    source = Source(**{**vars(SOURCES["fashion-mnist"]), "system": (str(tmp_path / "system"),)})
    monkeypatch.setitem(SOURCES, "fashion-mnist", source)
    monkeypatch.setenv("FASTAGG_DATA", str(tmp_path / "env"))
    if made:
        (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="its files were not found"):
        load("fashion-mnist", tmp_path / "mine")


def test_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_idx(tmp_path / "d")
    assert len(load("mnist", "~/d").x) == TRAIN


def test_debian_folder(tmp_path, monkeypatch):
    write_idx(tmp_path / "debian", packed=True)
    source = Source(**{**vars(SOURCES["fashion-mnist"]), "system": (str(tmp_path / "debian"),)})
    monkeypatch.setitem(SOURCES, "fashion-mnist", source)
    assert len(load("fashion-mnist").x) == TRAIN


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_found(tmp_path, name, monkeypatch):
    monkeypatch.setenv("FASTAGG_DATA", str(tmp_path / "env"))
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    message = str(caught.value)
    for names in SOURCES[name].files:
        assert names[0] in message
    assert f"  {tmp_path}\n  {tmp_path / name} (no such folder)\n" in message
    assert "env" not in message.split("to get them")[0]  # nobody looked there
    assert "http" in message
    assert "--data-dir" in message
    assert ("apt-get install dataset-fashion-mnist" in message) == (name == "fashion-mnist")


def test_some_files_missing(tmp_path):
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"\(lacks data_batch_3.bin, test_batch.bin\)"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("MNIST", "did you mean 'mnist'"), ("cifar", "did you mean"), ("x", "there are digits, mn")],
)
def test_unknown_name(name, suggestion):
    with pytest.raises(DataError, match=suggestion):
        load(name)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10", "data_batch_1"),
        ("cifar10", "cifar-10-batches-py/data_batch_1"),
        ("cifar10", "cifar-10-python.tar.gz"),
        ("cifar100", "cifar-100-python/train"),
        ("cifar100", "cifar-100-python.tar.gz"),
    ],
)
def test_python_version_is_refused(tmp_path, name, file, monkeypatch):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(pickle.dumps({"data": b""}))
    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.setattr(pickle, "loads", None)
    with pytest.raises(DataError, match=rf"{file} is the Python version .* pickle.*-binary\.tar\.gz"):
        load(name, tmp_path)
    if name == "cifar10":  # and no obstacle where the binary one is there too
        write_cifar(tmp_path)
        assert len(load(name, tmp_path).x) == 30


def test_packed_archive(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"still packed; unpack it there: tar xf cifar-10-binary\.tar\.gz"):
        load("cifar10", tmp_path)


def good(shape=(3, 28, 28)):
    return idx(np.ones(shape, np.uint8))


def header(*dims, magic=b"\0\0\x08\x03"):
    return magic + struct.pack(f">{len(dims)}I", *dims)


BAD_IMAGES = {
    "empty": (b"", "begins 00 00 08 03, found an empty file"),
    "labels for images": (idx(np.ones(3, np.uint8)), "IDX file of images.* found 00 00 08 01"),
    "floats": (header(3, 28, 28, magic=b"\0\0\x0d\x03") + bytes(3 * 784 * 4), "found 00 00 0d 03"),
    "not idx": (b"<html>Not found</html>", "found 3c 68 74 6d"),
    "short header": (good()[:11], "expected a header of 16 bytes, found 11"),
    "truncated": (good()[:-1], "expected 2,352 bytes after the header, as it says, found 2,351"),
    "too long": (good() + b"x", "expected 2,352 bytes.* found more than 2,352"),
    "other size": (good((3, 32, 32)), "expected images of 28 x 28 pixels, its header says 32 x 32"),
    "no images": (header(0, 28, 28), "expected 1 to 60,000 entries, its header says 0"),
    "lying": (header(2**32 - 1, 28, 28) + bytes(100), "expected 1 to 60,000 entries, its header says 4,294,967,295"),
    "lying shape": (header(1, 2**32 - 1, 2**32 - 1), "says 4294967295 x 4294967295"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("what", BAD_IMAGES)
def test_bad_idx(tmp_path, what, packed):
    raw, message = BAD_IMAGES[what]
    write_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(gzip.compress(raw) if packed and raw else raw)
    tracemalloc.start()
    with pytest.raises(DataError, match=message) as caught:
        load("mnist", tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_more_bytes_than_the_header_says_are_not_unpacked(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(good() + bytes(200_000_000), 9))
    tracemalloc.start()
    with pytest.raises(DataError, match="found more than 2,352"):
        read_idx(path, (28, 28), 60_000)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "checksum", "garbage after", "head"])
def test_damaged_gzip(tmp_path, damage):
    write_idx(tmp_path, packed=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    raw = bytearray(path.read_bytes())
    if damage == "truncated":
        del raw[-500:]
    elif damage == "flipped":
        raw[len(raw) // 2] ^= 0xFF
    elif damage == "checksum":
        raw[-6] ^= 0xFF
    elif damage == "garbage after":
        raw += b"garbage"
    else:
        raw[2] = 99
    path.write_bytes(raw)
    with pytest.raises(DataError, match=rf"{path}: (cannot be read, or is damaged|expected)"):
        load("mnist", tmp_path)


def test_idx_sets_must_agree(tmp_path):
    write_idx(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(np.zeros(TRAIN - 1, np.uint8)))
    with pytest.raises(DataError, match=r"has 30 images, but .* has 29 labels"):
        load("mnist", tmp_path)
    labels.write_bytes(idx(np.array([3] * 20 + [10] * 10, np.uint8)))
    with pytest.raises(DataError, match=r"train-labels.*expected labels from 0 to 9, found 10 at entry 20"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(("name", "y"), [("mnist", np.arange(60_000) % 10), ("fashion-mnist", np.arange(60_000) % 9)])
def test_mnist_and_fashion_mnist_are_told_apart(tmp_path, name, y):
    write_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(y.astype(np.uint8)))
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.zeros((60_000, 28, 28), np.uint8)))
    with pytest.raises(DataError, match=r"expected the labels of (MNIST|Fashion-MNIST), found others"):
        load(name, tmp_path)


def test_bad_cifar(tmp_path):
    write_cifar(tmp_path)
    path = tmp_path / "data_batch_4.bin"
    whole = path.read_bytes()
    for raw, message in (
        (
            whole[:-1],
            r"1 to 10,000 records of 3073 bytes \(30,730,000 bytes in the official file\), found 18,437 bytes",
        ),
        (b"", "found 0 bytes"),
        (b"\x0a" + whole[1:], "expected labels from 0 to 9, found 10 at entry 0"),
        (pickle.dumps({"data": bytes(5000)}), "begin like a pickle"),
    ):
        path.write_bytes(raw)
        with pytest.raises(DataError, match=message) as caught:
            load("cifar10", tmp_path)
        assert str(path) in str(caught.value)
    with open(path, "wb") as file:
        file.truncate(3073 * 10_000_000)  # a hole, not 30 GB
    with pytest.raises(DataError, match="found 30,730,000,000 bytes"):
        load("cifar10", tmp_path)


def test_bad_cifar100(tmp_path):
    write_cifar(tmp_path, 100)
    whole = (tmp_path / "test.bin").read_bytes()
    for start, message in ((b"\x14\0", "coarse labels from 0 to 19, found 20"), (b"\0\x64", "0 to 99, found 100")):
        (tmp_path / "test.bin").write_bytes(start + whole[2:])
        with pytest.raises(DataError, match=message):
            load("cifar100", tmp_path)


def test_unreadable_files(tmp_path, monkeypatch):
    write_idx(tmp_path)
    write_cifar(tmp_path)

    def refuse(*args, **kwargs):
        raise PermissionError("no")

    for module in (idx_files, cifar):
        monkeypatch.setattr(module, "open", refuse, raising=False)
    for name in ("mnist", "cifar10"):
        with pytest.raises(DataError, match="cannot be read"):
            load(name, tmp_path)


def test_constant_images(tmp_path):
    write_idx(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.full((TRAIN, 28, 28), 7, np.uint8)))
    found = load("mnist", tmp_path)
    assert not found.x.any()
    assert found.test_x.isfinite().all()


@few
@given(st.binary(max_size=60), st.booleans(), st.booleans())
def test_any_bytes(tmp_path_factory, raw, packed, magic):
    """Whatever a file holds, it is read or gives a DataError"""
    path = tmp_path_factory.getbasetemp() / "any"
    raw = (b"\0\0\x08\x01" if magic else b"") + raw
    path.write_bytes(b"\x1f\x8b" + raw if packed else raw)
    try:
        found = read_idx(path, (), 60_000)
    except DataError as error:
        assert "any: " in str(error)  # noqa: PT017
    else:
        assert len(found) == len(raw) - 8


@few
@given(st.integers(0, 200), st.integers(0, 255))
def test_any_damage_to_gzip(tmp_path_factory, at, value):
    path = tmp_path_factory.getbasetemp() / "damaged"
    expected = np.arange(150, dtype=np.uint8)
    raw = bytearray(gzip.compress(idx(expected), mtime=0))
    raw[at % len(raw)] = value
    path.write_bytes(raw)
    try:
        found = read_idx(path, (), 60_000)
    except DataError:
        return
    assert np.array_equal(found, expected)  # a byte of the gzip header that does not matter


REAL = {
    "mnist": (60_000, (1, 28, 28), 5923),
    "fashion-mnist": (60_000, (1, 28, 28), 6000),
    "cifar10": (50_000, (3, 32, 32), 5000),
    "cifar100": (50_000, (3, 32, 32), 500),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files(name):
    try:
        find(name, SOURCES[name], None)
    except DataError:
        pytest.skip(f"{name} is not here; FASTAGG_DATA says where it is")
    found = load(name)
    number, shape, zeros = REAL[name]
    assert found.x.shape == (number, *shape)
    assert found.test_x.shape == (10_000, *shape)
    assert (found.y == 0).sum() == zeros
    assert found.x.mean().abs() < 1e-4
    assert found.x.std() == pytest.approx(1, abs=1e-3)


def test_pixels_as_they_are():
    standard, unit, half = (data.load("digits", pixels=pixels) for pixels in PIXELS)
    assert unit.x.min() == 0
    assert unit.x.max() == unit.test_x.max() == 1
    assert abs(float(standard.x.mean())) < 1e-5
    assert abs(float(standard.x.std(correction=0)) - 1) < 1e-5
    scaled = (unit.test_x - unit.x.mean()) / unit.x.std(correction=0)
    torch.testing.assert_close(scaled, standard.test_x, rtol=1e-4, atol=1e-5)
    for a, b in ((half.x, unit.x), (half.test_x, unit.test_x)):
        torch.testing.assert_close(a, (b - 0.5) / 0.5)
    assert half.x.min() == -1
    assert half.x.max() == 1
    with pytest.raises(ValueError, match="pixels='raw'; expected one of 'standard', 'unit', 'half'"):
        data.load("digits", pixels="raw")
