"""Text in CSV files of lines "class","title","description", classes from 1: AG News, Sogou News (Zhang et al., 2015).

A text is its first LENGTH words, in lower case, title first; what is not a letter or digit separates words. Words are
numbered by how often they are in the training file: 2 is the commonest. 0 fills up short texts, 1 is every word beyond
the VOCABULARY - 2 commonest. PFLlib, on which cwFedAvg's code stands, keeps 200 words, and the whole vocabulary.
"""

from __future__ import annotations

import csv
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fastagg.sim.datasets import Arrays, DataError

LENGTH, VOCABULARY = 64, 20_000
ROW = 4096  # bytes of a line, on average, at most
WORD = re.compile(r"[^\W_]+")


def read_news(paths: list[Path], classes: int, most: tuple[int, int]) -> tuple[Arrays, Arrays]:
    train, test = (list(rows(path, classes, number)) for path, number in zip(paths, most, strict=True))
    for path, texts in zip(paths, (train, test), strict=True):
        if not texts:
            raise DataError(f"{path}: expected lines of class, title, description, found none")
    counts = Counter(itertools.chain.from_iterable(words for _, words in train))
    commonest = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - 2]
    numbers = {word: i for i, word in enumerate(commonest, start=2)}
    return numbered(train, numbers), numbered(test, numbers)


def rows(path: Path, classes: int, most: int) -> Iterator[tuple[int, list[str]]]:
    """Class, from 0, and words of each line; a first line that names the columns is passed over"""
    number, known = 0, {}  # lines; one object of each word
    try:
        size = os.path.getsize(path)
        if size > ROW * most:
            raise DataError(f"{path}: expected at most {ROW * most:,} bytes, found {size:,}")
        with open(path, encoding="utf-8", newline="") as file:
            for row in (reader := csv.reader(file)):
                if number == 0 and reader.line_num == 1 and len(row) > 1 and not row[0].strip().isdecimal():
                    continue
                if len(row) < 2 or not row[0].strip().isdecimal() or len(row[0]) > 9:
                    found = ",".join(row)[:40]
                    raise DataError(
                        f"{path}: expected class, title, description, found {found!r} in line {reader.line_num}"
                    )
                number, label = number + 1, int(row[0])
                if number > most:
                    raise DataError(f"{path}: expected at most {most:,} lines, found more")
                if not 1 <= label <= classes:
                    raise DataError(
                        f"{path}: expected classes from 1 to {classes}, found {label} in line {reader.line_num}"
                    )
                found = itertools.chain.from_iterable(WORD.finditer(text.lower()) for text in row[1:])
                words = [match[0][:40] for match in itertools.islice(found, LENGTH)]
                yield label - 1, [known.setdefault(word, word) for word in words]
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read, or is no CSV file in UTF-8: {error}") from error


def numbered(texts: list[tuple[int, list[str]]], numbers: dict[str, int]) -> Arrays:
    x = np.zeros((len(texts), LENGTH), np.int64)
    for row, (_, words) in zip(x, texts, strict=True):
        row[: len(words)] = [numbers.get(word, 1) for word in words]
    return x, np.array([label for label, _ in texts], np.uint8)
