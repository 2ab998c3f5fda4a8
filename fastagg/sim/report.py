"""Runs read back from their folders, and the table of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

AVERAGED = 5  # rounds at the end whose mean is a run's accuracy
# What runs of one label may differ in and still be seeds of the same thing
FREE = {"seed", "data_dir", "batched", "threads"}


@dataclass(frozen=True)
class Run:
    """One folder that the simulator wrote: a method and a seed."""

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    partition: dict[str, Any]
    metrics: list[dict[str, Any]]


def read_run(path: Path) -> Run:
    """A run from its folder; one that was cut short counts as far as it went. ValueError says what is wrong with it."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; give the folder of a run, as written by `fastagg sim`")
    if not (path / "config.json").exists():
        raise ValueError(f"{path} is not a run of the simulator: it has no config.json")
    config = _read_json(path / "config.json")
    metrics = _read_metrics(path / "metrics.jsonl")
    partition = _read_json(path / "partition.json") if (path / "partition.json").exists() else {}
    summary = _read_json(path / "summary.json") if (path / "summary.json").exists() else {}
    last = metrics[-1]["round"]
    if summary.get("rounds") != last:  # a crash: the summary is missing, or older than the metrics
        personal = metrics[-1].get("accuracy") is None
        summary = summary | {
            "rounds": last, "finished": last >= config.get("rounds", last), "personal": personal,
            "accuracy": _average(metrics, "personal_accuracy" if personal else "accuracy"),
            "personal_accuracy": _average(metrics, "personal_accuracy"),
        }  # fmt: skip
    named = {"label": config.get("method", path.name), "method": config.get("method"), "seed": config.get("seed")}
    return Run(path, config, named | summary, partition, metrics)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); repeat the run, or leave this folder out") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected an object; repeat the run")
    return value


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    rounds: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            rounds[int(record["round"])] = record
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break  # a crash cut it off
            raise ValueError(
                f"{path}: line {number} of {len(lines)} is not the record of a round ({error}); repeat the run, or "
                "delete this line and what follows"
            ) from error
    if not rounds:
        raise ValueError(f"{path.parent} has no metrics yet: not one round is recorded in {path.name}")
    return [rounds[r] for r in sorted(rounds)]


def _average(metrics: list[dict[str, Any]], key: str) -> float | None:
    values = [m[key] for m in metrics if m["round"] > 0 and m.get(key) is not None]
    return mean(values[-AVERAGED:]) if values else None


def group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The seeds of each label together, in order of first appearance.

    Runs of one label that differ in more than their seed (say, in alpha) are told apart by it: `fedawa, alpha=0.1`.
    ValueError where a seed comes twice: it would look like less noise than there is.
    """
    labels: dict[str, list[Run]] = {}
    for run in runs:
        labels.setdefault(run.summary["label"], []).append(run)
    groups: dict[str, list[Run]] = {}
    for label, members in labels.items():
        told_by = sorted(name for name, values in options_of(members).items() if name not in FREE and len(values) > 1)
        for run in members:
            name = ", ".join([label, *(f"{key}={run.config[key]}" for key in told_by)])
            twin = next((r for r in groups.get(name, ()) if r.summary.get("seed") == run.summary.get("seed")), None)
            if twin is None:
                groups.setdefault(name, []).append(run)
            elif twin.path.resolve() != run.path.resolve():
                seed = run.summary.get("seed")
                raise ValueError(f"{name}, seed {seed}, comes twice: {twin.path} and {run.path}; leave one out")
    return groups


def options_of(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The values that each option of these runs has; options that only some of them know are left out"""
    names = [name for name in runs[0].config if all(name in run.config for run in runs)]
    return {n: list({json.dumps(r.config[n], sort_keys=True): r.config[n] for r in runs}.values()) for n in names}


def measure(groups: dict[str, list[Run]]) -> str:
    """What labels are compared by: where one of them has no global model, all by their clients' own test shares"""
    personal = any(run.summary.get("personal") for runs in groups.values() for run in runs)
    return "personal_accuracy" if personal else "accuracy"


def table(groups: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """One row per label, in the groups' order:

    label, runs    runs is the number of seeds
    mean, std      of the seeds' accuracy (each the mean of its last 5 rounds), as a share of 1; std is the sample's,
                   with n - 1, and None for one seed; mean is None where a run has no finite accuracy
    whole          where labels are compared by personal accuracy: (mean, std) on the whole test set, or None
    best           the highest mean
    within_noise   the difference to the best is at most twice its standard error over seeds:
                   |mean_a - mean_b| <= 2 sqrt(std_a^2 / n_a + std_b^2 / n_b); never claimed where either has one seed
    unfinished     number of runs cut short
    rounds_per_second, aggregation_share    means over seeds, or None
    """
    by = measure(groups)
    rows = []
    for label, runs in groups.items():
        average, std = _spread([_accuracy(run, by) for run in runs])
        rows.append({
            "label": label, "runs": len(runs), "mean": average, "std": std, "best": False, "within_noise": False,
            "whole": _spread([_accuracy(run, "accuracy") for run in runs]) if by != "accuracy" else None,
            "unfinished": sum(not run.summary.get("finished", False) for run in runs),
            "rounds_per_second": _spread([run.summary.get("rounds_per_second") for run in runs])[0],
            "aggregation_share": _spread([run.summary.get("aggregation_share") for run in runs])[0],
        })  # fmt: skip
    valid = [row for row in rows if row["mean"] is not None]
    if valid:
        best = max(valid, key=lambda row: row["mean"])
        best["best"] = True
        for row in valid:
            if row is not best and row["std"] is not None and best["std"] is not None:
                noise = 2 * math.sqrt(row["std"] ** 2 / row["runs"] + best["std"] ** 2 / best["runs"])
                row["within_noise"] = best["mean"] - row["mean"] <= noise
    return rows


def _accuracy(run: Run, by: str) -> float | None:
    personal = bool(run.summary.get("personal"))
    if personal and by == "accuracy":
        return None
    if personal == (by == "personal_accuracy"):
        return run.summary.get("accuracy")
    return _average(run.metrics, by)


def _spread(values: list[float | None]) -> tuple[float | None, float | None]:
    if not values or any(v is None or not math.isfinite(v) for v in values):
        return None, None
    return mean(values), stdev(values) if len(values) > 1 else None


def percent(average: float | None, std: float | None) -> str:
    if average is None:
        return "n/a"
    return f"{100 * average:.2f}" + (f" ± {100 * std:.2f}" if std is not None else "")


def cells_of(groups: dict[str, list[Run]]) -> tuple[list[str], list[tuple[dict[str, Any], list[str]]], list[str]]:
    """Headings, rows of the table with their cells, and the notes that explain them"""
    rows, personal = table(groups), measure(groups) != "accuracy"
    headings = ["method", "personal accuracy, %" if personal else "accuracy, %"]
    headings += ["on the whole test set, %"] if personal else []
    headings += ["seeds", "rounds/s", "time in aggregation, %"]
    lines = []
    for row in rows:
        cells = [row["label"], ("≈ " if row["within_noise"] else "") + percent(row["mean"], row["std"])]
        cells += [percent(*row["whole"]) if row["whole"][0] is not None else "-"] if personal else []
        cells += [str(row["runs"]) + (f" ({row['unfinished']} unfinished)" if row["unfinished"] else "")]
        speed, share = row["rounds_per_second"], row["aggregation_share"]
        cells += ["-" if speed is None else f"{speed:.3g}", "-" if share is None else f"{100 * share:.2g}"]
        lines.append((row, cells))
    several = any(row["runs"] > 1 for row in rows)
    notes = [f"Mean of the last {AVERAGED} rounds" + ("; ± is the standard deviation over seeds." if several else ".")]
    if personal:
        notes.append("Personal accuracy is each client's model on that client's own test share, averaged over clients.")
    if len(rows) > 1:
        notes.append("Bold is the best.")
    if any(row["within_noise"] for row in rows):
        notes.append("≈ is within noise of it: the difference is at most twice its standard error.")
    if len(rows) > 1 and any(row["runs"] == 1 for row in rows):
        notes.append("With one seed nothing can be said about noise.")
    if any(row["mean"] is None for row in rows):
        notes.append("n/a: a run has no finite accuracy, it diverged or has no round yet.")
    return headings, lines, notes


def markdown(groups: dict[str, list[Run]]) -> str:
    """The table as markdown, and a line that explains its marks"""
    headings, lines, notes = cells_of(groups)
    text = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for row, cells in lines:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
        if row["best"] and len(lines) > 1:
            cells[:2] = [f"**{cell}**" for cell in cells[:2]]
        text.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in text) + "\n\n" + " ".join(notes) + "\n"
