"""Accuracy against simulated time."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from fastagg.sim.plots.curves import ACCURACY, legend
from fastagg.sim.plots.style import WIDTH, look, styled
from fastagg.sim.report import Groups, Metric
from fastagg.sim.report.simulated import end_of, value_at

POINTS = 200


@styled
def over_time(groups: Groups, metric: Metric = ACCURACY) -> Figure | None:
    """Steps: what the newest model of each seed had at that time, as far as all seeds of a label go"""
    drawn = {}
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    axes = figure.subplots()
    for label, runs in groups.items():
        ends = [end_of(run) or 0.0 for run in runs]
        if not min(ends):
            continue
        times = np.linspace(0, min(ends), POINTS)
        values = np.array([[_number(value_at(run, metric, t)) for t in times] for run in runs]) * metric.scale
        line = look(groups, label)
        [drawn[label]] = axes.plot(times, values.mean(0), lw=1.8, drawstyle="steps-post", **line)
        if len(runs) > 1:
            axes.fill_between(
                times, values.min(0), values.max(0), step="post", color=line["color"], alpha=0.15, lw=0
            )  # fmt: skip
    if not drawn:
        return None
    axes.set(xlabel="simulated time", ylabel=metric.words + (f" ({metric.unit})" if metric.unit else ""))
    axes.margins(x=0.01)
    legend(figure, drawn, below=False)
    return figure


def _number(value: float | None) -> float:
    return np.nan if value is None else value
