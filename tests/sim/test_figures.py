"""What the figures of steps, weights, output layers and ideal vectors show, by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fastagg
from fastagg.sim import plots, report
from fastagg.sim.plots import forest
from fastagg.sim.report import Metric
from fastagg.sim.report.pairs import Comparison
from fastagg.sim.statistics import paired
from helpers.cohort import make

COUNTS = [[8, 2, 0], [0, 5, 5], [10, 0, 30]]


def groups_of(*records, label="m", counts=COUNTS) -> dict[str, list[report.Run]]:
    metrics = [{"round": 0, "clients": []}] + [{"round": r, **m} for r, m in enumerate(records, 1)]
    return {label: [report.Run(Path("x"), {}, {"label": label, "seed": 0}, {"counts": counts}, metrics)]}


def curves(figure) -> dict[str, list[float]]:
    """The values by the panel's label; reference lines are none"""
    return {axes.get_ylabel(): axes.lines[0].get_ydata().tolist() for axes in figure.axes}


def test_step_and_that_of_fedavg():
    groups = groups_of({"step": 1.0, "fedavg_step": 2.0}, {"step": 0.6, "fedavg_step": 1.0})
    found = curves(plots.step(groups))
    assert found == {"length of the global step": [1.0, 0.6], "step / FedAvg's step": [0.5, 0.6]}
    assert list(curves(plots.step(groups_of({"step": 1.0})))) == ["length of the global step"]
    assert plots.step(groups_of({"step": None}, {"accuracy": 0.5})) is None
    assert plots.step(groups_of({"step": 1.0, "fedavg_step": 0.0})) is not None  # nobody moved


def test_spread_of_the_weights():
    groups = groups_of({"weights": [0.5, 0.25, 0.25]}, {"weights": [0.27, 0.27, 0.36]}, {"weights": [1.0, 0.0, 0.0]})
    largest, smallest, share = curves(plots.spread(groups)).values()
    assert largest == pytest.approx([1.5, 1.2, 3])
    assert smallest == pytest.approx([0.75, 0.9, 0])  # whatever they sum up to
    assert share == pytest.approx([1 / (3 * (0.25 + 2 * 0.0625)), 1 / (3 * (2 * 0.09 + 0.16)), 1 / 3])
    assert plots.spread(groups_of({"weights": [1.0]}, {"weights": None}, {"weights": [np.nan, 1]})) is None


def test_heterogeneity_is_that_of_the_library():
    g, clients = make(2, {"w": (4, 3)}, torch.float64)
    weights, ids = [0.3, 0.7], [0, 2]
    seen = fastagg.diagnostics(
        fastagg.gram(g, clients), weights, class_dist=np.array(COUNTS)[ids], population=np.array(COUNTS).sum(0)
    )
    figure = plots.heterogeneity(groups_of({"weights": weights, "clients": ids}))
    assert curves(figure)["heterogeneity coherence"] == pytest.approx([float(seen.heterogeneity_coherence)], rel=1e-12)
    shares = [n / 60 for n in (10, 10, 40)]
    [by_size] = curves(plots.heterogeneity(groups_of({"weights": shares, "clients": [0, 1, 2]}))).values()
    assert by_size == pytest.approx([1])
    assert plots.heterogeneity(groups_of({"weights": weights, "clients": ids}, counts=[])) is None


def test_what_output_layers_show():
    """In the order of the clients; one that was absent is blank"""
    heads = [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]
    [run] = groups_of({"clients": [0, 2], "heads": heads})["m"]
    found = plots.head_shares(run)
    np.testing.assert_array_equal(found[1], [heads[0], [np.nan] * 3, heads[1]])
    figure = plots.heads(run)
    true, seen = figure.axes[:2]
    order = plots.by_labels(np.array(COUNTS, float) / np.sum(COUNTS, 1, keepdims=True))
    np.testing.assert_allclose(true.images[0].get_array(), 100 * (np.array(COUNTS) / np.sum(COUNTS, 1)[:, None])[order])
    np.testing.assert_array_equal(seen.images[0].get_array().filled(np.nan), 100 * found[1][order])
    assert (true.images[0].get_clim(), seen.images[0].get_clim()) == ((0, 80), (0, 60))
    r = np.corrcoef([0.8, 0.2, 0, 0.25, 0, 0.75], np.ravel(heads))[0, 1]
    assert figure.legends[0].get_texts()[0].get_text() == f"round 1, r = {r:.2f}"
    [other] = groups_of({"clients": [0], "heads": [[0.5, 0.5]]})["m"]  # of another number of classes
    assert plots.heads(other) is None


def test_many_rounds_with_output_layers_are_three_panels():
    heads = {"clients": [0, 1, 2], "heads": np.full((3, 3), 1 / 3).tolist()}
    [run] = groups_of(*[heads] * 5)["m"]
    assert list(plots.head_shares(run)) == [1, 3, 5]
    assert plots.heads(run) is not None  # all alike: there is no correlation


def test_distances_to_the_ideal_vector():
    records = [{"ideal_clients": [0.5, 0.7], "ideal_merged": 0.3, "ideal_method": 0.2, "clients": [0, 1]},
               {"clients": [0, 1]}, {"ideal_clients": [0.6, 1.0], "ideal_merged": 0.4, "clients": [0, 2]}]  # fmt: skip
    [run] = groups_of(*records)["m"]
    clients, average, merged, own = plots.ideal(run).axes[0].lines
    assert list(zip(*clients.get_data(), strict=True)) == [(1, 0.5), (1, 0.7), (3, 0.6), (3, 1.0)]
    assert average.get_ydata() == pytest.approx([0.6, 0.8])
    assert list(merged.get_ydata()) == [0.3, 0.4]
    assert list(own.get_data()) == [(1,), (0.2,)]


def test_shrinking_with_r_where_it_is_recorded():
    groups = groups_of({"gamma": 0.9, "shrink_ratio": 19.0}, {"gamma": 1.0, "shrink_ratio": np.inf})
    assert curves(plots.gamma(groups)) == {"gamma": [0.9, 1.0], "r: learned / shrunk": [19.0]}
    assert list(curves(plots.gamma(groups_of({"gamma": 0.9})))) == ["gamma"]


def test_a_logarithmic_axis_is_written_in_plain_numbers():
    figure = plots.step(groups_of({"step": 0.05}, {"step": 20.0}))
    [axes] = figure.axes
    figure.draw_without_rendering()
    assert axes.get_yscale() == "log"
    assert {"0.1", "1", "10"} <= {tick.get_text() for tick in axes.get_yticklabels()}


def test_losses_side_by_side():
    assert list(curves(plots.loss(groups_of({"loss": 1.0, "train_loss": 0.5})))) == [
        "test loss", "training loss of the clients",
    ]  # fmt: skip
    assert list(curves(plots.loss(groups_of({"train_loss": 0.5})))) == ["training loss of the clients"]


def test_forest():
    def compared(setting, method, *differences):
        d = paired(dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))
        return Comparison(setting, method, "fedavg", d, Metric())

    found = [compared("alpha=0.1", "a", 0.01, 0.011, 0.012), compared("alpha=0.5", "a", -0.01, 0.02),
             compared("alpha=0.5", "none")]  # fmt: skip
    axes = forest(found, "best round").axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["alpha=0.1", "a", "alpha=0.5", "a"]
    assert axes.get_xlabel() == "best round: difference to fedavg (points)"
    low, high = found[0].difference.low, found[0].difference.high
    assert next(t.get_text() for t in axes.texts) == f"+1.10  [{100 * low:+.2f}, {100 * high:+.2f}]"
    diamonds = [line for line in axes.lines if line.get_marker() == "D"]
    assert [(line.get_xdata()[0], line.get_markerfacecolor() != "none") for line in diamonds] == [
        (pytest.approx(1.1), True), (pytest.approx(0.5), False),
    ]  # fmt: skip
    assert forest(found[2:], "best round") is None


def test_what_is_the_same_but_for_rounding_is_drawn_flat():
    """FedAvg's step is FedAvg's"""
    rounds = [{"step": 1.0 + 1e-8 * r, "fedavg_step": 1.0} for r in (0, 2, 1)]
    length, ratio = plots.step(groups_of(*rounds)).axes
    assert ratio.get_ylim() == pytest.approx((0.9, 1.1), abs=1e-6)
    assert length.get_ylim() == pytest.approx((0.9, 1.1), abs=1e-6)
    narrow = plots.step(groups_of({"step": 1.0, "fedavg_step": 1.0}, {"step": 1.01, "fedavg_step": 1.0})).axes[1]
    assert narrow.get_ylim()[1] < 1.05
