"""The benchmark of attacks from end to end on a few rounds, and its table."""

from __future__ import annotations

import pytest

from benchmarks import fedawa_steps, poisoning
from benchmarks.publish import DOCS, publish
from fastagg.sim.report import Run


def test_quick_run_and_that_it_is_not_repeated(tmp_path, capsys):
    assert poisoning.main(["--quick", "--out", str(tmp_path)]) == 0
    first = capsys.readouterr()
    head, _, fedavg, multi_krum, *_ = first.out.splitlines()
    assert head == "| method | no attack | flip 30 % |"
    assert fedavg.startswith("| fedavg | ")
    assert "diverged" in fedavg
    assert "diverged" not in multi_krum
    assert "4 runs, 0 of them made before" in first.err
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert poisoning.main(["--quick", "--out", str(tmp_path)]) == 0
    again = capsys.readouterr()
    assert "4 runs, 4 of them made before" in again.err
    assert again.out == first.out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == before


def test_what_runs_are_made():
    o = poisoning.config_of("multi_krum", ("noise", 0.3), 2, 100.0, False)
    assert (o.attack, o.attackers, o.attack_strength, o.seed, o.options) == ("noise", 0.3, 100.0, 2, {"f": 6})
    assert poisoning.config_of("krum", ("none", 0.0), 0, 100.0, False).options == {"f": 1}
    assert poisoning.config_of("centred_clipping", ("flip", 0.1), 0, 100.0, False).options == {"tau": poisoning.TAU}
    every = [poisoning.config_of(m, a, 0, 100.0, False).label for m in poisoning.METHODS for a in poisoning.ATTACKS]
    assert len(set(every)) == 49


def run(label, seed, accuracy):
    summary = {"label": label, "seed": seed, "accuracy": accuracy, "finished": True, "diverged": accuracy is None}
    return Run(None, {}, summary, {}, [])


def test_table_marks_the_best_and_what_diverged():
    runs = {
        ("none", 0.0): {"fedavg": [run("fedavg", s, 0.9 + s / 100) for s in range(3)],
                        "krum": [run("krum", s, 0.5) for s in range(3)]},
        ("flip", 0.3): {"fedavg": [run("fedavg", s, None if s else 0.1) for s in range(3)],
                        "krum": [run("krum", s, 0.5) for s in range(3)]},
    }  # fmt: skip
    assert poisoning.table(runs, ("fedavg", "krum")).splitlines() == [
        "| method | no attack | flip 30 % |",
        "| --- | ---: | ---: |",
        "| fedavg | **91.00 ± 1.00** | diverged (2 of 3 seeds) |",
        "| krum | 50.00 ± 0.00 | **50.00 ± 0.00** |",
    ]


def test_publishing_replaces_what_is_between_the_marks(tmp_path):
    page = tmp_path / "page.md"
    end = "<!-- end of a table -->"
    page.write_text(f"text\n<!-- a table -->\nold\n{end}\nmore {end}\n")
    publish(page, "a table", "new \\1\n")
    assert page.read_text() == f"text\n<!-- a table -->\n\nnew \\1\n\n{end}\nmore {end}\n"
    with pytest.raises(ValueError, match="to write between"):
        publish(page, "another table", "new")


@pytest.mark.parametrize(("page", "mark"), [("robustness.md", "poisoning table"), ("methods.md", "fedawa steps")])
def test_the_documents_have_the_marks(page, mark):
    assert (DOCS / page).read_text().count(f"<!-- {mark} -->\n") == 1


def test_a_quick_table_is_not_published(tmp_path, capsys):
    with pytest.raises(SystemExit):
        poisoning.main(["--quick", "--write", "--out", str(tmp_path)])
    assert "not for the documents" in capsys.readouterr().err


def test_quick_run_of_fedawas_steps(tmp_path, capsys):
    assert fedawa_steps.main(["--quick", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "2 runs, 0 of them made before" in said.err
    head, _, fedavg, fedawa, *_ = said.out.splitlines()
    assert head.startswith("| method | digits, alpha 0.1 |")
    assert fedavg.endswith("| 1.00 |")  # FedAvg's weights are the data shares
    assert float(fedawa.split("|")[-2]) > 1.5
