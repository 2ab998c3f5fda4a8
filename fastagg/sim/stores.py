"""Where a run keeps what is known of it: its options, partition, metrics, checkpoint and summary."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fastagg._engine import atomic
from fastagg._engine.saved import NewerFormat, load, save
from fastagg.sim import config
from fastagg.sim.config import Config
from fastagg.sim.report import read_metrics
from fastagg.sim.simulation import Simulation


def facts_of(sim: Simulation) -> dict[str, Any]:
    """What does not change from round to round"""
    parts = sim.parts
    return {
        "counts": parts.counts.tolist(), "test_sizes": [len(rows) for rows in parts.test],
        "proxy": len(sim.proxy[0]), "classes": sim.data.classes, "attackers": sim.attackers,
    }  # fmt: skip


def before_training(sim: Simulation) -> dict[str, Any]:
    return {"round": 0, "clients": [], "seconds": {}} | sim.times | sim.evaluated()


class InMemory:
    """Nothing is written, and nothing can be continued"""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.partition: dict[str, Any] = {}

    def begin(self, options: Config, sim: Simulation) -> int:
        """Returns the number of rounds that are planned"""
        self.partition = facts_of(sim)
        self.metrics.append(before_training(sim))
        return options.rounds

    def add(self, record: dict[str, Any], sim: Simulation) -> None:
        self.metrics.append(record)

    def conclude(self, summary: dict[str, Any]) -> None:
        pass


class InFolder:
    """Every round is on disk when the next begins"""

    def __init__(self, out: Path, resume: bool) -> None:
        self.out, self._metrics, self._saved = out, out / "metrics.jsonl", out / "checkpoint.safetensors"
        self.resumed = resume and self._saved.exists()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self._metrics)

    def load(self, sim: Simulation) -> None:
        """Continues a former run"""
        try:
            sim.load_state_dict(load(self._saved))
        except NewerFormat:
            raise  # nothing is wrong with the run
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError) as error:
            what = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else error
            raise ValueError(
                f"{self._saved} cannot be continued ({what}); delete {self.out}, or name another folder"
            ) from error

    def begin(self, options: Config, sim: Simulation) -> int:
        """Returns the number of rounds that are planned"""
        if self.resumed:
            keep_rounds(self._metrics, sim.round)
            planned = max(options.rounds, config.read_json(self.out / "config.json").rounds)  # never fewer
            atomic.write_json(self.out / "config.json", options.to_json() | {"rounds": planned})
            return planned
        atomic.write_json(self.out / "config.json", options.to_json())  # first: no checkpoint without its options
        self._metrics.unlink(missing_ok=True)
        atomic.write_json(self.out / "partition.json", facts_of(sim))
        self.add(before_training(sim), sim)
        return options.rounds

    def add(self, record: dict[str, Any], sim: Simulation) -> None:
        append(self._metrics, record)
        save(self._saved, sim.state_dict())

    def conclude(self, summary: dict[str, Any]) -> None:
        atomic.write_json(self.out / "summary.json", summary)


def check_folder(options: Config, out: Path, resume: bool) -> None:
    """A run that is there has these options, and is to be resumed"""
    if (out / "config.json").exists():
        if not resume:
            raise ValueError(f"{out} holds a run already; resume it (--resume), or name another folder (--out)")
        check_same(options, config.read_json(out / "config.json"), out)


def check_same(new: Config, old: Config, out: Path) -> None:
    """A run is continued with the options it began with; it may be made longer, and its data may have moved."""
    free = {"rounds", "data_dir"}
    a, b = new.to_json(), old.to_json()
    for name in a:
        if name not in free and a[name] != b[name]:
            raise ValueError(f"{out} was begun with {name}={b[name]!r}, not {a[name]!r}; name another folder (--out)")


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def append(metrics: Path, record: dict[str, Any]) -> None:
    with atomic.naming(metrics), open(metrics, "a", opener=_no_link) as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def keep_rounds(metrics: Path, last: int) -> None:
    """Drops what was recorded after the checkpoint, up to which every round must be there"""
    records = [record for record in read_metrics(metrics) if record["round"] <= last]
    first = next((r for r, record in enumerate(records) if record["round"] != r), len(records))
    if first <= last:
        raise ValueError(
            f"{metrics} lacks round {first}, though the checkpoint is of round {last}; "
            f"delete {metrics.parent}, or name another folder"
        )
    atomic.write(metrics, "".join(json.dumps(record) + "\n" for record in records))
