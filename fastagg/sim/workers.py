"""Work of a round on several threads: each does its own piece on one core, so that results do not depend on how many.

torch would rather give all its threads to every operation, one operation after the other. Operations on a batch are too
small for that: threads wait for each other more than they work, above all where other programs want the cores too.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def spread(work: Callable[[T], R], pieces: Sequence[T]) -> list[R]:
    """The results of all pieces, in their order, on as many threads as torch has; long ones should come first"""
    threads = torch.get_num_threads()
    if threads == 1 or not pieces:
        return [work(piece) for piece in pieces]
    pool = ThreadPoolExecutor(min(threads, len(pieces)), initializer=torch.set_num_threads, initargs=(1,))
    try:
        return list(pool.map(work, pieces))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C, or an error: what has begun is finished, nothing else begins
        torch.set_num_threads(threads)  # the workers' 1 is what threads would have that torch sees for the first time


@contextmanager
def one_thread() -> Iterator[None]:
    """For operations so small that waking the others takes longer"""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def keep_freed_memory() -> None:
    """glibc gives the memory of every large tensor back to the system at once, and the next step asks for it again,
    page by page: up to a third of the time of a step of convolutions. Up to 256 MB are kept for it instead."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its largest
        libc.mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD
        libc.mallopt(-8, 1)  # M_ARENA_MAX: threads share one heap; their own ones would be given back when empty
