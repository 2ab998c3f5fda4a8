"""Do updates mirror the data? Cosines of clients, beside their labels."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure

from fastagg.sim.plots.style import (
    BLUE,
    VERMILLION,
    WIDTH,
    bare,
    client_ticks,
    draw_shares,
    label_counts,
    ramp,
    shares_of,
    styled,
    whole_numbers,
)
from fastagg.sim.report import Run

MODELS = ramp("models", (0, VERMILLION, 0.1), (1, VERMILLION, 1))  # the lowest is not blank
COSINES = ramp("cosines", (0, BLUE, 1), (0.5, BLUE, 0), (0.5, VERMILLION, 0), (1, VERMILLION, 1))
# The square root makes cosines of 0.1, which late rounds have, visible beside those of 1
COSINE_NORM = FuncNorm((lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda y: np.sign(y) * np.square(y)), -1, 1)


@styled
def cosines(run: Run) -> Figure | None:
    """Cosines of client vectors, and below of the models, in the rounds that have them"""
    rounds = [m for m in run.metrics if m.get("cosine") is not None and len(m.get("clients") or []) > 1]
    counts = label_counts(run)
    if not rounds or len(counts) == 0:
        return None
    rounds = [rounds[i] for i in sorted({0, len(rounds) // 2, len(rounds) - 1})]  # a longer second run adds more
    kinds = [(key, name) for key, name in (("cosine", "client vectors"), ("model_cosine", "models"))
             if any(m.get(key) is not None for m in rounds)]  # fmt: skip
    same_clients = all(m["clients"] == rounds[0]["clients"] for m in rounds)
    figure = Figure(figsize=(WIDTH, (2.75 if same_clients else 2.4) * len(kinds) + 0.2), layout="constrained")
    panels = figure.subplots(len(kinds), len(rounds), squeeze=False)
    for (key, name), row in zip(kinds, panels, strict=True):
        image = None
        for axes, m in zip(row, rounds, strict=True):
            bare(axes)
            ids = np.array(m["clients"], int)
            order = by_labels(counts[ids])
            cosine = np.array(m[key] if m.get(key) is not None else np.full((len(ids),) * 2, np.nan), float)
            scale = (
                {"cmap": COSINES, "norm": COSINE_NORM} if key == "cosine" else {"cmap": MODELS, "vmin": 0, "vmax": 1}
            )
            shown = cosine if key == "cosine" else between_ends(cosine)
            image = axes.imshow(shown[np.ix_(order, order)], interpolation="none", aspect="equal", **scale)
            axes.set(title=f"{name}, round {m['round']}", xticks=[], xlabel=likeness(cosine, counts[ids]))
            axes.xaxis.label.set_size(8.5)
            first = axes is row[0]
            if first or not same_clients:
                strip = axes.inset_axes((-0.36, 0, 0.3, 1), sharey=axes)
                draw_shares(strip, counts[ids][order])
                strip.set_xlabel("label", size=8.5)
                strip.set_ylabel("client" if first else "")
                strip.xaxis.set_major_locator(whole_numbers(3))
                strip.tick_params(labelsize=7)
                client_ticks(strip, ids[order], most=20)
            axes.tick_params(labelleft=False, left=False)
        ticks = [-1, -0.5, -0.1, 0, 0.1, 0.5, 1] if key == "cosine" else [0, 1]
        assert image is not None  # there are rounds
        bar = figure.colorbar(image, ax=row, shrink=0.8, pad=0.02, ticks=ticks)
        bar.ax.set_yticklabels([f"{t:g}" for t in ticks] if key == "cosine" else ["lowest", "highest"])
        bar.set_label("cosine (square-root scale)" if key == "cosine" else "cosine, scaled in each panel")
        bar.outline.set_visible(False)
    return figure


def between_ends(cosine: np.ndarray) -> np.ndarray:
    """From 0, the lowest cosine of two different clients, to 1, the highest; nothing on the diagonal, which is above"""
    pairs = np.where(np.eye(len(cosine), dtype=bool), np.nan, cosine)
    if not np.isfinite(pairs).any():
        return pairs
    low, high = np.nanmin(pairs), np.nanmax(pairs)
    return (pairs - low) / (high - low if high > low else 1)


def by_labels(counts: np.ndarray) -> np.ndarray:
    """An order of clients in which each is followed by the one most like it in labels, so that groups are blocks.

    Sorting by dominant label would tear apart clients that have several labels in equal parts.
    """
    shares = shares_of(counts)
    left = set(range(len(shares)))
    order = [int(np.argmin(shares @ np.arange(shares.shape[1])))]
    while left := left - {order[-1]}:
        order.append(min(left, key=lambda k: (round(float(np.abs(shares[k] - shares[order[-1]]).sum()), 6), k)))
    return np.array(order)


def likeness(cosine: np.ndarray, counts: np.ndarray) -> str:
    """The span of the cosines of two different clients, and their correlation with the cosines of label counts"""
    pairs = np.triu_indices(len(cosine), 1)
    lengths = np.linalg.norm(counts, axis=1, keepdims=True)
    unit = counts / np.where(lengths == 0, 1, lengths)
    x, y = cosine[pairs], (unit @ unit.T)[pairs]
    keep = np.isfinite(x)
    x, y = x[keep], y[keep]
    if len(x) == 0:
        return "no finite cosine"
    digits = 2 if np.ptp(x) > 0.05 else 4  # models are nearly parallel
    span = f"{x.min():.{digits}f} to {x.max():.{digits}f}"
    if len(x) < 3 or np.std(x) < 1e-9 or np.std(y) < 1e-9:
        return span
    return f"{span}, r = {np.corrcoef(x, y)[0, 1]:.2f}"
