"""Where the time goes."""

from __future__ import annotations

import textwrap

import numpy as np
from matplotlib.figure import Figure

from fastagg.sim.plots.style import BLUE, ORANGE, VERMILLION, WIDTH, styled
from fastagg.sim.report import PHASES, Groups, spent


@styled
def time(groups: Groups) -> Figure | None:
    """Seconds of a round by phase, one bar per label; beside it rounds per second and the share of aggregation"""
    bars = {}
    for label, runs in groups.items():
        seconds, count = spent([m for run in runs for m in run.metrics])
        if count:
            bars[label] = [seconds[phase] / count for phase in PHASES]
    if not bars:
        return None
    figure = Figure(figsize=(WIDTH, 0.42 * len(bars) + 1.4), layout="constrained")
    axes = figure.subplots()
    ends = np.zeros(len(bars))
    for i, (phase, colour) in enumerate(zip(PHASES, (BLUE, VERMILLION, ORANGE), strict=True)):
        lengths = np.array([values[i] for values in bars.values()])
        axes.barh(range(len(bars)), lengths, 0.62, left=ends, color=colour, label=phase)
        ends += lengths
    for y, (label, values) in enumerate(bars.items()):
        total = sum(values) or 1
        how = " and ".join(dict.fromkeys(r.summary["training"] for r in groups[label] if r.summary.get("training")))
        text = f"  {1 / total:.3g} rounds/s, aggregation {100 * values[1] / total:.2g} %" + (f", {how}" if how else "")
        axes.text(ends[y], y, text, va="center", size=8.5)
    axes.set_yticks(range(len(bars)), [textwrap.fill(label, 28) for label in bars])
    axes.set(xlabel="seconds per round", xlim=(0, 1.55 * max(ends.max(), 1e-9)), ylim=(len(bars) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=3)
    return figure
