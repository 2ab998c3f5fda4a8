"""Several methods and seeds on the same data: runs what is missing, and shows all of it in one report."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from fastagg.shards.peers import Peers
from fastagg.sim import config, page, report, run
from fastagg.sim.config import Config


def place(out: Path, options: Config) -> Path:
    """The folder of one run of a comparison"""
    name = re.sub(r"[^a-z0-9.=_+-]+", "-", options.label.lower()).strip("-")
    return out / name / f"seed-{options.seed}"


def is_done(options: Config, folder: Path) -> bool:
    """True where this very run is there already, to its end"""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        old = config.read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    run.check_same(options, old, folder)
    return summary["finished"] and old.rounds >= options.rounds


def compare(
    runs: Sequence[Config], out: Path, *, progress: bool = True, earlier: Sequence[Path] = (), jobs: int | None = None,
    peers: Peers | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Makes the runs that are not there yet, continues those that were cut short, and writes out/report.html.

    earlier   folders of runs made before, or of whole comparisons, to be shown as well
    jobs      processes that make runs side by side; default: one for every core that a run's threads leave
    peers     processes that call this together, and make one run after the other; the first of them writes the report
    """
    folders = [place(out, options) for options in runs]
    todo = [(o, f) for o, f in zip(runs, folders, strict=True) if not is_done(o, f)]
    interrupted = make_runs(todo, progress, jobs if peers is None else 1, peers)
    if peers is not None and peers.rank:
        return {"groups": {}, "report": None, "interrupted": interrupted}
    found = [f for f in folders if (f / "metrics.jsonl").exists()] + [f for path in earlier for f in runs_in(path)]
    groups = report.group([report.read_run(f) for f in dict.fromkeys(found)])
    return {"groups": groups, "report": page.write(groups, out), "interrupted": interrupted}


def make_runs(
    todo: Sequence[tuple[Config, Path]], progress: bool, jobs: int | None, peers: Peers | None = None
) -> bool:
    """True if Ctrl-C ended it"""
    if not todo:
        return False
    if jobs is None:
        jobs = (os.cpu_count() or 1) // max(options.threads for options, _ in todo)
    jobs = max(1, min(jobs, len(todo)))
    with Progress(todo, progress and (peers is None or peers.rank == 0)) as bar:
        if jobs == 1:
            results = (run.simulate(o, f, resume=True, on_round=partial(bar.show, f), peers=peers) for o, f in todo)
            return any(result["interrupted"] for result in results)
        context = multiprocessing.get_context("spawn")
        with context.Manager() as manager, ProcessPoolExecutor(jobs, mp_context=context) as pool:
            records = manager.Queue()
            waiting = {pool.submit(in_process, options, folder, records) for options, folder in todo}
            try:
                interrupted = False
                while waiting:
                    done, waiting = wait(waiting, timeout=0.3)
                    while not records.empty():
                        bar.show(*records.get())
                    interrupted |= any(future.result()["interrupted"] for future in done)
                return interrupted
            except KeyboardInterrupt:  # the runs got it too, and end with what they have
                pool.shutdown(wait=True, cancel_futures=True)
                return True


def in_process(options: Config, folder: Path, records: Any) -> dict[str, Any]:
    shown = ("round", "accuracy", "personal_accuracy")
    return run.simulate(
        options, folder, resume=True, on_round=lambda record: records.put((folder, {k: record[k] for k in shown}))
    )


def runs_in(path: Path) -> list[Path]:
    """The runs in a folder, or the folder itself if it is one"""
    found = sorted(file.parent for file in path.rglob("summary.json"))
    if not found:
        raise ValueError(f"{path}: no run of the simulator is in this folder (no summary.json)")
    return found


class Progress:
    """tqdm's bar over all rounds, with each run's accuracy; silent where it is not wanted or stderr is no terminal"""

    def __init__(self, todo: Sequence[tuple[Config, Path]], wanted: bool) -> None:
        self.bar = None
        self.at = {folder: 0 for _, folder in todo}
        self.last = {folder: options.rounds for options, folder in todo}
        self.names = {folder: f"{o.label}/{o.seed}" if len(todo) > 1 else o.label for o, folder in todo}
        self.shown: dict[Path, str] = {}
        if wanted and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=sum(self.last.values()), desc=f"{len(todo)} runs", unit="round", dynamic_ncols=True)

    def show(self, folder: Path, record: dict[str, Any]) -> None:
        if self.bar is None:
            return
        accuracy = record["personal_accuracy"] if record["accuracy"] is None else record["accuracy"]
        self.at[folder] = record["round"]  # a run that goes on does not begin at 0
        self.bar.n = sum(self.at.values())
        text = "-" if accuracy is None else f"{100 * accuracy:.1f} %"
        self.shown[folder] = f"{self.names[folder]} round {record['round']}: {text}"
        self.bar.set_postfix_str(", ".join(self.shown.values()))
        if record["round"] == self.last[folder]:
            del self.shown[folder]

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()
