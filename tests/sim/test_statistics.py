"""Paired differences: the numbers by hand, and which runs are paired."""

from __future__ import annotations

import json
import math
import statistics as plain
import sys
import types

import pytest

from fastagg.sim import page, plots, report
from fastagg.sim.report.pairs import seedwise
from fastagg.sim.statistics import paired, t_quantile
from helpers.fake_runs import fake


def read(*paths):
    return report.group([report.read_run(path) for path in paths])


def with_curve(path, *accuracies, **config):
    """The run with this curve from round 1 on"""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(accuracies) + 1
    for m, value in zip(lines[1:], accuracies, strict=True):
        m["accuracy"] = value
    (path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines))
    (path / "summary.json").unlink()
    options = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(options))
    return path


def ends(folder, label, values, **options):
    """Runs of one round that end with these values, one for each seed"""
    return [with_curve(fake(folder, label, s, rounds=1, clients=3, **options), v) for s, v in enumerate(values)]


# ---- by hand ----


@pytest.mark.parametrize(
    ("freedom", "share", "value"),
    [(1, 0.975, 12.706), (2, 0.975, 4.303), (4, 0.975, 2.776), (9, 0.975, 2.262), (9, 0.95, 1.833), (30, 0.995, 2.750),
     (120, 0.975, 1.980)],
)  # fmt: skip
def test_quantiles_as_in_any_table(freedom, share, value):
    assert t_quantile(share, freedom) == pytest.approx(value, abs=5e-4)


def test_interval_by_hand():
    d = paired({0: 0.83, 1: 0.80, 2: 0.84}, {0: 0.80, 1: 0.79, 2: 0.82})
    assert d.seeds == pytest.approx({0: 0.03, 1: 0.01, 2: 0.02})
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert (d.mean, d.low, d.high) == pytest.approx((0.02, 0.02 - half, 0.02 + half), abs=1e-8)
    assert not d.is_clear
    assert paired({0: 3, 1: 5}, {0: 1, 1: 2}, confidence=0.5).low == pytest.approx(
        2.5 - 1 * plain.stdev([2, 3]) / 2**0.5
    )


def test_splits_that_differ_more_than_methods():
    """Means of 0.70 ± 0.15 and 0.71 ± 0.15 tell nothing; the same seeds do"""
    base = {0: 0.55, 1: 0.70, 2: 0.85}
    d = paired({0: 0.561, 1: 0.710, 2: 0.859}, base)
    assert d.is_clear
    assert d.low > 0


def test_what_has_no_partner_does_not_count():
    d = paired({0: 0.5, 1: math.nan, 2: None, 3: 0.7, 5: math.inf}, {0: 0.4, 1: 0.4, 2: 0.4, 4: 0.1, 5: 0.2})
    assert d.seeds == pytest.approx({0: 0.1})
    assert (d.low, d.high, d.is_clear) == (None, None, False)
    assert paired({}, {0: 1.0}).mean is None
    with pytest.raises(ValueError, match="between 0 and 1"):
        paired({}, {}, confidence=95)


# ---- which runs ----


def test_scores_of_a_curve():
    values = [0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6, 0.5, 0.55, 0.45, math.nan]
    assert math.isnan(report.score(values, "last_5"))
    values = values[:-1]
    assert report.score(values, "last_5") == pytest.approx((0.4 + 0.6 + 0.5 + 0.55 + 0.45) / 5)
    assert report.score(values, "last_10") == pytest.approx((sum(values) - 0.1) / 10)
    assert report.score(values, "best") == 0.9
    assert report.score([*values, math.nan], "best", "min") == 0.1
    assert report.score(values, "best_10") == pytest.approx((sum(values) - 0.1) / 10)
    assert report.score(values, "best_10", "min") == pytest.approx((sum(values) - 0.9) / 10)
    assert report.score([0.3, 0.5], "best_10") == pytest.approx(0.4)
    assert [report.score([], name) for name in report.SCORES] == [None] * 4
    with pytest.raises(ValueError, match="expected one of last_5"):
        report.score(values, "last")


def test_every_table_has_the_best_rounds(tmp_path):
    curve = [0.1, 0.9, *[0.5] * 8, 0.2, 0.4]
    groups = read(with_curve(fake(tmp_path, "fedavg", 0), *curve), with_curve(fake(tmp_path, "fedavg", 1), *curve))
    [row] = report.rows(groups)
    assert (row["best"], row["best_10"], row["best_std"]) == pytest.approx((0.9, (0.9 + 4 + 0.4) / 10, 0))
    assert "90.00 ± 0.00 | 53.00 ± 0.00" in report.markdown(groups)
    text = page.write(groups, tmp_path / "out").read_text()
    assert "<td>90.00 ± 0.00</td><td>53.00 ± 0.00</td>" in text
    summary = groups["fedavg"][0].summary
    assert (summary["accuracy_best"], summary["accuracy_best_10"]) == (0.9, pytest.approx(0.53))


def test_the_baseline(tmp_path):
    a = ends(tmp_path, "fedawa", [0.8, 0.82])
    b = ends(tmp_path, "fedavg", [0.7, 0.71])
    c = ends(tmp_path, "uniform", [0.75, 0.7])
    found = report.differences(read(*a, *b, *c))
    assert [(c.method, c.baseline) for c in found] == [("fedawa", "fedavg"), ("uniform", "fedavg")]  # wherever it is
    assert [c.difference.mean for c in found] == pytest.approx([0.105, 0.02])
    assert [c.wins for c in found] == [2, 1]
    assert {c.baseline for c in report.differences(read(*a, *c))} == {"fedawa"}  # the first
    assert {c.baseline for c in report.differences(read(*a, *b, *c), "uniform")} == {"uniform"}
    with pytest.raises(ValueError, match="baseline='x' is not in this comparison; expected one of fedawa, fedavg"):
        report.differences(read(*a, *b), "x")


def test_methods_are_compared_within_their_setting(tmp_path):
    paths = []
    for alpha, epochs, shift in ((0.1, 1, 0.0), (0.1, 3, 0.1), (0.5, 1, 0.2)):
        paths += ends(tmp_path, "fedavg", [0.5 + shift, 0.55 + shift], alpha=alpha, epochs=epochs)
        paths += ends(tmp_path, "fedawa", [0.51 + 2 * shift, 0.57 + 2 * shift], alpha=alpha, epochs=epochs)
    paths += ends(tmp_path, "fedawa", [0.9, 0.9], alpha=100, epochs=1)  # nothing to compare with
    groups = read(*paths)
    found = report.differences(groups)
    assert [(c.setting, c.method) for c in found] == [
        ("alpha=0.1, epochs=1", "fedawa"), ("alpha=0.1, epochs=3", "fedawa"), ("alpha=0.5, epochs=1", "fedawa"),
    ]  # fmt: skip
    assert [c.difference.mean for c in found] == pytest.approx([0.015, 0.115, 0.215])
    rows = report.rows(groups)
    assert [(r["alpha"], r["epochs"], r["method"], r["difference"] is None) for r in rows] == [
        (0.1, 1, "fedavg", True), (0.1, 1, "fedawa", False), (0.1, 3, "fedavg", True), (0.1, 3, "fedawa", False),
        (0.5, 1, "fedavg", True), (0.5, 1, "fedawa", False), (100, 1, "fedawa", True),
    ]  # fmt: skip
    text = report.markdown(groups)
    assert text.count("| against fedavg") == 3
    assert "alpha=0.5, epochs=1:\n\n| method" in text


def test_a_methods_own_options_are_no_setting(tmp_path):
    """cwFedAvg with and without WDR, both against FedAvg, which has none"""
    paths = ends(tmp_path, "fedavg", [0.5], wdr=0.0) + ends(tmp_path, "cwfedavg", [0.5], wdr=0.0)
    groups = read(*paths, *ends(tmp_path, "cwfedavg", [0.6], wdr=10))
    assert list(report.settings(groups)) == [""]
    assert [c.method for c in report.differences(groups)] == ["cwfedavg, wdr=0.0", "cwfedavg, wdr=10"]


def test_one_method_in_several_settings_is_one_table(tmp_path):
    groups = read(*(ends(tmp_path, "fedavg", [0.5], alpha=0.1) + ends(tmp_path, "fedavg", [0.6], alpha=0.5)))
    assert report.sections(groups) == {"": groups}
    assert report.differences(groups) == []
    assert "against" not in report.markdown(groups)


def test_runs_that_are_not_equally_far_are_not_paired(tmp_path):
    short = with_curve(fake(tmp_path, "fedavg", 0, rounds=2, clients=3), 0.1, 0.2, rounds=3)
    full = [fake(tmp_path, "fedavg", 1, rounds=3, clients=3), *(fake(tmp_path, "b", s, rounds=3) for s in (0, 1))]
    groups = read(short, *(with_curve(path, 0.1, 0.2, 0.3) for path in full))
    assert list(seedwise(groups["b"], groups["fedavg"], report.Metric()).seeds) == [1]


def test_one_seed_is_said(tmp_path):
    groups = read(*ends(tmp_path, "fedavg", [0.5]), *ends(tmp_path, "b", [0.6]))
    text = report.markdown(groups)
    assert "With one seed there is no interval" in text
    assert "+10.00 |" in text
    [figure] = plots.differences(report.differences(groups), "best round", 0.95)
    assert "With one seed there is no interval" in figure.caption
    apart = read(*ends(tmp_path, "fedavg", [0.5]), fake(tmp_path, "b", 7, rounds=1, clients=3))
    assert "n/a: no seed is there for both" in report.markdown(apart)


def test_chosen_score_and_confidence(tmp_path):
    curve = {"fedavg": [0.2, 0.6, 0.5], "b": [0.3, 0.9, 0.4]}
    groups = read(
        *(with_curve(fake(tmp_path, k, s, rounds=3, clients=3), *[x + s / 50 for x in v])
          for k, v in curve.items() for s in (0, 1))
    )  # fmt: skip
    [best] = report.differences(groups, score="best")
    assert best.difference.mean == pytest.approx(0.3)
    text = report.markdown(groups, score="best", confidence=0.9)
    assert "Differences of the best round" in text
    assert "90 % confidence interval" in text


# ---- another metric ----


def test_a_metric_that_is_to_be_small(tmp_path):
    options = {"metric": "own.metrics:rmse", "metric_best": "min"}
    good = [with_curve(fake(tmp_path, "b", s, rounds=2), 3.5, 1.25 + s / 4, **options) for s in (0, 1)]
    bad = [with_curve(fake(tmp_path, "fedavg", s, rounds=2), 2.0, 4.25 + s / 4, **options) for s in (0, 1)]
    groups = read(*bad, *good)
    assert [row["best"] for row in report.table(groups)] == [False, True]
    assert report.rows(groups)[0]["best"] == 2.0
    [c] = report.differences(groups)
    assert c.wins == 2
    text = report.markdown(groups)
    assert " rmse |" in text.splitlines()[0]
    assert "%" not in text.replace("time in aggregation, %", "").replace("95 % confidence", "")
    assert "points" not in text
    assert "Lower is better." in text
    assert page.verdict(groups).startswith("b reached rmse 2.438 ± 0.088, 0.75 below fedavg")
    html = page.write(groups, tmp_path / "out").read_text()
    assert "<h2>Rmse</h2>" in html
    assert "Lower and earlier is better" in html
    assert "Left of the line is better" in html
    axes = plots.accuracy(groups, report.metric_of(groups)).axes
    assert axes[0].get_ylabel() == "rmse"
    assert [tick.get_text() for tick in axes[1].get_yticklabels()] == ["fedavg", "b"]  # the best on top
    with pytest.raises(ValueError, match="measured differently cannot be compared"):
        read(*bad, fake(tmp_path, "c", 0))


# ---- pandas ----


def test_frame(tmp_path, monkeypatch):
    groups = read(*ends(tmp_path, "fedavg", [0.5]), *ends(tmp_path, "b", [0.6]))
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=lambda rows: ("frame of", rows)))
    assert report.frame(groups) == ("frame of", report.rows(groups))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        report.frame(groups)
