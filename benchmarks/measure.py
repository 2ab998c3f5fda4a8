"""Time and memory, measured so that they can be compared: contestants take turns in one process."""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from fastagg import _cpu
from fastagg._engine import table

T = TypeVar("T")


@dataclass
class Times:
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


def interleaved(
    jobs: dict[str, Callable[[], object]], rounds: Iterable[int], warm: Iterable[str] | None = None
) -> dict[str, Times]:
    """Runs every job once per round, after one unmeasured run each; in random order, for what ran before a job matters
    to it: what is in the caches, and whether PyTorch's threads are still awake.

    warm   the jobs that need the unmeasured run; default: all
    """
    times = {name: Times() for name in jobs}
    for name in jobs if warm is None else warm:
        jobs[name]()
    order = random.Random(0)
    for _ in rounds:
        for name in order.sample(list(jobs), len(jobs)):
            times[name].seconds.append(timed(jobs[name]))
    return times


def timed(job: Callable[[], object]) -> float:
    """Seconds of one run; freeing its result is not timed"""
    start = time.perf_counter()
    result = job()
    seconds = time.perf_counter() - start
    del result
    return seconds


def faster(usual: float, ours: float) -> str:
    """How many times faster we are than PyTorch's code, in every table and plot: the ratio of the medians of the same
    job, where both return a new model"""
    ratio = usual / ours
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


PIECES = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # elements that a reader takes of a client at a time


@dataclass
class Reader:
    """Reads the clients' bytes once, with the threads the kernels use, in pieces of so many elements"""

    table: table.Table
    piece: int

    def __call__(self) -> int:
        t = self.table
        return _cpu.read_all(t.client_address, t.layout.numel, t.layout.codes, self.piece, torch.get_num_threads())


def read_once(client_sds: list[dict]) -> Reader:
    """R, the floor: one read of the clients' bytes by the fastest of several readers"""
    t = table.build(None, client_sds)
    readers = {str(piece): Reader(t, piece) for piece in PIECES}
    times = interleaved(readers, range(5))
    return min(readers.values(), key=lambda reader: times[str(reader.piece)].best)


def multiply_adds(global_sd: dict, K: int) -> Callable[[], object]:
    """The Gram's multiply-adds on registers alone: F"""
    D = sum(v.numel() for key, v in global_sd.items() if v.is_floating_point())
    threads = torch.get_num_threads()
    flops_per_iteration = _cpu.fma_peak(1, 1)
    iterations = int(D * (K + 1) * (K + 2) / 2 * 2 / flops_per_iteration / threads) + 1
    return lambda: _cpu.fma_peak(iterations, threads)


def peak_extra_memory(job: Callable[[], object]) -> int | None:
    """Bytes by which the resident set grew at most while the job ran; None where the system cannot tell."""
    return with_memory(job)[1]


def with_memory(job: Callable[[], T]) -> tuple[T, int | None]:
    """The job's result, and its peak_extra_memory"""
    gc.collect()
    before = _reset_peak()
    result = job()
    return result, None if before is None else max(_status("VmHWM") - before, 0)


def _reset_peak() -> int | None:
    """The resident set, from which on its high-water mark counts; None where the system cannot tell"""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for itself would hide what the job needs
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return _status("VmRSS")
    except (OSError, AttributeError):
        return None


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown CPU"
