"""The modules of a model, one on each thread. Each is computed on one thread, so bits do not depend on their number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
_starting = threading.Lock()


def side_by_side(
    work: Callable[[T], R], items: Iterable[T], device: torch.device, said: Callable[[int, int], None] | None = None
) -> list[R]:
    """said: is told how many items are done, and how many there are"""
    items = list(items)

    def listed(results: Iterable[R]) -> list[R]:
        found = []
        for result in results:
            found.append(result)
            if said is not None:
                said(len(found), len(items))
        return found

    if device.type != "cpu" or not items:
        return listed(map(work, items))
    pool = _started(len(items))
    try:
        return listed(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)


def _started(most: int) -> ThreadPoolExecutor:
    """As many threads as torch has here, on each of which it has one. torch takes that for what all threads to come are
    to have, too, so it is told otherwise before anything else happens."""
    with _starting:
        threads = torch.get_num_threads()
        many = min(threads, most)
        pool, here = ThreadPoolExecutor(many, initializer=_one_thread), threading.Barrier(many)
        try:
            list(pool.map(lambda _: here.wait(), range(many)))
        except BaseException:
            here.abort()
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(threads)
    return pool


def _one_thread() -> None:
    torch.get_num_threads()  # a thread's first call sets them to what is usual: not later
    torch.set_num_threads(1)
