"""Methods against their baseline: differences over seeds with their confidence intervals."""

from __future__ import annotations

import textwrap

from matplotlib.figure import Figure

from fastagg.sim.plots.style import BLUE, INK, VERMILLION, WIDTH, styled
from fastagg.sim.report import Comparison


@styled
def forest(found: list[Comparison], words: str) -> Figure | None:
    """A row for every method, below the name of its setting; words say what the difference is of"""
    found = [c for c in found if c.difference.mean is not None]
    if not found:
        return None
    rows: list[str | Comparison] = []
    for i, c in enumerate(found):
        if c.setting and (i == 0 or found[i - 1].setting != c.setting):
            rows.append(c.setting)
        rows.append(c)
    figure = Figure(figsize=(WIDTH, 0.34 * len(rows) + 1.1), layout="constrained")
    axes = figure.subplots()
    metric, names = found[0].metric, []
    axes.axvline(0, color=INK, lw=1, zorder=1)
    beside = axes.get_yaxis_transform()
    for y, row in enumerate(rows):
        if isinstance(row, str):
            names.append(row)
            continue
        d, scale = row.difference, metric.scale
        names.append(textwrap.shorten(row.method, 44, placeholder=" ..."))
        good = metric.better(d.mean or 0, 0) > 0
        colour = BLUE if good else VERMILLION
        seeds = [scale * x for x in d.seeds.values()]
        axes.plot(seeds, [y - 0.24] * len(seeds), "o", ms=3.5, mew=0, color=INK, alpha=0.5)
        if d.low is not None and d.high is not None:
            strong = 3.2 if d.is_clear else 1.6
            axes.plot([scale * d.low, scale * d.high], [y, y], color=colour, lw=strong, solid_capstyle="butt")
        face = colour if d.is_clear else "none"
        axes.plot([scale * (d.mean or 0)], [y], "D", ms=6.5, mec=colour, mfc=face, mew=1.6, zorder=3)
        text = metric.change(d.mean or 0)
        if d.low is not None and d.high is not None:
            text += f"  [{metric.change(d.low)}, {metric.change(d.high)}]"
        axes.text(1.01, y, text, transform=beside, va="center", size=8.5)
    axes.set_yticks(range(len(rows)), names)
    for row, tick in zip(rows, axes.get_yticklabels(), strict=True):
        tick.set_fontweight("bold" if isinstance(row, str) else "normal")
    axes.tick_params(axis="y", length=0)
    axes.spines.left.set_visible(False)
    axes.grid(axis="y", visible=False)
    unit = " (points)" if metric.unit else ""
    bases = dict.fromkeys(c.baseline for c in found)
    axes.set(xlabel=f"{words}: difference to {' or '.join(bases)}{unit}", ylim=(len(rows) - 0.5, -0.5))
    axes.margins(x=0.04)
    return figure
