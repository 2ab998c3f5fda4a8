"""Where a gain may come from: how far the global model moves, and how unequal the clients' weights are.

A method whose weights are more equal than the data sizes moves less, as if FedAvg had a smaller server step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fastagg.sim.plots.curves import Panel, draw, draw_panels
from fastagg.sim.plots.style import label_counts
from fastagg.sim.report import Groups, Run


def step(groups: Groups) -> Figure | None:
    """Length of the global step, and relative to FedAvg's step with the same clients' models"""
    panels = [
        Panel(lambda m, run: m.get("step"), "length of the global step", may_be_log=True),
        Panel(matched, "step / FedAvg's step", reference=1, may_be_log=True),
    ]
    return draw_panels(groups, panels)


def matched(m: dict[str, Any], run: Run) -> float | None:
    """The global step, as a part of FedAvg's with the same clients' models"""
    return m["step"] / m["fedavg_step"] if m.get("step") is not None and m.get("fedavg_step") else None


def spread(groups: Groups) -> Figure | None:
    """Largest and smallest weight in units of an equal one, and how many equal clients would weigh as much"""
    panels = [
        Panel(lambda m, run: of_weights(m, np.max), "largest weight / equal weight", reference=1),
        Panel(lambda m, run: of_weights(m, np.min), "smallest weight / equal weight", reference=1),
        Panel(lambda m, run: of_weights(m, lambda w: 1 / np.mean(w**2)), "share of clients that count", reference=1),
    ]
    return draw_panels(groups, panels)


def of_weights(m: dict[str, Any], of: Any) -> float | None:
    """A number of a round's weights, scaled so that their mean is 1"""
    w = np.array(m.get("weights") or [], float)
    if len(w) < 2 or not np.isfinite(w).all() or w.sum() <= 0:
        return None
    return float(of(w / w.mean()))


def heterogeneity(groups: Groups) -> Figure | None:
    """FedLAW's heterogeneity coherence (Def. 5.2): cosine of the class distribution of the cohort and of all data"""
    return draw(groups, _cohort_and_all, "heterogeneity coherence", reference=1)


def _cohort_and_all(m: dict[str, Any], run: Run) -> float | None:
    """As fastagg.diagnostics: the cohort's distribution is the clients' distributions, weighted as they were"""
    counts, ids, w = label_counts(run), m.get("clients") or [], np.array(m.get("weights") or [], float)
    if not len(counts) or not ids or w.shape != (len(ids),):
        return None
    own = counts[ids] / np.maximum(counts[ids].sum(1, keepdims=True), 1)
    cohort, every = w @ own, counts.sum(0)
    lengths = np.linalg.norm(cohort) * np.linalg.norm(every)
    return float(cohort @ every / lengths) if lengths > 0 else None
