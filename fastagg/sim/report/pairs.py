"""Methods against a baseline, seed by seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastagg.sim.report.grouping import Groups, settings
from fastagg.sim.report.metric import Metric, metric_of
from fastagg.sim.report.reading import Run
from fastagg.sim.report.scores import curve, score
from fastagg.sim.report.simulated import end_of
from fastagg.sim.statistics import CONFIDENCE, Difference, paired


@dataclass(frozen=True)
class Comparison:
    """A method against the baseline of its setting; difference is of the method minus the baseline"""

    setting: str
    method: str
    baseline: str
    difference: Difference
    metric: Metric

    @property
    def wins(self) -> int:
        """Seeds in which the method is the better one"""
        return sum(self.metric.better(d, 0) > 0 for d in self.difference.seeds.values())


def differences(
    groups: Groups, baseline: str | None = None, score: str = "last_5", confidence: float = CONFIDENCE
) -> list[Comparison]:
    """Every method against the baseline in the same setting, in the groups' order. A setting without the baseline is
    left out.

    baseline   a method's label; default: fedavg, or where a setting does not have it, its first method
    score      one of report.SCORES
    """
    found = []
    every = settings(groups)
    if baseline is not None and not any(_baseline(methods, baseline) for methods in every.values()):
        names = dict.fromkeys(name for methods in every.values() for name in methods)
        raise ValueError(f"baseline={baseline!r} is not in this comparison; expected one of {', '.join(names)}")
    for setting, methods in every.items():
        base = _baseline(methods, baseline or "fedavg") or (next(iter(methods)) if baseline is None else None)
        if base is None or len(methods) < 2:
            continue
        metric = metric_of(methods)
        for name, runs in methods.items():
            if name != base:
                difference = seedwise(runs, methods[base], metric, score, confidence)
                found.append(Comparison(setting, name, base, difference, metric))
    return found


def _baseline(methods: Groups, wanted: str) -> str | None:
    alike = (name for name, runs in methods.items() if runs[0].summary["label"] == wanted)
    return wanted if wanted in methods else next(alike, None)


def seedwise(
    of: list[Run], to: list[Run], metric: Metric, score: str = "last_5", confidence: float = CONFIDENCE
) -> Difference:
    """The difference of two methods on the seeds that both have, in runs that are equally far"""
    ends = {_seed(run): _end(run) for run in to}
    reached = [run for run in of if ends.get(_seed(run)) == _end(run)]
    return paired(_by_seed(reached, metric, score), _by_seed(to, metric, score), confidence)


def _by_seed(runs: list[Run], metric: Metric, score: str) -> dict[int, float | None]:
    return {seed: value_of(run, metric, score) for run in runs if (seed := _seed(run)) is not None}


def _seed(run: Run) -> int | None:
    return run.summary.get("seed")


def _end(run: Run) -> Any:
    """The same for runs that are equally far: in rounds, or in simulated time if that has ended them"""
    until = run.config.get("until")
    if until is not None and (end_of(run) or 0) >= until:
        return f"time {until}"
    return run.metrics[-1]["round"] if run.metrics else None


def value_of(run: Run, metric: Metric, name: str = "last_5") -> float | None:
    """One of report.SCORES of a run"""
    personal = bool(run.summary.get("personal"))
    if personal and not metric.is_personal:
        return None
    if name == "last_5" and personal == metric.is_personal:
        return run.summary.get("accuracy")  # None where it diverged
    if run.summary.get("diverged") and name.startswith("last"):
        return None
    return score(curve(run.metrics, metric.key), name, metric.best)
