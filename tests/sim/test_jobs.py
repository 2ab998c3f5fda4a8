"""Comparisons that are stopped, two processes in one folder, and how far runs are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastagg._engine import atomic
from fastagg.cli import main
from fastagg.sim import jobs
from fastagg.sim.config import from_dict
from fastagg.sim.report import read_metrics

OPTIONS = ["--clients", "3", "--samples", "150", "--epochs", "1", "--alpha", "1", "--rounds", "1000000", "--quiet"]
PATIENCE = 600  # seconds until a test gives up; nothing is measured


def until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def comparison(tmp_path):
    """A comparison of four runs in a session of its own, two of which are at work"""
    command = [sys.executable, "-m", "fastagg", "compare", "fedavg", "simprox", "weiavg", "fedadp", *OPTIONS]
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(
            [*command, "--jobs", "2", "--out", str(tmp_path / "out")], stdout=said, stderr=said, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        metrics = [tmp_path / "out" / name / "seed-0" / "metrics.jsonl" for name in ("fedavg", "simprox")]
        until(lambda: process.poll() is not None or all(len(read_metrics(path)) > 2 for path in metrics))
        yield process
    finally:
        if is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
        return True
    except ProcessLookupError:
        return False


def test_ctrl_c_stops_all_runs_and_reports_them(comparison, tmp_path, capsys):
    out = tmp_path / "out"
    # while it is at work, nobody else may write into its folders
    assert main(["sim", "--method", "fedavg", *OPTIONS, "--out", str(out), "--resume"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "another process is writing this run" in said
    os.killpg(comparison.pid, signal.SIGINT)  # as a terminal does
    assert comparison.wait(PATIENCE) == 130
    until(lambda: not is_alive(comparison.pid))
    said = (tmp_path / "said").read_text()
    assert "Traceback" not in said
    assert "1 (1 unfinished)" in said
    assert f"stopped; continue with the same command and --out {out}" in said
    assert {path.name for path in out.iterdir()} == {"fedavg", "simprox", "plots", "report.html"}  # no other was begun
    for name in ("fedavg", "simprox"):
        folder = out / name / "seed-0"
        assert json.loads((folder / "summary.json").read_text())["finished"] is False
        rounds = [m["round"] for m in read_metrics(folder / "metrics.jsonl")]
        assert rounds == list(range(len(rounds)))
        atomic.Lock(folder / "run.lock", "this run").release()  # nobody has it


def test_a_second_signal_ends_it_at_once(comparison, tmp_path):
    def ended():
        comparison.send_signal(signal.SIGTERM)  # to the parent alone, again and again
        return comparison.poll() is not None

    until(ended)
    assert comparison.returncode == 128 + signal.SIGTERM
    until(lambda: not is_alive(comparison.pid))
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_runs_do_not_outlive_their_parent(comparison):
    comparison.kill()
    comparison.wait(PATIENCE)
    until(lambda: not is_alive(comparison.pid))


# ---- progress ----


@pytest.fixture
def progress(monkeypatch):
    """Of two runs of ten rounds, with a clock that is set by hand"""
    now = [100.0]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])
    todo = [jobs.Job(from_dict({"method": method, "rounds": 10}), Path(method)) for method in ("fedavg", "fedawa")]
    bar = jobs.Progress(todo, True)

    def show(after: float, method: str, number: int) -> None:
        now[0] += after
        bar.show(
            next(job for job in todo if job.folder == Path(method)),
            {"round": number, "accuracy": 0.5, "personal_accuracy": 0.4},
        )

    bar.test_show, bar.todo = show, todo
    return bar


def test_without_a_terminal_a_line_every_few_seconds(progress, capsys):
    progress.test_show(3, "fedavg", 1)
    assert capsys.readouterr().err == ""
    progress.test_show(4, "fedawa", 1)
    progress.test_show(4, "fedavg", 2)
    assert capsys.readouterr().err == (
        "2 of 20 rounds, 0 of 2 runs; fedavg/0 round 1: 50.0 %, fedawa/0 round 1: 50.0 %\n"
    )
    progress.end(progress.todo[0])
    progress.test_show(4, "fedawa", 2)
    assert capsys.readouterr().err == "12 of 20 rounds, 1 of 2 runs; about 48 s left, fedawa/0 round 2: 50.0 %\n"


def test_quiet_is_quiet(progress, capsys):
    progress.wanted = False
    progress.test_show(30, "fedavg", 1)
    assert capsys.readouterr().err == ""


def test_a_run_that_goes_on_counts_what_is_made_now(progress):
    progress.test_show(1, "fedavg", 8)
    assert progress.left() is None
    progress.test_show(2, "fedavg", 9)
    assert progress.left() == pytest.approx(2 * 11)


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3 s"), (89, "89 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations(seconds, text):
    assert jobs.duration(seconds) == text


SCRIPT = """
import fastagg

print("run", flush=True)


def compare():
    runs = fastagg.sim.compare(
        ["fedavg"], seeds=2, data="digits", samples=100, clients=2, rounds=1, progress=False{options}
    )
    print("made", runs is not None)


{call}
"""


@pytest.mark.parametrize(
    ("call", "options", "said", "times"),
    [
        ('if __name__ == "__main__":\n    compare()', ", jobs=2", "made True", 3),
        ("compare()", "", "made True", 1),
        ("compare()", ", jobs=2", "ValueError: jobs=2: processes for several at a time would run this script again", 1),
    ],
    ids=["guarded", "unguarded", "unguarded, two jobs"],
)
def test_a_script_is_not_run_again_from_its_start(tmp_path, call, options, said, times):
    """Except as processes load a guarded one, each once"""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(call=call, options=options))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE)
    assert said in ended.stdout + ended.stderr
    assert ended.stdout.count("run\n") == times
    assert ("UserWarning: runs are made one after another" in ended.stderr) == (
        not options and (os.cpu_count() or 1) > 1
    )
