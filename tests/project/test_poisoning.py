"""The benchmark of attacks from end to end on a few rounds, and its table."""

from __future__ import annotations

import pytest

from benchmarks import fedawa_steps, poisoning
from benchmarks.poisoning import Cell, Rule
from benchmarks.publish import DOCS, publish
from fastagg._engine import registry
from fastagg.sim import comparison
from fastagg.sim.choices import ATTACKS
from fastagg.sim.report import Run


def test_quick_run_and_that_it_is_not_repeated(tmp_path, capsys):
    assert poisoning.main(["--quick", "--out", str(tmp_path)]) == 0
    first = capsys.readouterr()
    title, _, head, _, fedavg, multi_krum, *_ = first.out.splitlines()
    assert title == "40 % attackers:"
    assert head == "| rule | no attack | flip | backdoor | its success | worst |"
    assert fedavg.startswith("| fedavg | ")
    assert fedavg.endswith("| diverged |")
    assert "diverged" not in multi_krum
    assert "6 runs, 0 of them made before" in first.err
    pictures = {kind: (tmp_path / f"poisoning.{kind}").read_bytes() for kind in ("png", "svg")}
    assert pictures["png"].startswith(b"\x89PNG")
    assert b"multi_krum" in pictures["svg"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert poisoning.main(["--quick", "--out", str(tmp_path)]) == 0
    again = capsys.readouterr()
    assert "6 runs, 6 of them made before" in again.err
    assert again.out == first.out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == before
    assert (tmp_path / "poisoning.svg").read_bytes() == pictures["svg"]


def test_what_runs_are_made(tmp_path):
    o = Cell(Rule("multi_krum"), "noise", 0.4).config(2)
    assert (o.attack, o.attackers, o.attack_strength, o.seed, o.options) == ("noise", 0.4, 100.0, 2, {"f": 8})
    o = Cell(Rule("krum"), "none", 0.1).config(0)
    assert (o.attack, o.attackers, o.options) == ("none", 0.0, {"f": 2})  # attackers are expected
    assert Cell(Rule("fedavg"), "min-max", 0.2).config(0).attack_strength is None
    every = [Cell(r, a, s) for r in poisoning.rules() for a in ATTACKS for s in poisoning.SHARES]
    places = {comparison.place(tmp_path, cell.config(0)) for cell in every}
    attacked = [cell for cell in every if cell.attack != "none"]
    alike = {(cell.rule, str(cell.rule.options(round(20 * cell.share)))) for cell in every}  # whoever is expected
    assert len(places) == len(attacked) + len(alike) < len(every)


def test_rules_are_those_of_the_registry():
    found = poisoning.rules()
    robust = {name for name, cls in registry.registry().items() if cls.buffers == "median"}
    assert robust >= {"krum", "multi_krum", "geometric_median", "centred_clipping"}
    assert {rule.method for rule in found} == robust | {"fedavg", "fedawa"}
    assert len(set(found)) == len(found)
    for rule in found:
        for share in poisoning.SHARES:
            made = registry.make(registry.registry()[rule.method], rule.options(round(20 * share)))
            assert made.min_clients <= 20, rule
            assert getattr(made, "f", None) in (None, round(20 * share)) or made.f < 20 * share


def run(label, seed, accuracy, success=None):
    summary = {"label": label, "seed": seed, "accuracy": accuracy, "finished": True, "diverged": accuracy is None}
    return Run(None, {}, summary | {"attack_success": success}, {}, [])


def test_table_marks_the_best_and_what_diverged():
    a, b = Rule("fedavg"), Rule("krum", mixed=True)
    found = {
        Cell(a, "none", 0.1): [run("fedavg", s, 0.9 + s / 100) for s in range(3)],
        Cell(b, "none", 0.1): [run("krum", s, 0.5) for s in range(3)],
        Cell(a, "flip", 0.1): [run("fedavg", s, None if s else 0.1) for s in range(3)],
        Cell(b, "flip", 0.1): [run("krum", s, 0.5) for s in range(3)],
        Cell(a, "backdoor", 0.1): [run("fedavg", s, 0.8, 0.75) for s in range(3)],
        Cell(b, "backdoor", 0.1): [run("krum", s, 0.4, 0.1 * s) for s in range(3)],
    }
    assert poisoning.table(found, 0.1, ("flip", "backdoor"), (a, b)).splitlines() == [
        "| rule | no attack | flip | backdoor | its success | worst |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| fedavg | **91.0** | diverged (2 of 3 seeds) | **80.0** | 75.0 | diverged |",
        "| krum + nnm | 50.0 | **50.0** | 40.0 | 10.0 | 40.0 |",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rules", "kruum"], "no rule kruum; there are "),
        (["--attacks", "alie", "all"], "no attack all; there are alie, backdoor, "),
        (["--attacks", "alie", "--write"], "a part of the tables is not for the documents"),
    ],
)
def test_a_part_of_it(arguments, message, tmp_path, capsys):
    assert poisoning.main([*arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_servers_samples_alone_are_trained_on(capsys):
    reached = []
    for rounds in (1, 4):
        reached.append(float(poisoning.alone(seeds=1, rounds=rounds).split("alone: ")[1].split(" %")[0]))
    assert 10 < reached[0] < reached[1] <= 100
    assert poisoning.main(["--alone", "--quick"]) == 0
    assert capsys.readouterr().out.startswith("the server's 100 samples alone: ")


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
