"""`fastagg sim` and `fastagg compare` as a person types them."""

from __future__ import annotations

import json

import pytest

from fastagg.cli import main

SMALL = ["--clients", "4", "--rounds", "2", "--epochs", "1", "--samples", "300", "--alpha", "1", "--quiet"]


def summaries(folder):
    return {
        path.parent.relative_to(folder).as_posix(): json.loads(path.read_text())
        for path in folder.rglob("summary.json")
    }


def test_without_a_method_two_are_compared(tmp_path, capsys):
    assert main(["sim", *SMALL, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "| fedavg |" in said.replace("*", "")
    assert "| fedawa |" in said.replace("*", "")
    assert "fedawa: " in said
    assert "all at once" in said or "one by one" in said
    assert summaries(tmp_path / "run").keys() == {"fedavg/seed-0", "fedawa/seed-0"}
    page = (tmp_path / "run/report.html").read_text()
    assert "fedawa" in page
    assert str(tmp_path / "run/report.html") in said


def test_options_of_the_method_and_from_a_file(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('method = "fedawa"\nclients = 5\nrounds = 1\nsamples = 300\nepochs = 1\n[options]\nsteps = 3\n')
    assert (
        main(
            [
                "sim",
                "--config",
                str(file),
                "--opt",
                "reg=euc",
                "--clients",
                "4",
                "--out",
                str(tmp_path / "a"),
                "--quiet",
            ]
        )
        == 0
    )
    [(folder, summary)] = summaries(tmp_path / "a").items()
    assert summary["label"] == "fedawa (reg=euc, steps=3)"
    saved = json.loads((tmp_path / "a" / folder / "config.json").read_text())
    assert saved["clients"] == 4
    assert saved["samples"] == 300
    assert saved["options"] == {"steps": 3, "reg": "euc"}
    capsys.readouterr()


def test_compare_skips_what_it_has_and_shows_earlier_runs(tmp_path, capsys):
    command = ["compare", "fedavg", "fedawa:steps=2", *SMALL, "--seeds", "2", "--out", str(tmp_path / "one")]
    assert main(command) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("metrics.jsonl")}
    assert len(before) == 4
    assert main([*command[:2], "fedawa:steps=2", "fedprox", *command[3:]]) == 0
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("metrics.jsonl")}
    assert len(after) == 6
    assert all(after[path] == when for path, when in before.items())
    capsys.readouterr()
    assert (
        main(
            ["compare", "weiavg", str(tmp_path / "one/fedavg"), *SMALL, "--seeds", "2", "--out", str(tmp_path / "two")]
        )
        == 0
    )
    said = capsys.readouterr().out.replace("*", "")
    assert "| fedavg |" in said
    assert "| weiavg |" in said
    assert "+-" in said or "±" in said
    assert not (tmp_path / "two/fedavg").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sim", "--method", "fedawaa"], "no method 'fedawaa'; did you mean"),
        (["sim", "--method", "fedawa", "--opt", "steps"], "expected key=value"),
        (["sim", "--alpha", "much"], "alpha"),
        (["sim", "--resume"], "name it by --out"),
        (["sim", "--config", "nowhere.toml"], "nowhere.toml"),
        (["compare", "fedavg", "--seeds", "0"], "seeds=0"),
        (["sim", "--data", "mnist", "--data-dir", "nowhere"], "train-images"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTAGG_DATA", raising=False)
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fastagg {argv[0]}: ")
    assert message in said
    assert "Traceback" not in said


def test_a_folder_with_something_in_it_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(["sim", *SMALL, "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sim", "compare"])
def test_help_teaches(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    said = capsys.readouterr().out
    for word in ("--alpha", "--opt", "--config", "fashion-mnist", f"fastagg {name} "):
        assert word in said
