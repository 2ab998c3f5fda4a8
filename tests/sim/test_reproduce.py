"""Recipes of the papers' tables, and `fastagg reproduce`, which runs them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from fastagg.cli import main
from fastagg.sim import recipe as recipes
from fastagg.sim.command import parser_of, plan
from fastagg.sim.report import read_run, score

NAMES = [path.stem for path in recipes.recipes()]
BOTH = [pytest.param(name, quick, id=f"{name}{'-quick' * quick}") for name in NAMES for quick in (False, True)]
TINY = """
title = "A tiny one"
paper = "Nobody, 2000"
table = "Table 0"
about = "Invented."
differs = "all of it."
takes = "seconds"
score = "best"
seeds = 2
seed = 3
ours = ["uniform"]

[options]
samples = 300
clients = 4
rounds = 3
epochs = 1
proxy = 0

[methods]
FedAvg = "fedavg"
FedProx = { method = "fedprox", mu = 0.5 }
uniform = "uniform"

[[settings]]
name = "alike"
options = { alpha = 10.0 }

[settings.paper]
FedAvg = 12.5
FedProx = "34.50 ± 0.25"

[[settings]]
name = "different"
options = { alpha = 0.2 }

[quick]
takes = "a second"
says = "one round, FedAvg only."
seeds = 1
methods = ["FedAvg"]
settings = ["different"]

[quick.options]
rounds = 1
"""


def found(name: str, quick: bool) -> recipes.Recipe:
    recipe = recipes.find(name)
    return recipe.scaled_down() if quick else recipe


@pytest.fixture
def tiny(tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(TINY, encoding="utf-8")
    return file


def cells(text: str) -> dict[tuple[str, str], list[str]]:
    """The rows of the printed table by setting and method"""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {(row[0], row[1]): row[2:] for row in rows[2:]}


def test_every_paper_has_recipes():
    assert {name.split("-")[0] for name in NAMES} == {"fedawa", "fedlaw", "cwfedavg", "simprox", "weiavg"}


@pytest.mark.parametrize(("name", "quick"), BOTH)
def test_runs_are_valid_and_distinct(name, quick):
    jobs = [job for _, _, job in found(name, quick).jobs(Path("out"))]  # making a Config checks it
    assert len({job.folder for job in jobs}) == len(jobs)
    assert {job.options.seed for job in jobs} == {jobs[0].options.seed + i for i in range(found(name, quick).seeds)}


@pytest.mark.parametrize("name", NAMES)
def test_equal_weights_are_beside_every_table(name):
    recipe = recipes.find(name)
    for kept in (recipe, recipe.scaled_down()):
        assert kept.methods["uniform"].spec == "uniform"
        assert "uniform" in recipe.ours
    printed = {method for setting in recipe.settings for method in setting.paper}
    assert not printed & set(recipe.ours)
    assert printed <= recipe.methods.keys()
    if not name.startswith("weiavg"):  # which prints curves only
        assert printed == recipe.methods.keys() - set(recipe.ours)


@pytest.mark.parametrize(("name", "quick"), BOTH)
def test_the_commands_that_are_shown_make_the_same_runs(name, quick, capsys):
    assert main(["reproduce", name, "--show", "--out", "out", *["--quick"] * quick]) == 0
    text = capsys.readouterr().out
    assert text.startswith(recipes.find(name).file.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line.startswith("fastagg compare ")]
    told = []
    for line in lines:
        told += plan("compare", vars(parser_of("compare").parse_args(shlex.split(line)[2:]))).runs
    meant = [job for _, _, job in found(name, quick).jobs(Path("out"))]
    assert sorted(told, key=lambda job: job.folder) == sorted(meant, key=lambda job: job.folder)


def test_list(capsys):
    assert main(["reproduce"]) == 0
    text = capsys.readouterr().out
    for name in NAMES:
        recipe = recipes.find(name)
        assert f"{name}\n  {recipe.title}" in text
        assert f"needs {', '.join(recipe.data)}; {recipe.takes}" in text


def test_our_numbers_beside_those_of_the_paper(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["reproduce", str(tiny), "--out", str(out), "--jobs", "1", "--quiet"]) == 0
    text = capsys.readouterr().out
    rows = cells(text)
    assert list(rows) == [(s, m) for s in ("alike", "different") for m in ("FedAvg", "FedProx", "uniform (ours)")]
    runs = [read_run(out / f"alpha=10.0/fedavg/seed-{seed}") for seed in (3, 4)]
    best = [100 * score([m["accuracy"] for m in run.metrics if m["round"]], "best") for run in runs]
    mean = sum(best) / 2
    spread = abs(best[0] - best[1]) / 2**0.5
    assert rows["alike", "FedAvg"] == ["12.50", f"{mean:.2f} ± {spread:.2f}", f"{mean - 12.5:+.2f}", "2"]
    assert rows["alike", "FedProx"][0] == "34.50 ± 0.25"
    assert rows["different", "FedProx"][0] == rows["alike", "uniform (ours)"][0] == "-"
    assert read_run(out / "alpha=0.2/fedprox/seed-3").config["mu"] == 0.5
    assert "What differs from the paper: all of it." in text
    assert "best round" in text
    assert str(out / "report.html") in text
    assert "quick" not in text


def test_quick_is_less_and_says_so_and_continues(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", str(tiny), "--quick", "--jobs", "1", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert list(cells(text)) == [("different", "FedAvg")]
    assert "one round, FedAvg only." in text
    first = tmp_path / "runs/reproduce/tiny-quick/alpha=0.2/fedavg/seed-3/metrics.jsonl"
    before = first.read_bytes()
    assert before.count(b"\n") == 2  # before training, and a round
    assert main(["reproduce", str(tiny), "--quick", "--seeds", "2", "--jobs", "1", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "Seeds: 2, where the recipe has 1." in text
    assert cells(text)["different", "FedAvg"][-1] == "2"
    assert first.read_bytes() == before  # was there already


def test_missing_data_are_said(tmp_path, capsys):
    arguments = ["reproduce", "fedlaw-table3", "--quick", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--jobs", "1", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "fashion-mnist" in said
    assert "apt-get install" in said


def test_unknown_name(capsys):
    assert main(["reproduce", "fedlaw-table33"]) == 2
    assert "no recipe 'fedlaw-table33'; did you mean 'fedlaw-table3'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "A tiny one"\n', "", "title is missing"),
        ('title = "A tiny one"', 'titel = "A tiny one"', "titel: there is no such field; did you mean 'title'?"),
        ("seeds = 2", 'seeds = "2"', "seeds = '2'; expected an integer"),
        ("seeds = 2", "seeds = 0", "seeds = 0; expected a larger number"),
        ('score = "best"', 'score = "first"', "score = 'first'; expected one of last_5"),
        ('ours = ["uniform"]', 'ours = ["unifrom"]', "ours: no 'unifrom'; did you mean 'uniform'?"),
        ('FedAvg = "fedavg"', "FedAvg = 3", "methods.FedAvg = 3; expected a method"),
        ("FedAvg = 12.5", "FedAgv = 12.5", "settings[1].paper: no 'FedAgv'; did you mean 'FedAvg'?"),
        ("FedAvg = 12.5", "uniform = 12.5", "settings[1].paper: no 'uniform'"),
        ("FedAvg = 12.5", "FedAvg = 125", "settings[1].paper.FedAvg = 125; expected a number in percent"),
        ("34.50 ± 0.25", "34.50 +- 0.25", "settings[1].paper.FedProx = '34.50 +- 0.25'; expected a number"),
        ('name = "different"', 'name = "alike"', "settings: 'alike' is there twice"),
        ('name = "different"\n', "", "settings[2].name is missing"),
        ('settings = ["different"]', 'settings = ["other"]', "quick.settings: no 'other'"),
        ('methods = ["FedAvg"]', "methods = []", "quick.methods: there is none"),
        ("rounds = 1\n", "alpha = 1.0\n", "quick.options.alpha: settings or methods set this option themselves"),
        ('says = "one round, FedAvg only."\n', "", "quick.says is missing"),
        ("clients = 4", "clients = 0", "alike, FedAvg: sim: clients=0; expected"),
        ("clients = 4", "cleints = 4", "alike, FedAvg: sim: no option 'cleints'; did you mean 'clients'?"),
        ('"fedprox", mu', '"fedprix", mu', "alike, FedProx: no method 'fedprix'"),
        ("seeds = 2", "seeds = ", "is not a TOML file"),
    ],
)
def test_a_wrong_recipe_is_named_with_its_field(old, new, said, tiny, capsys):
    assert TINY.count(old) == 1
    tiny.write_text(TINY.replace(old, new), encoding="utf-8")
    assert main(["reproduce", str(tiny), "--show"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"fastagg reproduce: {tiny}")
    assert said in message
