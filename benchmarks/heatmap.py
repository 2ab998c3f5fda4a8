"""A picture of numbers from 0 to 1: rows by columns, in panels side by side."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from fastagg._engine import atomic

GONE = "#444444"  # where there is no number
STYLE = {"font.size": 9, "svg.hashsalt": "fastagg", "svg.fonttype": "none", "text.parse_math": False}


def draw(
    panels: Mapping[str, Sequence[Sequence[float | None]]], rows: Sequence[str], columns: Sequence[str], path: Path
) -> list[Path]:
    """Writes path.png and path.svg; panels are tables, [rows][columns], by their titles. None is a cross on grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context(STYLE):
        size = (1.8 + 0.46 * len(columns) * len(panels), 1.3 + 0.24 * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, table) in zip(every, panels.items(), strict=True):
            values = np.array(table, dtype=np.float64)  # None is NaN
            image = axes.imshow(100 * values, vmin=0, vmax=100, cmap="viridis", aspect="auto", interpolation="none")
            axes.set_facecolor(GONE)
            axes.set_title(title, fontsize=10)
            axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", rotation_mode="anchor")
            axes.set_yticks(range(len(rows)), rows)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            for (y, x), value in np.ndenumerate(values):
                shown = "x" if np.isnan(value) else f"{100 * value:.0f}"
                dark = np.isnan(value) or value < 0.6
                axes.text(x, y, shown, ha="center", va="center", fontsize=7, color="white" if dark else "black")
        bar = figure.colorbar(image, ax=list(every), pad=0.01, aspect=40, label="test accuracy (%)")
        bar.outline.set_visible(False)
        for kind in ("png", "svg"):
            drawn, more = io.BytesIO(), {"metadata": {"Date": None}} if kind == "svg" else {"facecolor": "white"}
            figure.savefig(drawn, format=kind, dpi=130, **more)
            written.append(path.with_suffix(f".{kind}"))
            atomic.write(written[-1], drawn.getvalue())
    return written
