"""`fastagg sim` and `fastagg compare` as a person types them."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch

from fastagg._engine import saved
from fastagg.cli import main
from fastagg.sim.command import plan
from fastagg.sim.report import read_metrics

SMALL = [
    "--clients",
    "4",
    "--rounds",
    "2",
    "--epochs",
    "1",
    "--samples",
    "300",
    "--alpha",
    "1",
    "--quiet",
    "--jobs",
    "1",
]


def summaries(folder):
    return {
        path.parent.relative_to(folder).as_posix(): json.loads(path.read_text())
        for path in folder.rglob("summary.json")
    }


def test_without_a_method_two_are_compared(tmp_path, capsys):
    assert main(["sim", *SMALL, "--jobs", "2", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "| fedavg " in said.replace("*", "")
    assert "| fedawa " in said.replace("*", "")
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
    assert "| fedavg " in said
    assert "| weiavg " in said
    assert "+-" in said or "±" in said
    assert not (tmp_path / "two/fedavg").exists()


def test_the_same_method_twice_is_one(tmp_path, capsys):
    assert [job.options.label for job in plan("compare", {"methods": ["fedavg", "krum", "fedavg"]}).runs] == [
        "fedavg",
        "krum",
    ]
    assert main(["compare", "fedavg", "fedavg", *SMALL, "--jobs", "2", "--out", str(tmp_path / "a")]) == 0
    assert summaries(tmp_path / "a").keys() == {"fedavg/seed-0"}
    assert capsys.readouterr().out.count("| fedavg ") == 1


def test_longer_runs_are_shown_as_far_as_asked(tmp_path, capsys):
    command = ["compare", "fedavg", *SMALL, "--out", str(tmp_path / "a")]
    for rounds in ("7", "6"):
        command[command.index("--rounds") + 1] = rounds
        assert main(command) == 0
    said, page = capsys.readouterr().out, (tmp_path / "a/report.html").read_text()
    assert "6 rounds of 1 local epochs" in page
    [(folder, summary)] = summaries(tmp_path / "a").items()
    assert summary["rounds"] == 7  # what is there stays there
    curve = [m["accuracy"] for m in read_metrics(tmp_path / "a" / folder / "metrics.jsonl")]
    assert f" {100 * sum(curve[2:7]) / 5:.2f} |" in said.split("report:")[1].replace("*", "")
    assert main(["compare", "fedawa", str(tmp_path / "a"), *SMALL, "--out", str(tmp_path / "b")]) == 0
    assert "the mean of the last 2 rounds" in capsys.readouterr().out  # of both


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of FedAdam, which has a memory, and its report"""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(["sim", "--method", "fedadam", *SMALL, "--out", str(out)]) == 0
    return out


def damaged_line(path):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], *lines[2:]]) + "\n")


def without_line(path):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")


def changed(**values):
    def change(path):
        saved.save(path, saved.load(path) | values)

    return change


def as_folder(path):
    path.unlink()
    path.mkdir()


def rewritten(text):
    return lambda path: path.write_bytes(text)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("metrics.jsonl", damaged_line, "line 2 of 3 is not the record of a round"),
        ("metrics.jsonl", without_line, "lacks round 1"),
        ("metrics.jsonl", lambda path: path.unlink(), "lacks round 0"),
        ("metrics.jsonl", as_folder, "metrics.jsonl"),
        ("metrics.jsonl", rewritten(b"\xff" * 50 + b"\n[]\n"), "line 1 of 2"),
        ("config.json", rewritten(b"{"), "not the configuration of a run"),
        ("config.json", rewritten(b"[" * 100000), "not the configuration of a run"),
        ("config.json", as_folder, "config.json"),
        ("summary.json", as_folder, "summary.json"),
        ("summary.json", rewritten(b"[1]"), None),  # is written anew
        ("summary.json", rewritten(b"{}"), None),
        ("checkpoint.safetensors", as_folder, "checkpoint.safetensors"),
        ("checkpoint.safetensors", rewritten(b"no tensors"), "checkpoint.safetensors"),
        ("checkpoint.safetensors", changed(models=[{"a": torch.zeros(2)}]), "not of the run's form"),
        ("checkpoint.safetensors", changed(models=None), "checkpoint.safetensors cannot be continued"),
        ("checkpoint.safetensors", changed(model_of=[0, 0, 0, 1]), "which model each client has"),
        ("checkpoint.safetensors", changed(round="2"), "round='2'"),
        ("checkpoint.safetensors", changed(round=10**25), "lacks round 3"),
        ("checkpoint.safetensors", changed(memory=[1]), "checkpoint.safetensors cannot be continued"),
        ("checkpoint.safetensors", changed(server="x"), "checkpoint.safetensors cannot be continued"),
    ],
)
def test_damaged_folders_get_one_line(whole, name, damage, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fastagg.sim.page.write", lambda groups, out, **_: out / "report.html")
    shutil.copytree(whole, tmp_path / "run")
    damage(tmp_path / "run/fedadam/seed-0" / name)
    argv = ["sim", "--method", "fedadam", *SMALL, "--rounds", "3", "--out", str(tmp_path / "run"), "--resume"]
    code, said = main(argv), capsys.readouterr().err
    if message is None:
        assert code == 0
        return
    assert code in (1, 2)
    assert said.startswith("fastagg sim: ")
    assert said.count("\n") == 1
    assert message in said
    assert str(tmp_path / "run/fedadam/seed-0") in said


@pytest.mark.parametrize(
    ("out", "message"),
    [("file", "file is a file; --out names a folder"), ("file/run", "Not a directory"), ("/proc/run", "/proc/run")],
)
def test_folders_that_cannot_be(out, message, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(["sim", "--method", "fedavg", *SMALL, "--out", str(tmp_path / out)]) in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("fastagg sim: ")
    assert said.count("\n") == 1
    assert message in said


@pytest.mark.parametrize("when", [2, 9, 14])
def test_full_disk(when, tmp_path, capsys, monkeypatch):
    """Files are synced when they are written: one of these fails, and the run can be continued"""
    count, fsync = [0], os.fsync

    def full(fd):
        count[0] += 1
        if count[0] > when:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    argv = ["sim", "--method", "fedavg", *SMALL, "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(argv) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{tmp_path / 'run/fedavg/seed-0'}" in said
    assert said.endswith(": No space left on device\n")
    assert main([*argv, "--resume"]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sim", "--method", "fedawaa"], "no method 'fedawaa'; did you mean"),
        (["sim", "--method", "fedawa", "--opt", "steps"], "expected key=value"),
        (["sim", "--alpha", "much", "--jobs", "1"], "alpha"),
        (["sim", "--resume"], "name it by --out"),
        (
            ["sim", "--resume", "--out", "none"],
            "none has no run to resume: there is no none/fedavg/seed-0 or none/fedawa",
        ),
        (["sim", "--config", "nowhere.toml"], "nowhere.toml"),
        (["compare", "fedavg", "--seeds", "0"], "seeds=0"),
        (["compare", "fedavg", "--baseline", "fedavgg"], "baseline='fedavgg' is not in this comparison"),
        (["compare", "fedavg", "--grid", "alpha"], "--grid alpha: expected an option with values, as alpha=0.1,0.5"),
        (["compare", "fedavg", "--grid", "seed=0,1"], "seeds are not for a grid"),
        (["sim", "--data", "mnist", "--data-dir", "nowhere", "--jobs", "1"], "train-images"),
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


def test_a_folder_named_like_a_method_does_not_hide_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedavg").mkdir()
    made = plan("compare", {"methods": ["fedavg", "./fedavg"]})
    assert [job.options.method for job in made.runs] == ["fedavg"]
    assert made.earlier == [tmp_path.__class__("fedavg")]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json", "partition.json"])
def test_a_fifo_in_a_run_folder_is_not_waited_for(name, tmp_path, capsys):
    command = ["compare", "fedavg", *SMALL, "--out", str(tmp_path)]
    assert main(command) == 0
    path = tmp_path / "fedavg" / "seed-0" / name
    path.unlink()
    os.mkfifo(path)
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "fedavg"), "--out", str(tmp_path / "other")]) == 2
    assert f"{path}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--seed", "--rounds", "--threads"])
def test_numbers_beyond_reason(option, tmp_path, capsys):
    assert main(["sim", option, "9" * 30, "--out", str(tmp_path / "run")]) == 2
    assert "expected a number" in capsys.readouterr().err
