"""Who counts for how much: every client's weight over the rounds, beside its data."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from fastagg.sim.plots.style import (
    INK,
    VERMILLION,
    WIDTH,
    bare,
    client_ticks,
    colour_bar,
    draw_shares,
    label_counts,
    styled,
    whole_numbers,
)
from fastagg.sim.report import Run


def weight_matrix(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """[clients, rounds] of weights, and of what sample counts alone would give; NaN where a client sent nothing.

    None where a run has no weights, or its weights are the sample counts' in every round: nothing adapts.
    """
    sizes = label_counts(run).sum(1)
    rounds = [m for m in run.metrics if m["round"] > 0]
    if len(sizes) == 0 or not rounds:
        return None
    given = np.full((len(sizes), len(rounds)), np.nan)
    plain = given.copy()
    for t, m in enumerate(rounds):
        ids, w = np.array(m.get("clients") or [], int), np.array(m.get("weights") or [], float)
        if len(ids) and w.shape == ids.shape:
            given[ids, t], plain[ids, t] = w, sizes[ids] / max(sizes[ids].sum(), 1)
    if not np.isfinite(given).any():
        return None
    total = np.nansum(given, 0)
    off = given / np.where(total == 0, 1, total) - plain  # FedLAW's may be scaled by gamma
    return (given, plain) if np.nanmax(np.abs(off)) > 1e-3 * np.nanmax(plain) else None


def span(values: np.ndarray) -> tuple[tuple[float, float], str]:
    """What colours span, and which of its ends is exceeded: one outlier would make all others look alike"""
    low, high = np.nanmin(values), np.nanmax(values)
    few, many = np.nanpercentile(values, [1, 99])
    room = 2 * (many - few)
    below, above = few - low > room > 0, high - many > room > 0
    ends = float(few if below else low), float(many if above else high)
    if ends[1] - ends[0] < 1e-9 * max(abs(ends[1]), 1):
        ends = ends[0] - 0.5, ends[1] + 0.5
    return ends, {(True, True): "both", (True, False): "min", (False, True): "max"}.get((below, above), "neither")


@styled
def weights(run: Run) -> Figure | None:
    """Weights over rounds, beside each client's data: clients ordered by how much they have"""
    matrices = weight_matrix(run)
    if matrices is None:
        return None
    counts = label_counts(run)
    order = np.argsort(-counts.sum(1), kind="stable")
    given, plain = (100 * m[order] for m in matrices)
    K, rounds = given.shape
    figure = Figure(figsize=(WIDTH, float(np.clip(0.2 * K + 1.3, 3, 8))), layout="constrained")
    heat, average, labels = figure.subplots(1, 3, sharey=True, width_ratios=(5, 2, 2.2))
    (low, high), extend = span(given)
    image = heat.imshow(given, aspect="auto", cmap="viridis", interpolation="none", vmin=low, vmax=high,
                        extent=(0.5, rounds + 0.5, K - 0.5, -0.5))  # fmt: skip
    heat.set(xlabel="round", ylabel="client", title=f"weight (%), colours from {low:.3g} to {high:.3g}")
    heat.xaxis.set_major_locator(whole_numbers(6))
    colour_bar(figure, image, heat, extend=extend)
    present = np.isfinite(given).any(1)
    y = np.arange(K)[present]
    average.barh(y, np.nanmean(plain[present], 1), 0.75, color=INK, alpha=0.25, label="by data share")
    average.plot(np.nanmean(given[present], 1), y, "o", ms=4 if K <= 40 else 2.5, color=VERMILLION, label="weight")
    average.set(xlabel="% of a round", title="average weight")
    average.grid(axis="y", visible=False)
    average.set_xlim(left=min(0, average.get_xlim()[0]))
    figure.legend(*average.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9)
    image = draw_shares(labels, counts[order])
    labels.set_title("labels (% of its data)")
    colour_bar(figure, image, labels)
    client_ticks(heat, order)
    bare(heat)
    for axes in (average, labels):
        axes.tick_params(axis="y", left=False)
    return figure
