"""Clients that arrive one by one: from the last arrival to the new model, against all of them at once; and to add one.

"ours" is finish(), with all but the last client added beforehand, and the last one's add(): what a server waits for.
"at once" is server.aggregate() of the same models, which a server without rounds calls when the last one has come.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import fastagg
from benchmarks.conftest import Cohort, cohorts

MODEL = os.environ.get("FASTAGG_BENCH_ARRIVALS", "resnet18")
METHODS = ("fedavg", "fedawa", "krum")


class Arrivals:
    """Rounds that have all but the last client, made in setup() and ended in end()

    where  they are kept: in memory, half of them, on the disk, or as a running sum
    form   what they send: models, updates, or narrow models: bfloat16 to a float32 one
    """

    def __init__(self, cohort: Cohort, method: str, where: str, form: str) -> None:
        self.cohort, self.server, self.form = cohort, fastagg.aggregator(method), form
        size = cohort.bytes // cohort.K // (2 if form == "narrow" else 1)
        # of memory=, half is for clients
        self.options: dict[str, Any] = {
            "memory": {}, "half": {"memory": int(size * (cohort.K / 2 + 0.5) / 0.5)}, "disk": {"memory": 1 << 24},
            "running": {"running": True},
        }[where]  # fmt: skip
        self.sent = [self._sent(sd) for sd in cohort.client_sds]
        self.round: Any = None

    def _sent(self, sd: dict) -> dict[str, Any]:
        if self.form == "updates":
            return {"update": {key: value - self.cohort.global_sd[key] for key, value in sd.items()}}
        if self.form == "narrow":
            return {"model": {key: v.bfloat16() if v.is_floating_point() else v for key, v in sd.items()}}
        return {"model": sd}

    def setup(self) -> None:
        self.end()
        self.round = self.server.round(self.cohort.global_sd, **self.options)
        for k, sent in enumerate(self.sent[:-1]):
            self.round.add(k, **sent)

    def last(self) -> dict:
        self.round.add(len(self.sent) - 1, **self.sent[-1])
        return self.round.finish()

    def end(self) -> None:
        if self.round is not None:
            self.round.close()


def check(arrivals: Arrivals, found: dict) -> None:
    """The bits of all at once; of updates and running sums, as near as their last bits let them be"""
    cohort, sent = arrivals.cohort, arrivals.sent
    models = [{key: value.to(cohort.global_sd[key].dtype) for key, value in s.get("model", {}).items()} for s in sent]
    expected = arrivals.server.aggregate(cohort.global_sd, cohort.client_sds if arrivals.form == "updates" else models)
    exact = arrivals.form != "updates" and "running" not in arrivals.options
    eps = torch.finfo(next(iter(found.values())).dtype).eps
    for key, value in found.items():
        if exact or not value.is_floating_point():
            assert torch.equal(value, expected[key]), key
        else:
            torch.testing.assert_close(value, expected[key], rtol=8 * eps, atol=8 * eps)


CASES = [
    *((method, "models", where) for method in METHODS for where in ("memory", "half", "disk")),
    ("fedavg", "models", "running"), ("fedavg", "narrow", "memory"), ("fedawa", "narrow", "memory"),
    ("fedawa", "updates", "memory"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "form", "where"), CASES)
@cohorts((MODEL, 20))
def test_last_arrival(cohort, turns, method, form, where):
    time(cohort, turns, Arrivals(cohort, method, where, form), f"{method}, {form}, {where}")


@pytest.mark.parametrize("method", ["fedavg", "fedawa"])
@cohorts((MODEL, 20, "bfloat16"))
def test_bfloat16(cohort, turns, method):
    """To a bfloat16 model, where "narrow" is to a float32 one"""
    time(cohort, turns, Arrivals(cohort, method, "memory", "models"), f"{method}, models, memory")


def time(cohort: Cohort, turns, arrivals: Arrivals, name: str) -> None:
    arrivals.setup()
    check(arrivals, arrivals.last())
    others = {"at once": lambda: arrivals.server.aggregate(cohort.global_sd, cohort.client_sds), "R": cohort.reader}
    turns(f"arrivals: {name}", arrivals.last, others, setup=arrivals.setup, **about(cohort))
    arrivals.end()


@pytest.mark.parametrize("where", ["memory", "disk", "running"])
@cohorts((MODEL, 20))
def test_add(cohort, turns, where):
    """One client: the last"""
    arrivals = Arrivals(cohort, "fedavg", where, "models")
    arrivals.setup()
    check(arrivals, arrivals.last())
    others = {"a copy": lambda: {key: value.clone() for key, value in cohort.client_sds[-1].items()}}
    add = lambda: arrivals.round.add(cohort.K - 1, **arrivals.sent[-1])  # noqa: E731
    turns(f"arrivals: add(), {where}", add, others, setup=arrivals.setup, **about(cohort))
    arrivals.end()


def about(cohort: Cohort) -> dict[str, Any]:
    return {"model": cohort.model, "K": cohort.K, "dtype": cohort.dtype, "bytes": cohort.bytes}
