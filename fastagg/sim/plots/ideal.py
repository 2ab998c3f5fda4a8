"""Is the merged update closer to that of training on all data than any client's? FedAWA's Figure 3."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from fastagg.sim.plots.style import BLUE, INK, VERMILLION, WIDTH, styled, whole_numbers
from fastagg.sim.report import Run

GREY = "#888888"  # seen on a light and on a dark page: what is drawn as pixels does not follow the page's colour


@styled
def ideal(run: Run) -> Figure | None:
    """Distances to the ideal vector over rounds: of every client's update, of their mean, and of the method's"""
    rounds = [m for m in run.metrics if m.get("ideal_clients") and m.get("ideal_merged") is not None]
    if not rounds:
        return None
    x = np.array([m["round"] for m in rounds])
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    axes = figure.subplots()
    every = [(m["round"], d) for m in rounds for d in m["ideal_clients"]]
    axes.plot(
        *zip(*every, strict=True), "o", ms=3.5, mew=0, color=GREY, alpha=0.5, label="each client", rasterized=True
    )
    middle = [np.mean(m["ideal_clients"]) for m in rounds]
    axes.plot(x, middle, color=INK, lw=1.4, ls=":", label="mean of the clients")
    dot, square = ("o", "s") if len(rounds) < 25 else (None, None)
    merged = [m["ideal_merged"] for m in rounds]
    axes.plot(x, merged, color=BLUE, lw=2, marker=dot, ms=4, label="merged by data size")
    own = [(m["round"], m["ideal_method"]) for m in rounds if m.get("ideal_method") is not None]
    if own:
        axes.plot(*zip(*own, strict=True), color=VERMILLION, lw=2, ls="--", marker=square, ms=4, label="the method's")
    axes.set(xlabel="round", ylabel="1 - cosine to the ideal vector")
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.xaxis.set_major_locator(whole_numbers())
    axes.margins(x=0.02)
    figure.legend(loc="outside right upper")
    return figure
