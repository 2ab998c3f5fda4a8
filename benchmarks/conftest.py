"""What the benchmarks share: the models of a round, and a contest in which everyone takes turns.

pytest-benchmark times fastagg; before each of its rounds the other contestants run, in random order, timed here. So all
see the same machine, moment by moment, and ratios hold where times do not. Contestants that take long run in the first
rounds only. Run by `make bench`; `python -m benchmarks.report` makes tables and plots of the results.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import fastagg
from benchmarks import measure, models

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SECONDS = float(os.environ.get("FASTAGG_BENCH_SECONDS", 4))  # that a contest may take, about
ROUNDS = range(5, 22)  # that it may have
SLOW = 1.0  # seconds of a contestant that runs three times only


@dataclass
class Cohort:
    """A round of K clients of one model"""

    model: str
    K: int
    dtype: str
    global_sd: dict
    client_sds: list[dict]

    @property
    def bytes(self) -> int:
        return self.K * sum(v.numel() * v.element_size() for v in self.global_sd.values())

    @cached_property
    def reader(self) -> measure.Reader:
        return measure.read_once(self.client_sds)

    def floors(self, multiply_adds: bool = True) -> dict[str, Callable[[], object]]:
        """R, one read of the clients, and F, the Gram's multiply-adds at the peak of the cores"""
        floors: dict[str, Callable[[], object]] = {"R": self.reader}
        return floors | {"F": measure.multiply_adds(self.global_sd, self.K)} if multiply_adds else floors


_made: dict[tuple, Cohort] = {}


def make_cohort(model: str, K: int, dtype: str = "float32") -> Cohort:
    """The last cohort is kept: tests are sorted so that those with the same models follow each other."""
    if (model, K, dtype) not in _made:
        _made.clear()
        gc.collect()
        torch.manual_seed(0)
        global_sd = models.MODELS[model]()
        as_dtype = lambda sd: {k: v.to(DTYPES[dtype]) if v.is_floating_point() else v for k, v in sd.items()}  # noqa: E731
        client_sds = [as_dtype(sd) for sd in models.clients(global_sd, K)]
        _made[model, K, dtype] = Cohort(model, K, dtype, as_dtype(global_sd), client_sds)
    return _made[model, K, dtype]


@pytest.fixture
def cohort(request) -> Cohort:
    return make_cohort(*request.param)


def cohorts(*wanted: tuple) -> pytest.MarkDecorator:
    """Parametrises a test over (model, K) or (model, K, dtype)"""
    params = [(*w, "float32") if len(w) == 2 else w for w in wanted]
    return pytest.mark.parametrize("cohort", params, indirect=True, ids=["-".join(map(str, p)) for p in params])


@pytest.fixture
def turns(benchmark) -> Callable[..., None]:
    """turns("simulator", job, others, **info): times job against others, all without arguments, and records info;
    setup is called before each run of the job, and not timed"""

    def run(
        name: str, ours: Callable, others: dict[str, Callable], *, setup: Callable[[], None] = lambda: None, **info
    ) -> None:  # fmt: skip
        times: dict[str, list[float]] = {other: [] for other in others}
        setup()
        first = {other: measure.timed(job) for other, job in others.items()} | {name: measure.timed(ours)}
        slow = {other for other in others if first[other] > SLOW}
        round_time = sum(seconds for job, seconds in first.items() if job not in slow)
        rounds = int(min(max(SECONDS / round_time, ROUNDS.start), ROUNDS.stop - 1))
        order = random.Random(0)

        def others_first() -> None:
            for other in order.sample(list(others), len(others)):
                if other not in slow or len(times[other]) < 3:
                    times[other].append(measure.timed(others[other]))
            setup()

        benchmark.pedantic(ours, setup=others_first, rounds=rounds)
        times[name] = list(benchmark.stats.stats.data)
        benchmark.group = name
        benchmark.extra_info |= {
            "job": name, "threads": torch.get_num_threads(), "simd": fastagg.info()["simd"], "cpu": measure.cpu_name(),
            "torch": torch.__version__, "ms": {job: _summary(seconds) for job, seconds in times.items()}, **info,
        }  # fmt: skip

    return run


@pytest.fixture
def contest(benchmark, turns) -> Callable[..., None]:
    """contest(cohort, "fedavg", job, others, memory=False): times job against others and against the floors"""

    def run(
        cohort: Cohort, name: str, ours, others: dict[str, Callable], *, memory: bool = False,
        multiply_adds: bool = True, **info,
    ) -> None:  # fmt: skip
        about = {
            "model": cohort.model, "K": cohort.K, "dtype": cohort.dtype, "bytes": cohort.bytes,
            "numel": sum(v.numel() for v in cohort.global_sd.values()), "reader": cohort.reader.piece,
        }  # fmt: skip
        turns(name, ours, cohort.floors(multiply_adds) | others, **about, **info)
        if memory:
            jobs = {name: ours} | others
            benchmark.extra_info["extra_bytes"] = {job: measure.peak_extra_memory(f) for job, f in jobs.items()}

    return run


def _summary(seconds: list[float]) -> dict[str, float]:
    ms = sorted(1e3 * s for s in seconds)
    low, _, high = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else ms * 3
    return {"best": ms[0], "low": low, "median": statistics.median(ms), "high": high, "rounds": len(ms)}


# ---- the order of tests, and a progress bar ----

_bar = Progress(
    TextColumn("{task.description:<46}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    console=Console(file=sys.__stderr__),
)  # fmt: skip
_task = None


def pytest_collection_modifyitems(items) -> None:
    def models_of(item) -> tuple:
        params = item.callspec.params.get("cohort", ()) if hasattr(item, "callspec") else ()
        return tuple(map(str, params))

    items.sort(key=models_of)


def pytest_collection_finish(session) -> None:
    global _task
    if session.config.option.collectonly:
        return
    _bar.start()
    _task = _bar.add_task("", total=len(session.items))


def pytest_runtest_logstart(nodeid: str) -> None:
    if _task is not None:
        _bar.update(_task, description=nodeid.rpartition("::")[2].removeprefix("test_"))


def pytest_runtest_logfinish() -> None:
    if _task is not None:
        _bar.advance(_task)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report):
    return ("passed", "", "PASSED") if report.when == "call" and report.passed else None  # the bar shows progress


def pytest_sessionfinish() -> None:
    _bar.stop()
