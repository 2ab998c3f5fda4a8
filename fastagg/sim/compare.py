"""Several methods and seeds on the same data: runs what is missing, and shows all of it in one report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastagg._engine.distributed.peers import Peers
from fastagg.sim import config, page, report, run
from fastagg.sim.config import Config
from fastagg.sim.jobs import make_runs


def place(out: Path, options: Config) -> Path:
    """The folder of one run of a comparison"""
    name = re.sub(r"[^a-z0-9.=_+-]+", "-", options.label.lower()).strip("-")
    return out / name / f"seed-{options.seed}"


def is_done(options: Config, folder: Path) -> bool:
    """True where this very run is there already, with as many rounds or more"""
    try:
        summary = report.read_json(folder / "summary.json", report.SUMMARY)
        old = config.read_json(folder / "config.json")
    except ValueError:
        return False  # nothing there, or damaged: simulate() says what
    run.check_same(options, old, folder)
    if summary.get("finished") is True and old.rounds >= options.rounds:
        return True
    return summary.get("rounds", 0) >= options.rounds


def compare(
    runs: Sequence[Config], out: Path, *, progress: bool = True, earlier: Sequence[Path] = (), jobs: int | None = None,
    peers: Peers | None = None, rounds: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Makes the runs that are not there yet, continues those that were cut short, and writes out/report.html, unless no
    round is there to report.

    A run that is there with more rounds than asked for is shown as far as asked.

    earlier   folders of runs made before, or of whole comparisons, to be shown as well
    jobs      processes that make runs side by side; default: one for every core that a run's threads leave
    peers     processes that call this together, and make one run after the other; the first of them writes the report
    rounds    how much to show of earlier runs; default: all
    """
    folders = [place(out, options) for options in runs]
    check_distinct(runs, folders)
    todo = [(o, f) for o, f in zip(runs, folders, strict=True) if not is_done(o, f)]
    interrupted = make_runs(todo, progress, jobs if peers is None else 1, peers)
    result = {"groups": {}, "report": None, "interrupted": interrupted}
    if peers is not None and peers.rank:
        return result
    wanted = {f: o.rounds for o, f in zip(runs, folders, strict=True) if not interrupted or has_round(f)}
    found = [f for path in earlier for f in report.runs_in(path)]
    wanted |= {f: rounds for f in found if f not in wanted}
    if wanted:
        shown = [report.read_run(folder, last) for folder, last in wanted.items()]
        result["groups"] = report.group(shown)
        result["report"] = page.write(result["groups"], out)
    return result


def has_round(folder: Path) -> bool:
    return bool(report.read_metrics(folder / "metrics.jsonl"))


def check_distinct(runs: Sequence[Config], folders: Sequence[Path]) -> None:
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            first = runs[folders.index(folder)]
            raise ValueError(f"{first.label!r} and {runs[i].label!r} would be the same run, {folder}; leave one out")
