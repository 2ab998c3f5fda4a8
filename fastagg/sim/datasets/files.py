"""Where the files of a data set are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastagg.sim.datasets import Arrays, DataError


@dataclass(frozen=True)
class Source:
    """A data set's files: each has one or more names, the official one first"""

    classes: int
    files: tuple[tuple[str, ...], ...]
    folders: tuple[str, ...]  # subfolders of the data folder, beside one called like the data set
    read: Callable[[list[Path]], tuple[Arrays, Arrays]]
    get: str
    also: str = ""  # what is said of other names
    system: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    pickled: tuple[str, ...] = ()


def find(name: str, source: Source, data_dir: str | Path | None) -> list[Path]:
    """One path per file of a data set, all in one folder"""
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
            how = "unzip" if path.suffix == ".zip" else "tar xf"
            raise DataError(f"{name}: {path} is still packed; unpack it there: {how} {path.name}")
    for folder in folders:
        for path in (folder / n for n in source.pickled if os.path.isfile(folder / n)):
            raise DataError(
                f"{name}: {path} is the Python version of the data, a pickle, which is not read because reading a"
                f" pickle can run any code; get the binary version instead: {source.get}"
            )
    where = "\n  ".join(looked) or "(nowhere: neither data_dir nor FASTAGG_DATA says where)"
    raise DataError(
        f"{name}: its files were not found\n"
        f"expected, in one folder: {', '.join(names[0] for names in source.files)}{source.also}\n"
        f"looked in:\n  {where}\n"
        f"to get them: {source.get}\n"
        "then name their folder as data_dir (--data-dir), or in the environment variable FASTAGG_DATA"
    )
