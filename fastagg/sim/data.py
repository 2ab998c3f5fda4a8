"""Data sets from their official files. Nothing is downloaded, and nothing is ever unpickled.

    digits                  inside scikit-learn's package: 1,797 images of 8 x 8
    mnist, fashion-mnist    the four IDX files, plain or .gz
    cifar10, cifar100       the binary version; the Python one is a pickle, and reading a pickle can run any code
    tiny-imagenet           the folders of tiny-imagenet-200.zip; its validation set is the test set
    usps                    LIBSVM's text files, plain or .bz2
    svhn, syn               MATLAB files of 32 x 32 digits: house numbers, and synthetic ones
    domain-digits           mnist, usps, svhn and syn as one, 32 x 32 in colour; each client has images of one of them
    ag-news, sogou-news     text in CSV files

The readers are in datasets/, one for each format.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastagg._engine.checks import check_choice, suggest
from fastagg.sim.choices import PIXELS
from fastagg.sim.datasets import Arrays, DataError
from fastagg.sim.datasets.cifar import read_cifar
from fastagg.sim.datasets.files import Source, find
from fastagg.sim.datasets.folders import read_tiny_imagenet
from fastagg.sim.datasets.idx import read_idx_set
from fastagg.sim.datasets.libsvm import read_usps
from fastagg.sim.datasets.matlab import read_matlab
from fastagg.sim.datasets.news import read_news


@dataclass(frozen=True)
class Dataset:
    """Samples in memory. Pixels of both sets are scaled alike, see choices.PIXELS"""

    name: str
    x: Tensor  # [N, C, H, W] or other [N, ...] float32; text: [N, length] int64
    y: Tensor  # [N] int64 classes; values to predict: [N, ...] float32
    test_x: Tensor
    test_y: Tensor
    classes: int  # 0: y are values to predict
    vocabulary: int = 0  # text: words are numbered below this
    domains: tuple[str, ...] = ()  # where samples come from, if there are several; a client has samples of one
    domain: Tensor | None = None  # [N] int64: which of them
    test_domain: Tensor | None = None


def load(name: str, data_dir: str | Path | None = None, pixels: str = "standard") -> Dataset:
    """The data set of that name, one of DATASETS; pixels as one of choices.PIXELS says.

    Its files are looked for in data_dir and nowhere else, if it is given; otherwise in the folder that the environment
    variable FASTAGG_DATA names, then where Debian's package puts Fashion-MNIST. In each of them, directly and in the
    subfolders that the official archives make.
    """
    check_choice("data", "pixels", pixels, PIXELS)
    if name == "digits":
        return normalised(name, 10, *digits(), pixels)
    if name == "domain-digits":
        return domain_digits(data_dir, pixels)
    if name not in SOURCES:
        near = suggest(str(name).lower(), DATASETS)
        raise DataError(f"no data set {name!r}{near} (there are {', '.join(DATASETS)})")
    return normalised(name, SOURCES[name].classes, *read(name, data_dir), pixels)


def read(name: str, data_dir: str | Path | None) -> tuple[Arrays, Arrays]:
    """Training and test set as they are in the files"""
    source = SOURCES[name]
    return source.read(find(name, source, data_dir))


def normalised(name: str, classes: int, train: Arrays, test: Arrays, pixels: str) -> Dataset:
    x, test_x = (torch.from_numpy(samples) for samples, _ in (train, test))
    y, test_y = (torch.from_numpy(labels.astype(np.int64)) for _, labels in (train, test))
    if x.dtype == torch.int64:
        return Dataset(name, x, y, test_x, test_y, classes, vocabulary=int(x.max()) + 1)
    x, test_x = scaled(x, test_x, pixels, 16 if name == "digits" else 255)
    return Dataset(name, x, y, test_x, test_y, classes)


def scaled(x: Tensor, test_x: Tensor, pixels: str, most: int = 255) -> tuple[Tensor, Tensor]:
    """Images [N, C, H, W] uint8 of both sets as float32, as one of choices.PIXELS says; most is what white is"""
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


def digits() -> tuple[Arrays, Arrays]:
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


DOMAINS = ("mnist", "usps", "svhn", "syn")
DOMAIN_MOST = (
    25_000,
    9_000,
)  # images of a domain, for training and for testing, as in "Digit-Five" (Peng et al., 2019)


def domain_digits(data_dir: str | Path | None, pixels: str) -> Dataset:
    """The digits of FPL (Huang et al., 2023), whose setting FedAWA's Table 7 has: four domains, all 32 x 32; grey
    ones have three equal channels. Of a larger domain some are chosen, once and for all. Scaled as one data set."""
    rng = np.random.default_rng(0)
    sets: tuple[list[Arrays], list[Arrays]] = ([], [])
    for name in DOMAINS:
        for (x, y), most, kept in zip(read(name, data_dir), DOMAIN_MOST, sets, strict=True):
            some = np.sort(rng.permutation(len(y))[:most])
            kept.append((resized(x[some]), y[some]))
    x, test_x = (np.concatenate([x for x, _ in kept]) for kept in sets)
    y, test_y = (torch.from_numpy(np.concatenate([y for _, y in kept]).astype(np.int64)) for kept in sets)
    domain, test_domain = (
        torch.from_numpy(np.repeat(np.arange(len(kept)), [len(y) for _, y in kept])) for kept in sets
    )
    x, test_x = scaled(torch.from_numpy(x), torch.from_numpy(test_x), pixels)
    return Dataset("domain-digits", x, y, test_x, test_y, 10, domains=DOMAINS, domain=domain, test_domain=test_domain)


def resized(pixels: np.ndarray, side: int = 32) -> np.ndarray:
    """Images of one or three channels in colour, bilinear, rounded"""
    x = torch.from_numpy(np.ascontiguousarray(pixels))
    if x.shape[2:] != (side, side):
        x = F.interpolate(x.float(), (side, side), mode="bilinear", antialias=True).round_().to(torch.uint8)
    return x.expand(-1, 3, -1, -1).numpy()


IDX = tuple(
    (f"{what}-{kind}", f"{what}-{kind}.gz", f"{what}.{kind}", f"{what}.{kind}.gz")
    for part in ("train", "t10k")
    for what, kind in ((f"{part}-images", "idx3-ubyte"), (f"{part}-labels", "idx1-ubyte"))
)
IDX_ALSO = " (also with .gz, or written train-images.idx3-ubyte)"
CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html has it as {0}; unpack that with tar xf {0}"
NEWS = (
    "https://arxiv.org/abs/1509.01626 (Zhang et al., 2015) says where {0}.tar.gz is; unpack that with tar xf {0}.tar.gz"
)

SOURCES = {
    "mnist": Source(
        classes=10,
        files=IDX,
        folders=("MNIST/raw",),  # torchvision's
        read=lambda paths: read_idx_set(paths, balanced=False),
        get="http://yann.lecun.com/exdb/mnist/ is the official site (files in .gz are read as they are)",
        also=IDX_ALSO,
    ),
    "fashion-mnist": Source(
        classes=10,
        files=IDX,
        folders=("FashionMNIST/raw",),
        read=lambda paths: read_idx_set(paths, balanced=True),
        get="apt-get install dataset-fashion-mnist on Debian and Ubuntu (found by itself then),"
        " or https://github.com/zalandoresearch/fashion-mnist",
        also=IDX_ALSO,
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
    "tiny-imagenet": Source(
        classes=200,
        files=(("wnids.txt",), ("val/val_annotations.txt",)),
        folders=("tiny-imagenet-200",),
        read=read_tiny_imagenet,
        get="http://cs231n.stanford.edu/tiny-imagenet-200.zip; unpack that with unzip tiny-imagenet-200.zip",
        also=", and the folders train and val/images",
        packed=("tiny-imagenet-200.zip",),
    ),
    "usps": Source(
        classes=10,
        files=(("usps", "usps.bz2"), ("usps.t", "usps.t.bz2")),
        folders=("USPS",),
        read=lambda paths: (read_usps(paths[0], 7291), read_usps(paths[1], 2007)),
        get="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps has usps.bz2 and usps.t.bz2",
        also=" (also with .bz2)",
    ),
    "svhn": Source(
        classes=10,
        files=(("train_32x32.mat",), ("test_32x32.mat",)),
        folders=("SVHN",),
        read=lambda paths: (read_matlab(paths[0], 73_257), read_matlab(paths[1], 26_032)),
        get="http://ufldl.stanford.edu/housenumbers/ (format 2, cropped digits)",
    ),
    "syn": Source(
        classes=10,
        files=(("synth_train_32x32.mat",), ("synth_test_32x32.mat",)),
        folders=("SYN", "SynthDigits"),
        read=lambda paths: (read_matlab(paths[0], 479_400), read_matlab(paths[1], 9_553)),
        get="http://yaroslav.ganin.net/ (SynthDigits.zip, of Ganin and Lempitsky's domain adaptation)",
        packed=("SynthDigits.zip",),
    ),
    "ag-news": Source(
        classes=4,
        files=(("train.csv",), ("test.csv",)),
        folders=("ag_news_csv",),
        read=lambda paths: read_news(paths, 4, (120_000, 7_600)),
        get=NEWS.format("ag_news_csv"),
        packed=("ag_news_csv.tar.gz",),
    ),
    "sogou-news": Source(
        classes=5,
        files=(("train.csv",), ("test.csv",)),
        folders=("sogou_news_csv",),
        read=lambda paths: read_news(paths, 5, (450_000, 60_000)),
        get=NEWS.format("sogou_news_csv"),
        packed=("sogou_news_csv.tar.gz",),
    ),
}
DATASETS = ("digits", *SOURCES, "domain-digits")
