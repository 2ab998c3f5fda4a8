"""Tiny-ImageNet: 64 x 64 images in folders, as its archive unpacks; Pillow reads them.

wnids.txt                       names of the classes, n and eight digits: the first is class 0
train/<name>/images/*.JPEG      up to 500 of each
val/images/*.JPEG               the test set; val/val_annotations.txt says of each which class it is
                                (the official test set has no labels)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fastagg.sim.datasets import Arrays, DataError

CLASSES, EACH, TEST = 200, 500, 10_000
FILE = 100_000  # bytes of an image at most; the largest of the official ones has a tenth
LIST = 2_000_000  # bytes of a list at most
CLASS, IMAGE = re.compile(r"n\d{8}"), re.compile(r"[\w-]+\.JPEG")


def read_tiny_imagenet(paths: list[Path]) -> tuple[Arrays, Arrays]:
    names_file, annotations = paths
    names = [line[0] for line in listed(names_file, 1, {0: CLASS})]
    if not 1 <= len(names) <= CLASSES or len(set(names)) < len(names):
        raise DataError(f"{names_file}: expected 1 to {CLASSES} names, each once, found {len(names)}")
    numbers = {name: i for i, name in enumerate(names)}
    train = [
        (path, i) for name, i in numbers.items() for path in images_of(names_file.parent / "train" / name / "images")
    ]
    test = []
    for i, line in enumerate(listed(annotations, 2, {0: IMAGE, 1: CLASS})):
        if line[1] not in numbers:
            raise DataError(f"{annotations}: line {i + 1} has class {line[1]!r}, which {names_file} does not have")
        test.append((annotations.parent / "images" / line[0], numbers[line[1]]))
    if not 1 <= len(test) <= TEST:
        raise DataError(f"{annotations}: expected 1 to {TEST:,} lines, found {len(test):,}")
    decode = decoder()
    return decoded(train, decode), decoded(test, decode)


def listed(path: Path, least: int, forms: dict[int, re.Pattern[str]]) -> list[list[str]]:
    """The words of each line, those at some places of a form; no path can be hidden in them"""
    try:
        with open(path, "rb") as file:
            text = file.read(LIST + 1).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if len(text) > LIST:
        raise DataError(f"{path}: expected at most {LIST:,} bytes, found more")
    lines = [line.split() for line in text.splitlines() if line.strip()]
    for i, line in enumerate(lines):
        if len(line) < least or any(not form.fullmatch(line[at]) for at, form in forms.items()):
            expected = " ".join("val_0.JPEG" if form is IMAGE else "n01443537" for form in forms.values())
            raise DataError(f"{path}: expected lines like {expected!r}, found {' '.join(line)[:60]!r} in line {i + 1}")
    return lines


def images_of(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if IMAGE.fullmatch(e.name) and e.is_file())
    except OSError as error:
        raise DataError(f"{folder}: expected a folder of images: {error}") from error
    if not 1 <= len(names) <= EACH:
        raise DataError(f"{folder}: expected 1 to {EACH} files *.JPEG, found {len(names):,}")
    return [folder / name for name in names]


def decoder() -> Callable[[Path], np.ndarray]:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("Tiny-ImageNet's JPEG files are read by Pillow: pip install pillow") from error

    def decode(path: Path) -> np.ndarray:
        """[64, 64, 3] uint8"""
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > FILE:
                    raise DataError(f"{path}: expected at most {FILE:,} bytes, found {size:,}")
                with Image.open(file, formats=["JPEG"]) as image:
                    if image.size != (64, 64):  # as its header says: nothing is unpacked yet
                        raise DataError(f"{path}: expected 64 x 64 pixels, found {image.size[0]} x {image.size[1]}")
                    return np.asarray(image.convert("RGB"))
        except DataError:
            raise
        except Exception as error:  # a damaged file can make Pillow raise nearly anything
            raise DataError(f"{path}: cannot be read, or is damaged: {error or type(error).__name__}") from error

    return decode


def decoded(files: list[tuple[Path, int]], decode: Callable[[Path], np.ndarray]) -> Arrays:
    pixels = np.empty((len(files), 3, 64, 64), np.uint8)
    for i, (path, _) in enumerate(files):
        pixels[i] = decode(path).transpose(2, 0, 1)
    return pixels, np.array([label for _, label in files], np.uint8)
