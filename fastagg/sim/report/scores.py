"""What a run came to: its curve, and the numbers that sum it up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

AVERAGED = 5  # rounds at the end whose mean is a run's accuracy, if it has as many
PHASES = ("train", "aggregate", "evaluate")  # of a round
# What a run is summed up by, in words. A run with fewer rounds counts with those that it has.
SCORES = {
    "last_5": "mean of the last 5 rounds",
    "last_10": "mean of the last 10 rounds",
    "best": "best round",
    "best_10": "mean of the ten best rounds",
}


def curve(metrics: Sequence[dict[str, Any]], key: str) -> list[float]:
    """The values after each round; not of the untrained model"""
    return [m[key] for m in metrics if m["round"] > 0 and m.get(key) is not None]


def score(values: Sequence[float], name: str, best: str = "max") -> float | None:
    """One of SCORES of a curve; None where it is empty. best: "max" or "min", which of two values is the better.

    A value that is not finite spoils the mean of the rounds it is among. It is never among the best.
    """
    if name not in SCORES:
        raise ValueError(f"score={name!r}; expected one of {', '.join(SCORES)}")
    if name in ("last_5", "last_10"):
        last = values[-5 if name == "last_5" else -10 :]
        return mean(last) if last else None
    ranked = sorted((x for x in values if math.isfinite(x)), reverse=best == "max")
    top = ranked[: 1 if name == "best" else 10]
    return mean(top) if top else None


def summarise(metrics: Sequence[dict[str, Any]], planned: int, best: str = "max") -> dict[str, Any]:
    """What a run of so many planned rounds has come to, from its records; best: see score()"""
    personal = metrics[-1].get("accuracy") is None
    values = curve(metrics, "personal_accuracy" if personal else "accuracy")
    seconds, count = spent(metrics)
    total = sum(seconds.values())
    success = curve(metrics, "attack_success")
    return {
        "rounds": metrics[-1]["round"], "finished": metrics[-1]["round"] >= planned, "personal": personal,
        "accuracy": score(values, "last_5"), "accuracy_last": values[-1] if values else None,
        "accuracy_last_10": score(values, "last_10"), "accuracy_best": score(values, "best", best),
        "accuracy_best_10": score(values, "best_10", best),
        "personal_accuracy": score(curve(metrics, "personal_accuracy"), "last_5"),
        **({"attack_success": score(success, "last_5")} if success else {}),
        **({"time": metrics[-1]["time"]} if metrics[-1].get("time") is not None else {}),
        "seconds": seconds | {"total": total}, "rounds_per_second": count / total if total else None,
        "aggregation_share": seconds["aggregate"] / total if total else None,
    }  # fmt: skip


def spent(metrics: Sequence[dict[str, Any]]) -> tuple[dict[str, float], int]:
    """Seconds by phase of all rounds, and the number of rounds. Rounds/s is the second over the sum of the first
    everywhere: what a run does between rounds, and runs at its side, do not count."""
    rows = [m["seconds"] for m in metrics if m["round"] > 0 and m.get("seconds")]
    return {phase: sum(row.get(phase) or 0.0 for row in rows) for phase in PHASES}, len(rows)
