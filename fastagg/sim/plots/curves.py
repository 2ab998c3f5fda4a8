"""What changes from round to round, one line per label."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullFormatter

from fastagg.sim.plots.style import INK, WIDTH, look, styled, whole_numbers
from fastagg.sim.report import AVERAGED, Groups, Metric, Run, averaged

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCURACY = Metric()
Value = Callable[[dict[str, Any], Run], float | None]  # of a round's record


@styled
def accuracy(groups: Groups, metric: Metric = ACCURACY) -> Figure | None:
    """The metric against rounds, and at the end of each seed"""
    value = lambda m, run: None if m.get(metric.key) is None else metric.scale * m[metric.key]  # noqa: E731
    unit = f" ({metric.unit})" if metric.unit else ""
    if len(groups) == 1:
        return draw(groups, value, metric.words + unit)
    if not any(_finite(run, value) for runs in groups.values() for run in runs):
        return None
    layout = ConstrainedLayoutEngine(wspace=0.06)
    figure = Figure(figsize=(WIDTH, max(4.2, 0.3 * len(groups) + 1)), layout=layout)
    axes, ends = figure.subplots(1, 2, width_ratios=(2, 1))
    _lines(axes, groups, value)
    axes.set(ylabel=metric.words + unit)
    seeds = {
        label: [mean(last) for run in runs if (last := _finite(run, value)[-AVERAGED:])]
        for label, runs in groups.items()
    }
    worst = -math.inf
    order = sorted(groups, key=lambda label: metric.better(mean(seeds[label]), 0) if seeds[label] else worst)
    known = [x for values in seeds.values() for x in values]
    left = min(known) - 0.15 * (max(known) - min(known) or 1)
    for y, label in enumerate(order):
        if seeds[label]:
            line = look(groups, label)
            ends.plot([left, mean(seeds[label])], [y, y], lw=1.8, **line)
            ends.plot(seeds[label], [y] * len(seeds[label]), "o", ms=4.5, alpha=0.75, mew=0, color=line["color"])
    ends.set_yticks(range(len(order)), [textwrap.fill(label, 24) for label in order])
    ends.yaxis.tick_right()
    ends.tick_params(axis="y", length=0)
    ends.spines.left.set_visible(False)
    ends.grid(axis="y", visible=False)
    ends.set(xlabel=averaged(groups) + unit, ylim=(-0.6, len(order) - 0.4))
    ends.set_xlim(left=left)
    return figure


def loss(groups: Groups) -> Figure | None:
    """Loss against rounds, on the test set and on the clients' own data; logarithmic where it spans much"""
    panels = [
        Panel(lambda m, run: m.get("loss"), "test loss", may_be_log=True),
        Panel(lambda m, run: m.get("train_loss"), "training loss of the clients", may_be_log=True),
    ]
    return draw_panels(groups, panels)


def attack_success(groups: Groups) -> Figure | None:
    """Of a backdoor"""
    value = lambda m, run: None if m.get("attack_success") is None else 100 * m["attack_success"]  # noqa: E731
    return draw(groups, value, "attack success (%)")


def coherence(groups: Groups) -> Figure | None:
    return draw(groups, lambda m, run: m.get("coherence"), "coherence", reference=0)


def gamma(groups: Groups) -> Figure | None:
    """FedLAW's shrinking factor, and r, what is learned relative to what is shrunk"""
    panels = [
        Panel(lambda m, run: m.get("gamma"), "gamma", reference=1),
        Panel(lambda m, run: m.get("shrink_ratio"), "r: learned / shrunk", may_be_log=True),
    ]
    return draw_panels(groups, panels)


class Panel(NamedTuple):
    """A value, and how it is shown"""

    value: Value
    ylabel: str
    reference: float | None = None
    may_be_log: bool = False


def draw(groups: Groups, value: Value, ylabel: str, **more: Any) -> Figure | None:
    return draw_panels(groups, [Panel(value, ylabel, **more)])


@styled
def draw_panels(groups: Groups, panels: list[Panel]) -> Figure | None:
    """Panels side by side with one legend; those without a value are left out"""
    panels = [p for p in panels if any(len(over_seeds(runs, p.value)[0]) for runs in groups.values())]
    if not panels:
        return None
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    lines: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        drawn = _lines(axes, groups, panel.value)
        if panel.reference is not None:
            axes.axhline(panel.reference, color=INK, lw=0.8, alpha=0.6, zorder=1)
        shown = np.concatenate([line.get_ydata() for line in drawn.values()])
        log = panel.may_be_log and shown.min() > 0 and shown.max() > 30 * shown.min()
        axes.set(ylabel=panel.ylabel + (", log scale" if log else ""))
        middle = (shown.min() + shown.max()) / 2
        if middle and np.ptp(shown) < 1e-4 * abs(middle):  # the same but for rounding, which is not to be seen
            axes.set_ylim(middle - 0.1 * abs(middle), middle + 0.1 * abs(middle))
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")  # its own is written in TeX
            axes.yaxis.set_minor_formatter(NullFormatter())
        fuller = {k: line for k, line in drawn.items() if k not in lines or _length(line) > _length(lines[k])}
        lines |= fuller  # the first model may be tested where no other is
    order = sorted(lines, key=lambda label: -lines[label].get_ydata()[-1])  # from the top as the lines end
    legend(figure, {label: lines[label] for label in order}, below=len(panels) > 1)
    return figure


def _length(line: Any) -> int:
    return len(line.get_ydata())


def legend(figure: Figure, lines: dict[str, Any], below: bool) -> None:
    """At the right, or below the panels in as many columns as fit"""
    names = [textwrap.fill(label, 40 if below else 24) for label in lines]
    columns = int(np.clip(130 // (max(map(len, names)) + 8), 1, len(names))) if below else 1
    place = "outside lower center" if below else "outside right upper"
    figure.legend(list(lines.values()), names, loc=place, ncols=columns, handlelength=2.6)


def _lines(axes: Axes, groups: Groups, value: Value) -> dict[str, Any]:
    """A line and a band for every label that has values"""
    lines = {}
    for label, runs in groups.items():
        rounds, average, low, high = over_seeds(runs, value)
        if len(rounds) == 0:
            continue
        line = look(groups, label)
        marker = "o" if len(rounds) < 3 else None  # a line of one point would be invisible
        [lines[label]] = axes.plot(rounds, average, lw=1.8, marker=marker, ms=4, **line)
        if (low < high).any():
            axes.fill_between(rounds, low, high, color=line["color"], alpha=0.15, lw=0)
    axes.set(xlabel="round")
    axes.xaxis.set_major_locator(whole_numbers())
    axes.margins(x=0.01)
    return lines


def over_seeds(runs: list[Run], value: Value) -> tuple[np.ndarray, ...]:
    """Rounds, and mean, lowest and highest value of the runs that have a finite one there"""
    found: dict[int, list[float]] = {}
    for run in runs:
        for m in run.metrics:
            x = value(m, run)
            if x is not None and np.isfinite(x):
                found.setdefault(m["round"], []).append(x)
    rounds = sorted(found)
    return np.array(rounds), *(np.array([f(found[r]) for r in rounds], float) for f in (mean, min, max))


def _finite(run: Run, value: Value) -> list[float]:
    """Of the rounds after the first model"""
    values = [value(m, run) for m in run.metrics if m["round"] > 0]
    return [x for x in values if x is not None and np.isfinite(x)]
