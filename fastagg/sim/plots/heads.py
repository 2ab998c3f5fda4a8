"""Does the output layer show a client's classes? cwFedAvg's Figures 2, 3 and 6."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from fastagg.sim.plots.cosines import by_labels
from fastagg.sim.plots.style import (
    BLUE,
    INK,
    ORANGE,
    SHARES,
    VERMILLION,
    WIDTH,
    bare,
    client_ticks,
    colour_bar,
    label_counts,
    shares_of,
    styled,
    whole_numbers,
)
from fastagg.sim.report import Run

MARKS = ((ORANGE, "^"), (VERMILLION, "s"), (BLUE, "o"))


def head_shares(run: Run) -> dict[int, np.ndarray]:
    """By round, [clients, labels] of shares of the norms of the output layer's rows; NaN where a client was absent"""
    counts, found = label_counts(run), {}
    for m in run.metrics:
        ids, heads = m.get("clients") or [], np.array(m.get("heads") or [], float)
        if len(ids) and heads.shape == (len(ids), counts.shape[1] if len(counts) else -1):
            found[m["round"]] = np.full(counts.shape, np.nan)
            found[m["round"]][ids] = heads
    rounds = sorted(found)
    return {rounds[i]: found[rounds[i]] for i in sorted({0, len(rounds) // 2, len(rounds) - 1})} if rounds else {}


@styled
def heads(run: Run) -> Figure | None:
    """The clients' labels, beside what their output layers say of them; and one against the other"""
    shown = head_shares(run)
    if not shown:
        return None
    true = shares_of(label_counts(run))
    order, K = by_labels(true), len(true)
    figure = Figure(figsize=(WIDTH, float(np.clip(0.13 * K + 1.2, 3.1, 6.5))), layout="constrained")
    grid = figure.add_gridspec(1, len(shown) + 2, width_ratios=[1] * (len(shown) + 1) + [1.75])
    first = figure.add_subplot(grid[0])
    panels = [first] + [figure.add_subplot(grid[i + 1], sharey=first) for i in range(len(shown))]
    top = 100 * max(np.nanmax(s) for s in shown.values())
    titles = ["true labels", *(f"round {r}" for r in shown)]
    images = []
    for axes, values, title in zip(panels, [true, *shown.values()], titles, strict=True):
        high = 100 * true.max() if axes is first else top
        image = axes.imshow(100 * values[order], aspect="auto", cmap=SHARES, vmin=0, vmax=high, interpolation="none")
        images.append(image)
        axes.set(title=title, xlabel="label")
        axes.xaxis.set_major_locator(whole_numbers(4))
        axes.tick_params(labelleft=axes is first, left=axes is first)
        bare(axes)
    first.set_ylabel("client")
    client_ticks(first, order, most=30)
    colour_bar(figure, images[0], first)
    colour_bar(figure, images[-1], panels[1:], label="share (%)")
    against = figure.add_subplot(grid[-1])
    for (colour, mark), (r, values) in zip(MARKS, shown.items(), strict=False):
        there = np.isfinite(values)
        x, y = true[there], values[there]
        name = f"round {r}" + (f", r = {np.corrcoef(x, y)[0, 1]:.2f}" if x.std() > 0 and y.std() > 1e-9 else "")
        against.plot(100 * x, 100 * y, mark, ms=4, mew=0, alpha=0.55, color=colour, label=name, rasterized=True)
    ends = [0, 100 * true.max()]
    against.plot(ends, ends, color=INK, lw=0.8, alpha=0.6, zorder=1)
    against.set(xlabel="true share (%)", ylabel="share by norms (%)", ylim=(0, 1.08 * top))
    figure.legend(*against.get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=9, markerscale=1.6)
    return figure
