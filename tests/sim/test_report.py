from __future__ import annotations

import ast
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastagg.sim import command, page, plots, report
from helpers.fake_runs import fake

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def read(*paths: Path) -> dict[str, list[report.Run]]:
    return report.group([report.read_run(p) for p in paths])


def lined(text: str) -> str:
    """Without the spaces that make columns straight"""
    return re.sub(r" +", " ", text)


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_accuracies(folder: Path, **labels: list[float]) -> dict[str, list[report.Run]]:
    paths = []
    for label, values in labels.items():
        for seed, value in enumerate(values):
            paths.append(fake(folder, label, seed, rounds=1))
            edit(paths[-1] / "summary.json", accuracy=value)
    return read(*paths)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """FedAvg and FedAWA, three seeds each, and the report of them"""
    folder = tmp_path_factory.mktemp("pair")
    runs = [fake(folder, label, seed, final=final, adaptive=label != "fedavg", new=True)
            for label, final in (("fedavg", 0.8), ("fedawa", 0.9)) for seed in range(3)]  # fmt: skip
    groups = read(*runs)
    return groups, page.write(groups, folder / "out")


# ---- reading ----


def test_reads_a_run(tmp_path):
    run = report.read_run(fake(tmp_path, "fedawa", 3))
    assert run.summary["label"] == "fedawa"
    assert run.config["seed"] == 3
    assert len(run.metrics) == 13
    assert len(run.partition["counts"]) == 8


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda p: shutil.rmtree(p), "no such folder"),
    (lambda p: (p / "config.json").unlink(), "not a run of the simulator: it has no config.json"),
    (lambda p: (p / "config.json").write_text("{"), r"config.json cannot be read"),
    (lambda p: (p / "summary.json").write_text("[1]"), r"summary.json holds a list"),
    (lambda p: (p / "metrics.jsonl").unlink(), "has no metrics yet"),
    (lambda p: (p / "metrics.jsonl").write_text(""), "has no metrics yet"),
    (lambda p: (p / "metrics.jsonl").write_text('{"round": 0}\n{"rou\n{"round": 2}\n'), "line 2 of 3 is not"),
    (lambda p: (p / "metrics.jsonl").write_text('{"round": 0}\n{"lr": 1}\n{"round": 2}\n'), "line 2 of 3 is not"),
])  # fmt: skip
def test_says_what_is_wrong_with_a_folder(tmp_path, spoil, message):
    path = fake(tmp_path, "fedavg", 0, rounds=2)
    spoil(path)
    with pytest.raises(ValueError, match=message):
        report.read_run(path)


def test_crashed_run_counts_as_far_as_it_went(tmp_path):
    path = fake(tmp_path, "fedawa", 0, rounds=10)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([*lines[:8], lines[8][:50]]))
    accuracies = [json.loads(line)["accuracy"] for line in lines[3:8]]
    for summary in (True, False):  # one from before the crash, or none
        if not summary:
            (path / "summary.json").unlink()
        run = report.read_run(path)
        assert run.metrics[-1]["round"] == 7
        assert run.summary["label"] == "fedawa"
        assert run.summary["rounds"] == 7
        assert not run.summary["finished"]
        assert run.summary["accuracy"] == pytest.approx(statistics.mean(accuracies))
        assert "1 (1 unfinished)" in report.markdown(report.group([run]))
    assert "cosine-fedawa" in page.write(read(path), tmp_path / "out").read_text()


def test_only_the_first_model(tmp_path):
    path = fake(tmp_path, "fedawa", 0)
    (path / "metrics.jsonl").write_text('{"round": 0, "accuracy": 0.1, "personal_accuracy": 0.1, "clients": []}\n')
    (path / "summary.json").unlink()
    assert report.table(read(path))[0]["mean"] is None
    assert "No run has a finite accuracy" in page.write(read(path), tmp_path / "out").read_text()


# ---- comparing ----


def test_groups_seeds_by_label_in_order(tmp_path):
    paths = [fake(tmp_path, label, seed, rounds=1) for label, seed in (("b", 0), ("a", 1), ("b", 1), ("a", 0))]
    groups = read(*paths, paths[0])  # the same folder twice is one run
    assert [(label, [r.summary["seed"] for r in runs]) for label, runs in groups.items()] == [
        ("b", [0, 1]),
        ("a", [1, 0]),
    ]


def test_runs_of_other_settings_are_not_seeds(tmp_path):
    paths = [fake(tmp_path, "fedawa", seed, rounds=1, alpha=alpha) for alpha in (0.1, 100) for seed in (0, 1)]
    groups = read(*paths)
    assert {label: len(runs) for label, runs in groups.items()} == {"fedawa, alpha=0.1": 2, "fedawa, alpha=100": 2}
    assert "Dirichlet(0.1 or 100)" in page.described(groups)


def test_a_seed_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"fedawa, seed 0, comes twice: .*leave one out"):
        read(*(fake(tmp_path, "fedawa", 0, rounds=1) for _ in range(2)))


def test_table_by_hand(tmp_path):
    groups = with_accuracies(
        tmp_path, far=[0.70, 0.71, 0.72], near=[0.88, 0.90, 0.86], best=[0.90, 0.88, 0.92], one=[0.89]
    )
    rows = {row["label"]: row for row in report.table(groups)}
    assert rows["near"]["mean"] == pytest.approx(0.88)
    assert rows["near"]["std"] == pytest.approx(0.02)  # sqrt((0 + 0.02^2 + 0.02^2) / 2)
    # seed by seed, near is behind best by 0.02, -0.02, 0.06: on average 0.02, within 4.303 * 0.04 / sqrt(3) = 0.099;
    # and far by 0.2, 0.17, 0.2
    assert [label for label, row in rows.items() if row["best"]] == ["best"]
    assert [label for label, row in rows.items() if row["within_noise"]] == ["near"]
    assert rows["one"]["std"] is None
    assert [row["runs"] for row in rows.values()] == [3, 3, 3, 1]


@pytest.mark.parametrize(("shift", "within"), [(0.0248, True), (0.0249, False)])
def test_noise_is_of_the_differences_seed_by_seed(tmp_path, shift, within):
    """However much the seeds differ: those of b are behind by shift - 0.01, shift, shift + 0.01"""
    groups = with_accuracies(tmp_path, a=[0.90, 0.60, 0.70], b=[0.91 - shift, 0.60 - shift, 0.69 - shift])
    assert report.table(groups)[1]["within_noise"] is within  # 4.3027 * 0.01 / sqrt(3) = 0.02484


def test_no_claim_about_noise_where_the_best_has_one_seed(tmp_path):
    groups = with_accuracies(tmp_path, a=[0.9], b=[0.89, 0.88, 0.91])
    assert not any(row["within_noise"] for row in report.table(groups))
    text = report.markdown(groups)
    assert "**90.00**" in text
    assert "≈" not in text
    assert "With one seed nothing can be said about noise" in text


def test_markdown(tmp_path):
    text = report.markdown(with_accuracies(tmp_path, near=[0.88, 0.90, 0.86], best=[0.90, 0.88, 0.92]))
    assert "| near | ≈ 88.00 ± 2.00 |" in lined(text)
    assert "| **best** | **90.00 ± 2.00** |" in lined(text)
    assert len({len(line) for line in text.splitlines()[:4]}) == 1  # columns are straight
    assert "≈ is within noise of it" in text
    assert "**" not in report.markdown(with_accuracies(tmp_path, alone=[0.9, 0.8]))
    assert "a\\|b" in report.markdown(with_accuracies(tmp_path, **{"a|b": [0.9]}))


def test_nan_is_neither_best_nor_near(tmp_path):
    groups = with_accuracies(tmp_path, bad=[0.99, math.nan], good=[0.5, 0.6])
    bad, good = report.table(groups)
    assert bad["mean"] is None
    assert (bad["best"], bad["within_noise"], good["best"]) == (False, False, True)
    assert "| bad | n/a |" in lined(report.markdown(groups))
    assert "diverged" in report.markdown(groups)


def test_personalised_methods_make_all_be_compared_by_personal_accuracy(tmp_path):
    groups = read(fake(tmp_path, "fedavg", 0), fake(tmp_path, "cwfedavg", 0, personal=True))
    plain, personal = report.table(groups)
    own = [m["personal_accuracy"] for m in groups["fedavg"][0].metrics[-5:]]
    assert plain["mean"] == pytest.approx(statistics.mean(own))
    assert plain["whole"][0] == pytest.approx(groups["fedavg"][0].summary["accuracy"])
    assert personal["mean"] == pytest.approx(groups["cwfedavg"][0].summary["accuracy"])
    assert personal["whole"] == (None, None)
    assert "| personal accuracy, % | on the whole test set, % |" in lined(report.markdown(groups))


def test_ties_are_all_bold(tmp_path):
    """As they are printed: 90.00 twice, however the digits go on"""
    groups = with_accuracies(tmp_path, a=[0.9], b=[0.9000001], c=[0.8999], d=[0.9])
    assert [row["label"] for row in report.table(groups) if row["best"]] == ["a", "b", "d"]
    text = report.markdown(groups)
    assert text.count("**90.00**") == 3
    assert "| c | 89.99 |" in lined(text)
    assert page.verdict(groups) == "a, b and d reached 90.00 % accuracy, 0.01 points above c."
    assert page.write(groups, tmp_path / "out").read_text().count("<tr class=bold>") == 3


@pytest.mark.parametrize(
    ("rounds", "words"), [((1, 1), "the last round"), ((3, 3), "mean of the last 3 rounds"),
                          ((2, 12), "mean of the last 2 to 5 rounds"), ((5, 12), "mean of the last 5 rounds")]
)  # fmt: skip
def test_says_how_many_rounds_are_averaged(tmp_path, rounds, words):
    groups = read(*(fake(tmp_path, f"m{i}", 0, rounds=n, clients=3) for i, n in enumerate(rounds)))
    assert words[1:] in report.markdown(groups)
    text = page.write(groups, tmp_path / "out").read_text()
    assert f"Right: {words}" in text
    assert "5 rounds" in words or "last 5 rounds" not in text


def test_one_definition_of_rounds_per_second(tmp_path):
    """All rounds of all seeds over the time spent in them: in the table, in the figure, and in what is printed"""
    paths = [fake(tmp_path, "fedavg", seed, rounds=2, clients=3) for seed in (0, 1)]
    for path, train in zip(paths, (0.1, 0.9), strict=True):
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for m in lines[1:]:
            m["seconds"] = {"train": train, "aggregate": 0.05, "evaluate": 0.05}
        (path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines))
    groups = read(*paths)
    [row] = report.table(groups)
    assert row["rounds_per_second"] == pytest.approx(4 / 2.4)
    assert row["aggregation_share"] == pytest.approx(0.2 / 2.4)
    assert "| 1.67 | 8.3 |" in lined(report.markdown(groups))
    assert command.speed(groups) == [
        "fedavg: 1.67 rounds/s, 8.3 % of the time in aggregation; clients trained all at once"
    ]
    [text] = [t.get_text() for axes in plots.time(groups).axes for t in axes.texts]
    assert "1.67 rounds/s, aggregation 8.3 %" in text


def test_a_run_as_if_it_had_ended_earlier(tmp_path):
    path = fake(tmp_path, "fedawa", 0, rounds=10)
    edit(path / "summary.json", accuracy=None, diverged=True)  # it did so later
    run = report.read_run(path, 6)
    accuracies = [m["accuracy"] for m in report.read_run(path).metrics]
    assert [m["round"] for m in run.metrics] == list(range(7))
    assert run.config["rounds"] == run.summary["rounds"] == 6
    assert run.summary["finished"]
    assert "diverged" not in run.summary
    assert run.summary["accuracy"] == pytest.approx(statistics.mean(accuracies[2:7]))
    assert report.read_run(path, 20).summary["rounds"] == 10


# ---- figures ----


def test_colours_span_the_data(tmp_path):
    [run] = read(fake(tmp_path, "fedawa", 0))["fedawa"]
    given, _ = plots.weight_matrix(run)
    heat = plots.weights(run).axes[0]
    low, high = heat.images[0].get_clim()
    assert low == pytest.approx(100 * given.min())
    assert high == pytest.approx(100 * given.max())
    assert heat.get_title() == f"weight (%), colours from {low:.3g} to {high:.3g}"
    models = [axes.images[0] for axes in plots.cosines(run).axes if axes.get_title().startswith("models")]
    assert len(models) == 3
    for image in models:
        shown = image.get_array()
        assert (np.nanmin(shown), np.nanmax(shown)) == (0, 1)
        assert not np.isfinite(np.diag(shown)).any()


def test_an_outlier_does_not_hide_the_others():
    values = np.full((10, 100), 5.0) + np.linspace(0, 1, 100)
    assert plots.span(values) == ((5, 6), "neither")
    values[0, 0], values[0, 1] = 50, -40
    (low, high), extend = plots.span(values)
    assert 5 <= low < high <= 6
    assert extend == "both"
    assert plots.span(np.ones((3, 3)))[0] == (0.5, 1.5)


def drawn(groups) -> list[str]:
    return [d.name for d in plots.figures(groups, report.metric_of(groups))]


def test_which_figures_there_are(pair, tmp_path):
    groups, _ = pair
    assert drawn(groups) == [
        "accuracy", "loss", "step", "spread", "weights-fedawa", "heads-fedavg", "heads-fedawa", "cosine-fedavg",
        "cosine-fedawa", "coherence", "heterogeneity", "time",
    ]  # fmt: skip
    old = read(fake(tmp_path, "fedawa", 0))
    assert drawn(old) == ["accuracy", "loss", "spread", "weights-fedawa", "cosine-fedawa", "coherence", "heterogeneity",
                          "time"]  # fmt: skip
    assert "ideal-fedawa" in drawn(read(fake(tmp_path, "fedawa", 1, ideal=True)))
    assert "gamma" in drawn(read(fake(tmp_path, "fedlaw", 0, gamma=True)))
    personal = read(fake(tmp_path, "cwfedavg", 0, personal=True))
    assert drawn(personal) == ["accuracy", "loss", "cosine-cwfedavg", "coherence", "time"]


def test_fedavg_of_some_clients_is_not_adaptive(tmp_path):
    [run] = read(fake(tmp_path, "fedavg", 0, adaptive=False, participation=0.5))["fedavg"]
    assert plots.weight_matrix(run) is None
    [run] = read(fake(tmp_path, "fedawa", 0, participation=0.5))["fedawa"]
    given, plain = plots.weight_matrix(run)
    assert given.shape == (8, 12)
    assert (np.isfinite(given).sum(0) == 4).all()  # absent clients are blank
    np.testing.assert_allclose(np.nansum(given, 0), 1)
    np.testing.assert_allclose(np.nansum(plain, 0), 1)
    assert plots.weights(run) is not None
    assert plots.cosines(run) is not None


def test_no_partition_no_clients(tmp_path):
    path = fake(tmp_path, "fedawa", 0)
    (path / "partition.json").unlink()
    assert drawn(read(path)) == ["accuracy", "loss", "spread", "coherence", "time"]


def test_bands_over_seeds(tmp_path):
    runs = [report.Run(tmp_path, {}, {}, {}, [{"round": r, "x": x} for r, x in enumerate(values)])
            for values in ([1, 2, math.nan, None], [3, 6, 5])]  # fmt: skip
    rounds, *curves = plots.over_seeds(runs, lambda m, run: m["x"])
    assert rounds.tolist() == [0, 1, 2]
    assert [c.tolist() for c in curves] == [[2, 4, 5], [1, 2, 5], [3, 6, 5]]


def test_clients_with_like_labels_are_neighbours():
    """FedAWA's Fig. 2: four clients with the first classes, four with the last, four with all"""
    counts = np.zeros((12, 10))
    for k in range(12):
        kind = k % 3
        counts[k, {0: slice(0, 5), 1: slice(5, 10), 2: slice(0, 10)}[kind]] = 20
    counts += np.random.default_rng(0).integers(0, 4, counts.shape) * (counts > 0)
    order = plots.by_labels(counts)
    assert sorted(order) == list(range(12))
    assert (order % 3).tolist() == [0] * 4 + [2] * 4 + [1] * 4


def test_ten_labels_look_different():
    groups = {str(i): [] for i in range(20)}
    assert len({tuple(plots.look(groups, label).values()) for label in groups}) == 20


# ---- the page ----


def test_page_needs_nothing_else(pair):
    groups, page = pair
    text = page.read_text()
    assert not re.search(r"https?://", text)
    assert "<script" not in text
    assert "@import" not in text
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", text)
    assert not re.findall(r"url\((?!#)", text)
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)
    count = len(drawn(groups)) + 1  # of the differences
    assert text.count("<svg") == text.count("</svg>") == count
    assert text.count('<div class="scroll"><svg') == count  # they scroll where the page is narrow
    assert 'content="width=device-width, initial-scale=1"' in text
    assert "fedavg against fedawa on digits" in text
    assert "digits split over 8 clients by label with Dirichlet(0.1)" in text


def test_pngs_are_written_and_nothing_is_left_over(pair):
    groups, page = pair
    names = {path.name for path in (page.parent / "plots").iterdir()}
    assert names == {f"{name}.png" for name in [*drawn(groups), "differences"]}
    assert {path.name for path in page.parent.iterdir()} == {"plots", "report.html"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (page.parent / "plots").iterdir())


def test_same_runs_same_page(tmp_path):
    groups = read(fake(tmp_path, "fedawa", 0, rounds=3, clients=3))
    first = page.write(groups, tmp_path / "out").read_bytes()
    assert page.write(groups, tmp_path / "out").read_bytes() == first


def test_text_is_escaped(tmp_path):
    label = "<script>alert(1)</script> $x_ & --> https://example.org"
    groups = read(*(fake(tmp_path, label + end, 0, data='"><img src=x>', rounds=1, clients=3) for end in ("", "!")))
    text = page.write(groups, tmp_path / "out", title="<b>&").read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "<title>&lt;b&gt;&amp;</title>" in text
    assert len(list((tmp_path / "out" / "plots").glob("weights-*.png"))) == 2  # not one over the other


def test_diverged_run(tmp_path):
    path = fake(tmp_path, "fedawa", 0, rounds=6, clients=3)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for m in lines[4:]:
        k = len(m["clients"])
        m |= {"accuracy": math.nan, "personal_accuracy": math.nan, "loss": math.inf, "weights": [math.nan] * k,
              "coherence": math.nan}  # fmt: skip
        if "cosine" in m:
            m["cosine"] = m["model_cosine"] = [[math.nan] * k] * k
    (path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines))
    edit(path / "summary.json", accuracy=math.nan)
    text = page.write(
        read(path, fake(tmp_path, "fedavg", 0, rounds=2, clients=2, adaptive=False)), tmp_path / "out"
    ).read_text()
    assert "<td>n/a</td>" in text
    for m in lines[1:]:
        m |= {"accuracy": math.nan, "personal_accuracy": math.nan, "loss": math.nan}
    (path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines[1:]))
    groups = read(path)
    assert "accuracy" not in drawn(groups)
    assert "No run has a finite accuracy" in page.verdict(groups)


def test_one_client_one_round(tmp_path):
    groups = read(fake(tmp_path, "fedawa", 0, rounds=1, clients=1))
    assert drawn(groups) == ["accuracy", "loss", "coherence", "heterogeneity", "time"]
    page.write(groups, tmp_path / "out")


def test_many_labels_are_folded(tmp_path):
    groups = read(*(fake(tmp_path, f"m{i}", 0, rounds=3) for i in range(4)))
    folded = {d.name: d.folded for d in plots.figures(groups, report.metric_of(groups))}
    assert [name for name, is_folded in folded.items() if is_folded] == [
        f"{n}-m{i}" for n in ("weights", "cosine") for i in (1, 2, 3)
    ]


def test_nothing_to_report(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        page.write({}, tmp_path)


def test_without_matplotlib_there_is_a_table_and_a_clear_error(tmp_path, monkeypatch):
    groups = read(fake(tmp_path, "fedawa", 0, rounds=1))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("fastagg.sim.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("fastagg.sim.plots")
    assert "fedawa" in report.markdown(groups)
    with pytest.raises(ImportError, match=r"pip install '\.\[sim\]' in a clone"):
        page.write(groups, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", [report, plots])
def test_reports_are_made_without_torch(module):
    files = Path(module.__file__).parent.glob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.startswith("torch")]
    others = ("fastagg._engine.regular", "fastagg.sim.statistics", "fastagg.sim.report", "fastagg.sim.plots")
    assert not [name for name in names if name.startswith("fastagg") and not name.startswith(others)]
    assert "matplotlib.pyplot" not in names


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_page_in_a_browser(pair, tmp_path):
    groups, page = pair
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
               f"--user-data-dir={tmp_path}", page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    assert (
        done.stdout.count("<figure")
        == len(re.findall(r"</svg>\s*</div></figure>", done.stdout))
        == len(drawn(groups)) + 1
    )
