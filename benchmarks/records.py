"""What pytest-benchmark wrote of each contest, read again."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.plots import SHOWN

FRESH = "fastagg, fresh output"


class Record(dict):
    """One contest: job, model, K, dtype, bytes, numel, ms of every contestant"""

    @property
    def cohort(self) -> tuple:
        return self["model"], self["K"], self["dtype"]

    @property
    def where(self) -> str:
        dtype = "" if self["dtype"] == "float32" else f", {self['dtype']}"
        return f"{self['K']} x {self['model']}{dtype}"

    def median(self, contestant: str | None = None) -> float:
        return self["ms"][contestant or self["job"]]["median"]

    @property
    def roof(self) -> float:
        return max(self.median(floor) for floor in ("R", "F") if floor in self["ms"])

    @property
    def others(self) -> list[str]:
        return [name for name in self["ms"] if name not in ("R", "F", self["job"])]

    @property
    def ours(self) -> float:
        """With a new model as result, as PyTorch's code has; the job itself is with out= where it can be"""
        return self.median(FRESH if FRESH in self["ms"] else None)

    @property
    def usual_name(self) -> str | None:
        return next((name for name in ("usual PyTorch", "usual loop") if name in self["ms"]), None)

    @property
    def usual(self) -> float | None:
        return None if self.usual_name is None else self.median(self.usual_name)

    @property
    def best(self) -> float | None:
        """Of PyTorch's code for the same job"""
        names = ("best PyTorch", "torch._foreach_", "add_ loop", "stack + matmul")
        return min((self.median(c) for c in names if c in self["ms"]), default=None)


def load(path: Path) -> list[Record]:
    benchmarks = json.loads(path.read_text())["benchmarks"]
    return [Record(b["extra_info"]) for b in benchmarks if "ms" in b.get("extra_info", {})]


def find(records: list[Record], job: str, cohort: tuple = SHOWN, **info) -> Record | None:
    for record in records:
        if record["job"] == job and record.cohort == cohort and all(record.get(k) == v for k, v in info.items()):
            return record
    return None


def in_ms(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2f} ms"


def spread(record: Record) -> float:
    """Half the distance of the quartiles, in per cent of the median"""
    ms = record["ms"][record["job"]]
    return 50 * (ms["high"] - ms["low"]) / ms["median"]
