"""The modules of a model, one on each thread. Each is computed on one thread, so bits do not depend on their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


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

    if device.type != "cpu":
        return listed(map(work, items))
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(max(min(threads, len(items)), 1), initializer=torch.set_num_threads, initargs=(1,))
    try:
        return listed(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # also what threads to come will have
