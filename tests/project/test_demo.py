"""make demo: what it says is what was measured."""

from __future__ import annotations

import html
import json
import re

import pytest

from benchmarks import demo, demo_speed, demo_training
from benchmarks.demo_training import CONDITIONS, METHODS, Cell
from fastagg.sim.config import from_dict


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a small one, in which time is up at once: the first seed is made nevertheless, and no other"""
    out = tmp_path_factory.mktemp("demo") / "new"
    arguments = "--seeds 2 --rounds 2 --seconds 0 --jobs 1 --model resnet20 --clients 7"
    assert demo.main([*arguments.split(), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def text(out):
    """Of the page, without its marks"""
    return html.unescape(re.sub("<[^>]+>", "", (out / "report.html").read_text()))


def test_the_table_has_what_the_runs_came_to(out, text):
    whole = [json.loads(path.read_text()) for path in out.glob("*/*/seed-0/summary.json")]
    assert len(whole) == len(CONDITIONS) * len(METHODS)
    assert all(summary["rounds"] == 2 for summary in whole)
    for method in METHODS:
        [row] = re.findall(rf"^. {method} .*", text, re.MULTILINE)
        expected = sorted(f"{100 * s['accuracy']:.1f}" for s in whole if s["method"] == method)
        assert sorted(re.findall(r"([0-9.]+)\s%", row)) == expected
    assert "One seed" in text


def test_what_is_there_already_is_not_removed(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SystemExit):
        demo.main(["--out", str(tmp_path)])
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_nan_is_shown_for_what_it_is(text):
    assert "the new model has NaN in layer2.0.conv1.weight" in text
    assert "NonFiniteError: client 3 (id 'hospital-4')" in text
    assert "4 clients aggregated; the model is finite; result.dropped names hospital-4" in text


def test_there_is_something_to_look_at(out, text):
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert '<img src="accuracy.png"' in (out / "report.html").read_text()
    assert re.search(r"FedAWA . +[0-9.]+ (ms|s) ", text)


@pytest.mark.parametrize("busy", [False, True])
def test_a_busy_machine_has_no_ratios(busy, monkeypatch):
    """Times in which other programs had the processor are not compared"""
    monkeypatch.setattr(demo_speed, "SHARE", 1e9 if busy else 0)
    screen = demo.Screen()
    table, said = demo_speed.compare(screen.console, "resnet20", 7, 0)
    screen.copy.print(table)
    text = screen.copy.export_text()
    assert bool(re.search(r"FedAvg .* \? ", text)) == busy
    assert bool(re.search(r"FedAvg .*[0-9] x ", text)) != busy
    assert (said == [demo_speed.BUSY]) == busy
    assert any("Time in reads" in line for line in said) != busy


def test_words_follow_the_numbers():
    cells = {(c, m): Cell(50.0, 50.0, 50.0) for c in CONDITIONS for m in METHODS}
    honest, wrong, hostile = CONDITIONS
    cells[honest, "fedavg"] = Cell(90.0, 89.0, 91.0)
    cells[wrong, "flame"] = Cell(80.5, 70.0, 85.0)
    cells[hostile, "fedavg"] = Cell(None, 0.0, 0.0)
    cells[wrong, "fedavg"] = Cell(51.9, 51.9, 51.9)
    first, *others, last = demo_training.words(cells, 3)
    assert first == (
        f"The best: fedavg where {honest}; flame where {wrong}; fedawa where {hostile}. No method is best everywhere."
    )
    assert len(others) == len(METHODS) - 1
    said = "worse where all are honest (-40.0), as good where 6 have wrong labels (-1.9), better where 6 are hostile"
    assert f"fedawa, against fedavg: {said} (+50.0)." in others
    assert last == f"Means of 3 seeds, which differ most for flame where {wrong}: 70.0 to 85.0\u00a0%."
    best = {key: Cell(95.0, 95.0, 95.0) if key[1] == "flame" else cell for key, cell in cells.items()}
    assert "everywhere" not in demo_training.words(best, 1)[0]


def test_a_curve_in_a_line():
    assert demo_training.spark([0, 50, 100]) == "▁▄█"
    assert len(demo_training.spark([50.0] * 31)) == demo_training.WIDTH
    assert demo_training.spark([0.0] * 30 + [100.0])[0] == "▁"


def test_every_condition_can_be_typed():
    """fastagg sim has all of it"""
    for more in CONDITIONS.values():
        from_dict({**demo_training.SHARED, **more})
