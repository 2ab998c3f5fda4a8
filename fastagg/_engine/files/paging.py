"""Files in the address space: mapped, made resident ahead of their use, let go after it.

Python's own mmap keeps a file descriptor per mapping, of which a process may have some thousand, and holds the
interpreter's lock while the kernel reads. So the system calls are made directly.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import numpy as np

READ, WRITE = 22, 23  # MADV_POPULATE_*: Linux 5.14 and later
STEP = 16 << 20  # bytes made resident by one call, so that a stop is honoured soon
PAGE = mmap.PAGESIZE
LARGE_PAGE = 2 << 20
_mappings: dict[int, int] = {}  # [first byte, past the last) of every file that is mapped

if sys.platform != "win32":  # where no file is read
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def mapped(fd: int, length: int, *, writable: bool = False) -> ctypes.Array:
    """The bytes of an open file, shared with it, for as long as somebody holds what is returned or a tensor over it.

    A file to be read is mapped read-only: to write there is a crash, though torch believes that it could.
    """
    rights = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _libc.mmap(None, length, rights, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise _error("mmap")
    kind = cast(type[ctypes.Array], type("Mapping", (ctypes.c_char * length,), {}))
    memory = kind.from_address(address)
    _mappings[address] = address + length
    weakref.finalize(memory, _unmap, address, length).atexit = False
    return memory


def _unmap(address: int, length: int) -> None:
    del _mappings[address]
    _libc.munmap(address, length)


def is_mapped(address: int) -> bool:
    """Whether a file is mapped there"""
    return any(start <= address < stop for start, stop in list(_mappings.items()))


def ranges(address: np.ndarray, size: np.ndarray) -> list[tuple[int, int]]:
    """[first byte, past the last) in whole pages, of tensors [n] with these sizes; neighbours become one range"""
    order = np.argsort(address, kind="stable")
    start = address[order] // PAGE * PAGE
    stop = -(-(address + size)[order] // PAGE) * PAGE
    stop = np.maximum.accumulate(stop)
    new = np.concatenate([[True], start[1:] > stop[:-1]])
    last = np.concatenate([np.flatnonzero(new)[1:] - 1, [len(start) - 1]])
    return list(zip(start[new].tolist(), stop[last].tolist(), strict=True))


def release(spans: Iterable[tuple[int, int]]) -> None:
    """Takes pages of files out of our memory. What was written to them stays with the file.

    Where the kernel keeps a file in large pages it maps all of one when a part is touched: all of it goes.
    """
    mappings = sorted(_mappings.items())
    for start, stop in spans:
        at = bisect.bisect(mappings, (start, sys.maxsize)) - 1
        if at >= 0 and start < mappings[at][1]:  # never anything that is no mapped file
            start = max(start // LARGE_PAGE * LARGE_PAGE, mappings[at][0])
            stop = min(-(-stop // LARGE_PAGE) * LARGE_PAGE, mappings[at][1])
            _libc.madvise(start, stop - start, mmap.MADV_DONTNEED)


def give_back() -> None:
    """Memory that was freed, to the system. glibc keeps it, and finds hardly a place in it for aligned tensors, so that
    a process through which models pass one by one grows as if it kept them."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


class ReadAhead:
    """A thread that makes the next piece of all files resident while this one is computed with"""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "fastagg-read-ahead")
        self._stop = False

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, failure: type | None, *_) -> None:
        self._stop = failure is not None
        self._thread.shutdown(cancel_futures=self._stop)

    def populate(self, inputs: list[tuple[int, int]], outputs: list[tuple[int, int]]) -> Future:
        return self._thread.submit(self._populate, inputs, outputs)

    def release(self, spans: list[tuple[int, int]]) -> None:
        """Done before what is populated next, so that no more than two pieces are ever resident"""
        self._thread.submit(release, spans)

    def _populate(self, inputs: list[tuple[int, int]], outputs: list[tuple[int, int]]) -> None:
        for spans, advice in ((inputs, READ), (outputs, WRITE)):
            for start, length in _steps(spans):
                if self._stop:
                    return
                if _libc.madvise(start, length, advice) == 0:
                    continue
                if ctypes.get_errno() == errno.EINVAL:  # an older kernel: it is told, but does not wait
                    _libc.madvise(start, length, mmap.MADV_WILLNEED)
                elif ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
                    raise Unreadable(start, _error("reading ahead"))


class Unreadable(Exception):
    """A mapped page could not be had: to touch it would kill the process. Somebody cut the file, or the disk failed."""

    def __init__(self, address: int, error: OSError) -> None:
        super().__init__(str(error))
        self.address, self.error = address, error


def _steps(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, stop in spans:
        for at in range(start, stop, STEP):
            yield at, min(STEP, stop - at)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
