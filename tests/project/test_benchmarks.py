"""The benchmarks run from end to end on a small round, and say what they were made to say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import records, report, tables, targets

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("results") / "bench.json"
    command = [
        sys.executable, "-m", "pytest", "benchmarks", "-o", "python_files=bench_*.py", "-q", "--benchmark-quiet",
        f"--benchmark-json={path}", "-p", "no:cacheprovider", "-k",
        "resnet20-5 or resnet20-20 and not fedlaw or mlp-20",
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if "XDIST" not in key}  # where nothing is timed
    environment["FASTAGG_BENCH_SECONDS"] = "0.05"
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return path


def test_every_contestant_was_timed(results):
    record = records.find(records.load(results), "fedavg", ("resnet20", 5, "float32"))
    for contestant in ("fedavg", "R", "F", "usual loop", "torch._foreach_", "fastagg, fresh output"):
        assert record["ms"][contestant]["rounds"] >= 3
        assert 0 < record["ms"][contestant]["best"] <= record.median(contestant) <= record["ms"][contestant]["high"]


def test_tables_and_plots(results, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", "--json", str(results)])
    assert report.main() == 0
    shown = capsys.readouterr().out
    tables = (results.parent / "tables.md").read_text()
    for title in ("Targets", "FedAvg", "The Gram", "FedAWA and FedAWA-L", "Table 2", "The simulator"):
        assert title in shown
        assert f"### {title}" in tables
    for name in ("speedup", "scaling", "roofs"):
        assert (results.parent / f"{name}.png").stat().st_size > 5000
        assert "<svg" in (results.parent / f"{name}.svg").read_text()[:2000]


def test_a_missed_aim_is_called_missed():
    ms = {name: {"best": v, "low": v, "median": v, "high": v, "rounds": 5} for name, v in
          {"R": 10.0, "F": 5.0, "fedavg": 12.9, "fastagg, fresh output": 18.5}.items()}  # fmt: skip
    record = records.Record(job="fedavg", model="resnet18", K=20, dtype="float32", bytes=1, numel=1, ms=ms)
    _, _, [reached, missed], _ = targets.aims([record])
    assert reached[-1] == "reached"
    assert missed[-1] == "missed by 6 %"


def test_one_ratio_everywhere():
    """README's table, the table of methods and the plot say the same of one measurement"""
    values = {"R": 25.0, "F": 5.0, "fedawa": 50.0, "fastagg, fresh output": 60.0, "usual PyTorch": 930.0}
    ms = {name: {"best": v, "low": v, "median": v, "high": v, "rounds": 5} for name, v in values.items()}
    record = records.Record(job="fedawa", model="resnet18", K=20, dtype="float32", bytes=1, numel=1, ms=ms)
    _, _, [row], _ = tables.methods([record])
    assert "16 x" in row  # 930 / 60: both give a new model
    _, _, [row], _ = tables.front([record])
    assert row[1:6] == ["60 ms", "2.4", "930 ms", "37", "16 x"]
    figure = report.plots.speedup([record])
    assert [text.get_text() for text in figure.axes[0].texts] == ["16"]
    report.plots.plt.close(figure)


def test_the_simulator_is_compared_with_and_without_its_files():
    values = {"simulator": 40.0, "plain PyTorch": 60.0, "as PFLlib": 100.0, "files": 10.0}
    ms = {name: {"best": v, "low": v, "median": v, "high": v, "rounds": 5} for name, v in values.items()}
    phases = {
        "plain PyTorch": {"train": 50.0, "aggregate": 6.0, "evaluate": 4.0},
        "simulator": {"train": 30.0, "aggregate": 3.0, "evaluate": 7.0},
    }
    about = {"model": "mlp", "K": 20, "dtype": "float32", "bytes": 1, "numel": 1, "data": "digits", "threads": 2}
    record = records.Record(job="simulator", ms=ms, phases=phases, **about)
    _, headings, [row], _ = tables.simulator([record])
    assert row == [
        "20 x mlp, digits, 2 threads", "10.00", "16.67", "25.00 ± 0 %", "2.50 x", "1.50 x", "50 ms / 30 ms",
        "6.00 ms / 3.00 ms", "4.00 ms / 7.00 ms", "10 ms", "1.20 x",
    ]  # fmt: skip
    assert len(headings) == len(row)


def test_publishing_replaces_what_was_measured(tmp_path, monkeypatch):
    page = tmp_path / "performance.md"
    page.write_text("before\n<!-- measured -->\nold \\1 text\n<!-- end of measured -->\nafter\n")
    monkeypatch.setattr(report, "DOCS", tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- speed -->\nold\n<!-- end of speed -->\nafter\n")
    monkeypatch.setattr(report, "README", readme)
    report.publish_all("new \\g<0> text\n", "table\n", [])
    assert readme.read_text() == "before\n<!-- speed -->\n\ntable\n\n<!-- end of speed -->\nafter\n"
    assert page.read_text() == "before\n<!-- measured -->\n\nnew \\g<0> text\n\n<!-- end of measured -->\nafter\n"


def test_the_readme_has_its_figures():
    text = report.README.read_text()
    table = text.partition("<!-- speed -->\n")[2].partition("<!-- end of speed -->")[0]
    assert [line.split("|")[1].strip() for line in table.split("\n") if " x |" in line][:2] == [
        "FedAvg", "FedAWA (the default: paper)",
    ]  # fmt: skip
