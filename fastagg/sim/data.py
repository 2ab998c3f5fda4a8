"""Data sets from their official files. Nothing is downloaded, and nothing is ever unpickled.

    digits                  inside scikit-learn's package: 1,797 images of 8 x 8
    mnist, fashion-mnist    the four IDX files, plain or .gz
    cifar10, cifar100       the binary version; the Python one is a pickle, and reading a pickle can run any code

A header is believed only after the size of the file agreed with it, and no file may hold more images than the official
one: a wrong, truncated or malicious file costs an error message, not memory.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fastagg._engine.checks import check_choice, suggest
from fastagg.sim.choices import PIXELS


class DataError(ValueError):
    """A data set that cannot be found or read; the message says which file, and what to do."""


@dataclass(frozen=True)
class Dataset:
    """Samples in memory. Pixels of both sets are scaled alike, see PIXELS"""

    name: str
    x: Tensor  # [N, C, H, W] or other [N, ...] float32; text: [N, length] int64
    y: Tensor  # [N] int64 classes; values to predict: [N, ...] float32
    test_x: Tensor
    test_y: Tensor
    classes: int  # 0: y are values to predict
    vocabulary: int = 0  # text: words are numbered below this


Images = tuple[np.ndarray, np.ndarray]  # pixels [N, C, H, W] uint8, labels [N] uint8


def load(name: str, data_dir: str | Path | None = None, pixels: str = "standard") -> Dataset:
    """The data set of that name, one of DATASETS; pixels as one of choices.PIXELS says.

    Its files are looked for in data_dir and nowhere else, if it is given; otherwise in the folder that the environment
    variable FASTAGG_DATA names, then where Debian's package puts Fashion-MNIST. In each of them, directly and in the
    subfolders that the official archives make.
    """
    check_choice("data", "pixels", pixels, PIXELS)
    if name == "digits":
        return normalised(name, 10, *digits(), pixels)
    if name not in SOURCES:
        near = suggest(str(name).lower(), DATASETS)
        raise DataError(f"no data set {name!r}{near} (there are {', '.join(DATASETS)})")
    source = SOURCES[name]
    return normalised(name, source.classes, *source.read(find(name, data_dir)), pixels)


def normalised(name: str, classes: int, train: Images, test: Images, pixels: str) -> Dataset:
    most = 16 if name == "digits" else 255
    x, test_x = scaled(torch.from_numpy(train[0]), torch.from_numpy(test[0]), pixels, most)
    y, test_y = (torch.from_numpy(labels.astype(np.int64)) for _, labels in (train, test))
    return Dataset(name, x, y, test_x, test_y, classes)


def scaled(x: Tensor, test_x: Tensor, pixels: str, most: int = 255) -> tuple[Tensor, Tensor]:
    """Images [N, C, H, W] uint8 of both sets as float32, as one of PIXELS says; most is what white is"""
    mean, deviation = (torch.from_numpy(v)[:, None, None] for v in moments(x.numpy()))
    if pixels == "unit":
        mean, deviation = torch.zeros_like(mean), torch.full_like(deviation, most)
    elif pixels == "half":
        mean, deviation = torch.full_like(mean, most / 2), torch.full_like(deviation, most / 2)
    return standardised(x, mean, deviation), standardised(test_x, mean, deviation)


def standardised(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return x.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(deviation)


def moments(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each channel, [C] float32, from how often each value occurs: exact, 0.3 s for CIFAR-10"""
    values = np.arange(256)
    counts = np.zeros((pixels.shape[1], 256), np.int64)
    for start in range(0, len(pixels), 500):  # bincount makes an int64 copy: in pieces, it stays in the cache
        for c, channel in enumerate(pixels[start : start + 500].swapaxes(0, 1)):
            counts[c] += np.bincount(channel.ravel(), minlength=256)
    mean = counts @ values / counts.sum(1)
    variance = (counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1)
    deviation = np.where(variance > 0, np.sqrt(variance), 1)  # 1: all pixels alike
    return mean.astype(np.float32), deviation.astype(np.float32)


def digits() -> tuple[Images, Images]:
    """A fifth of each class, chosen once and for all, is the test set"""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("digits come with scikit-learn: pip install '.[sim]' in a clone of fastagg") from error
    bunch = cast(Any, load_digits())  # without types of its own
    pixels, labels = bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.uint8)
    rng = np.random.default_rng(0)
    by_class = [rng.permutation(np.flatnonzero(labels == c)) for c in range(10)]
    test = np.sort(np.concatenate([i[: round(len(i) / 5)] for i in by_class]))
    train = np.setdiff1d(np.arange(len(labels)), test)
    return (pixels[train], labels[train]), (pixels[test], labels[test])


# Finding files


@dataclass(frozen=True)
class Source:
    """A data set's files: each has one or more names, the official one first"""

    classes: int
    files: tuple[tuple[str, ...], ...]
    folders: tuple[str, ...]  # subfolders of the data folder, beside one called like the data set
    read: Callable[[list[Path]], tuple[Images, Images]]
    get: str
    system: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    pickled: tuple[str, ...] = ()


def find(name: str, data_dir: str | Path | None) -> list[Path]:
    """One path per file of a data set, all in one folder"""
    source = SOURCES[name]
    top = data_dir or os.environ.get("FASTAGG_DATA")
    folders = [Path(os.path.expanduser(top)) / sub for sub in (".", name, *source.folders)] if top else []
    folders += [] if data_dir else [Path(s) for s in source.system]  # a folder that was asked for has no substitute
    looked = []
    for folder in folders:
        found = [next((folder / n for n in names if os.path.isfile(folder / n)), None) for names in source.files]
        there = [path for path in found if path is not None]
        if len(there) == len(found):
            return there
        missing = [names[0] for names, path in zip(source.files, found, strict=True) if path is None]
        state = "" if os.path.isdir(folder) else " (no such folder)"
        looked.append(f"{folder}{state if not any(found) else ' (lacks ' + ', '.join(missing) + ')'}")
    for folder in folders:
        for path in (folder / n for n in source.packed if os.path.isfile(folder / n)):
            raise DataError(f"{name}: {path} is still packed; unpack it there: tar xf {path.name}")
    for folder in folders:
        for path in (folder / n for n in source.pickled if os.path.isfile(folder / n)):
            raise DataError(
                f"{name}: {path} is the Python version of the data, a pickle, which is not read because reading a"
                f" pickle can run any code; get the binary version instead: {source.get}"
            )
    kinds = " (also with .gz, or written train-images.idx3-ubyte)" if len(source.files[0]) > 1 else ""
    where = "\n  ".join(looked) or "(nowhere: neither data_dir nor FASTAGG_DATA says where)"
    raise DataError(
        f"{name}: its files were not found\n"
        f"expected, in one folder: {', '.join(names[0] for names in source.files)}{kinds}\n"
        f"looked in:\n  {where}\n"
        f"to get them: {source.get}\n"
        "then name their folder as data_dir (--data-dir), or in the environment variable FASTAGG_DATA"
    )


# Reading files


def read_idx(path: Path, dims: tuple[int, ...], most: int) -> np.ndarray:
    """An IDX file of unsigned bytes as [N, *dims], plain or compressed, whatever its name says"""
    start = 8 + 4 * len(dims)
    magic = bytes([0, 0, 8, 1 + len(dims)])  # 8: unsigned bytes
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            head = file.read(start)
            if head[:4] != magic:
                kind = "images" if dims else "labels"
                raise DataError(
                    f"{path}: expected an IDX file of {kind}, which begins {show(magic)}, found {show(head)}"
                )
            if len(head) < start:
                raise DataError(f"{path}: truncated: expected a header of {start} bytes, found {len(head)}")
            number, *shape = struct.unpack(f">{1 + len(dims)}I", head[4:])
            if tuple(shape) != dims:
                raise DataError(f"{path}: expected images of {by(dims)} pixels, its header says {by(shape)}")
            if not 1 <= number <= most:
                raise DataError(f"{path}: expected 1 to {most:,} entries, its header says {number:,}")
            expected = number * int(np.prod(dims, dtype=np.int64))
            body = file.read(expected + 1)  # one more than there should be; a gzip file is checked when it ends
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read, or is damaged: {error or type(error).__name__}") from error
    if len(body) != expected:
        found = f"more than {expected:,}" if len(body) > expected else f"{len(body):,}"
        raise DataError(f"{path}: expected {expected:,} bytes after the header, as it says, found {found}")
    return np.frombuffer(body, np.uint8).reshape(number, *dims).copy()


def read_idx_set(paths: list[Path], balanced: bool) -> tuple[Images, Images]:
    """MNIST or Fashion-MNIST, whose files have the same names: only the second has 6,000 images of every class"""
    sets = []
    for images, labels, most in ((*paths[:2], 60_000), (*paths[2:], 10_000)):
        y = checked(labels, read_idx(labels, (), most), 10)
        x = read_idx(images, (28, 28), most)
        if len(x) != len(y):
            raise DataError(f"{images} has {len(x):,} images, but {labels} has {len(y):,} labels")
        if len(y) == 60_000 and (np.bincount(y).max() == 6000) != balanced:
            wanted, other = ("Fashion-MNIST", "MNIST") if balanced else ("MNIST", "Fashion-MNIST")
            raise DataError(f"{labels}: expected the labels of {wanted}, found others (of {other}?)")
        sets.append((x[:, None], y))
    return sets[0], sets[1]


def read_cifar(paths: list[Path], classes: int, most: int) -> Images:
    """Records of one label byte (CIFAR-100: the coarse and the fine one) and 3 x 32 x 32 bytes of pixels"""
    head = 1 if classes == 10 else 2
    record = head + 3072
    sizes = []
    for path in paths:
        try:
            size = os.path.getsize(path)
            with open(path, "rb") as file:
                pickled = file.read(1) == b"\x80"
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        if size % record or not 1 <= size // record <= most:
            raise DataError(
                f"{path}: expected 1 to {most:,} records of {record} bytes ({most * record:,} bytes in the official"
                f" file), found {size:,} bytes" + (", which begin like a pickle" if pickled else "")
            )
        sizes.append(size // record)
    pixels, labels = np.empty((sum(sizes), 3072), np.uint8), np.empty(sum(sizes), np.uint8)
    end = 0
    for path, number in zip(paths, sizes, strict=True):
        try:
            records = np.fromfile(path, np.uint8, number * record).reshape(number, record)
        except (OSError, ValueError) as error:  # it became shorter meanwhile
            raise DataError(f"{path}: cannot be read: {error}") from error
        if head == 2:
            checked(path, records[:, 0], 20, "coarse label")
        labels[end : end + number] = checked(path, records[:, head - 1], classes)
        pixels[end : end + number] = records[:, head:]
        end += number
    return pixels.reshape(-1, 3, 32, 32), labels


def checked(path: Path, labels: np.ndarray, classes: int, what: str = "label") -> np.ndarray:
    for i in np.flatnonzero(labels >= classes)[:1]:
        raise DataError(f"{path}: expected {what}s from 0 to {classes - 1}, found {labels[i]} at entry {i}")
    return labels


def show(head: bytes) -> str:
    return head[:4].hex(" ") or "an empty file"


def by(shape: tuple[int, ...] | list[int]) -> str:
    return " x ".join(map(str, shape))


IDX = tuple(
    (f"{what}-{kind}", f"{what}-{kind}.gz", f"{what}.{kind}", f"{what}.{kind}.gz")
    for part in ("train", "t10k")
    for what, kind in ((f"{part}-images", "idx3-ubyte"), (f"{part}-labels", "idx1-ubyte"))
)
CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html has it as {0}; unpack that with tar xf {0}"

SOURCES = {
    "mnist": Source(
        classes=10,
        files=IDX,
        folders=("MNIST/raw",),  # torchvision's
        read=lambda paths: read_idx_set(paths, balanced=False),
        get="http://yann.lecun.com/exdb/mnist/ is the official site (files in .gz are read as they are)",
    ),
    "fashion-mnist": Source(
        classes=10,
        files=IDX,
        folders=("FashionMNIST/raw",),
        read=lambda paths: read_idx_set(paths, balanced=True),
        get="apt-get install dataset-fashion-mnist on Debian and Ubuntu (found by itself then),"
        " or https://github.com/zalandoresearch/fashion-mnist",
        system=("/usr/share/datasets/fashion-mnist",),
    ),
    "cifar10": Source(
        classes=10,
        files=(*((f"data_batch_{i}.bin",) for i in range(1, 6)), ("test_batch.bin",)),
        folders=("cifar-10-batches-bin",),
        read=lambda paths: (read_cifar(paths[:5], 10, 10_000), read_cifar(paths[5:], 10, 10_000)),
        get=CIFAR.format("cifar-10-binary.tar.gz"),
        packed=("cifar-10-binary.tar.gz",),
        pickled=("data_batch_1", "cifar-10-batches-py/data_batch_1", "cifar-10-python.tar.gz"),
    ),
    "cifar100": Source(
        classes=100,
        files=(("train.bin",), ("test.bin",)),
        folders=("cifar-100-binary",),
        read=lambda paths: (read_cifar(paths[:1], 100, 50_000), read_cifar(paths[1:], 100, 10_000)),
        get=CIFAR.format("cifar-100-binary.tar.gz"),
        packed=("cifar-100-binary.tar.gz",),
        pickled=("train", "cifar-100-python/train", "cifar-100-python.tar.gz"),
    ),
}
DATASETS = ("digits", *SOURCES)
