"""Reading what may be anything: a FIFO or a device in the place of a file would let us wait for ever."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from fastagg._engine.checks import InputError


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """A regular file to be read; InputError where it is something else"""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InputError(f"{path} is not a regular file")
    return open(fd, "rb")
