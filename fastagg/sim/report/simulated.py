"""What runs have reached in simulated time, where clients have speeds: rounds of one method may last longer than
another's."""

from __future__ import annotations

from typing import Any

from fastagg.sim.report.grouping import Groups
from fastagg.sim.report.metric import Metric
from fastagg.sim.report.reading import Run


def end_of(run: Run) -> float | None:
    return run.metrics[-1].get("time") if run.metrics else None


def common_end(groups: Groups) -> float | None:
    """The time that all runs have reached; None where one has no clock, or no round"""
    ends = [end_of(run) for runs in groups.values() for run in runs]
    known = [end for end in ends if end is not None]
    return min(known) if known and len(known) == len(ends) and min(known) > 0 else None


def value_at(run: Run, metric: Metric, time: float) -> float | None:
    """Of the newest model that was there at this time"""
    seen: list[Any] = [m.get(metric.key) for m in run.metrics if m.get("time") is not None and m["time"] <= time]
    return seen[-1] if seen else None
