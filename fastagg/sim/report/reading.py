"""Runs read back from their folders: what a file may hold, and what is said of one that holds something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastagg._engine.regular import open_regular
from fastagg.sim.report.scores import summarise


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
NAMED: Forms = {"method": is_text, "rounds": is_count, "seed": is_count}
CONFIG: Forms = NAMED | {"metric": is_text, "metric_best": lambda value: value in ("max", "min")}
PARTITION: Forms = {"counts": lambda value: is_matrix(value, is_count)}
SUMMARY: Forms = NAMED | {
    "label": is_text, "label_counts": lambda value: is_matrix(value, is_count),
    "training": is_text, "versions": lambda value: is_table(value, is_text), "accuracy": is_number,
    "personal_accuracy": is_number, "attack_success": is_number, "time": is_number, "rounds_per_second": is_number,
    "aggregation_share": is_number,
}  # fmt: skip
ROUND: Forms = {
    "round": is_count, "clients": lambda value: is_list(value, is_count), "weights": is_list, "cosine": is_matrix,
    "model_cosine": is_matrix, "seconds": is_table, "accuracy": is_number, "personal_accuracy": is_number,
    "loss": is_number, "coherence": is_number, "gamma": is_number, "train_loss": is_number, "norms": is_list,
    "step": is_number, "fedavg_step": is_number, "shrink_ratio": is_number, "heads": is_matrix,
    "attack_success": is_number, "time": is_number, "version": is_count, "staleness": is_list,
    "ideal_clients": is_list, "ideal_merged": is_number, "ideal_method": is_number,
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
    return assembled(path, config, summary, partition, metrics, rounds)


def runs_in(path: Path) -> list[Path]:
    """The runs in a folder, or the folder itself if it is one"""
    found = sorted(file.parent for file in path.rglob("summary.json"))
    if not found:
        raise ValueError(f"{path}: no run of the simulator is in this folder (no summary.json)")
    return found


def assembled(
    path: Path, config: dict[str, Any], summary: dict[str, Any], partition: dict[str, Any],
    metrics: list[dict[str, Any]], rounds: int | None = None,
) -> Run:  # fmt: skip
    """A run of its parts, with a summary that is of its last round"""
    if rounds is not None and config.get("rounds", 0) > rounds:
        config["rounds"] = rounds
        metrics = [m for m in metrics if m["round"] <= rounds] or metrics[:1]
    if summary.get("rounds") != metrics[-1]["round"]:  # rounds were left out, or the run crashed after its last summary
        now = summarise(metrics, config.get("rounds", 0), config.get("metric_best") or "max")
        summary = {k: v for k, v in summary.items() if k != "diverged"} | now
    named = {"label": config.get("method", path.name), "method": config.get("method"), "seed": config.get("seed")}
    return Run(path, config, named | summary, partition, metrics)


def read_text(path: Path, errors: str = "strict") -> str:
    """A file of a run; a FIFO in its place is an error, and not waited for"""
    with open_regular(path) as file:
        return file.read().decode("utf-8", errors)


def read_json(path: Path, forms: Forms) -> dict[str, Any]:
    try:
        value = parsed(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); repeat the run, or leave this folder out") from error
    return fitting(value, forms, str(path), "repeat the run, or leave this folder out")


def fitting(value: Any, forms: Forms, where: str, advice: str) -> dict[str, Any]:
    """An object whose values have their forms, without those that are null"""
    if wrong := _misfit(value, forms):
        raise ValueError(f"{where} holds {wrong}; {advice}")
    return {name: v for name, v in value.items() if v is not None or name not in forms}


def parsed(text: str) -> Any:
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
            record = parsed(line)
            rounds[round_of(record, clients)] = record
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break  # a crash cut it off
            raise ValueError(
                f"{path}: line {number} of {len(lines)} is not the record of a round ({error}); repeat the run, or "
                "delete this line and what follows to see the rounds before it"
            ) from error
    return [rounds[r] for r in sorted(rounds)]


def round_of(record: Any, clients: int) -> int:
    """The round that a record is of, once it is certain that it can be shown"""
    if wrong := _misfit(record, ROUND):
        raise ValueError(f"it holds {wrong}")
    if record.get("round") is None:
        raise ValueError("it has no round")
    present = record.get("clients") or []
    if clients and max(present, default=0) >= clients:
        raise ValueError(f"client {max(present)} of {clients}")
    for name in ("cosine", "model_cosine", "heads", "ideal_clients"):
        rows = record.get(name)
        square = name in ("cosine", "model_cosine")
        if rows is not None and (len(rows) != len(present) or (square and any(len(r) != len(present) for r in rows))):
            raise ValueError(f"{name} is not of the {len(present)} clients")
    return record["round"]
