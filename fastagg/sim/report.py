"""Runs read back from their folders, and the table of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fastagg._engine.regular import open_regular

AVERAGED = 5  # rounds at the end whose mean is a run's accuracy, if it has as many
PHASES = ("train", "aggregate", "evaluate")  # of a round
# What runs of one label may differ in and still be seeds of the same thing
FREE = {"seed", "data_dir", "batched", "threads"}


@dataclass(frozen=True)
class Run:
    """What is known of one run of the simulator: a method and a seed."""

    path: Path | None  # its folder, if it has one
    config: dict[str, Any]
    summary: dict[str, Any]
    partition: dict[str, Any]
    metrics: list[dict[str, Any]]


# What is shown of each file, and the form it has there; it may be missing or null


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    return is_number(value) and isinstance(value, int) and value >= 0


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value == value.encode(errors="replace").decode()  # no half of a surrogate pair


def is_list(value: Any, of: Callable[[Any], bool] = is_number) -> bool:
    return isinstance(value, list) and all(map(of, value))


def is_matrix(value: Any, of: Callable[[Any], bool] = is_number) -> bool:
    return is_list(value, lambda row: is_list(row, of)) and len({len(row) for row in value}) <= 1


def is_table(value: Any, of: Callable[[Any], bool] = is_number) -> bool:
    return isinstance(value, dict) and all(map(of, value.values()))


Forms = dict[str, Callable[[Any], bool]]
CONFIG: Forms = {"method": is_text, "rounds": is_count, "seed": is_count}
PARTITION: Forms = {"counts": lambda value: is_matrix(value, is_count)}
SUMMARY: Forms = CONFIG | {
    "label": is_text, "training": is_text, "versions": lambda value: is_table(value, is_text),
    "accuracy": is_number, "personal_accuracy": is_number, "rounds_per_second": is_number,
    "aggregation_share": is_number,
}  # fmt: skip
ROUND: Forms = {
    "round": is_count, "clients": lambda value: is_list(value, is_count), "weights": is_list, "cosine": is_matrix,
    "model_cosine": is_matrix, "seconds": is_table, "accuracy": is_number, "personal_accuracy": is_number,
    "loss": is_number, "coherence": is_number, "gamma": is_number,
}  # fmt: skip


def read_run(path: Path, rounds: int | None = None) -> Run:
    """A run from its folder; one that was cut short counts as far as it went. ValueError says what is wrong with it.

    rounds   what comes after this round is left out, as if the run had ended there; default: nothing
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; give the folder of a run, as written by `fastagg sim`")
    if not (path / "config.json").exists():
        raise ValueError(f"{path} is not a run of the simulator: it has no config.json")
    config = read_json(path / "config.json", CONFIG)
    partition = read_json(path / "partition.json", PARTITION) if (path / "partition.json").exists() else {}
    metrics = read_metrics(path / "metrics.jsonl", len(partition.get("counts") or []))
    if not metrics:
        raise ValueError(f"{path} has no metrics yet: not one round is recorded in metrics.jsonl")
    summary = read_json(path / "summary.json", SUMMARY) if (path / "summary.json").exists() else {}
    if rounds is not None and config.get("rounds", 0) > rounds:
        config["rounds"] = rounds
        metrics = [m for m in metrics if m["round"] <= rounds] or metrics[:1]
    if summary.get("rounds") != metrics[-1]["round"]:  # rounds were left out, or the run crashed after its last summary
        summary = {k: v for k, v in summary.items() if k != "diverged"} | summarise(metrics, config.get("rounds", 0))
    named = {"label": config.get("method", path.name), "method": config.get("method"), "seed": config.get("seed")}
    return Run(path, config, named | summary, partition, metrics)


def summarise(metrics: Sequence[dict[str, Any]], planned: int) -> dict[str, Any]:
    """What a run of so many planned rounds has come to, from its records"""
    personal = metrics[-1].get("accuracy") is None
    curve = _curve(metrics, "personal_accuracy" if personal else "accuracy")
    seconds, count = spent(metrics)
    total = sum(seconds.values())
    return {
        "rounds": metrics[-1]["round"], "finished": metrics[-1]["round"] >= planned, "personal": personal,
        "accuracy": _average(curve), "accuracy_last": curve[-1] if curve else None,
        "accuracy_best": max(curve, default=None),
        "personal_accuracy": _average(_curve(metrics, "personal_accuracy")),
        "seconds": seconds | {"total": total}, "rounds_per_second": count / total if total else None,
        "aggregation_share": seconds["aggregate"] / total if total else None,
    }  # fmt: skip


def spent(metrics: Sequence[dict[str, Any]]) -> tuple[dict[str, float], int]:
    """Seconds by phase of all rounds, and the number of rounds. Rounds/s is the second over the sum of the first
    everywhere: what a run does between rounds, and runs at its side, do not count."""
    rows = [m["seconds"] for m in metrics if m["round"] > 0 and m.get("seconds")]
    return {phase: sum(row.get(phase) or 0.0 for row in rows) for phase in PHASES}, len(rows)


def read_text(path: Path, errors: str = "strict") -> str:
    """A file of a run; a FIFO in its place is an error, and not waited for"""
    with open_regular(path) as file:
        return file.read().decode("utf-8", errors)


def read_json(path: Path, forms: Forms) -> dict[str, Any]:
    try:
        value = _parsed(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); repeat the run, or leave this folder out") from error
    if wrong := _misfit(value, forms):
        raise ValueError(f"{path} holds {wrong}; repeat the run, or leave this folder out")
    return {name: v for name, v in value.items() if v is not None or name not in forms}


def _parsed(text: str) -> Any:
    """JSON; whole numbers of more than 18 digits are floats, for they have to be shown"""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))


def _misfit(value: Any, forms: Forms) -> str:
    """What is not of its form, if anything"""
    if not isinstance(value, dict):
        return f"a {type(value).__name__}, expected an object"
    wrong = (name for name, fits in forms.items() if value.get(name) is not None and not fits(value[name]))
    return next((f"{name} = {str(value[name])[:60]!r}" for name in wrong), "")


def read_metrics(path: Path, clients: int = 0) -> list[dict[str, Any]]:
    """The rounds recorded, in order, of a run with so many clients (0: unknown). A last line that a crash cut off is
    left out; any other line that is not a round's is an error."""
    try:
        lines = read_text(path, errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); repeat the run, or leave this folder out") from error
    rounds: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = _parsed(line)
            rounds[_number_of(record, clients)] = record
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break  # a crash cut it off
            raise ValueError(
                f"{path}: line {number} of {len(lines)} is not the record of a round ({error}); repeat the run, or "
                "delete this line and what follows to see the rounds before it"
            ) from error
    return [rounds[r] for r in sorted(rounds)]


def _number_of(record: Any, clients: int) -> int:
    """The round that a record is of, once it is certain that it can be shown"""
    if wrong := _misfit(record, ROUND):
        raise ValueError(f"it holds {wrong}")
    if record.get("round") is None:
        raise ValueError("it has no round")
    present = record.get("clients") or []
    if clients and max(present, default=0) >= clients:
        raise ValueError(f"client {max(present)} of {clients}")
    for name in ("cosine", "model_cosine"):
        matrix = record.get(name)
        if matrix is not None and (len(matrix) != len(present) or any(len(row) != len(present) for row in matrix)):
            raise ValueError(f"{name} is not of the {len(present)} clients")
    return record["round"]


def _curve(metrics: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [m[key] for m in metrics if m["round"] > 0 and m.get(key) is not None]


def _average(curve: list[float]) -> float | None:
    return mean(curve[-AVERAGED:]) if curve else None


def averaged(groups: dict[str, list[Run]]) -> str:
    """Which rounds a run's accuracy is of, in words"""
    by = measure(groups)
    counts = {len(_curve(run.metrics, by)[-AVERAGED:]) for runs in groups.values() for run in runs} - {0}
    if counts <= {1}:
        return "the last round"
    few, many = min(counts), max(counts)
    return f"mean of the last {many} rounds" if few == many else f"mean of the last {few} to {many} rounds"


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
            elif twin.path is None or run.path is None or twin.path.resolve() != run.path.resolve():
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
    mean, std      of the seeds' accuracy (each the mean of its last 5 rounds, or of what it has), as a share of 1; std
                   is the sample's, with n - 1, and None for one seed; mean is None where a run has no finite accuracy
    whole          where labels are compared by personal accuracy: (mean, std) on the whole test set, or None
    best           the highest mean, or one that is printed alike
    within_noise   the difference to the best is at most twice its standard error over seeds:
                   |mean_a - mean_b| <= 2 sqrt(std_a^2 / n_a + std_b^2 / n_b); never claimed where either has one seed
    unfinished     number of runs cut short
    rounds_per_second, aggregation_share    over all seeds' rounds, see spent(); None where no time is recorded
    """
    by = measure(groups)
    rows = []
    for label, runs in groups.items():
        average, std = _spread([_accuracy(run, by) for run in runs])
        seconds, count = spent([m for run in runs for m in run.metrics])
        total = sum(seconds.values())
        timed = 0 < total < math.inf
        rows.append({
            "label": label, "runs": len(runs), "mean": average, "std": std, "best": False, "within_noise": False,
            "whole": _spread([_accuracy(run, "accuracy") for run in runs]) if by != "accuracy" else None,
            "unfinished": sum(not run.summary.get("finished", False) for run in runs),
            "rounds_per_second": count / total if timed else None,
            "aggregation_share": seconds["aggregate"] / total if timed else None,
        })  # fmt: skip
    valid = [row for row in rows if row["mean"] is not None]
    if valid:
        best = max(valid, key=lambda row: row["mean"])
        for row in valid:
            row["best"] = percent(row["mean"], None) == percent(best["mean"], None)
            if not row["best"] and row["std"] is not None and best["std"] is not None:
                noise = 2 * math.hypot(*(r["std"] / math.sqrt(r["runs"]) for r in (row, best)))
                row["within_noise"] = best["mean"] - row["mean"] <= noise
    return rows


def _accuracy(run: Run, by: str) -> float | None:
    personal = bool(run.summary.get("personal"))
    if personal and by == "accuracy":
        return None
    if personal == (by == "personal_accuracy"):
        return run.summary.get("accuracy")
    return _average(_curve(run.metrics, by))


def _spread(values: list[float | None]) -> tuple[float | None, float | None]:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if not finite or len(finite) < len(values):
        return None, None
    return mean(finite), stdev(finite) if len(finite) > 1 else None


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
    rounds = averaged(groups)
    notes = [rounds[0].upper() + rounds[1:] + ("; ± is the standard deviation over seeds." if several else ".")]
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
