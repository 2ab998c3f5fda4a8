"""Reading what may be anything: a FIFO or a device in the place of a file would let us wait for ever."""

from __future__ import annotations

import os
import stat
import sys
from typing import BinaryIO

from fastagg._engine.checks import InputError


def check_system(path: str | os.PathLike) -> None:
    """InputError on Windows: it lacks locks that end with their process, and opening what is no link or never waits"""
    if sys.platform == "win32":
        raise InputError(f"{path}: on Windows, fastagg neither reads nor writes files; it aggregates models in memory")


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """A regular file to be read; InputError where it is something else"""
    check_system(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InputError(f"{path} is not a regular file")
    return open(fd, "rb")
