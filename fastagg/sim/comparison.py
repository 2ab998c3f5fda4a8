"""Several methods and seeds on the same data: runs what is missing, and shows all of it in one report."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastagg._engine.distributed.peers import Peers
from fastagg.sim import config, page, report
from fastagg.sim.config import Config
from fastagg.sim.jobs import Job, OnRound, make_runs
from fastagg.sim.stores import check_same


def place(out: Path, options: Config, point: Mapping[str, Any] | None = None) -> Path:
    """The folder of one run of a comparison; point: of a grid of options, whose runs have a folder of their own"""
    name = re.sub(r"[^a-z0-9.=_+-]+", "-", options.label.lower()).strip("-")
    setting = re.sub(r"[^a-zA-Z0-9.=_+,-]+", "-", ",".join(f"{key}={value}" for key, value in (point or {}).items()))
    return out / setting / name / f"seed-{options.seed}"


def points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values that a grid gives to options"""
    lists: dict[str, list[Any]] = {}
    for name, values in grid.items():
        if name in ("seed", "method"):
            raise ValueError(f"grid: {name}s are not for a grid; a comparison has {name}s of its own")
        lists[name] = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
        if not lists[name]:
            raise ValueError(f"grid: {name}={values!r}; expected a list of the values that it takes")
    return [dict(zip(lists, chosen, strict=True)) for chosen in itertools.product(*lists.values())]


def is_done(options: Config, folder: Path) -> bool:
    """True where this very run is there already, with as many rounds or more"""
    try:
        summary = report.read_json(folder / "summary.json", report.SUMMARY)
        old = config.read_json(folder / "config.json")
    except ValueError:
        return False  # nothing there, or damaged: simulate() says what
    check_same(options, old, folder)
    if summary.get("finished") is True and old.rounds >= options.rounds:
        return True
    return summary.get("rounds", 0) >= options.rounds


def make(
    todo: Sequence[Job], *, progress: bool = True, jobs: int | None = None, callbacks: Sequence[OnRound] = (),
    peers: Peers | None = None,
) -> bool:  # fmt: skip
    """Makes the runs that are not there yet, and continues those that were cut short. True if Ctrl-C ended it."""
    check_distinct(todo)
    return make_runs([job for job in todo if not is_done(*job[:2])], progress, jobs, peers, callbacks)


def compare(
    todo: Sequence[Job], out: Path, *, progress: bool = True, earlier: Sequence[Path] = (), jobs: int | None = None,
    peers: Peers | None = None, rounds: int | None = None, baseline: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Makes the runs that are not there yet, continues those that were cut short, and writes out/report.html, unless no
    round is there to report.

    A run that is there with more rounds than asked for is shown as far as asked.

    earlier   folders of runs made before, or of whole comparisons, to be shown as well
    jobs      processes that make runs side by side; default: one for every core that a run's threads leave
    peers     processes that call this together, and make one run after the other; the first of them writes the report
    rounds    how much to show of earlier runs; default: all
    baseline  the label that others are compared with; default: fedavg, or the first
    """
    if not earlier:
        check_baseline(baseline, todo)
    interrupted = make(todo, progress=progress, jobs=jobs if peers is None else 1, peers=peers)
    result = {"groups": {}, "report": None, "interrupted": interrupted}
    if peers is not None and peers.rank:
        return result
    wanted = {job.folder: job.options.rounds for job in todo if not interrupted or has_round(job.folder)}
    found = [f for path in earlier for f in report.runs_in(path)]
    wanted |= {f: rounds for f in found if f not in wanted}
    if wanted:
        shown = [report.read_run(folder, last) for folder, last in wanted.items()]
        result["groups"] = report.group(shown)
        result["report"] = page.write(result["groups"], out, baseline=baseline)
    return result


def has_round(folder: Path) -> bool:
    return bool(report.read_metrics(folder / "metrics.jsonl"))


def check_baseline(baseline: str | None, todo: Sequence[Job]) -> None:
    """That one of these runs is of it, before any of them is made. It may have words more than a label, of options that
    runs of one label differ in."""
    labels = list(dict.fromkeys(job.options.label for job in todo))
    if baseline is not None and not any(f"{baseline},".startswith(f"{label},") for label in labels):
        raise ValueError(f"baseline={baseline!r} is not in this comparison; expected one of {', '.join(labels)}")


def check_distinct(todo: Sequence[Job]) -> None:
    first: dict[Path, Job] = {}
    for job in todo:
        if first.setdefault(job.folder, job) is not job:
            labels = f"{first[job.folder].options.label!r} and {job.options.label!r}"
            raise ValueError(f"{labels} would be the same run, {job.folder}; leave one out")
