"""Small data sets in the files of the official ones."""

from __future__ import annotations

import bz2
import csv
import gzip
import struct

import numpy as np

TRAIN, TEST = 30, 12


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"{part}-{what}": rng.integers(0, high, shape, np.uint8)
        for part, n in (("train", TRAIN), ("t10k", TEST))
        for what, high, shape in (("images", 256, (n, 28, 28)), ("labels", 10, n))
    }


def write_idx(folder, sep="-", packed=False):
    folder.mkdir(parents=True, exist_ok=True)
    arrays = idx_arrays()
    for what, array in arrays.items():
        raw = idx(array)
        name = f"{what}{sep}idx{array.ndim}-ubyte" + (".gz" if packed else "")
        (folder / name).write_bytes(gzip.compress(raw) if packed else raw)
    return arrays


def write_cifar(folder, classes=10, each=6):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    names = (
        [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
        if classes == 10
        else ["train.bin", "test.bin"]
    )
    records = {}
    for name in names:
        labels = rng.integers(0, classes, (each, 1), np.uint8)
        if classes == 100:
            labels = np.hstack([rng.integers(0, 20, (each, 1), np.uint8), labels])
        records[name] = np.hstack([labels, rng.integers(0, 256, (each, 3072), np.uint8)])
        (folder / name).write_bytes(records[name].tobytes())
    return list(records.values())


def write_matlab(folder, prefix="", sizes=(8, 4), compressed=True):
    """SVHN's files, or SYN's with the prefix "synth_"; by SciPy, which reads and writes the format on its own"""
    from scipy.io import savemat

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(2)
    arrays = []
    for part, n in zip(("train", "test"), sizes, strict=True):
        x, y = rng.integers(0, 256, (32, 32, 3, n), np.uint8), rng.integers(1, 11, (n, 1), np.uint8)
        savemat(folder / f"{prefix}{part}_32x32.mat", {"X": x, "y": y}, do_compression=compressed)
        arrays.append((x, y))
    return arrays


def usps_text(pixels, labels):
    lines = (
        f"{label} " + " ".join(f"{i + 1}:{value:.6g}" for i, value in enumerate(row)) + " \n"
        for row, label in zip(pixels, labels, strict=True)
    )
    return "".join(lines).encode()


def write_usps(folder, packed=False, sizes=(7, 3)):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    arrays = []
    for name, n in zip(("usps", "usps.t"), sizes, strict=True):
        x, y = rng.uniform(-1, 1, (n, 256)).round(4), rng.integers(1, 11, n)
        x[0, :2] = -1, 1
        text = usps_text(x, y)
        (folder / (name + ".bz2" * packed)).write_bytes(bz2.compress(text) if packed else text)
        arrays.append((x, y))
    return arrays


def write_tiny_imagenet(folder, classes=3, each=2, tests=4):
    """The images are one grey each, which JPEG keeps; returned are theirs, and the classes"""
    from PIL import Image

    names = [f"n{i:08d}" for i in range(classes, 0, -1)]
    grey = lambda i: (37 * i + 11) % 256  # noqa: E731
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("".join(f"{name}\n" for name in names))
    train, test = [], []
    for label, name in enumerate(names):
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        for i in range(each):
            Image.new("RGB", (64, 64), (grey(len(train)),) * 3).save(images / f"{name}_{i}.JPEG", quality=95)
            train.append((grey(len(train)), label))
    lines = []
    for i in range(tests):
        mode = "L" if i == 1 else "RGB"
        value = grey(100 + i)
        image = Image.new(mode, (64, 64), value if mode == "L" else (value,) * 3)
        image.save(folder / "val" / "images" / f"val_{i}.JPEG", quality=95)
        test.append((value, i % classes))
        lines.append(f"val_{i}.JPEG\t{names[i % classes]}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return train, test


NEWS_ROWS = [
    ("3", "Wall St. Bears Claw Back", "Short-sellers, Wall Street's band, are seeing green again."),
    ("4", 'Quoted "words" here', "wall wall WALL\\and a, b"),
    ("1", "", ""),
    ("2", "Éclair_2", "x " * 100),
]


def write_news(folder, rows=NEWS_ROWS, test_rows=(("1", "unseen wall", "Green?"),)):
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train.csv", rows), ("test.csv", test_rows)):
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(lines)
